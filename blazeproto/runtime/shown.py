"""`Shown`: an object that IPython, Jupyter and rich show as tables, which are made when they are asked for."""

import shutil
from contextlib import suppress
from typing import Any

import blazeproto  # `__init__.py`, which finds the lab when it is named


def lab_views() -> Any:
    """`blazeproto.lab.views`, imported when an object is shown."""
    return blazeproto.lab.views


class Shown:
    """The rich and the HTML view of a class of this package, both from one description, `blazeproto.lab.views.view`."""

    def __rich__(self) -> Any:
        return lab_views().view(self).__rich__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._repr_pretty_ = Shown._repr_pretty_  # type: ignore[method-assign]  # IPython looks where __repr__ is

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython calls; in a list or the like it gets the repr, and of a kernel where there is no compiler, or no rich."""
        text = repr(self)
        if len(printer.stack) == 1:
            with suppress(RuntimeError, ImportError):
                made = lab_views().view(self)
                text = made.text(min(made.width, shutil.get_terminal_size((made.width, 24)).columns))
        printer.text(text)

    def _repr_html_(self) -> str | None:
        """What Jupyter calls; where there is no rich it gets None, and shows the repr."""
        with suppress(ImportError):
            made: str = lab_views().view(self)._repr_html_()
            return made
        return None
