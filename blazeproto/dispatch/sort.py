"""``method="sort"``: the sorting baseline that MoEBlaze §4.2 argues against, by CuPy's stable radix sort.

    topk_experts, flat       2 3 0 1 0 3 1 2 0 3        the pairs are 0 1 2 … 9
    sorted, stably           0 0 0 1 1 2 2 3 3 3
    argsort                  2 4 8 3 6 0 7 1 5 9        expert_pair_indices
    its inverse              5 7 0 3 1 8 4 6 2 9        token_index_map

It allocates inside CuPy and may wait for the device: a baseline to measure, and the way out for shapes that tiled.py
refuses.
"""

from __future__ import annotations

from typing import Any


def build(
    topk_experts: Any, num_experts: int, expert_pair_indices: Any, expert_token_offsets: Any, token_index_map: Any
) -> None:
    """Fill the three outputs from flat ids (P,); all are CuPy arrays on the current device and stream."""
    import cupy

    num_pairs = topk_experts.size
    valid = (topk_experts >= 0) & (topk_experts < num_experts)
    narrow = "uint16" if num_experts < 2**16 else "uint32"  # a radix sort's passes go with the key's width
    keys = cupy.where(valid, topk_experts, num_experts).astype(narrow)  # pairs without an expert come last
    order = cupy.argsort(keys, kind="stable")
    keys = keys[order]
    expert_token_offsets[...] = cupy.searchsorted(keys, cupy.arange(num_experts + 1, dtype=narrow))
    has_row = keys < num_experts
    expert_pair_indices[...] = cupy.where(has_row, order, -1)
    token_index_map[order] = cupy.where(has_row, cupy.arange(num_pairs), -1)
