"""Whole layers of `scripts.checks.compare`: ``moe_mlp`` and ``MoE`` of whichever package is given, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.checks.compare_cases import (
    FEW,
    IN_SLICES,
    LARGE,
    LONGER,
    POLICIES,
    RANK,
    ROUTINGS,
    SMALL,
    SQUARE,
    Case,
    Draw,
    Options,
    Outputs,
    Shape,
    halves,
)

LEAVES = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b")
Step = Callable[[], tuple[Tensor, Tensor]]  # a forward and a backward: the output, the gradient of x


# --- moe_mlp -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One call of ``moe_mlp`` and its backward."""

    shape: Shape
    activation: str = "swiglu"
    bias: bool = False
    routing: str = "fixed"
    rank: int = 0  # of factors beside frozen weights; 0 for none
    transposed: bool = False  # weights that lie as gpt-oss's
    int64_ids: bool = False
    given_dispatch: bool = False
    f32_weights: bool = False  # and so their gradients
    needs: tuple[str, ...] = LEAVES  # what gradients are asked for; none: no backward, under no_grad
    twice: bool = False  # the graph is kept for a second backward, whose gradients count too
    options: Options = field(default_factory=dict)  # of moe_mlp

    @property
    def name(self) -> str:
        parts = [str(self.shape), self.activation, self.routing]
        flags = ("bias", "rank", "transposed", "int64_ids", "given_dispatch", "f32_weights", "twice")
        parts += [flag for flag in flags if getattr(self, flag)]
        parts += ["needs " + ("+".join(self.needs) or "nothing")] if self.needs != LEAVES else []
        return "layer: " + ", ".join(parts + [f"{name}={value}" for name, value in self.options.items()])


def layers(activations: tuple[str, ...]) -> Iterator[Layer]:
    crossed = itertools.product((SMALL, LONGER), activations, (False, True), POLICIES, ROUTINGS[:3])
    for shape, activation, bias, save, routing in crossed:
        yield Layer(shape, activation, bias, routing, options={"save": save})
    for (shape, workspace), save in itertools.product(((SMALL, 1 << 17), (LONGER, 1 << 20)), POLICIES):  # four chunks
        chunked = Layer(shape, options={"save": save, "workspace_bytes": workspace})
        yield chunked
        yield replace(chunked, bias=True, activation="gelu")
        yield replace(chunked, routing="sentinels", int64_ids=True)
        yield replace(chunked, f32_weights=True, bias=True)
        yield replace(chunked, needs=("x", "down_bias"), bias=True)
        yield replace(chunked, routing="capacity", bias=True)
        yield replace(chunked, transposed=True, activation="alternating(clamped_swiglu)", bias=True)
    yield Layer(LONGER, options={"workspace_bytes": 1 << 13})  # eight tokens a chunk
    for save in POLICIES:
        biased = Layer(SMALL, bias=True, options={"save": save})
        yield replace(biased, f32_weights=True)
        yield replace(biased, twice=True)
        yield replace(biased, routing="varying", int64_ids=True)
        for needs in (("x",), ("up_proj", "up_bias"), ("down_proj",), ("down_bias",), ("scores",), ()):
            yield replace(biased, needs=needs)
        for routing in ROUTINGS:
            yield replace(biased, routing=routing, transposed=True, activation="alternating(clamped_swiglu)")
            if routing != "capacity":  # of which a dispatch that is given says itself
                yield replace(biased, routing=routing, given_dispatch=True)
        yield replace(biased, routing="capacity")
        yield replace(biased, shape=SQUARE, bias=False)
        yield replace(biased, shape=SQUARE, twice=True)
    for bias, routing in itertools.product((False, True), ROUTINGS[:2]):
        for activation in ("swiglu", "relu"):
            yield Layer(SMALL, activation, bias, routing, rank=RANK)
        yield Layer(LONGER, "alternating(clamped_swiglu)", bias, routing, rank=72, transposed=True)
    yield Layer(SMALL, rank=RANK, f32_weights=True)
    yield Layer(SMALL, rank=RANK, needs=("up_a", "down_b"))
    yield Layer(SMALL, rank=RANK, given_dispatch=True)
    for shape in LARGE:
        yield Layer(shape)
        yield Layer(shape, "geglu", bias=True, f32_weights=True)
    yield Layer(LARGE[1], options={"workspace_bytes": 1 << 25})
    yield Layer(LARGE[1], rank=RANK)
    yield Layer(IN_SLICES)
    yield Layer(IN_SLICES, "relu", bias=True, routing="sentinels")
    for combine in ("fused", "fused_both"):
        fused: Options = {"combine": combine}
        for shape, bias, routing in itertools.product(
            (SMALL, Shape(1024, 256, 128, 16, 4)), (False, True), ROUTINGS[:3]
        ):
            yield Layer(shape, bias=bias, routing=routing, options=fused)
        yield Layer(SMALL, options=fused | {"workspace_bytes": 1 << 17})
    for shape in FEW:
        yield Layer(shape, bias=True)


