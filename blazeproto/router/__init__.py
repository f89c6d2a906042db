"""The choice of experts: logits, scores, choices, losses, the router module, and the kernels of all that.

    from blazeproto.router import Router, make_router     # the module, with torch
    from blazeproto.router import topk_route              # a kernel, without: torch, CuPy, Numba, JAX, NumPy arrays

Names load when they are first used, so that the kernels stay usable where torch is not imported. `fallback` holds the kernels'
functions in torch, which arrays in host memory run: NumPy's too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blazeproto.router.logits import finish_logits, logits_product, split_gradient
    from blazeproto.router.losses import routing_losses, routing_losses_backward
    from blazeproto.router.pairs import choose_pairs, score_pairs, score_pairs_backward
    from blazeproto.router.router import ROUTERS, Router, Routing, make_router, routing_stats
    from blazeproto.router.topk import hash_route, topk_route, topk_route_backward

_MODULE_OF = {
    "ROUTERS": "router",
    "Router": "router",
    "Routing": "router",
    "choose_pairs": "pairs",
    "finish_logits": "logits",
    "hash_route": "topk",
    "logits_product": "logits",
    "make_router": "router",
    "routing_losses": "losses",
    "routing_losses_backward": "losses",
    "routing_stats": "router",
    "score_pairs": "pairs",
    "score_pairs_backward": "pairs",
    "split_gradient": "logits",
    "topk_route": "topk",
    "topk_route_backward": "topk",
}

__all__ = [
    "ROUTERS",
    "Router",
    "Routing",
    "choose_pairs",
    "finish_logits",
    "hash_route",
    "logits_product",
    "make_router",
    "routing_losses",
    "routing_losses_backward",
    "routing_stats",
    "score_pairs",
    "score_pairs_backward",
    "split_gradient",
    "topk_route",
    "topk_route_backward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'blazeproto.router' has no attribute {name!r}")
    return getattr(importlib.import_module(f"blazeproto.router.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
