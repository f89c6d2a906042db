"""Who goes where: top-k, the index lists of MoEBlaze §4, and the Numba kernels that build them.

    from blazeproto.dispatch import build_dispatch, topk_route

    scores, topk_experts = topk_route(logits, top_k)          # (T, E) logits -> (T, K) each
    dispatch = build_dispatch(topk_experts, num_experts)      # (T, K) ids: a torch, CuPy, Numba or JAX array on the GPU
    dispatch.expert_pair_indices, dispatch.expert_token_offsets, dispatch.token_index_map

Importing this needs neither Numba nor CuPy; calling does. `reference` holds the same functions in NumPy.
"""

from __future__ import annotations

from blazeproto.dispatch.build import build_dispatch, build_dispatch_varying, prepare_dispatch, workspace_bytes
from blazeproto.dispatch.structures import Dispatch
from blazeproto.dispatch.topk import topk_route, topk_route_backward

__all__ = [
    "Dispatch",
    "build_dispatch",
    "build_dispatch_varying",
    "prepare_dispatch",
    "topk_route",
    "topk_route_backward",
    "workspace_bytes",
]
