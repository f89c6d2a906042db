"""The top-k kernels in Numba's simulator: small shapes, compared with the fallback. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate_topk.py few|all

A process of its own, because Numba looks at that variable when it is first imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from blazeproto.router import fallback, topk, topk_route, topk_route_backward

# (T, E, K, options): one lane to eight a token, lists of 1 to 16, one group of eight experts a lane to four, some of them cut
# short; K = E; rows read in 16 bytes (E a multiple of 8) and one by one. A third of them bf16.
CASES = [
    (5, 1, 1, {"score": "softmax_topk"}),
    (9, 8, 2, {"score": "softmax_topk"}),
    (3, 8, 8, {"score": "topk_softmax", "scale": 2.5}),
    (3, 37, 5, {"score": "softmax_topk", "renormalize": True}),
    (2, 70, 16, {"score": "sigmoid", "scale": 2.5, "biased": True}),
    (2, 140, 3, {"score": "sigmoid", "renormalize": False}),
    (3, 40, 8, {"score": "softmax_topk"}),
    (3, 128, 8, {"score": "softmax_topk"}),
    (2, 72, 16, {"score": "topk_softmax"}),
    (2, 200, 6, {"score": "sigmoid", "biased": True}),
    # groups of eight experts, of a single one, of three that share eights with others; keys whose sums are exact, and not
    (3, 48, 5, {"score": "sigmoid", "biased": True, "num_groups": 6, "top_groups": 2}),
    (3, 36, 7, {"score": "topk_softmax", "num_groups": 12, "top_groups": 4}),
    (3, 6, 2, {"score": "topk_softmax", "num_groups": 6, "top_groups": 3}),
    (2, 128, 8, {"score": "sigmoid", "biased": True, "scale": 2.5, "num_groups": 8, "top_groups": 3}),
]
FEW = [1, 2, 3, 4, 11]  # each score, fp32 and bf16, a bias, groups, one lane a token and more


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearly_tied(num_experts: int, top_k: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """(1, E) rows whose logits differ only in the bits that an expert's id takes in a key, the higher id being better."""
    close = (0x40200000 + np.arange(num_experts, dtype=np.uint32)).view(np.float32)[None]
    yield close
    some_clear = close.copy()  # the border between the last choice and the next expert is close
    some_clear[0, rng.permutation(num_experts)[: top_k - 1]] = 3 + np.arange(top_k - 1)
    yield some_clear
    if (num_experts, top_k) == (40, 8):
        # Two lanes. Of the pair, the better one has the higher id, and is dropped at first.
        lost_in_a_lane, lost_in_the_merge = ([0, 1, 2, 3, 4, 5, 6], (7, 32)), ([0, 1, 2, 3, 24, 25, 26], (7, 31))
        for clear, pair in (lost_in_a_lane, lost_in_the_merge):
            row = -1 - rng.random((1, num_experts), np.float32)
            row[0, clear] = 10 + np.arange(7)
            row[0, list(pair)] = close[0, :2]
            yield row


def check_case(num_tokens: int, num_experts: int, top_k: int, half: bool, options: dict) -> Iterator[str]:
    rng = np.random.default_rng(num_experts)
    options = dict(options)
    bias = rng.standard_normal(num_experts).astype(np.float32) if options.pop("biased", False) else None
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    logits[0] = np.round(logits[0])  # ties, -0 among them
    logits[-1] = 0
    logits[-1, (num_experts - 1) // 32 * 32] = 1  # the best of a lane is its last, the others are equal
    if num_tokens > 2:
        logits[1, num_experts // 2] = rng.choice([np.nan, np.inf, -np.inf])
    far_apart = rng.standard_normal((3, num_experts), np.float32) * [[1], [80], [3]] - [[200], [0], [92]]
    logits = np.concatenate([logits, *nearly_tied(num_experts, top_k, rng), far_apart]).astype(np.float32)
    given = to_bfloat16(logits) if half else logits
    logits = from_bfloat16(given) if half else logits

    groups = {name: options.pop(name, None) for name in ("num_groups", "top_groups")}
    scores, experts = topk_route(given, top_k, bias=bias, **groups, **options)
    right_scores, right = fallback.topk_route(logits, top_k, bias=bias, **groups, **options)
    if not np.array_equal(experts, right):
        yield f"experts\n{experts}\nexpected\n{right}"
    elif not np.allclose(scores, right_scores, rtol=1e-5, atol=1e-7, equal_nan=True):
        yield f"scores\n{scores}\nexpected\n{right_scores}"

    d_scores = rng.standard_normal(scores.shape).astype(np.float32)
    anyhow = rng.permuted(np.tile(np.arange(num_experts, dtype=np.int32), (len(logits), 1)), axis=1)[:, :top_k].copy()
    for chosen in (right, anyhow):  # by the kernel; as a balancing bias may choose, the best anywhere or not at all
        d_logits = topk_route_backward(given, chosen, d_scores, **options)
        d_logits = from_bfloat16(d_logits) if half else d_logits
        right_d = fallback.topk_route_backward(logits, chosen, d_scores, **options)
        if not np.allclose(d_logits, right_d, rtol=1e-2 if half else 1e-4, atol=1e-2 if half else 1e-6):
            yield f"d_logits\n{d_logits}\nexpected\n{right_d}"


def check_topk(part: str) -> Iterator[str]:
    topk.THREADS = 32  # the simulator runs a Python thread for each CUDA thread
    for index in FEW if part == "few" else range(len(CASES)):
        num_tokens, num_experts, top_k, options = CASES[index]
        half = index % 3 == 1
        for line in check_case(num_tokens, num_experts, top_k, half, options):
            yield f"T={num_tokens} E={num_experts} K={top_k} {options}{' bf16' if half else ''}: {line}"


if __name__ == "__main__":
    lines = list(check_topk(sys.argv[1]))
    print("\n".join(lines) or "as the twin")
    sys.exit(bool(lines))
