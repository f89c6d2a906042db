"""The routing that a layer is given, in place of its router's."""

from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.autograd.checks import FLOAT_DTYPES, INDEX_DTYPES, check_dense
from blazeproto.router.router import Routing, check_by_token, check_takes_mask
from blazeproto.runtime.checks import require


def checked(
    router: nn.Module,
    x: Tensor,
    token_ids: Tensor | None,
    mask: Tensor | None,
    experts: Tensor | None,
    scores: Tensor | None,
) -> dict[str, Tensor]:
    """The keywords of the router. x: (..., d) of at least one dimension. The others are as in `blazeproto.MoE.forward`, which
    raises what this does."""
    given = {name: value for name, value in {"token_ids": token_ids, "mask": mask}.items() if value is not None}
    if mask is not None:
        check_by_token("mask", mask, x.reshape(-1, x.shape[-1]).shape[0], x.device)  # symbolic, unlike a Size's numel()
        if mask.shape not in (x.shape[:-1], (mask.numel(),)):  # (T, B) for (B, T) would mask other tokens
            raise ValueError(f"mask: expected shape {tuple(x.shape[:-1])}, x's, got {tuple(mask.shape)}")
    require(experts is not None or scores is None, "scores", "None without experts", type(scores).__name__)
    if experts is not None:
        require(token_ids is None, "token_ids", "None with experts and scores", "a tensor")
    elif mask is not None:
        check_takes_mask(router)
    return given


def routing_of(experts: Any, scores: Any, x: Tensor, num_experts: int, top_k: int, mask: Tensor | None) -> Routing:
    """The routing that another program chose. experts, scores: (..., K) for x (..., d); an id outside [0, E) is of no expert.
    No logits and no losses. TypeError or ValueError names what does not fit."""
    shape = (*x.shape[:-1], top_k)
    for name, given, kinds in (("experts", experts, INDEX_DTYPES), ("scores", scores, FLOAT_DTYPES)):
        check_dense(name, given)
        if given.dtype not in kinds:
            raise TypeError(f"{name}: expected dtype {' or '.join(map(str, kinds))}, got {given.dtype}")
        if given.shape != shape or given.device != x.device:
            raise ValueError(
                f"{name}: expected shape (..., K) = {shape} on {x.device}, got {tuple(given.shape)} on {given.device}"
            )
    ids, scores = experts.reshape(-1, top_k), scores.reshape(-1, top_k)
    ids = ids if mask is None else ids.masked_fill(~mask.reshape(-1, 1), -1)
    counted = ids.where((ids >= 0) & (ids < num_experts), num_experts).long().reshape(-1)
    load = counted.new_zeros(num_experts + 1, dtype=torch.int32).scatter_add_(
        0, counted, torch.ones_like(counted).int()
    )
    return Routing(scores, ids, scores.new_empty(0, num_experts), load[:-1], {}, mask=mask)
