"""The specification: what the router's kernels compute, in NumPy. Same names and signatures as in this package."""

from typing import Any

import numpy as np

from blazeproto.router.kinds import RULES, sums_to_one
from blazeproto.runtime.rounding import bfloat16_bits, from_bfloat16_bits

# --- Top-k -------------------------------------------------------------------------------------------------------------------


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


# --- A number of experts that varies -----------------------------------------------------------------------------------------


def choose_pairs(
    scores: np.ndarray,
    experts: np.ndarray,
    by: str,
    size: int,
    max_pairs: int,
    *,
    draws: np.ndarray | None = None,
    out: Any = None,
    stream: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,) and load (E,); see `blazeproto.router.choose_pairs`."""
    num_tokens, num_experts = scores.shape
    top_k = experts.shape[1]
    slots = np.full(scores.shape, top_k)  # of the token choice; K where a token did not choose the expert
    if by != "expert_choice":
        np.put_along_axis(slots, experts.astype(np.int64), np.arange(top_k), axis=1)
    chosen = slots < top_k
    tokens = np.broadcast_to(np.arange(num_tokens)[:, None], scores.shape)
    broken = np.isnan(scores)
    first_score = np.where(broken, np.inf, scores).max(axis=1, initial=-np.inf, keepdims=True)
    # What is ranked by, the most significant last; each expert's tokens are a column.
    if by in RULES:
        keys = [tokens, -np.where(broken, chosen, scores), ~chosen]
    elif by == "expert_choice":
        keys = [tokens, -np.where(broken, np.inf, scores)]
    elif by == "token":
        keys = [tokens, ~chosen]
    else:
        keys = [tokens, np.broadcast_to(-first_score if by == "score" else 0, scores.shape), slots]
    order = np.lexsort(keys, axis=0)  # (T, E): by rank, the token

    counts = np.minimum(chosen.sum(axis=0) if by != "expert_choice" else size, np.full(num_experts, size))
    if by in RULES:
        ranked = np.take_along_axis(np.where(broken, 0, scores), order, axis=0)
        drawn = np.zeros(num_experts, np.float32) if draws is None else draws
        counts = _rounded(chosen.sum(axis=0), size, by, num_tokens, ranked, drawn)
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, np.arange(num_tokens)[:, None] < counts, axis=0)

    pair_experts, pair_tokens = np.full(max_pairs, -1, np.int32), np.zeros(max_pairs, np.int32)
    pairs = np.argwhere(mask)[:max_pairs]
    pair_tokens[: len(pairs)], pair_experts[: len(pairs)] = pairs.T
    token_offsets = np.minimum(np.concatenate([[0], mask.sum(axis=1).cumsum()]), max_pairs).astype(np.int32)
    return pair_experts, pair_tokens, token_offsets, counts.astype(np.int32)


def _rounded(
    counts: np.ndarray, tile: int, rule: str, num_tokens: int, ranked: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """counts (E,) as multiples of the tile; ranked (T, E): each expert's scores by rank. See `choices.rounded_counts`."""
    floor, ceil = counts // tile * tile, -(-counts // tile) * tile
    fits = ceil <= num_tokens
    up = np.full(counts.shape, rule == "up")
    if rule == "nr_f":
        up = ceil - counts < counts - floor
    elif rule == "sr_f":
        up = draws * np.float32(tile) < (counts - floor).astype(np.float32)
    elif rule == "nr_s":
        place = np.arange(num_tokens)[:, None]
        last_tile = np.where((place >= floor) & (place < ceil), ranked, 0).astype(np.float64)
        theirs = np.where(place < counts, last_tile, 0).sum(axis=0)
        up = draws * last_tile.sum(axis=0).astype(np.float32) < theirs.astype(np.float32)
    elif rule == "balance_f":
        nearest = (np.where(fits, counts, floor).cumsum() + (tile - 1) // 2) // tile * tile
        up = np.diff(nearest, prepend=0) > floor
    return np.where(up & fits, ceil, floor)


def score_pairs(
    logits: np.ndarray,
    pair_experts: np.ndarray,
    token_offsets: np.ndarray,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> np.ndarray:
    """scores (P,) of a list of pairs; see `blazeproto.router.score_pairs`."""
    mask, tokens = _pair_mask(logits, pair_experts, token_offsets)
    dense = _scores_together(logits, mask, score) if sums_to_one(score, renormalize) else _dense_scores(logits, score)
    scores = np.zeros(len(pair_experts), logits.dtype)
    scores[: len(tokens)] = dense[tokens, pair_experts[: len(tokens)]] * scale
    return scores


def score_pairs_backward(
    logits: np.ndarray,
    pair_experts: np.ndarray,
    token_offsets: np.ndarray,
    d_scores: np.ndarray,
    *,
    score: str = "softmax_topk",
    renormalize: bool | None = None,
    scale: float = 1.0,
    out: Any = None,
    stream: Any = None,
) -> np.ndarray:
    """d_logits (T, E) from d_scores (P,); see `blazeproto.router.score_pairs_backward`."""
    mask, tokens = _pair_mask(logits, pair_experts, token_offsets)
    given = np.zeros_like(logits)
    given[tokens, pair_experts[: len(tokens)]] = d_scores[: len(tokens)] * scale
    together = sums_to_one(score, renormalize)
    dense = _scores_together(logits, mask, score) if together else _dense_scores(logits, score)
    if score == "sigmoid" and not together:
        d_logits = given * dense * (1 - dense)
    else:
        d_logits = dense * (given - (given * dense).sum(axis=1, keepdims=True))
        if score == "sigmoid":
            d_logits = d_logits * _sigmoid(-logits)
    return np.nan_to_num(d_logits, nan=0.0)


def _pair_mask(
    logits: np.ndarray, pair_experts: np.ndarray, token_offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mask (T, E) of a list of pairs, and the token of each pair that is used."""
    tokens = np.repeat(np.arange(len(logits)), np.diff(token_offsets))
    mask = np.zeros(logits.shape, bool)
    mask[tokens, pair_experts[: len(tokens)]] = True
    return mask, tokens


def _scores_together(logits: np.ndarray, mask: np.ndarray, score: str) -> np.ndarray:
    """Scores (T, E) that sum to one over the experts of the mask; 0 for the others, and for all where there are none."""
    kept = np.where(mask, _log_scores(np.where(mask, logits, 0), score), -np.inf)
    top = kept.max(axis=1, keepdims=True)
    exponentials = np.exp(kept - np.where(mask.any(axis=1, keepdims=True), top, 0))
    return exponentials / np.where(mask.any(axis=1, keepdims=True), exponentials.sum(axis=1, keepdims=True), 1)


# --- Hash --------------------------------------------------------------------------------------------------------------------


def hash_route(
    token_ids: np.ndarray, num_experts: int, top_k: int, *, seed: int = 0, out: Any = None, stream: Any = None
) -> np.ndarray:
    """experts (T, K) int32 of token_ids (T,); see `blazeproto.router.hash_route`."""
    start = np.uint32(0x9E3779B9 * (seed + 1) & 0xFFFFFFFF)
    words = _mix(token_ids.astype(np.uint32) + start)[:, None] + np.uint32(0x9E3779B9) * np.arange(
        num_experts, dtype=np.uint32
    )
    weights = (_mix(words) >> np.uint32(8)).astype(np.int64)  # (T, E)
    return np.argsort(-weights, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 32-bit words that scatters them."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


# --- What these share --------------------------------------------------------------------------------------------------------


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
    balance: bool = True,
    z: bool = True,
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
        balance_loss = num_experts * (load / experts.size * probabilities.sum(axis=0)).sum() / num_tokens
    if z:
        z_loss = (_log_sum(logits) ** 2).sum() / num_tokens
    return load, np.asarray(balance_loss, logits.dtype), np.asarray(z_loss, logits.dtype)


def routing_losses_backward(
    logits: np.ndarray,
    load: np.ndarray,
    d_balance_loss: np.ndarray,
    d_z_loss: np.ndarray,
    top_k: int,
    *,
    score: str = "softmax_topk",
    balance: bool = True,
    z: bool = True,
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
    high = bfloat16_bits(values)
    with np.errstate(invalid="ignore"):
        low = bfloat16_bits(values - from_bfloat16_bits(high))
    return np.concatenate((high, low, high)[:parts], axis=1)


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """(T, 1) logsumexp."""
    top = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
