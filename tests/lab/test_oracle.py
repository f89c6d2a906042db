"""The oracle: what the products' formulas give, beside the papers' formulas and beside the products themselves."""

from typing import Any

import pytest
import torch

from blazeproto import cost, gemm
from blazeproto.gemm import Sizes
from blazeproto.gemm.tiles import E4M3
from blazeproto.lab.accuracy import Bounds, Pool, reference
from blazeproto.lab.calls import CALLS, LAYER, Case
from blazeproto.lab.oracle import EXACT, YARDSTICK, evaluate, make_case, run_kernels, stray_writes
from blazeproto.reference import moe_mlp
from tests.refusals import refuses

SIZES = Sizes(23, 16, 8, 5, 3)


def case_of(activation: str = "swiglu", biases: bool = True, **options: Any) -> Case:
    return make_case(SIZES, activation=activation, biases=biases, sentinels=0.2, device="cpu", **options)


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
    torch.testing.assert_close(result["dx_fused"], leaves["x"].grad, rtol=0, atol=1e-12)
    for name, leaf in wanted.items():
        torch.testing.assert_close(result[name], leaf.grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("given", [False, True], ids=["chain", "products"])
@pytest.mark.parametrize(
    "options", [{}, {"row_capacity": 40}, {"transposed": True, "rank": 8}], ids=lambda o: "-".join(o) or "plain"
)
def test_every_call_of_a_layer_runs(given: bool, options: dict[str, Any]) -> None:
    """On a CPU by the twins, into poisoned memory: no row that no pair has is written, and all is as near as rounding allows."""
    case = case_of(**options)
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
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_within_their_bounds(name: str, transposed: bool) -> None:
    """As the twins compute them, which round where the kernels do."""
    case = case_of(biases=bool(CALLS[name].needs), transposed=transposed, rank=8 * transposed)
    stage = evaluate(YARDSTICK, case)
    result = run_kernels(case, stage)
    for output, (exact, bound) in reference(name, case, stage).items():
        got = case.in_use(output, result[output]).double()
        assert ((got - exact).abs() <= bound).all(), output


def test_scores_are_fp32_whatever_the_default(default_dtype: None) -> None:
    torch.set_default_dtype(torch.bfloat16)
    assert case_of().scores.dtype == torch.float32


@pytest.mark.parametrize("name", CALLS)
def test_bounds_are_a_few_roundings_wide(name: str) -> None:
    """The largest number of each output, wrong by four roundings of bf16, or in fp32 by a quarter of that, is beyond it."""
    case = case_of(biases=bool(CALLS[name].needs))
    stage = evaluate(YARDSTICK, case)
    for output, (exact, bound) in reference(name, case, stage).items():
        largest = int(exact.abs().argmax())
        wrong = 2.0**-6 if stage[output].dtype == torch.bfloat16 else 2.0**-8
        assert wrong * exact.abs().view(-1)[largest] > bound.view(-1)[largest], output


def test_an_error_of_twice_what_truncation_can_cost_is_beyond_the_bound() -> None:
    """wgmma adds 16 products at a time, and each addition may lose 2^-22 of what is there."""
    case = case_of(biases=False)
    bounds = Bounds(case)
    rows = case.x.double()[case.row_pair // SIZES.K]
    exact, error = bounds.product(bounds.gather(case.x), case.up_proj, transposed=False)
    experts = case.row_expert.long()
    absolute = torch.einsum("rd,rod->ro", rows.abs(), case.up_proj.double().abs()[experts])
    torch.testing.assert_close(exact, torch.einsum("rd,rod->ro", rows, case.up_proj.double()[experts]))
    lost = (SIZES.d / 16 + 16) * 2.0**-22 * absolute
    assert (error >= 0.99 * lost).all() and (error < 2 * lost).all()


# --- fp8 -------------------------------------------------------------------------------------------------------------------

QUANTIZED = [name for name, entry in gemm.PRODUCTS.items() if E4M3 in entry.elements]


def test_the_oracle_quantizes_what_products_make() -> None:
    """The yardstick's numbers are e4m3's; each lies within the bounds of the product that makes it."""
    case = make_case(gemm.Sizes(40, 144, 128, 3, 2), quantized=True, device="cpu")
    made, exact = evaluate(YARDSTICK, case), evaluate(EXACT, case)
    assert (made["h"] - exact["h"]).norm() < 0.04 * exact["h"].norm()
    assert len(made["h"][0].float().div(made["h"].float().abs().amax()).unique()) < 256
    for name in QUANTIZED:
        for output, (right, bound) in reference(name, case, made).items():
            assert ((made[output].double().view(right.shape) - right).abs() <= bound).all(), output


def test_the_cost_of_quantized_operands() -> None:
    sizes = gemm.Sizes(4096, 512, 256, 16, 4)
    for name in QUANTIZED:
        fp8, bf16 = (cost.product_floor_ms(name, sizes, precision=precision) for precision in ("fp8", "bf16"))
        assert bf16 / 2 <= fp8 < bf16 and cost.predicted_product_ms(name, sizes, precision="fp8") > fp8
    up = gemm.PRODUCTS["up_forward"]
    T, d, n, E, K, _ = sizes
    rows = T * K
    scales = T + E * (2 * n // 128) * (d // 128) + rows * (3 * n // 128)
    assert up.least_bytes(sizes, "fp8") == T * d + E * 2 * n * d + 3 * rows * n + 4 * scales
    refuses(lambda: cost.product_floor_ms("combine", sizes, precision="fp8"), "precision")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layers_products_are_right(device: str) -> None:
    """By the twins on a CPU. A weight is turned for some of them."""
    case = make_case(gemm.Sizes(300, 256, 256, 8, 2), quantized=True, device=device)
    given = evaluate(YARDSTICK, case)
    made = run_kernels(case, given)
    for name in QUANTIZED:
        for output, (right, bound) in reference(name, case, given).items():
            got = made[output][: len(right)].double().view(right.shape)
            assert ((got - right).abs() <= bound).all(), output
