"""What the products are compared with: their formulas, written once and evaluated twice.

`EXACT` evaluates them in float64. `YARDSTICK` multiplies bf16 matrices with fp32 accumulation and rounds to bf16 where
the kernels do (H, act, Y, dH, S·act, dX̃): its distance from EXACT is what rounding costs anyone, and kernels may err
little more.

`evaluate` runs all products. Chained (no ``given``), each takes what the one before it made; with ``given``, each takes
its inputs from there, so that an error shows in the product that made it. `run_kernels` does either with the kernels.
Both return the same names. Shapes: T tokens, E experts, d and n widths, R rows, P pairs, G = 2 for a gated activation, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.activations import activate, activation_named
from blazeproto.dispatch import Dispatch
from blazeproto.gemm.reduce import row_sum_slots

ROUTINGS = ("uniform", "zipf", "same", "half_empty")
BY_ROW_BYTES = 2**28  # up to this size each row's weight matrix is gathered, instead of looping over experts


# --- A layer's inputs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    tokens: int
    d: int
    n: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T{self.tokens}-d{self.d}-n{self.n}-E{self.experts}-K{self.top_k}"


@dataclass
class Case:
    """Everything that enters one layer's forward and backward. bf16, scores fp32, indices int32."""

    x: Tensor  # (T, d)
    up_proj: Tensor  # (E, G n, d)
    down_proj: Tensor  # (E, d, n)
    scores: Tensor  # (P,)
    d_out: Tensor  # (T, d)
    dispatch: Dispatch
    activation: str
    up_bias: Tensor | None = None  # (E, G n)
    down_bias: Tensor | None = None  # (E, d)
    row_expert: Tensor = field(init=False)  # (rows in use,)
    row_pair: Tensor = field(init=False)
    row_token: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = self.dispatch.expert_token_offsets.diff().long()
        self.row_expert = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        self.row_pair = self.dispatch.expert_pair_indices[: len(self.row_expert)].long()
        top_k, pair_tokens = self.dispatch.top_k, self.dispatch.pair_tokens
        self.row_token = self.row_pair // top_k if top_k else pair_tokens.long()[self.row_pair]


