"""`moe_mlp` with any options, on any input, against the float64 oracle `blazeproto.reference`: output and all gradients.

Every element is held to the bound of `rounding_error`, which follows from where each step rounds; in float64 that is about
1e-13 of what is summed.
"""

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from profiles import SHARDS, check
from rounding_error import Problem, error_bounds
from torch import Tensor

from blazeproto.activations import ACTIVATIONS, activate, activate_backward, activation_named, clamped_swiglu
from blazeproto.autograd import SavePolicy
from blazeproto.dispatch import Dispatch
from blazeproto.lab.oracle import dispatch_fixed
from tests.autograd import cases

NAMES = cases.NAMES[:6]  # without low-rank factors

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# dtypes of x, of weights and biases, and of autocast
DTYPES = [
    *[(F64, F64, None)] * 4,
    *[(F32, F32, None), (BF16, BF16, None), (F16, F16, None)] * 2,
    *[(BF16, F32, None), (F16, F32, None)],
    *[(F32, F32, BF16), (F32, F32, F16), (BF16, F32, BF16), (BF16, BF16, BF16), (F32, BF16, BF16), (F64, F64, BF16)],
]
WIDTHS = [8, 16, 24, 32, 40, 1, 3, 5, 12, 17]


@dataclass
class Case(cases.Case):
    """With a dispatch instead of ids, options of the call, and autocast."""

    dispatch: Dispatch | None = None
    how: dict[str, Any] = field(default_factory=dict)  # save, backend, combine, workspace_bytes
    autocast: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which products are computed."""
        return self.x.dtype if self.autocast is None or self.x.dtype == F64 else self.autocast

    def forward(self, **options: Any) -> Tensor:
        given = {} if self.dispatch is None else {"dispatch": self.dispatch, "topk_experts": None, "row_capacity": None}
        with torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext():
            return super().forward(**given, **(self.how | options))

    def results(self, **options: Any) -> dict[str, Tensor]:
        """The output and the gradients of what requires one, by name."""
        return self.named(self.run(**options))

    def named(self, results: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("out", *self.trained), results, strict=True))

    def problem(self) -> Problem:
        experts, num_experts = self.topk_experts.flatten().long(), self.options["num_experts"]
        here = (experts >= 0) & (experts < num_experts)
        pair = torch.where(here, experts, num_experts).sort(stable=True).indices[: int(here.sum())]
        pair = pair[: self.options["row_capacity"]]
        top_k = self.topk_experts.shape[-1]
        token = self.varying["pair_tokens"].long()[pair] if self.varying else pair // top_k
        return Problem(
            *(self.x, self.gate_up_proj, self.down_proj, self.scores, self.up_bias, self.down_bias, self.d_out),
            activation=self.options["activation"],
            row_pair=pair,
            row_token=token,
            row_expert=experts[pair],
            dtype=self.dtype,
        )


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers with other strides, or at an address that is no multiple of 16 bytes."""
    if how == "transposed" and t.dim() > 1:
        return t.mT.contiguous().mT
    if how == "unaligned":
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    if how == "spread" and t.dim():
        return torch.stack([t, t], dim=-1)[..., 0]
    return t


def draw_experts(data: Any, num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """(T, K) int64: distinct ids in a row; where K > E, or where drawn so, some of them outside [0, E)."""
    known = num_experts + (top_k if top_k > num_experts else 0)
    ranks = torch.rand(num_tokens, known, generator=generator)
    if data.draw(st.booleans(), "skewed"):  # some experts get most pairs, some none
        ranks = ranks * torch.arange(1, known + 1)
    experts = ranks.argsort(dim=1)[:, :top_k]
    share = data.draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]), "share of sentinels")
    away = torch.rand(experts.shape, generator=generator) < share
    sentinel = data.draw(st.sampled_from([-1, -7, num_experts, num_experts + 3, 2**31 - 1, -(2**31)]), "sentinel")
    return torch.where(away, sentinel, experts)


