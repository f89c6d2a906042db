"""Calls of the package's public functions, with inputs that a name or a seed decides.

`scripts.checks.compare` runs them in processes of two checkouts, `scripts.checks.sanitize_target` under compute-sanitizer.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto import MoE, router
from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.gemm import Sizes
from blazeproto.lab.calls import LAYER
from blazeproto.lab.oracle import make_case, run_kernels
from scripts.bench import lora, peers
from scripts.bench import router as router_bench
from scripts.bench.common import route
from scripts.bench.models.programs import step
from scripts.bench.peers import layers as programs
from scripts.bench.peers import modules
from scripts.checks.layers import Layer, draw_experts, draw_fp8, draw_products, make_layer, run_layer

Outputs = dict[str, Tensor]
Options = dict[str, Any]

SMALL, SQUARE = Sizes(300, 136, 72, 7, 3), Sizes(2048, 256, 256, 16, 4)  # of the second, y may lie over act
LARGE = (Sizes(4096, 512, 2048, 4, 1), Sizes(4096, 1536, 512, 40, 8))
IN_SLICES = Sizes(16384, 4096, 256, 8, 4)  # y is summed in slices of 2048 columns
SCANNED = Sizes(20_000, 8, 8, 130, 8)  # 79 chunks: of so many the dispatch's table is scanned
FEW = (Sizes(0, 72, 40, 4, 2), Sizes(1, 8, 8, 1, 1), Sizes(9, 16, 24, 64, 2))  # none, one, most experts empty
ROUTINGS: dict[str, Callable[[Sizes], Options]] = {
    "fixed": lambda sizes: {},
    "sentinels": lambda sizes: {"sentinels": 0.2},
    "varying": lambda sizes: {"sentinels": 0.2, "varying": True},
    "capacity": lambda sizes: {"row_capacity": sizes.rows * 2 // 3},
}
METHODS = ("tiled", "dense", "sort")
SCORES = ("softmax_topk", "topk_softmax", "sigmoid")
WAYS = ("nr_f", "sr_f", "nr_s", "balance_f", "up", "down", "expert_choice", "slot", "token", "score")
NO_OR_YES = (False, True)
DRAWN = {draw_products: 150, draw_experts: 400, draw_fp8: 40}  # layers


@dataclass(frozen=True)
class Case:
    """One thing that both checkouts compute."""

    name: str
    run: Callable[[], Outputs]
    tokens: int = 0  # of a random layer
    finite: bool = True  # what is drawn is finite, and so are the outputs


class Draw:
    """Random tensors of a name: the same in every process."""

    def __init__(self, name: str, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    @torch.no_grad()
    def fill(self, layer: Any) -> Any:
        """The layer with drawn parameters, each at 1 / sqrt(its last dimension)."""
        for _, parameter in sorted(layer.named_parameters()):
            parameter.copy_(self.normal(*parameter.shape) * parameter.shape[-1] ** -0.5)
        return layer


# --- Products, moe_mlp and MoE -------------------------------------------------------------------------------------------


def run_products(layer: Layer, seed: int, device: str) -> Outputs:
    """Every output of the products that a layer calls, each made of what those before it made.

    Left out are outputs that are added in an order that varies, and rows that no pair has.
    """
    case = make_case(layer.sizes, **layer.inputs, seed=seed, device=device)
    varying = {name for call in LAYER if not call.entry.fixed_order for name in call.made}
    return {name: case.in_use(name, made) for name, made in run_kernels(case).items() if name not in varying}


def run_experts(layer: Layer, seed: int, device: str) -> Outputs:
    """``out`` of ``moe_mlp`` and the gradients."""
    backend = layer.options.get("backend", "hopper") if device == "cuda" else "torch"
    return run_layer(layer, *make_layer(layer, seed, device), backend=backend)


def layer_cases(device: str) -> Iterator[Case]:
    """Random layers, and some large ones: products one by one, and ``moe_mlp``."""
    large = [Layer(sizes) for sizes in (*LARGE, SQUARE)]
    products, experts, fp8 = ([draw(seed) for seed in range(count)] for draw, count in DRAWN.items())
    experts += [*fp8, *large, Layer(IN_SLICES)]
    for kind, run, layers in (("product", run_products, products + large), ("layer", run_experts, experts)):
        for seed, layer in enumerate(layers):
            if "fused" not in layer.options.get("combine", "gather"):  # whose outputs vary from run to run
                yield Case(f"{kind} {seed}: {layer}", partial(run, layer, seed, device), layer.sizes.T)


def run_module(name: str, kind: str, options: Options, device: str) -> Outputs:
    """Output, losses and all gradients of ``MoE`` with biases and a shared expert, in bf16."""
    tokens, d, n, experts, top_k = 512, 136, 72, 8, 3
    draw, backend = Draw(name, device), "hopper" if device == "cuda" else "torch"
    sizes: Options = {"d_shared": 64, "bias": True, "dtype": torch.bfloat16, "device": device, "backend": backend}
    torch.manual_seed(0)  # of what a router draws itself
    layer = draw.fill(MoE(d, n, experts, top_k, router=kind, **sizes, **options))
    x, d_out = draw.normal(tokens, d).bfloat16().requires_grad_(), draw.normal(tokens, d)
    ids = {"token_ids": (draw.uniform(tokens) * 2**20).long()} if kind == "hash" else {}
    out, stats = layer(x, **ids)
    loss = (out.float() * d_out).sum() + stats.aux_loss
    leaves = {"x": x, **dict(sorted(layer.named_parameters()))}
    gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    named = {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
    return {"out": out.detach(), "load": stats.load, **stats.aux_losses, **named}


MODULE_OPTIONS: tuple[Options, ...] = (
    {"save": "paper", "activation": "relu"},
    {"save": "recompute", "activation": "geglu"},
    {"workspace_bytes": 1 << 18},
    {"row_capacity": 1000},
    {"aux_loss": 0.01, "z_loss": 1e-3},
)


# --- Dispatch and router -------------------------------------------------------------------------------------------------


def run_dispatch(sizes: Sizes, routing: str, method: Any, device: str) -> Outputs:
    """The index arrays, of int32 and of int64 ids."""
    drawn = make_case(sizes._replace(d=8, n=8), **ROUTINGS[routing](sizes), device=device).dispatch
    made, capacity = Outputs(), ROUTINGS[routing](sizes).get("row_capacity")
    for dtype in (torch.int32, torch.int64):
        ids = drawn.token_expert_indices.to(dtype)
        if drawn.pair_tokens is None:
            lists = build_dispatch(ids.view(sizes.T, sizes.K), sizes.E, row_capacity=capacity, method=method)
        else:
            lists = build_dispatch_varying(ids, drawn.pair_tokens, drawn.token_offsets, sizes.E, method=method)
        made |= {f"{key} {dtype}": array for key, array in lists.arrays.items() if array is not None}
    return made


def run_router(name: str, experts: int, top_k: int, finite: bool, device: str) -> Outputs:
    """Every operator of the router, on logits of 777 tokens; without ``finite`` some are NaN or infinite."""
    draw, made, tokens = Draw(name, device), Outputs(), 777
    logits = draw.normal(tokens, experts)
    logits[5, 1] = logits[5, 0]  # a tie
    if not finite:
        logits[3, 2], logits[70, 0], logits[71] = math.nan, math.inf, -math.inf
    d_scores, d_loss = draw.uniform(tokens, top_k), draw.uniform(1)[0]
    bias, draws = draw.normal(experts), draw.uniform(experts)
    _, chosen = router.topk_route(logits, top_k, score="sigmoid")
    pair_experts, _, token_offsets, _ = router.choose_pairs(logits.sigmoid(), chosen, "score", 90, tokens * top_k)
    pairs, d_pairs = (logits, pair_experts, token_offsets), d_scores.flatten()[: len(pair_experts)]

    def add(label: str, **outputs: Tensor) -> None:
        made.update({f"{label} {output}": tensor for output, tensor in outputs.items()})

    for score, renormalize, scale in itertools.product(SCORES, (None, True, False), (1.0, 2.5)):
        options: Options = {"score": score, "renormalize": renormalize, "scale": scale}
        label = f"{score} {renormalize} {scale}"
        for values, added in itertools.product((logits, logits.bfloat16()), (None, bias)[: 1 + (score == "sigmoid")]):
            scores, ids = router.topk_route(values, top_k, bias=added, **options)
            d_logits = router.topk_route_backward(values, ids, d_scores, **options)
            biased = "" if added is None else " bias"
            add(f"top-k {label} {values.dtype}{biased}", scores=scores, experts=ids, d_logits=d_logits)
        d_logits = router.score_pairs_backward(*pairs, d_pairs, **options)
        add(f"pairs {label}", scores=router.score_pairs(*pairs, **options), d_logits=d_logits)
    for score, balance, z in itertools.product(SCORES, NO_OR_YES, NO_OR_YES):
        options = {"score": score, "balance": balance, "z": z}
        load, balance_loss, z_loss = router.routing_losses(logits, chosen, **options)
        d_logits = router.routing_losses_backward(logits, load, d_loss, d_loss, top_k, **options)
        add(f"losses {score} {balance} {z}", load=load, balance=balance_loss, z=z_loss, d_logits=d_logits)
    for by, room in itertools.product(WAYS, (tokens * top_k // 2, tokens * top_k + 128 * experts)):
        size = 128 if by in WAYS[:6] else max(1, tokens * top_k // experts)
        listed = router.choose_pairs(logits.sigmoid(), chosen, by, size, room, draws=draws)
        add(f"choice {by} {room}", **dict(zip(("experts", "tokens", "offsets", "load"), listed, strict=True)))
    made["hash"] = router.hash_route((draw.uniform(tokens) * 2**40).long(), experts, top_k, seed=7)
    made["finish"] = finished = router.finish_logits(logits)
    return made | {f"split {parts}": router.split_gradient(bias * logits, finished, parts) for parts in (2, 3)}


def all_cases(device: str) -> Iterator[Case]:
    """Every case: layers, modules, dispatches and routers."""
    yield from layer_cases(device)
    of_modules = [*zip(router.ROUTERS, itertools.repeat({})), *zip(itertools.repeat("top_k"), MODULE_OPTIONS)]
    for kind, options in of_modules:
        name = f"module: {', '.join([kind, *(f'{key}={value}' for key, value in options.items())])}"
        yield Case(name, partial(run_module, name, kind, options, device))
    for sizes, routing, method in itertools.product((SMALL, SCANNED, *FEW), ROUTINGS, METHODS):
        name = f"dispatch: {Layer(sizes)}, {routing}, {method}"
        yield Case(name, partial(run_dispatch, sizes, routing, method, device), sizes.T)
    for (experts, top_k), finite in itertools.product(((7, 3), (128, 8), (520, 16)), (True, False)):
        name = f"router: E{experts} K{top_k}{', NaN and inf' * (not finite)}"
        yield Case(name, partial(run_router, name, experts, top_k, finite, device), finite=finite)


# --- Steps that are timed ------------------------------------------------------------------------------------------------


def step_of(kind: str, sizes: Sizes, device: str) -> Callable[[], Any]:
    """A forward and a backward of ``MoE`` ("module"), of experts whose popularity falls as 1 / rank ("zipf"), of a router with an
    fp32 weight ("router"), or of experts with factors ("lora"), as the benchmarks have them."""
    if kind == "router":
        return partial(router_bench.both, *router_bench.make_case(sizes, torch.float32, device))
    inputs = peers.make_inputs(sizes, device=device)
    if kind == "zipf":
        choice = route(sizes, "zipf", device, torch.Generator(device).manual_seed(0), exponent=1.0)
        return programs.ours(sizes, replace(inputs, experts=choice)).forward_backward
    if kind == "module":
        return partial(step, modules.ours(sizes, inputs))  # it gives its gradients back: a peak counts them
    factors = (lora.factors_of(weight, lora.RANK) for weight in (inputs.gate_up_proj, inputs.down_proj))
    return lora.ours(sizes, inputs, *factors).forward_backward
