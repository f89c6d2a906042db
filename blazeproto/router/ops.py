"""The router's choices as torch operators: torch.compile takes each as one node, and an activation-checkpointing policy can
keep what was chosen instead of choosing again.

    choose_top_k      keys (T, E) -> experts (T, K)
    routing_losses    logits, experts -> the load and the auxiliary losses; on a Hopper GPU in two kernels, with a backward
    route_top_k       logits (T, E) -> scores and experts (T, K); on a Hopper GPU one fused kernel, with its backward
    pairs_from_mask   mask (T, E) -> a flat list of pairs
"""

from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import has_dispatch_kernels
from blazeproto.autograd.operators import define
from blazeproto.router import losses, topk
from blazeproto.router.kinds import sums_to_one
from blazeproto.router.scoring import (
    dense_scores,
    expert_load,
    gathered_scores,
    load_balancing_loss,
    log_scores,
    selection_keys,
    z_loss,
)


@define(
    "choose_top_k(Tensor keys, SymInt top_k) -> Tensor",
    lambda keys, top_k: keys.new_empty(keys.shape[0], top_k, dtype=torch.int32),
    chooses=True,
)
def choose_top_k(keys: Tensor, top_k: int) -> Tensor:
    """The experts with the K largest keys of each token, largest first, ties to the lower expert id.

    keys (T, E) floating point; returns (T, K) int32, distinct in each row whatever the keys hold (NaN ranks last).
    """
    lowest, highest = torch.finfo(keys.dtype).min, torch.finfo(keys.dtype).max
    left = torch.nan_to_num(keys, nan=lowest, posinf=highest, neginf=lowest)
    if _fused_kernel_takes(left, None, top_k, "softmax_topk"):
        return topk.topk_route(left, top_k)[1]  # type: ignore[no-any-return]
    chosen = torch.empty(keys.shape[0], top_k, dtype=torch.int64, device=keys.device)
    # K times the first maximum: torch.topk leaves the order of ties open, and a stable sort of all E costs more.
    for slot in range(top_k):
        expert = chosen[:, slot : slot + 1]
        torch.argmax(left, dim=1, keepdim=True, out=expert)
        left.scatter_(1, expert, -torch.inf)
    return chosen.to(torch.int32)


def _pairs_fake(mask: Tensor, capacity: int) -> tuple[Tensor, ...]:
    sizes = (capacity, capacity, mask.shape[0] + 1)
    return tuple(mask.new_empty(size, dtype=torch.int32) for size in sizes)


