"""Weights that lie transposed, gate and up that alternate, and low-rank factors, on the GPU.

How weights lie changes no sum: the kernels give the bits that they give of the same numbers laid out the usual way. What a
low-rank factor adds is compared with NumPy twins in float64.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.activations import activation_named, alternating, gate_and_up, side_by_side
from blazeproto.dispatch import Dispatch, build_dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backend")]

SHAPES = [  # T, d, n, E, K
    (300, 64, 64, 3, 2),
    (513, 136, 72, 5, 3),
    (700, 264, 200, 9, 2),
    (40, 512, 256, 8, 4),
]
GATED = ("swiglu", "clamped_swiglu")


class Layer:
    """Random numbers of one shape, and what is computed of them the usual way."""

    def __init__(self, shape: tuple[int, ...], activation: str, rank: int = 0) -> None:
        T, d, n, E, K = shape
        generator = torch.Generator("cuda").manual_seed(sum(shape))

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device="cuda", generator=generator) * scale).to(torch.bfloat16)

        width = n * activation_named(activation).halves
        experts = torch.rand(T, E, device="cuda", generator=generator).topk(min(K, E)).indices.int()
        experts[::7, 0] = -1  # pairs without a row
        self.dispatch: Dispatch = build_dispatch(experts, E)
        self.rows = int(self.dispatch.expert_token_offsets[-1])
        self.activation = activation
        self.x, self.d_out = normal(T, d), normal(T, d)
        self.up, self.down = normal(E, width, d, scale=d**-0.5), normal(E, d, n, scale=n**-0.5)
        self.bias = normal(E, width)
        self.scores = torch.rand(T, experts.shape[1], device="cuda", generator=generator)
        places = len(self.dispatch.expert_pair_indices)
        self.low = {"x": normal(places, rank), "d_out": normal(places, rank)}
        self.up_b, self.down_a = normal(E, width, rank, scale=0.2), normal(E, rank, n, scale=0.2)

    def alternate(self, t: Tensor, dim: int = 1) -> Tensor:
        """Gate and up in turn, of halves along a dimension."""
        moved = t.movedim(dim, -1)
        return side_by_side(*gate_and_up(moved, self.activation), alternating(self.activation)).movedim(-1, dim)


def lying(t: Tensor) -> Tensor:
    return t.mT.contiguous()


def clean(t: Tensor, layer: Layer) -> Tensor:
    return t[: layer.rows]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [*GATED, "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_transposed_weights_give_the_same_bits(shape: tuple[int, ...], activation: str, bias: bool) -> None:
    layer = Layer(shape, activation)
    options: dict[str, Any] = {"activation": activation, "bias": layer.bias if bias else None}
    h, act = gemm.up_forward(layer.x, layer.up, layer.dispatch, **options)
    again = gemm.up_forward(layer.x, lying(layer.up), layer.dispatch, transposed=True, **options)
    assert torch.equal(clean(again[0], layer), clean(h, layer))
    assert torch.equal(clean(again[1], layer), clean(act, layer))
    arguments = (h, layer.scores, layer.dispatch)
    want = gemm.down_backward_act(layer.d_out, layer.down, *arguments, activation=activation)
    got = gemm.down_backward_act(layer.d_out, lying(layer.down), *arguments, activation=activation, transposed=True)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert torch.equal(clean(a, layer), clean(b, layer))
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_that_alternate_give_the_same_bits(
    shape: tuple[int, ...], activation: str, transposed: bool
) -> None:
    layer = Layer(shape, activation)
    turn = lying if transposed else Tensor.contiguous
    h, act = gemm.up_forward(layer.x, layer.up, layer.dispatch, activation=activation, bias=layer.bias)
    of_up: dict[str, Any] = {"activation": alternating(activation), "transposed": transposed}
    bias = layer.alternate(layer.bias).contiguous()
    h_alternating, act_again = gemm.up_forward(
        layer.x, turn(layer.alternate(layer.up)), layer.dispatch, bias=bias, **of_up
    )
    assert torch.equal(clean(h_alternating, layer), clean(layer.alternate(h), layer))
    assert torch.equal(clean(act_again, layer), clean(act, layer))
    want = gemm.down_backward_act(layer.d_out, layer.down, h, layer.scores, layer.dispatch, activation=activation)
    got = gemm.down_backward_act(layer.d_out, turn(layer.down), h_alternating, layer.scores, layer.dispatch, **of_up)
    assert torch.equal(clean(got[0], layer), clean(layer.alternate(want[0]), layer))
    assert torch.equal(clean(got[1], layer), clean(want[1], layer))
    # A row's sum runs over the same units, of which a thread has the same ones.
    assert torch.equal(got[2], want[2])
    over = gemm.down_backward_act(
        layer.d_out, turn(layer.down), h_alternating.clone(), layer.scores, layer.dispatch, **of_up
    )
    in_place = h_alternating.clone()
    gemm.down_backward_act(layer.d_out, turn(layer.down), in_place, layer.scores, layer.dispatch, dh=in_place, **of_up)
    assert torch.equal(clean(in_place, layer), clean(over[0], layer))


def near(got: Tensor, want: Any, layer: Layer) -> None:
    exact = torch.from_numpy(np.asarray(want)).cuda()
    got, exact = clean(got, layer).double(), clean(exact, layer)
    torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().mean()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [8, 16, 72, 136])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "alternating(clamped_swiglu)"])
def test_low_rank_factors(shape: tuple[int, ...], rank: int, transposed: bool, activation: str) -> None:
    layer = Layer(shape, activation, rank)
    turn = lying if transposed else Tensor.contiguous

    def wide(t: Tensor) -> Any:
        return t.double().cpu().numpy()

    on_host = Dispatch(**{k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in vars(layer.dispatch).items()})
    options: dict[str, Any] = {"activation": activation, "transposed": transposed}
    up, up_b, down, down_a = (turn(t) for t in (layer.up, layer.up_b, layer.down, layer.down_a))
    low = layer.low
    h, act = gemm.up_forward(layer.x, up, layer.dispatch, bias=layer.bias, low=(low["x"], up_b), **options)
    wants = gemm.TWINS["up_forward"](
        wide(layer.x), wide(up), on_host, bias=wide(layer.bias), low=(wide(low["x"]), wide(up_b)), **options
    )
    near(h, wants[0], layer)
    near(act, wants[1], layer)
    of_rows = (low["d_out"], down_a)
    got = gemm.down_backward_act(layer.d_out, down, h, layer.scores, layer.dispatch, low=of_rows, **options)
    wants = gemm.TWINS["down_backward_act"](
        *map(wide, (layer.d_out, down, h, layer.scores)), on_host, low=tuple(map(wide, of_rows)), **options
    )
    near(got[0], wants[0], layer)
    near(got[1], wants[1], layer)
    torch.testing.assert_close(
        got[2].flatten().double().cpu(), torch.from_numpy(wants[2]).flatten(), rtol=2e-2, atol=5e-2
    )
    for columns in (None, range(16, 48)):
        made = gemm.grouped_mm(
            act, down, layer.dispatch, transposed=transposed, columns=columns, low=low_of_y(layer, rank, turn)
        )
        want = gemm.TWINS["grouped_mm"](
            wide(act), wide(down), on_host, transposed=transposed, columns=columns,
            low=tuple(map(wide, low_of_y(layer, rank, turn))),
        )  # fmt: skip
        near(made, want, layer)


def low_of_y(layer: Layer, rank: int, turn: Any) -> tuple[Tensor, Tensor]:
    """For Y: rows (R, r) and a factor (E, d, r)."""
    E, d, _ = layer.down.shape
    generator = torch.Generator("cuda").manual_seed(1)
    factor = torch.randn(E, d, rank, device="cuda", generator=generator).to(torch.bfloat16) * 0.2
    return layer.low["x"], turn(factor)
