"""The old name of `ptxsim`, to be removed after one release: each name of it warns, and says where it is now."""

import importlib
import warnings
from typing import Any

_HOME_OF = {"Machine": "blazeproto.lab.target", "run": "ptxsim.schedule", "run_together": "ptxsim.together"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'blazeproto.lab.machine' has no attribute {name!r}")
    home = _HOME_OF.get(name, "ptxsim")
    warnings.warn(f"blazeproto.lab.machine.{name} is {home}.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), name)
