"""``moe_mlp``: the expert MLP as a function of tensors, with a backward.

One autograd node, one operator forward and two backward (double boxes). What the node saves is listed between them.

    x, W_up, W_down, S ──> [ moe_experts: up ── act ──> down, combine ] ──> out
                                           │
    saved:      X, S, indices              H               (save="minimal")

    dX, dW_up <── [[ moe_up_backward ]] <── dH ── [[ moe_down_backward ]] <── dO
                                             dS, dW_down <──┘

``moe_down_backward`` makes act again from H, so act need not be saved, and on the Hopper backend it writes dH over H:
over an H that it has made again (save="recompute") always, over one that was saved only where nobody would miss it.
That is not so where the graph is kept for another backward, where hooks get what is saved, or where a compiler, a
profiler or a mode has seen H; then dH is a new array, and nothing that is saved is written over. H is let go of
before ``moe_up_backward``, unless the graph is kept. ``hopper_products`` tells how Y and dX~ are kept small.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blazeproto.autograd import experts  # noqa: F401 (it defines the operators)
from blazeproto.autograd.checks import check_arguments
from blazeproto.autograd.chunked import chunk_length, transient_bytes_per_token
from blazeproto.autograd.library import caller, cast
from blazeproto.autograd.policy import Options, SavePolicy


class DispatchLike(Protocol):
    """``blazeproto.dispatch.Dispatch`` whose arrays are torch tensors."""

    expert_pair_indices: Tensor
    expert_token_offsets: Tensor
    token_index_map: Tensor
    top_k: int | None
    pair_tokens: Tensor | None
    token_offsets: Tensor | None


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
    workspace_bytes: int | None = None,
    dispatch: DispatchLike | None = None,
    pair_tokens: Tensor | None = None,
    token_offsets: Tensor | None = None,
    weight_grad_dtype: torch.dtype | None = None,
) -> Tensor:
    """Route each token through its experts: out_t = sum_k S_tk MLP_e(t,k)(x_t). MoEBlaze Algorithm 1.

    Args:
        x: (T, d) tokens; bfloat16, float16, float32 or float64. Under autocast it is cast, and weights are cast on use.
        gate_up_proj: (E, 2n, d), gate rows then up rows (Hugging Face's layout); (E, n, d) for an ungated activation.
        down_proj: (E, d, n).
        scores: (T, K) router scores, differentiable; (P,) when experts per token vary.
        topk_experts: (T, K) expert ids, int32 or int64, distinct in a row; (P,) when experts per token vary. An id
            outside [0, E) means "not here": the pair adds nothing and its gradients are zero. Not needed with
            ``dispatch``.
        num_experts: E.
        activation: "swiglu", "geglu"; without a gate "relu", "silu", "gelu".
        up_bias, down_bias: (E, 2n) or (E, n), and (E, d).
        save: what is kept for backward, see :class:`SavePolicy`. On the Hopper backend a backward that doesn't keep the graph may
            overwrite it: of a forward and a backward captured as two CUDA graphs, replay the second once after the first, and
            don't look at what ``grad_fn`` holds.
        backend: "hopper" (bf16 on compute capability 9.0), "torch" (any device) or "auto", which picks.
        combine: "gather" is deterministic; "fused" sums experts inside the down product (no (T K, d) buffer) in an
            order that varies from run to run. The torch backend treats both as "gather".
        workspace_bytes: bound on the bytes of transient buffers, as the Hopper backend has them; the torch backend, which gathers
            rows and keeps dH beside H, needs more. The layer then runs in chunks of tokens, with a
            dispatch each and float32 accumulators for the weight gradients. Needs a fixed K. On the Hopper backend a
            weight gradient may take a fifth of itself and of a chunk's dH or A' beside the bound.
        dispatch: index arrays built before, instead of ``topk_experts``.
        pair_tokens, token_offsets: (P,) and (T+1,) int32, for a varying number of experts per token: pair p is of
            token pair_tokens[p], and the pairs of token t are [token_offsets[t], token_offsets[t+1]).
        weight_grad_dtype: torch.float32 to get float32 gradients of bf16 weights. Set ``weight.grad_dtype`` to match,
            or autograd casts them back.

    Returns:
        (T, d) in the dtype of ``x`` (of autocast, under it).

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched. Backend "hopper" where it cannot run says what is missing.
        RuntimeError: on a double backward.
    """
    tensors = (x, gate_up_proj, down_proj, scores, topk_experts, up_bias, down_bias, pair_tokens, token_offsets)
    settings = (num_experts, activation, save, backend, combine, workspace_bytes, weight_grad_dtype)
    check_arguments(tensors, dispatch, *settings)
    save = save.value if isinstance(save, SavePolicy) else save  # SavePolicy(save) would be traced by torch.compile
    weight_grads = "float32" if weight_grad_dtype == torch.float32 and x.dtype != torch.float64 else "weight"
    options = Options(activation, save, combine, backend, weight_grads)
    # Asking for one device's autocast takes microseconds.
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device_type := x.device.type):
        return _run(*tensors, num_experts, options, workspace_bytes, dispatch)
    if x.dtype != torch.float64:  # which autocast leaves alone everywhere
        x = x.to(torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        return _run(x, *tensors[1:], num_experts, options, workspace_bytes, dispatch)


def _run(
    x: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
    num_experts: int,
    options: Options,
    workspace_bytes: int | None,
    dispatch: DispatchLike | None,
) -> Tensor:
    """:func:`moe_mlp` after checks and casts."""
    x, up_proj, down_proj = x.contiguous(), up_proj.contiguous(), down_proj.contiguous()
    scores = cast(scores, torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()
    call = caller(x, up_proj, down_proj, scores, topk_experts, up_bias, down_bias, pair_tokens, token_offsets)
    parameters = (x, up_proj, up_bias, down_proj, down_bias, scores)
    if not torch.is_grad_enabled():
        options = options._replace(save="recompute")  # nothing will ask for H

    if workspace_bytes is not None:
        assert topk_experts is not None
        bytes_per_token = transient_bytes_per_token(
            down_proj, topk_experts.shape[1], options.activation, x.dtype.itemsize
        )
        chunk_tokens = chunk_length(x.shape[0], bytes_per_token, workspace_bytes)
        if chunk_tokens < x.shape[0]:
            return call("moe_chunked", *parameters, topk_experts, chunk_tokens, options.encode())[0]

    if dispatch is not None:
        index_arrays = (
            dispatch.expert_pair_indices.contiguous(),
            dispatch.expert_token_offsets.contiguous(),
            dispatch.token_index_map.contiguous(),
        )
        top_k, pair_tokens, token_offsets = dispatch.top_k, dispatch.pair_tokens, dispatch.token_offsets
    else:
        assert topk_experts is not None
        index_arrays = call("dispatch", topk_experts, num_experts, options.backend)
        top_k = None if pair_tokens is not None else topk_experts.shape[1]
    if pair_tokens is not None and token_offsets is not None:
        pair_tokens, token_offsets = pair_tokens.contiguous(), token_offsets.contiguous()
    tail = (*index_arrays, top_k or 0, pair_tokens, token_offsets, options.encode())

    return call("moe_experts", *parameters, *tail)[0]
