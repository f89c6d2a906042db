"""The router's choices as torch operators, so that torch.compile takes each as one node and an activation-checkpointing
policy can keep what was chosen (``ROUTING_OPS``) instead of choosing again.

    choose_top_k      keys (T, E) -> experts (T, K)
    route_top_k       logits (T, E) -> scores and experts (T, K); on a Hopper GPU one fused kernel, with its backward
    pairs_from_mask   mask (T, E) -> a flat list of pairs
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blazeproto.scoring import TINY, dense_scores, gathered_scores, selection_keys


@torch.library.custom_op("blazeproto::choose_top_k", mutates_args=())
def choose_top_k(keys: Tensor, top_k: int) -> Tensor:
    """The experts with the K largest keys of each token, largest first, ties to the lower expert id.

    keys (T, E) floating point; returns (T, K) int32, distinct in each row whatever the keys hold (NaN ranks last).
    """
    lowest, highest = torch.finfo(keys.dtype).min, torch.finfo(keys.dtype).max
    left = torch.nan_to_num(keys, nan=lowest, posinf=highest, neginf=lowest)
    chosen = torch.empty(keys.shape[0], top_k, dtype=torch.int64, device=keys.device)
    # K times the first maximum: torch.topk leaves the order of ties open, and a stable sort of all E costs more.
    for slot in range(top_k):
        expert = chosen[:, slot : slot + 1]
        torch.argmax(left, dim=1, keepdim=True, out=expert)
        left.scatter_(1, expert, -torch.inf)
    return chosen.to(torch.int32)


@choose_top_k.register_fake
def _(keys: Tensor, top_k: int) -> Tensor:
    return keys.new_empty(keys.shape[0], top_k, dtype=torch.int32)


@torch.library.custom_op("blazeproto::pairs_from_mask", mutates_args=())
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


@pairs_from_mask.register_fake
def _(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    def new(size: int) -> Tensor:
        return mask.new_empty(size, dtype=torch.int32)

    return new(capacity), new(capacity), new(mask.shape[0] + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Top-k routing in one operator


@torch.library.custom_op("blazeproto::route_top_k", mutates_args=())
def route_top_k(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Token choice: the scores (T, K) and the experts (T, K) int32 of logits (T, E), in falling order of the keys.

    `scoring.selection_keys`, `choose_top_k` and `scoring.gathered_scores` in one. The scores are differentiable in the
    logits; backward keeps the logits and the experts. The fused kernel of `blazeproto.dispatch` runs where it can.
    """
    if _fused_kernel_takes(logits, bias, top_k, score):
        from blazeproto.dispatch import topk_route

        scores = logits.new_empty(logits.shape[0], top_k)
        experts = logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)
        options: dict[str, Any] = {"score": score, "bias": bias, "renormalize": renormalize, "scale": scale}
        topk_route(logits, top_k, **options, out=(scores, experts))
        return scores, experts
    experts = choose_top_k(selection_keys(logits, score, bias), top_k)
    return gathered_scores(logits, experts, score=score, renormalize=renormalize, scale=scale), experts


@route_top_k.register_fake
def _(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("blazeproto::route_top_k_backward", mutates_args=())
def route_top_k_backward(
    logits: Tensor, experts: Tensor, d_scores: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits (T, E) from d_scores (T, K): the derivative of `scoring.gathered_scores`."""
    if _fused_kernel_takes(logits, None, experts.shape[1], score):
        from blazeproto.dispatch import topk_route_backward

        d_logits = torch.empty_like(logits)
        options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale}
        topk_route_backward(logits, experts, d_scores.contiguous(), **options, out=d_logits)
        return d_logits
    index = experts.long()
    dense = dense_scores(logits, score)
    chosen = dense.gather(1, index)
    d_chosen = d_scores * scale
    if renormalize or score == "topk_softmax":  # a softmax over a subset is the whole one, renormalised
        total = chosen.sum(dim=1, keepdim=True) + TINY
        d_chosen = (d_chosen - (d_chosen * chosen).sum(dim=1, keepdim=True) / total) / total
    d_dense = torch.zeros_like(dense).scatter(1, index, d_chosen)
    if score == "sigmoid":
        return d_dense * dense * (1 - dense)
    return dense * (d_dense - (d_chosen * chosen).sum(dim=1, keepdim=True))


@route_top_k_backward.register_fake
def _(logits: Tensor, experts: Tensor, d_scores: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.score, ctx.renormalize, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, d_scores: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, experts = ctx.saved_tensors
    d_logits = route_top_k_backward(logits, experts, d_scores, ctx.score, ctx.renormalize, ctx.scale)
    return d_logits, None, None, None, None, None


route_top_k.register_autograd(_backward, setup_context=_keep)


def _fused_kernel_takes(logits: Tensor, bias: Tensor | None, top_k: int, score: str) -> bool:
    """Whether blazeproto.dispatch.topk_route can do it: asked where tensors are real, so torch.compile never traces it."""
    return (
        logits.is_cuda
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and logits.shape[1] <= 1024
        and top_k <= 16
        and (bias is None or score == "sigmoid")
        and _has_kernels(logits.get_device())
    )


@cache
def _has_kernels(device: int) -> bool:
    installed = all(importlib.util.find_spec(module) for module in ("cupy", "numba", "numba_cuda"))
    return installed and torch.cuda.get_device_capability(device) == (9, 0)


# What an activation-checkpointing policy has to keep, so that the recomputed forward routes as the first one did.
ROUTING_OPS = tuple(
    getattr(torch.ops.blazeproto, op).default for op in ("choose_top_k", "route_top_k", "pairs_from_mask")
)
