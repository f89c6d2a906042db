"""blazeproto: Mixture-of-Experts training kernels for Hopper GPUs, in readable Python and CUDA.

    from blazeproto import MoE
    layer = MoE(d_model=512, d_expert=256, num_experts=16, top_k=4)
    out, stats = layer(x)

Names and subpackages (``blazeproto.gemm``, ``.dispatch``, ``.router``, ``.lab``, ...) are imported when they are first used, so
that those without torch stay usable without it, and everything imports on a machine without CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blazeproto.autograd import SavePolicy, moe_mlp
    from blazeproto.dispatch import Dispatch, build_dispatch
    from blazeproto.gemm.recipe import Recipe
    from blazeproto.layer import MoE
    from blazeproto.router import Router

__version__ = "0.2.0"
__all__ = ["Dispatch", "MoE", "Recipe", "Router", "SavePolicy", "build_dispatch", "moe_mlp"]

_HOME_OF = {
    "MoE": "layer",
    "Recipe": "gemm.recipe",
    "Router": "router",
    "SavePolicy": "autograd",
    "moe_mlp": "autograd",
    "Dispatch": "dispatch",
    "build_dispatch": "dispatch",
}
_ROOMS = (
    *("activations", "autograd", "blocksparse", "cost", "dispatch", "distributed", "gemm", "integrations"),
    *("lab", "layer", "reference", "router", "runtime", "stored"),
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"blazeproto.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto' has no attribute {name!r}")
    return getattr(importlib.import_module(f"blazeproto.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
