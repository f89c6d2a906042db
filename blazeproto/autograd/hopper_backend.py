"""The expert MLP on a Hopper GPU: the launches of ``blazeproto.gemm``, with outputs and workspaces allocated by torch.

A `blazeproto.autograd.step.Backend`, whose docstrings give the shapes. ``moe_mlp`` has checked the arguments, so the
kernels are launched without another check. Nothing here outlives the call: no pointer, no view, so weights may move between
forward and backward. An array that is not contiguous or not 16-byte aligned is copied.

Y and dX~, the rows that a token's experts leave to be summed, are the largest arrays of a wide layer, and only `combine`
reads them. Where they are twice as large as a weight gradient or more, some columns are made and summed at a time, in one
place (`column_slices`); or they are not made, and the products add to the tokens' sums (``combine``):

    act ──> Y[:, 0:1024] ──combine──> out[:, 0:1024]
        ──> Y[:, 1024:2048] ────────> out[:, 1024:2048]     …  where d is 4096
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.low_rank import LowRows
from blazeproto.autograd.operators import cast
from blazeproto.autograd.step import BackendStep, OuterSum
from blazeproto.dispatch.build import fill_dispatch
from blazeproto.dispatch.structures import Addresses, Dispatch, addresses
from blazeproto.gemm import down_backward as down_act
from blazeproto.gemm import fused, linear, reduce, up, weight
from blazeproto.gemm.combine import column_slices
from blazeproto.gemm.combine import launch as launch_combine
from blazeproto.gemm.rows import LowRankTerm
from blazeproto.gemm.tiles import ALIGNMENT, FACTOR_GRADIENT, FACTOR_ROWS, TILES
from blazeproto.runtime.arrays import current_stream

READS_ACT = False  # `down_backward_act` makes it in registers
build_dispatch = fill_dispatch


def rows_of(dispatch: Dispatch) -> Addresses:
    """Where the index arrays lie. Those of a chunk may need aligned copies."""
    device, stream = dispatch.expert_token_offsets.get_device(), current_stream(dispatch.expert_token_offsets)
    at = addresses(dispatch, device, stream)
    pairs_at, tokens_at, _ = at.pair_to_token
    if (pairs_at | tokens_at | at.expert_token_offsets | at.token_index_map | at.token_offsets) % ALIGNMENT:
        aligned: dict[str, Any] = {name: t if t is None else ready(t) for name, t in dispatch.arrays.items()}
        at = addresses(replace(dispatch, **aligned), device, stream)
    return at


def up_forward(step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, up_width, activation = step.rows.num_rows, step.weight.shape[1], step.activation
    h = x.new_empty(num_rows, up_width) if h is None else h
    act = x.new_empty(num_rows, up_width // activation_named(activation).halves) if act is None else act
    bias = None if step.bias is None else ready(cast(step.bias, x.dtype))
    # Names keep copies alive until the launch is in the stream.
    x, (up_proj, transposed) = ready(x), _as_it_lies(step.weight)
    added = _low_rank(step.low, turned=transposed)
    up.launch(x, up_proj, step.rows, activation=activation, transposed=transposed, bias=bias, low=added, h=h, act=act)
    return h, act


def down_forward(step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
    rows, (d_model, d_expert) = step.rows, step.weight.shape[1:]
    act, (down_proj, transposed), scores = ready(act), _as_it_lies(step.weight), ready(step.scores)
    bias = None if step.bias is None else ready(cast(step.bias, act.dtype))
    if step.combine != "gather":
        sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        fused.launch(act, down_proj, scores, rows, transposed=transposed, bias=bias, out_f32=sums)
        out.copy_(sums)
        return
    # Over act, where a tile has whole rows of both: it has read its part of act before it writes the same part of Y.
    over_act = overwrite_act and d_model == d_expert <= TILES[linear.name_of(transposed)].tile_n
    added = _low_rank(step.low, turned=transposed)
    for columns in column_slices(rows.num_rows, d_model, 2 * step.weight.nbytes):  # as if gated
        y = act if over_act else act.new_empty(rows.num_rows, len(columns))
        linear.launch(act, down_proj, rows, transposed=transposed, bias=bias, columns=columns, low=added, out=y)
        (step.add_up or launch_combine)(y, rows, scores=scores, columns=columns, out=out)
        del y  # before the next one is allocated


def down_backward_act(
    step: BackendStep, needs: Sequence[bool], d_out: Tensor, h: Tensor, act: Tensor | None, *, overwrite_h: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One kernel makes all three, with act in its registers."""
    d_out, (lying, transposed), h, scores = ready(d_out), _as_it_lies(step.weight), ready(h), ready(step.scores)
    num_rows, d_expert = h.shape[0], step.weight.shape[2]
    # Over H: a tile reads its part of H before it writes the same part of dH.
    dh = h if overwrite_h else torch.empty_like(h)
    a_scaled = h.new_empty(num_rows, d_expert)
    d_scores = torch.empty_like(scores)
    down_act.launch(
        d_out,
        lying,
        h,
        scores,
        step.rows,
        activation=step.activation,
        transposed=transposed,
        low=_low_rank(step.low, turned=transposed),
        dh=dh,
        a_scaled=a_scaled,
        d_scores=d_scores,
        workspace=scores.new_empty(down_act.score_partials(d_expert), num_rows),
    )
    if step.bias is not None:
        bias = ready(cast(step.bias, d_out.dtype))
        reduce.launch_bias_score_grad(d_out, bias, step.rows, d_scores=d_scores)
    return dh, d_scores, a_scaled


