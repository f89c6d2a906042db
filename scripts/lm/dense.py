"""A dense model's MLP with as many active parameters as experts have: what MegaBlocks' Figures 7 and 8 compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blazeproto.layer import MoEStats


class Dense(nn.Module):
    """A SwiGLU MLP of width top_k * d_expert in place of `blazeproto.MoE`: as many multiplications a token, no choice of experts.

    Its products are torch's own, in bf16 under autocast. d_model, d_expert, num_experts, top_k: the MoE layer's d, n, E, K.
    router: every formulation takes one; this one does not use it.
    """

    router = None

    def __init__(self, d_model: int, d_expert: int, num_experts: int, top_k: int, *, router: str) -> None:
        super().__init__()
        width = top_k * d_expert
        self.up = nn.Linear(d_model, 2 * width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)

    @property
    def down_proj(self) -> Tensor:
        """(d, top_k * d_expert): what writes to the residual, by the name that MoE has for it."""
        return self.down.weight

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, MoEStats]:
        """x (..., d) floating point -> (..., d), and loads as of one expert that all tokens choose, without a loss."""
        gate, up = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        load = torch.full((1,), x.shape[:-1].numel(), dtype=torch.int32, device=x.device)
        return out, MoEStats(load, {})
