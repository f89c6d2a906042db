"""``method="sort"``: the sorting baseline that MoEBlaze §4.2 argues against, by CuPy's stable radix sort.

    topk_experts, flat       2 3 0 1 0 3 1 2 0 3        the pairs are 0 1 2 … 9
    sorted, stably           0 0 0 1 1 2 2 3 3 3
    argsort                  2 4 8 3 6 0 7 1 5 9        expert_pair_indices
    its inverse              5 7 0 3 1 8 4 6 2 9        token_index_map

It allocates inside CuPy and may wait for the device: a baseline to measure, and the way out for shapes that tiled.py
refuses.
"""

from collections.abc import Sequence
from typing import Any

from blazeproto.runtime.arrays import DeviceArray, simulated
from blazeproto.runtime.memory import as_cupy
from blazeproto.runtime.target import is_target


def workspace_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    """None: CuPy has memory of its own."""
    return 0


def kernels(num_tokens: int, top_k: int, num_experts: int, ids: str) -> tuple[()]:
    """None of ours."""
    return ()


def run(
    ids: Any,
    lists: Sequence[Any],
    workspace: Any,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    device: int,
    stream: int,
) -> None:
    """Fill the lists, on CuPy's current device and stream, which are ``device`` and ``stream``. ValueError without a GPU."""
    if simulated() or is_target(device):
        where = "in Numba's simulator" if simulated() else "where launches go to a target"
        raise ValueError(f"method: expected 'tiled' or 'dense' {where}, got 'sort', which needs CuPy and a GPU")
    import cupy

    def array(address: int, size: int, dtype: str = "int32") -> Any:
        return as_cupy(DeviceArray(address, (size,), dtype, (1,), device, None))

    num_pairs = num_tokens * top_k
    experts = array(ids, num_pairs, "int64" if len(lists) == 4 else "int32")
    valid = (experts >= 0) & (experts < num_experts)
    narrow = "uint16" if num_experts < 2**16 else "uint32"  # a radix sort's passes go with the key's width
    keys = cupy.where(valid, experts, num_experts).astype(narrow)  # pairs without an expert come last
    order = cupy.argsort(keys, kind="stable")
    keys = keys[order]
    has_row = keys < num_experts
    array(lists[0], num_pairs)[...] = cupy.where(has_row, order, -1)
    array(lists[1], num_experts + 1)[...] = cupy.searchsorted(keys, cupy.arange(num_experts + 1, dtype=narrow))
    array(lists[2], num_pairs)[order] = cupy.where(has_row, cupy.arange(num_pairs), -1)
    for copy in lists[3:]:
        array(copy, num_pairs)[...] = cupy.where(valid, experts, -1)
