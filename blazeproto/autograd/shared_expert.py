"""The MLP that every token goes through, beside its routed experts."""

import torch
from torch import Tensor, nn

from blazeproto.activations import activation_named
from blazeproto.autograd.mlp import grouped_experts
from blazeproto.autograd.operators import autocast_dtype, cast
from blazeproto.runtime.checks import integer


class SharedExpert(nn.Module):
    """DeepSeekMoE §3.2.

    gate_up_proj (2 m, d), or up_proj (m, d) without a gate; down_proj (d, m).
    """

    down_proj: nn.Parameter

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: str = "swiglu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        integer("d_model", d_model, least=1)
        integer("d_shared", d_hidden, least=1)
        self.activation = activation
        entry = activation_named(activation)
        self.up_name = entry.up_name
        weights = {self.up_name: (d_hidden * entry.halves, d_model), "down_proj": (d_model, d_hidden)}
        for name, shape in weights.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As nn.Linear starts: uniform within 1 / sqrt(fan in)."""
        for weight in (getattr(self, self.up_name), self.down_proj):
            weight.uniform_(-(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, backend: str = "auto", save: str = "minimal") -> Tensor:
        """x (T, d) -> (T, d), of x's dtype, of autocast's under it; by the routed experts' products, as one expert of all rows.

        backend: "torch", or "auto", which is right for any width.  save: as in `moe_mlp`.
        """
        if x.dtype != torch.float64:  # which autocast leaves alone
            x = cast(x, autocast_dtype(x.device.type) or x.dtype)
        up, down = (weight.to(x.dtype)[None] for weight in (getattr(self, self.up_name), self.down_proj))
        # All rows. No torch.full: inductor fails on the cumsum of one whose value is symbolic (torch 2.11 to 2.13).
        counts = torch.arange(x.shape[0], x.shape[0] + 1, dtype=torch.int32, device=x.device)
        return grouped_experts(x, up, down, counts, activation=self.activation, backend=backend, save=save)

    def extra_repr(self) -> str:
        d_model, d_hidden = self.down_proj.shape
        return f"d_model={d_model}, d_hidden={d_hidden}, activation={self.activation}"
