"""Routings to dispatch: by name, as NumPy arrays (T, K) of ids that are distinct in each row."""

import numpy as np

from blazeproto.dispatch import Dispatch

KINDS = ("random", "zipf", "same", "one_expert_busy", "sentinels", "nobody_here")
LISTS = (
    "expert_pair_indices",
    "expert_token_offsets",
    "token_index_map",
    "token_expert_indices",
    "expert_token_indices",
    "overflow",
)


def make_routing(kind: str, num_tokens: int, num_experts: int, top_k: int, seed: int = 0, dtype: str = "int32"):
    """Each row draws K experts without replacement: the K smallest of E exponential clocks, their rates the weights."""
    rng = np.random.default_rng(seed)
    if kind == "same":
        return np.tile(rng.permutation(num_experts)[:top_k].astype(dtype), (num_tokens, 1))
    weights = np.ones(num_experts)
    if kind == "zipf":
        weights = 1 / np.arange(1, num_experts + 1) ** 1.2
    if kind == "one_expert_busy":
        weights[num_experts // 2] = 1e6
    clocks = rng.standard_exponential((num_tokens, num_experts), dtype=np.float32) / weights.astype(np.float32)
    ids = np.argpartition(clocks, top_k - 1, axis=1)[:, :top_k] if top_k < num_experts else np.argsort(clocks, axis=1)
    ids = ids.astype(dtype)
    if kind == "sentinels":  # every way of not being in [0, E)
        outside = np.array([-1, num_experts, num_experts + 7, -(2**31), 2**31 - 1])
        if dtype == "int64":  # some whose lower half is an expert's id
            outside = np.append(outside, [2**32, 2**32 + num_experts - 1, 1 - 2**32, -(2**63), 2**63 - 1])
        ids = np.where(rng.random(ids.shape) < 0.4, rng.choice(outside, ids.shape), ids).astype(dtype)
    if kind == "nobody_here":
        ids[...] = -1
    return ids


def make_foreign(num_tokens: int, num_experts: int, top_k: int, seed: int = 0, dtype: str = "int32"):
    """Ids (T, K) of a rank that has experts [0, E) of 8·E, so that K may pass E: distinct in each row, most of them outside."""
    return make_routing("random", num_tokens, 8 * num_experts, top_k, seed, dtype)


def capacities(num_rows: int) -> list[int]:
    """Capacities that none, the last, some and all of so many rows overflow."""
    return sorted({num_rows + 10**6, num_rows, max(num_rows - 1, 0), num_rows // 2, 0})


def make_varying(num_tokens: int, num_experts: int, seed: int = 0, spare: int = 5):
    """pair_experts (P,), pair_tokens (P,), token_offsets (T+1,): 0 to E experts a token, then unused pairs."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, min(num_experts, 9) + 1, num_tokens)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.repeat(np.arange(num_tokens), counts)
    rotation = np.repeat(rng.integers(0, num_experts, num_tokens), counts)
    experts = (np.arange(len(tokens)) - offsets[tokens] + rotation) % num_experts  # neighbours, so distinct
    pair_experts = np.concatenate([experts, np.full(spare, -1)]).astype(np.int32)
    pair_tokens = np.concatenate([tokens, np.zeros(spare)]).astype(np.int32)
    return pair_experts, pair_tokens, offsets


def to_numpy(array) -> np.ndarray:
    """From torch, CuPy or NumPy."""
    if hasattr(array, "cpu"):
        return array.cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def differences(got: Dispatch, expected: Dispatch) -> list[str]:
    """One line for each list that differs, with the first places where it does."""
    lines = []
    for name in LISTS:
        mine, right = getattr(got, name), getattr(expected, name)
        if mine is None and right is None:  # overflow of a dispatch without a capacity
            continue
        mine, right = to_numpy(mine), to_numpy(right)
        if mine.shape != right.shape or mine.dtype != right.dtype:
            lines.append(f"{name}: expected {right.dtype}{right.shape}, got {mine.dtype}{mine.shape}")
        elif (where := np.flatnonzero(mine != right)).size:
            first = ", ".join(f"[{i}] {mine[i]} for {right[i]}" for i in where[:5])
            lines.append(f"{name}: {where.size} of {right.size} differ: {first}")
    return lines