def layer_cases(package: ModuleType, device: str) -> Iterator[Case]:
    for layer in layers(tuple(package.activations.ACTIVATIONS)):
        varies = layer.options.get("combine", "gather") != "gather" and device == "cuda"
        yield Case(layer.name, partial(run_layer, package, device, layer), varies)
    routers: list[tuple[str, Options]] = [(name, {}) for name in package.router.ROUTERS]
    routers += [("top_k", options) for options in MODULE_OPTIONS]
    for router, options in routers:
        name = f"module: {router}{''.join(f', {key}={value}' for key, value in options.items())}"
        yield Case(name, partial(run_module, package, device, name, router, options))


def inputs_of(package: ModuleType, layer: Layer, draw: Draw) -> dict[str, Tensor]:
    """By name: those of `LEAVES` that the layer has, ``d_out``, and what `Draw.experts` returns."""
    (tokens, d, n, experts, top_k), width = layer.shape, layer.shape.n * halves(package, layer.activation)
    made = {
        "x": draw.normal(tokens, d),
        "up_proj": draw.normal(experts, width, d, scale=d**-0.5),
        "down_proj": draw.normal(experts, d, n, scale=n**-0.5),
        "d_out": draw.normal(tokens, d),
    }
    scores = draw.uniform(tokens, top_k) + 0.05
    made["scores"] = scores.flatten() if layer.routing == "varying" else scores
    if layer.bias:
        made |= {"up_bias": draw.normal(experts, width), "down_bias": draw.normal(experts, d)}
    if layer.rank:
        for side, (width_out, width_in) in {"up": (width, d), "down": (d, n)}.items():
            made[f"{side}_a"] = draw.normal(experts, layer.rank, width_in, scale=width_in**-0.5)
            made[f"{side}_b"] = draw.normal(experts, width_out, layer.rank, scale=0.5 * layer.rank**-0.5)
    if layer.transposed:
        made |= {name: made[name].mT.contiguous().mT for name in ("up_proj", "down_proj")}
    if layer.f32_weights:
        weights = [name for name in made if name.endswith(("_a", "_b"))] if layer.rank else ["up_proj", "down_proj"]
        made |= {name: made[name].float() for name in weights}
    return made | draw.experts(layer.shape, layer.routing)


def low_rank_factors(package: ModuleType, given: dict[str, Tensor]) -> Options:
    """The options of ``moe_mlp`` that hand it the factors among the inputs."""
    return {
        f"{side}_factors": package.autograd.LowRank(given[f"{side}_a"], given[f"{side}_b"])
        for side in ("up", "down")
        if f"{side}_a" in given
    }


def run_layer(package: ModuleType, device: str, layer: Layer) -> Outputs:
    """``out`` and the gradients asked for, by name, of one forward and backward."""
    given = inputs_of(package, layer, Draw(layer.name, device))
    frozen = ("up_proj", "down_proj", "up_bias", "down_bias") if layer.rank else ()
    needs = [name for name in LEAVES if name in layer.needs and name in given and name not in frozen]
    for name in needs:
        given[name].requires_grad_()
    options: Options = low_rank_factors(package, given)
    options |= {"activation": layer.activation, "backend": "hopper" if device == "cuda" else "torch", **layer.options}
    options |= {name: given[name] for name in ("up_bias", "down_bias") if name in given}
    experts: Tensor | None = given["experts"].long() if layer.int64_ids else given["experts"]
    varying: dict[str, Any] = {name: given[name] for name in ("pair_tokens", "token_offsets") if name in given}
    if layer.routing == "capacity":
        options["row_capacity"] = layer.shape.T * layer.shape.K * 2 // 3
    if layer.given_dispatch:
        build = package.dispatch.build_dispatch_varying if varying else package.dispatch.build_dispatch
        options["dispatch"], experts = build(experts, *varying.values(), layer.shape.E), None
    else:
        options |= varying
    arguments = (given["x"], given["up_proj"], given["down_proj"], given["scores"], experts)
    with torch.set_grad_enabled(bool(needs)):
        out = package.moe_mlp(*arguments, num_experts=layer.shape.E, **options)
    made: Outputs = {"out": out.detach()}
    for suffix in (" kept", "") if layer.twice else ("",):
        if needs:
            leaves = [given[name] for name in needs]
            gradients = torch.autograd.grad(out, leaves, given["d_out"], retain_graph=bool(suffix))
            made |= {f"d_{name}{suffix}": gradient for name, gradient in zip(needs, gradients, strict=True)}
    return made


# --- MoE -----------------------------------------------------------------------------------------------------------------

