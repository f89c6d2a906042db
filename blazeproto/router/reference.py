"""The specification: what the router's kernels compute, in NumPy. Same names and signatures as in this package."""

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


def routing_losses(
    logits: np.ndarray,
    experts: np.ndarray,
    *,
    score: str = "softmax_topk",
    balance: float = 1.0,
    z: float = 1.0,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """load (E,) int32 and the two losses (), of the logits' dtype; see `blazeproto.router.routing_losses`."""
    num_tokens, num_experts = logits.shape
    here = experts[(experts >= 0) & (experts < num_experts)]
    load = np.bincount(here, minlength=num_experts).astype(np.int32)
    balance_loss = z_loss = np.zeros((), logits.dtype)
    if balance:
        probabilities = _softmax(_log_scores(logits, score))
        balance_loss = balance * num_experts * (load / experts.size * probabilities.sum(axis=0)).sum() / num_tokens
    if z:
        z_loss = z * (_log_sum(logits) ** 2).sum() / num_tokens
    return load, np.asarray(balance_loss, logits.dtype), np.asarray(z_loss, logits.dtype)


def routing_losses_backward(
    logits: np.ndarray,
    load: np.ndarray,
    d_balance_loss: np.ndarray,
    d_z_loss: np.ndarray,
    top_k: int,
    *,
    score: str = "softmax_topk",
    balance: float = 1.0,
    z: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> np.ndarray:
    """d_logits (T, E); see `blazeproto.router.routing_losses_backward`."""
    num_tokens, num_experts = logits.shape
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    logits = np.where(finite, logits, 0)
    weights = d_balance_loss * balance * num_experts * load / (num_tokens * top_k) / num_tokens
    probabilities = _softmax(_log_scores(logits, score))
    d_logits = probabilities * (weights - (weights * probabilities).sum(axis=1, keepdims=True))
    if score == "sigmoid":
        d_logits = d_logits * _sigmoid(-logits)
    d_logits = d_logits + d_z_loss * z * 2 * _log_sum(logits) * _softmax(logits) / num_tokens
    return np.where(finite, d_logits, 0).astype(logits.dtype)


def finish_logits(products: np.ndarray, parts: int = 1, *, out: Any = None, stream: Any = None) -> np.ndarray:
    """logits (T, E) of products (T, parts E); see `blazeproto.router.finish_logits`. Here always a new array."""
    logits = products.reshape(len(products), parts, products.shape[1] // parts).sum(axis=1)
    return np.where(np.isfinite(logits).all(axis=1, keepdims=True), logits, np.nan).astype(products.dtype)


def split_gradient(
    d_logits: np.ndarray, logits: np.ndarray, parts: int = 2, *, out: Any = None, stream: Any = None
) -> np.ndarray:
    """(T, parts E) bf16, as the upper halves of fp32 numbers in uint16; see `blazeproto.router.split_gradient`."""
    values = np.where(np.isnan(logits[:, :1]), 0, d_logits).astype(np.float32)
    high = _bfloat16(values)
    with np.errstate(invalid="ignore"):
        low = _bfloat16(values - (high.astype(np.uint32) << 16).view(np.float32))
    return np.concatenate((high, low, high)[:parts], axis=1)


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """(T, 1) logsumexp."""
    top = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16 number, ties to even; a NaN stays one."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
