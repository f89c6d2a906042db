"""The first autograd node: x, W_up -> H, act. ``mlp.py`` tells how the two nodes meet."""

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
from blazeproto.reference import is_gated


def _up(x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any) -> tuple[Tensor, Tensor]:
    """x (T, d), up_proj (E, G*n, d), up_bias (E, G*n) -> h (R, G*n), act (R, n)."""
    rows, options = decode_tail(*tail)
    products = products_for(options, x, up_proj.shape[0], *_widths(up_proj, options))
    return products.up_forward(x, cast(up_proj, x.dtype), up_bias, rows, options.activation)


def _up_fake(x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any) -> tuple[Tensor, Tensor]:
    rows, options = decode_tail(*tail)
    num_rows = rows.pair_indices.shape[0]
    return x.new_empty(num_rows, up_proj.shape[1]), x.new_empty(num_rows, _widths(up_proj, options)[1])


def _widths(up_proj: Tensor, options: Options) -> tuple[int, int]:
    """(d, n) from a weight of (E, 2n, d) or (E, n, d)."""
    _, up_width, d_model = up_proj.shape
    return d_model, up_width // (1 + is_gated(options.activation))


def _up_backward(
    needs: list[bool], dh: Tensor, x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any
) -> Gradients:
    """dh (R, G*n) -> those needed of dx (T, d), d_up_proj (E, G*n, d), d_up_bias (E, G*n)."""
    rows, options = decode_tail(*tail)
    products = products_for(options, x, up_proj.shape[0], *_widths(up_proj, options))
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
    f"moe_up(Tensor x, Tensor up_proj, Tensor? up_bias, {ROWS_AND_OPTIONS}) -> (Tensor h, Tensor act)", _up, _up_fake
)
define(
    "moe_up_backward(bool[] needs, Tensor dh, Tensor x, Tensor up_proj, Tensor? up_bias, "
    f"{ROWS_AND_OPTIONS}) -> Tensor[]",
    _up_backward,
    _up_backward_fake,
)


def _setup(ctx: Any, inputs: list[Any], tail: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pair_indices, offsets, token_index_map, ctx.top_k, pair_tokens, token_offsets, ctx.options = tail
    ctx.mark_non_differentiable(output[1])  # act; its gradient comes back as part of h's
    ctx.set_materialize_grads(False)  # or autograd would make zeros of act's size
    ctx.save_for_backward(*inputs, pair_indices, offsets, token_index_map, pair_tokens, token_offsets)


def _backward(ctx: Any, dh: Tensor | None, _d_act: None) -> tuple[Tensor | None, ...]:
    if dh is None:
        return (None, None, None)
    *saved, pair_tokens, token_offsets = ctx.saved_tensors
    tail = (ctx.top_k, pair_tokens, token_offsets, ctx.options)
    return (*gradients_of("moe_up_backward", ctx.needs_input_grad[:3], dh, *saved, *tail),)


differentiate("moe_up", 3, _setup, _backward)
refuse_double_backward("moe_up_backward")
