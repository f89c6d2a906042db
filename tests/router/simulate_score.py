"""A kind of scores in all kernels that know it, in Numba's simulator, compared with the fallback. Fails where they differ.

    NUMBA_ENABLE_CUDASIM=1 python simulate_score.py NAME

A process of its own, because Numba looks at that variable when it is first imported.
"""

from __future__ import annotations

import sys

import numpy as np

from blazeproto.router import (
    fallback,
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


if __name__ == "__main__":
    topk.THREADS = pairs.THREADS = losses.THREADS = 32  # the simulator runs a Python thread for each CUDA thread
    losses.SUM_THREADS, losses.MAX_BLOCKS = 64, 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        main(sys.argv[1])
