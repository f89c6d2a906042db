"""Token choice, of which what overflows an expert's capacity is dropped: GShard, Switch Transformer, V-MoE."""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from blazeproto.router.choices.choice import WithCapacity, choice_mask, keep_first, rank_tokens
from blazeproto.router.kinds import Priority
from blazeproto.runtime import checks


@dataclass(frozen=True)
class Capacity(WithCapacity):
    """Token choice with at most ``capacity_factor * T * K / E`` tokens an expert; what overflows is dropped.

    GShard (Lepikhin et al. 2021) §2.2 and Switch Transformer (Fedus et al. 2022) §2.2. Which pairs stay, by ``priority``:

    - ``slot``   all first choices before any second choice, by token within each (GShard Algorithm 1).
    - ``token``  by token; a token's choices together.
    - ``score``  all first choices before any second choice; within each, tokens by their largest score, ties to the lower
      token (batch prioritised routing: Riquelme et al. 2021, V-MoE §4.1, Algorithm 2). A NaN token comes first.
    """

    WAYS = get_args(Priority)
    capacity_factor: float = 1.25
    priority: Priority = "slot"
    eval_top_k: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("priority", self.priority, self.WAYS)

    @property
    def by(self) -> str:
        return self.priority

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return min(num_tokens * top_k, num_experts * self.size(num_tokens, num_experts, top_k))

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """size: the capacity."""
        (num_tokens, num_experts), top_k = scores.shape, experts.shape[1]
        chosen = choice_mask(experts, num_experts)
        place = torch.arange(num_tokens, device=experts.device)  # of a token among all
        if by == "score":
            largest = scores.amax(dim=1)
            largest = torch.where(largest.isnan(), torch.inf, largest)
            by_score = torch.sort(largest, descending=True, stable=True).indices
            place = torch.zeros_like(place).scatter(0, by_score, place)
        places = place[:, None].expand_as(experts)
        if by != "token":
            places = places + num_tokens * torch.arange(top_k, device=experts.device)
        keys = torch.full_like(chosen, -num_tokens * top_k, dtype=torch.int64).scatter(1, experts.long(), -places)
        return keep_first(rank_tokens(keys), chosen.sum(dim=0).clamp(max=size))
