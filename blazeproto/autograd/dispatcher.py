"""The old home of `mlp.dispatched_mlp` and of the names in `ranks`, to be removed after one release.

Each name warns, and says where it is now.
"""

import importlib
import warnings
from typing import Any

_HOME_OF = {"dispatched_mlp": "blazeproto.autograd.mlp"}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'blazeproto.autograd.dispatcher' has no attribute {name!r}")
    home = _HOME_OF.get(name, "blazeproto.autograd.ranks")
    warnings.warn(f"blazeproto.autograd.dispatcher.{name} is {home}.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), name)
