"""The kernels of the router's linear map and losses in Numba's simulator, compared with the fallback. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate_linear.py

A process of its own, because Numba looks at that variable when it is first imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from blazeproto.router import (
    fallback,
    finish_logits,
    logits,
    losses,
    routing_losses,
    routing_losses_backward,
    split_gradient,
)

# (T, E, K, score, balance, z): one lane to 32 a token; several tokens a group; each loss alone, both, none.
CASES = [
    (5, 1, 1, "softmax_topk", True, True),
    (9, 8, 2, "sigmoid", True, True),
    (20, 37, 5, "softmax_topk", True, False),
    (3, 128, 8, "topk_softmax", False, True),
    (9, 70, 3, "sigmoid", True, False),
    (4, 7, 2, "softmax_topk", False, False),
]


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check_losses() -> Iterator[str]:
    for case in CASES:
        num_tokens, num_experts, top_k, score, balance, z = case
        rng = np.random.default_rng(num_experts)
        values = 3 * rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
        # some ids are not here
        everyone = np.tile(np.arange(-1, num_experts + 1, dtype=np.int32), (num_tokens, 1))
        experts = rng.permuted(everyone, axis=1)[:, :top_k].copy()
        options = {"score": score, "balance": balance, "z": z}
        made, right = routing_losses(values, experts, **options), fallback.routing_losses(values, experts, **options)
        for name, a, b in zip(("load", "balance_loss", "z_loss"), made, right, strict=True):
            if not np.allclose(a, b, rtol=1e-5):
                yield f"{case} {name}: {a}, expected {b}"
        if num_tokens > 2:
            values[1, 0], values[2] = np.inf, np.nan
            broken = [f(values, experts, **options) for f in (routing_losses, fallback.routing_losses)]
            if not all(np.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in zip(*broken, strict=True)):
                yield f"{case}, not finite: {broken}"
        slopes = (right[0], np.array(0.7, np.float32), np.array(-1.3, np.float32), top_k)
        d_logits = routing_losses_backward(values, *slopes, **options)
        right_d = fallback.routing_losses_backward(values, *slopes, **options)
        if not np.allclose(d_logits, right_d, rtol=1e-4, atol=1e-6 * np.abs(right_d).max()):
            yield f"{case} d_logits: {d_logits}, expected {right_d}"


def check_masked_losses() -> Iterator[str]:
    """With masked tokens all is as in the batch of the others."""
    for num_tokens, num_experts, top_k, score, balance, z in CASES[:3]:
        rng = np.random.default_rng(num_tokens)
        values = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
        everyone = np.tile(np.arange(num_experts, dtype=np.int32), (num_tokens, 1))
        experts = rng.permuted(everyone, axis=1)[:, :top_k].copy()
        options, slopes = {"score": score, "balance": balance, "z": z}, (np.float32(0.7), np.float32(-1.3), top_k)
        for kept in (np.arange(num_tokens) % 3 > 0, np.zeros(num_tokens, bool)):
            right = fallback.routing_losses(values[kept], experts[kept], **options)
            right_d = fallback.routing_losses_backward(
                values[kept], right[0], *map(np.array, slopes[:2]), top_k, **options
            )
            values[~kept], experts[~kept] = np.nan, -1
            for code in (sys.modules[__name__], fallback):
                made = code.routing_losses(values, experts, **options, masked=True)
                given = (values, made[0], *map(np.array, slopes[:2]), top_k)
                d_logits = code.routing_losses_backward(*given, **options, masked=True)
                same = all(np.allclose(a, b, rtol=1e-5) for a, b in zip(made, right, strict=True))
                if not same or d_logits[~kept].any() or not np.allclose(d_logits[kept], right_d, rtol=1e-4, atol=1e-6):
                    yield f"{num_tokens, num_experts, options}, masked: {made}, expected {right}; {d_logits}, {right_d}"


def check_logits() -> Iterator[str]:
    for num_tokens, num_experts in ((1, 1), (9, 8), (20, 37), (3, 70)):
        rng = np.random.default_rng(num_experts)
        products = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
        products[-1, 0] = np.inf
        right = fallback.finish_logits(products)
        if not np.array_equal(finish_logits(products.copy()), right, equal_nan=True):
            yield f"finish_logits: T={num_tokens} E={num_experts}"
        for parts in (2, 3):
            d_logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
            d_logits[0, :4] = [np.nan, np.inf, 3.4e38, 1e-44][:num_experts]
            with np.errstate(invalid="ignore"):
                made = split_gradient(d_logits, right, parts)
            right_split = fallback.split_gradient(d_logits, right, parts)
            if not np.array_equal(from_bfloat16(made), from_bfloat16(right_split), equal_nan=True):
                yield f"split_gradient: T={num_tokens} E={num_experts}, {parts} parts"


if __name__ == "__main__":
    losses.THREADS = logits.THREADS = 64  # the simulator runs a Python thread for each CUDA thread
    losses.SUM_THREADS = 128
    losses.MAX_BLOCKS = losses.MAX_BACKWARD_BLOCKS = 2  # so that groups have several tokens
    wrong = [*check_losses(), *check_masked_losses(), *check_logits()]
    print("\n".join(wrong) or "as the twins")
    sys.exit(bool(wrong))
