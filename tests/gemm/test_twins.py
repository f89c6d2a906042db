"""The NumPy twins against ordinary autograd in float64, and the tests' own oracle against the twins."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blazeproto.activations import ACTIVATIONS, activate, activate_backward, activation_named, clamped_swiglu
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.reference import build_dispatch
from blazeproto.gemm import TWINS, Sizes
from blazeproto.lab.accuracy import Pool
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import EXACT, evaluate, make_case
from blazeproto.reference import moe_mlp
from tests.refusals import refuses

SHAPE = Sizes(T=23, d=16, n=8, E=5, K=3)
CASES = {
    "uniform": {},
    "zipf": {"routing": "zipf"},
    "same experts": {"routing": "same"},
    "half the experts empty": {"routing": "half_empty"},
    "sentinels": {"sentinels": 0.4},
    "varying": {"sentinels": 0.4, "varying": True},
    "nobody here": {"sentinels": 1.0},
}


def to_numpy(case: Case) -> tuple[dict[str, np.ndarray], Dispatch]:
    """The case's arrays in float64, and its dispatch."""
    names = ("x", "up_proj", "down_proj", "scores", "d_out", "up_bias", "down_bias")
    arrays = {name: getattr(case, name) for name in names}
    lists = {name: None if t is None else t.numpy() for name, t in case.dispatch.arrays.items()}
    return {name: t.double().numpy() for name, t in arrays.items() if t is not None}, replace(case.dispatch, **lists)


def run_twins(case: Case) -> dict[str, np.ndarray]:
    """Forward and backward by the twins, the results named as the oracle names them."""
    a, rows = to_numpy(case)
    activation, r = case.activation, {}
    r["h"], r["act"] = TWINS["up_forward"](a["x"], a["up_proj"], rows, activation=activation, bias=a.get("up_bias"))
    r["y"] = TWINS["down_forward"](r["act"], a["down_proj"], rows, bias=a.get("down_bias"))
    r["out"] = TWINS["combine"](r["y"], rows, scores=a["scores"])
    down, bias = (r["act"], a["down_proj"], a["scores"]), a.get("down_bias")
    r["fused"] = TWINS["down_forward_fused"](*down, rows, bias=bias, out_f32=np.zeros_like(a["x"]))
    r["dh"], r["a_scaled"], r["d_scores"] = TWINS["down_backward_act"](
        a["d_out"], a["down_proj"], r["h"], a["scores"], rows, activation=activation
    )
    r["d_down"] = TWINS["down_backward_weight"](a["d_out"], r["a_scaled"], rows)
    r["dx_rows"] = TWINS["up_backward_act"](r["dh"], a["up_proj"], rows)
    r["dx"] = TWINS["combine"](r["dx_rows"], rows)
    r["dx_fused"] = TWINS["up_backward_act_fused"](r["dh"], a["up_proj"], rows, dx_f32=np.zeros_like(a["x"]))
    r["d_up"] = TWINS["up_backward_weight"](r["dh"], a["x"], rows)
    if bias is not None:
        TWINS["bias_score_grad"](a["d_out"], bias, rows, d_scores=r["d_scores"])
        r["d_down_bias"] = TWINS["expert_row_sum"](a["d_out"], rows, gather=True, scores=a["scores"])
        r["d_up_bias"] = TWINS["expert_row_sum"](r["dh"], rows)
    return r


def pair_experts(case: Case) -> torch.Tensor:
    """(P,) the expert of each pair, -1 where it has no row: the router's choice back from the rows."""
    experts = torch.full((len(case.dispatch.token_index_map),), -1)
    experts[case.row_pair] = case.row_expert
    return experts


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_twins_are_the_layer(options: dict) -> None:
    """Their chain gives the output and every gradient that autograd gives of `blazeproto.reference.moe_mlp`."""
    case = make_case(SHAPE, **options, biases=True, device="cpu")
    names = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias")
    leaves = {name: getattr(case, name).double().requires_grad_() for name in names}
    experts, top_k = pair_experts(case), case.dispatch.top_k
    pair_tokens = case.dispatch.pair_tokens
    out = moe_mlp(
        *(leaves[name] for name in ("x", "up_proj", "down_proj", "scores")),
        experts.view(-1, top_k) if top_k else experts,
        num_experts=SHAPE.E,
        activation=case.activation,
        up_bias=leaves["up_bias"],
        down_bias=leaves["down_bias"],
        pair_tokens=None if pair_tokens is None else pair_tokens.long(),
    )
    out.backward(case.d_out.double())
    result = run_twins(case)
    np.testing.assert_allclose(result["out"], out.detach().numpy(), atol=1e-12)
    gradients = {"x": "dx", "up_proj": "d_up", "down_proj": "d_down", "scores": "d_scores"}
    gradients |= {"up_bias": "d_up_bias", "down_bias": "d_down_bias"}
    for leaf, gradient in gradients.items():
        expected = leaves[leaf].grad
        np.testing.assert_allclose(result[gradient], 0 if expected is None else expected, atol=1e-12, err_msg=gradient)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle_is_the_twins(activation: str) -> None:
    case = make_case(SHAPE, activation=activation, sentinels=0.2, biases=True, device="cpu")
    result = run_twins(case)
    for name, value in evaluate(EXACT, case).items():
        np.testing.assert_allclose(result[name.removesuffix("_f32")][: len(value)], value, atol=1e-12, err_msg=name)


