"""Old modules' names, to be removed after one release."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, home: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of an old module: each name warns, and says where it is now.

    module: its name.  home: the module that has its names now.  homes: by name, where those are that are elsewhere.
    """

    def found(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        where = homes.get(name, home)
        there = getattr(importlib.import_module(where), name)  # before a warning says that it is there
        warnings.warn(f"{module}.{name} is {where}.{name} now", DeprecationWarning, stacklevel=2)
        return there

    return found