def up_backward_act(step: BackendStep, dh: Tensor, dx: Tensor) -> None:
    dh, (lying, transposed), rows = ready(dh), _as_it_lies(step.weight), step.rows
    added = _low_rank(step.low, turned=transposed)
    if step.combine == "fused_both":
        sums = torch.zeros(dx.shape, dtype=torch.float32, device=dx.device)
        fused.launch_dx(dh, lying, rows, transposed=transposed, low=added, dx_f32=sums)
        dx.copy_(sums)
        return
    for columns in column_slices(rows.num_rows, dx.shape[1], step.weight.nbytes):
        dx_rows = dx.new_empty(rows.num_rows, len(columns))
        linear.launch(dh, lying, rows, transposed=not transposed, columns=columns, low=added, out=dx_rows)
        (step.add_up or launch_combine)(dx_rows, rows, columns=columns, out=dx)
        del dx_rows  # before the next one, or the weight gradient, is allocated


def forward_weight(weight: Tensor, dtype: torch.dtype, rows: Any, kept: None, place: None = None) -> Tensor:
    """As it is."""
    return cast(weight, dtype)


backward_weight = forward_weight


def low_rank_rows(
    a: Tensor, factor: Tensor, rows: Addresses, *, gather: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    a, factor = ready(a), ready(factor)
    out = a.new_empty(rows.num_rows, factor.shape[2 if transposed else 1]) if out is None else out
    linear.launch(a, factor, rows, gather=gather, transposed=transposed, out=out, config=FACTOR_ROWS)
    return out


def _low_rank(low: LowRows | None, *, turned: bool) -> LowRankTerm | None:
    """As a launch takes it. turned: whether the factor must lie the other way round, as its weights do."""
    if low is None:
        return None
    rows, factor = low
    return LowRankTerm(ready(rows), ready(factor.mT if turned else factor))


# ---- sums over an expert's rows --------------------------------------------------------------------------------------


def weight_gradient(rows: Addresses, of: OuterSum) -> Tensor:
    """A float32 gradient is the kernel's sum as it is; the others are rounded to the operands' dtype by the kernel."""
    left, ordered, like, accumulate = ready(of.left), ready(of.ordered), of.like, of.accumulator is not None
    dtype = torch.float32 if like.dtype == torch.float32 else left.dtype
    dw = torch.empty_like(like, dtype=dtype) if of.accumulator is None else of.accumulator
    # One product's gradient transposed is what the other makes.
    lying, transposed = (dw, of.transposed) if dw.is_contiguous() else (dw.mT, not of.transposed)
    product = weight.UP if transposed else weight.DOWN
    options: dict[str, Any] = {"config": FACTOR_GRADIENT}
    if not of.factor:
        elements = weight.workspace_elements(product, rows.where, lying.shape)
        options = {"workspace": dw.new_empty(elements, dtype=torch.float32) if elements else None}
    f32 = dw.dtype == torch.float32
    weight.launch(product, left, ordered, rows, dw=lying, gather=of.gather, f32=f32, accumulate=accumulate, **options)
    return dw if accumulate else cast(dw, like.dtype)


def expert_row_sum(
    values: Tensor, num_experts: int, rows: Addresses, scores: Tensor | None, accumulator: Tensor | None
) -> Tensor:
    values, width = ready(values), values.shape[1]
    out = values.new_empty(num_experts, width, dtype=torch.float32) if accumulator is None else accumulator
    reduce.launch_expert_row_sum(
        values,
        rows,
        gather=scores is not None,
        scores=None if scores is None else ready(scores),
        out=out,
        f32=True,
        accumulate=accumulator is not None,
        workspace=values.new_empty(reduce.row_sum_slots(rows.num_rows, num_experts), width, dtype=torch.float32),
    )
    return out


def _as_it_lies(weight: Tensor) -> tuple[Tensor, bool]:
    """A weight (E, out, in) ready for the kernels, and False; or, of a transposed view, what it is a view of, (E, in, out), and
    True."""
    if not weight.is_contiguous() and weight.mT.is_contiguous():
        return ready(weight.mT), True
    return ready(weight), False


def ready(t: Tensor) -> Tensor:
    """``t`` as the kernels want it: contiguous and 16-byte aligned; a copy if it is not."""
    if t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous():
        return t
    return t.clone(memory_format=torch.contiguous_format)
