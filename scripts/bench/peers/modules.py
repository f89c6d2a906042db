"""Whole MoE layers as their users call them: router, auxiliary loss and experts, forward and backward.

Ours is `blazeproto.MoE(router="topk_softmax")`; SonicMoE's is `sonicmoe.MoE`. Both get the same weights in bf16, the router's
too, and the same tokens, which require a gradient. Their routers have no z-loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.gemm import Sizes
from blazeproto.router import Router
from scripts.bench.peers import LayerInputs, backend_of
from scripts.bench.peers.layers import gate_then_up, interleave_gate_up
from scripts.bench.timing import relative_difference, tensors_in

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


def router_weight(shape: Sizes, inputs: LayerInputs) -> Tensor:
    """(E, d) bf16 at 1 / sqrt(d): logits at unit scale."""
    generator = torch.Generator(inputs.x.device).manual_seed(inputs.seed)
    weight = torch.randn(shape.E, shape.d, device=inputs.x.device, generator=generator)
    return (weight * shape.d**-0.5).to(torch.bfloat16)


def moe(shape: Sizes, inputs: LayerInputs, router: str, **options: Any) -> MoE:
    """Our layer on the weights of ``inputs`` themselves: a second copy of a large layer's would leave no room for a peer."""
    options |= {"backend": backend_of(inputs), "device": inputs.x.device, "dtype": torch.bfloat16}
    layer = MoE(*shape[1:5], router=router, **options)
    layer.gate_up_proj = nn.Parameter(inputs.gate_up_proj.detach())
    layer.down_proj = nn.Parameter(inputs.down_proj.detach())
    cast(Any, layer.router).weight = nn.Parameter(router_weight(shape, inputs))
    return layer


def program_of(layer: MoE, x: Tensor, d_out: Tensor, **given: Tensor) -> ModuleProgram:
    """given: of `MoE.forward`: token_ids, mask."""

    def call() -> tuple[Tensor, Tensor]:
        out, stats = layer(x, **given)
        loss = torch.as_tensor(stats.aux_loss, device=x.device)
        return out, loss if loss.requires_grad else loss.requires_grad_()  # a router without one has a plain 0

    def weights() -> dict[str, Tensor]:
        return _gradients(router=layer.router.weight, up=layer.up_proj_weight, down=layer.down_proj)

    return ModuleProgram(layer, x, call, d_out, torch.ones((), device=x.device), weights)


def ours(shape: Sizes, inputs: LayerInputs) -> ModuleProgram:
    return program_of(moe(shape, inputs, "topk_softmax", aux_loss=AUX_LOSS), inputs.x, inputs.grad_output)


def router_of(program: ModuleProgram, grad_scores: Tensor) -> ModuleProgram:
    """The router of `ours` alone: logits, scores, choice, load and loss; backward from the scores (T, K) and the loss."""
    router = cast(Router, program.module.router)

    def call() -> tuple[Tensor, Tensor]:
        routing = router(program.x)
        (loss,) = routing.aux_losses.values()
        return routing.scores, loss

    return ModuleProgram(router, program.x, call, grad_scores, program.grad_loss)


def sonic(shape: Sizes, inputs: LayerInputs) -> ModuleProgram:
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
    with torch.no_grad():
        layer.router.weight.copy_(router_weight(shape, inputs))
        layer.c_fc.weight.copy_(interleave_gate_up(inputs.gate_up_proj))
        layer.c_proj.weight.copy_(inputs.down_proj)
    x, loss = inputs.x, torch.tensor(AUX_LOSS, device=inputs.x.device)

    def weights() -> dict[str, Tensor]:
        found = _gradients(router=layer.router.weight, up=layer.c_fc.weight, down=layer.c_proj.weight)
        return found | {"up": gate_then_up(found["up"])}

    return ModuleProgram(layer, x, lambda: layer(x), inputs.grad_output, loss, weights)


def _gradients(**weights: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in weights.items()}


# ----------------------------------------------------------------------------------------------------------- agreement

LARGEST_DIFFERENCE = 0.05  # of a row of the two modules' outputs, or gradients of x, in the median over the tokens
LARGEST_OF_WEIGHTS = 0.3  # of a weight's gradient, over its norm: some tokens go to other experts


def row_differences(a: Tensor, b: Tensor) -> Tensor:
    """(T,) norm of each row's difference over the norm of b's row, in fp32, a slice at a time."""
    step = max(1, (1 << 27) // max(1, b.shape[1]))
    pairs = zip(a.split(step), b.split(step), strict=True)
    return torch.cat([(x.float() - y.float()).norm(dim=1) / y.float().norm(dim=1).clamp_min(1e-30) for x, y in pairs])


def agreement(a: Any, b: Any, *, weights: bool = True) -> dict[str, float]:
    """By how much two programs' outputs and gradients of x differ, in the median over the tokens, and by how much the gradient of
    each weight; and the share of tokens that went to other experts: SonicMoE's logits are rounded to bf16.

    weights: False: their gradients, which take room, are dropped at once and not compared.
    RuntimeError where the figures say that the layers are not the same.
    """
    results = []
    for program in (a, b):
        results.append(tensors_in(program.forward_backward())[:2])
        if not weights:
            program.clear()
    out, x_grad = (row_differences(x, y) for x, y in zip(*results, strict=True))
    found = {"median_out": float(out.median()), "median_x_grad": float(x_grad.median())}
    wrong = [name for name, value in found.items() if not value < LARGEST_DIFFERENCE]
    if weights:
        ours, theirs = (program.weight_gradients() for program in (a, b))
        of_weights = {name: relative_difference(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
        wrong += [name for name, value in of_weights.items() if not value < LARGEST_OF_WEIGHTS]
        found |= of_weights | {"other_experts": float((out > 0.1).float().mean())}
    if wrong:
        raise RuntimeError(f"the programs compute different layers: {', '.join(wrong)} of {found}")
    return {name: round(value, 6) for name, value in found.items()}
