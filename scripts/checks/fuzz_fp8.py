"""Random layers in fp8 on the GPU: kernels beside the torch backend, which quantizes alike; and ways that give the same bits."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import moe_mlp, quantize_weights
from blazeproto.gemm import Kernel, Sizes, fp8, quantize

DEVICE = "cuda"
OFF = 0.03  # of a result's norm: sums' order moves numbers over the steps of e4m3, and dW's scales are of 128 rows
DS_NORM = 0.2  # norm of dS over sqrt(P d), below which its errors are not relative to it
NAMES = ("out", "dx", "d_up", "d_down", "d_scores")
GATED = [name for name in ACTIVATIONS if activation_named(name).gated and not activation_named(name).alternating]


def draw_fp8(seed: int) -> tuple[Sizes, dict[str, Any]]:
    """The layer of a seed, and how it is called."""
    rng = random.Random(f"fp8 {seed}")
    experts = rng.choice([1, 2, 5, 16])
    widths = 16 * rng.randint(1, 40), 128 * rng.randint(1, 5)
    sizes = Sizes(rng.choice([0, 1, 7, 130, 700]), *widths, experts, rng.randint(1, min(experts, 8)))
    how: dict[str, Any] = {"activation": rng.choice(GATED), "save": rng.choice(["minimal", "recompute"])}
    how |= {"dtype": rng.choice([torch.bfloat16, torch.float32]), "absent": rng.choice([0.0, 0.3, 1.0])}
    return sizes, how


def kernels_of_fp8(seeds: range) -> list[Kernel]:
    """Those of the products; the others are compiled when they run."""
    of_products = {kernel for seed in seeds for kernel in fp8.kernels(draw_fp8(seed)[1]["activation"])}
    return [*of_products, *quantize.kernels()]


def check_fp8(seed: int, totals: dict[str, Any]) -> list[str]:
    """One run: lines that say what is wrong with it. Adds nothing to ``totals``."""
    (T, d, n, E, K, _), how = draw_fp8(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, device=DEVICE, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 2 else 1.0)
        return values.to(dtype).requires_grad_()

    x, d_out = (normal(T, d, dtype=torch.bfloat16) for _ in range(2))
    up, down = normal(E, 2 * n, d, dtype=how["dtype"]), normal(E, d, n, dtype=how["dtype"])
    scores = torch.rand(T, K, device=DEVICE, generator=generator).requires_grad_()
    drawn = torch.rand(T, E, device=DEVICE, generator=generator)
    ids = drawn.argsort(1)[:, :K].int()
    ids = ids.masked_fill(torch.rand(T, K, device=DEVICE, generator=generator) < how["absent"], -1)
    leaves = (x, up, down, scores)
    options: dict[str, Any] = {"activation": how["activation"], "save": how["save"], "precision": "fp8"}

    def run(**more: Any) -> list[Tensor]:
        out = moe_mlp(x, up, down, scores, ids, num_experts=E, **options, **more)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.detach())]

    made, lines = run(), list[str]()
    ways: dict[str, dict[str, Any]] = {"another run": {}, "keep_transposed": {"keep_transposed": True}}
    ways["quantize_weights"] = {"quantized": quantize_weights(up, down, dtype=torch.bfloat16)}
    for way, more in ways.items():
        others = [name for name, a, b in zip(NAMES, made, run(**more), strict=True) if not torch.equal(a, b)]
        lines += [f"fp8: {way} gives other bits of {', '.join(others)}"] if others else []
    for name, got, expected in zip(NAMES, made, run(backend="torch"), strict=True):
        off, norm = float((got.float() - expected.float()).norm()), float(expected.float().norm())
        least = DS_NORM * (scores.numel() * d) ** 0.5 if name == "d_scores" else 0.0
        if not off <= OFF * max(norm, least):
            lines.append(f"fp8: {name}: expected at most {OFF} of {norm:.4g} off the torch backend, got {off:.4g}")
    return lines
