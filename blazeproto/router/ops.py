"""The router's operators: torch.compile takes each as one node, and an activation-checkpointing policy can keep what was chosen
instead of choosing again.

    route_top_k      logits (T, E) -> scores and experts (T, K)                         kernels: topk.py
    routing_losses   logits, experts -> the load and the auxiliary losses               kernels: losses.py
    hash_experts     token ids (T,) -> experts (T, K)                                   kernel: topk.py

pair_ops.py has the operators for a number of experts that varies.

An operator asks inside, where torch.compile does not trace, whether its kernels run on these tensors; else `fallback` computes
the same. Kernels are launched unchecked: the operators are called by `Router`, which has checked what came.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import has_dispatch_kernels
from blazeproto.autograd.operators import Operator, define, narrow_ids
from blazeproto.autograd.private import unobserved
from blazeproto.router import fallback, losses, pairs, topk
from blazeproto.router.public import place_of
from blazeproto.router.scores import SCORES


def kernels_take(matrix: Tensor, top_k: int = 1) -> bool:
    """Whether the kernels take a (T, E) matrix, and the top-k kernels K experts a token."""
    return (
        matrix.dtype == torch.float32
        and matrix.is_contiguous()
        and 1 <= matrix.shape[1] <= topk.MAX_EXPERTS
        and matrix.shape[0] <= pairs.MAX_TOKENS
        and top_k <= topk.MAX_TOP_K
        and has_dispatch_kernels("auto", matrix.device)
    )


def integers(like: Tensor, *shapes: Sequence[int]) -> tuple[Any, ...]:
    """New tensors, int32."""
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)


def derivative(
    backward: Operator, num_gradients: int, kept: Callable[..., tuple[Sequence[Tensor], Sequence[Any]]]
) -> dict[str, Any]:
    """How `define` is told of a derivative in the first argument, the logits: ``backward(*saved, *gradients, *options)``.

    num_gradients: of the results, which are the first ones.  kept: (inputs, output) -> saved tensors, options.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[num_gradients:])
        saved, ctx.options = kept(inputs, output)
        ctx.others = [None] * (len(inputs) - 1)
        ctx.save_for_backward(*saved)

    def node(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (*ctx.saved_tensors, *(gradient.contiguous() for gradient in gradients[:num_gradients]))
        hidden = not torch.is_grad_enabled() and unobserved(tensors)  # enabled: create_graph=True
        return backward.entry((), unobserved=hidden)(*tensors, *ctx.options), *ctx.others

    return {"setup": setup, "backward": node}


# --- Top-k routing -----------------------------------------------------------------------------------------------------------


@define(
    "route_top_k_backward(Tensor logits, Tensor experts, Tensor d_scores, str score, bool renormalize, float scale) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def route_top_k_backward(
    logits: Tensor, experts: Tensor, d_scores: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits (T, E) from d_scores (T, K)."""
    given = logits, experts, d_scores
    if not kernels_take(logits, experts.shape[1]):
        return fallback.topk_route_backward(*given, score=score, renormalize=renormalize, scale=scale)
    kernel = topk.backward_kernel(logits.shape[1], experts.shape[1], score, renormalize, scale, half=False)
    return kernel.over(len(logits), place_of(logits), given, made=torch.empty_like(logits))


def _route_fake(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0], top_k), *integers(logits, (logits.shape[0], top_k))


@define(
    "route_top_k(Tensor logits, Tensor? bias, SymInt top_k, str score, bool renormalize, float scale, "
    "int num_groups=1, int top_groups=1) -> (Tensor scores, Tensor experts)",
    _route_fake,
    chooses=True,
    **derivative(route_top_k_backward, 1, lambda inputs, output: ((inputs[0], output[1]), inputs[3:6])),
)
def route_top_k(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Token choice: the scores (T, K) and the experts (T, K) int32 of logits (T, E), in falling order of the keys.

    The scores are differentiable in the logits; backward keeps the logits and the experts.
    """
    groups = {"num_groups": num_groups, "top_groups": top_groups}
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale, **groups}
    takes_bias = bias is None or (SCORES[score].elementwise and bias.dtype == torch.float32)
    if not (takes_bias and num_groups <= topk.MAX_GROUPS and kernels_take(logits, top_k)):
        return fallback.topk_route(logits, top_k, bias=bias, **options)
    kernel = topk.route_kernel(logits, top_k, bias is not None, **options)
    given, made = (logits, logits if bias is None else bias), _route_fake(logits, bias, top_k)
    return kernel.over(len(logits), place_of(logits), given, made=made)


# --- The load and the losses -------------------------------------------------------------------------------------------------


def _times(loss: Tensor, coefficient: float) -> Tensor:
    """Not in the kernels, where another coefficient would be another constant, and another kernel to compile. What has the
    coefficient 0 is 0 already, or not read."""
    return loss if coefficient in (0, 1) else loss * coefficient


@define(
    "routing_losses_backward(Tensor logits, Tensor load, Tensor d_balance_loss, Tensor d_z_loss, int top_k, str score, "
    "float balance, float z, bool masked) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def routing_losses_backward(
    logits: Tensor,
    load: Tensor,
    d_balance_loss: Tensor,
    d_z_loss: Tensor,
    top_k: int,
    score: str,
    balance: float,
    z: float,
    masked: bool,
) -> Tensor:
    """d_logits (T, E) of the two losses."""
    given = logits, load, _times(d_balance_loss, balance), _times(d_z_loss, z)
    wanted: dict[str, Any] = {"score": score, "balance": bool(balance), "z": bool(z), "masked": masked}
    if not (kernels_take(logits) and len(logits)):
        return fallback.routing_losses_backward(*given, top_k, **wanted)
    num_tokens, num_experts = logits.shape
    *_, kernel = losses.kernels(num_experts, **wanted)
    return kernel.over(num_tokens, place_of(logits), given, num_tokens, top_k, made=torch.empty_like(logits))


def _losses_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return logits.new_empty(()), logits.new_empty(()), *integers(logits, logits.shape[1:], logits.shape[1:])


@define(
    "routing_losses(Tensor logits, Tensor experts, str score, float balance, float z, bool masked) "
    "-> (Tensor balance_loss, Tensor z_loss, Tensor load, Tensor kept)",
    _losses_fake,
    **derivative(
        routing_losses_backward,
        2,
        lambda inputs, output: ((inputs[0], output[3]), (inputs[1].shape[1], *inputs[2:])),
    ),
)
def routing_losses(
    logits: Tensor, experts: Tensor, score: str, balance: float, z: float, masked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fallback.load_balancing_loss` and `fallback.z_loss` of the logits (T, E) and the choice ``experts`` (T, K), each times its
    coefficient (0 where that is 0), the load (E,) int32, and a copy of it. Differentiable in the logits; backward keeps them and
    the copy, so that the caller may sum the load over ranks in place.

    masked: a token with expert -1 has no part in them; its logits are NaN.
    """
    wanted: dict[str, Any] = {"score": score, "balance": bool(balance), "z": bool(z), "masked": masked}
    if kernels_take(logits) and len(logits):
        balance_loss, z_loss, load, kept = _losses_fake(logits)
        workspace = logits.new_empty(losses.losses_workspace(*logits.shape))
        ids = narrow_ids(experts).contiguous()
        losses.launch(place_of(logits), (logits, ids, load, balance_loss, z_loss, workspace), **wanted)
    else:
        load, balance_loss, z_loss = fallback.routing_losses(logits, experts, **wanted)
        kept = torch.empty_like(load)
    return _times(balance_loss, balance), _times(z_loss, z), load, kept.copy_(load)


# --- Hash --------------------------------------------------------------------------------------------------------------------


@define(
    "hash_experts(Tensor token_ids, SymInt num_experts, SymInt top_k, int seed) -> Tensor",
    lambda token_ids, num_experts, top_k, seed: integers(token_ids, (token_ids.shape[0], top_k))[0],
    chooses=True,
)
def hash_experts(token_ids: Tensor, num_experts: int, top_k: int, seed: int) -> Tensor:
    """The experts (T, K) int32 of `choices.Hash`; token_ids (T,) integers of any dtype."""
    takes = num_experts <= topk.MAX_EXPERTS and top_k <= topk.MAX_HASHED
    if not (takes and has_dispatch_kernels("auto", token_ids.device)):
        return fallback.hash_route(token_ids, num_experts, top_k, seed=seed)
    num_tokens, ids = len(token_ids), token_ids.to(torch.int64).contiguous()
    (experts,) = integers(token_ids, (num_tokens, top_k))
    kernel, numbers = topk.hash_kernel(num_experts, top_k), (topk.start_of(seed), num_tokens)
    return kernel.over(num_tokens, place_of(ids), (ids,), *numbers, made=experts)
