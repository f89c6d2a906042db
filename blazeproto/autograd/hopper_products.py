"""The products of the expert MLP on a Hopper GPU: ``blazeproto.gemm`` with outputs and workspaces allocated by torch.

Same names and signatures as ``torch_products``, whose docstrings give the shapes. ``moe_mlp`` has checked the arguments, so
the kernels are launched unchecked, for the host's time. Nothing here outlives the call: no pointer, no view, so weights
may move between forward and backward. An array that is not contiguous or not 16-byte aligned is copied.

Y and dX~, the rows that a token's experts leave to be summed, are the largest arrays of a wide layer, and nobody but `combine`
reads them. Where they are twice as large as a weight gradient or more, some columns are made and summed at a time, in one
place (`column_slices`):

    act ──> Y[:, 0:1024] ──combine──> out[:, 0:1024]
        ──> Y[:, 1024:2048] ────────> out[:, 1024:2048]     …  where d is 4096
"""

from __future__ import annotations

import torch
from torch import Tensor

from blazeproto.arrays import current_stream
from blazeproto.autograd.library import cast
from blazeproto.autograd.policy import DownGradients, Needs, Rows, UpGradients
from blazeproto.dispatch.build import MAX_PAIRS, build_dispatch_unchecked
from blazeproto.gemm import score_partials, unchecked
from blazeproto.gemm.config import DEFAULTS
from blazeproto.gemm.rowops import column_slices, row_sum_slots
from blazeproto.gemm.rows import RowAddresses, addresses
from blazeproto.reference import is_gated

ALIGNMENT = 16  # bytes


def build_dispatch(topk_experts: Tensor, num_experts: int, index_arrays: tuple[Tensor, Tensor, Tensor]) -> None:
    """topk_experts (T, K) or (P,) -> fills pair_indices (P,), offsets (E+1,), token_index_map (P,)."""
    ids = topk_experts if topk_experts.dim() == 2 else topk_experts[:, None]  # (P,): one pair a "token"
    if ids.dtype not in (torch.int32, torch.int64) or not ids.shape[1] or ids.numel() > MAX_PAIRS or num_experts < 1:
        raise ValueError(
            f"topk_experts: expected int32 or int64 (T, K) or (P,), K >= 1, at most {MAX_PAIRS} pairs, and at least 1 expert; "
            f"got {ids.dtype} {tuple(topk_experts.shape)} and {num_experts}"
        )
    ids = ids.contiguous()
    out: tuple[Tensor, ...] = index_arrays
    if ids.dtype == torch.int64:  # of which the kernels make an int32 copy
        out = (*out, out[0].new_empty(ids.numel()))
    build_dispatch_unchecked(ids, num_experts, out, current_stream(ids))


def rows_for(rows: Rows) -> RowAddresses:
    """Where the index arrays (contiguous) lie, once for all the kernels of an operator or of a backward.

    Chunks may need aligned copies.
    """
    device = rows.offsets.get_device()
    stream = current_stream(rows.offsets)
    where = addresses(rows, device, stream)
    at = where.pair_indices | where.offsets | where.token_index_map | where.pair_tokens | where.token_offsets
    if at % ALIGNMENT:
        where = addresses([_ready(f) if isinstance(f, Tensor) else f for f in rows], device, stream)
    return where


