"""The second autograd node: H, act, W_down, S -> out. ``mlp.py`` tells how the two nodes meet.

What it saves is the save policy: H, or H and act, or nothing but what the up node saves too, from which its backward
makes H again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import products_for
from blazeproto.autograd.library import (
    Gradients,
    cast,
    define,
    differentiate,
    gradients_of,
    refuse_double_backward,
    weight_grad_dtype,
)
from blazeproto.autograd.policy import ROWS_AND_OPTIONS, Options, decode_tail


def _down(
    h: Tensor,
    act: Tensor,
    scores: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    x: Tensor | None,
    up_proj: Tensor | None,
    up_bias: Tensor | None,
    *tail: Any,
) -> Tensor:
    """act (R, n), scores (T, K) or (P,), down_proj (E, d, n), down_bias (E, d) -> out (T, d).

    ``h`` is here for its gradient, which stands for act's too. x, up_proj and up_bias come with save="recompute" alone,
    to be saved.
    """
    rows, options = decode_tail(*tail)
    products = products_for(options, act, *down_proj.shape)
    num_tokens = _num_tokens(scores, rows.token_offsets)
    return products.down_forward(act, cast(down_proj, act.dtype), down_bias, scores, rows, num_tokens, options.combine)


def _down_fake(h: Tensor, act: Tensor, scores: Tensor, down_proj: Tensor, *rest: Any) -> Tensor:
    token_offsets = rest[-2]
    return act.new_empty(_num_tokens(scores, token_offsets), down_proj.shape[1])


def _num_tokens(scores: Tensor, token_offsets: Tensor | None) -> int:
    return scores.shape[0] if token_offsets is None else token_offsets.shape[0] - 1


def _down_backward(
    needs: list[bool],
    d_out: Tensor,
    h: Tensor | None,
    act: Tensor | None,
    scores: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    x: Tensor | None,
    up_proj: Tensor | None,
    up_bias: Tensor | None,
    *tail: Any,
) -> Gradients:
    """d_out (T, d) -> those needed of dh (R, G*n), d_scores, d_down_proj (E, d, n), d_down_bias (E, d)."""
    rows, options = decode_tail(*tail)
    products = products_for(options, d_out, *down_proj.shape)
    if h is None:
        assert x is not None and up_proj is not None
        h, act = products.recompute_h(x, cast(up_proj, x.dtype), up_bias, rows, options.activation)
    dh, d_scores, d_weight, d_bias = products.down_backward(
        d_out.contiguous(),  # out.sum() delivers a gradient of stride 0
        cast(down_proj, h.dtype),
        down_bias,
        h,
        act,
        scores,
        rows,
        options.activation,
        needs,
        weight_grad_dtype(down_proj, options),
    )
    d_bias = d_bias if down_bias is None or d_bias is None else cast(d_bias, down_bias.dtype)
    return dh, d_scores, d_weight, d_bias


def _down_backward_fake(
    needs: list[bool],
    d_out: Tensor,
    h: Tensor | None,
    act: Tensor | None,
    scores: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    x: Tensor | None,
    up_proj: Tensor | None,
    up_bias: Tensor | None,
    *tail: Any,
) -> Gradients:
    pair_indices, options = tail[0], Options.decode(tail[-1])
    if h is None:
        assert x is not None and up_proj is not None
        h = x.new_empty(pair_indices.shape[0], up_proj.shape[1])
    made = (
        torch.empty_like(h),
        torch.empty_like(scores),
        torch.empty_like(down_proj, dtype=weight_grad_dtype(down_proj, options)),
        None if down_bias is None else torch.empty_like(down_bias),
    )
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


define(
    "moe_down(Tensor h, Tensor act, Tensor scores, Tensor down_proj, Tensor? down_bias, "
    f"Tensor? x, Tensor? up_proj, Tensor? up_bias, {ROWS_AND_OPTIONS}) -> Tensor",
    _down,
    _down_fake,
)
define(
    "moe_down_backward(bool[] needs, Tensor d_out, Tensor? h, Tensor? act, Tensor scores, Tensor down_proj, "
    f"Tensor? down_bias, Tensor? x, Tensor? up_proj, Tensor? up_bias, {ROWS_AND_OPTIONS}) -> Tensor[]",
    _down_backward,
    _down_backward_fake,
)


def _setup(ctx: Any, inputs: list[Any], tail: tuple[Any, ...], output: Tensor) -> None:
    h, act, *parameters = inputs
    *again, pair_indices, offsets, token_index_map, ctx.top_k, pair_tokens, token_offsets, ctx.options = tail
    save = Options.decode(ctx.options).save
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        None if save == "recompute" else h,
        act if save == "paper" else None,
        *parameters,  # scores, down_proj, down_bias
        *again,  # x, up_proj, up_bias with "recompute"
        pair_indices,
        offsets,
        token_index_map,
        pair_tokens,
        token_offsets,
    )


def _backward(ctx: Any, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None, None, None, None, None)
    needs_h, _needs_act, *needs_parameters = ctx.needs_input_grad[:5]
    *saved, pair_tokens, token_offsets = ctx.saved_tensors
    needs, tail = [needs_h, *needs_parameters], (ctx.top_k, pair_tokens, token_offsets, ctx.options)
    dh, *rest = gradients_of("moe_down_backward", needs, d_out, *saved, *tail)
    return (dh, None, *rest)


differentiate("moe_down", 5, _setup, _backward)
refuse_double_backward("moe_down_backward")