def make_case(
    shape: Shape,
    routing: str = "uniform",
    *,
    activation: str = "swiglu",
    biases: bool = False,
    sentinels: float = 0.0,
    varying: bool = False,
    row_capacity: int | None = None,
    unit_weights: bool = False,
    device: str = "cuda",
    seed: int = 0,
) -> Case:
    """Random data at unit scale, weights at 1/√fan-in or at unit scale too.

    sentinels: share of the pairs whose expert lives elsewhere.  varying: the number of experts per token varies (sentinels
    leave no trace but unused capacity at the end of the pairs).  row_capacity: the most rows, as in `build_dispatch`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width = shape.n * activation_named(activation).halves

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=device, generator=generator).mul_(scale).bfloat16()

    def weights(*size: int) -> Tensor:
        return normal(*size, scale=1.0 if unit_weights else 1 / math.sqrt(size[-1]))

    experts = route(shape, routing, sentinels, generator)
    return Case(
        x=normal(shape.tokens, shape.d),
        up_proj=weights(shape.experts, width, shape.d),
        down_proj=weights(shape.experts, shape.d, shape.n),
        scores=torch.rand(experts.numel(), device=device, generator=generator) + 0.05,
        d_out=normal(shape.tokens, shape.d),
        dispatch=(dispatch_varying if varying else dispatch_fixed)(experts, shape.experts, row_capacity),
        activation=activation,
        up_bias=normal(shape.experts, width) if biases else None,
        down_bias=normal(shape.experts, shape.d) if biases else None,
    )


def route(shape: Shape, routing: str, sentinels: float, generator: torch.Generator) -> Tensor:
    """(T, K) distinct expert ids; a share of them replaced by ids outside [0, E). Where K > E they are of K + E experts, of
    which the first E are here."""
    device = generator.device
    num_experts = shape.experts + (shape.top_k if shape.top_k > shape.experts else 0)
    size = (shape.tokens, num_experts)
    preference = torch.zeros(num_experts, device=device)
    if routing == "zipf":
        ranks = torch.randperm(num_experts, device=device, generator=generator) + 1
        preference = -1.2 * ranks.log()
    elif routing == "same":
        preference = 1e6 * torch.rand(num_experts, device=device, generator=generator)
    elif routing == "half_empty":
        preference[max(shape.top_k, num_experts // 2) :] = -1e4
    noise = -torch.empty(size, device=device).exponential_(generator=generator).log()  # Gumbel: draws by preference
    experts = (preference + noise).topk(shape.top_k, dim=1).indices
    elsewhere = torch.rand(experts.shape, device=device, generator=generator) < sentinels
    below = torch.rand(experts.shape, device=device, generator=generator) < 0.5
    return torch.where(elsewhere, torch.where(below, -1, shape.experts), experts)


def _lists(pair_experts: Tensor, num_experts: int, row_capacity: int | None) -> dict[str, Any]:
    """The index lists of a dispatch of flat ids (P,), by a stable sort, and the number of experts."""
    here = (pair_experts >= 0) & (pair_experts < num_experts)
    order = torch.where(here, pair_experts, num_experts).sort(stable=True).indices
    count = torch.bincount(pair_experts[here], minlength=num_experts)
    offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    capacity = len(order) if row_capacity is None else min(row_capacity, len(order))
    in_use = torch.arange(capacity, device=order.device) < offsets[-1]
    return {
        "expert_pair_indices": torch.where(in_use, order[:capacity], -1).int(),
        "expert_token_offsets": offsets.clamp(max=capacity).int(),
        "token_index_map": torch.where(here & (row < capacity), row, -1).int(),
        "token_expert_indices": pair_experts.int(),
        "overflow": None if row_capacity is None else (offsets[-1:] - capacity).clamp(min=0).int(),
        "num_experts": num_experts,
    }


def dispatch_fixed(experts: Tensor, num_experts: int, row_capacity: int | None = None) -> Dispatch:
    """Of (T, K) ids, without the kernels."""
    num_tokens, top_k = experts.shape
    return Dispatch(**_lists(experts.flatten(), num_experts, row_capacity), top_k=top_k, num_tokens=num_tokens)


def dispatch_varying(experts: Tensor, num_experts: int, row_capacity: int | None = None) -> Dispatch:
    """Each token keeps the ids inside [0, E); the capacity stays T·K pairs, those left over carry expert -1."""
    here = (experts >= 0) & (experts < num_experts)
    pair_experts = experts.new_full((experts.numel(),), -1)
    pair_tokens = torch.zeros_like(pair_experts)
    used = int(here.sum())
    pair_experts[:used] = experts[here]
    pair_tokens[:used] = here.nonzero()[:, 0]
    counts = here.sum(dim=1)
    token_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Dispatch(
        **_lists(pair_experts, num_experts, row_capacity),
        top_k=None,
        num_tokens=len(experts),
        token_offsets=token_offsets.int(),
        pair_tokens=pair_tokens.int(),
    )


# --- The formulas --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    dtype: torch.dtype  # of sums
    rounds: bool  # results to bf16

    def round(self, value: Tensor) -> Tensor:
        return value.bfloat16() if self.rounds else value

    def add_bias(self, product: Tensor, bias: Tensor | None, case: Case) -> Tensor:
        """product (rows, m) + bias[expert of row], bias (E, m), rounded."""
        if bias is None:
            return self.round(product)
        return self.round(product.to(self.dtype) + bias[case.row_expert])

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of bf16 values, in ``dtype``."""
        if self.rounds and a.is_cuda and a.dim() == 2:
            return torch.mm(a, b, out_dtype=self.dtype)  # tensor cores, as anyone would
        return a.to(self.dtype) @ b.to(self.dtype)

    def by_expert(self, left: Tensor, weights: Tensor, case: Case) -> Tensor:
        """out[r] = left[r] @ weights[expert of r].  left (rows, k), weights (E, k, m) → (rows, m)."""
        if left.shape[0] * weights[0].numel() * self.dtype.itemsize <= BY_ROW_BYTES:
            return self.matmul(left[:, None], weights[case.row_expert])[:, 0]
        bounds = case.dispatch.expert_token_offsets.tolist()
        parts = [self.matmul(left[a:b], w) for (a, b), w in zip(pairwise(bounds), weights, strict=True) if a < b]
        return torch.cat(parts)

    def outer_by_expert(self, left: Tensor, right: Tensor, case: Case) -> Tensor:
        """out[e] = sum over the rows of e of left[r]ᵀ right[r].  (rows, m), (rows, k) → (E, m, k)."""
        bounds = case.dispatch.expert_token_offsets.tolist()
        out = left.new_zeros(len(bounds) - 1, left.shape[1], right.shape[1], dtype=self.dtype)
        if left.shape[0] * out[0].numel() * self.dtype.itemsize <= BY_ROW_BYTES:
            return _add_in_one_order(out, case.row_expert, self.matmul(left[:, :, None], right[:, None]))
        for e, (a, b) in enumerate(pairwise(bounds)):
            if a < b:
                out[e] = self.matmul(left[a:b].T, right[a:b])
        return out

    def combine(self, y: Tensor, case: Case, scores: Tensor | None) -> Tensor:
        """Σ over a token's pairs of scores[p]·y[row of p]: (rows, d) → (T, d)."""
        weighted = y.to(self.dtype) if scores is None else y.to(self.dtype) * scores[case.row_pair, None]
        return _add_in_one_order(y.new_zeros(case.x.shape, dtype=self.dtype), case.row_token, weighted)

    def expert_sum(self, values: Tensor, case: Case, scores: Tensor | None = None) -> Tensor:
        """Σ over an expert's rows: (rows, m) → (E, m)."""
        weighted = values.to(self.dtype) if scores is None else values.to(self.dtype) * scores[case.row_pair, None]
        zeros = values.new_zeros(len(case.up_proj), values.shape[1], dtype=self.dtype)
        return _add_in_one_order(zeros, case.row_expert, weighted)


