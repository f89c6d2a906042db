"""The lab: look at a kernel, change it, check it, see it run. Oracles and measures of accuracy, for tests too.

>>> from blazeproto.lab import Workbench
>>> bench = Workbench("up_forward", T=4096, d=512, n=512, E=16, K=4)
>>> bench.edit("my_kernels")             # copies the CUDA sources; change them, save, then
>>> bench.check()                        # against float64 on poisoned outputs, with a map of what is wrong

A name is imported when it is first used.
"""

import importlib
import warnings
from typing import Any

_HOME_OF = {
    "BlockWorkbench": "block_workbench",
    "Workbench": "workbench",
    "explain": "explanation",
    "fragment": "layouts",
    "machine_code": "sass",
    "swizzle": "layouts",
}
_MOVED = ("run", "run_together", "step", "tensor_map")  # to ptxsim; to be removed after one release
_ROOMS = ("accuracy", "oracle", "same_bits", "target", "views", "workbench")
__all__ = [
    "BlockWorkbench",
    "Workbench",
    "explain",
    "fragment",
    "machine_code",
    "swizzle",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"blazeproto.lab.{name}")
    if name in _MOVED:
        warnings.warn(f"blazeproto.lab.{name} is ptxsim.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module("ptxsim"), name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto.lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"blazeproto.lab.{_HOME_OF[name]}"), name)
    globals()[name] = value  # over a module of the same name
    return value


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
