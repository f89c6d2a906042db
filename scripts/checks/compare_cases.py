"""What `scripts.checks.compare` runs on both checkouts: every product here; compare_routing.py and compare_layers.py: the rest.

Nothing of blazeproto is imported here: each case calls the public functions of whichever package is given. Its inputs are drawn
by a generator whose seed is the case's name. A product gets operands of its own, not what the one before it made, so that a
difference shows where it arises. Outputs are handed in as zeros: rows that no pair has are part of what is compared.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class Product(NamedTuple):
    """How a public function of gemm is called. Index letters: T d n E K as in `Shape`, R rows, P pairs, w columns of H."""

    inputs: str
    outputs: str
    options: dict[str, tuple[Any, ...]] = {}  # what is varied beside the activation  # noqa: RUF012  never written
    extra: dict[str, str] = {}  # the arrays that an option stands for  # noqa: RUF012
    over: tuple[str, str] | None = None  # the output that may lie over an input
    activations: bool = False
    varies: bool = False
    function: str = ""  # its name, where the entry has another


NO_OR_YES = (False, True)
SUMS = {"sums": ("bfloat16", "float32", "accumulate"), "gather": (True, False)}
HALF = {"columns": ("all", "first", "last")}
PRODUCTS = {
    "up_forward": Product(
        "x=Td up_proj=Ewd",
        "h=Rw act=Rn",
        dict.fromkeys(("transposed", "bias", "low"), NO_OR_YES),
        {"bias": "Ew", "low": "Rr Ewr"},
        activations=True,
    ),
    "down_forward": Product(
        "act=Rn down_proj=Edn", "y=Rd", {"bias": NO_OR_YES, **HALF}, {"bias": "Ed"}, over=("y", "act")
    ),
    "down_forward_fused": Product(
        "act=Rn down_proj=Edn scores=P",
        "out_f32=Td",
        dict.fromkeys(("transposed", "bias"), NO_OR_YES),
        {"bias": "Ed"},
        varies=True,
    ),
    "combine": Product("y=Rd", "out=Td", {"scores": NO_OR_YES}, {"scores": "P"}),
    "down_backward_act": Product(
        "d_out=Td down_proj=Edn h=Rw scores=P",
        "dh=Rw a_scaled=Rn d_scores=P",
        dict.fromkeys(("transposed", "low"), NO_OR_YES),
        {"low": "Rr Ern"},
        over=("dh", "h"),
        activations=True,
    ),
    "bias_score_grad": Product("d_out=Td down_bias=Ed", "d_scores=P"),
    "down_backward_weight": Product("d_out=Td a_scaled=Rn", "dw=Edn", SUMS),
    "up_backward_act": Product("dh=Rw up_proj=Ewd", "dx_rows=Rd", HALF),
    "up_backward_weight": Product("dh=Rw x=Td", "dw=Ewd", SUMS),
    "expert_row_sum": Product("values=Td", "out=Ed", {**SUMS, "scores": NO_OR_YES}, {"scores": "P"}),
    "grouped_mm": Product(
        "a=Rn weights=Edn",
        "out=Rd",
        dict.fromkeys(("transposed", "bias", "low"), NO_OR_YES) | HALF,
        {"bias": "Ed", "low": "Rr Edr"},
        over=("out", "a"),
    ),
    "grouped_mm of tokens": Product(
        "a=Td weights=Ewd",
        "out=Rw",
        dict.fromkeys(("transposed", "bias", "low"), NO_OR_YES) | {"gather": (True,)},
        {"bias": "Ew", "low": "Rr Ewr"},
        function="grouped_mm",
    ),
}
F32 = ("scores", "d_scores", "out_f32")


def product_cases(package: ModuleType, device: str) -> Iterator[Case]:
    """Every product: its options crossed on small shapes; with each activation, and on larger shapes, none and all of them."""
    if missing := set(package.gemm.PRODUCTS) - set(PRODUCTS):
        raise LookupError(f"PRODUCTS of compare_cases: expected every product, {sorted(missing)} are not there")
    activations = [name for name in package.activations.ACTIVATIONS if name != "swiglu"]
    wanted = [(shape, routing, "swiglu", True) for shape in (SMALL, LONGER, SQUARE) for routing in ROUTINGS]
    wanted += [(shape, "fixed", "swiglu", True) for shape in FEW]
    wanted += [(SMALL, "sentinels", activation, False) for activation in activations]
    wanted += [(shape, "fixed", "swiglu", False) for shape in LARGE] + [(ONE_EXPERT, "one", "swiglu", False)]
    for (name, product), (shape, routing, activation, crossed) in itertools.product(PRODUCTS.items(), wanted):
        if activation == "swiglu" or product.activations:
            title = f"product {name}: {shape}, {routing}, {activation}"
            run = bind(run_product, package, device, title, name, shape, routing, activation, crossed)
            yield Case(title, run, product.varies and device == "cuda")


def bind(run: Callable[..., Outputs], *given: Any) -> Callable[[], Outputs]:
    return lambda: run(*given)


def run_product(
    package: ModuleType, device: str, title: str, name: str, shape: Shape, routing: str, activation: str, crossed: bool
) -> Outputs:
    """The outputs of one product, by its options."""
    product, draw, made = PRODUCTS[name], Draw(title, device), Outputs()
    dispatch = draw.dispatch(package, shape, routing)
    sizes = shape._asdict() | {"w": shape.n * halves(package, activation), "r": RANK}
    sizes |= {"R": len(dispatch.expert_pair_indices), "P": shape.T * shape.K}

    def array(letters: str, *, exact: bool = False, turned: bool = False) -> Tensor:
        dims = [sizes[letter] for letter in letters]
        if exact:  # fp32: scores, and what is added to
            return draw.uniform(*dims) + 0.05
        if len(dims) < 3:
            return draw.normal(*dims)
        return draw.normal(dims[0], *(reversed(dims[1:]) if turned else dims[1:]), scale=sizes[letters[-1]] ** -0.5)

    function = getattr(package.gemm, product.function or name)
    of_inputs = dict(word.split("=") for word in product.inputs.split())
    of_outputs = dict(word.split("=") for word in product.outputs.split())
    every = list(combinations(product.options))
    if not crossed:  # none of the options, and all of them
        every = every[:1] + every[1:][-1:]
    for chosen in every:
        turned, sums = chosen.get("transposed", False), chosen.get("sums")
        tokens = "R" if chosen.get("gather") is False else "T"
        inputs = {
            key: array(letters.replace("T", tokens), exact=key in F32, turned=turned)
            for key, letters in of_inputs.items()
        }
        options: Options = {key: chosen[key] for key in ("transposed", "gather") if key in chosen}
        for key, letters in product.extra.items():
            if chosen[key]:
                arrays = [array(part, exact=key in F32, turned=turned) for part in letters.split()]
                options[key] = tuple(arrays) if len(arrays) > 1 else arrays[0]
        if product.activations:
            options["activation"] = activation
        dims = {key: [sizes[letter] for letter in letters] for key, letters in of_outputs.items()}
        if chosen.get("columns", "all") != "all":
            (width,) = (size[-1] for size in dims.values())
            cut = width // 16 * 8
            options["columns"] = range(cut) if chosen["columns"] == "first" else range(cut, width)
            dims = {key: [*size[:-1], len(options["columns"])] for key, size in dims.items()}
        dtypes = {
            key: torch.float32 if key in F32 or sums in ("float32", "accumulate") else torch.bfloat16 for key in dims
        }
        outputs = {key: torch.zeros(size, dtype=dtypes[key], device=device) for key, size in dims.items()}
        if sums == "accumulate" or name == "bias_score_grad":
            outputs = {key: array(letters, exact=True) for key, letters in of_outputs.items()}
            options |= {"accumulate": True} if sums else {}
        label = " ".join(key if value is True else str(value) for key, value in chosen.items() if value)

        def call(inputs: Any = inputs, options: Any = options, outputs: Any = outputs) -> dict[str, Tensor]:
            function(*inputs.values(), dispatch, **options, **outputs)
            return dict(outputs)

        attempt(made, label, call)
        if product.over and crossed and "columns" not in options:
            output, source = product.over
            if outputs[output].shape == inputs[source].shape and shape.d <= 256:
                outputs = outputs | {output: inputs[source]}
                attempt(made, f"{label} over {source}", lambda: call(outputs=outputs))  # noqa: B023  called now
    if name == "combine":  # into some columns of a wider array
        y, out = array("Rd"), torch.zeros(shape.T, shape.d + 16, dtype=torch.bfloat16, device=device)
        package.gemm.combine(y, dispatch, columns=range(8, 8 + shape.d), out=out)
        made["some columns"] = out
    return made
