"""What `scripts.checks.compare` runs on both checkouts: every product here; compare_routing.py and compare_layers.py: the rest.

Nothing of blazeproto is imported here: each case calls the public functions of whichever package is given. What a product takes
the new checkout's registry says, to both sides (`products_of`). A case's inputs are drawn by a generator whose seed is its name.
A product gets operands of its own, not what the one before it made, so that a difference shows where it arises. Outputs are
handed in as zeros: rows that no pair has are part of what is compared.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
