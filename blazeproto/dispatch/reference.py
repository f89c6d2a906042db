"""The specification: what a dispatch is, in NumPy. Same names and signatures as in this package."""

from typing import Any

import numpy as np

from blazeproto.dispatch.structures import Dispatch


def build_dispatch(
    topk_experts: np.ndarray,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: str = "tiled",
    validate: bool = False,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> Dispatch:
    """MoEBlaze §4.1's structures from topk_experts (T, K); see `blazeproto.dispatch.build_dispatch`.

    The result is unique, so method, out, workspace and stream change nothing here. ValueError with ``validate`` when a
    row names an expert twice.
    """
    num_tokens, top_k = topk_experts.shape
    if validate:
        check_distinct(topk_experts, num_experts)
    lists = _lists(topk_experts.reshape(-1), num_experts, row_capacity)
    return Dispatch(**lists, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)


def build_dispatch_varying(
    pair_experts: np.ndarray,
    pair_tokens: np.ndarray,
    token_offsets: np.ndarray,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: str = "tiled",
    validate: bool = False,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> Dispatch:
    """The same for a number of experts that varies; see `blazeproto.dispatch.build_dispatch_varying`."""
    return Dispatch(
        **_lists(pair_experts, num_experts, row_capacity),
        num_experts=num_experts,
        top_k=None,
        num_tokens=len(token_offsets) - 1,
        token_offsets=token_offsets,
        pair_tokens=pair_tokens,
    )


def _lists(experts: np.ndarray, num_experts: int, row_capacity: int | None) -> dict[str, Any]:
    """The lists of flat ids (P,), by name."""
    valid = (experts >= 0) & (experts < num_experts)
    keys = np.where(valid, experts, num_experts).astype(np.uint16 if num_experts < 2**16 else np.int64)
    lengths = np.bincount(keys, minlength=num_experts + 1)[:num_experts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    order = np.argsort(keys, kind="stable").astype(np.int32)  # by expert, ascending pairs inside one
    order[offsets[-1] :] = -1  # pairs without an expert have no row
    index_map = np.full(experts.size, -1, np.int32)
    index_map[order[: offsets[-1]]] = np.arange(offsets[-1], dtype=np.int32)
    ids = experts if experts.dtype == np.int32 else np.where(valid, experts, -1).astype(np.int32)
    overflow = None
    if row_capacity is not None:
        capacity = np.int32(min(row_capacity, experts.size))
        overflow = np.maximum(offsets[-1:] - capacity, 0)
        order, offsets = order[:capacity], np.minimum(offsets, capacity)
        index_map[index_map >= capacity] = -1
    return {
        "expert_pair_indices": order,
        "expert_token_offsets": offsets,
        "token_index_map": index_map,
        "token_expert_indices": ids,
        "overflow": overflow,
    }


def check_distinct(topk_experts: Any, num_experts: int) -> None:
    """ValueError if a row of topk_experts (T, K) names an expert twice. NumPy or CuPy; waits for the device."""
    rows = topk_experts.copy()
    rows.sort(axis=1)
    twice = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0) & (rows[:, 1:] < num_experts)
    if bool(twice.any()):
        token = int(twice.any(axis=1).argmax())
        row = topk_experts[token].tolist()
        raise ValueError(f"topk_experts: expected distinct experts in a token's row, got {row} for token {token}")
