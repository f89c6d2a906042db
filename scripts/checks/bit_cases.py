"""Layers of fixed seeds, for `scripts.checks.same_bits`: run through the public ``moe_mlp`` of whichever package is given.

Nothing of blazeproto is imported here. Inputs are drawn on the CPU and then moved, so that every process has the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = ("swiglu", "geglu", "relu", "silu", "gelu")  # those that both packages have
GATED = ("swiglu", "geglu")
POLICIES = ("minimal", "paper", "recompute")
ROUTINGS = ("fixed", "sentinels", "varying")
TAILS = ((300, 136, 72, 7, 3), (3500, 72, 40, 7, 3))  # (T, d, n, E, K)
Y_OVER_ACT = (2048, 256, 256, 16, 4)
Y_IN_SLICES = (16384, 4096, 256, 8, 4)  # of 2048 columns
LARGE = ((4096, 512, 2048, 4, 1), (4096, 1536, 512, 40, 8))
LEAVES = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias")
Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Case:
    """One call of ``moe_mlp`` and its backward."""

    shape: Shape
    activation: str = "swiglu"
    bias: bool = False
    routing: str = "fixed"
    int64_ids: bool = False
    given_dispatch: bool = False  # built beforehand by ``build_dispatch``; only where its kernels run
    f32_weight_grads: bool = False
    needs: tuple[str, ...] = LEAVES  # what gradients are asked for; none: no backward, under no_grad
    twice: bool = False  # the graph is kept for a second backward, whose gradients count too
    options: dict[str, Any] = field(default_factory=dict)  # of moe_mlp: save, combine, workspace_bytes

    @property
    def name(self) -> str:
        parts = ["T{} d{} n{} E{} K{}".format(*self.shape), self.activation, "bias" * self.bias]
        parts.append(self.routing * (self.routing != "fixed"))
        flags = ("int64_ids", "given_dispatch", "f32_weight_grads", "twice")
        parts += [flag for flag in flags if getattr(self, flag)]
        if self.needs != LEAVES:
            parts.append("needs " + ("+".join(self.needs) or "nothing"))
        parts += [f"{name}={value}" for name, value in self.options.items()]
        return "layer: " + ", ".join(filter(None, parts))

    @property
    def fused(self) -> bool:
        return self.options.get("combine") == "fused"


def layer_cases() -> Iterator[Case]:
    for shape in TAILS:
        for activation in ACTIVATIONS:
            for bias in (False, True):
                for save in POLICIES:
                    for routing in ROUTINGS:
                        yield Case(shape, activation, bias, routing, options={"save": save, "combine": "gather"})
    small, longer = TAILS
    for shape, workspace in ((small, 1 << 17), (longer, 1 << 20)):  # four chunks each
        for save in POLICIES:
            chunked = Case(shape, options={"save": save, "workspace_bytes": workspace})
            yield chunked
            yield replace(chunked, bias=True, activation="gelu")
            yield replace(chunked, routing="sentinels", int64_ids=True)
            yield replace(chunked, f32_weight_grads=True, bias=True)
            yield replace(chunked, needs=("x", "down_bias"), bias=True)
    yield Case(longer, options={"workspace_bytes": 1 << 13})  # eight tokens a chunk
    for save in POLICIES:
        options = {"save": save}
        yield Case(small, bias=True, f32_weight_grads=True, options=options)
        yield Case(small, bias=True, routing="sentinels", int64_ids=True, options=options)
        yield Case(small, routing="varying", int64_ids=True, options=options)
        yield Case(small, bias=True, twice=True, options=options)
        for needs in (("x",), ("up_proj", "up_bias"), ("down_proj",), ("down_bias",), ("scores",), ()):
            yield Case(small, bias=True, needs=needs, options=options)
        for routing in ROUTINGS:
            yield Case(small, routing=routing, given_dispatch=True, options=options)
        yield Case(Y_OVER_ACT, options=options)
        yield Case(Y_OVER_ACT, bias=True, twice=True, options=options)
    for shape in LARGE:
        yield Case(shape)
        yield Case(shape, "geglu", bias=True, f32_weight_grads=True)
    yield Case(LARGE[1], options={"workspace_bytes": 1 << 25})
    yield Case(Y_IN_SLICES)
    yield Case(Y_IN_SLICES, "relu", bias=True, routing="sentinels")
    for shape in (small, (1024, 256, 128, 16, 4)):
        for bias in (False, True):
            for routing in ROUTINGS:
                yield Case(shape, bias=bias, routing=routing, options={"combine": "fused"})
    yield Case(small, options={"combine": "fused", "workspace_bytes": 1 << 17})
    yield Case((1, 8, 8, 1, 1))
    yield Case((0, 72, 40, 4, 2), bias=True)


# --- Inputs --------------------------------------------------------------------------------------------------------------


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def normal(generator: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
    """bf16, at ``scale``; drawn a piece at a time, so that there is no fp32 copy of a large one."""
    out = torch.empty(size, dtype=torch.bfloat16)
    for part in out.flatten().split(1 << 22):
        part.copy_(torch.randn(part.shape, generator=generator).mul_(scale))
    return out


def choose(shape: Shape, routing: str, generator: torch.Generator) -> dict[str, Tensor]:
    """``experts``, (T, K) or (P,), int32; with "varying" ``pair_tokens`` and ``token_offsets`` too."""
    tokens, _, _, num_experts, top_k = shape
    experts = torch.rand(tokens, num_experts, generator=generator).topk(top_k, dim=1).indices.int()
    if routing == "fixed":
        return {"experts": experts}
    draw = torch.rand(experts.shape, generator=generator)
    elsewhere = torch.where(draw < 0.1, -1, num_experts + 2).int()
    experts = torch.where(draw < 0.2, elsewhere, experts)
    if routing == "sentinels":
        return {"experts": experts}
    here = draw >= 0.2  # each token's own number of experts; the pairs left over carry an id outside
    used = int(here.sum())
    pair_experts, pair_tokens = torch.full((experts.numel(),), -1).int(), torch.zeros(experts.numel()).int()
    pair_experts[:used] = experts[here]
    pair_tokens[:used] = here.nonzero()[:, 0].int()
    token_offsets = torch.zeros(tokens + 1, dtype=torch.int32)
    token_offsets[1:] = here.sum(dim=1).cumsum(0)
    return {"experts": pair_experts, "pair_tokens": pair_tokens, "token_offsets": token_offsets}


def inputs_of(case: Case) -> dict[str, Tensor]:
    """By name, on the CPU: `LEAVES`, ``d_out``, and what `choose` returns."""
    tokens, d, n, experts, top_k = case.shape
    generator, width = generator_of(case.name), n * (2 if case.activation in GATED else 1)
    made = {
        "x": normal(generator, tokens, d),
        "up_proj": normal(generator, experts, width, d, scale=d**-0.5),
        "down_proj": normal(generator, experts, d, n, scale=n**-0.5),
        "d_out": normal(generator, tokens, d),
    }
    scores = torch.rand(tokens, top_k, generator=generator) + 0.05
    made["scores"] = scores.flatten() if case.routing == "varying" else scores
    if case.bias:
        made |= {"up_bias": normal(generator, experts, width), "down_bias": normal(generator, experts, d)}
    made |= choose(case.shape, case.routing, generator)
    if case.int64_ids:
        made["experts"] = made["experts"].long()
    return made


# --- One call ------------------------------------------------------------------------------------------------------------


def run_layer(package: ModuleType, case: Case, backend: str, device: str) -> dict[str, Tensor]:
    """``out`` and the gradients asked for, by name, of one forward and backward of ``package.moe_mlp``."""
    given = {name: tensor.to(device) for name, tensor in inputs_of(case).items()}
    if case.f32_weight_grads:  # gradients have their weights' dtype
        given |= {name: given[name].float() for name in ("up_proj", "down_proj")}
    needs = [name for name in LEAVES if name in case.needs and name in given]
    for name in needs:
        given[name].requires_grad_()
    options: dict[str, Any] = {"activation": case.activation, "backend": backend, **case.options}
    if case.bias:
        options |= {"up_bias": given["up_bias"], "down_bias": given["down_bias"]}
    experts: Tensor | None = given["experts"]
    varying: dict[str, Any] = {name: given[name] for name in ("pair_tokens", "token_offsets") if name in given}
    num_experts = case.shape[3]
    if case.given_dispatch:
        build = package.dispatch.build_dispatch_varying if varying else package.dispatch.build_dispatch
        options["dispatch"], experts = build(experts, *varying.values(), num_experts), None
    else:
        options |= varying
    arguments = (given["x"], given["up_proj"], given["down_proj"], given["scores"], experts)
    with torch.set_grad_enabled(bool(needs)), torch.autocast(device, torch.bfloat16, enabled=case.f32_weight_grads):
        out = package.moe_mlp(*arguments, num_experts=num_experts, **options)
    made = {"out": out.detach()}
    for time in (1, 2) if case.twice else (1,):
        if needs:
            keep = case.twice and time == 1
            gradients = torch.autograd.grad(out, [given[name] for name in needs], given["d_out"], retain_graph=keep)
            suffix = " again" if time == 2 else ""
            made |= {f"d_{name}{suffix}": gradient for name, gradient in zip(needs, gradients, strict=True)}
    return made


# --- The layer as a module -----------------------------------------------------------------------------------------------

ROUTERS = ("top_k", "topk_softmax", "aux_free", "token_rounding", "expert_choice")


def run_module(package: ModuleType, router: str, backend: str, device: str) -> dict[str, Tensor]:
    """Output, loss and all gradients of ``package.MoE`` with a shared expert, in bf16, with the router's own losses."""
    tokens, d, n, experts, top_k = 512, 136, 72, 8, 3
    generator = generator_of(router)
    sizes: dict[str, Any] = {"d_shared": 64, "bias": True, "dtype": torch.bfloat16, "backend": backend}
    layer = package.MoE(d, n, experts, top_k, router=router, **sizes)
    for _, parameter in sorted(layer.named_parameters()):
        parameter.data.copy_(normal(generator, *parameter.shape, scale=parameter.shape[-1] ** -0.5))
    x, d_out = normal(generator, tokens, d), normal(generator, tokens, d)
    layer, x, d_out = layer.to(device), x.to(device).requires_grad_(), d_out.to(device)
    out, stats = layer(x)
    loss = (out.float() * d_out.float()).sum() + stats.aux_loss
    parameters = dict(sorted(layer.named_parameters()))
    gradients = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True)
    named = zip(["x", *parameters], gradients, strict=True)
    made = {"out": out.detach(), "loss": loss.detach(), "load": stats.load}
    return made | {f"d_{name}": gradient for name, gradient in named if gradient is not None}