MODULE_OPTIONS: tuple[Options, ...] = (
    {"save": "paper", "activation": "relu"},
    {"save": "recompute", "activation": "geglu"},
    {"workspace_bytes": 1 << 18},
    {"row_capacity": 1000},
    {"aux_loss": 0.01, "z_loss": 1e-3},
)


def run_module(package: ModuleType, device: str, name: str, router: str, options: Options) -> Outputs:
    """Output, losses and all gradients of ``MoE`` with biases and a shared expert, in bf16."""
    tokens, d, n, experts, top_k = 512, 136, 72, 8, 3
    draw, backend = Draw(name, device), "hopper" if device == "cuda" else "torch"
    sizes: Options = {"d_shared": 64, "bias": True, "dtype": torch.bfloat16, "device": device, "backend": backend}
    torch.manual_seed(0)  # of what a router draws itself
    layer = filled(package.MoE(d, n, experts, top_k, router=router, **sizes, **options), draw)
    x, d_out = draw.normal(tokens, d).requires_grad_(), draw.normal(tokens, d)
    ids = {"token_ids": (draw.uniform(tokens) * 2**20).long()} if router == "hash" else {}
    out, stats = layer(x, **ids)
    loss = (out.float() * d_out.float()).sum() + stats.aux_loss
    parameters = dict(sorted(layer.named_parameters()))
    gradients = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True)
    made: Outputs = {"out": out.detach(), "load": stats.load}
    made |= {name: value.detach() for name, value in stats.aux_losses.items()}
    named = zip(["x", *parameters], gradients, strict=True)
    return made | {f"d_{name}": gradient for name, gradient in named if gradient is not None}


@torch.no_grad()
def filled(layer: Any, draw: Draw) -> Any:
    """The layer with drawn parameters, each at 1 / sqrt(its last dimension)."""
    for _, parameter in sorted(layer.named_parameters()):
        for part in parameter.view(-1, parameter.shape[-1]).split(1 << 16):
            part.copy_(draw.normal(*part.shape, scale=parameter.shape[-1] ** -0.5))
    return layer


# --- What is timed -------------------------------------------------------------------------------------------------------


def module_step(package: ModuleType, device: str, shape: Shape) -> Step:
    """A forward and a backward of ``MoE`` as `scripts.bench.module` has it: bf16, topk_softmax, auxiliary loss 0.01."""
    draw, backend = Draw(str(shape), device), "hopper" if device == "cuda" else "torch"
    options: Options = {"router": "topk_softmax", "aux_loss": 0.01, "dtype": torch.bfloat16}
    layer = filled(package.MoE(*shape[1:], backend=backend, device=device, **options), draw)
    x, d_out = (draw.normal(shape.T, shape.d) for _ in range(2))
    one = torch.ones((), device=device)

    def step() -> tuple[Tensor, Tensor]:
        out, stats = layer(x)
        torch.autograd.backward((out, stats.aux_loss), (d_out, one))
        dx, x.grad = x.grad, None
        layer.zero_grad(set_to_none=True)
        assert dx is not None
        return out.detach(), dx

    x.requires_grad_()
    return step


def router_step(package: ModuleType, device: str, shape: Shape) -> Step:
    """A forward and a backward of a router as `scripts.bench.router` has it: both losses, dX and dW of an fp32 weight."""
    draw = Draw(str(shape), device)
    options: Options = {"aux_loss": 0.01, "z_loss": 0.001, "device": device, "dtype": torch.float32}
    router = filled(package.router.make_router("topk_softmax", shape.d, shape.E, shape.K, **options), draw)
    x, d_scores = draw.normal(shape.T, shape.d).requires_grad_(), draw.normal(shape.T, shape.K).float()
    one = torch.ones((), device=device)

    def step() -> tuple[Tensor, Tensor]:
        routing = router(x)
        losses = routing.aux_losses.values()
        dx, _ = torch.autograd.grad((routing.scores, *losses), (x, router.weight), (d_scores, *[one] * len(losses)))
        return routing.scores.detach(), dx

    return step


def lora_step(package: ModuleType, device: str, shape: Shape) -> Step:
    """A forward and a backward of experts with factors, as `scripts.bench.lora` has them; x, scores and factors are trained."""
    given = inputs_of(package, Layer(shape, rank=RANK), Draw(str(shape), device))
    leaves = [given[name] for name in LEAVES if name in given and name not in ("up_proj", "down_proj")]
    for leaf in leaves:
        leaf.requires_grad_()
    factors = low_rank_factors(package, given)
    arguments = [given[name] for name in ("x", "up_proj", "down_proj", "scores", "experts")]
    backend = "hopper" if device == "cuda" else "torch"

    def step() -> tuple[Tensor, Tensor]:
        out = package.moe_mlp(*arguments, num_experts=shape.E, backend=backend, **factors)
        dx, *_ = torch.autograd.grad(out, leaves, given["d_out"])
        return out.detach(), dx

    return step
