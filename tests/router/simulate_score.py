"""The router's kernels in Numba's simulator, with one kind of scores, compared with the fallback. Fails where they differ.
The PTX machine runs them at more shapes.

    NUMBA_ENABLE_CUDASIM=1 python simulate_score.py NAME

A process of its own, because Numba looks at that variable when it is first imported.
"""

from __future__ import annotations

import sys

import numpy as np
from adverse_scores import make_scores, size_of

from blazeproto.router import (
    choose_pairs,
    fallback,
    hash_route,
    losses,
    pairs,
    routing_losses,
    routing_losses_backward,
    score_pairs,
    score_pairs_backward,
    topk,
    topk_route,
    topk_route_backward,
)
from blazeproto.router.kinds import WAYS
from blazeproto.router.scores import SCORES

LISTED, OFFSETS = np.array([0, 2, 1, 3, 5, 0, 6, -1], np.int32), np.array([0, 2, 3, 4, 5, 7], np.int32)


def check(made: object, right: object, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for mine, its in zip(*(a if isinstance(a, tuple) else (a,) for a in (made, right)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=rtol, atol=atol, equal_nan=True)


def main(score: str) -> None:
    rng = np.random.default_rng(0)
    logits, bias = 3 * rng.standard_normal((5, 7), np.float32), rng.standard_normal(7, np.float32)
    logits[0] -= 100  # so low that the scores may underflow
    d_losses = np.array(0.7, np.float32), np.array(-1.3, np.float32)
    experts = LISTED[:5, None].copy()
    made = routing_losses(logits, experts, score=score)
    check(made, fallback.routing_losses(logits, experts, score=score))
    slopes = (logits, made[0], *d_losses, 1)
    right = fallback.routing_losses_backward(*slopes, score=score)
    check(routing_losses_backward(*slopes, score=score), right, 1e-3, 1e-5)
    logits[2, 3] = np.nan
    for renormalize in (False, True):
        options = {"score": score, "renormalize": renormalize, "scale": 1.5}
        offsets = bias if SCORES[score].elementwise else None
        routed = topk_route(logits, 3, bias=offsets, **options)
        check(routed, fallback.topk_route(logits, 3, bias=offsets, **options))
        given = logits, routed[1], rng.standard_normal((5, 3), np.float32)
        check(topk_route_backward(*given, **options), fallback.topk_route_backward(*given, **options), 1e-3, 1e-5)
        given = logits, LISTED, OFFSETS
        check(score_pairs(*given, **options), fallback.score_pairs(*given, **options))
        given = (*given, rng.standard_normal(8, np.float32))
        check(score_pairs_backward(*given, **options), fallback.score_pairs_backward(*given, **options), 1e-3, 1e-5)
    scores, chosen = make_scores("ties", 12, 3, 2)
    draws = rng.random(3, np.float32)
    for by in WAYS:
        given = scores, chosen, by, size_of(by, 12, 2, 3), 39
        check(choose_pairs(*given, draws=draws), fallback.choose_pairs(*given, draws=draws))
    ids = np.array([0, 5, -1, 2**40 + 3, 50256], np.int64)
    check(hash_route(ids, 40, 3, seed=3), fallback.hash_route(ids, 40, 3, seed=3))


if __name__ == "__main__":
    # The simulator runs a Python thread for each CUDA thread.
    topk.THREADS = pairs.THREADS = pairs.SELECT_THREADS = losses.THREADS = 32
    losses.SUM_THREADS, losses.MAX_BLOCKS = 64, 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        main(sys.argv[1])
