"""Wrong solutions of the NumPy exercises, each by one mistake that people make."""

from itertools import pairwise

import numpy as np


def by_token(topk_experts, num_experts):
    """The tokens of the rows, as in the paper, not the pairs."""
    pairs, offsets, index_map = sorted_by_expert(topk_experts, num_experts)
    return np.where(pairs < 0, -1, pairs // topk_experts.shape[1]), offsets, index_map


def not_inverted(topk_experts, num_experts):
    """The pairs of the rows twice, and no rows of the pairs."""
    pairs, offsets, _ = sorted_by_expert(topk_experts, num_experts)
    return pairs, offsets, pairs


def unstable(topk_experts, num_experts):
    """An expert's pairs in descending order."""
    pairs, offsets, _ = sorted_by_expert(topk_experts, num_experts)
    for first, last in pairwise(offsets):
        pairs[first:last] = pairs[first:last][::-1].copy()
    index_map = np.full(len(pairs), -1)
    index_map[pairs[: offsets[-1]]] = np.arange(offsets[-1])
    return pairs, offsets, index_map


def everyone_is_here(topk_experts, num_experts):
    """Ids outside [0, E) get rows too."""
    experts = topk_experts.reshape(-1)
    pairs = np.argsort(experts, kind="stable")
    offsets = np.searchsorted(experts[pairs], np.arange(num_experts + 1))
    return pairs, offsets, np.argsort(pairs)


def sorted_by_expert(topk_experts, num_experts):
    experts = topk_experts.reshape(-1)
    keys = np.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    pairs = np.argsort(keys, kind="stable")
    offsets = np.searchsorted(keys[pairs], np.arange(num_experts + 1))
    index_map = np.where(np.argsort(pairs) < offsets[-1], np.argsort(pairs), -1)
    pairs[offsets[-1] :] = -1
    return pairs, offsets, index_map


def by_row(d_act, act, expert_pair_indices):
    """In the order of the rows."""
    return np.where(expert_pair_indices < 0, 0, (d_act * act).sum(axis=1))


def mean_over_columns(d_act, act, expert_pair_indices):
    """The mean of the products, where the sum is wanted."""
    used = expert_pair_indices >= 0
    d_scores = np.zeros(len(expert_pair_indices))
    d_scores[expert_pair_indices[used]] = (d_act * act).mean(axis=1)[used]
    return d_scores


def into_the_last_pair(d_act, act, expert_pair_indices):
    """Index -1 is NumPy's last element."""
    d_scores = np.zeros(len(expert_pair_indices))
    d_scores[expert_pair_indices] = (d_act * act).sum(axis=1)
    return d_scores


WRONG = {
    "dispatch_lists": (by_token, not_inverted, unstable, everyone_is_here),
    "score_gradient": (by_row, mean_over_columns, into_the_last_pair),
}
