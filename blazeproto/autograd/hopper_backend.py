"""The expert MLP on a Hopper GPU: the launches of ``blazeproto.gemm``, with outputs and workspaces allocated by torch.

A `blazeproto.autograd.call.Backend`, whose docstrings give the shapes. ``moe_mlp`` has checked the arguments, so the
kernels are launched without another check. Nothing here outlives the call: no pointer, no view, so weights may move between
forward and backward. An array that is not contiguous or not 16-byte aligned is copied.

Y and dX~, the rows that a token's experts leave to be summed, are the largest arrays of a wide layer, and only `combine`
reads them. If they are twice as large as a weight gradient or more, some columns are made and summed at a time, in one
place (`column_slices`); or they are not made, and the products add to the tokens' sums (``combine``):

    act ──> Y[:, 0:1024] ──combine──> out[:, 0:1024]
        ──> Y[:, 1024:2048] ────────> out[:, 1024:2048]     …  where d is 4096

The operands are bf16, or e4m3 by another ``precision`` (`blazeproto.gemm.recipe`). Then tokens and weights are `Quantized`, and
H, act, dH and A' are records (`records`) of rows that are quantized in blocks of 128. Tokens are quantized, each by itself, where
they are used, or before an exchange sends them; a weight, 128 x 128 together, in forward in both orders, or each order before
its product (`Options.keep_transposed`), unless it has been kept (`kept`). Biases and low-rank factors are bf16, and so is what is
multiplied by factors: x and dO as they came, act, dH and A' dequantized. The checks refuse other sums than `combine`'s.

    x ─q─> [ up ] ─> H_q, act_q ─> [ down ] ─> Y ─combine─> out        saved: X, H_q, S, indices
    dO ─q─> [ down^T ] ─> dH_q, A'_q, dS      dH_q ─> [ up^T ] ─> dX~ ─combine─> dX
    dH_q, x_q turned ─> dW_up                 dO_q, A'_q turned ─> dW_down, when dH_q is gone
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.call import BackendStep, OuterSum
from blazeproto.autograd.low_rank import LowRows
from blazeproto.autograd.operators import cast, ready
from blazeproto.autograd.records import new_quantized, new_rows, rows_in, width_of
from blazeproto.dispatch.build import fill_dispatch
from blazeproto.dispatch.structures import Addresses, Dispatch, addresses
from blazeproto.gemm import down_backward as down_act
from blazeproto.gemm import fused, linear, quantize, reduce, up, weight, weight_fp8
from blazeproto.gemm.combine import column_slices, in_slices
from blazeproto.gemm.combine import launch as launch_combine
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.quantize import OnStream
from blazeproto.gemm.recipe import FP8, Operand
from blazeproto.gemm.rows import LowRankTerm, shape_of, storage_of
from blazeproto.gemm.stored import MOST_PARTS, Packed, few_rows, packed, ring_for
from blazeproto.gemm.tiles import ALIGNMENT, FACTORS
from blazeproto.runtime.arch import AMPERE
from blazeproto.runtime.arrays import current_stream
from blazeproto.stored.weight import StoredWeight

READS_ACT = False  # `down_backward_act` makes it in registers
build_dispatch = fill_dispatch


def rows_of(dispatch: Dispatch) -> Addresses:
    """The addresses of the index arrays. A chunk's may need aligned copies."""
    device, stream = dispatch.expert_token_offsets.get_device(), current_stream(dispatch.expert_token_offsets)
    at = addresses(dispatch, device, stream)
    pairs_at, tokens_at, _ = at.pair_to_token
    if (pairs_at | tokens_at | at.expert_token_offsets | at.token_index_map | at.token_offsets) % ALIGNMENT:
        aligned: dict[str, Any] = {name: t if t is None else ready(t) for name, t in dispatch.arrays.items()}
        at = addresses(replace(dispatch, **aligned), device, stream)
    return at


