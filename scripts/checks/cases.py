"""Calls of a package's public functions, with inputs that a name decides.

`scripts.checks.compare` runs them on two checkouts, `scripts.checks.sanitize_target` under compute-sanitizer.

Nothing of blazeproto is imported here: each case calls whichever package is given. The new checkout's registry says, to both
sides, what a product takes (`products_of`). A product gets operands of its own, not what the one before it made, so that a
difference shows where it arises. Outputs are handed in as zeros: rows that no pair has are part of what is compared.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Outputs = dict[str, Tensor | str]  # a text is the refusal that came in an output's place
Options = dict[str, Any]


class Shape(NamedTuple):
    """One layer: T tokens, d model width, n expert width, E experts, K experts a token."""

    T: int
    d: int
    n: int
    E: int
    K: int

    def __str__(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self._asdict().items())


SMALL, LONGER = Shape(300, 136, 72, 7, 3), Shape(3500, 72, 40, 7, 3)
SQUARE = Shape(2048, 256, 256, 16, 4)  # y may lie over act
LARGE = (Shape(4096, 512, 2048, 4, 1), Shape(4096, 1536, 512, 40, 8))
IN_SLICES = Shape(16384, 4096, 256, 8, 4)  # y is summed in slices of 2048 columns
ONE_EXPERT = Shape(40_010, 72, 264, 2, 1)  # with routing "one": several CTAs share an expert's sum
FEW = (Shape(0, 72, 40, 4, 2), Shape(1, 8, 8, 1, 1), Shape(9, 16, 24, 64, 2))  # none, one, most experts empty
ROUTINGS = ("fixed", "sentinels", "varying", "capacity")
POLICIES = ("minimal", "paper", "recompute")
METHODS = ("tiled", "dense", "sort")
SCORES = ("softmax_topk", "topk_softmax", "sigmoid")
WAYS = ("nr_f", "sr_f", "nr_s", "balance_f", "up", "down", "expert_choice", "slot", "token", "score")
LEAVES = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b")
LAYERS = 400  # that are drawn
RANK = 16


@dataclass(frozen=True)
class Case:
    """One thing that both checkouts compute."""

    name: str
    run: Callable[[], Outputs]
    varies: bool = False  # its outputs vary from run to run
    finite: bool = True  # what is drawn is finite, and so are the outputs


# --- Inputs --------------------------------------------------------------------------------------------------------------


class Draw:
    """Random tensors of a name: the same in every process."""

    def __init__(self, name: str, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(size, generator=self.generator, device=self.device) * scale).to(dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    def experts(self, shape: Shape, routing: str) -> dict[str, Tensor]:
        """``experts``, (T, K) or (P,), int32; with "varying" ``pair_tokens`` and ``token_offsets`` too."""
        if routing == "one":
            return {"experts": torch.zeros(shape.T, shape.K, dtype=torch.int32, device=self.device)}
        experts = self.uniform(shape.T, shape.E).topk(shape.K, dim=1).indices.int()
        if routing in ("fixed", "capacity"):
            return {"experts": experts}
        drawn = self.uniform(*experts.shape)
        elsewhere = torch.where(drawn < 0.1, -1, shape.E + 2).int()
        experts = torch.where(drawn < 0.2, elsewhere, experts)
        if routing == "sentinels":
            return {"experts": experts}
        here = drawn >= 0.2  # each token's own number of experts; the pairs left over carry an id outside
        used = int(here.sum())
        pair_experts, pair_tokens = torch.full_like(experts.flatten(), -1), torch.zeros_like(experts.flatten())
        pair_experts[:used] = experts[here]
        pair_tokens[:used] = here.nonzero()[:, 0].int()
        token_offsets = torch.zeros(shape.T + 1, dtype=torch.int32, device=self.device)
        token_offsets[1:] = here.sum(dim=1).cumsum(0)
        return {"experts": pair_experts, "pair_tokens": pair_tokens, "token_offsets": token_offsets}

    def dispatch(self, package: ModuleType, shape: Shape, routing: str, **options: Any) -> Any:
        if routing == "capacity":
            options["row_capacity"] = shape.T * shape.K * 2 // 3
        chosen, room = self.experts(shape, routing), package.dispatch
        build = room.build_dispatch if len(chosen) == 1 else room.build_dispatch_varying
        return build(*chosen.values(), shape.E, **options)


def halves(package: ModuleType, activation: str) -> int:
    """Columns of H for each hidden unit: 2 with a gate, else 1."""
    return 2 if package.activations.activation_named(activation).gated else 1


def attempt(made: Outputs, name: str, call: Callable[[], dict[str, Tensor]]) -> None:
    """The call's outputs under their names behind ``name``; the refusal where it refuses."""
    try:
        made |= {f"{name} {output}".strip(): tensor for output, tensor in call().items()}
    except (TypeError, ValueError) as error:
        made[name] = f"{type(error).__name__}: {error}"


