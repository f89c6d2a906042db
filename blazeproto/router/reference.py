"""The specification: what the top-k kernels compute, in NumPy. Same names and signatures as in this package."""

from typing import Any

import numpy as np

from blazeproto.router.kinds import TINY, renormalizes


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
    """scores (T, K) and experts (T, K) int32 of logits (T, E); see `blazeproto.router.topk_route`.

    Scores are float32 for float32 logits and float64 for float64 ones.
    """
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    logits = np.where(finite, logits, 0)  # ties throughout: experts 0 … K-1
    keys = logits if bias is None else np.where(finite, _sigmoid(logits) + bias, 0)
    experts = np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    scores, _, _ = _scores(logits, experts, score, renormalize)
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
    """d_logits (T, E) from d_scores (T, K); see `blazeproto.router.topk_route_backward`."""
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    logits = np.where(finite, logits, 0)
    scores, total, dense = _scores(logits, experts, score, renormalize)
    gradient = d_scores * scale
    if total is not None:
        gradient = (gradient - (gradient * scores).sum(axis=1, keepdims=True)) / total
    d_dense = np.zeros_like(dense)
    np.put_along_axis(d_dense, experts, gradient.astype(dense.dtype), axis=1)
    if score == "sigmoid":
        d_logits = d_dense * dense * (1 - dense)
    else:
        d_logits = dense * (d_dense - (d_dense * dense).sum(axis=1, keepdims=True))
    return np.where(finite, d_logits, 0).astype(logits.dtype)


def _scores(
    logits: np.ndarray, experts: np.ndarray, score: str, renormalize: bool | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The chosen experts' scores (T, K) before scaling; the sum (T, 1) that they were divided by, None if by none; every
    expert's score (T, E).

    A softmax over the chosen logits is a softmax over all, renormalised.
    """
    if score == "sigmoid":
        dense = _sigmoid(logits)
    else:
        dense = np.exp(logits - logits.max(axis=1, keepdims=True))
        dense = dense / dense.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(dense, experts, axis=1)
    if score != "topk_softmax" and not renormalizes(score, renormalize):
        return chosen, None, dense
    total = chosen.sum(axis=1, keepdims=True) + TINY
    return chosen / total, total, dense


def _sigmoid(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
