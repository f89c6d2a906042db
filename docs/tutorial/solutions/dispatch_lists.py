"""Solution of `dispatch_lists`."""

from __future__ import annotations

import numpy as np


def dispatch_lists(topk_experts: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    experts = topk_experts.reshape(-1)
    here = (experts >= 0) & (experts < num_experts)
    keys = np.where(here, experts, num_experts)  # what is not here comes last
    offsets = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=num_experts + 1)[:num_experts])])
    pairs = np.argsort(keys, kind="stable")
    index_map = np.full(experts.size, -1)
    index_map[pairs[: offsets[-1]]] = np.arange(offsets[-1])
    pairs[offsets[-1] :] = -1
    return pairs, offsets, index_map
