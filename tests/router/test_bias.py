"""The balancing bias: its values through casts, moves and checkpoints, and what a step of it takes, also before a checkpoint
routes again."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blazeproto import MoE
from blazeproto.autograd import checkpoint_contexts
from blazeproto.router import Router
from blazeproto.router.router import updated_bias
from tests.refusals import refuses

BIAS = torch.linspace(-0.1, 0.1, 8) + 1e-4  # no value is a bf16 or fp16 number


def biased() -> Router:
    router = Router(16, 8, 2, score="sigmoid", bias_update_rate=1e-3)
    with torch.no_grad():
        assert router.expert_bias is not None
        router.expert_bias.copy_(BIAS)
    return router


def saved_and_loaded(router: Router) -> Router:
    file = io.BytesIO()
    torch.save(router, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASTS: dict[str, Callable[[Router], Any]] = {
    "bf16": lambda r: r.to(torch.bfloat16),
    "half": lambda r: r.half(),
    "device and dtype": lambda r: r.to("cpu", torch.float16),
    "like": lambda r: r.to(torch.zeros(1, dtype=torch.bfloat16)),
    "inside a model": lambda r: torch.nn.Sequential(r).bfloat16()[0],
    "double": lambda r: r.double(),
    "there and back": lambda r: r.bfloat16().float().half().double(),
    "deepcopy": lambda r: copy.deepcopy(r.half()),
    "save": lambda r: saved_and_loaded(r.half()),
    "share_memory": lambda r: r.bfloat16().share_memory(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_leaves_the_bias_as_it_is(cast: Callable[[Router], Router]) -> None:
    bias = cast(biased()).expert_bias
    assert bias is not None and bias.dtype == torch.float32 and torch.equal(bias, BIAS)


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_bias_is_fp32(assign: bool) -> None:
    router = biased().bfloat16()
    state = biased().state_dict()
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS)
    state["expert_bias"] = BIAS.bfloat16()
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, BIAS.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_from_the_meta_device(dtype: torch.dtype) -> None:
    router = Router(16, 8, 2, score="sigmoid", device="meta").to(dtype)
    assert router.expert_bias is not None
    assert router.expert_bias.is_meta and router.expert_bias.dtype == torch.float32
    router.to_empty(device="cpu").reset_parameters()
    assert torch.equal(router.expert_bias, torch.zeros(8)) and router.weight.dtype == dtype
    router.load_state_dict(biased().state_dict())
    assert torch.equal(router.expert_bias, BIAS) and biased().bfloat16().to("meta").expert_bias.is_meta


def test_a_step_by_integers_and_floating_point_in_inference_mode_too() -> None:
    loads = torch.tensor([9, 1, 0, 6, 4, 4, 4, 4])
    signs = torch.tensor([-1.0, 1, 1, -1, 0, 0, 0, 0])
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64):
        router = biased().half()
        with torch.inference_mode():
            router.update_bias(loads.to(dtype))
        assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS + 1e-3 * signs)


def test_the_mean_load_is_exact() -> None:
    """2**24 pairs and more an expert, of which fp32 knows every second: the odd one out moves, and the others too."""
    load = torch.full((8,), 2**24)
    assert not updated_bias(BIAS, load, 1e-3).sub(BIAS).any()
    load[3] += 1
    assert updated_bias(torch.zeros(8), load, 1.0).tolist() == [1, 1, 1, -1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (torch.ones(1), ValueError),
        (torch.ones(4, 8), ValueError),
        (torch.ones(9), ValueError),
        (torch.tensor(3), ValueError),
        (torch.ones(8, dtype=torch.bool), TypeError),
        (torch.ones(8, dtype=torch.complex64), TypeError),
        (torch.ones(8, device="meta"), ValueError),
        ([1] * 8, TypeError),
        (np.ones(8), TypeError),
    ],
)
def test_loads_that_are_refused(load: Any, error: type[Exception]) -> None:
    router = biased()
    for each in (router, Router(16, 8, 2, score="sigmoid")):  # of which one has no rate
        refuses(lambda: each.update_bias(load), "load", error)  # noqa: B023
    assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS)


def test_a_checkpoint_that_is_assigned_stays_as_it_is() -> None:
    state = {"weight": torch.randn(8, 16).bfloat16(), "expert_bias": torch.randn(8).bfloat16()}
    router = Router(16, 8, 2, score="sigmoid", device="meta")
    router.load_state_dict(state, assign=True)
    assert state["expert_bias"].dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, state["expert_bias"].float())
    given = torch.randn(8).bfloat16()
    torch.func.functional_call(biased(), {"expert_bias": given}, torch.randn(3, 16))
    assert given.dtype == torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_bias_that_is_assigned_in_another_dtype_moves(dtype: torch.dtype, compiled: bool) -> None:
    router, given, load = biased(), BIAS.to(dtype), torch.arange(8)
    router.expert_bias = given
    step = torch.compile(router.update_bias, backend="eager") if compiled else router.update_bias
    with torch.inference_mode(not compiled):
        step(load)
    step(load)
    expected = updated_bias(updated_bias(given.float(), load, 1e-3), load, 1e-3)
    assert torch.equal(router.expert_bias, expected) and torch.equal(given, BIAS.to(dtype))


def test_a_bias_of_functional_call_is_the_same_where_a_checkpoint_routes_again() -> None:
    x, given = torch.randn(3, 16, requires_grad=True), BIAS.bfloat16()

    router = biased()

    def scores(x: Tensor) -> Tensor:
        return torch.func.functional_call(router, {"expert_bias": given}, x).scores

    checkpoint(scores, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("choose", ["top_k", "capacity", "token_rounding"])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "top_groups": 2}], ids=["plain", "groups"])
def test_an_infinite_bias_switches_an_expert_off(choose: str, groups: dict[str, int]) -> None:
    """And no token is broken by it."""
    options: dict[str, Any] = {"capacity_factor": 100.0} if choose == "capacity" else {}
    router = Router(16, 8, 2, score="sigmoid", choose=choose, **options, **groups)
    assert router.expert_bias is not None
    router.expert_bias[7] = -torch.inf
    load = router(torch.randn(512, 16)).load
    assert load[7] == 0 and (load[: 6 if groups else 7] > 0).all()  # 7 takes 6, its group's other, with it


# --- A checkpoint that routes again: by the bias of the first forward pass, or an error ----------------------------------


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
