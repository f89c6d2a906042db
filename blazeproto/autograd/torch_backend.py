"""The products of the expert MLP with plain torch operations: any device, any floating dtype.

This is the ``backend="torch"``, a `blazeproto.autograd.call.Backend`, whose docstrings give the shapes. Each product is its
formula (`blazeproto.gemm.product.Product.spec`), computed by `torch_formulas`, whose docstring says what is rounded.

With ``precision="fp8"`` it computes what the kernels do, of numbers in x's dtype that are e4m3 times their scales: weights are
`Quantized`, and H, act, dH and A' are records, as `hopper_backend` has them. With "fp8_rollout" too, but x's dtype rounds numbers
whose scales are float32, and products are not summed 128 at a time: its bits are not the kernels'.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.call import BackendStep, OuterSum
from blazeproto.autograd.records import new_rows, rows_in, width_of
from blazeproto.autograd.torch_formulas import Torch, outputs
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm import down_backward, linear, reduce, up, weight
from blazeproto.gemm.combine import SPEC as COMBINE
from blazeproto.gemm.e4m3 import Quantized, from_e4m3, in_e4m3, to_e4m3
from blazeproto.gemm.recipe import FP8, Operand

READS_ACT = True


def build_dispatch(topk_experts: Tensor, num_experts: int, lists: tuple[Tensor, Tensor, Tensor]) -> None:
    pair_indices, offsets, token_index_map = lists
    num_rows = pair_indices.shape[0]
    experts = topk_experts.reshape(-1)
    here = (experts >= 0) & (experts < num_experts)
    keys = torch.where(here, experts, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    counts.scatter_add_(0, keys.long(), torch.ones_like(keys, dtype=torch.int32))
    offsets[:1].zero_()  # offsets[0] = 0 would copy a number from the host and wait
    offsets[1:] = counts[:-1].cumsum(0).clamp_max_(num_rows)
    order = torch.sort(keys, stable=True).indices  # (P,) the pair in each row; pairs without a row come last
    token_index_map[order] = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    token_index_map.masked_fill_(~here | (token_index_map >= num_rows), -1)
    order = order[:num_rows]
    pair_indices.copy_(order).masked_fill_(~here[order], -1)


def rows_of(dispatch: Dispatch) -> Dispatch:
    """As it is."""
    return dispatch


def low_rank_rows(
    a: Tensor, factor: Tensor, rows: Dispatch, *, gather: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    options: dict[str, Any] = {"gather": gather, "transposed": transposed}
    return _place(outputs(linear.GROUPED_MM, rows, a.dtype, a=a, weights=factor, **options), out)


def up_forward(step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
    weight = _plain_weight(step, x.dtype)
    call: dict[str, Any] = {"up_proj": weight, "bias": step.bias, "low": step.low, "activation": step.activation}
    made_h, made_act = outputs(up.SPEC, step.rows, x.dtype, x=x, **call)
    if isinstance(step.weight, Quantized):
        return _record_of(made_h, h), _record_of(made_act, operand=step.recipe.act)
    return _place(made_h, h), _place(made_act, act)


def down_forward(step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
    """All kinds of combine are one here, and ``act`` is not written over."""
    _add_up(step, _linear(step, plain_rows(act, step.rows, out.dtype), _plain_weight(step, out.dtype)), out)


def down_backward_act(
    step: BackendStep, needs: Sequence[bool], d_out: Tensor, h: Tensor, act: Tensor | None, *, overwrite_h: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``act`` is used where it was saved, else made again from ``h``, which is not written over."""
    rows, scores, stored = step.rows, step.scores, h
    h, weight = plain_rows(h, rows, d_out.dtype), _plain_weight(step, d_out.dtype, transposed=True)
    wanted = [name for name, need in zip(("dh", "d_scores", "a_scaled"), needs, strict=True) if need]
    call: dict[str, Any] = {"down_proj": weight, "h": h, "scores": scores, "act": act, "low": step.low}
    made = outputs(down_backward.SPEC, rows, h.dtype, d_out=d_out, activation=step.activation, needs=wanted, **call)
    dh, a_scaled, d_scores = made
    if d_scores is not None:
        if step.bias is not None:
            d_scores += outputs(reduce.SCORE_GRAD, rows, h.dtype, d_out=step.unquantized, down_bias=step.bias)
        d_scores = d_scores.reshape(scores.shape)
    if stored is not h:
        dh, a_scaled = (None if made is None else _record_of(made) for made in (dh, a_scaled))
    return dh, d_scores, a_scaled


