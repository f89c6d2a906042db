"""Experts by a hash of the token's id: Roller et al. 2021, "Hash layers", §3.1."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blazeproto.router.kinds import GOLDEN, MASK_32
from blazeproto.runtime import checks


@dataclass(frozen=True)
class Hash:
    """Experts by a hash of the token id, the same at any place and in any batch: Roller et al. 2021, "Hash layers", §3.1.

    The ids come from the model (``token_ids=``), or are positions. The router still learns the scores of the experts
    that the hash picks; with K = 1 and ``topk_softmax`` the score is one, which is the paper's layer.

    Highest-random-weight hashing: every (id, expert) gets a pseudo-random 24-bit weight, and the K largest win (ties to the
    lower expert). That is even over the experts for any E and K and needs no table the size of the vocabulary.
    """

    RENORMALIZES: ClassVar[bool] = False
    LOAD_IS_CHOSEN: ClassVar[bool] = True
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checks.integer("seed", self.seed))

    def __call__(self, token_ids: Tensor, num_experts: int, top_k: int) -> Tensor:
        """K distinct experts of each token id, the largest weight first: token_ids (T,) integers; returns (T, K) int32."""
        expert = torch.arange(num_experts, device=token_ids.device)
        words = _mix(token_ids.long() + (GOLDEN * (self.seed + 1) & MASK_32))[:, None] + GOLDEN * expert
        weights = _mix(words) >> 8  # (T, E)
        return torch.sort(weights, dim=1, descending=True, stable=True).indices[:, :top_k].to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: xor-shift-multiply, no product passes 2**63."""
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK_32
    return x ^ (x >> 15)