def _add_in_one_order(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``out.index_add_(0, index, values)``, which by itself adds in another order every time on a GPU: a yardstick would move."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        return out.index_add_(0, index, values)
    finally:
        torch.set_deterministic_debug_mode(before)


EXACT = Arithmetic(torch.float64, rounds=False)
YARDSTICK = Arithmetic(torch.float32, rounds=True)


def evaluate(arithmetic: Arithmetic, case: Case, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every output of forward and backward. Row outputs hold the rows in use only."""
    a, result = arithmetic, dict[str, Tensor]()
    inputs = (
        result if given is None else {k: v[: len(case.row_pair)] if k in ROW_OUTPUTS else v for k, v in given.items()}
    )
    scores = case.scores.to(a.dtype)
    row_score, d_out = scores[case.row_pair, None], case.d_out[case.row_token]

    h = a.by_expert(case.x[case.row_token], case.up_proj.mT, case)
    result["h"] = a.add_bias(h, case.up_bias, case)
    result["act"] = a.round(activate(result["h"].to(a.dtype), case.activation))
    y = a.by_expert(inputs["act"], case.down_proj.mT, case)
    y = a.add_bias(y, case.down_bias, case)
    result["y"], result["fused"] = y, a.combine(y, case, scores)
    result["out"] = a.round(a.combine(inputs["y"], case, scores))

    d_act = a.by_expert(d_out, case.down_proj, case)
    h = inputs["h"].to(a.dtype).detach().requires_grad_()
    act = activate(h, case.activation)
    result["dh"] = a.round(torch.autograd.grad(act, h, row_score * d_act)[0])
    act = a.round(act.detach())
    result["a_scaled"] = a.round(row_score * act)
    d_score = (d_act * act).sum(dim=1)
    if case.down_bias is not None:
        d_score += (d_out.to(a.dtype) * case.down_bias[case.row_expert].to(a.dtype)).sum(dim=1)
        result["d_down_bias"] = a.round(a.expert_sum(d_out, case, scores))
    result["d_scores"] = torch.zeros_like(scores).index_copy_(0, case.row_pair, d_score)
    result["d_down_f32"] = a.outer_by_expert(d_out, inputs["a_scaled"], case)
    result["d_down"] = a.round(result["d_down_f32"])

    result["dx_rows"] = a.round(a.by_expert(inputs["dh"], case.up_proj, case))
    result["dx"] = a.round(a.combine(inputs["dx_rows"], case, None))
    result["d_up_f32"] = a.outer_by_expert(inputs["dh"], case.x[case.row_token], case)
    result["d_up"] = a.round(result["d_up_f32"])
    if case.up_bias is not None:
        result["d_up_bias"] = a.round(a.expert_sum(inputs["dh"], case))
    return result


ROW_OUTPUTS = ("h", "act", "y", "dh", "a_scaled", "dx_rows")


# --- The kernels ---------------------------------------------------------------------------------------------------------


def run_kernels(
    case: Case, given: Mapping[str, Tensor] | None = None, configs: Mapping[str, gemm.TileConfig] | None = None
) -> dict[str, Tensor]:
    """Every output by the kernels, into memory poisoned with NaN. Row outputs have all R rows; those not in use stay NaN."""
    dispatch, num_rows = case.dispatch, case.dispatch.num_rows
    num_experts, width, d = case.up_proj.shape
    n = case.down_proj.shape[2]
    result = dict[str, Tensor]()
    inputs = (
        result if given is None else {k: pad_rows(v, num_rows) if k in ROW_OUTPUTS else v for k, v in given.items()}
    )

    def poisoned(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(size, math.nan, dtype=dtype, device=case.x.device)

    def row_sum_options(width: int) -> dict[str, Any]:
        slots = poisoned(row_sum_slots(num_rows, num_experts), width, dtype=torch.float32)
        return {"out": poisoned(num_experts, width), "workspace": slots}

    def tiles(product: str) -> dict[str, Any]:
        return {"config": configs[product]} if configs and product in configs else {}

    result["h"], result["act"] = gemm.up_forward(
        case.x,
        case.up_proj,
        dispatch,
        activation=case.activation,
        bias=case.up_bias,
        h=poisoned(num_rows, width),
        act=poisoned(num_rows, n),
        **tiles("up_forward"),
    )
    down = (inputs["act"], case.down_proj)
    forward_options: dict[str, Any] = {"bias": case.down_bias, **tiles("down_forward")}
    result["y"] = gemm.down_forward(*down, dispatch, y=poisoned(num_rows, d), **forward_options)
    zeros = torch.zeros(case.x.shape, device=case.x.device)
    result["fused"] = gemm.down_forward_fused(*down, case.scores, dispatch, out_f32=zeros, **forward_options)
    result["out"] = gemm.combine(inputs["y"], dispatch, scores=case.scores, out=poisoned(*case.x.shape))

    result["dh"], result["a_scaled"], result["d_scores"] = gemm.down_backward_act(
        case.d_out,
        case.down_proj,
        inputs["h"],
        case.scores,
        dispatch,
        activation=case.activation,
        dh=poisoned(num_rows, width),
        a_scaled=poisoned(num_rows, n),
        d_scores=poisoned(len(case.scores), dtype=torch.float32),
        workspace=poisoned(
            gemm.score_partials(n, tiles("down_backward_act").get("config")), num_rows, dtype=torch.float32
        ),
        **tiles("down_backward_act"),
    )

    def weight_options(product: str, *shape: int, dtype: torch.dtype) -> dict[str, Any]:
        dw = poisoned(*shape, dtype=dtype)
        elements = gemm.weight_workspace(product, dw, dispatch, **tiles(product))
        return {"dw": dw, "workspace": poisoned(elements, dtype=torch.float32), **tiles(product)}

    for suffix, dtype in (("", torch.bfloat16), ("_f32", torch.float32)):
        options = weight_options("down_backward_weight", num_experts, d, n, dtype=dtype)
        result["d_down" + suffix] = gemm.down_backward_weight(case.d_out, inputs["a_scaled"], dispatch, **options)
        options = weight_options("up_backward_weight", num_experts, width, d, dtype=dtype)
        result["d_up" + suffix] = gemm.up_backward_weight(inputs["dh"], case.x, dispatch, **options)
    if case.down_bias is not None:
        gemm.bias_score_grad(case.d_out, case.down_bias, dispatch, d_scores=result["d_scores"])
        result["d_down_bias"] = gemm.expert_row_sum(
            case.d_out, dispatch, gather=True, scores=case.scores, **row_sum_options(d)
        )
    result["dx_rows"] = gemm.up_backward_act(
        inputs["dh"], case.up_proj, dispatch, dx_rows=poisoned(num_rows, d), **tiles("up_backward_act")
    )
    result["dx"] = gemm.combine(inputs["dx_rows"], dispatch, out=poisoned(*case.x.shape))
    if case.up_bias is not None:
        result["d_up_bias"] = gemm.expert_row_sum(inputs["dh"], dispatch, **row_sum_options(width))
    return result


def pad_rows(value: Tensor, num_rows: int) -> Tensor:
    """The rows in use, then NaN up to R rows: nothing may read those."""
    padding = value.new_full((num_rows - value.shape[0], value.shape[1]), math.nan)
    return torch.cat([value, padding])


def stray_writes(case: Case, result: Mapping[str, Tensor]) -> list[str]:
    """Outputs of `run_kernels` in which a row that no pair has was written."""
    used = len(case.row_pair)
    return [f"{name}: wrote past row {used}" for name in ROW_OUTPUTS if not result[name][used:].isnan().all()]