def up_forward(step: BackendStep, x: Tensor | Quantized, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, up_width, activation = step.rows.num_rows, shape_of(step.weight)[1], step.activation
    h = _new_rows(x, num_rows, up_width) if h is None else h
    act = _new_rows(x, num_rows, up_width // activation_named(activation).halves) if act is None else act
    # Names keep copies alive until the launch is in the stream.
    x, (up_proj, transposed) = operand(x), _as_it_lies(step, forward=True)
    bias = None if step.bias is None else ready(step.bias)
    options: dict[str, Any] = {"bias": bias, "low": _low_rank(step.low, turned=transposed)}
    places = {"h": _rows(h), "act": _rows(act)}
    rows = _readers(up_proj, step.rows)
    options |= {"activation": activation, "transposed": transposed, "sending": step.sending}
    up.launch(x, _anew(up_proj), rows, **options, **places)
    return h, act


def down_forward(step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
    widths, is_fused = shape_of(step.weight)[1:], step.combine != "gather"
    act, scores = ready(act), ready(step.scores)
    down_proj, transposed = _as_it_lies(step, always=is_fused, forward=not is_fused)
    rows = _readers(down_proj, step.rows)
    acts = _rows(act)
    bias = None if step.bias is None else ready(step.bias)
    if is_fused:
        sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        fused.launch(acts, _anew(down_proj), scores, rows, transposed=transposed, bias=bias, out_f32=sums)
        out.copy_(sums)
        return
    added = _low_rank(step.low, turned=transposed)
    # As if gated. In fp8 half of bf16's, so that Y leaves room for the weights' copies; and less where that, act and out would
    # take more than bf16's gradients.
    room = 2 * _bytes(step.weight, out)
    room = room if acts is act else min(room, (room + act.nbytes + out.nbytes) // 2)
    for columns in column_slices(rows.num_rows, widths[0], room):
        # Over act, where a tile has whole rows of both: it has read its part of act before it writes the same part of Y.
        over = overwrite_act and acts is act
        over = over and linear.may_lie_over(None, transposed, widths, len(columns), rows.arch, storage_of(down_proj))
        y = act if over else out.new_empty(rows.num_rows, len(columns))
        linear.launch(acts, _anew(down_proj), rows, transposed=transposed, bias=bias, columns=columns, low=added, out=y)
        (step.add_up or launch_combine)(y, rows, scores=scores, columns=columns, out=out)
        del y  # before the next one is allocated


def down_backward_act(
    step: BackendStep,
    needs: Sequence[bool],
    d_out: Tensor | Quantized,
    h: Tensor,
    act: Tensor | None,
    *,
    overwrite_h: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One kernel makes all three, with act in its registers."""
    d_out, (lying, transposed), h, scores = operand(d_out), _as_it_lies(step, always=True), ready(h), ready(step.scores)
    of_h, activation = _rows(h), step.activation
    num_rows, d_expert = h.shape[0], shape_of(of_h)[1] // activation_named(activation).halves
    # Over H: a tile reads its part of H before it writes the same part of dH.
    dh = h if overwrite_h else torch.empty_like(h)
    a_scaled = _new_rows(of_h, num_rows, d_expert)
    d_scores = torch.empty_like(scores)
    down_act.launch(
        d_out,
        _anew(lying),
        of_h,
        scores,
        step.rows,
        activation=activation,
        transposed=transposed,
        low=_low_rank(step.low, turned=transposed or isinstance(lying, Quantized)),
        dh=_rows(dh),
        a_scaled=_rows(a_scaled),
        d_scores=d_scores,
        workspace=scores.new_empty(down_act.score_partials(d_expert), num_rows),
        sending=step.sending,
    )
    if step.bias is not None:
        bias = ready(step.bias)  # named, so that a copy lives until the launch is in the stream
        reduce.launch_bias_score_grad(ready(step.unquantized), bias, step.rows, d_scores=d_scores)
    return dh, d_scores, a_scaled


def up_backward_act(step: BackendStep, dh: Tensor, dx: Tensor) -> None:
    is_fused = step.combine == "fused_both"
    of_dh, (lying, transposed) = _rows(ready(dh)), _as_it_lies(step, always=is_fused)
    rows = _readers(lying, step.rows)
    added = _low_rank(step.low, turned=transposed or isinstance(lying, Quantized))
    if is_fused:
        sums = torch.zeros(dx.shape, dtype=torch.float32, device=dx.device)
        fused.launch_dx(of_dh, _anew(lying), rows, transposed=transposed, low=added, dx_f32=sums)
        dx.copy_(sums)
        return
    options: dict[str, Any] = {"low": added, "transposed": not transposed}
    if isinstance(lying, Quantized):  # the transpose
        options = {"low": added, "name": "up_backward_act"}
    sending = step.sending
    for columns in column_slices(rows.num_rows, dx.shape[1], dx.element_size() * prod(shape_of(step.weight))):
        dx_rows = dx.new_empty(rows.num_rows, len(columns))
        linear.launch(of_dh, _anew(lying), rows, columns=columns, out=dx_rows, sending=sending, **options)
        sending = None
        (step.add_up or launch_combine)(dx_rows, rows, columns=columns, out=dx)
        del dx_rows  # before the next one, or the weight gradient, is allocated


def low_rank_rows(
    a: Tensor, factor: Tensor, rows: Addresses, *, gather: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    a, factor = ready(a), ready(factor)
    out = a.new_empty(rows.num_rows, factor.shape[2 if transposed else 1]) if out is None else out
    linear.launch(a, factor, rows, gather=gather, transposed=transposed, out=out, config=FACTORS[rows.arch])
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
    if isinstance(of.left, Quantized):
        return cast(_of_quantized(rows, of), of.like.dtype)
    left, ordered, like, accumulate = ready(of.left), ready(of.taken()), of.like, of.accumulator is not None
    dtype = torch.float32 if like.dtype == torch.float32 else left.dtype
    dw = torch.empty_like(like, dtype=dtype) if of.accumulator is None else of.accumulator
    # One product's gradient transposed is what the other makes.
    lying, transposed = (dw, of.transposed) if dw.is_contiguous() else (dw.mT, not of.transposed)
    product = weight.UP if transposed else weight.DOWN
    options: dict[str, Any] = {"config": FACTORS[rows.arch]}
    if not of.factor:
        elements = weight.workspace_elements(product, rows.where, lying.shape, None, rows.arch)
        options = {"workspace": dw.new_empty(elements, dtype=torch.float32) if elements else None}
    f32 = dw.dtype == torch.float32
    weight.launch(product, left, ordered, rows, dw=lying, gather=of.gather, f32=f32, accumulate=accumulate, **options)
    return dw if accumulate else cast(dw, like.dtype)


def _of_quantized(rows: Addresses, of: OuterSum) -> Tensor:
    """Some of a token's columns at a time, whose transpose takes at most 3/4 of the ordered rows': so a layer's peak is not
    above bf16's (docs/fp8.md, Memory)."""
    left, like, ordered, f32 = of.left, of.like, of.taken(), of.like.dtype == torch.float32
    width = width_of(ordered)
    d_model, length = left.values.shape[1], quantize.most_blocks(rows.num_rows, rows.num_experts) * quantize.BLOCK
    name = weight.UP if of.transposed else weight.DOWN
    before = like.new_empty(rows.num_experts + 1, dtype=torch.int32)
    quantize.launch_block_offsets(rows, before)
    turned = new_quantized(like, FP8.of_dw.scale, width, length)
    quantize.launch_transpose(rows_in(ordered, width), rows, before, range(width), turned, gather=False)
    del ordered  # before the gradient is allocated
    dw = torch.empty_like(like, dtype=torch.float32 if f32 else torch.bfloat16)
    for columns in in_slices(d_model, 1 if f32 else -(-4 * d_model // (3 * width))):
        part = new_quantized(like, FP8.of_dw.scale, len(columns), length)
        quantize.launch_transpose(left, rows, before, columns, part, gather=True)
        operands, first = (turned, part), (0, columns.start)
        if not of.transposed:
            operands, first = operands[::-1], first[::-1]
        weight_fp8.launch(name, *operands, rows, before, dw=dw, first=first, f32=f32, accumulate=False)
        del part, operands  # before the next one is allocated
    return dw


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


# ---- operands ----------------------------------------------------------------------------------------------------


def quantized_tokens(t: Tensor, rows: Addresses, operand: Operand) -> Quantized:
    tokens = new_quantized(t, operand.scale, *t.shape)
    quantize.launch_rows(ready(t), rows, tokens)
    return tokens


def plain_rows(record: Tensor, rows: Addresses, dtype: torch.dtype) -> Tensor:
    out = record.new_empty(len(record), width_of(record), dtype=dtype)
    quantize.launch_dequantize(_rows(ready(record)), rows, out)
    return out


quantize_weights = quantize.launch_weights


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
    f32 = weight.dtype == torch.float32  # which the kernel rounds to bf16
    weight = ready(weight if f32 else cast(weight, dtype))  # of another dtype under autocast
    quantize.launch_refresh(weight, place_of(weight), out, transposed, hashes, call, f32=f32, scale_values=scale_values)


def place_of(t: Tensor) -> OnStream:
    return OnStream(t.get_device(), current_stream(t))


def operand(tokens: Tensor | Quantized) -> Any:
    """Tokens as a launch takes them."""
    return tokens if isinstance(tokens, Quantized) else ready(tokens)


def _rows(t: Tensor) -> Any:
    """Rows as a launch takes them: a record's values and scales."""
    return rows_in(t, width_of(t)) if t.dtype == torch.uint8 else t


def _bytes(weight: Any, out: Tensor) -> int:
    """A weight's bytes in the type that products multiply. A stored weight counts as a decoded one."""
    return prod(shape_of(weight)) * (1 if isinstance(weight, Quantized) else out.element_size())


def _new_rows(like: Tensor | Quantized, num_rows: int, width: int) -> Tensor:
    """Uninitialised; a record where others are quantized."""
    return new_rows(like.values, num_rows, width) if isinstance(like, Quantized) else like.new_empty(num_rows, width)


def _as_it_lies(step: BackendStep, *, always: bool = False, forward: bool = False) -> tuple[Any, bool]:
    """The step's weight (E, out, in) ready for the kernels, and False; or, of a transposed view, what it is a view of,
    (E, in, out), and True. always: `ring_for`.  forward: whether `few_rows` decides first."""
    weight: Tensor | Quantized | StoredWeight = step.weight
    if isinstance(weight, StoredWeight):
        few = forward and few_rows(weight.shape, step.rows)
        size = 0 if few else ring_for(weight.shape, step.rows, always=always)
        ring = weight.values.new_empty(size, dtype=torch.uint8) if size else None
        return packed(weight, size, few)._replace(ring=ring), False
    if isinstance(weight, Quantized):
        return weight, False
    if not weight.is_contiguous() and weight.mT.is_contiguous():
        return ready(weight.mT), True
    return ready(weight), False


def _anew(weight: Any) -> Any:
    """A weight as one launch takes it: a ring of decoded experts is empty."""
    if not isinstance(weight, Packed) or weight.ring is None:
        return weight
    return weight._replace(
        progress=torch.zeros(2 * MOST_PARTS * weight.shape[0], dtype=torch.int32, device=weight.ring.device)
    )


def _readers(weight: Any, rows: Addresses) -> Addresses:
    """The rows as kernels that can read the weight take them: Ampere's, where a stored one has no ring."""
    return rows._replace(arch=AMPERE) if isinstance(weight, Packed) and weight.ring is None else rows
