"""The table of activations: derivatives, names, and what its lines become in the kernels."""

from typing import Any

import numpy as np
import pytest
import torch

from blazeproto import activations, gemm
from blazeproto.activations import ACTIVATIONS, Activation, activation_named, mathematics, with_parameters
from blazeproto.gemm.compile import CompileError
from blazeproto.gemm.tiles import TILES
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import YARDSTICK, evaluate, make_case
from tests.refusals import refuses


def other_parameters(name: str) -> list[str]:
    """An activation with its parameters, each a third of the table's; [] where it has none."""
    parameters = {} if "(" in name else {p.name: p.value / 3 for p in activation_named(name).parameters}
    return [with_parameters(name, **parameters)] if parameters else []


NAMES = [name for each in ACTIVATIONS for name in (each, *other_parameters(each))]


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_the_derivatives(name: str) -> None:
    """By autograd in float64, of f and of g, where they don't jump."""
    chosen, x = activation_named(name), torch.linspace(-12, 12, 481, dtype=torch.float64).add(0.003).requires_grad_()
    for function, slope in ((chosen.f, chosen.slope), (chosen.g, chosen.g_slope)):
        assert (function is None) == (slope is None)
        if function is None or slope is None:
            continue
        (wanted,) = torch.autograd.grad(function(mathematics(x), x, *chosen.values).sum(), x)
        got = slope(mathematics(x), x.detach(), *chosen.values)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        assert name != "swiglu" or torch.autograd.gradcheck(lambda x: slope(mathematics(x), x), x[::40])  # noqa: B023


@pytest.mark.parametrize("name", NAMES)
def test_nan_goes_through(name: str) -> None:
    """Functions give NaN. Slopes give NaN, or 1 for a straight piece, as a kernel's ``x <= 0 ? 0 : 1`` does."""
    chosen = activation_named(name)
    for nan in (np.full(1, np.nan), torch.full((1,), torch.nan)):
        for function, slope in ((chosen.f, chosen.slope), (chosen.g, chosen.g_slope)):
            if function is not None and slope is not None:
                assert np.isnan(float(function(mathematics(nan), nan, *chosen.values)[0]))
                at_nan = float(slope(mathematics(nan), nan, *chosen.values)[0])
                assert np.isnan(at_nan) or at_nan == 1


@pytest.mark.parametrize("product", ["up_forward", "down_backward_act"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_kernel_computes_it_on_both_sides_of_every_clamp(
    name: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act and the slopes, by the kernels' PTX, at pre-activations beyond 10 and -10: the limits of the table are 7 and 10."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    from blazeproto.lab import workbench

    def scaled(*sizes: Any, **options: Any) -> Case:
        case = make_case(*sizes, **options)
        case.x.mul_(8)
        return case

    monkeypatch.setattr(workbench, "make_case", scaled)
    sizes = {"T": 24, "d": 16, "n": 16, "E": 2, "K": 1}
    bench = workbench.Workbench(product, **sizes, activation=name, config=TILES[product], device="cpu")
    h = evaluate(YARDSTICK, bench._inputs.case)["h"]
    assert all(
        (h[:, part] > 11).sum() > 9 < (h[:, part] < -11).sum() for part in (slice(0, None, 2), slice(1, None, 2))
    )
    assert bench.check()


@pytest.mark.parametrize(
    "name",
    ["clamped_swiglu(limit=1,gate=2)", "clamped_swiglu(limit=1,limit=2)", "swiglu(limit=3)", "clamped_swiglu()"],
)
def test_parameters_that_an_activation_has_not_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^activation: .*, got "):
        activation_named(name)


def test_parameters_by_keywords() -> None:
    assert with_parameters("clamped_swiglu", alpha=2) == "clamped_swiglu(limit=7.0,alpha=2.0)"
    assert activation_named("clamped_swiglu(alpha=2)").name == "clamped_swiglu(limit=7.0,alpha=2.0)"
    for name, parameter in (("swiglu", "limit"), ("clamped_swiglu", "cap"), ("alternating(clamped_swiglu)", "limit")):
        refuses(lambda: with_parameters(name, **{parameter: 1.0}), "activation")  # noqa: B023


def test_slopes_where_they_jump() -> None:
    for x, wanted in ((0.0, 0.0), (-1.0, 0.0), (1.0, 1.0)):
        for array in (np.array([x]), torch.tensor([x])):
            row = activation_named("relu")
            assert float(row.slope(mathematics(array), array)[0]) == wanted
    row = activation_named("clamped_swiglu")
    for array in (np.array([-7.0, 7.0, 7.5, -7.5]), torch.tensor([-7.0, 7.0, 7.5, -7.5])):
        assert row.g_slope(mathematics(array), array, *row.values).tolist() == [1, 1, 0, 0]


# --- An activation that is added ----------------------------------------------------------------------------------------------

ROWS = {
    "nonlinearity has no branch for CUBE": Activation("cube", "CUBE", lambda m, x: x * x * x, lambda m, x: 3 * x * x),
    "linear_half has no branch for SILU": Activation(
        "halfway", "SILU", lambda m, x: x, lambda m, x: x, lambda m, up: -up, lambda m, up: 0 * up - 1
    ),
}


@pytest.mark.parametrize("missing", ROWS)
def test_an_activation_without_a_branch_in_cuda_is_not_compiled(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with its branches is compiled and checked by docs/recipes.md (tests/test_recipes.py)."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    row = ROWS[missing]
    monkeypatch.setitem(activations._TABLE, row.name, row)
    with pytest.raises(CompileError, match=rf"activation\.cuh: {missing}"):
        gemm.kernel_for("up_forward", activation=row.name).compile()
