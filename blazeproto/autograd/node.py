"""The operators of the expert MLP and its one autograd node. ``mlp.py`` draws it.

Forward is one operator and backward is one, over chunks of tokens (`chunks.py`); a whole batch is one chunk. The backward of a
whole batch runs in two calls, down to dH and on from dH, so that a compiler, too, can free H between them. In fp8 dX, dW_up
and dW_down have a call each, so that W_up^T is freed before the second and dH before the third: their operands are transposed
beside them. Several chunks run in one call, which sums their weight gradients in float32, in order. What the node saves is the
save policy: H, or H and act, or neither, and then backward makes H again from X.

For a frozen tensor no gradient is made, nor what only that gradient would read, unless a kernel makes it along with something
else.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd import flops
from blazeproto.autograd.arguments import DOWN, OF_DOWN, TAIL, WEIGHTS, Made, Parameters, Saved
from blazeproto.autograd.backends import backend_on, dispatch_backend
from blazeproto.autograd.chunks import WHOLE, Chunk, chunks_of, num_chunks, take
from blazeproto.autograd.operators import Gradients, cast, define
from blazeproto.autograd.options import Options
from blazeproto.autograd.private import graph_is_kept, release_saved_tensors, unobserved
from blazeproto.autograd.ranks import EXCHANGES, Peers, peers_of
from blazeproto.autograd.records import check_unchanged, new_rows, new_weights
from blazeproto.autograd.step import Backend, BackendStep, OuterSum


def _read(
    t: Tensor, sizes: tuple[int, ...], tail: tuple[Any, ...]
) -> tuple[Backend, Options, list[Chunk], Peers | None]:
    """What the end of an operator's arguments says. t: of the batch's tokens (T, d).  sizes: (E, d, n)."""
    *index, token_ranks, exchange, encoded = tail[2:]
    options, peers = Options.decode(encoded), peers_of(exchange, token_ranks)
    backend = backend_on(options.backend, t.device, t.dtype, *sizes, precision=options.precision)
    return backend, options, list(chunks_of(peers.places if peers else t.shape[0], sizes[0], *index)), peers


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


def _up_width(p: Parameters, options: Options) -> int:
    """G n."""
    width: int = p.down_proj.shape[2] * activation_named(options.activation).halves
    return width


def _places(p: Parameters, num_rows: int, options: Options) -> Saved:
    """Uninitialised."""
    if not options.saves_h:
        return Saved(*[None] * 6)
    if options.precision != "bf16":
        width, down = _up_width(p, options), p.down_proj.shape
        shapes = (down[0], width, down[1]), down  # up_proj may be the gate's rows alone
        weights = (new_weights(p.x, shape, 1) if options.keep_transposed else None for shape in shapes)
        return Saved(new_rows(p.x, num_rows, width), None, None, None, *weights)
    h = p.x.new_empty(num_rows, _up_width(p, options))
    act = p.x.new_empty(num_rows, p.down_proj.shape[2]) if options.saves_act else None
    xa, act_a = (None if a is None else p.x.new_empty(num_rows, a.shape[1]) for a in (p.up_a, p.down_a))
    return Saved(h, act, xa, act_a, None, None)


def joined(up_proj: Tensor, rest: Tensor | None) -> Tensor:
    """The up projection's weight where gate and up are two."""
    return up_proj if rest is None else torch.cat((up_proj, rest), dim=1)


