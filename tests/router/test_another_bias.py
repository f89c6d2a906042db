"""A checkpoint that routes again: by the bias of the first forward pass, or an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blazeproto import MoE
from blazeproto.autograd import checkpoint_contexts
from tests.refusals import refuses

KINDS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "nested": lambda f, x: checkpoint(partial(checkpoint, f, use_reentrant=False), x, use_reentrant=False),
    "reentrant inside": lambda f, x: checkpoint(partial(checkpoint, f, use_reentrant=True), x, use_reentrant=False),
    "reentrant outside": lambda f, x: checkpoint(partial(checkpoint, f, use_reentrant=False), x, use_reentrant=True),
    "offloaded": lambda f, x: on_cpu(partial(checkpoint, f, use_reentrant=False), x),
}


def on_cpu(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


def layer_and_tokens(**options: Any) -> tuple[MoE, Tensor]:
    torch.manual_seed(0)
    layer = MoE(8, 8, 8, 2, router="aux_free", bias_update_rate=0.5, dtype=torch.float64, **options)
    return layer, torch.randn(64, 8, dtype=torch.float64, requires_grad=True)


def output_of(layer: MoE) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x.sin())[0]


LOAD = torch.tensor([9, 1, 1, 1, 9, 1, 1, 9])


@pytest.mark.parametrize("options", [{}, {"choose": "capacity"}], ids=["top_k", "varying"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_that_moved_before_backward_is_refused(kind: str, options: dict[str, Any]) -> None:
    layer, x = layer_and_tokens(**options)
    run = partial(KINDS[kind], output_of(layer))
    right = torch.autograd.grad(output_of(layer)(x).square().sum(), [x, *layer.parameters()])
    run(x).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in layer.parameters())], [*right], rtol=0, atol=0)
    out = run(x)
    layer.router.update_bias(LOAD)
    refuses(lambda: out.square().sum().backward(), "expert_bias", RuntimeError)


@pytest.mark.parametrize("kind", KINDS)
def test_each_forward_pass_knows_its_own_bias(kind: str) -> None:
    """Two micro-batches, and a step between them: the second's backward is right, the first's is refused."""
    layer, x = layer_and_tokens()
    run = partial(KINDS[kind], output_of(layer))
    first = run(x)
    layer.router.update_bias(LOAD)
    run(x).sum().backward()
    right = torch.autograd.grad(output_of(layer)(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, right, rtol=0, atol=0)
    refuses(lambda: first.sum().backward(), "expert_bias", RuntimeError)


@pytest.mark.parametrize("reentrant", [True, False])
def test_experts_alone_are_refused_too(reentrant: bool) -> None:
    """Where the router is frozen, and where one expert weight's gradient alone is asked for: nothing reaches the router."""
    layer, x = layer_and_tokens()
    layer.router.requires_grad_(False)
    anchor = torch.ones((), requires_grad=reentrant)  # without one a reentrant checkpoint has no gradient
    out = checkpoint(lambda x, one: layer(x)[0] * one, x.detach(), anchor, use_reentrant=reentrant)
    with torch.inference_mode():
        layer.router.update_bias(LOAD)
    inputs = {} if reentrant else {"inputs": [layer.down_proj]}
    refuses(lambda: out.sum().backward(**inputs), "expert_bias", RuntimeError)


@pytest.mark.parametrize("write", ["copy", "load", "assign", "data"])
def test_other_ways_to_change_it(write: str) -> None:
    layer, x = layer_and_tokens()
    out, router = checkpoint(output_of(layer), x, use_reentrant=False), layer.router
    other = {name: value + 1 for name, value in router.state_dict().items()}
    if write == "copy":
        router.expert_bias.copy_(other["expert_bias"])
    elif write == "data":
        router.expert_bias.data = other["expert_bias"]
    else:
        other["weight"] = router.weight.detach()
        with torch.no_grad():
            router.load_state_dict(other, assign=write == "assign")
    refuses(lambda: out.sum().backward(), "expert_bias", RuntimeError)


@pytest.mark.parametrize("how", ["plain", "policy", "offloaded", "offloaded inside"])
def test_what_does_not_route_again_takes_a_step_before_backward(how: str) -> None:
    layer, x = layer_and_tokens(aux_loss=0.1)
    right = torch.autograd.grad(output_of(layer)(x).square().sum(), [x, layer.router.weight, layer.down_proj])
    run: Callable[[Tensor], Tensor] = output_of(layer)
    if how == "policy":
        run = partial(checkpoint, run, use_reentrant=False, context_fn=checkpoint_contexts)
    elif how == "offloaded":
        run = partial(on_cpu, run)
    elif how == "offloaded inside":  # where a checkpoint's own hooks see nothing
        run = partial(checkpoint, partial(on_cpu, run), use_reentrant=False)
    out = run(x)
    layer.router.update_bias(LOAD)
    got = torch.autograd.grad(out.square().sum(), [x, layer.router.weight, layer.down_proj])
    torch.testing.assert_close(got, right, rtol=0, atol=0)


def test_a_compiled_checkpoint_is_refused_by_torch() -> None:
    """torch itself compares the versions of what a compiled graph keeps."""
    torch.compiler.reset()
    layer, x = layer_and_tokens()
    right = torch.autograd.grad(output_of(layer)(x).sum(), x)[0]
    function = torch.compile(lambda x: checkpoint(output_of(layer), x, use_reentrant=False), backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(function(x).sum(), x)[0], right)
    out = function(x)
    layer.router.update_bias(LOAD)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_other_things_called_ctx_are_no_checkpoint() -> None:
    layer = MoE(16, 8, 4, 2, router="aux_free")

    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        return layer(x)[0]

    def backward(ctx: object, x: Tensor) -> Tensor:
        return layer(x)[0]

    for call in (forward, backward):
        for ctx in ({}, object(), layer):
            with torch.no_grad():
                call(ctx, torch.randn(3, 16))
            layer.router.update_bias(torch.tensor([9, 1, 2, 6]))
