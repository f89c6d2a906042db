"""`Shown`: an object that IPython, Jupyter and rich show as tables, which are made when they are asked for."""

from typing import Any

import blazeproto  # `__init__.py`, which finds the lab when it is named


def lab_views() -> Any:
    """`blazeproto.lab.views`, imported when an object is shown."""
    return blazeproto.lab.views


class Shown:
    """The rich and the HTML view of a class of this package, both from one description, `blazeproto.lab.views.view`."""

    def __rich__(self) -> Any:
        return lab_views().view(self).__rich__()

    def _repr_html_(self) -> str:
        made: str = lab_views().view(self)._repr_html_()
        return made