def _experts_fake(*arguments: Any) -> tuple[Tensor | None, ...]:
    p, tail = Parameters(*arguments[:10]), arguments[11:]
    return torch.empty_like(p.x), *_places(p, tail[2].shape[0], Options.decode(tail[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, top_k, pair_tokens, token_offsets, chunk_tokens, token_ranks, exchange, encoded = inputs
    ctx.rest = (top_k, chunk_tokens, exchange, encoded)
    ctx.exchange = EXCHANGES.get(exchange)  # lives as long as the node
    # For what is not saved the dispatcher has tensors of shape (0,).
    saved = [t if t is not None and t.dim() > 1 else None for t in output[1:]]
    needs = ctx.needs_input_grad
    if saved[0] is not None and not (needs[1] or needs[3] or needs[10]):  # up_proj, up_a, up_rest: nothing else reads X
        tensors[0] = None
    ctx.mark_non_differentiable(*[t for t in output[1:] if t is not None])
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    ctx.save_for_backward(*tensors, pair_tokens, token_offsets, token_ranks, *saved)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 23
    tensors, (top_k, chunk_tokens, exchange, encoded) = ctx.saved_tensors, ctx.rest
    direct = not torch.is_grad_enabled() and unobserved((d_out, *tensors))  # enabled: create_graph=True
    # dH may lie over H where only this node can have seen H, and no other backward will ask for it.
    overwrite_h = direct and getattr(ctx, "alone", False) and not graph_is_kept()
    run = partial(backward.kernel, overwrite_h=overwrite_h) if direct else backward.gradients
    p, up_rest, saved = Parameters(*tensors[:10]), tensors[10], Saved(*tensors[19:])
    tail = (*tensors[11:16], top_k, *tensors[16:18], chunk_tokens, tensors[18], exchange, encoded)
    if p.x is None:
        p = p._replace(x=d_out.new_empty(1, 1).expand_as(d_out))  # for its shape
    del tensors
    release_saved_tensors(ctx)  # should this backward fail halfway, there may be no H for another
    *needs, needs_rest = ctx.needs_input_grad[:11]
    if chunk_tokens != WHOLE:
        return *run((*[False] * 3, *needs), d_out, None, None, *p, *saved, *tail)[3:], *[None] * 13

    needs_of_up, again = (needs[0], needs[1] or needs_rest, *needs[2:5]), saved.h is None
    up_proj = joined(p.up_proj, up_rest) if again else None
    from_x = (p.x, up_proj, *p[2:5]) if again else (None,) * 5
    apart = Options.decode(encoded).precision != "bf16"
    last, no_more = apart and needs[5], [False] * 5  # dW_down
    of_down = (any(needs_of_up), again and needs[4], last, *no_more, needs[5] and not last, *needs[6:10])
    dh, xa, a_scaled, *made_of_down = run(of_down, d_out, None, None, *from_x, *p[DOWN], *saved, *tail)
    xa, up_t = xa if again else saved.xa, saved.up_t
    del saved  # H, before the up projection's backward allocates
    of_up: list[Tensor | None] = [None] * 5
    if any(needs_of_up):
        p = p._replace(up_proj=up_proj if again else joined(p.up_proj, up_rest))
    for part in (slice(0, 1), slice(1, 5)) if apart else (slice(0, 5),):
        if any(needs_of_up[part]):
            wanted = [*no_more, *no_more]
            wanted[part] = needs_of_up[part]
            made = run((*[False] * 3, *wanted), None, dh, None, *p, None, None, xa, None, up_t, None, *tail)
            of_up[part] = made[3:8][part]
            del made
        up_t = None
    del dh, xa
    if last:
        alone = tuple(name == "down_proj" for name in Made._fields)
        made_of_down[5] = run(alone, d_out, None, a_scaled, *[None] * 5, *p[DOWN], *[None] * 6, *tail)[8]
    dx, d_up, *of_factors = of_up
    d_rest = None
    if up_rest is not None and d_up is not None:
        d_up, d_rest = (
            half if need else None for half, need in zip(d_up.chunk(2, 1), (needs[1], needs_rest), strict=True)
        )
    return dx, d_up, *of_factors, *made_of_down[5:], d_rest, *[None] * 12


@define(
    "moe_experts(Tensor x, Tensor up_proj, Tensor? up_bias, Tensor? up_a, Tensor? up_b, "
    f"{OF_DOWN}, Tensor? up_rest, {TAIL}) -> (Tensor out, Tensor h, Tensor act, Tensor xa, Tensor act_a, "
    "Tensor up_t, Tensor down_t)",
    _experts_fake,
    setup=_setup,
    backward=_backward,
    flops=flops.experts,
)
def experts(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`Parameters`, up_rest, and how operators' arguments end -> out (T, d), and `Saved`.

    up_rest: (E, n, d) up rows, where up_proj has the gate rows alone; None where it has both.
    """
    p, up_rest, tail = Parameters(*arguments[:10]), arguments[10], arguments[11:]
    backend, options, chunks, peers = _read(p.x, p.down_proj.shape, tail)
    (up_kept, down_kept), saved, dtype = tail[:2], _places(p, tail[2].shape[0], options), p.x.dtype
    for record, weight in ((up_kept, p.up_proj), (down_kept, p.down_proj)):
        if record is not None:
            check_unchanged(record, weight, copies=True)
    up: Any = None
    down: Any = None
    out: Any = None
    step: Any = None
    for tokens, row_slice, chunk_dispatch in chunks:
        rows, x = backend.rows_of(chunk_dispatch), peers.send(p.x) if peers else take(p.x, tokens)
        h, act, xa, act_a = [take(t, row_slice) for t in saved[:4]]
        if up is None:
            up = backend.forward_weight(joined(p.up_proj, up_rest), dtype, rows, up_kept, saved.up_t)
        low: Any = None
        if p.up_a is not None:
            xa = backend.low_rank_rows(x, cast(p.up_a, dtype), rows, gather=True, transposed=False, out=xa)
            low = (xa, cast(p.up_b, dtype))
        h, act = backend.up_forward(BackendStep(rows, up, p.up_bias, low, activation=options.activation), x, h, act)
        h = xa = low = None  # before Y is allocated
        up = None if len(chunks) == 1 else up  # likewise, a quantized one
        if down is None:
            down = backend.forward_weight(p.down_proj, dtype, rows, down_kept, saved.down_t)
        if p.down_a is not None:
            act_a = backend.low_rank_rows(act, cast(p.down_a, dtype), rows, gather=False, transposed=False, out=act_a)
            low = (act_a, cast(p.down_b, dtype))
        out = torch.empty_like(p.x) if out is None else out
        sums: Any = {"scores": take(p.scores, tokens), "combine": options.combine, "add_up": peers and peers.add_up}
        step = BackendStep(rows, down, p.down_bias, low, **sums)
        backend.down_forward(step, act, take(out, tokens), overwrite_act=not options.saves_act)
        act = act_a = low = step = None  # before the next chunk's are allocated
    return out, *saved


# ---- backward ----------------------------------------------------------------------------------------------------


def _gradient(
    backend: Backend,
    rows: Any,
    need: Made,
    p: Parameters,
    made: dict[str, Any],
    name: str,
    left: Tensor,
    ordered: Any,
    *,
    gather: bool,
    transposed: bool,
) -> None:
    """Make the gradient of a weight or a factor, or add a chunk's, if it is needed. The operands: `Backend.weight_gradient`."""
    if getattr(need, name):
        how = (gather, transposed, name.endswith(("_a", "_b")))
        made[name] = backend.weight_gradient(rows, OuterSum(left, ordered, getattr(p, name), made[name], *how))


def _backward_fake(
    needs: Sequence[bool], d_out: Tensor | None, dh: Tensor | None, a_scaled: Tensor | None, *arguments: Any
) -> Gradients:
    need, p, tail = Made(*needs), Parameters(*arguments[:10]), arguments[16:]
    rows, options = tail[2].shape[0], Options.decode(tail[-1])
    made_dh = None
    if need.dh and d_out is not None:
        width = _up_width(p, options)
        made_dh = new_rows(d_out, rows, width) if options.precision != "bf16" else d_out.new_empty(rows, width)
    made_xa = p.x.new_empty(rows, p.up_a.shape[1]) if need.xa else None
    made_a = new_rows(d_out, rows, p.down_proj.shape[2]) if need.a_scaled and d_out is not None else None
    gradients = [torch.empty_like(t) if wanted else None for t, wanted in zip(p, need[3:], strict=True)]
    return [made_dh, made_xa, made_a, *gradients]


@define(
    "moe_backward(bool[] needs, Tensor? d_out, Tensor? dh, Tensor? a_scaled, Tensor? x, Tensor? up_proj, Tensor? up_bias, "
    f"Tensor? up_a, Tensor? up_b, {OF_DOWN}, Tensor? h, Tensor? act, Tensor? xa, Tensor? act_a, Tensor? up_t, "
    f"Tensor? down_t, {TAIL}) -> Tensor[]",
    _backward_fake,
    flops=flops.backward,
)
def backward(
    needs: Sequence[bool], d_out: Tensor | None, dh: Any, a_scaled: Any, *arguments: Any, overwrite_h: bool = False
) -> Gradients:
    """d_out (T, d), or dh (R, G n) to go on from, or d_out and a_scaled, A' (R, n), for dW_down alone; `Parameters`, `Saved`, and
    how operators' arguments end -> what is needed of `Made`.

    x and the parameters of the up projection are there where h is not, and where a gradient of theirs is needed.
    """
    need, p, saved, tail = Made(*needs), Parameters(*arguments[:10]), Saved(*arguments[10:16]), arguments[16:]
    of_tokens = p.x if d_out is None else d_out
    backend, options, chunks, peers = _read(of_tokens, p.down_proj.shape, tail)
    (up_kept, down_kept), dtype, needs_of_up = tail[:2], of_tokens.dtype, any(need[3:8])
    again = d_out is not None and saved.h is None and a_scaled is None
    up: Any = None
    up_back: Any = None
    down: Any = None
    step: Any = None
    made: dict[str, Any] = dict.fromkeys(Made._fields)
    arrived: Any = peers.send if peers else lambda t: t  # of all ranks' tokens what this rank's rows gather
    one = len(chunks) == 1  # and then a cast or quantized weight is freed after the product that reads it
    if chunks[0].tokens is not None:
        wide = torch.promote_types(dtype, torch.float32)
        made |= {name: torch.empty_like(getattr(p, name)) for name in ("x", "scores") if getattr(need, name)}
        made |= {name: torch.zeros_like(getattr(p, name), dtype=wide) for name in WEIGHTS if getattr(need, name)}
    for tokens, row_slice, chunk_dispatch in chunks:
        rows, x = backend.rows_of(chunk_dispatch), take(p.x, tokens)
        h, act, xa, act_a = [take(t, row_slice) for t in saved[:4]]
        gradient = partial(_gradient, backend, rows, need, p, made)
        low: Any = None
        of_rows: Any = None
        d_chunk: Any = None
        if d_out is not None:
            scores = take(p.scores, tokens)
            if again:
                x = arrived(x)
                if p.up_a is not None:
                    xa = backend.low_rank_rows(x, cast(p.up_a, dtype), rows, gather=True, transposed=False)
                    low = (xa, cast(p.up_b, dtype))
                if up is None:
                    up = backend.forward_weight(p.up_proj, dtype, rows, up_kept)
                step = BackendStep(rows, up, p.up_bias, low, activation=options.activation)
                h, act = backend.up_forward(step, x, None, None)
                low, step, up = None, None, None if one else up
                if need.down_b:
                    act_a = backend.low_rank_rows(act, cast(p.down_a, dtype), rows, gather=False, transposed=False)
                act = act if backend.READS_ACT else None
            d_chunk = arrived(take(d_out, tokens).contiguous())  # out.sum() delivers one of stride 0
            of_a = need.down_proj or need.down_a or need.a_scaled
            if a_scaled is None and any(wanted := (need.dh or needs_of_up, need.scores, of_a)):
                if p.down_b is not None:
                    of_rows = backend.low_rank_rows(d_chunk, cast(p.down_b, dtype), rows, gather=True, transposed=True)
                    low = (of_rows, cast(p.down_a, dtype))
                if down is None:
                    kept = down_kept if saved.down_t is None else saved.down_t
                    down = backend.backward_weight(p.down_proj, dtype, rows, kept)
                step = BackendStep(rows, down, p.down_bias if need.scores else None, low, scores, options.activation)
                over = overwrite_h or again
                dh, d_scores, a_scaled = backend.down_backward_act(step, wanted, d_chunk, h, act, overwrite_h=over)
                if need.scores and tokens is None:
                    made["scores"] = d_scores
                elif need.scores:
                    made["scores"][tokens].copy_(d_scores)
                del step, d_scores
                down = None if one else down
            gradient("down_proj", d_chunk, a_scaled, gather=True, transposed=False)
            if need.down_bias:
                made["down_bias"] = backend.expert_row_sum(d_chunk, len(p.down_proj), rows, scores, made["down_bias"])
            gradient("down_a", a_scaled, low and low[0], gather=False, transposed=True)
            if need.down_b:
                pairs = chunk_dispatch.expert_pair_indices.clamp_min(0)  # rows past the last get a score that exists
                act_a = (act_a * scores.reshape(-1, 1).index_select(0, pairs)).to(dtype)
                gradient("down_b", d_chunk, act_a, gather=True, transposed=False)
        made["a_scaled"] = a_scaled if need.a_scaled else None
        h = act = act_a = a_scaled = low = of_rows = None  # before the up projection's backward allocates
        if needs_of_up:
            if p.up_b is not None and (need.x or need.up_a):
                of_rows = backend.low_rank_rows(dh, cast(p.up_b, dtype), rows, gather=False, transposed=True)
                low = (of_rows, cast(p.up_a, dtype))
            if need.x:
                if up_back is None:
                    kept = up_kept if saved.up_t is None else saved.up_t
                    up_back = backend.backward_weight(p.up_proj, dtype, rows, kept)
                how: Any = {"combine": options.combine, "add_up": peers and peers.add_up}
                made["x"] = torch.empty_like(p.x) if made["x"] is None else made["x"]
                backend.up_backward_act(BackendStep(rows, up_back, None, low, **how), dh, take(made["x"], tokens))
                up_back = None if one else up_back
            if need.up_proj or need.up_a:
                x = arrived(x)
            gradient("up_proj", x, dh, gather=True, transposed=True)
            if need.up_bias:
                made["up_bias"] = backend.expert_row_sum(dh, len(p.down_proj), rows, None, made["up_bias"])
            gradient("up_a", x, low and low[0], gather=True, transposed=True)
            gradient("up_b", dh, xa, gather=False, transposed=False)
        made["dh"], made["xa"] = dh if need.dh else None, xa if need.xa else None
        dh = xa = low = of_rows = None  # before the next chunk's are allocated
    for name in WEIGHTS:
        made[name] = None if made[name] is None else cast(made[name], getattr(p, name).dtype)
    return [*made.values()]
