"""The specification: what dispatch and top-k compute, in NumPy. Same names and signatures as in this package."""

from __future__ import annotations

from typing import Any

import numpy as np

from blazeproto.dispatch.structures import Dispatch


def build_dispatch(
    topk_experts: np.ndarray,
    num_experts: int,
    *,
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
    lists = _lists(topk_experts.reshape(-1), num_experts)
    return Dispatch(**lists, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)


def build_dispatch_varying(
    pair_experts: np.ndarray,
    pair_tokens: np.ndarray,
    token_offsets: np.ndarray,
    num_experts: int,
    *,
    method: str = "tiled",
    validate: bool = False,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> Dispatch:
    """The same for a number of experts that varies; see `blazeproto.dispatch.build_dispatch_varying`."""
    return Dispatch(
        **_lists(pair_experts, num_experts),
        num_experts=num_experts,
        top_k=None,
        num_tokens=len(token_offsets) - 1,
        token_offsets=token_offsets,
        pair_tokens=pair_tokens,
    )


def _lists(experts: np.ndarray, num_experts: int) -> dict[str, Any]:
    """The four lists of flat ids (P,), by name."""
    valid = (experts >= 0) & (experts < num_experts)
    keys = np.where(valid, experts, num_experts).astype(np.uint16 if num_experts < 2**16 else np.int64)
    lengths = np.bincount(keys, minlength=num_experts + 1)[:num_experts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    order = np.argsort(keys, kind="stable").astype(np.int32)  # by expert, ascending pairs inside one
    order[offsets[-1] :] = -1  # pairs without an expert have no row
    index_map = np.full(experts.size, -1, np.int32)
    index_map[order[: offsets[-1]]] = np.arange(offsets[-1], dtype=np.int32)
    ids = experts if experts.dtype == np.int32 else np.where(valid, experts, -1).astype(np.int32)
    return {
        "expert_pair_indices": order,
        "expert_token_offsets": offsets,
        "token_index_map": index_map,
        "token_expert_indices": ids,
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


# --- Top-k -----------------------------------------------------------------------------------------------------------

TINY = 1e-20


def topk_route(
    logits: np.ndarray,
    top_k: int,
    *,
    score: str = "softmax_topk",
    bias: np.ndarray | None = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """scores (T, K) and experts (T, K) int32 of logits (T, E); see `blazeproto.dispatch.topk_route`.

    Scores are float32 for float32 logits and float64 for float64 ones.
    """
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    logits = np.where(finite, logits, 0)  # ties throughout: experts 0 … K-1
    keys = logits if bias is None else np.where(finite, _sigmoid(logits) + bias, 0)
    experts = np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    scores, _ = _scores(logits, experts, score, renormalize)
    return np.where(finite, scores * logits.dtype.type(scale), np.nan).astype(logits.dtype), experts


def topk_route_backward(
    logits: np.ndarray,
    experts: np.ndarray,
    d_scores: np.ndarray,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> np.ndarray:
    """d_logits (T, E) from d_scores (T, K); see `blazeproto.dispatch.topk_route_backward`."""
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    logits = np.where(finite, logits, 0)
    scores, dense = _scores(logits, experts, score, renormalize)
    chosen = np.take_along_axis(dense, experts, axis=1)  # the scores before renormalising
    gradient = d_scores * scale
    if score == "topk_softmax" or (renormalize is None and score == "sigmoid") or renormalize:
        gradient = (gradient - (gradient * scores).sum(axis=1, keepdims=True)) / (
            chosen.sum(axis=1, keepdims=True) + TINY
        )
    d_dense = np.zeros_like(dense)
    np.put_along_axis(d_dense, experts, gradient.astype(dense.dtype), axis=1)
    if score == "sigmoid":
        d_logits = d_dense * dense * (1 - dense)
    else:
        d_logits = dense * (d_dense - (d_dense * dense).sum(axis=1, keepdims=True))
    return np.where(finite, d_logits, 0).astype(logits.dtype)


def _scores(
    logits: np.ndarray, experts: np.ndarray, score: str, renormalize: bool | None
) -> tuple[np.ndarray, np.ndarray]:
    """(the chosen experts' scores (T, K) before scaling, every expert's score (T, E)).

    A softmax over the chosen logits is a softmax over all, renormalised.
    """
    if score == "sigmoid":
        dense = _sigmoid(logits)
    else:
        dense = np.exp(logits - logits.max(axis=1, keepdims=True))
        dense = dense / dense.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(dense, experts, axis=1)
    if score == "topk_softmax" or (score == "sigmoid" if renormalize is None else renormalize):
        chosen = chosen / (chosen.sum(axis=1, keepdims=True) + TINY)
    return chosen, dense


def _sigmoid(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
