"""The NumPy twins against ordinary autograd in float64, and the tests' own oracle against the twins."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blazeproto.activations import ACTIVATIONS, activate, activate_backward, activation_named, clamped_swiglu
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.reference import build_dispatch, build_dispatch_varying
from blazeproto.gemm import TWINS, Sizes
from blazeproto.lab.accuracy import Pool
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import EXACT, YARDSTICK, evaluate, make_case
from blazeproto.reference import moe_mlp
from blazeproto.runtime.rounding import to_bfloat16

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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_by_finite_differences(activation: str) -> None:
    rng = np.random.default_rng(0)
    h, d_act = rng.normal(size=(4, 6)), rng.normal(size=(4, 6 // activation_named(activation).halves))
    gradient, step = activate_backward(h, d_act, activation), 1e-6
    for place in np.ndindex(h.shape):
        nudge = np.zeros_like(h)
        nudge[place] = step
        difference = activate(h + nudge, activation) - activate(h - nudge, activation)
        assert (difference * d_act).sum() / (2 * step) == pytest.approx(gradient[place], abs=1e-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numpy_and_torch_agree(activation: str) -> None:
    h, d_act = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6 // activation_named(activation).halves).double()
    np.testing.assert_allclose(activate(h.numpy(), activation), activate(h, activation), atol=1e-14)
    by_numpy, by_torch = (activate_backward(*pair, activation) for pair in ((h.numpy(), d_act.numpy()), (h, d_act)))
    np.testing.assert_allclose(by_numpy, by_torch, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: str) -> None:
    h = np.zeros((3, 4))
    h[1] = np.nan
    for array in (h, torch.from_numpy(h)):
        assert np.isnan(np.asarray(activate(array, activation))).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("limit", [0.5, 7.0])
@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_clamped_swiglu_is_gpt_oss_s(limit: float, alpha: float) -> None:
    """As its model file has it: gate.clamp(max=limit), up.clamp(-limit, limit), (up + 1) * gate * sigmoid(alpha * gate)."""
    name, h = clamped_swiglu(limit, alpha), (3 * torch.randn(50, 16, dtype=torch.float64)).requires_grad_()
    gate, up = h[:, :8].clamp(max=limit), h[:, 8:].clamp(-limit, limit)
    expected, d_act = (up + 1) * gate * torch.sigmoid(alpha * gate), torch.randn(50, 8, dtype=torch.float64)
    torch.testing.assert_close(activate(h, name), expected)
    d_h = activate_backward(h.detach(), d_act, name)
    torch.testing.assert_close(d_h, torch.autograd.grad(expected, h, d_act)[0])


def test_activations_by_name() -> None:
    assert activation_named("clamped_swiglu") is activation_named(clamped_swiglu(7.0, 1.702))
    assert activation_named("clamped_swiglu(limit=7, alpha=1.702)") is activation_named("clamped_swiglu")
    assert activation_named(clamped_swiglu(2)).macros["ACTIVATION_LIMIT"] == "2.0f"
    assert activation_named("clamped_swiglu(limit=7)") is activation_named("clamped_swiglu")
    for wrong in ("SwiGLU", None, ["swiglu"]):
        with pytest.raises(ValueError, match="activation: expected one of 'swiglu', "):
            activation_named(wrong)  # type: ignore[arg-type]
    for limit, alpha in ((0, 1), (-1, 1), (math.inf, 1), (1, math.nan)):
        with pytest.raises(ValueError, match="clamped_swiglu: expected a finite limit above 0 and a finite alpha"):
            clamped_swiglu(limit, alpha)


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
    ],
)
def test_parameters_that_a_kernel_cannot_have_are_named(limit: object, alpha: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="clamped_swiglu: expected a "):
        clamped_swiglu(limit, alpha)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["clamped_swiglu(limit=7,alpha=x)", "clamped_swiglu(limit=,alpha=1)", "clamped_swiglu ()"]
)
def test_names_that_are_no_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"activation: expected .*clamped_swiglu.*, got 'clamped_swiglu"):
        activation_named(name)


def test_a_name_holds_in_a_fresh_process() -> None:
    """It says all there is to say, so that it may be pickled, or written into a configuration."""
    code = (
        "import sys; from blazeproto.activations import activation_named; print(activation_named(sys.argv[1]).macros)"
    )
    name = clamped_swiglu(1.25, -0.5)
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == activation_named(name).macros


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_numbers_give_no_warning(activation: str) -> None:
    h = np.array([[-1e4, 1e4, 1.0, 1.0]])
    gradient = activate_backward(h, np.ones((1, 4 // activation_named(activation).halves)), activation)
    assert np.isfinite(activate(h, activation)).all() and np.isfinite(gradient).all()


def random_case(rng: np.random.Generator) -> tuple[Dispatch, np.ndarray, np.ndarray]:
    """A dispatch with foreign ids, a capacity or a varying number, and the expert and the token of each pair."""
    tokens, experts, top_k = (int(n) for n in rng.integers((0, 1, 1), (9, 6, 7)))
    capacity = [None, int(rng.integers(0, tokens * top_k + 3))][rng.integers(2)]
    if rng.integers(2):
        ids = np.argsort(rng.random((tokens, 2 * experts + top_k)), axis=1)[:, :top_k].astype(np.int32)
        dispatch = build_dispatch(ids, experts, row_capacity=capacity, validate=True)
        return dispatch, ids.reshape(-1), np.repeat(np.arange(tokens), top_k)
    counts, spare = rng.integers(0, 4, tokens), int(rng.integers(4))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pair_tokens = np.concatenate([np.repeat(np.arange(tokens), counts), np.zeros(spare)]).astype(np.int32)
    ids = np.concatenate([rng.integers(-1, experts + 1, offsets[-1]), np.full(spare, -1)]).astype(np.int32)
    lists = (ids, pair_tokens, offsets)
    return build_dispatch_varying(*lists, experts, row_capacity=capacity, validate=True), ids, pair_tokens


def test_twins_are_a_loop_over_the_pairs() -> None:
    """The chain without activation's slope, of 150 small dispatches, T = 0 and rows of no pair among them."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        dispatch, ids, tokens = random_case(rng)
        T, E, d, n = dispatch.num_tokens, dispatch.num_experts, int(rng.integers(1, 6)), int(rng.integers(1, 5))
        x, up, down, d_out = (rng.normal(size=s) for s in ((T, d), (E, n, d), (E, d, n), (T, d)))
        scores, bias = rng.normal(size=len(ids)), rng.normal(size=(E, d))
        h, act = TWINS["up_forward"](x, up, dispatch, activation="relu")
        out = TWINS["combine"](TWINS["down_forward"](act, down, dispatch, bias=bias), dispatch, scores=scores)
        _, a_scaled, d_scores = TWINS["down_backward_act"](d_out, down, h, scores, dispatch, activation="relu")
        TWINS["bias_score_grad"](d_out, bias, dispatch, d_scores=d_scores)
        got = [out, d_scores, TWINS["down_backward_weight"](d_out, a_scaled, dispatch)]
        got += [
            TWINS["up_backward_weight"](h, x, dispatch),
            TWINS["expert_row_sum"](d_out, dispatch, gather=True, scores=scores),
        ]

        rows = [pair for expert in range(E) for pair in np.flatnonzero(ids == expert)][: dispatch.num_rows]
        expected = [np.zeros_like(array) for array in got]
        for pair in rows:
            t, e, s = tokens[pair], ids[pair], scores[pair]
            h_row = up[e] @ x[t]
            act_row = np.maximum(h_row, 0)
            y = down[e] @ act_row + bias[e]
            expected[0][t] += s * y
            expected[1][pair] = d_out[t] @ y
            expected[2][e] += s * np.outer(d_out[t], act_row)
            expected[3][e] += np.outer(h_row, x[t])
            expected[4][e] += s * d_out[t]
        for mine, right in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, right, atol=1e-12)


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


