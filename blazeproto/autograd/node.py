"""The operators of the expert MLP and its one autograd node. ``mlp.py`` draws it.

Forward is one operator, over chunks of tokens (`chunks.py`). Backward is two for a whole batch, so that a compiler can free
H between them, and one for chunks, which sums their weight gradients in float32, in order. What the node saves is the save
policy: H, or H and act, or neither, and then backward makes H again from X.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.backends import Backend, backend_on, dispatch_backend
from blazeproto.autograd.chunks import WHOLE, Chunk, chunks_of, num_chunks, take
from blazeproto.autograd.operators import Gradients, cast, define
from blazeproto.autograd.policy import Options
from blazeproto.autograd.private import graph_is_kept, nobody_listens, release_saved_tensors

PARAMETERS = "Tensor x, Tensor up_proj, Tensor? up_bias, Tensor down_proj, Tensor? down_bias, Tensor scores"
INDEX = (
    "Tensor expert_pair_indices, Tensor expert_token_offsets, Tensor token_index_map, int top_k, "
    "Tensor? pair_tokens, Tensor? token_offsets, SymInt chunk_tokens, str options"
)
"""How the operators' arguments end: a `Dispatch`, or one a chunk (offsets (chunks, E+1)), and the options."""


def _read(t: Tensor, sizes: tuple[int, ...], tail: tuple[Any, ...]) -> tuple[Backend, Options, list[Chunk]]:
    """What the end of an operator's arguments says. t: of the batch's tokens (T, d).  sizes: (E, d, n)."""
    *index, encoded = tail
    options = Options.decode(encoded)
    backend = backend_on(options.backend, t.device, t.dtype, *sizes)
    return backend, options, list(chunks_of(t.shape[0], sizes[0], *index))


# ---- dispatch ----------------------------------------------------------------------------------------------------


