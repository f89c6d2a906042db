"""blazeproto: Mixture-of-Experts training kernels for Hopper GPUs, small enough to read.

    from blazeproto import MoE
    layer = MoE(d_model=512, d_expert=256, num_experts=16, top_k=4)
    out, stats = layer(x)

The names below are imported when first used, so that ``blazeproto.dispatch`` and ``blazeproto.gemm`` stay usable
without importing torch, and everything imports on a machine without CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blazeproto.autograd import SavePolicy as SavePolicy
    from blazeproto.autograd import moe_mlp as moe_mlp
    from blazeproto.dispatch import Dispatch as Dispatch
    from blazeproto.dispatch import build_dispatch as build_dispatch
    from blazeproto.layer import MoE as MoE
    from blazeproto.router import Router as Router

__version__ = "0.1.0"

_HOME_OF = {
    "MoE": "blazeproto.layer",
    "Router": "blazeproto.router",
    "SavePolicy": "blazeproto.autograd",
    "moe_mlp": "blazeproto.autograd",
    "Dispatch": "blazeproto.dispatch",
    "build_dispatch": "blazeproto.dispatch",
}

__all__ = ["Dispatch", "MoE", "Router", "SavePolicy", "build_dispatch", "moe_mlp"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
