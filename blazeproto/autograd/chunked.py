"""The expert MLP in chunks of tokens, so that transient buffers are bounded (``workspace_bytes``).

One autograd node. Forward and backward walk the chunks; each chunk has a dispatch of its own and takes the whole way,
up and down, before the next begins, so only one chunk's act, Y, A' and dX~ exist at a time, and dH where it has a
place of its own. Weight gradients are summed over the chunks in float32, in order. What the save policy keeps is kept
for all tokens, in arrays whose slices are the chunks: pair p of chunk c counts from the chunk's first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.autograd.backends import products_for
from blazeproto.autograd.library import (
    Gradients,
    build_dispatch,
    define,
    differentiate,
    gradients_caller,
    may_overwrite,
    refuse_double_backward,
    weight_grad_dtype,
)
from blazeproto.autograd.policy import PARAMETERS, SAVED_ACT, SAVED_H, Options, Rows
from blazeproto.reference import is_gated

CHUNK_MULTIPLE = 8  # tokens


def transient_bytes_per_token(down_proj: Tensor, top_k: int, activation: str, itemsize: int) -> int:
    """Bytes that one token needs for what lives only during a chunk, in the widest moment of forward and backward.

    As the Hopper backend has it, and as if H were recomputed, whatever the save policy: the chunks, and so the order
    in which weight gradients are summed, are the same for all, which then agree to the bit.
    """
    _, d_model, d_expert = down_proj.shape
    up_width = d_expert * (1 + is_gated(activation))
    moments = (
        up_width + d_expert,  # up forward: H, act
        d_expert + d_model,  # down forward: act, Y
        up_width + d_expert,  # down backward: H, which dH is written over, or dH where H is saved and kept; and A'
        up_width + d_model,  # up backward: dH, dX~
    )
    return top_k * max(moments) * itemsize


def chunk_length(num_tokens: int, bytes_per_token: int, workspace_bytes: int) -> int:
    """Tokens in a chunk: spread evenly over as few chunks as fit the workspace.

    A multiple of CHUNK_MULTIPLE where that many fit, so that slices of index arrays stay 16-byte aligned.
    """
    fitting = workspace_bytes // bytes_per_token
    if fitting == 0 and num_tokens:
        raise ValueError(
            f"workspace_bytes: expected at least {bytes_per_token}, what one token needs, got {workspace_bytes}"
        )
    if fitting >= num_tokens:
        return num_tokens
    if fitting < CHUNK_MULTIPLE:
        return fitting
    fitting -= fitting % CHUNK_MULTIPLE
    even = -(-num_tokens // -(-num_tokens // fitting))
    return -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


class Chunk(NamedTuple):
    number: int
    tokens: slice
    pairs: slice  # rows too: a chunk has as many rows as pairs


def chunks_of(num_tokens: int, chunk_tokens: int, top_k: int) -> Iterator[Chunk]:
    for number, begin in enumerate(range(0, num_tokens, chunk_tokens)):
        end = min(begin + chunk_tokens, num_tokens)
        yield Chunk(number, slice(begin, end), slice(begin * top_k, end * top_k))


def _chunked(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    topk_experts: Tensor,
    chunk_tokens: int,
    options: str,
) -> tuple[Tensor, ...]:
    """-> out (T, d), then what is saved: h (T K, G*n) and act (T K, n) or empty, pair_indices (T K,),
    offsets (chunks, E+1), token_index_map (T K,)."""
    opts = Options.decode(options)
    num_experts, d_model, d_expert = down_proj.shape
    products = products_for(opts, x, num_experts, d_model, d_expert)
    made = _chunked_fake(x, up_proj, up_bias, down_proj, down_bias, scores, topk_experts, chunk_tokens, options)
    out, h, act, pair_indices, offsets, token_index_map = made
    up_compute, down_compute = up_proj.to(x.dtype), down_proj.to(x.dtype)
    for number, tokens, pairs in chunks_of(x.shape[0], chunk_tokens, scores.shape[1]):
        rows = Rows(pair_indices[pairs], offsets[number], token_index_map[pairs], scores.shape[1])
        build_dispatch(topk_experts[tokens], num_experts, opts.backend, rows[:3])
        h_chunk = h[pairs] if opts.save in SAVED_H else None
        rows = products.rows_for(rows)
        act_chunk = products.up_forward(x[tokens], up_compute, up_bias, rows, opts.activation, h_chunk)[1]
        if opts.save in SAVED_ACT:
            act[pairs] = act_chunk
        products.down_forward(
            act_chunk,
            down_compute,
            down_bias,
            scores[tokens],
            rows,
            tokens.stop - tokens.start,
            opts.combine,
            out[tokens],
            overwrite_act=True,
        )
        del act_chunk  # before the next chunk's is allocated
    return made


def _chunked_fake(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    topk_experts: Tensor,
    chunk_tokens: int,
    options: str,
) -> tuple[Tensor, ...]:
    save = Options.decode(options).save
    num_tokens, num_pairs = x.shape[0], topk_experts.numel()
    num_experts, _, d_expert = down_proj.shape
    num_chunks = -(-num_tokens // chunk_tokens)
    return (
        torch.empty_like(x),
        x.new_empty(num_pairs if save in SAVED_H else 0, up_proj.shape[1]),
        x.new_empty(num_pairs if save in SAVED_ACT else 0, d_expert),
        x.new_empty(num_pairs, dtype=torch.int32),
        x.new_empty(num_chunks, num_experts + 1, dtype=torch.int32),
        x.new_empty(num_pairs, dtype=torch.int32),
    )


def _chunked_backward(
    needs: list[bool],
    d_out: Tensor,
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    h: Tensor,
    act: Tensor,
    pair_indices: Tensor,
    offsets: Tensor,
    token_index_map: Tensor,
    chunk_tokens: int,
    options: str,
    h_is_free: bool = False,
) -> Gradients:
    """d_out (T, d) -> those needed of the gradients of x, up_proj, up_bias, down_proj, down_bias, scores."""
    opts = Options.decode(options)
    top_k = scores.shape[1]
    products = products_for(opts, x, *down_proj.shape)
    up_compute, down_compute = up_proj.to(x.dtype), down_proj.to(x.dtype)
    needs_x, needs_up, needs_up_bias, needs_down, needs_down_bias, needs_scores = needs
    up_needs = (needs_x, needs_up, needs_up_bias)
    down_needs = (any(up_needs), needs_scores, needs_down, needs_down_bias)

    dx = torch.empty_like(x) if needs_x else None
    d_scores = torch.empty_like(scores) if needs_scores else None
    accumulation = torch.promote_types(x.dtype, torch.float32)
    parameters = ((up_proj, needs_up), (up_bias, needs_up_bias), (down_proj, needs_down), (down_bias, needs_down_bias))
    d_up, d_up_bias, d_down, d_down_bias = (
        torch.zeros_like(parameter, dtype=accumulation) if parameter is not None and needed else None
        for parameter, needed in parameters
    )
    for number, tokens, pairs in chunks_of(x.shape[0], chunk_tokens, top_k):
        rows = products.rows_for(Rows(pair_indices[pairs], offsets[number], token_index_map[pairs], top_k))
        if opts.save in SAVED_H:
            h_chunk, act_chunk = h[pairs], act[pairs] if opts.save in SAVED_ACT else None
        else:
            h_chunk, act_chunk = products.recompute_h(x[tokens], up_compute, up_bias, rows, opts.activation)
        dh, d_scores_chunk, _, _ = products.down_backward(
            d_out[tokens].contiguous(),
            down_compute,
            down_bias,
            h_chunk,
            act_chunk,
            scores[tokens],
            rows,
            opts.activation,
            down_needs,
            accumulation,
            d_down,
            d_down_bias,
            overwrite_h=h_is_free or opts.save not in SAVED_H,
        )
        del h_chunk, act_chunk
        if d_scores is not None:
            d_scores[tokens] = d_scores_chunk
        if dh is not None:
            dx_chunk = None if dx is None else dx[tokens]
            products.up_backward(dh, x[tokens], up_compute, rows, up_needs, accumulation, dx_chunk, d_up, d_up_bias)
        del dh
    return (
        dx,
        None if d_up is None else d_up.to(weight_grad_dtype(up_proj, opts)),
        None if d_up_bias is None or up_bias is None else d_up_bias.to(up_bias.dtype),
        None if d_down is None else d_down.to(weight_grad_dtype(down_proj, opts)),
        None if d_down_bias is None or down_bias is None else d_down_bias.to(down_bias.dtype),
        d_scores,
    )


def _chunked_backward_fake(
    needs: list[bool],
    d_out: Tensor,
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *rest: Any,
) -> Gradients:
    options = Options.decode(rest[-1])
    made = (
        torch.empty_like(x),
        torch.empty_like(up_proj, dtype=weight_grad_dtype(up_proj, options)),
        None if up_bias is None else torch.empty_like(up_bias),
        torch.empty_like(down_proj, dtype=weight_grad_dtype(down_proj, options)),
        None if down_bias is None else torch.empty_like(down_bias),
        torch.empty_like(scores),
    )
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


define(
    f"moe_chunked({PARAMETERS}, Tensor topk_experts, SymInt chunk_tokens, str options) -> "
    "(Tensor out, Tensor h, Tensor act, Tensor pair_indices, Tensor offsets, Tensor token_index_map)",
    _chunked,
    _chunked_fake,
)
define(
    f"moe_chunked_backward(bool[] needs, Tensor d_out, {PARAMETERS}, Tensor h, Tensor act, Tensor pair_indices, "
    "Tensor offsets, Tensor token_index_map, SymInt chunk_tokens, str options) -> Tensor[]",
    _chunked_backward,
    _chunked_backward_fake,
)


def _setup(ctx: Any, inputs: list[Any], tail: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _topk_experts, ctx.chunk_tokens, ctx.options = tail
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[1:])


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 6
    needs, saved = ctx.needs_input_grad[:6], ctx.saved_tensors
    call, tail = gradients_caller(d_out, *saved), [ctx.chunk_tokens, ctx.options]
    if may_overwrite(ctx, call):
        tail.append(True)
        ctx.maybe_clear_saved_tensors()  # should this backward fail halfway, there is no H for another
    return (*call("moe_chunked_backward", needs, d_out, *saved, *tail),)


differentiate("moe_chunked", 6, _setup, _backward)
refuse_double_backward("moe_chunked_backward")
