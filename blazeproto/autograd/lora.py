"""``moe_mlp_lora``: experts whose weights are frozen, with low-rank factors beside them that are trained.

An expert's weight is W + B A. Neither that sum nor a gradient of its size is ever made: the factors' products have r columns,
read the tokens' rows where the frozen weights' products read them, and are added before a bias and the activation.

    XA  = X A_up^T        H = X W_up^T + XA B_up^T        act A_down^T        Y = act W_down^T + (act A_down^T) B_down^T

    saved:      X, S, indices, H, XA, act A_down^T

    dOB = dO B_down     dH, dS, S act <── dO W_down + dOB A_down     dA_down = dOB^T (S act)     dB_down = dO^T (S act A_down^T)
    dHB = dH B_up       dX            <── dH W_up   + dHB A_up       dA_up   = dHB^T X           dB_up   = dH^T XA

One autograd node, one operator forward and two backward, as in ``mlp.py``. dH is written over H on the terms that are told there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd import node
from blazeproto.autograd.backends import Backend, backend_on
from blazeproto.autograd.checks import check_arguments, check_factors, check_frozen
from blazeproto.autograd.chunks import WHOLE, chunks_of
from blazeproto.autograd.node import INDEX
from blazeproto.autograd.operators import (
    Gradients,
    autocast_dtype,
    cast,
    define,
    dense,
    on_another_gpu,
    without_autocast,
)
from blazeproto.autograd.policy import Options
from blazeproto.autograd.private import graph_is_kept, nobody_listens, refuse_transforms, release_saved_tensors
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.tiles import CHUNK

OF_DOWN = "Tensor down_proj, Tensor? down_bias, Tensor? down_a, Tensor? down_b"
PARAMETERS = f"Tensor x, Tensor up_proj, Tensor? up_bias, Tensor? up_a, Tensor? up_b, {OF_DOWN}, Tensor scores"


class LowRank(NamedTuple):
    """What is added to a weight (E, out, in) of E experts: b a, of rank r. Hu et al., LoRA, arXiv 2106.09685, section 4.1.

    Adapters that act together are one such pair, concatenated along r.

    Fields:
        a: (E, r, in), of a weight's dtype or float32.
        b: (E, out, r), of such a dtype; a scaling is the caller's to multiply into it.
    """

    a: Tensor
    b: Tensor


def _read(t: Tensor, sizes: tuple[int, ...], tail: tuple[Any, ...]) -> tuple[Backend, Options, Any]:
    """The backend, the options and the backend's rows, of the end of an operator's arguments. t: (T, d).  sizes: (E, d, n)."""
    *index, encoded = tail
    options = Options.decode(encoded)
    backend = backend_on(options.backend, t.device, t.dtype, *sizes)
    [chunk] = chunks_of(t.shape[0], sizes[0], *index)
    return backend, options, backend.rows_of(chunk.dispatch)


# ---- forward -----------------------------------------------------------------------------------------------------


def _saved(
    x: Tensor, up_proj: Tensor, up_a: Tensor | None, down_a: Tensor | None, tail: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Places for H (R, G n), XA (R, r) and act A_down^T (R, r); without rows where nothing is saved."""
    num_rows = tail[0].shape[0] if Options.decode(tail[-1]).saves_h else 0
    h, xa, act_a = (
        x.new_empty(num_rows, 0 if t is None else t.shape[1])  # a factor is (E, r, in)
        for t in (up_proj, up_a, down_a)
    )
    return h, xa, act_a


