"""The oracle: what the products' formulas give, beside the papers' formulas and beside the products themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blazeproto import gemm
from blazeproto.gemm import Sizes
from blazeproto.lab.accuracy import Pool
from blazeproto.lab.bounds import reference
from blazeproto.lab.calls import CALLS, LAYER, Case
from blazeproto.lab.oracle import EXACT, YARDSTICK, evaluate, make_case, run_kernels, stray_writes
from blazeproto.reference import moe_mlp

SIZES = Sizes(23, 16, 8, 5, 3)


def case_of(activation: str = "swiglu", biases: bool = True, row_capacity: int | None = None) -> Case:
    options: dict[str, Any] = {"biases": biases, "row_capacity": row_capacity}
    return make_case(SIZES, activation=activation, sentinels=0.2, device="cpu", **options)


@pytest.mark.parametrize("activation", ["swiglu", "alternating(clamped_swiglu)", "gelu"])
def test_exact_is_the_papers_formulas(activation: str) -> None:
    """The chain's output and every gradient, beside autograd of `blazeproto.reference`, in float64."""
    case = case_of(activation)
    names = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias")
    leaves = {name: getattr(case, name).double().requires_grad_() for name in names}
    experts = torch.full_like(case.scores, -1, dtype=torch.long).index_copy(0, case.row_pair, case.row_expert)
    out = moe_mlp(
        *(leaves[name] for name in names[:4]),
        experts.view(SIZES.T, SIZES.K),
        num_experts=SIZES.E,
        activation=activation,
        up_bias=leaves["up_bias"],
        down_bias=leaves["down_bias"],
    )
    out.backward(case.d_out.double())
    result = evaluate(EXACT, case)
    wanted = dict(zip(("dx", "d_up", "d_down", "d_scores", "d_up_bias", "d_down_bias"), leaves.values(), strict=True))
    torch.testing.assert_close(result["out"], out.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(result["fused"], out.detach(), rtol=0, atol=1e-12)
    for name, leaf in wanted.items():
        torch.testing.assert_close(result[name], leaf.grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("given", [False, True], ids=["chain", "products"])
@pytest.mark.parametrize("row_capacity", [None, 40])
def test_every_call_of_a_layer_runs(given: bool, row_capacity: int | None) -> None:
    """On a CPU by the twins, into poisoned memory: no row that no pair has is written, and all is as near as rounding allows."""
    case = case_of(row_capacity=row_capacity)
    stage = evaluate(YARDSTICK, case)
    result, exact = run_kernels(case, stage if given else None), evaluate(EXACT, case, stage if given else None)
    assert result.keys() == stage.keys() == exact.keys() == {name for call in LAYER for name in call.made}
    assert not stray_writes(case, result)
    pool = Pool()
    pool.add_all(result, stage, exact)
    assert not pool.failures(slack=2.0, fp32_noise=2.0**-6)


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name != "bias_score_grad"]
)  # which adds to what another made
def test_products_are_within_their_bounds(name: str) -> None:
    """As the twins compute them, which round where the kernels do."""
    case = case_of(biases=bool(CALLS[name].needs))
    stage = evaluate(YARDSTICK, case)
    result = run_kernels(case, stage)
    for output, (exact, bound) in reference(name, case, stage).items():
        got = case.in_use(output, result[output]).double()
        assert ((got - exact).abs() <= bound).all(), output


def test_each_product_is_called_once_by_its_own_name() -> None:
    assert CALLS.keys() == gemm.PRODUCTS.keys()
    outputs = [name for call in LAYER for name, array in call.made.items() if not array.added]
    assert len(set(outputs)) == len(outputs)
