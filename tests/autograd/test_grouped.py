"""``grouped_experts`` is ``moe_mlp`` of one expert a token and scores of 1: any activation, biases, both layouts, factors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from blazeproto.activations import ACTIVATIONS, activation_named, clamped_swiglu
from blazeproto.autograd import LowRank, Options, SavePolicy, grouped_experts, moe_mlp
from tests.refusals import refuses

E, D, N, RANK = 4, 16, 24, 5
COUNTS = (5, 0, 20, 9)
PLACES = [
    pytest.param("cpu", torch.float64, id="cpu"),
    pytest.param("cuda", torch.bfloat16, id="gpu", marks=pytest.mark.gpu),
]
BOUNDS = {torch.float64: 1e-13, torch.bfloat16: 0.0}


def inputs(
    activation: str, *, bias: bool, factors: bool, transposed: bool, device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """x, the weights, and what else there is, by the names of `arguments`."""
    width = N * activation_named(activation).halves
    shapes = {"x": (sum(COUNTS), D), "gate_up_proj": (E, width, D), "down_proj": (E, D, N)}
    if bias:
        shapes |= {"up_bias": (E, width), "down_bias": (E, D)}
    if factors:
        shapes |= {"up_a": (E, RANK, D), "up_b": (E, width, RANK), "down_a": (E, RANK, N), "down_b": (E, D, RANK)}
    made = {name: torch.randn(shape).mul_(shape[-1] ** -0.5).to(device, dtype) for name, shape in shapes.items()}
    if transposed:
        made |= {name: made[name].mT.contiguous().mT for name in ("gate_up_proj", "down_proj")}
    return {name: t.requires_grad_() for name, t in made.items()}


def arguments(tensors: dict[str, Tensor]) -> dict:
    rest = dict(tensors)
    for name in ("up", "down"):
        if f"{name}_a" in rest:
            rest[f"{name}_factors"] = LowRank(rest.pop(f"{name}_a"), rest.pop(f"{name}_b"))
    return rest


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_agrees_with_moe_mlp(activation, bias, transposed, factors, device, dtype):
    given = inputs(activation, bias=bias, factors=factors, transposed=transposed, device=device, dtype=dtype)
    counts = torch.tensor(COUNTS, device=device)
    ids = torch.arange(E, device=device).repeat_interleave(counts)[:, None]
    scores = torch.ones(len(ids), 1, device=device)
    d_out = torch.randn(len(ids), D).to(device, dtype)
    expected = moe_mlp(**arguments(given), scores=scores, topk_experts=ids, num_experts=E, activation=activation)
    wanted = [expected, *torch.autograd.grad(expected, list(given.values()), d_out)]
    for save in SavePolicy:
        out = grouped_experts(**arguments(given), counts=counts, activation=activation, save=save)
        got = [out, *torch.autograd.grad(out, list(given.values()), d_out)]
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= BOUNDS[dtype] * b.norm()
        assert [t.stride() for t in got[1:]] == [t.stride() for t in given.values()]


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_apart_are_the_joined_weight(bias):
    given = inputs("swiglu", bias=bias, factors=True, transposed=False, device="cpu", dtype=torch.float64)
    counts, d_out = torch.tensor(COUNTS), torch.randn(sum(COUNTS), D, dtype=torch.float64)
    joined = grouped_experts(**arguments(given), counts=counts)
    wanted = torch.autograd.grad(joined, list(given.values()), d_out)
    halves = tuple(half.detach().clone().requires_grad_() for half in given["gate_up_proj"].chunk(2, dim=1))
    for save in SavePolicy:
        out = grouped_experts(**{**arguments(given), "gate_up_proj": halves}, counts=counts, save=save)
        others = [t for name, t in given.items() if name != "gate_up_proj"]
        d_gate, d_up, *got = torch.autograd.grad(out, [*halves, *others], d_out)
        assert torch.equal(out, joined) and torch.equal(torch.cat((d_gate, d_up), dim=1), wanted[1])
        rest = (wanted[0], *wanted[2:])
        assert all(torch.equal(a, b) for a, b in zip(got, rest, strict=True))


@pytest.mark.parametrize("activation", ["relu", "alternating(clamped_swiglu)"])
def test_a_pair_needs_a_gate_and_halves_that_lie_apart(activation):
    given = arguments(inputs("swiglu", bias=False, factors=False, transposed=False, device="cpu", dtype=torch.float64))
    halves = tuple(given.pop("gate_up_proj").detach().chunk(2, dim=1))
    for weights, named in ((halves, activation), ((*halves, halves[0]), "swiglu"), ((), "swiglu")):
        call = partial(grouped_experts, gate_up_proj=weights, counts=torch.tensor(COUNTS), activation=named, **given)
        refuses(call, "gate_up_proj")


def test_options_in_one_object():
    given = arguments(inputs("relu", bias=False, factors=False, transposed=False, device="cpu", dtype=torch.float64))
    counts, options = torch.tensor(COUNTS), Options(activation="relu", save="recompute")
    expected = grouped_experts(**given, counts=counts, activation="relu")
    assert torch.equal(grouped_experts(**given, counts=counts, options=options), expected)
    changed = grouped_experts(**given, counts=counts, options=options, activation="relu2")
    assert torch.equal(changed, grouped_experts(**given, counts=counts, activation="relu2"))