def test_weight_gradients_accumulate() -> None:
    case = make_case(SHAPE, device="cpu")
    a, rows = to_numpy(case)
    dh = np.random.default_rng(0).normal(size=(case.dispatch.num_rows, 16))
    once = TWINS["up_backward_weight"](dh, a["x"], rows)
    twice = TWINS["up_backward_weight"](dh, a["x"], rows, dw=once.copy(), accumulate=True)
    np.testing.assert_allclose(twice, 2 * once)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: out, None),
        (lambda out: out.mul_(1.004), "norm"),
        (lambda out: out[3, 8:16].neg_(), "worst element"),
        (lambda out: out[5].mul_(1.05), "worst row"),
        (lambda out: out[7, :1].fill_(torch.nan), "norm"),
    ],
    ids=["sound", "all a bit off", "one wrong chunk", "one wrong row", "NaN"],
)
def test_the_bounds_find_what_is_wrong(spoil: object, message: str | None) -> None:
    """The accuracy check lets the yardstick's own arithmetic pass and sees one wrong 16-byte chunk."""
    case = make_case(Sizes(256, 128, 64, 4, 2), device="cpu")
    stage = evaluate(YARDSTICK, case)
    exact, out = evaluate(EXACT, case, stage), {name: value.clone() for name, value in stage.items()}
    spoil(out["out"])  # type: ignore[operator]
    pool = Pool()
    pool.add_all(out, stage, exact)
    lines = pool.failures()
    assert lines == [] if message is None else any(line.startswith(f"out: {message}") for line in lines)


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


def test_twins_round_what_is_stored_before_it_is_used_again_and_no_fp32_sum() -> None:
    rng = np.random.default_rng(0)
    rows = build_dispatch(rng.integers(0, 4, (40, 1)).astype(np.int32), 4)
    x, up = rng.normal(size=(40, 16)).astype(np.float32), rng.normal(size=(4, 16, 16)).astype(np.float32)
    h, act = TWINS["up_forward"](x, up, rows, round_to="bf16")
    assert np.array_equal(h, to_bfloat16(h)) and np.array_equal(act, to_bfloat16(activate(h, "swiglu")))
    dw = np.zeros((4, 16, 16), np.float32)
    into_memory = TWINS["up_backward_weight"](h, x, rows, dw=dw, round_to="bf16")
    made = TWINS["up_backward_weight"](h, x, rows, round_to="bf16")
    assert not np.array_equal(into_memory, to_bfloat16(into_memory)) and np.array_equal(made, to_bfloat16(into_memory))