def combinations(options: Mapping[str, Iterable[Any]]) -> Iterator[Options]:
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


# --- Products ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a product, in plain data, which the process of any checkout reads. An array is its dimensions and its dtype."""

    inputs: dict[str, tuple[str, str]]
    low: tuple[tuple[str, str], ...]  # the arrays of ``low``
    outputs: dict[str, tuple[str, str]]
    added: bool  # to what the outputs hold
    over: dict[str, str]  # output -> the input that it may lie over
    columns: str  # "all", "first" or "last"
    options: Options


class Product(NamedTuple):
    """A public function of gemm, and its calls by what is varied beside the activation."""

    function: str
    calls: dict[str, Call]
    of_tokens: bool  # rows are gathered, in every call
    activations: bool
    varies: bool


NO_OR_YES = (False, True)


def products_of(gemm: ModuleType) -> dict[str, Product]:
    """Every product by its name in a case, of a registry with specifications: the new checkout's."""
    linear = importlib.import_module(f"{gemm.__name__}.linear")
    specified = {name: (name, entry.spec, not entry.fixed_order) for name, entry in gemm.PRODUCTS.items()}
    specified |= dict.fromkeys(("grouped_mm", "grouped_mm of tokens"), ("grouped_mm", linear.GROUPED_MM, False))
    made = {}
    for name, (function, spec, varies) in specified.items():
        parameters, of_tokens = inspect.signature(getattr(gemm, function)).parameters, name == "grouped_mm of tokens"
        optional = [array.name for array in spec.inputs if array.optional]
        varied: dict[str, Any] = {key: NO_OR_YES for key in ("transposed", *optional, "low") if key in parameters}
        if any(array.f32 for array in spec.outputs):
            varied["sums"] = ("bfloat16", "float32", "accumulate")
        if "columns" in parameters and name != "combine":
            varied["columns"] = ("all", "first", "last")
        if "gather" in parameters:
            varied["gather"] = (of_tokens,) if function == "grouped_mm" else (True, False)
        calls = {}
        for chosen in combinations(varied):
            label = " ".join(key if value is True else str(value) for key, value in chosen.items() if value)
            arrays = {a.name: (a.shape_in(chosen), a.dtype) for a in spec.inputs if chosen.get(a.name, True)}
            low = [arrays.pop(key) for key in [*arrays] if key not in parameters]
            sums, options = chosen.get("sums"), {key: chosen[key] for key in ("transposed", "gather") if key in chosen}
            calls[label] = Call(
                arrays,
                tuple(low if chosen.get("low") else ()),
                {a.name: (a.shape, "float32" if a.f32 and sums != "bfloat16" else a.dtype) for a in spec.outputs},
                sums == "accumulate" or any(a.added for a in spec.outputs),
                {a.name: a.over for a in spec.outputs if a.over},
                chosen.get("columns", "all"),
                options | ({"accumulate": True} if sums == "accumulate" else {}),
            )
        made[name] = Product(function, calls, of_tokens, "activation" in parameters, varies)
    return made


def product_cases(package: ModuleType, device: str, products: Mapping[str, Product]) -> Iterator[Case]:
    """Every product: its options crossed on small shapes; with each activation, and on larger shapes, none and all of them."""
    activations = [name for name in package.activations.ACTIVATIONS if name != "swiglu"]
    wanted = [(shape, routing, "swiglu", True) for shape in (SMALL, LONGER, SQUARE) for routing in ROUTINGS]
    wanted += [(shape, "fixed", "swiglu", True) for shape in FEW]
    wanted += [(SMALL, "sentinels", activation, False) for activation in activations]
    wanted += [(shape, "fixed", "swiglu", False) for shape in LARGE] + [(ONE_EXPERT, "one", "swiglu", False)]
    for (name, product), (shape, routing, activation, crossed) in itertools.product(products.items(), wanted):
        if activation == "swiglu" or product.activations:
            title = f"product {name}: {shape}, {routing}, {activation}"
            run = partial(run_product, package, device, title, product, shape, routing, activation, crossed)
            yield Case(title, run, product.varies and device == "cuda")


