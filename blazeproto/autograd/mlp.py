"""``moe_mlp``: the expert MLP as a function of tensors, with a backward.

One autograd node, one operator forward and two backward (double boxes). What the node saves is listed between them.

    x, W_up, W_down, S ──> [ moe_experts: up ── act ──> down, combine ] ──> out
                                           │
    saved:      X, S, indices              H               (save="minimal")

    dX, dW_up <── [[ moe_up_backward ]] <── dH ── [[ moe_down_backward ]] <── dO
                                             dS, dW_down <──┘

``moe_down_backward`` makes act again from H, so act need not be saved. On the Hopper backend it writes dH over H where that
cannot be noticed: where H was made again (save="recompute"), and where only the autograd node holds the saved H. If the
graph is kept for another backward, if hooks are given what is saved, or if a compiler, a profiler or a mode has seen H, dH is
a new array and H stays as it was. H is freed before ``moe_up_backward``, unless the graph is kept. In chunks of tokens
(``workspace_bytes``) one operator does both backward steps of each chunk in turn.
"""

import torch
from torch import Tensor

from blazeproto.autograd import node
from blazeproto.autograd.checks import check_arguments
from blazeproto.autograd.chunks import WHOLE, chunk_tokens_for
from blazeproto.autograd.operators import autocast_dtype, cast, dense, on_another_gpu, without_autocast
from blazeproto.autograd.policy import Options, SavePolicy
from blazeproto.autograd.private import nobody_listens
from blazeproto.dispatch.structures import Dispatch


def moe_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None = None,
    *,
    num_experts: int,
    activation: str = "swiglu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    save: SavePolicy | str = SavePolicy.MINIMAL,
    backend: str = "auto",
    combine: str = "gather",
    row_capacity: int | None = None,
    workspace_bytes: int | None = None,
    dispatch: Dispatch | None = None,
    pair_tokens: Tensor | None = None,
    token_offsets: Tensor | None = None,
) -> Tensor:
    """Route each token through its experts: out_t = sum_k S_tk MLP_e(t,k)(x_t). MoEBlaze §2.1, §3 and Algorithm 1.

    Args:
        x: (T, d) tokens; bfloat16, float16, float32 or float64. Under autocast it is cast.
        gate_up_proj: (E, 2n, d), gate rows then up rows (Hugging Face's layout), or in turn (`activations.alternating`), or
            (E, n, d) for an ungated activation; of x's dtype, or float32, or under autocast of any; cast where it is used. A
            gradient has its weight's dtype, and of a float32 weight it is the float32 sum of the products, never rounded to x's.
            A transposed view of (E, d, 2n), as gpt-oss has it, is read where it lies, and its gradient lies likewise.
        down_proj: (E, d, n), or a transposed view of (E, n, d); of a dtype as gate_up_proj.
        scores: (T, K) or (P,) when experts per token vary; the router's, differentiable, cast to float32, or float64 with x.
        topk_experts: (T, K) expert ids, int32 or int64, distinct in a row; (P,) when experts per token vary. An id
            outside [0, E) means "not here": the pair adds nothing and its gradients are zero. So K may exceed E, as on a
            rank with two of 64 experts. Not needed with ``dispatch``.
        num_experts: E.
        activation: a name of `blazeproto.activations`: gated ("swiglu", ...) or without a gate ("relu", ...).
        up_bias: (E, 2n) or (E, n), of a dtype as gate_up_proj.
        down_bias: (E, d), of a dtype as gate_up_proj.
        save: what is kept for backward, see `SavePolicy`. On the Hopper backend a backward that doesn't keep the graph may
            overwrite it: of a forward and a backward captured as two CUDA graphs, replay the second once after the first, and
            don't look at what ``grad_fn`` holds.
        backend: "hopper" (bf16 on compute capability 9.0), "torch" (any device) or "auto", which picks.
        combine: "gather" is deterministic; "fused" sums experts inside the down product (no (T K, d) buffer) in an
            order that varies from run to run. The torch backend treats both as "gather".
        row_capacity: R, the most rows that are computed, so that H has min(R, T K) of them; default: a row for every pair. Where
            more pairs have an expert, the rows from R on, the last in expert order, are left out as if they were not here.
            Chunks leave out the same pairs, but each has places for all of its own: there R bounds no memory.
        workspace_bytes: bound on the bytes of transient buffers, as the Hopper backend has them; the torch backend, which gathers
            rows and keeps dH beside H, needs more. The layer then runs in chunks of tokens, with a
            dispatch each and float32 accumulators for the weight gradients. Needs a fixed K. On the Hopper backend a
            weight gradient may take a fifth of itself and of a chunk's dH or A' beside the bound.
        dispatch: index arrays built before, instead of ``topk_experts``.
        pair_tokens, token_offsets: (P,) and (T+1,) int32, for a varying number of experts per token: pair p is of
            token pair_tokens[p], and the pairs of token t are [token_offsets[t], token_offsets[t+1]). Their values are trusted,
            for a look at them would wait for the device; `dispatch.build_dispatch_varying(validate=True)` takes that look.

    Returns:
        (T, d) in the dtype of ``x`` (of autocast, under it).

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched. Backend "hopper" where it cannot run says what is missing.
        RuntimeError: on a double backward.
    """
    save = save.value if isinstance(save, SavePolicy) else save  # SavePolicy(save) would be traced by torch.compile
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
        save=save,
        backend=backend,
        combine=combine,
        row_capacity=row_capacity,
        workspace_bytes=workspace_bytes,
        dispatch=dispatch,
        pair_tokens=pair_tokens,
        token_offsets=token_offsets,
    )
    device_type, wide = x.device.type, x.dtype == torch.float64
    if not wide:  # which autocast leaves alone everywhere
        x = cast(x, autocast_dtype(device_type) or x.dtype)
    if not torch.is_grad_enabled():
        save = "recompute"  # nothing will ask for H
    options = Options(activation, save, combine, backend).encode()
    with without_autocast(device_type):
        x, up_proj, down_proj = x.contiguous(), dense(gate_up_proj), dense(down_proj)
        scores = cast(scores, torch.float64 if wide else torch.float32).contiguous()
        parameters = (x, up_proj, up_bias, down_proj, down_bias, scores)
        quiet = nobody_listens((*parameters, topk_experts, pair_tokens, token_offsets)) and not on_another_gpu(x)
        chunk_tokens, top_k = WHOLE, 0 if dispatch is None else dispatch.top_k or 0
        if dispatch is None:
            assert topk_experts is not None
            if pair_tokens is None:
                top_k, (num_tokens, d_model) = topk_experts.shape[1], x.shape
                widths = (d_model, down_proj.shape[2], activation, x.dtype.itemsize)
                chunk_tokens = chunk_tokens_for(workspace_bytes, num_tokens, top_k, *widths, row_capacity)
            index = node.dispatch.way(quiet, ())(topk_experts, num_experts, chunk_tokens, backend, row_capacity)
        else:
            pair_tokens, token_offsets = dispatch.pair_tokens, dispatch.token_offsets
            index = tuple(t.contiguous() for t in list(dispatch.arrays.values())[:3])
        if pair_tokens is not None and token_offsets is not None:
            pair_tokens, token_offsets = pair_tokens.contiguous(), token_offsets.contiguous()
        tail = (*index, top_k, pair_tokens, token_offsets, chunk_tokens, options)
        return node.experts.way(quiet, parameters)(*parameters, *tail)[0]
