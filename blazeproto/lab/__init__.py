"""The lab: look at a kernel, change it, check it, see it run. Oracles and measures of accuracy, for tests too.

>>> from blazeproto.lab import Workbench
>>> bench = Workbench("up_forward", T=4096, d=512, n=512, E=16, K=4)
>>> bench.edit("my_kernels")             # copies the CUDA sources; change them, save, then
>>> bench.check()                        # against float64 on poisoned outputs, with a map of what is wrong

A name is imported when it is first used.
"""

import importlib
import warnings
from functools import partial
from typing import Any

_HOME_OF = {
    "BlockWorkbench": "block_workbench",
    "Workbench": "workbench",
    "explain": "explanation",
    "fragment": "layouts",
    "machine_code": "sass",
    "ring": "views",
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
    "ring",
    "swizzle",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"blazeproto.lab.{name}")
    if name in _MOVED:
        warnings.warn(f"blazeproto.lab.{name} is ptxsim.{name} now", DeprecationWarning, stacklevel=2)
        return _with_headers(name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto.lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"blazeproto.lab.{_HOME_OF[name]}"), name)
    globals()[name] = value  # over a module of the same name
    return value


def _with_headers(name: str) -> Any:
    """ptxsim's function, which finds the package's headers as it did here."""
    moved = getattr(importlib.import_module("ptxsim"), name)
    options = (f"-I{importlib.import_module('blazeproto.gemm.compile').CUDA_SOURCES}",)
    if name in ("run", "step"):
        return partial(moved, options=options)
    if name == "tensor_map":
        return moved
    return lambda streams, **how: moved([[{"options": options} | launch for launch in each] for each in streams], **how)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
