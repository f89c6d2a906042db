"""``moe_mlp``: the expert MLP as a function of tensors, with a backward; `dispatched_mlp`: the same, experts on several ranks;
`grouped_experts`: experts on rows that have arrived, with their counts, for programs that move tokens themselves.

One autograd node. Forward is one operator. The steps of backward (double boxes) are calls of another, where a compiler, a
profiler or a mode sees them. The list between them names the saved tensors.

    x, W_up, W_down, S ──> [ moe_experts: up ── act ──> down, combine ] ──> out
                                           │
    saved:      X, S, indices              H               (save="minimal")

    dX, dW_up <── [[ dX ]], [[ dW_up ]] <── dH ── [[ dH, A', dS ]] <── dO
                                dW_down <── [[ dW_down ]] <── A' ──┘

The step that makes dH makes act again from H, so act need not be saved. On the Hopper backend it writes dH over H where that
cannot be noticed: where H was made again (save="recompute"), and where only the autograd node holds the saved H. If the
graph is kept for another backward, if hooks are given what is saved, or if a compiler, a profiler or a mode has seen H, dH is
a new array and H stays as it was. H is freed before the other steps, unless the graph is kept. In chunks of tokens
(``workspace_bytes``) one call makes all steps of each chunk in turn.

With low-rank factors (LoRA) an expert's weight is W + B A. Neither that sum nor a gradient of its size is ever made: the factors'
products have r columns, read the tokens' rows where the weights' products read them, and are added before a bias and the
activation.

    XA  = X A_up^T        H = X W_up^T + XA B_up^T        act A_down^T        Y = act W_down^T + (act A_down^T) B_down^T

    saved:      X, S, indices, H, XA, act A_down^T        (save="minimal")

    dOB = dO B_down     dH, dS, S act <── dO W_down + dOB A_down     dA_down = dOB^T (S act)     dB_down = dO^T (S act A_down^T)
    dHB = dH B_up       dX            <── dH W_up   + dHB A_up       dA_up   = dHB^T X           dB_up   = dH^T XA

To the operators a row that has arrived is a token with one expert and a score of 1: the dispatch has K = 1, its lists count up,
and it is made of the counts without waiting for the device. Padding belongs to no expert.

    x (R, d)    | rows of expert 0 | rows of expert 1 | ... | padding |      counts (E,), on the device, say where each ends
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd import chunks, node
from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.call import Beside, ExpertsCall, How, Parameters, pack, taken_apart
from blazeproto.autograd.checks import check_choice, check_counts, check_dense, check_dtype, check_experts
from blazeproto.autograd.chunks import WHOLE, chunk_tokens_for
from blazeproto.autograd.kept import KeptWeights, QuantizedWeights, made_of, records_of
from blazeproto.autograd.low_rank import LowRank, padded, rank_of, tensors_of
from blazeproto.autograd.operators import (
    as_experts_see,
    autocast_dtype,
    dense,
    on_another_gpu,
    without_autocast,
)
from blazeproto.autograd.options import DEFAULTS, Options, merged, takes_options
from blazeproto.autograd.private import refuse_transforms, unobserved
from blazeproto.autograd.ranks import ALONE, Dispatcher, PeersNamed, check_dispatcher, local
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.recipe import Recipe
from blazeproto.runtime.checks import instance, integer, require
from blazeproto.stored.weight import StoredWeight


@takes_options()
def moe_mlp(
    x: Tensor,
    gate_up_proj: Tensor | StoredWeight,
    down_proj: Tensor | StoredWeight,
    scores: Tensor,
    topk_experts: Tensor | None = None,
    *,
    num_experts: int,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_factors: LowRank | None = None,
    down_factors: LowRank | None = None,
    dispatch: Dispatch | None = None,
    pair_tokens: Tensor | None = None,
    token_offsets: Tensor | None = None,
    peers: PeersNamed | None = None,
    quantized: QuantizedWeights | KeptWeights | None = None,
    options: Options | None = None,
    **keywords: Any,
) -> Tensor:
    """Route each token through its experts: out_t = sum_k S_tk MLP_e(t,k)(x_t). MoEBlaze §2.1, §3 and Algorithm 1.

    No gradient is computed for a tensor that does not require one.

    Args:
        x: (T, d) tokens; bfloat16, float16, float32 or float64. Under autocast it is cast, unless it is float64.
        gate_up_proj: (E, 2n, d), gate rows then up rows (Hugging Face's layout), or alternating (`activations.alternating`), or
            (E, n, d) for an ungated activation; of x's dtype, or float32, or under autocast of any; cast where it is used. A
            gradient has its weight's dtype, and of a float32 weight it is the float32 sum of the products, never rounded to x's.
            A transposed view of (E, d, 2n), as gpt-oss has it, is read where it lies, and its gradient lies likewise.
            A frozen `blazeproto.stored.StoredWeight` is decoded in forward and again in backward: by kernels, beside or within
            the products, or by torch expert by expert. x is then bfloat16, or for torch float32 or float64 too.
        down_proj: (E, d, n), or a transposed view of (E, n, d); of any dtype that gate_up_proj may have; or a `StoredWeight`.
        scores: (T, K) or (P,) when experts per token vary; the router's, differentiable, cast to float32, or float64 with x.
        topk_experts: (T, K) expert ids, int32 or int64, distinct in a row, which ``validate`` checks; (P,) when experts per token
            vary. An id outside [0, E) means "not here": the pair adds nothing and its gradients are zero. So K may exceed E,
            as on a rank with two of 64 experts. Not needed with ``dispatch``.
        num_experts: E.
        up_bias: (E, 2n) or (E, n), of any dtype that gate_up_proj may have.
        down_bias: (E, d), of any dtype that gate_up_proj may have.
        up_factors: a (E, r, d) and b (E, 2n, r), ungated (E, n, r), a `LowRank`: an expert's weight is then W + b a, which is
            not made. r is any; it is padded to a multiple of 8. The weight beside them may be frozen or trained. A factor is
            of any dtype that gate_up_proj may have. Its gradient has its dtype, and of a float32 factor it is the float32 sum of
            the products, never rounded to x's. Hu et al., LoRA, arXiv 2106.09685, section 4.1.
        down_factors: a (E, r, n) and b (E, d, r), of another r if need be; else as up_factors. Needs combine="gather".
        dispatch: index arrays built before, instead of ``topk_experts``.
        pair_tokens, token_offsets: (P,) and (T+1,) int32, for a varying number of experts per token: pair p is of
            token pair_tokens[p], and the pairs of token t are [token_offsets[t], token_offsets[t+1]). Their values are trusted,
            for a look at them would wait for the device; `dispatch.build_dispatch_varying(validate=True)` takes that look.
        peers: what a dispatcher says whose exchange moves rows inside the operators (`Arrived.peers`): x is then of this rank's
            tokens, and scores and choice are of the pairs that arrived. x and the weights are not checked again.
        quantized: with precision="fp8" or "fp8_rollout", what `quantize_weights` made of gate_up_proj and down_proj as they are
            now; or a `KeptWeights` (a layer's ``kept``), which makes and keeps them. Default: each forward quantizes the weights,
            as ``keep_transposed`` says.
        options: an `Options`, in place of the keywords below; a keyword that is given too replaces its field.
        keywords: the fields of `Options`.

    Returns:
        (T, d) in the dtype of ``x`` (of autocast, under it, unless x is float64).

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched. Backend "hopper" where it cannot run says what is missing.
        RuntimeError: on a double backward.
    """
    options = merged("moe_mlp", options, keywords)
    instance("peers", peers, PeersNamed, optional=True)
    if peers is not None and peers.exchange:
        options = replace(options, backend=peers.backend)
    kept: tuple[Tensor | None, Tensor | None] = (None, None)
    if not torch.compiler.is_compiling():
        integer("num_experts", num_experts, least=1)
    weights = (down_proj, up_bias, down_bias, up_factors, down_factors)
    if peers is None:
        factors = tensors_of(up_factors, down_factors)
        refuse_transforms("moe_mlp", (x, gate_up_proj, down_proj, up_bias, down_bias, scores, *factors))
        check_experts(x, (gate_up_proj,), *weights, num_experts=num_experts, options=options)
    choice = (topk_experts, dispatch, pair_tokens, token_offsets)
    places = None if peers is None else peers.places
    check_choice(x, scores, *choice, num_experts=num_experts, options=options, num_tokens=places)
    x, scores = as_experts_see(x, scores)
    if isinstance(quantized, KeptWeights):
        keeper, quantized = quantized, None
        if options.precision != "bf16" and not torch.compiler.is_compiling():
            on = backend_on(options.backend, x.device, x.dtype, *down_proj.shape, needs=options.needs)
            quantized = keeper.of_weights((gate_up_proj, down_proj), x.dtype, on, str(options.precision))
    if quantized is not None:
        kept = records_of(quantized, x.dtype, (gate_up_proj, down_proj), options.precision)
        options = replace(options, keep_transposed=False)  # there they are
    with without_autocast(x.device.type):
        scores = scores.contiguous()
        parameters = operator_tensors(x, (gate_up_proj,), *weights, scores)
        direct = unobserved((*parameters, topk_experts, pair_tokens, token_offsets)) and not on_another_gpu(x)
        chunk_tokens = WHOLE
        if dispatch is None:
            assert topk_experts is not None
            top_k = None
            if pair_tokens is None:
                top_k = topk_experts.shape[1]
                widths = (x.shape[1], down_proj.shape[2], options.activation, x.dtype.itemsize, options.row_capacity)
                of_one = (top_k, *widths, rank_of(up_factors), rank_of(down_factors))
                chunk_tokens = chunk_tokens_for(options.workspace_bytes, x.shape[0], *of_one, combine=options.combine)
            build = chunks.dispatch.entry((), unobserved=direct)
            pairs, offsets, index_map = build(
                topk_experts, num_experts, chunk_tokens, options.backend, options.row_capacity
            )
            if pair_tokens is not None and token_offsets is not None:
                pair_tokens, token_offsets = pair_tokens.contiguous(), token_offsets.contiguous()
            sizes = num_experts, top_k, places or x.shape[0]
            offsets = offsets.view(-1) if chunk_tokens == WHOLE else offsets
            dispatch = Dispatch(pairs, offsets, index_map, None, *sizes, token_offsets, pair_tokens)
        elif not all(t is None or t.is_contiguous() for t in dispatch.arrays.values()):
            arrays: dict[str, Any] = {name: t if t is None else t.contiguous() for name, t in dispatch.arrays.items()}
            dispatch = replace(dispatch, **arrays)
        ranks, exchange, *lists = peers or ALONE
        scales, stored = taken_apart(gate_up_proj, down_proj)
        how = how_of(options, parameters, dispatch.top_k or 0, chunk_tokens, exchange, *stored)
        call = ExpertsCall(parameters, Beside(*kept, ranks, *lists, *scales), dispatch, how)
        return node.experts.entry(parameters, unobserved=direct)(*pack(call))[0]


@takes_options("row_capacity", "workspace_bytes", "validate")
def grouped_experts(
    x: Tensor,
    gate_up_proj: Tensor | StoredWeight | tuple[Tensor, Tensor],
    down_proj: Tensor | StoredWeight,
    counts: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_factors: LowRank | None = None,
    down_factors: LowRank | None = None,
    options: Options | None = None,
    **keywords: Any,
) -> Tensor:
    """out_r = MLP_e(x_r), e being the expert of row r. MoEBlaze §2.1, without its sum over experts.

    On a GPU the host waits for nothing. Autocast changes nothing.

    Args:
        x: (R, d) rows by expert, bfloat16, float16, float32 or float64. Rows beyond the counts are padding: whatever is in them,
            their output and their gradient are zero.
        gate_up_proj: (E, 2n, d) or (E, n, d), of x's dtype or, unless that is float64, float32, in the layouts of `moe_mlp`;
            or a `StoredWeight`; or a pair (gate, up), (E, n, d) each, of one dtype. A pair is joined for forward and again for
            backward, and what is saved between the two is the pair itself, so that a layer which FSDP has sharded again keeps no
            copy.
        down_proj: (E, d, n), of any dtype that gate_up_proj may have.
        counts: (E,) rows of each expert, int32 or int64, on x's device. Their values are trusted not to be negative; of more
            than R rows those past R are left out.
        up_bias: (E, 2n) or (E, n), of any dtype that gate_up_proj may have.
        down_bias: (E, d), of any dtype that gate_up_proj may have.
        up_factors, down_factors: as in `moe_mlp`.
        options: an `Options`, in place of the keywords below; a keyword that is given too replaces its field.
        keywords: the fields of `Options`.

    Returns:
        (R, d) in the dtype of ``x``.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched.
        RuntimeError: on a double backward.
    """
    options = merged("grouped_experts", options, keywords)
    for name in ("row_capacity", "workspace_bytes", "validate"):
        expected, got = getattr(DEFAULTS, name), getattr(options, name)
        if got != expected:
            raise ValueError(f"{name}: expected {expected} for rows that have arrived, got {got}")
    up = gate_up_proj if isinstance(gate_up_proj, tuple) else (gate_up_proj,)
    weights = (down_proj, up_bias, down_bias, up_factors, down_factors)
    factors = tensors_of(up_factors, down_factors)
    refuse_transforms("grouped_experts", (x, *up, down_proj, up_bias, down_bias, *factors))
    if not isinstance(down_proj, StoredWeight):
        check_dense("down_proj", down_proj)
    num_experts = len(down_proj) if down_proj.dim() else 0
    with without_autocast(x.device.type if isinstance(x, Tensor) else "cpu"):
        check_experts(x, up, *weights, num_experts=num_experts, options=options, rows="R")
        check_counts(x, counts, num_experts)
        # A dispatcher with a fixed capacity drops rows that don't fit, and still counts them.
        ends = counts.cumsum(0, dtype=torch.int64).clamp_max(x.shape[0]).to(torch.int32)
        places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        places = places.masked_fill(places >= ends[-1], -1)
        scores = x.new_ones(x.shape[0], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        parameters = operator_tensors(x, up, *weights, scores)
        dispatch = Dispatch(places, F.pad(ends, (1, 0)), places, None, num_experts, 1, x.shape[0])
        scales, stored = taken_apart(up[0], down_proj)
        how = how_of(options, parameters, 1, WHOLE, "", *stored)
        call = ExpertsCall(parameters, Beside(*(None,) * 5, *scales), dispatch, how)
        alone = unobserved((*parameters, counts)) and not on_another_gpu(x)
        return node.experts.entry(parameters, unobserved=alone)(*pack(call))[0]


def operator_tensors(
    x: Tensor,
    up: tuple[Tensor | StoredWeight, ...],
    down_proj: Tensor | StoredWeight,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_factors: LowRank | None,
    down_factors: LowRank | None,
    scores: Tensor,
) -> Parameters:
    """As the operators take them. up: gate_up_proj, or gate and up."""
    of_up = (dense(up[0]), up_bias, *padded(up_factors))
    of_down = (dense(down_proj), down_bias, *padded(down_factors))
    return Parameters(x.contiguous(), *of_up, *of_down, scores, dense(up[1]) if len(up) == 2 else None)


def how_of(options: Options, p: Parameters, top_k: int, chunk_tokens: int, exchange: str, *stored: str) -> How:
    """With the save policy that a call with these tensors has."""
    rest: Any = (top_k, chunk_tokens, exchange, *stored)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in p)):
        return How(options, "recompute", False, *rest)  # nothing will ask for H
    trains_down = p.down_proj.requires_grad or (p.down_a is not None and p.down_a.requires_grad)
    # Without dX nothing reads W_up's transpose.
    keep_transposed = options.keep_transposed and p.x.requires_grad and not any(stored)
    return How(options, options.policy(trains_down=trains_down), keep_transposed, *rest)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatched_mlp(
    dispatcher: Dispatcher,
    x: Tensor,
    up_proj: Tensor | StoredWeight,
    down_proj: Tensor | StoredWeight,
    scores: Tensor,
    topk_experts: Tensor,
    *,
    num_experts: int,
    options: Options,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    pair_tokens: Tensor | None = None,
    token_offsets: Tensor | None = None,
    up_factors: LowRank | None = None,
    down_factors: LowRank | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`moe_mlp` with ``num_experts`` experts of all ranks, of which the weights have this rank's: DTensors, or plain local ones.

    up_factors, down_factors: of this rank's experts, plain tensors.

    Returns out (T, d), and the pairs that a ``row_capacity`` left out on all ranks, (1,) int32; None without one.

    Raises what `moe_mlp` raises, and what `check_dispatcher` does, before a token leaves.
    """
    mesh = getattr(down_proj, "device_mesh", None)
    up_proj, down_proj, up_bias, down_bias = map(local, (up_proj, down_proj, up_bias, down_bias))
    factors = tensors_of(up_factors, down_factors)
    refuse_transforms("moe_mlp", (x, up_proj, down_proj, up_bias, down_bias, scores, *factors))
    weights = (down_proj, up_bias, down_bias, up_factors, down_factors)
    check_experts(x, (up_proj,), *weights, num_experts=len(down_proj), options=options)
    check_dispatcher(dispatcher, options, num_experts, len(down_proj), x.shape[1], mesh)
    choice = (topk_experts, None, pair_tokens, token_offsets)
    check_choice(x, scores, *choice, num_experts=num_experts, options=options)
    x, scores = as_experts_see(x, scores)
    if options.validate:  # of the ids that arrive, some are other ranks'
        options = replace(options, validate=False)
    arrived = dispatcher.dispatch(x, scores, topk_experts, pair_tokens, token_offsets)
    sent, got = ((t.shape[1], t.dtype, t.device) for t in (x, arrived.x))
    if sent != got:
        raise ValueError(f"dispatcher: expected rows of x's d, dtype and device, {sent}, got {got}")
    partial = moe_mlp(
        arrived.x,
        up_proj,
        down_proj,
        arrived.scores,
        arrived.topk_experts,
        num_experts=len(down_proj),
        up_bias=up_bias,
        down_bias=down_bias,
        up_factors=up_factors,
        down_factors=down_factors,
        pair_tokens=arrived.pair_tokens,
        token_offsets=arrived.token_offsets,
        peers=arrived.peers or ALONE,
        options=options,
    )
    overflow = None if options.row_capacity is None else dispatcher.overflow(arrived, options.row_capacity)
    return dispatcher.combine(partial, arrived), overflow


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def quantize_weights(
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    precision: str | Recipe = "fp8",
) -> QuantizedWeights:
    """Both weights in fp8, in both orders, in one pass: the bits that every forward and backward makes without.

    gate_up_proj: (E, 2n, d), of any dtype that `moe_mlp` takes, contiguous.  down_proj: (E, d, n), of the same dtype.
    dtype: of x as the experts see it; default: autocast's where it is enabled, else the weights'.  backend: as in `moe_mlp`.
    precision: "fp8" or "fp8_rollout".

    To be called again when a weight has changed. TypeError or ValueError for weights that the precision does not take; for a
    DTensor too: what FSDP gathers for one forward is gone after it, so that there each forward quantizes weights.
    """
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        check_dense(name, weight)
        check_dtype(weight.dtype, f"{name}.dtype")
    if down_proj.dim() != 3 or not len(down_proj):
        raise ValueError(f"down_proj: expected shape (E, d, n) with E >= 1, got {tuple(down_proj.shape)}")
    if gate_up_proj.dtype != down_proj.dtype:
        raise ValueError(f"down_proj: expected dtype {gate_up_proj.dtype} as gate_up_proj has, got {down_proj.dtype}")
    check_dtype(dtype)
    with torch.inference_mode(False):  # or no backward could save what is made
        dtype = dtype or autocast_dtype(down_proj.device.type) or down_proj.dtype
        x = torch.empty(0, down_proj.shape[1], dtype=dtype, device=down_proj.device)
        options = Options(backend=backend, precision=precision)
        require(options.precision != "bf16", "precision", "'fp8' or 'fp8_rollout'", repr(precision))
        check_experts(x, (gate_up_proj,), down_proj, *[None] * 4, num_experts=len(down_proj), options=options)
        made = backend_on(backend, x.device, dtype, *down_proj.shape, needs=options.needs)
        return made_of(gate_up_proj, down_proj, dtype, made, str(options.precision))
