"""Kernels of fixed seeds, for `scripts.checks.same_bits`: every product, dispatch and top-k of whichever package is given.

Nothing of blazeproto is imported here. A package whose products take ``gemm.Rows`` gets those, another its dispatch. Each
product gets random operands of its own, not what the one before it made, so that a difference shows where it arises. Outputs
are handed in, zeroed: rows that no pair has are part of what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.checks.bit_cases import (
    ACTIVATIONS,
    GATED,
    LARGE,
    ROUTINGS,
    TAILS,
    Y_OVER_ACT,
    Shape,
    choose,
    generator_of,
    normal,
)

ONE_EXPERT = (40_010, 72, 264, 2, 1)  # all rows are of the first expert: several CTAs share their sum
TILE_COLUMNS = 256
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """All products once, on one layer's shapes."""

    shape: Shape
    activation: str = "swiglu"
    bias: bool = False
    routing: str = "fixed"  # or "one": see ONE_EXPERT

    @property
    def name(self) -> str:
        sizes = "T{} d{} n{} E{} K{}".format(*self.shape)
        return f"products: {sizes}, {self.activation}{', bias' * self.bias}, {self.routing}"


def product_cases() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        for bias in (False, True):
            yield Case(TAILS[0], activation, bias)
    for routing in ROUTINGS[1:]:
        yield Case(TAILS[0], "swiglu", True, routing)
    for shape in (TAILS[1], Y_OVER_ACT):
        for routing in ROUTINGS:
            yield Case(shape, "swiglu", True, routing)
    for shape in LARGE:
        yield Case(shape)
    yield Case(ONE_EXPERT, routing="one")


class Operands:
    """Random operands and the dispatch of one case."""

    def __init__(self, package: ModuleType, case: Case, device: str) -> None:
        tokens, d, n, experts, top_k = case.shape
        generator, width = generator_of(case.name), n * (2 if case.activation in GATED else 1)

        def random(*size: int, scale: float = 1.0) -> Tensor:
            return normal(generator, *size, scale=scale).to(device)

        if case.routing == "one":
            chosen = {"experts": torch.zeros(tokens, top_k, dtype=torch.int32)}
        else:
            chosen = choose(case.shape, case.routing, generator)
        self.rows = tokens * top_k
        self.x, self.d_out = random(tokens, d), random(tokens, d)
        self.up, self.down = random(experts, width, d, scale=d**-0.5), random(experts, d, n, scale=n**-0.5)
        self.up_bias = random(experts, width) if case.bias else None
        self.down_bias = random(experts, d) if case.bias else None
        self.h, self.act, self.y = random(self.rows, width), random(self.rows, n), random(self.rows, d)
        self.scores = (torch.rand(self.rows, generator=generator) + 0.05).to(device)
        self.some_scores = torch.rand(self.rows, generator=generator).to(device)
        room, lists = package.dispatch, [tensor.to(device) for tensor in chosen.values()]
        build = room.build_dispatch if len(lists) == 1 else room.build_dispatch_varying
        self.dispatch = build(*lists, experts)
        self.device = device

    def blank(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)


def record(gemm: Any, dispatch: Any) -> Any:
    """The dispatch as the package's products take it."""
    if not hasattr(gemm, "Rows"):
        return dispatch
    d = dispatch
    lists = (d.expert_pair_indices, d.expert_token_offsets, d.token_index_map)
    return gemm.Rows(*lists, d.top_k, d.pair_tokens, d.token_offsets)