def _dispatch_fake(
    topk_experts: Tensor, num_experts: int, chunk_tokens: int, backend: str, row_capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = num_pairs = topk_experts.numel()
    if row_capacity is not None and chunk_tokens == WHOLE:
        num_rows = torch.sym_min(num_pairs, row_capacity)
    shapes = (num_rows,), (num_chunks(topk_experts.shape[0], chunk_tokens), num_experts + 1), (num_pairs,)
    pair_indices, offsets, token_index_map = (topk_experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return pair_indices, offsets, token_index_map


@define(
    "dispatch(Tensor topk_experts, int num_experts, SymInt chunk_tokens, str backend, SymInt? row_capacity=None) "
    "-> (Tensor expert_pair_indices, Tensor expert_token_offsets, Tensor token_index_map)",
    _dispatch_fake,
    chooses=True,
)
def dispatch(
    topk_experts: Tensor, num_experts: int, chunk_tokens: int, backend: str, row_capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """topk_experts (T, K) or (P,), int32 or int64 -> expert_pair_indices (R,), expert_token_offsets (chunks, E+1) and
    token_index_map (P,), int32: a dispatch for each chunk of tokens, or one for all.

    A pair whose expert id is outside [0, E) gets no row: -1 in ``token_index_map``. The rows that are left over come
    last, with -1 in ``expert_pair_indices``. R is P, or min(P, row_capacity) in one dispatch for all; chunks leave out the
    pairs that this one leaves out, and have places for all of theirs.
    """
    made = _dispatch_fake(topk_experts, num_experts, chunk_tokens, backend, row_capacity)
    builder = dispatch_backend(backend, topk_experts.device)
    if row_capacity is not None and row_capacity < topk_experts.numel() and chunk_tokens != WHOLE:
        whole = _dispatch_fake(topk_experts, num_experts, WHOLE, backend, row_capacity)
        builder.build_dispatch(topk_experts, num_experts, (whole[0], whole[1][0], whole[2]))
        topk_experts = topk_experts.masked_fill(whole[2].view(topk_experts.shape) < 0, -1)
    top_k = topk_experts.shape[1] if topk_experts.dim() == 2 else 1
    for chunk in chunks_of(topk_experts.shape[0], num_experts, *made, top_k, None, None, chunk_tokens):
        lists = (
            chunk.dispatch.expert_pair_indices,
            chunk.dispatch.expert_token_offsets,
            chunk.dispatch.token_index_map,
        )
        builder.build_dispatch(take(topk_experts, chunk.tokens), num_experts, lists)
    return made


# ---- forward -----------------------------------------------------------------------------------------------------


def _saved(x: Tensor, up_proj: Tensor, down_proj: Tensor, num_rows: int, options: Options) -> tuple[Tensor, Tensor]:
    """Places for h (R, G n) and act (R, n); what the save policy leaves out has no rows."""
    h = x.new_empty(num_rows if options.saves_h else 0, up_proj.shape[1])
    return h, x.new_empty(num_rows if options.saves_act else 0, down_proj.shape[2])


def _experts_fake(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_saved(x, up_proj, down_proj, tail[0].shape[0], Options.decode(tail[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *parameters, pair_indices, offsets, token_index_map, top_k, pair_tokens, token_offsets, chunk_tokens, encoded = (
        inputs
    )
    (_, h, act), options = output, Options.decode(encoded)
    ctx.rest = (top_k, chunk_tokens, encoded)
    ctx.mark_non_differentiable(h, act)
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    kept = (h if options.saves_h else None, act if options.saves_act else None)
    ctx.save_for_backward(*parameters, *kept, pair_indices, offsets, token_index_map, pair_tokens, token_offsets)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 14
    saved, (top_k, chunk_tokens, encoded) = ctx.saved_tensors, ctx.rest
    quiet = not torch.is_grad_enabled() and nobody_listens((d_out, *saved))  # enabled: create_graph=True
    # dH may lie over H where only this node can have seen H, and nobody will ask for it again.
    overwrite_h = quiet and getattr(ctx, "alone", False) and not graph_is_kept()
    x, up_proj, up_bias, down_proj, down_bias, scores, h, act, *index, pair_tokens, token_offsets = saved
    del saved
    release_saved_tensors(ctx)  # should this backward fail halfway, there may be no H for another
    tail = (*index, top_k, pair_tokens, token_offsets, chunk_tokens, encoded)
    needs = ctx.needs_input_grad[:6]
    if chunk_tokens != WHOLE:
        backward = (
            partial(backward_in_chunks.kernel, overwrite_h=overwrite_h) if quiet else backward_in_chunks.gradients
        )
        parameters = (x, up_proj, up_bias, down_proj, down_bias, scores)
        return *backward(needs, d_out, *parameters, h, act, *tail), *[None] * 8

    *needs_of_up, needs_down, needs_down_bias, needs_scores = needs
    down = partial(down_backward.kernel, overwrite_h=overwrite_h) if quiet else down_backward.gradients
    to_recompute_from = (x, up_proj, up_bias) if h is None else (None, None, None)
    needs_of_down = (any(needs_of_up), needs_scores, needs_down, needs_down_bias)
    of_down = down(needs_of_down, d_out, h, act, scores, down_proj, down_bias, *to_recompute_from, *tail)
    dh, d_scores, d_down, d_down_bias = of_down
    del h, act, of_down  # before the up projection's backward allocates
    of_up: Gradients = (None, None, None)
    if any(needs_of_up):
        of_up = (up_backward.kernel if quiet else up_backward.gradients)(needs_of_up, dh, x, up_proj, up_bias, *tail)
    return *of_up, d_down, d_down_bias, d_scores, *[None] * 8


@define(
    f"moe_experts({PARAMETERS}, {INDEX}) -> (Tensor out, Tensor h, Tensor act)",
    _experts_fake,
    setup=_setup,
    backward=_backward,
)
def experts(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, d), up_proj (E, G n, d), up_bias (E, G n), down_proj (E, d, n), down_bias (E, d), scores (T, K) or (P,)
    -> out (T, d), h (R, G n), act (R, n); those of h and act that the save policy leaves out have no rows."""
    backend, options, chunks = _read(x, down_proj.shape, tail)
    up, down = cast(up_proj, x.dtype), cast(down_proj, x.dtype)
    saved_h, saved_act = _saved(x, up_proj, down_proj, tail[0].shape[0], options)
    out = None
    for tokens, row_slice, chunk_dispatch in chunks:
        rows = backend.rows_of(chunk_dispatch)
        h = take(saved_h, row_slice) if options.saves_h else None
        act = take(saved_act, row_slice) if options.saves_act else None
        h, act = backend.up_forward(take(x, tokens), up, up_bias, rows, options.activation, h, act)
        del h  # before Y is allocated
        out = torch.empty_like(x) if out is None else out
        places = (take(scores, tokens), rows, take(out, tokens), options.combine)
        backend.down_forward(act, down, down_bias, *places, overwrite_act=not options.saves_act)
        del act  # before the next chunk's is allocated
    assert out is not None
    return out, saved_h, saved_act


# ---- backward ----------------------------------------------------------------------------------------------------


def _down_fake(
    needs: Sequence[bool],
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
    options = Options.decode(tail[-1])
    width = down_proj.shape[2] * activation_named(options.activation).halves
    made = (
        d_out.new_empty(tail[0].shape[0], width),
        torch.empty_like(scores),
        torch.empty_like(down_proj),
        None if down_bias is None else torch.empty_like(down_bias),
    )
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


@define(
    "moe_down_backward(bool[] needs, Tensor d_out, Tensor? h, Tensor? act, Tensor scores, Tensor down_proj, "
    f"Tensor? down_bias, Tensor? x, Tensor? up_proj, Tensor? up_bias, {INDEX}) -> Tensor[]",
    _down_fake,
)
def down_backward(
    needs: Sequence[bool],
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
    overwrite_h: bool = False,
) -> Gradients:
    """Of one chunk: d_out (T, d) -> those needed of dh (R, G n), d_scores, d_down_proj (E, d, n), d_down_bias (E, d).

    x, up_proj and up_bias are there where h is not.
    """
    backend, options, [chunk] = _read(d_out, down_proj.shape, tail)
    rows = backend.rows_of(chunk.dispatch)
    if h is None:
        assert x is not None and up_proj is not None
        h, act = backend.recompute_h(x, cast(up_proj, x.dtype), up_bias, rows, options.activation)
        overwrite_h = True
    # out.sum() delivers a gradient of stride 0.
    saved = (d_out.contiguous(), h, act, scores, cast(down_proj, h.dtype), down_bias)
    settings = (rows, options.activation, down_proj.dtype)
    *made, d_bias = backend.down_backward(needs, *saved, *settings, overwrite_h=overwrite_h)
    return *made, d_bias if down_bias is None or d_bias is None else cast(d_bias, down_bias.dtype)


def _up_fake(
    needs: Sequence[bool], dh: Tensor, x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any
) -> Gradients:
    made = (torch.empty_like(x), torch.empty_like(up_proj), None if up_bias is None else torch.empty_like(up_bias))
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


@define(
    f"moe_up_backward(bool[] needs, Tensor dh, Tensor x, Tensor up_proj, Tensor? up_bias, {INDEX}) -> Tensor[]",
    _up_fake,
)
def up_backward(
    needs: Sequence[bool], dh: Tensor, x: Tensor, up_proj: Tensor, up_bias: Tensor | None, *tail: Any
) -> Gradients:
    """Of one chunk: dh (R, G n) -> those needed of dx (T, d), d_up_proj (E, G n, d), d_up_bias (E, G n)."""
    (num_experts, up_width, d_model), options = up_proj.shape, Options.decode(tail[-1])
    d_expert = up_width // activation_named(options.activation).halves
    backend, _, [chunk] = _read(x, (num_experts, d_model, d_expert), tail)
    rows = backend.rows_of(chunk.dispatch)
    dx, d_weight, d_bias = backend.up_backward(needs, dh, x, cast(up_proj, x.dtype), rows, up_proj.dtype)
    return dx, d_weight, d_bias if up_bias is None or d_bias is None else cast(d_bias, up_bias.dtype)


def _backward_fake(
    needs: Sequence[bool],
    d_out: Tensor,
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    *rest: Any,
) -> Gradients:
    *needs_of_up, needs_down, needs_down_bias, needs_scores = needs
    dx, d_up, d_up_bias = _up_fake(needs_of_up, x, x, up_proj, up_bias, *rest)
    needs_of_down = (False, needs_scores, needs_down, needs_down_bias)
    arguments = (d_out, None, None, scores, down_proj, down_bias, None, None, None)
    _, d_scores, d_down, d_down_bias = _down_fake(needs_of_down, *arguments, *rest[2:])
    return dx, d_up, d_up_bias, d_down, d_down_bias, d_scores


@define(
    f"moe_backward(bool[] needs, Tensor d_out, {PARAMETERS}, Tensor? h, Tensor? act, {INDEX}) -> Tensor[]",
    _backward_fake,
)
def backward_in_chunks(
    needs: Sequence[bool],
    d_out: Tensor,
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    saved_h: Tensor | None,
    saved_act: Tensor | None,
    *tail: Any,
    overwrite_h: bool = False,
) -> Gradients:
    """d_out (T, d) -> those needed of the gradients of x, up_proj, up_bias, down_proj, down_bias, scores."""
    backend, options, chunks = _read(x, down_proj.shape, tail)
    up, down = cast(up_proj, x.dtype), cast(down_proj, x.dtype)
    *needs_of_up, needs_down, needs_down_bias, needs_scores = needs
    needs_of_down = (any(needs_of_up), needs_scores, needs_down, needs_down_bias)
    dx, d_scores = (torch.empty_like(t) if need else None for t, need in ((x, needs[0]), (scores, needs_scores)))
    wide = torch.promote_types(x.dtype, torch.float32)
    d_up, d_up_bias, d_down, d_down_bias = sums = [
        torch.zeros_like(t, dtype=wide) if t is not None and need else None
        for t, need in zip((up_proj, up_bias, down_proj, down_bias), needs[1:5], strict=True)
    ]
    for tokens, row_slice, chunk_dispatch in chunks:
        rows, x_chunk = backend.rows_of(chunk_dispatch), take(x, tokens)
        if saved_h is None:
            h, act = backend.recompute_h(x_chunk, up, up_bias, rows, options.activation)
        else:
            h, act = take(saved_h, row_slice), None if saved_act is None else take(saved_act, row_slice)
        saved = (take(d_out, tokens).contiguous(), h, act, take(scores, tokens), down, down_bias)
        dh, d_scores_chunk, _, _ = backend.down_backward(
            needs_of_down,
            *saved,
            rows,
            options.activation,
            wide,
            d_down,
            d_down_bias,
            overwrite_h=overwrite_h or saved_h is None,
        )
        del h, act, saved
        if d_scores is not None and d_scores_chunk is not None:
            take(d_scores, tokens).copy_(d_scores_chunk)
        if dh is not None:
            dx_chunk = None if dx is None else take(dx, tokens)
            backend.up_backward(needs_of_up, dh, x_chunk, up, rows, wide, dx_chunk, d_up, d_up_bias)
        del dh
    weights = (up_proj, up_bias, down_proj, down_bias)
    of_parameters = [t if t is None or w is None else t.to(w.dtype) for t, w in zip(sums, weights, strict=True)]
    return dx, *of_parameters, d_scores