def draw_case(data: Any) -> Case:
    x_dtype, dtype, autocast = data.draw(st.sampled_from(DTYPES), "dtypes of x, weights, autocast")
    num_tokens, num_experts = data.draw(st.integers(0, 40), "T"), data.draw(st.integers(1, 8), "E")
    top_k = data.draw(st.integers(1, min(num_experts, 4)) | st.integers(1, num_experts + 3), "K")
    d, n = (data.draw(st.sampled_from(WIDTHS), name) for name in "dn")
    activation = data.draw(st.sampled_from([*ACTIVATIONS, "drawn"]), "activation")
    if activation == "drawn":
        limit = data.draw(st.floats(0.01, 8), "limit")
        activation = clamped_swiglu(limit, data.draw(st.floats(-3, 3), "alpha"))
    halves = activation_named(activation).halves
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), "seed of values"))

    def layout() -> str:
        return data.draw(st.sampled_from(["plain", "plain", "transposed", "unaligned", "spread"]), "layout")

    def normal(dtype: torch.dtype, *shape: int, variance: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=F64) * variance**0.5
        return laid_out(values.to(dtype), layout())

    experts = draw_experts(data, num_tokens, num_experts, top_k, generator)
    varying: dict[str, Tensor] = {}
    if data.draw(st.integers(0, 2), "varying") == 0:
        kept = torch.rand(experts.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.6, 1.0]), "kept")
        unused = data.draw(st.integers(0, 5), "unused places")
        offsets = torch.nn.functional.pad(kept.sum(dim=1).cumsum(0), (1, 0))
        pair_tokens = torch.nn.functional.pad(kept.nonzero()[:, 0], (0, unused))
        experts = torch.nn.functional.pad(experts[kept], (0, unused), value=-1)
        varying = {"pair_tokens": pair_tokens.int(), "token_offsets": offsets.int()}
    experts = experts.to(data.draw(st.sampled_from([torch.int32, torch.int64]), "dtype of ids"))
    here = (experts >= 0) & (experts < num_experts)
    scores = torch.randn(experts.shape, generator=generator, dtype=F64)
    scores = scores.to(data.draw(st.sampled_from([F32, F32, F64, BF16]), "dtype of scores"))
    if data.draw(st.booleans(), "bad scores of sentinels"):
        scores = scores.masked_fill(~here, math.nan)

    row_capacity = data.draw(st.sampled_from([None, None, None, 0, 0.5, 1.0, 1.5]), "capacity")
    if row_capacity is not None:
        row_capacity = round(row_capacity * int(here.sum()))
    workspace = None
    if not varying and data.draw(st.booleans(), "workspace"):
        itemsize = (x_dtype if autocast is None or x_dtype == F64 else autocast).itemsize
        per_token = top_k * itemsize * max(halves * n + n, n + d, halves * n + d) + 4 * d  # or float32 sums
        workspace = data.draw(st.sampled_from([per_token, 3 * per_token, 9 * per_token, 10**12]), "workspace_bytes")
    dispatch = None
    if not varying and workspace is None and data.draw(st.booleans(), "dispatch="):
        dispatch = dispatch_fixed(experts, num_experts, row_capacity)

    # Large numbers only where H's rounding errors stay small beside the curvature of an activation, which bounds neglect.
    variance = 1.0
    if autocast is None and x_dtype in (F32, F64):
        variance = data.draw(st.sampled_from([1.0, 1.0, 1.0, 1e-12, 900.0]), "variance of x")
    x = normal(x_dtype, num_tokens, d, variance=variance)
    if num_tokens and data.draw(st.integers(0, 4), "one token many times") == 0:
        x = x[:1].expand(num_tokens, d)
    d_out = normal(x_dtype if autocast is None or x_dtype == F64 else autocast, num_tokens, d)
    if data.draw(st.integers(0, 4), "expanded gradient") == 0:
        d_out = d_out.new_tensor(0.75).expand(num_tokens, d)
    up_bias, down_bias = data.draw(st.booleans(), "up_bias"), data.draw(st.booleans(), "down_bias")
    how = {
        "save": data.draw(st.sampled_from(SavePolicy), "save"),
        "backend": data.draw(st.sampled_from(["torch", "auto"]), "backend"),
        "combine": data.draw(st.sampled_from(["gather", "fused", "fused_both"]), "combine"),
    }
    if dispatch is None:
        how["workspace_bytes"] = workspace
    case = Case(
        x=x,
        gate_up_proj=normal(dtype, num_experts, halves * n, d, variance=1 / d),
        down_proj=normal(dtype, num_experts, d, n, variance=1 / n),
        scores=laid_out(scores, layout()),
        topk_experts=experts,
        up_bias=normal(dtype, num_experts, halves * n) if up_bias else None,
        down_bias=normal(dtype, num_experts, d) if down_bias else None,
        options={"num_experts": num_experts, "activation": activation, "row_capacity": row_capacity},
        varying=varying,
        d_out=d_out,
        dispatch=dispatch,
        how=how,
        autocast=autocast,
    )
    wants = data.draw(st.just([True] * 6) | st.lists(st.booleans(), min_size=6, max_size=6), "requires_grad")
    for name, want in zip(NAMES, wants, strict=True):
        if (tensor := getattr(case, name)) is not None:
            tensor.requires_grad_(want)
    return case


