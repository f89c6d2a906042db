"""The kernels of choices and hash routing in Numba's simulator: small shapes, compared with the fallback. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate_choices.py few|select|scores

A process of its own, because Numba looks at that variable when it is first imported. The selection runs in the strict simulator
of tests/dispatch, where a race or an index outside an array is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))
from adverse_scores import make_scores, size_of
from strict import strict

from blazeproto.router import (
    choose_pairs,
    fallback,
    hash_route,
    pairs,
    score_pairs,
    score_pairs_backward,
    topk,
)
from blazeproto.router.kinds import RULES, WAYS
from blazeproto.runtime import arrays

# (T, E, K, kind): no token, one; E = 1; K = E; tokens and experts that are no multiples of a word; more experts than a tile
SHAPES = [(0, 3, 2, "normal"), (1, 1, 1, "normal"), (70, 5, 2, "normal"), (75, 3, 3, "ties"), (40, 140, 3, "normal")]
ADVERSE = [(67, 4, 2, "same"), (65, 6, 2, "one_expert"), (66, 5, 2, "saturated"), (70, 3, 1, "nan")]


def check_choice(kind: str, num_tokens: int, num_experts: int, top_k: int, by: str, size: int) -> Iterator[str]:
    scores, experts = make_scores(kind, num_tokens, num_experts, top_k)
    draws = np.random.default_rng(0).random(num_experts, dtype=np.float32)
    max_pairs = num_tokens * num_experts + 3
    expected = fallback.choose_pairs(scores, experts, by, size, max_pairs, draws=draws)
    out = [np.full(right.shape, -7, np.int32) for right in expected]
    choose_pairs(scores, experts, by, size, max_pairs, draws=draws, out=out)
    for name, got, right in zip(("pair_experts", "pair_tokens", "token_offsets", "load"), out, expected, strict=True):
        if not np.array_equal(got, right):
            yield f"{kind} T={num_tokens} E={num_experts} K={top_k} {by} {size}: {name}\n{got}\nexpected\n{right}"


def check_masked(by: str, num_tokens: int, masked: int) -> Iterator[str]:
    """With the last tokens masked the pairs are those of the others alone. What lies at masked tokens is not read."""
    scores, experts = make_scores("ties", num_tokens, 3, 2)
    draws, kept = np.random.default_rng(0).random(3, dtype=np.float32), num_tokens - masked
    size = size_of(by, kept, 2, 3)
    right = fallback.choose_pairs(scores[:kept], experts[:kept], by, size, 3 * num_tokens, draws=draws)
    right = [*right[:2], np.pad(right[2], (0, masked), mode="edge"), right[3]]
    scores[kept:], experts[kept:] = np.nan, -1
    made = [np.full(array.shape, -7, np.int32) for array in right]
    views = [arrays.view(np.ascontiguousarray(array)) for array in (scores, experts, draws, *made)]
    pairs.launch_choice((0, 0), tuple(views), by, (), 0, arrays.view(np.array([kept, size], np.int32)))
    for name, got, expected in zip(("pair_experts", "pair_tokens", "token_offsets", "load"), made, right, strict=True):
        if not np.array_equal(got, expected):
            yield f"{masked} of {num_tokens} tokens masked, {by} {size}: {name}\n{got}\nexpected\n{expected}"


def check_few() -> Iterator[str]:
    """Each way once, of `check_select`'s, and some of `check_scores`'s."""
    pairs.SELECT_THREADS = pairs.THREADS = 32
    pairs.LIST_CHUNKS = pairs.COUNT_CHUNKS = 2
    with strict():
        for by in WAYS:
            yield from check_choice("ties", 36, 3, 2, by, size_of(by, 36, 2, 3))
        for by in RULES:  # a tile of 1, where too few tokens come to round
            yield from check_choice("ties", 20, 3, 2, by, 1)
        for by in ("nr_f", "expert_choice", "score"):
            yield from check_masked(by, 36, 13)
    yield from check_scores([(6, 5)], [(7, 3)])


def check_select() -> Iterator[str]:
    pairs.SELECT_THREADS = pairs.THREADS = 32  # the simulator runs a Python thread for each CUDA thread
    pairs.LIST_CHUNKS = 2  # some of several groups of tokens
    pairs.COUNT_CHUNKS = 3
    with strict():
        for num_tokens, num_experts, top_k, kind in SHAPES + ADVERSE:
            for by in WAYS if num_experts < 100 else ("nr_f", "score"):
                size = size_of(by, num_tokens, top_k, num_experts)
                yield from check_choice(kind, num_tokens, num_experts, top_k, by, size)
        for by in ("expert_choice", "slot", "score", "token"):
            for size in (0, 40):  # nothing and everything
                yield from check_choice("ties", 40, 3, 2, by, size)
        for by in WAYS:
            for masked in (1, 30, 35, 36):
                yield from check_masked(by, 36, masked)
        yield from check_choice("one_expert", 65, 2, 1, "up", 1)
        yield from check_choice("one_expert", 65, 2, 1, "up", 128)  # no multiple fits


def check_scores(
    shapes: Sequence[tuple[int, int]] = ((0, 4), (6, 5), (4, 70)),
    hashed: Sequence[tuple[int, int]] = ((1, 1), (7, 7), (40, 3), (100, 5)),
) -> Iterator[str]:
    """shapes: (T, E), of scores and their gradients.  hashed: (E, K)."""
    pairs.THREADS = topk.THREADS = 32
    rng = np.random.default_rng(0)
    for num_tokens, num_experts in shapes:
        logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32) * 3
        mask = rng.random(logits.shape) < 0.6
        if num_tokens:
            logits[1], mask[2] = np.nan, False  # a broken token, and one without a pair
            logits[3, 0], mask[3, 0] = (np.nan, np.inf)[num_experts % 2], True  # one that has a broken logit
            logits[0] -= 200  # every sigmoid underflows
        used = int(mask.sum())
        listed = np.concatenate([np.nonzero(mask)[1], [-1] * 5]).astype(np.int32)
        offsets = np.concatenate([[0], mask.sum(axis=1).cumsum()]).astype(np.int32)
        d_scores = rng.standard_normal(used + 5).astype(np.float32)
        for score in ("softmax_topk", "sigmoid"):
            for renormalize in (False, True):
                options = {"score": score, "renormalize": renormalize, "scale": 1.5}
                got = score_pairs(logits, listed, offsets, **options)
                right = fallback.score_pairs(logits, listed, offsets, **options)
                if not np.allclose(got, right, rtol=1e-5, atol=1e-12, equal_nan=True):
                    yield f"T={num_tokens} E={num_experts} {options}: scores\n{got}\nexpected\n{right}"
                got = score_pairs_backward(logits, listed, offsets, d_scores, **options)
                right = fallback.score_pairs_backward(logits, listed, offsets, d_scores, **options)
                if not np.allclose(got, right, rtol=1e-4, atol=1e-6):
                    yield f"T={num_tokens} E={num_experts} {options}: d_logits\n{got}\nexpected\n{right}"
    ids = np.array([0, 5, -1, 2**40 + 3, 50256], np.int64)
    for num_experts, top_k in hashed:
        got, right = (f(ids, num_experts, top_k, seed=3) for f in (hash_route, fallback.hash_route))
        if not np.array_equal(got, right):
            yield f"hash E={num_experts} K={top_k}\n{got}\nexpected\n{right}"


if __name__ == "__main__":
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        lines = list({"few": check_few, "select": check_select, "scores": check_scores}[sys.argv[1]]())
    print("\n".join(lines) or "as the twins")
    sys.exit(bool(lines))