def up_forward(
    x: Tensor, up_proj: Tensor, bias: Tensor | None, rows: RowAddresses, activation: str, h_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, up_width = rows.num_rows, up_proj.shape[1]
    h = x.new_empty(num_rows, up_width) if h_out is None else h_out
    act = x.new_empty(num_rows, up_width // (1 + is_gated(activation)))
    bias = None if bias is None else _ready(cast(bias, x.dtype))
    x, up_proj = _ready(x), _ready(up_proj)  # names keep copies alive until the launch is in the stream
    unchecked.up_forward(x, up_proj, rows, activation=activation, bias=bias, h=h, act=act)
    return h, act


def recompute_h(
    x: Tensor, up_proj: Tensor, bias: Tensor | None, rows: RowAddresses, activation: str
) -> tuple[Tensor, Tensor | None]:
    """H again. act, which the kernel makes along, is dropped: down_backward has it in registers."""
    return up_forward(x, up_proj, bias, rows, activation)[0], None


def down_forward(
    act: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    scores: Tensor,
    rows: RowAddresses,
    num_tokens: int,
    combine: str,
    out: Tensor | None = None,
    *,
    overwrite_act: bool = False,
) -> Tensor:
    d_model, d_expert = down_proj.shape[1:]
    act, down_proj, scores = _ready(act), _ready(down_proj), _ready(scores)
    bias = None if bias is None else _ready(cast(bias, act.dtype))
    if combine == "fused":
        sums = torch.zeros(num_tokens, d_model, dtype=torch.float32, device=act.device)
        unchecked.down_forward_fused(act, down_proj, scores, rows, bias=bias, out_f32=sums)
        return sums.to(act.dtype) if out is None else out.copy_(sums)
    out = act.new_empty(num_tokens, d_model) if out is None else out
    # Over act, where a tile has whole rows of both: it has read its part of act before it writes the same part of Y.
    over_act = overwrite_act and d_model == d_expert <= DEFAULTS["down_forward"].tile_n
    for columns in column_slices(rows.num_rows, d_model, 2 * down_proj.nbytes):  # as if gated
        y = act if over_act else act.new_empty(rows.num_rows, len(columns))
        unchecked.down_forward(act, down_proj, rows, bias=bias, columns=columns, y=y)
        unchecked.combine(y, rows, scores=scores, columns=columns, out=out)
        del y  # before the next one is allocated
    return out


def down_backward(
    d_out: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    h: Tensor,
    act: Tensor | None,
    scores: Tensor,
    rows: RowAddresses,
    activation: str,
    needs: Needs,
    weight_dtype: torch.dtype,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
    *,
    overwrite_h: bool = False,
) -> DownGradients:
    needs_h, needs_scores, needs_weight, needs_bias = needs
    d_out, down_proj, scores = _ready(d_out), _ready(down_proj), _ready(scores)
    dh = d_scores = None
    if needs_h or needs_scores or needs_weight:  # one kernel makes all three, with act in its registers
        h = _ready(h)
        num_rows, d_expert = h.shape[0], down_proj.shape[2]
        # Over H: a tile reads its part of H before it writes the same part of dH.
        dh = h if overwrite_h else torch.empty_like(h)
        a_scaled = h.new_empty(num_rows, d_expert)
        d_scores = torch.empty_like(scores)
        unchecked.down_backward_act(
            d_out,
            down_proj,
            h,
            scores,
            rows,
            activation=activation,
            dh=dh,
            a_scaled=a_scaled,
            d_scores=d_scores,
            workspace=scores.new_empty(score_partials(d_expert), num_rows),
        )
        if bias is not None and needs_scores:
            bias = _ready(cast(bias, d_out.dtype))
            unchecked.bias_score_grad(d_out, bias, rows, d_scores=d_scores)
        if needs_weight:
            operands = (d_out, a_scaled)
            d_weight = _weight_gradient("down_backward_weight", operands, down_proj, rows, weight_dtype, d_weight)
    if needs_bias:
        d_bias = _expert_sum(d_out, down_proj, rows, d_bias, scores)
    return dh if needs_h else None, d_scores if needs_scores else None, d_weight, d_bias


def up_backward(
    dh: Tensor,
    x: Tensor,
    up_proj: Tensor,
    rows: RowAddresses,
    needs: Needs,
    weight_dtype: torch.dtype,
    dx: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
) -> UpGradients:
    needs_x, needs_weight, needs_bias = needs
    dh, x, up_proj = _ready(dh), _ready(x), _ready(up_proj)
    if needs_x:
        dx = torch.empty_like(x) if dx is None else dx
        for columns in column_slices(rows.num_rows, x.shape[1], up_proj.nbytes):
            dx_rows = x.new_empty(rows.num_rows, len(columns))
            unchecked.up_backward_act(dh, up_proj, rows, columns=columns, dx_rows=dx_rows)
            unchecked.combine(dx_rows, rows, columns=columns, out=dx)
            del dx_rows  # before the next one, or the weight gradient, is allocated
    if needs_weight:
        d_weight = _weight_gradient("up_backward_weight", (dh, x), up_proj, rows, weight_dtype, d_weight)
    if needs_bias:
        d_bias = _expert_sum(dh, up_proj, rows, d_bias)
    return dx, d_weight, d_bias


def _weight_gradient(
    product: str,
    operands: tuple[Tensor, Tensor],
    weight: Tensor,
    rows: RowAddresses,
    dtype: torch.dtype,
    accumulator: Tensor | None,
) -> Tensor:
    """Of ``weight``: a new tensor of ``dtype``, or added to the fp32 ``accumulator``."""
    dw = weight.new_empty(weight.shape, dtype=dtype) if accumulator is None else accumulator
    elements = unchecked.weight_workspace(product, rows, dw.shape)
    getattr(unchecked, product)(
        *operands,
        rows,
        dw=dw,
        f32=dw.dtype == torch.float32,
        accumulate=accumulator is not None,
        workspace=dw.new_empty(elements, dtype=torch.float32) if elements else None,
    )
    return dw


def _expert_sum(
    values: Tensor, weight: Tensor, rows: RowAddresses, accumulator: Tensor | None, scores: Tensor | None = None
) -> Tensor:
    """A bias gradient: (E, m) sums over each expert's rows, of S dO gathered (``scores`` given) or of rows as they are."""
    num_experts, width = weight.shape[:2]
    out = values.new_empty(num_experts, width, dtype=torch.float32) if accumulator is None else accumulator
    unchecked.expert_row_sum(
        values,
        rows,
        gather=scores is not None,
        scores=scores,
        out=out,
        f32=True,
        accumulate=accumulator is not None,
        workspace=values.new_empty(row_sum_slots(rows.num_rows, num_experts), width, dtype=torch.float32),
    )
    return out


def _ready(t: Tensor) -> Tensor:
    """``t`` as the kernels want it: contiguous and 16-byte aligned; a copy if it is not."""
    if t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous():
        return t
    return t.clone(memory_format=torch.contiguous_format)