def _experts_fake(
    x: Tensor, up_proj: Tensor, up_bias: Tensor | None, up_a: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_saved(x, up_proj, up_a, rest[3], rest[6:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *parameters, pair_indices, offsets, token_index_map, top_k, pair_tokens, token_offsets, chunk_tokens, encoded = (
        inputs
    )
    ctx.rest = (top_k, chunk_tokens, encoded)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    ctx.save_for_backward(*parameters, *output[1:], pair_indices, offsets, token_index_map, pair_tokens, token_offsets)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 18
    saved, (top_k, chunk_tokens, encoded) = ctx.saved_tensors, ctx.rest
    quiet = not torch.is_grad_enabled() and nobody_listens((d_out, *saved))  # enabled: create_graph=True
    overwrite_h = quiet and getattr(ctx, "alone", False) and not graph_is_kept()
    x, up_proj, _, up_a, up_b, down_proj, down_bias, down_a, down_b, scores, h, xa, act_a, *index = saved
    *index, pair_tokens, token_offsets = index
    del saved
    release_saved_tensors(ctx)
    tail = (*index, top_k, pair_tokens, token_offsets, chunk_tokens, encoded)
    needs_x, _, _, needs_up_a, needs_up_b, _, _, needs_down_a, needs_down_b, needs_scores = ctx.needs_input_grad[:10]
    needs_of_up = (needs_x, needs_up_a, needs_up_b)

    down = partial(down_backward.kernel, overwrite_h=overwrite_h) if quiet else down_backward.gradients
    needs_of_down = (any(needs_of_up), needs_scores, needs_down_a, needs_down_b)
    of_down = down(needs_of_down, d_out, h, act_a, scores, down_proj, down_bias, down_a, down_b, *tail)
    dh, d_scores, d_down_a, d_down_b = of_down
    del h, of_down  # before the up projection's backward allocates
    of_up: Gradients = (None, None, None)
    if any(needs_of_up):
        of_up = (up_backward.kernel if quiet else up_backward.gradients)(
            needs_of_up, dh, x, xa, up_proj, up_a, up_b, *tail
        )
    dx, d_up_a, d_up_b = of_up
    return dx, None, None, d_up_a, d_up_b, None, None, d_down_a, d_down_b, d_scores, *[None] * 8


@define(
    f"moe_lora({PARAMETERS}, {INDEX}) -> (Tensor out, Tensor h, Tensor xa, Tensor act_a)",
    _experts_fake,
    setup=_setup,
    backward=_backward,
)
def experts(
    x: Tensor,
    up_proj: Tensor,
    up_bias: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    scores: Tensor,
    *tail: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, d), the frozen weights and biases, up_a (E, r, d), up_b (E, G n, r), down_a (E, r, n), down_b (E, d, r) and scores
    -> out (T, d), h (R, G n), xa (R, r), act_a (R, r); the last three have no rows where nothing is saved."""
    backend, options, rows = _read(x, down_proj.shape, tail)
    saved_h, xa, act_a = _saved(x, up_proj, up_a, down_a, tail)
    low = None
    if up_a is not None and up_b is not None:
        made = backend.low_rank_rows(x, cast(up_a, x.dtype), rows, gather=True, transposed=False)
        low = (made, cast(up_b, x.dtype))
        xa = made if options.saves_h else xa
        del made
    place = saved_h if options.saves_h else None
    h, act = backend.up_forward(x, cast(up_proj, x.dtype), up_bias, rows, options.activation, place, None, low)
    del h, place  # before Y is allocated
    low = None
    if down_a is not None and down_b is not None:
        made = backend.low_rank_rows(act, cast(down_a, x.dtype), rows, gather=False, transposed=False)
        low = (made, cast(down_b, x.dtype))
        act_a = made if options.saves_h else act_a
    out, weight = torch.empty_like(x), cast(down_proj, x.dtype)
    backend.down_forward(act, weight, down_bias, scores, rows, out, options.combine, low, overwrite_act=True)
    return out, saved_h, xa, act_a


# ---- backward ----------------------------------------------------------------------------------------------------


def _needed(made: Sequence[Tensor | None], needs: Sequence[bool]) -> Gradients:
    return [gradient if need else None for gradient, need in zip(made, needs, strict=True)]


def _like(t: Tensor | None) -> Tensor | None:
    return None if t is None else torch.empty_like(t)


def _down_fake(
    needs: Sequence[bool],
    d_out: Tensor,
    h: Tensor,
    act_a: Tensor,
    scores: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    *tail: Any,
) -> Gradients:
    return _needed([torch.empty_like(t) if t is not None else None for t in (h, scores, down_a, down_b)], needs)


@define(
    "moe_lora_down_backward(bool[] needs, Tensor d_out, Tensor h, Tensor act_a, Tensor scores, "
    f"{OF_DOWN}, {INDEX}) -> Tensor[]",
    _down_fake,
)
def down_backward(
    needs: Sequence[bool],
    d_out: Tensor,
    h: Tensor,
    act_a: Tensor,
    scores: Tensor,
    down_proj: Tensor,
    down_bias: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    *tail: Any,
    overwrite_h: bool = False,
) -> Gradients:
    """d_out (T, d), h (R, G n), act_a (R, r) -> those needed of dh (R, G n), d_scores, d_down_a (E, r, n), d_down_b (E, d, r)."""
    backend, options, rows = _read(d_out, down_proj.shape, tail)
    d_out, dtype = d_out.contiguous(), h.dtype  # out.sum() delivers a gradient of stride 0
    low = None
    if down_a is not None and down_b is not None:
        of_rows = backend.low_rank_rows(d_out, cast(down_b, dtype), rows, gather=True, transposed=True)
        low = (of_rows, cast(down_a, dtype))
    saved = (h, scores, cast(down_proj, dtype), down_bias, rows, options.activation, low)
    dh, d_scores, a_scaled = backend.down_backward_frozen(d_out, *saved, overwrite_h=overwrite_h)
    del h, saved
    d_down_a = d_down_b = None
    if needs[2] and low is not None and down_a is not None:
        d_down_a = backend.factor_gradient(a_scaled, low[0], rows, gather=False, transposed=True, dtype=down_a.dtype)
    if needs[3] and down_b is not None:
        pairs = tail[0].clamp_min(0)  # rows past the last get a score that exists
        scaled = (act_a * scores.reshape(-1, 1).index_select(0, pairs)).to(dtype)
        d_down_b = backend.factor_gradient(d_out, scaled, rows, gather=True, transposed=False, dtype=down_b.dtype)
    return _needed((dh, d_scores, d_down_a, d_down_b), needs)


def _up_fake(
    needs: Sequence[bool],
    dh: Tensor,
    x: Tensor,
    xa: Tensor,
    up_proj: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    *tail: Any,
) -> Gradients:
    return _needed([torch.empty_like(t) if t is not None else None for t in (x, up_a, up_b)], needs)


@define(
    "moe_lora_up_backward(bool[] needs, Tensor dh, Tensor x, Tensor xa, Tensor up_proj, Tensor? up_a, Tensor? up_b, "
    f"{INDEX}) -> Tensor[]",
    _up_fake,
)
def up_backward(
    needs: Sequence[bool],
    dh: Tensor,
    x: Tensor,
    xa: Tensor,
    up_proj: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    *tail: Any,
) -> Gradients:
    """dh (R, G n), xa (R, r) -> those needed of dx (T, d), d_up_a (E, r, d), d_up_b (E, G n, r)."""
    (num_experts, up_width, d_model), options = up_proj.shape, Options.decode(tail[-1])
    d_expert = up_width // activation_named(options.activation).halves
    backend, _, rows = _read(x, (num_experts, d_model, d_expert), tail)
    low = dx = d_up_a = d_up_b = None
    if up_a is not None and up_b is not None and (needs[0] or needs[1]):
        low = (
            backend.low_rank_rows(dh, cast(up_b, x.dtype), rows, gather=False, transposed=True),
            cast(up_a, x.dtype),
        )
    if needs[0]:
        dx = backend.up_backward_frozen(dh, x, cast(up_proj, x.dtype), rows, low)
    if needs[1] and low is not None and up_a is not None:
        d_up_a = backend.factor_gradient(x, low[0], rows, gather=True, transposed=True, dtype=up_a.dtype)
    if needs[2] and up_b is not None:
        d_up_b = backend.factor_gradient(dh, xa, rows, gather=False, transposed=False, dtype=up_b.dtype)
    return dx, d_up_a, d_up_b


# ---- the function ------------------------------------------------------------------------------------------------


def _padded(factors: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors with zeros up to a rank that is a multiple of 16 bytes of bf16, which kernels read at once."""
    if factors is None:
        return None, None
    a, b = factors
    if missing := -a.shape[1] % CHUNK:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return a.contiguous(), b.contiguous()


def moe_mlp_lora(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None = None,
    *,
    num_experts: int,
    up: LowRank | None,
    down: LowRank | None,
    activation: str = "swiglu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    backend: str = "auto",
    dispatch: Dispatch | None = None,
) -> Tensor:
    """`moe_mlp` of frozen experts with trained low-rank factors: an expert's weight is W + b a. MoEBlaze §2.1; Hu et al., LoRA,
    arXiv 2106.09685, section 4.1.

    Neither W + b a nor a gradient of a weight's size is made. 2d + 4nK + 4rK + 12K bytes a token are kept for backward, in bf16
    with a gate.

    Args:
        x: (T, d) tokens; bfloat16, float16, float32 or float64. Under autocast it is cast.
        gate_up_proj: (E, 2n, d), gate rows then up rows, or (E, n, d) for an ungated activation; of x's dtype, or float32, or
            under autocast of any; frozen, as are the other weight and the biases.
        down_proj: (E, d, n), of a dtype as gate_up_proj.
        scores: (T, K) or (P,) when experts per token vary; the router's, differentiable, cast to float32, or float64 with x.
        topk_experts: (T, K) expert ids, int32 or int64, distinct in a row; an id outside [0, E) means "not here", as in
            `moe_mlp`. Not needed with ``dispatch``.
        num_experts: E.
        up: factors (E, r, d) and (E, 2n, r), ungated (E, n, r); None: none. r is any; it is padded to a multiple of 8.
        down: factors (E, r, n) and (E, d, r), of another r if need be; None: none.
            A factor is of a dtype as gate_up_proj. Its gradient has its dtype, and of a float32 factor it is the float32 sum of
            the products, never rounded to x's.
        activation: a name of `blazeproto.activations`: gated ("swiglu", ...) or without a gate ("relu", ...).
        up_bias: (E, 2n) or (E, n), of a dtype as gate_up_proj.
        down_bias: (E, d), of a dtype as gate_up_proj.
        backend: "hopper" (bf16 on compute capability 9.0), "torch" (any device) or "auto", which picks.
        dispatch: index arrays built before, instead of ``topk_experts``.

    Returns:
        (T, d) in the dtype of ``x`` (of autocast, under it).

    Raises:
        TypeError, ValueError: an argument does not fit, or a frozen one requires a gradient; it is named, with what was expected
            and what came, and nothing has been launched. Backend "hopper" where it cannot run says what is missing.
        RuntimeError: on a double backward.
    """
    refuse_transforms("moe_mlp_lora", (x, scores, *(up or ()), *(down or ())))
    check_arguments(
        x,
        gate_up_proj,
        down_proj,
        scores,
        topk_experts,
        num_experts=num_experts,
        activation=activation,
        up_bias=up_bias,
        down_bias=down_bias,
        save="minimal",
        backend=backend,
        combine="gather",
        row_capacity=None,
        workspace_bytes=None,
        dispatch=dispatch,
        pair_tokens=None,
        token_offsets=None,
    )
    check_frozen(gate_up_proj=gate_up_proj, down_proj=down_proj, up_bias=up_bias, down_bias=down_bias)
    for name, factors, weight in (("up", up, gate_up_proj), ("down", down, down_proj)):
        if factors is not None:
            if not isinstance(factors, LowRank):
                raise TypeError(f"{name}: expected a LowRank or None, got {type(factors).__name__}")
            check_factors(name, *factors, x, weight.shape)
    device_type, wide = x.device.type, x.dtype == torch.float64
    if not wide:  # which autocast leaves alone everywhere
        x = cast(x, autocast_dtype(device_type) or x.dtype)
    save = "minimal" if torch.is_grad_enabled() else "recompute"  # nothing will ask for H
    options = Options(activation, save, "gather", backend).encode()
    with without_autocast(device_type):
        x, up_proj, down_proj = x.contiguous(), dense(gate_up_proj), dense(down_proj)
        scores = cast(scores, torch.float64 if wide else torch.float32).contiguous()
        parameters = (x, up_proj, up_bias, *_padded(up), down_proj, down_bias, *_padded(down), scores)
        quiet = nobody_listens((*parameters, topk_experts)) and not on_another_gpu(x)
        top_k, pair_tokens, token_offsets = 0, None, None
        if dispatch is None:
            assert topk_experts is not None
            top_k = topk_experts.shape[1]
            index = node.dispatch.way(quiet, ())(topk_experts, num_experts, WHOLE, backend, None)
        else:
            top_k, index = dispatch.top_k or 0, tuple(t.contiguous() for t in list(dispatch.arrays.values())[:3])
            if not top_k:
                pair_tokens, token_offsets = dispatch.pair_tokens.contiguous(), dispatch.token_offsets.contiguous()
        tail = (*index, top_k, pair_tokens, token_offsets, WHOLE, options)
        return experts.way(quiet, parameters)(*parameters, *tail)[0]
