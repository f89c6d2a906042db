"""Whole MoE layers as their users call them: router, auxiliary loss and experts, forward and backward.

Ours is `blazeproto.MoE(router="topk_softmax")`; SonicMoE's is `sonicmoe.MoE`. Both get the same weights in bf16, the router's
too, and the same tokens, which require a gradient. Their routers have no z-loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.gemm import Sizes
from blazeproto.router import Router
from scripts.bench.peers import LayerInputs
from scripts.bench.peers.sonic import gate_then_up, interleave_gate_up

AUX_LOSS = 0.01  # coefficient of the load-balancing loss


@dataclass(frozen=True)
class ModuleProgram:
    """One training step of a module: what it computes of x, and the gradients that come back to it."""

    module: nn.Module
    x: Tensor  # (T, d), a leaf
    forward: Callable[[], tuple[Tensor, Tensor]]  # the output and the auxiliary loss
    grad_output: Tensor
    grad_loss: Tensor  # a scalar
    weights: Callable[[], dict[str, Tensor]] = (
        dict  # by name, the same in every module: their gradients, laid out as ours
    )

    def forward_backward(self) -> tuple[Tensor, Tensor]:
        """(output, gradient of x); no leaf has a gradient beforehand, so none is added up."""
        self.clear()
        out, loss = self.forward()
        torch.autograd.backward((out, loss), (self.grad_output, self.grad_loss))
        assert self.x.grad is not None
        return out.detach(), self.x.grad

    def clear(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Those of all weights, and the router's by the auxiliary loss alone."""
        self.forward_backward()
        found = self.weights()
        replace(self, grad_output=torch.zeros_like(self.grad_output)).forward_backward()
        found["router_by_loss"] = self.weights()["router"]
        self.clear()
        return found


def router_weight(shape: Sizes, inputs: LayerInputs, seed: int = 0) -> Tensor:
    """(E, d) bf16 at 1 / sqrt(d): logits at unit scale."""
    generator = torch.Generator(inputs.x.device).manual_seed(seed)
    weight = torch.randn(shape.E, shape.d, device=inputs.x.device, generator=generator)
    return (weight * shape.d**-0.5).to(torch.bfloat16)


def ours(shape: Sizes, inputs: LayerInputs, weight: Tensor) -> ModuleProgram:
    layer = MoE(
        shape.d,
        shape.n,
        shape.E,
        shape.K,
        router="topk_softmax",
        aux_loss=AUX_LOSS,
        backend="hopper" if inputs.x.is_cuda else "auto",
        device=inputs.x.device,
        dtype=torch.bfloat16,
    )
    router = cast(Router, layer.router)
    _load((router.weight, weight), (layer.up_proj_weight, inputs.gate_up_proj), (layer.down_proj, inputs.down_proj))
    x = inputs.x  # and not the inputs, whose weights are copied

    def call() -> tuple[Tensor, Tensor]:
        out, stats = layer(x)
        return out, torch.as_tensor(stats.aux_loss)

    def weights() -> dict[str, Tensor]:
        return _gradients(router=router.weight, up=layer.up_proj_weight, down=layer.down_proj)

    return ModuleProgram(layer, x, call, inputs.grad_output, torch.ones((), device=x.device), weights)


def router_of(program: ModuleProgram, grad_scores: Tensor) -> ModuleProgram:
    """The router of `ours` alone: logits, scores, choice, load and loss; backward from the scores (T, K) and the loss."""
    router = cast(Router, program.module.router)

    def call() -> tuple[Tensor, Tensor]:
        routing = router(program.x)
        (loss,) = routing.aux_losses.values()
        return routing.scores, loss

    return ModuleProgram(router, program.x, call, grad_scores, program.grad_loss)


def sonic(shape: Sizes, inputs: LayerInputs, weight: Tensor) -> ModuleProgram:
    """Its loss comes without a coefficient, which its gradient brings: a kernel less each way than multiplying by it."""
    import sonicmoe
    from sonicmoe.enums import ActivationType

    with torch.device(inputs.x.device):
        layer = sonicmoe.MoE(
            num_experts=shape.E,
            num_experts_per_tok=shape.K,
            hidden_size=shape.d,
            intermediate_size=shape.n,
            activation_function=ActivationType.SWIGLU,
            add_bias=False,
            std=0.02,
        )
    layer = layer.to(torch.bfloat16)
    up = interleave_gate_up(inputs.gate_up_proj)
    _load((layer.router.weight, weight), (layer.c_fc.weight, up), (layer.c_proj.weight, inputs.down_proj))
    x, loss = inputs.x, torch.tensor(AUX_LOSS, device=inputs.x.device)

    def weights() -> dict[str, Tensor]:
        found = _gradients(router=layer.router.weight, up=layer.c_fc.weight, down=layer.c_proj.weight)
        return found | {"up": gate_then_up(found["up"])}

    return ModuleProgram(layer, x, lambda: layer(x), inputs.grad_output, loss, weights)


def _gradients(**weights: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in weights.items()}


@torch.no_grad()
def _load(*pairs: tuple[Tensor, Tensor]) -> None:
    for parameter, values in pairs:
        parameter.copy_(values)