def try_experts(data: Any) -> None:
    """Every save policy gives the same bits."""
    case = draw_case(data)
    got, bounds = case.results(), error_bounds(case.problem())
    assert got["out"].dtype == case.dtype
    for name, exact in case.named(case.reference()).items():
        value = got[name]
        if name != "out":
            given = case.trained[name]
            assert value.dtype == given.dtype and value.shape == exact.shape
        error, bound = (value.double() - exact).abs(), bounds[name]
        assert (error <= bound).all(), (
            f"{name}: off by {(error / bound).nan_to_num(math.inf).max():.3g} times what is allowed"
        )

    if case.dtype in (BF16, F16) and case.d_out.stride() != (0, 0):
        for name in ("gate_up_proj", "down_proj"):
            grad = got.get(name)
            # A token times a power of two is not rounded: few of at least 8 are one.
            if (
                grad is not None
                and grad.dtype == F32
                and min(grad.shape[1:]) >= 8
                and (values := grad[grad != 0]).numel() >= 100
            ):
                rounded = (values.to(case.dtype).float() == values).double().mean()
                assert rounded < 0.5, f"gradient of {name}: float32 that was rounded to {case.dtype}"
    cases.assert_same_bits(
        case.results(save=data.draw(st.sampled_from(SavePolicy), "other policy")).values(), got.values()
    )


@SHARDS
def test_experts_against_the_oracle(shard: int) -> None:
    check(try_experts, shard, examples=1800)


def try_bad_tokens(data: Any) -> None:
    """NaN or infinite features of some tokens: every other token's output, gradient and scores' gradients keep their bits, as
    do the gradients of experts that no bad token visits; the bad tokens' outputs are NaN or infinite where a pair runs."""
    case = draw_case(data)
    num_tokens = len(case.d_out)
    if not num_tokens:
        return
    bad = torch.zeros(num_tokens, dtype=torch.bool)
    bad[data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=3), "bad tokens")] = True
    for name in NAMES:
        if (tensor := getattr(case, name)) is not None:
            tensor.requires_grad_()
    clean = case.results()
    x = torch.where(bad[:, None], data.draw(st.sampled_from([math.nan, math.inf, -math.inf])), case.x.detach())
    case = replace(case, x=x.requires_grad_())
    got, problem = case.results(), case.problem()
    runs = torch.zeros(num_tokens, dtype=torch.bool)
    runs[problem.row_token] = True
    assert torch.equal(got["out"][~bad], clean["out"][~bad]) and torch.equal(got["x"][~bad], clean["x"][~bad])
    assert not got["out"][bad & runs].isfinite().all(dim=1).any() or case.options["activation"] != "swiglu"
    assert not got["out"][bad & ~runs].any()
    visited = problem.row_expert[bad[problem.row_token]]
    others = torch.ones(case.options["num_experts"], dtype=torch.bool)
    others[visited] = False
    for name in cases.WEIGHTS:
        if name in got:
            assert torch.equal(got[name][others], clean[name][others]), name
    pairs = torch.ones(case.scores.numel(), dtype=torch.bool)
    pairs[problem.row_pair[bad[problem.row_token]]] = False
    assert torch.equal(got["scores"].flatten()[pairs], clean["scores"].flatten()[pairs])


@SHARDS
def test_a_bad_token_harms_no_other(shard: int) -> None:
    check(try_bad_tokens, shard, examples=300)


FORMULAS = {
    "swiglu": lambda g, u: g * torch.sigmoid(g) * u,
    "geglu": lambda g, u: g * (1 + torch.erf(g / math.sqrt(2))) / 2 * u,
    "relu": lambda g: torch.where(g > 0, g, 0.0),
    "relu2": lambda g: torch.where(g > 0, g, 0.0) ** 2,
    "silu": lambda g: g * torch.sigmoid(g),
    "gelu": lambda g: g * (1 + torch.erf(g / math.sqrt(2))) / 2,
}


def gpt_oss(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """The clamped SwiGLU of gpt-oss, as its modelling code states it."""
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def try_activations(data: Any) -> None:
    """The table's functions and slopes against the formulas, on which the oracle stands."""
    name = data.draw(st.sampled_from([*FORMULAS, "clamped_swiglu"]), "activation")
    formula, limit = FORMULAS.get(name), 0.0
    if formula is None:
        limit, alpha = data.draw(st.floats(0.01, 8), "limit"), data.draw(st.floats(-3, 3), "alpha")
        name, formula = clamped_swiglu(limit, alpha), lambda g, u: gpt_oss(g, u, limit, alpha)
    values = st.lists(st.floats(-30, 30), min_size=8, max_size=8)
    h = torch.tensor(data.draw(values, "H"), dtype=F64).view(2, 4).requires_grad_()
    want = formula(*h.chunk(2, dim=1)) if activation_named(name).gated else formula(h)
    torch.testing.assert_close(activate(h, name), want, rtol=1e-12, atol=1e-12)
    d_act = torch.ones_like(want)
    (slope,) = torch.autograd.grad(want, h, d_act)
    kinks = (h.detach().abs() == 0) | (h.detach().abs() == limit)
    got = activate_backward(h.detach(), d_act, name)
    torch.testing.assert_close(got[~kinks], slope[~kinks], rtol=1e-10, atol=1e-10)


@SHARDS
def test_activations_against_their_formulas(shard: int) -> None:
    check(try_activations, shard, examples=150)
