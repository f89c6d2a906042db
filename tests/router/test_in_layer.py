"""Every named router in the layer: output and gradients against the float64 oracle, under each save policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blazeproto import reference
from blazeproto.autograd import checkpoint_contexts
from blazeproto.layer import MoE
from blazeproto.router.router import ROUTERS


def layer_and_input(name: str, save: str = "minimal") -> tuple[MoE, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"tile": 8} if name.startswith("token_rounding") else {}
    layer = MoE(16, 8, 6, 2, router=name, save=save, dtype=torch.float64, **options)
    x = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    return layer, x, torch.arange(50) % 20 if name == "hash" else None


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("name", ROUTERS)
def test_output_and_gradients(name: str, save: str) -> None:
    layer, x, ids = layer_and_input(name, save)
    inputs = [x, *layer.parameters()]
    torch.manual_seed(1)
    out, stats = layer(x, token_ids=ids)
    got = torch.autograd.grad(out.square().sum() + stats.aux_loss, inputs)

    torch.manual_seed(1)
    routing = layer.router(x, token_ids=ids)
    expected = reference.moe_mlp(
        x, layer.gate_up_proj, layer.down_proj, routing.scores, routing.experts,
        num_experts=6, pair_tokens=routing.pair_tokens,
    )  # fmt: skip
    loss = expected.square().sum() + sum(routing.aux_losses.values())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(got, torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("name", ROUTERS)
def test_checkpointing_gives_the_same_gradients_and_bias(name: str) -> None:
    layer, x, ids = layer_and_input(name)
    inputs = [x, *layer.parameters()]

    def gradients(checkpointed: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        if checkpointed:
            out, stats = checkpoint(layer, x, ids, use_reentrant=False, context_fn=checkpoint_contexts)
        else:
            out, stats = layer(x, ids)
        return torch.autograd.grad(out.square().sum() + stats.aux_loss, inputs)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