def test_activations_by_name() -> None:
    assert activation_named("clamped_swiglu") is activation_named(clamped_swiglu(7.0, 1.702))
    assert activation_named("clamped_swiglu(limit=7, alpha=1.702)") is activation_named("clamped_swiglu")
    assert activation_named(clamped_swiglu(2)).macros["ACTIVATION_LIMIT"] == "2.0f"
    assert activation_named("clamped_swiglu(limit=7)") is activation_named("clamped_swiglu")


def test_gpt_oss_s_weights_as_the_glossary_turns_them() -> None:
    """One expert of gpt-oss, as its model file has it, is our chain with the weights that docs/glossary.md's lines make."""
    d, n = 6, 5
    shapes = {"gate_up_proj": (d, 2 * n), "gate_up_proj_bias": (2 * n,), "down_proj": (n, d), "down_proj_bias": (d,)}
    theirs = SimpleNamespace(**{name: torch.randn(1, *shape).double() for name, shape in shapes.items()})
    made, x = {"theirs": theirs}, torch.randn(4, d).double()
    page = (Path(__file__).parents[2] / "docs/glossary.md").read_text()
    exec("\n".join(line for line in page.splitlines() if "= theirs." in line), made)
    assert len(made) > 4  # with __builtins__

    both = x @ theirs.gate_up_proj[0] + theirs.gate_up_proj_bias[0]
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate) @ theirs.down_proj[0] + theirs.down_proj_bias[0]
    arrays = {name: tensor.numpy() for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}
    dispatch = build_dispatch(np.zeros((4, 1), np.int32), 1)
    up_options = {"activation": "clamped_swiglu", "bias": arrays["gate_up_proj_bias"]}
    _, act = TWINS["up_forward"](x.numpy(), arrays["gate_up_proj"], dispatch, **up_options)
    out = TWINS["down_forward"](act, arrays["down_proj"], dispatch, bias=theirs.down_proj_bias.numpy())
    np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("limit", "alpha", "error"),
    [
        ("7", 1.0, TypeError),
        (7.0, None, TypeError),
        (True, 1.0, TypeError),
        (10**400, 1.0, ValueError),
        (1e39, 1.0, ValueError),  # infinite in float32
        (1e-50, 1.0, ValueError),  # zero in float32
        (7.0, -1e39, ValueError),
        (0, 1, ValueError),
        (-1, 1, ValueError),
        (1, math.nan, ValueError),
    ],
)
def test_parameters_that_a_kernel_cannot_have_are_named(limit: object, alpha: object, error: type[Exception]) -> None:
    refuses(lambda: clamped_swiglu(limit, alpha), "clamped_swiglu", error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["clamped_swiglu(limit=7,alpha=x)", "clamped_swiglu(limit=,alpha=1)", "clamped_swiglu ()"]
)
def test_names_that_are_no_numbers_are_refused(name: str) -> None:
    refuses(lambda: activation_named(name), "activation")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_numbers_give_no_warning(activation: str) -> None:
    h = np.array([[-1e4, 1e4, 1.0, 1.0]])
    gradient = activate_backward(h, np.ones((1, 4 // activation_named(activation).halves)), activation)
    assert np.isfinite(activate(h, activation)).all() and np.isfinite(gradient).all()


def test_rows_of_no_pair_are_neither_written_nor_read() -> None:
    case = make_case(SHAPE, sentinels=0.5, device="cpu")
    used, result = len(case.row_pair), run_twins(case)
    for name in ("h", "act", "y", "dh", "a_scaled", "dx_rows"):
        assert np.isnan(result[name][used:]).all() and np.isfinite(result[name][:used]).all()
    assert np.isfinite(result["out"]).all() and np.isfinite(result["d_up"]).all()


def test_combine_adds_in_slot_order() -> None:
    """In fp32, where the order shows."""
    rng = np.random.default_rng(0)
    case = make_case(Sizes(31, 8, 8, 9, 7), device="cpu")
    _, rows = to_numpy(case)
    y, scores = rng.normal(size=(31 * 7, 8)).astype(np.float32), case.scores.numpy()
    expected = np.zeros((31, 8), np.float32)
    for token in range(31):
        for pair in range(7 * token, 7 * token + 7):
            expected[token] += scores[pair] * y[rows.token_index_map[pair]]
    assert np.array_equal(TWINS["combine"](y, rows, scores=scores), expected)


@pytest.mark.parametrize("lost", [False, True])
def test_long_truncated_sums_pass_unless_a_product_is_lost(lost: bool) -> None:
    """A sum of 3500 products as wgmma makes it, truncated after every 16, against a yardstick that is right."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(3500, width, generator=generator).bfloat16().double() for width in (64, 128))
    exact = left.T @ right
    if lost:
        left[1700] = 0
    truncated, nearest = torch.zeros_like(exact), torch.zeros_like(exact)
    for k in range(0, len(left), 16):
        products = left[k : k + 16].T @ right[k : k + 16]
        truncated, nearest = _truncated(truncated + products), (nearest + products).float().double()
    if not lost:
        assert 3e-6 < _relative(truncated, exact) < 5e-6 and _relative(nearest, exact) < 5e-7
    pool = Pool()
    pool.add("d_down_f32", truncated.float(), exact.float(), exact)
    assert bool(pool.failures(slack=2.0)) == lost


def _relative(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values - exact).norm() / exact.norm())


def _truncated(values: torch.Tensor) -> torch.Tensor:
    """To fp32, toward zero."""
    nearest = values.float()
    toward_zero = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.double().abs() > values.abs(), toward_zero, nearest).double()
