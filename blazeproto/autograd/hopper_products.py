"""The products of the expert MLP on a Hopper GPU: ``blazeproto.gemm`` with outputs and workspaces allocated by torch.

Same names and signatures as ``torch_products``, whose docstrings give the shapes. Nothing here outlives the call: no
pointer, no view, so weights may move between forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.autograd.policy import DownGradients, Needs, Rows, UpGradients

ALIGNMENT = 16  # bytes; what comes misaligned is copied


def up_forward(
    x: Tensor, up_proj: Tensor, bias: Tensor | None, rows: Rows, activation: str, h_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, up_width = rows.pair_indices.shape[0], up_proj.shape[1]
    h = x.new_empty(num_rows, up_width) if h_out is None else h_out
    act = x.new_empty(num_rows, up_width // gemm_gates(activation))
    gemm.up_forward(_ready(x), _ready(up_proj), rows, activation=activation, bias=bias, h=h, act=act)
    return h, act


def recompute_h(
    x: Tensor, up_proj: Tensor, bias: Tensor | None, rows: Rows, activation: str
) -> tuple[Tensor, Tensor | None]:
    """H again. act, which the kernel makes along, is dropped: down_backward has it in registers."""
    return up_forward(x, up_proj, bias, rows, activation)[0], None


def down_forward(
    act: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    scores: Tensor,
    rows: Rows,
    num_tokens: int,
    combine: str,
    out: Tensor | None = None,
) -> Tensor:
    d_model = down_proj.shape[1]
    down_proj = _ready(down_proj)
    if combine == "fused":
        sums = torch.zeros(num_tokens, d_model, dtype=torch.float32, device=act.device)
        gemm.down_forward_fused(act, down_proj, scores, rows, bias=bias, out_f32=sums)
        return sums.to(act.dtype) if out is None else out.copy_(sums)
    y = act.new_empty(act.shape[0], d_model)
    gemm.down_forward(act, down_proj, rows, bias=bias, y=y)
    out = act.new_empty(num_tokens, d_model) if out is None else out
    gemm.combine(y, rows, scores=scores, out=out)
    return out


def down_backward(
    d_out: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    h: Tensor,
    act: Tensor | None,
    scores: Tensor,
    rows: Rows,
    activation: str,
    needs: Needs,
    weight_dtype: torch.dtype,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
) -> DownGradients:
    needs_h, needs_scores, needs_weight, needs_bias = needs
    d_out, down_proj = _ready(d_out), _ready(down_proj)
    dh = d_scores = None
    if needs_h or needs_scores or needs_weight:  # one kernel makes all three, act in its registers
        dh = torch.empty_like(h)
        a_scaled = h.new_empty(h.shape[0], h.shape[1] // gemm_gates(activation))
        d_scores = torch.empty_like(scores)
        gemm.down_backward_act(
            d_out, down_proj, h, scores, rows, activation=activation, dh=dh, a_scaled=a_scaled, d_scores=d_scores
        )
        if bias is not None and needs_scores:
            gemm.bias_score_grad(d_out, bias, rows, d_scores=d_scores)
        if needs_weight:
            d_weight = _weight_grad(gemm.down_backward_weight, d_out, a_scaled, rows, down_proj, weight_dtype, d_weight)
    if needs_bias:
        made = gemm.expert_row_sum(d_out, rows, scores=scores, out=_bias_grad_like(down_proj))
        d_bias = made if d_bias is None else d_bias.add_(made)
    return dh if needs_h else None, d_scores if needs_scores else None, d_weight, d_bias


def up_backward(
    dh: Tensor,
    x: Tensor,
    up_proj: Tensor,
    rows: Rows,
    needs: Needs,
    weight_dtype: torch.dtype,
    dx: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
) -> UpGradients:
    needs_x, needs_weight, needs_bias = needs
    dh, x, up_proj = _ready(dh), _ready(x), _ready(up_proj)
    if needs_x:
        dx_rows = x.new_empty(dh.shape[0], x.shape[1])
        gemm.up_backward_act(dh, up_proj, rows, dx_rows=dx_rows)
        dx = torch.empty_like(x) if dx is None else dx
        gemm.combine(dx_rows, rows, out=dx)
        del dx_rows  # before the weight gradient is allocated
    if needs_weight:
        d_weight = _weight_grad(gemm.up_backward_weight, dh, x, rows, up_proj, weight_dtype, d_weight)
    if needs_bias:
        made = gemm.expert_row_sum(dh, rows, out=_bias_grad_like(up_proj))
        d_bias = made if d_bias is None else d_bias.add_(made)
    return dx, d_weight, d_bias


def gemm_gates(activation: str) -> int:
    """G: how many widths n the up projection has."""
    from blazeproto.reference import is_gated

    return 2 if is_gated(activation) else 1