def run_products(package: ModuleType, case: Case, device: str = "cuda") -> Outputs:
    """Every output, by product and variant."""
    gemm, a = package.gemm, Operands(package, case, device)
    rows = record(gemm, a.dispatch)
    (_, width, d), n = a.up.shape, a.act.shape[1]
    made = {name: getattr(a.dispatch, name) for name in ("expert_pair_indices", "expert_token_offsets")}
    made["token_index_map"] = a.dispatch.token_index_map

    h, act = a.blank(a.rows, width), a.blank(a.rows, n)
    gemm.up_forward(a.x, a.up, rows, activation=case.activation, bias=a.up_bias, h=h, act=act)
    made |= {"up_forward h": h, "up_forward act": act}

    def y(columns: range | None, out: Tensor) -> Tensor:
        made_y: Tensor = gemm.down_forward(a.act, a.down, rows, bias=a.down_bias, columns=columns, y=out)
        return made_y

    def dx_rows(columns: range | None, out: Tensor) -> Tensor:
        made_rows: Tensor = gemm.up_backward_act(a.h, a.up, rows, columns=columns, dx_rows=out)
        return made_rows

    for name, product in (("down_forward", y), ("up_backward_act", dx_rows)):
        made[name] = product(None, a.blank(a.rows, d))
        for columns in (range(d // 16 * 8), range(d // 16 * 8, d)):
            made[f"{name} {columns}"] = product(columns, a.blank(a.rows, len(columns)))
    if d == n <= TILE_COLUMNS:
        over = a.act.clone()
        made["down_forward over act"] = gemm.down_forward(over, a.down, rows, bias=a.down_bias, y=over)

    products: tuple[tuple[Tensor, Tensor, dict[str, Any], int], ...] = (
        (a.act, a.down, {}, d),
        (a.act, a.down, {"bias": a.down_bias}, d),
        (a.h, a.up, {"transposed": True}, d),
        (a.x, a.up, {"gather": True}, width),
        (a.x, a.up, {"gather": True, "bias": a.up_bias}, width),
        (a.d_out, a.down, {"gather": True, "transposed": True}, n),
    )
    for left, weights, options, columns_out in products:
        out = gemm.grouped_mm(left, weights, rows, out=a.blank(a.rows, columns_out), **options)
        made[f"grouped_mm {sorted(options)}"] = out

    made["combine"] = gemm.combine(a.y, rows, out=a.blank(*a.x.shape))
    made["combine with scores"] = gemm.combine(a.y, rows, scores=a.scores, out=a.blank(*a.x.shape))
    wider = a.blank(a.x.shape[0], d + 16)
    made["combine some columns"] = gemm.combine(a.y, rows, scores=a.scores, columns=range(8, 8 + d), out=wider)

    for name, place in (("", a.blank(*a.h.shape)), (" over h", a.h.clone())):
        h_in = place if name else a.h
        outputs = {"dh": place, "a_scaled": a.blank(a.rows, n), "d_scores": a.blank(a.rows, dtype=torch.float32)}
        gemm.down_backward_act(a.d_out, a.down, h_in, a.scores, rows, activation=case.activation, **outputs)
        made |= {f"down_backward_act{name} {output}": tensor for output, tensor in outputs.items()}
    if a.down_bias is not None:
        d_scores = a.some_scores.clone()
        made["bias_score_grad"] = gemm.bias_score_grad(a.d_out, a.down_bias, rows, d_scores=d_scores)
    return made | weight_gradients(gemm, a, rows) | row_sums(gemm, a, rows)


def weight_gradients(gemm: Any, a: Operands, rows: Any) -> Outputs:
    """Both, gathering and with rows in order, in bf16, fp32 and added to fp32; the workspace as asked for."""
    made = {}
    tokens = a.dispatch.expert_token_indices.clamp_min(0).long()
    for gather in (True, False):
        x, d_out = (a.x, a.d_out) if gather else (a.x[tokens], a.d_out[tokens])
        of: dict[str, tuple[Tensor, Tensor, Tensor]] = {
            "down_backward_weight": (d_out, a.act, a.down),
            "up_backward_weight": (a.h, x, a.up),
        }
        for name, (first, second, weight) in of.items():
            for dtype, accumulate in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
                dw = weight.to(dtype, copy=True) if accumulate else a.blank(*weight.shape, dtype=dtype)
                workspace = a.blank(gemm.weight_workspace(name, dw, rows), dtype=torch.float32)
                options = {"gather": gather, "accumulate": accumulate, "workspace": workspace}
                getattr(gemm, name)(first, second, rows, dw=dw, **options)
                made[f"{name} {dtype} {gather=} {accumulate=} workspace={workspace.numel()}"] = dw
    return made


def row_sums(gemm: Any, a: Operands, rows: Any) -> Outputs:
    experts = a.up.shape[0]
    made = {}
    for dtype, accumulate in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        for name, values, options in (
            ("", a.h, {}),
            (" of gathered rows", a.d_out, {"gather": True, "scores": a.scores}),
        ):
            shape = (experts, values.shape[1])
            out = torch.ones(shape, dtype=dtype, device=a.device) if accumulate else a.blank(*shape, dtype=dtype)
            gemm.expert_row_sum(values, rows, out=out, accumulate=accumulate, **options)
            made[f"expert_row_sum{name} {dtype} {accumulate=}"] = out
    return made


# --- Routing -------------------------------------------------------------------------------------------------------------


def routing_cases(package: ModuleType, device: str = "cuda") -> Iterator[tuple[str, Callable[[], Outputs]]]:
    """Every method of a dispatch and every score of the top-k kernels, by name."""
    for shape, dtype in (((300, 8, 8, 7, 3), torch.int32), ((20_000, 8, 8, 130, 8), torch.int64)):
        for method in ("tiled", "dense", "sort"):
            name = f"dispatch: T{shape[0]} E{shape[3]} K{shape[4]}, {dtype}, {method}"
            yield name, partial(run_dispatch, package, shape, dtype, method, device)
    for score, bias in (("softmax_topk", False), ("topk_softmax", False), ("sigmoid", False), ("sigmoid", True)):
        for dtype in (torch.float32, torch.bfloat16):
            for experts, top_k in ((7, 3), (128, 8), (520, 16)):
                name = f"top-k: E{experts} K{top_k}, {score}{', bias' * bias}, {dtype}"
                yield name, partial(run_topk, package, score, bias, experts, top_k, dtype, device)


def run_dispatch(package: ModuleType, shape: Shape, dtype: torch.dtype, method: str, device: str) -> Outputs:
    experts = choose(shape, "sentinels", generator_of(method))["experts"].to(device, dtype)
    made = package.dispatch.build_dispatch(experts, shape[3], method=method)
    lists = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "token_expert_indices")
    return {name: getattr(made, name) for name in lists}


def run_topk(
    package: ModuleType, score: str, bias: bool, num_experts: int, top_k: int, dtype: torch.dtype, device: str
) -> Outputs:
    room = package.dispatch if hasattr(package.dispatch, "topk_route") else package.router
    generator = generator_of(score)
    logits = torch.randn(777, num_experts, generator=generator).to(device, dtype)
    added = torch.randn(num_experts, generator=generator).to(device) if bias else None
    d_scores = torch.randn(777, top_k, generator=generator).to(device)
    scores, experts = room.topk_route(logits, top_k, score=score, bias=added)
    d_logits = room.topk_route_backward(logits, experts, d_scores, score=score)
    return {"scores": scores, "experts": experts, "d_logits": d_logits}
