"""Stored weights on a GPU's kernels: 300 random layers have the bits of the bf16 kernels on decoded weights."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import stored
from blazeproto.autograd import LowRank, moe_mlp
from blazeproto.stored import StoredWeight

FORMATS = ("mxfp4", "nf4", "int4", "fp8")
RANK = 16


def weight_of(shape: tuple[int, int, int], format: str, *, zeros: bool) -> StoredWeight:
    """Scales differ from block to block."""
    powers = torch.randint(-3, 3, (*shape[:2], shape[2] // 32), device="cuda").float().exp2()
    numbers = torch.randn(shape, device="cuda") * powers.repeat_interleave(32, 2) * shape[2] ** -0.5
    made = stored.quantize(numbers.bfloat16(), format, (64, 64) if format == "fp8" else None)
    if not zeros:
        return made
    points = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8, made.scales.shape[2]), device="cuda")
    return stored.int4(made.values.view(torch.int32), made.scales, points.int(), group=made.block[1])


def factors_of(shape: torch.Size) -> LowRank:
    made = torch.randn(shape[0], RANK, shape[2], device="cuda"), torch.randn(shape[0], shape[1], RANK, device="cuda")
    a, b = ((0.1 * each).bfloat16().requires_grad_() for each in made)
    return LowRank(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(75))
def test_a_random_layer(format: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels for few rows, or without these, so that a ring and Ampere's tiles decode them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    E = draw.choice((1, 2, 3, 5, 8, 16, 40))
    T, K = draw.choice((1, 2, 17, 64, 129, 300, 700, 1500)), draw.randint(1, min(E, 4))
    d, n = 128 * draw.choice((1, 2, 3, 4, 6, 8)), 128 * draw.choice((1, 2, 3, 4, 5))
    if format != "int4" and draw.random() < 0.4:  # whose groups are of 128
        d, n = d - 64, n - 64
    weights = [
        weight_of(shape, format, zeros=format == "int4" and draw.random() < 0.5) for shape in ((E, 2 * n, d), (E, d, n))
    ]
    x, scores = (
        torch.randn(T, d, device="cuda").bfloat16().requires_grad_(),
        torch.rand(T, K, device="cuda").requires_grad_(),
    )
    order = torch.rand(T, E, device="cuda")
    order[:, : min(draw.choice((0, 0, 1, E // 2)), E - K)] -= 2  # experts without rows
    ids = order.topk(K, dim=1).indices.int()
    ids[torch.rand(T, K, device="cuda") < draw.choice((0.0, 0.2))] = -1
    up, down = (factors_of(weight.shape) for weight in weights)
    options: dict[str, Any] = {"num_experts": E, "activation": draw.choice(("swiglu", "alternating(clamped_swiglu)"))}
    if draw.random() < 0.5:
        options |= {
            "up_bias": torch.randn(E, 2 * n, device="cuda").bfloat16(),
            "down_bias": torch.randn(E, d, device="cuda").bfloat16(),
        }
    if draw.random() < 0.7:
        options |= {"up_factors": up, "down_factors": down}
    leaves = [x, scores, *up, *down] if "up_factors" in options else [x, scores]
    d_out = torch.randn(T, d, device="cuda").bfloat16()

    def results(backend: str, up_proj: Any, down_proj: Any) -> list[Tensor]:
        out = moe_mlp(x, up_proj, down_proj, scores, ids, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    decoded = [weight.decode() for weight in weights]
    for backend in ("hopper", "ampere"):
        expected = results(backend, *decoded)
        for few in (0, 64):
            monkeypatch.setattr("blazeproto.gemm.stored.FEW_ROWS", few)
            for index, (made, other) in enumerate(zip(results(backend, *weights), expected, strict=True)):
                assert torch.equal(made, other), (backend, few, index)