def up_backward_act(step: BackendStep, dh: Tensor, dx: Tensor) -> None:
    """All kinds of combine are one here."""
    weight = _plain_weight(step, dx.dtype, transposed=True)
    _add_up(step, _linear(step, plain_rows(dh, step.rows, dx.dtype), weight, transposed=True), dx)


def weight_gradient(rows: Dispatch, of: OuterSum) -> Tensor:
    like, accumulator, ordered = of.like, of.accumulator, plain_rows(of.taken(), rows, of.left.dtype)
    m = Torch(rows, like.dtype if accumulator is None else accumulator.dtype)
    if of.transposed == like.is_contiguous():  # it is made as it lies
        made = weight.up_formula(m, ordered, of.left, gather=of.gather)
    else:
        made = weight.down_formula(m, of.left, ordered, gather=of.gather)
    made = made if like.is_contiguous() else made.mT
    return made if accumulator is None else accumulator.add_(made)


def expert_row_sum(
    values: Tensor, num_experts: int, rows: Dispatch, scores: Tensor | None, accumulator: Tensor | None
) -> Tensor:
    made = reduce.sum_formula(Torch(rows), values, gather=scores is not None, scores=scores)
    return made if accumulator is None else accumulator.add_(made)


# ---- operands ----------------------------------------------------------------------------------------------------


def quantized_tokens(t: Tensor, rows: Dispatch, operand: Operand) -> Tensor:
    """In t's dtype."""
    return in_e4m3(torch, t, *operand[1:]).to(t.dtype)  # type: ignore[no-any-return]


def quantize_weights(
    weights: Tensor,
    at: Any,
    out: Quantized | None,
    transposed: Quantized | None,
    *,
    scale_values: str = "power_of_two",
) -> None:
    made = to_e4m3(torch, weights, FP8.weights.scale, scale_values)
    for to, values, scales in ((out, *made), (transposed, made.values.mT, made.scales.mT)):
        if to is not None:
            to.values.copy_(values), to.scales.copy_(scales)


def refresh_weights(
    weight: Tensor,
    dtype: torch.dtype,
    out: Quantized,
    transposed: Quantized,
    hashes: Tensor,
    call: int,
    *,
    scale_values: str,
) -> None:
    """Always; what has saved them for backward is not told."""
    places = (Quantized(each.values.data, each.scales.data) for each in (out, transposed))
    quantize_weights(weight.to(dtype), None, *places, scale_values=scale_values)


place_of = rows_of


def _plain_weight(step: BackendStep, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """A step's weight (E, out, in), whose transpose it may be where it is quantized: no number changes."""
    if not isinstance(step.weight, Quantized):
        return step.weight  # type: ignore[no-any-return]
    made: Tensor = from_e4m3(torch, step.weight, FP8.weights.scale).to(dtype)
    return made.mT.contiguous() if transposed else made


def plain_rows(record: Tensor, rows: Dispatch, dtype: torch.dtype) -> Tensor:
    """Other rows stay as they are."""
    if record.dtype != torch.uint8:
        return record
    return from_e4m3(torch, rows_in(record, width_of(record)), FP8.h.scale).to(dtype)  # type: ignore[no-any-return]


def _record_of(rows: Tensor, place: Tensor | None = None, operand: Operand = FP8.h) -> Tensor:
    record = new_rows(rows, *rows.shape) if place is None else place
    made, to = to_e4m3(torch, rows, *operand[1:]), rows_in(record, rows.shape[1])
    to.values.copy_(made.values), to.scales.copy_(made.scales)
    return record


def _linear(step: BackendStep, a: Tensor, weights: Tensor, **options: bool) -> Tensor:
    call: dict[str, Any] = {"weights": weights, "bias": step.bias, "low": step.low, **options}
    return outputs(linear.GROUPED_MM, step.rows, a.dtype, a=a, **call)  # type: ignore[no-any-return]


def _add_up(step: BackendStep, y: Tensor, out: Tensor) -> None:
    if step.add_up is None:
        out.copy_(outputs(COMBINE, step.rows, y.dtype, y=y, scores=step.scores))
    else:
        step.add_up(y, step.rows, scores=step.scores, out=out)


def _place(made: Tensor, place: Tensor | None) -> Tensor:
    return made if place is None else place.copy_(made)
