"""Assigns tokens to experts: the index lists of MoEBlaze §4, and the Numba kernels that build them.

    from blazeproto.dispatch import build_dispatch

    dispatch = build_dispatch(topk_experts, num_experts)      # (T, K) ids: a torch, CuPy, Numba, JAX or NumPy array
    dispatch.expert_pair_indices, dispatch.expert_token_offsets, dispatch.token_index_map

Importing this needs neither Numba nor CuPy; calling it with arrays of a GPU does. `reference` holds the same functions in NumPy,
which NumPy arrays, and torch's on a CPU, run.
"""

from blazeproto.dispatch.build import build_dispatch, build_dispatch_varying, prepare_dispatch, workspace_bytes
from blazeproto.dispatch.structures import Dispatch

__all__ = [
    "Dispatch",
    "build_dispatch",
    "build_dispatch_varying",
    "prepare_dispatch",
    "workspace_bytes",
]
