"""The autograd node of the expert MLP: one operator forward, two backward. ``mlp.py`` draws it.

What the node saves is the save policy: H, or H and act, or neither, and then backward makes H again from X.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.autograd.backends import products_for
from blazeproto.autograd.library import (
    Gradients,
    cast,
    define,
    differentiate,
    gradients_caller,
    gradients_directly,
    may_overwrite,
    refuse_double_backward,
    weight_grad_dtype,
)
from blazeproto.autograd.policy import PARAMETERS, ROWS_AND_OPTIONS, SAVED_ACT, SAVED_H, Options, decode_tail
from blazeproto.reference import is_gated


class Setting(NamedTuple):
    """The end of an operator's arguments, read. It may take their place."""

    products: Any
    rows: Any  # as the products take them
    options: Options
    h_is_free: bool = False  # H may be written over

    @staticmethod
    def read(
        t: Tensor, tail: tuple[Any, ...], *, up_proj: Tensor | None = None, down_proj: Tensor | None = None
    ) -> Setting:
        if len(tail) == 1:  # it has been read before
            return tail[0]
        rows, options = decode_tail(*tail)
        if down_proj is None:
            assert up_proj is not None
            num_experts, up_width, d_model = up_proj.shape
            d_expert = up_width // (1 + is_gated(options.activation))
        else:
            num_experts, d_model, d_expert = down_proj.shape
        products = products_for(options, t, num_experts, d_model, d_expert)
        return Setting(products, products.rows_for(rows), options)


# ---- forward -----------------------------------------------------------------------------------------------------


def _experts(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, d), up_proj (E, G*n, d), up_bias (E, G*n), down_proj (E, d, n), down_bias (E, d), scores (T, K) or (P,)
    -> out (T, d), h (R, G*n), act (R, n); those of h and act that the save policy leaves out have no rows."""
    products, rows, options, _ = Setting.read(x, tail, down_proj=down_proj)
    num_tokens, dtype = x.shape[0], x.dtype
    h, act = products.up_forward(x, cast(up_proj, dtype), up_bias, rows, options.activation)
    saves_h, saves_act = options.save in SAVED_H, options.save in SAVED_ACT
    if not saves_h:
        h = x.new_empty(0, up_proj.shape[1])
    down = (act, cast(down_proj, dtype), down_bias, scores, rows, num_tokens, options.combine)
    out = products.down_forward(*down, overwrite_act=not saves_act)
    return out, h, act if saves_act else x.new_empty(0, down_proj.shape[2])


def _experts_fake(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, save = tail[0].shape[0], Options.decode(tail[-1]).save
    h = x.new_empty(num_rows if save in SAVED_H else 0, up_proj.shape[1])
    return torch.empty_like(x), h, x.new_empty(num_rows if save in SAVED_ACT else 0, down_proj.shape[2])


define(f"moe_experts({PARAMETERS}, {ROWS_AND_OPTIONS}) -> (Tensor out, Tensor h, Tensor act)", _experts, _experts_fake)


# ---- backward ----------------------------------------------------------------------------------------------------


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
    """d_out (T, d) -> those needed of dh (R, G*n), d_scores, d_down_proj (E, d, n), d_down_bias (E, d).

    x, up_proj and up_bias are there where h is not.
    """
    products, rows, options, h_is_free = Setting.read(d_out, tail, down_proj=down_proj)
    if h is None:
        assert x is not None and up_proj is not None
        h, act = products.recompute_h(x, cast(up_proj, x.dtype), up_bias, rows, options.activation)
        h_is_free = True
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
        overwrite_h=h_is_free,
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


def _up_backward(
    needs: list[bool], dh: Tensor, x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any
) -> Gradients:
    """dh (R, G*n) -> those needed of dx (T, d), d_up_proj (E, G*n, d), d_up_bias (E, G*n)."""
    products, rows, options, _ = Setting.read(x, tail, up_proj=up_proj)
    weight_dtype = weight_grad_dtype(up_proj, options)
    dx, d_weight, d_bias = products.up_backward(dh, x, cast(up_proj, x.dtype), rows, needs, weight_dtype)
    return dx, d_weight, d_bias if up_bias is None or d_bias is None else cast(d_bias, up_bias.dtype)


def _up_backward_fake(
    needs: list[bool], dh: Tensor, x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any
) -> Gradients:
    d_weight = torch.empty_like(up_proj, dtype=weight_grad_dtype(up_proj, Options.decode(tail[-1])))
    made = (torch.empty_like(x), d_weight, None if up_bias is None else torch.empty_like(up_bias))
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


define(
    "moe_down_backward(bool[] needs, Tensor d_out, Tensor? h, Tensor? act, Tensor scores, Tensor down_proj, "
    f"Tensor? down_bias, Tensor? x, Tensor? up_proj, Tensor? up_bias, {ROWS_AND_OPTIONS}) -> Tensor[]",
    _down_backward,
    _down_backward_fake,
)
define(
    "moe_up_backward(bool[] needs, Tensor dh, Tensor x, Tensor up_proj, Tensor? up_bias, "
    f"{ROWS_AND_OPTIONS}) -> Tensor[]",
    _up_backward,
    _up_backward_fake,
)


# ---- the node ----------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: list[Any], tail: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    pair_indices, offsets, token_index_map, ctx.top_k, pair_tokens, token_offsets, ctx.options = tail
    _, h, act = output
    save = Options.decode(ctx.options).save
    ctx.mark_non_differentiable(h, act)
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    ctx.save_for_backward(
        *inputs,
        h if save in SAVED_H else None,
        act if save in SAVED_ACT else None,
        pair_indices,
        offsets,
        token_index_map,
        pair_tokens,
        token_offsets,
    )


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 6
    saved = ctx.saved_tensors
    call = gradients_caller(d_out, *saved)
    x, up_proj, up_bias, down_proj, down_bias, scores, h, act, *index_arrays, pair_tokens, token_offsets = saved
    del saved
    ctx.maybe_clear_saved_tensors()  # unless the graph is kept
    tail: tuple[Any, ...] = (*index_arrays, ctx.top_k, pair_tokens, token_offsets, ctx.options)
    if call is gradients_directly:
        tail = (Setting.read(x, tail, down_proj=down_proj)._replace(h_is_free=may_overwrite(ctx, call)),)
    *needs_of_up, needs_down, needs_down_bias, needs_scores = ctx.needs_input_grad[:6]
    needs_h = any(needs_of_up)

    needs = [needs_h, needs_scores, needs_down, needs_down_bias]
    to_recompute_from = (x, up_proj, up_bias) if h is None else (None, None, None)
    down = (h, act, scores, down_proj, down_bias, *to_recompute_from)
    dh, d_scores, d_down, d_down_bias = call("moe_down_backward", needs, d_out, *down, *tail)
    del h, act, down  # before the up projection's backward allocates
    of_up: Gradients = (None, None, None)
    if needs_h:
        of_up = call("moe_up_backward", needs_of_up, dh, x, up_proj, up_bias, *tail)
    return (*of_up, d_down, d_down_bias, d_scores)


differentiate("moe_experts", 6, _setup, _backward)
refuse_double_backward("moe_down_backward")
refuse_double_backward("moe_up_backward")