@define(
    "pairs_from_mask(Tensor mask, SymInt capacity) -> (Tensor pair_experts, Tensor pair_tokens, Tensor token_offsets)",
    _pairs_fake,
    chooses=True,
)
def pairs_from_mask(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The True entries of a (T, E) mask as a flat list of pairs, by token, ascending expert id inside one.

    Returns pair_experts (P,), pair_tokens (P,) and token_offsets (T + 1,), int32, where P is ``capacity``: a host
    number, so no shape depends on the mask. Pairs that the mask does not fill come last, with expert -1 and token 0;
    the caller's capacity is an upper bound of the number of True entries (what lies beyond it is left out).
    """
    num_tokens, num_experts = mask.shape
    seen = mask.flatten().cumsum(0, dtype=torch.int32)  # (T*E,) how many pairs up to and with this entry
    wanted = torch.arange(1, capacity + 1, dtype=torch.int32, device=mask.device)
    entry = torch.searchsorted(seen, wanted)  # (P,) the first entry that has seen p + 1 pairs
    used = entry < num_tokens * num_experts
    pair_experts = torch.where(used, entry % num_experts, -1).to(torch.int32)
    pair_tokens = torch.where(used, entry // num_experts, 0).to(torch.int32)
    token_offsets = torch.zeros(num_tokens + 1, dtype=torch.int32, device=mask.device)
    token_offsets[1:] = mask.sum(dim=1).cumsum(0).clamp(max=capacity)
    return pair_experts, pair_tokens, token_offsets


# ---------------------------------------------------------------------------------------------------------------------
# Top-k routing in one operator


def _fused_kernel_takes(logits: Tensor, bias: Tensor | None, top_k: int, score: str) -> bool:
    """Whether `topk.topk_route` can do it. Asked inside the operators, which torch.compile does not trace."""
    return (
        logits.dtype == torch.float32
        and logits.is_contiguous()
        and logits.shape[1] <= topk.MAX_EXPERTS
        and top_k <= topk.MAX_TOP_K
        and (bias is None or score == "sigmoid")
        and has_dispatch_kernels("auto", logits.device)
    )


@define(
    "route_top_k_backward(Tensor logits, Tensor experts, Tensor d_scores, str score, bool renormalize, float scale) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def route_top_k_backward(
    logits: Tensor, experts: Tensor, d_scores: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits (T, E) from d_scores (T, K): the derivative of `scoring.gathered_scores`."""
    if _fused_kernel_takes(logits, None, experts.shape[1], score):
        options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale}
        made: Tensor = topk.topk_route_backward(logits, experts, d_scores.contiguous(), **options)
        return made
    index = experts.long()
    d_chosen = d_scores * scale
    if sums_to_one(score, renormalize):
        chosen = logits.gather(1, index)
        share = torch.softmax(log_scores(chosen, score), dim=1)
        d_chosen = share * (d_chosen - (d_chosen * share).sum(dim=1, keepdim=True))
        if score == "sigmoid":
            d_chosen = d_chosen * torch.sigmoid(-chosen)  # the slope of log(sigmoid)
        return torch.zeros_like(logits).scatter(1, index, d_chosen)
    dense = dense_scores(logits, score)
    d_dense = torch.zeros_like(dense).scatter(1, index, d_chosen)
    if score == "sigmoid":
        return d_dense * dense * (1 - dense)
    return dense * (d_dense - (d_chosen * dense.gather(1, index)).sum(dim=1, keepdim=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.score, ctx.renormalize, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, d_scores: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, experts = ctx.saved_tensors
    d_logits = route_top_k_backward(logits, experts, d_scores, ctx.score, ctx.renormalize, ctx.scale)
    return d_logits, None, None, None, None, None


def _route_fake(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@define(
    "route_top_k(Tensor logits, Tensor? bias, SymInt top_k, str score, bool renormalize, float scale) "
    "-> (Tensor scores, Tensor experts)",
    _route_fake,
    chooses=True,
    setup=_keep,
    backward=_backward,
)
def route_top_k(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Token choice: the scores (T, K) and the experts (T, K) int32 of logits (T, E), in falling order of the keys.

    `scoring.selection_keys`, `choose_top_k` and `scoring.gathered_scores` in one. The scores are differentiable in the
    logits; backward keeps the logits and the experts. The fused kernel of `blazeproto.router.topk` runs where it can.
    """
    if _fused_kernel_takes(logits, bias, top_k, score):
        options: dict[str, Any] = {"score": score, "bias": bias, "renormalize": renormalize, "scale": scale}
        return topk.topk_route(logits, top_k, **options)
    experts = choose_top_k.kernel(selection_keys(logits, score, bias), top_k)
    return gathered_scores(logits, experts, score=score, renormalize=renormalize, scale=scale), experts


# ---------------------------------------------------------------------------------------------------------------------
# The load and the losses


def _loss_kernels_take(logits: Tensor) -> bool:
    """Whether `losses.routing_losses` can do it; as `_fused_kernel_takes`."""
    return (
        logits.dtype == torch.float32
        and logits.is_contiguous()
        and logits.shape[0] > 0
        and logits.shape[1] <= topk.MAX_EXPERTS
        and has_dispatch_kernels("auto", logits.device)
    )


def _times(loss: Tensor, coefficient: float) -> Tensor:
    """Not in the kernels, where another coefficient would be another constant, and another kernel to compile. What has the
    coefficient 0 is 0 already, or not read."""
    return loss if coefficient in (0, 1) else loss * coefficient


@define(
    "routing_losses_backward(Tensor logits, Tensor load, Tensor d_balance_loss, Tensor d_z_loss, int top_k, str score, "
    "float balance, float z) -> Tensor",
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
) -> Tensor:
    """d_logits (T, E) of the two losses; losses_kernels.py has the formulas."""
    if _loss_kernels_take(logits):
        options: dict[str, Any] = {"score": score, "balance": bool(balance), "z": bool(z)}
        slopes = _times(d_balance_loss, balance), _times(d_z_loss, z)
        made: Tensor = losses.routing_losses_backward(logits, load, *slopes, top_k, **options)
        return made
    num_tokens, num_experts = logits.shape
    weights = d_balance_loss * (balance * num_experts) * load.to(logits.dtype) / max(num_tokens * top_k, 1)
    shares = torch.softmax(log_scores(logits, score), dim=1)
    d_logits = shares * (weights - (weights * shares).sum(dim=1, keepdim=True))
    if score == "sigmoid":
        d_logits *= torch.sigmoid(-logits)
    if z:
        log_sums = torch.logsumexp(logits, dim=1, keepdim=True)
        d_logits += d_z_loss * (2 * z) * log_sums * torch.softmax(logits, dim=1)
    return d_logits / max(num_tokens, 1)


def _keep_for_losses(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, experts, *ctx.options = inputs
    ctx.top_k = experts.shape[1]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(logits, output[2])


def _losses_backward(ctx: Any, d_balance_loss: Tensor, d_z_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, load = ctx.saved_tensors
    d_logits = routing_losses_backward(logits, load, d_balance_loss, d_z_loss, ctx.top_k, *ctx.options)
    return d_logits, None, None, None, None


def _losses_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return logits.new_empty(()), logits.new_empty(()), logits.new_empty(logits.shape[1], dtype=torch.int32)


@define(
    "routing_losses(Tensor logits, Tensor experts, str score, float balance, float z) "
    "-> (Tensor balance_loss, Tensor z_loss, Tensor load)",
    _losses_fake,
    setup=_keep_for_losses,
    backward=_losses_backward,
)
def routing_losses(
    logits: Tensor, experts: Tensor, score: str, balance: float, z: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`scoring.load_balancing_loss` and `scoring.z_loss` of the logits (T, E) and the choice ``experts`` (T, K), each times its
    coefficient (0 where that is 0), and the load (E,) int32. Differentiable in the logits; backward keeps them and the load."""
    if _loss_kernels_take(logits):
        of_balance, of_z, load = _losses_fake(logits)
        workspace = logits.new_empty(losses.losses_workspace(*logits.shape))
        options: dict[str, Any] = {"score": score, "balance": bool(balance), "z": bool(z), "workspace": workspace}
        ids = experts.to(torch.int32).contiguous()
        losses.routing_losses(logits, ids, out=(load, of_balance, of_z), **options)
    else:
        of_balance = load_balancing_loss(logits, experts, score=score) if balance else logits.new_zeros(())
        of_z = z_loss(logits) if z else logits.new_zeros(())
        load = expert_load(experts, logits.shape[1])
    return _times(of_balance, balance), _times(of_z, z), load