def run_product(
    package: ModuleType,
    device: str,
    title: str,
    product: Product,
    shape: Shape,
    routing: str,
    activation: str,
    crossed: bool,
) -> Outputs:
    """The outputs of one product, by its options."""
    draw, made = Draw(title, device), Outputs()
    dispatch = draw.dispatch(package, shape, routing)
    sizes = shape._asdict() | {"h": shape.n * halves(package, activation), "r": RANK}
    sizes |= {"R": len(dispatch.expert_pair_indices), "P": shape.T * shape.K}
    sizes |= (
        {"reduction": shape.d, "width": sizes["h"]} if product.of_tokens else {"reduction": shape.n, "width": shape.d}
    )
    function = getattr(package.gemm, product.function)

    def drawn(words: str, dtype: str) -> Tensor:
        size = [sizes[word] for word in words.split()]
        if dtype == "float32":
            return draw.uniform(*size) + 0.05
        return draw.normal(*size, scale=size[-1] ** -0.5 if len(size) == 3 else 1.0)

    labels = [*product.calls]
    for label in labels if crossed else labels[:1] + labels[1:][-1:]:  # else none of the options, and all of them
        call = product.calls[label]
        given = call.options | {name: drawn(*array) for name, array in call.inputs.items()}
        given |= {"low": tuple(drawn(*array) for array in call.low)} if call.low else {}
        given |= {"activation": activation} if product.activations else {}
        outputs = {}
        for name, (words, dtype) in call.outputs.items():
            size = [sizes[word] for word in words.split()]
            if call.columns != "all":
                cut = size[-1] // 16 * 8
                given["columns"] = range(cut) if call.columns == "first" else range(cut, size[-1])
                size[-1] = len(given["columns"])
            outputs[name] = torch.zeros(size, dtype=getattr(torch, dtype), device=device)
            if call.added:
                outputs[name] += draw.uniform(*size) + 0.05

        def run(given: Any = given, outputs: Any = outputs) -> dict[str, Tensor]:
            function(dispatch=dispatch, **given, **outputs)
            return dict(outputs)

        attempt(made, label, run)
        for name, source in call.over.items() if crossed and call.columns == "all" and shape.d <= 256 else ():
            if outputs[name].shape == given[source].shape:
                over = outputs | {name: given[source]}
                attempt(made, f"{label} over {source}", lambda: run(outputs=over))  # noqa: B023  called now
    if product.function == "combine":  # into some columns of a wider array
        y, out = (
            draw.normal(sizes["R"], shape.d),
            torch.zeros(shape.T, shape.d + 16, dtype=torch.bfloat16, device=device),
        )
        package.gemm.combine(y, dispatch, columns=range(8, 8 + shape.d), out=out)
        made["some columns"] = out
    return made


# --- Dispatch and router -------------------------------------------------------------------------------------------------


def run_dispatch(package: ModuleType, device: str, name: str, shape: Shape, routing: str, method: str) -> Outputs:
    """The index arrays, of int32 and of int64 ids."""
    made = Outputs()
    for dtype in (torch.int32, torch.int64):
        chosen = Draw(name, device).experts(shape, routing)
        chosen["experts"] = chosen["experts"].to(dtype)
        capacity = shape.T * shape.K * 2 // 3 if routing == "capacity" else None
        build = package.dispatch.build_dispatch if len(chosen) == 1 else package.dispatch.build_dispatch_varying
        lists = vars(build(*chosen.values(), shape.E, row_capacity=capacity, method=method))
        made |= {f"{key} {dtype}": value for key, value in lists.items() if isinstance(value, Tensor)}
    return made


