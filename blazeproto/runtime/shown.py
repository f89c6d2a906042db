"""`Shown`: an object that IPython, Jupyter and rich show as tables, which are made when they are asked for."""

import importlib
from typing import Any


class Shown:
    """The rich and the HTML view of a class of this package, both from one description, `blazeproto.lab.views.view`.

    The lab is imported at a call alone: what shows itself there is imported by the lab.
    """

    def __rich__(self) -> Any:
        return importlib.import_module("blazeproto.lab.views").view(self).__rich__()

    def _repr_html_(self) -> str:
        made: str = importlib.import_module("blazeproto.lab.views").view(self)._repr_html_()
        return made
