"""The specification: what the top-k kernels compute, in NumPy. Same names and signatures as in this package."""

from typing import Any

import numpy as np

from blazeproto.router.kinds import sums_to_one


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
    if sums_to_one(score, renormalize):
        scores = _softmax(_log_scores(np.take_along_axis(logits, experts, axis=1), score))
    else:
        scores = np.take_along_axis(_dense_scores(logits, score), experts, axis=1)
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
    gradient = (d_scores * scale).astype(logits.dtype)
    given = np.zeros_like(logits)  # by expert; 0 for those not chosen
    if sums_to_one(score, renormalize):
        chosen = np.take_along_axis(logits, experts, axis=1)
        share = _softmax(_log_scores(chosen, score))
        gradient = share * (gradient - (gradient * share).sum(axis=1, keepdims=True))
        if score == "sigmoid":
            gradient = gradient * _sigmoid(-chosen)  # the slope of log(sigmoid)
        np.put_along_axis(given, experts, gradient, axis=1)
        d_logits = given
    else:
        np.put_along_axis(given, experts, gradient, axis=1)
        dense = _dense_scores(logits, score)
        if score == "sigmoid":
            d_logits = given * dense * (1 - dense)
        else:
            d_logits = dense * (given - (given * dense).sum(axis=1, keepdims=True))
    return np.where(finite, d_logits, 0).astype(logits.dtype)


def _dense_scores(logits: np.ndarray, score: str) -> np.ndarray:
    """Every expert's score (T, E)."""
    return _sigmoid(logits) if score == "sigmoid" else _softmax(logits)


def _log_scores(logits: np.ndarray, score: str) -> np.ndarray:
    """Logarithms of scores, but for a term that all experts of a token share; see `blazeproto.router.scoring.log_scores`."""
    return np.minimum(logits, 0) - np.log1p(np.exp(-np.abs(logits))) if score == "sigmoid" else logits


def _softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
