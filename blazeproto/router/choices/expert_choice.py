"""Experts choose tokens: Zhou et al. 2022, "Mixture-of-experts with expert choice routing", §3.2."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blazeproto.router.choices.choice import WithCapacity, keep_first, rank_tokens


@dataclass(frozen=True)
class ExpertChoice(WithCapacity):
    """Every expert takes its best tokens by score, the same number each: Zhou et al. 2022, §3.2.

    That number is ``capacity_factor * T * K / E``, so the load is even by construction and a token gets from 0 to E experts.
    A token's experts depend on the tokens after it, which a causal language model may not know, so evaluation falls back to
    token choice unless ``eval_top_k`` is False (SonicMoE §2). NaN tokens rank first.
    """

    WAYS = ("expert_choice",)
    LOAD_IS_CHOSEN = True
    capacity_factor: float = 1.0
    eval_top_k: bool = True

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_experts * self.size(num_tokens, num_experts, top_k)

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """Of the token choice only K counts, in ``size``."""
        keys = torch.where(scores.isnan(), torch.inf, scores)
        return keep_first(rank_tokens(keys), torch.full((scores.shape[1],), size, device=scores.device))
