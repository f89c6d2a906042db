"""Scores to choose experts by, by name: ties, tokens that all choose one expert, saturated scores, NaN."""

import numpy as np

from blazeproto.router.kinds import RULES


def make_scores(kind: str, num_tokens: int, num_experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """scores (T, E) and the token choice (T, K)."""
    rng = np.random.default_rng(num_tokens)
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "same":
        logits[:] = 0
    if kind == "one_expert":
        logits[:, 1] += 10
    if kind == "saturated":  # scores of exactly 0 and 1
        logits = np.sign(logits) * 200
    with np.errstate(over="ignore"):
        scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    if kind == "nan" and num_tokens:
        scores[[2, num_tokens // 2, num_tokens - 1]] = np.nan
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    return scores, experts


def size_of(by: str, num_tokens: int, top_k: int, num_experts: int) -> int:
    """A tile of a rule of token rounding; else an even number of tokens for each expert."""
    return 8 if by in RULES else min(-(-num_tokens * top_k // num_experts), num_tokens)