def run_router(package: ModuleType, device: str, name: str, experts: int, top_k: int, finite: bool) -> Outputs:
    """Every operator of the router, on logits of 777 tokens; without ``finite`` some are NaN or infinite."""
    draw, router, made, tokens = Draw(name, device), package.router, Outputs(), 777
    logits = draw.normal(tokens, experts, dtype=torch.float32)
    logits[5, 1] = logits[5, 0]  # a tie
    if not finite:
        logits[3, 2], logits[70, 0], logits[71] = math.nan, math.inf, -math.inf
    d_scores, d_loss = draw.uniform(tokens, top_k), draw.uniform(1)[0]
    bias, draws = draw.normal(experts, dtype=torch.float32), draw.uniform(experts)
    _, chosen = router.topk_route(logits, top_k, score="sigmoid")
    pairs = router.choose_pairs(logits.sigmoid(), chosen, "score", 90, tokens * top_k)
    for options in combinations({"score": SCORES, "renormalize": (None, True, False), "scale": (1.0, 2.5)}):
        label = " ".join(map(str, options.values()))

        def route(values: Tensor, options: Any = options, **added: Any) -> dict[str, Tensor]:
            scores, ids = router.topk_route(values, top_k, **options, **added)
            d_logits = router.topk_route_backward(values, ids, d_scores, **options)
            return {"scores": scores, "experts": ids, "d_logits": d_logits}

        def score(options: Any = options) -> dict[str, Tensor]:
            d_pairs = d_scores.flatten()[: len(pairs[0])]
            d_logits = router.score_pairs_backward(logits, pairs[0], pairs[2], d_pairs, **options)
            return {"scores": router.score_pairs(logits, pairs[0], pairs[2], **options), "d_logits": d_logits}

        for values in (logits, logits.bfloat16()):
            attempt(made, f"top-k {label} {values.dtype}", partial(route, values))
        attempt(made, f"top-k {label} bias", partial(route, logits, bias=bias))
        attempt(made, f"pairs {label}", score)
    for options in combinations({"score": SCORES, "balance": NO_OR_YES, "z": NO_OR_YES}):

        def losses(options: Any = options) -> dict[str, Tensor]:
            load, balance_loss, z_loss = router.routing_losses(logits, chosen, **options)
            d_logits = router.routing_losses_backward(logits, load, d_loss, d_loss, top_k, **options)
            return {"load": load, "balance_loss": balance_loss, "z_loss": z_loss, "d_logits": d_logits}

        attempt(made, f"losses {' '.join(map(str, options.values()))}", losses)
    for by, room in itertools.product(WAYS, (tokens * top_k // 2, tokens * top_k + 128 * experts)):
        size = 128 if by in WAYS[:6] else max(1, tokens * top_k // experts)

        def choose(by: str = by, room: int = room, size: int = size) -> dict[str, Tensor]:
            listed = router.choose_pairs(logits.sigmoid(), chosen, by, size, room, draws=draws)
            return dict(zip(("pair_experts", "pair_tokens", "token_offsets", "load"), listed, strict=True))

        attempt(made, f"choice {by} {room}", choose)
    ids = (draw.uniform(tokens) * 2**40).long()
    made["hash"] = router.hash_route(ids, experts, top_k, seed=7)
    made["finish"] = finished = router.finish_logits(logits)
    return made | {f"split {parts}": router.split_gradient(bias * logits, finished, parts) for parts in (2, 3)}


def routing_cases(package: ModuleType, device: str) -> Iterator[Case]:
    shapes = (SMALL, Shape(20_000, 8, 8, 130, 8), *FEW)
    for shape, routing, method in itertools.product(shapes, ROUTINGS, METHODS):
        name = f"dispatch: {shape}, {routing}, {method}"
        yield Case(name, partial(run_dispatch, package, device, name, shape, routing, method))
    for (experts, top_k), finite in itertools.product(((7, 3), (128, 8), (520, 16)), (True, False)):
        name = f"router: E{experts} K{top_k}{', NaN and inf' * (not finite)}"
        yield Case(name, partial(run_router, package, device, name, experts, top_k, finite), finite=finite)


# --- moe_mlp and MoE -----------------------------------------------------------------------------------------------------


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
    """Random layers, the same in every process."""
    for seed in range(LAYERS):
        rng = random.Random(seed)
        shape = rng.choice((SMALL, SMALL, SMALL, LONGER, SQUARE, *LARGE, IN_SLICES, *FEW))
        options: Options = {"save": rng.choice(POLICIES)}
        if rng.random() < 0.3:
            options["workspace_bytes"] = {SMALL: 1 << 17, LONGER: 1 << 20}.get(shape, 1 << 25)
        if rng.random() < 0.1:
            options["combine"] = rng.choice(("fused", "fused_both"))
        if rng.random() < 0.1:
            options["precision"] = "fp8"
        needs = rng.choice(((), *((leaf,) for leaf in LEAVES[:6]), ("x", "down_bias"), *[LEAVES] * 8))
        flags = ("bias", "transposed", "int64_ids", "given_dispatch", "f32_weights", "twice")
        drawn: Options = {
            flag: rng.random() < share for flag, share in zip(flags, (0.4, 0.2, 0.2, 0.1, 0.2, 0.1), strict=True)
        }
        activation = rng.choice(activations) if not drawn["transposed"] else "alternating(clamped_swiglu)"
        rank = rng.choice((0, 0, 0, RANK, 72))
        yield Layer(shape, activation, routing=rng.choice(ROUTINGS), rank=rank, needs=needs, options=options, **drawn)


def layer_cases(package: ModuleType, device: str) -> Iterator[Case]:
    for number, layer in enumerate(layers(tuple(package.activations.ACTIVATIONS))):
        varies = layer.options.get("combine", "gather") != "gather" and device == "cuda"
        yield Case(f"layer {number}: {layer.name}", partial(attempted, run_layer, package, device, layer), varies)
    routers: list[tuple[str, Options]] = [(name, {}) for name in package.router.ROUTERS]
    routers += [("top_k", options) for options in MODULE_OPTIONS]
    for router, options in routers:
        name = f"module: {router}{''.join(f', {key}={value}' for key, value in options.items())}"
        yield Case(name, partial(run_module, package, device, name, router, options))


def attempted(run: Callable[..., Outputs], *arguments: Any) -> Outputs:
    """Its outputs, or its refusal."""
    made = Outputs()
    attempt(made, "", lambda: run(*arguments))  # type: ignore[arg-type, return-value]
    return made


def inputs_of(package: ModuleType, layer: Layer, draw: Draw) -> dict[str, Tensor]:
    """By name: the layer's `LEAVES`, ``d_out``, and the results of `Draw.experts`."""
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


# --- Steps that are timed ------------------------------------------------------------------------------------------------


def step_of(call: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor], given: list[Tensor]) -> Callable[[], Any]:
    """A forward and a backward: the first output, and the gradients of the leaves."""
    for leaf in leaves:
        leaf.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        made = call()
        return made[0].detach(), *torch.autograd.grad(made, leaves, given)

    return step


def module_step(package: ModuleType, device: str, shape: Shape) -> Callable[[], Any]:
    """A forward and a backward of ``MoE`` as in `scripts.bench.module`: bf16, topk_softmax, auxiliary loss 0.01."""
    draw, backend = Draw(str(shape), device), "hopper" if device == "cuda" else "torch"
    options: Options = {"router": "topk_softmax", "aux_loss": 0.01, "dtype": torch.bfloat16}
    layer = filled(package.MoE(*shape[1:], backend=backend, device=device, **options), draw)
    x, d_out = (draw.normal(shape.T, shape.d) for _ in range(2))

    def call() -> tuple[Tensor, Tensor]:
        out, stats = layer(x)
        return out, stats.aux_loss

    return step_of(call, [x, *layer.parameters()], [d_out, torch.ones((), device=device)])


def router_step(package: ModuleType, device: str, shape: Shape) -> Callable[[], Any]:
    """A forward and a backward of a router as in `scripts.bench.router`: both losses, dX and dW of an fp32 weight."""
    draw = Draw(str(shape), device)
    options: Options = {"aux_loss": 0.01, "z_loss": 0.001, "device": device, "dtype": torch.float32}
    router = filled(package.router.make_router("topk_softmax", shape.d, shape.E, shape.K, **options), draw)
    x, d_scores = draw.normal(shape.T, shape.d), draw.normal(shape.T, shape.K).float()

    def call() -> tuple[Tensor, ...]:
        routing = router(x)
        return routing.scores, *routing.aux_losses.values()

    return step_of(call, [x, router.weight], [d_scores, *[torch.ones((), device=device)] * 2])


def lora_step(package: ModuleType, device: str, shape: Shape) -> Callable[[], Any]:
    """A forward and a backward of experts with factors, as in `scripts.bench.lora`; x, scores and factors are trained."""
    given = inputs_of(package, Layer(shape, rank=RANK), Draw(str(shape), device))
    leaves = [given[name] for name in LEAVES if name in given and name not in ("up_proj", "down_proj")]
    factors, backend = low_rank_factors(package, given), "hopper" if device == "cuda" else "torch"
    arguments = [given[name] for name in ("x", "up_proj", "down_proj", "scores", "experts")]

    def call() -> tuple[Tensor, ...]:
        return (package.moe_mlp(*arguments, num_experts=shape.E, backend=backend, **factors),)

    return step_of(call, leaves, [given["d_out"]])


STEPS = {"module": module_step, "router": router_step, "lora": lora_step}
