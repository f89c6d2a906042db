"""Each product of the registry called as a layer calls it, into memory that it is given: its inputs, outputs and kernels.

A product's specification states its reads and writes. This file adds a layer's names for these arrays, where they differ from the
product's, and the products that a layer calls twice.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import PRODUCTS, Sizes, TileConfig
from blazeproto.gemm.arguments import LOW, Array
from blazeproto.gemm.e4m3 import Quantized, from_e4m3, scales_shape, to_e4m3
from blazeproto.gemm.product import Product
from blazeproto.gemm.recipe import FP8, Recipe
from blazeproto.gemm.tiles import BF16, E4M3, TILES, Element

SIMPLE_TILE = (128, 256)  # lines and columns that a mismatch map puts together where a kernel has no tiles
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Case:
    """Everything that enters one layer's forward and backward. bf16, scores fp32, indices int32.

    transposed: products that can, take weights that lie transposed.  rank: of the low-rank terms of those that take some, or 0.
    drawn: inputs of products that neither a layer has nor another product makes, at random, by name.
    quantized: whether products that can, take e4m3, by a recipe; powers of two hold the numbers of x, d_out and the weights.
    made: what they took.
    """

    x: Tensor  # (T, d)
    up_proj: Tensor  # (E, G n, d)
    down_proj: Tensor  # (E, d, n)
    scores: Tensor  # (P,)
    d_out: Tensor  # (T, d)
    dispatch: Dispatch
    activation: str
    up_bias: Tensor | None = None  # (E, G n)
    down_bias: Tensor | None = None  # (E, d)
    transposed: bool = False
    rank: int = 0
    drawn: dict[str, Tensor] = field(default_factory=dict)
    quantized: bool = False
    recipe: Recipe = FP8
    made: dict[tuple[str, bool, int], Quantized] = field(default_factory=dict)
    row_expert: Tensor = field(init=False)  # (rows in use,)
    row_pair: Tensor = field(init=False)
    row_token: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts = self.dispatch.expert_token_offsets.diff().long()
        self.row_expert = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        self.row_pair = self.dispatch.expert_pair_indices[: len(self.row_expert)].long()
        top_k, pair_tokens = self.dispatch.top_k, self.dispatch.pair_tokens
        self.row_token = self.row_pair // top_k if top_k else pair_tokens.long()[self.row_pair]

    @property
    def sizes(self) -> Sizes:
        """K is 0 where it varies."""
        E, d, n = self.down_proj.shape
        return Sizes(len(self.x), d, n, E, self.dispatch.top_k or 0, activation_named(self.activation).halves)

    @property
    def letters(self) -> dict[str, int]:
        """The sizes that the letters of a shape stand for."""
        return self.sizes.letters | {"R": self.dispatch.num_rows, "P": len(self.scores), "r": self.rank}

    @property
    def element(self) -> Element:
        """The type of operands that may be quantized."""
        return E4M3 if self.quantized else BF16

    def operand(self, array: Array, value: Tensor) -> Quantized:
        """An input of a product in e4m3, as it lies there; made once."""
        turned = bool(array.quantized)
        key = (array.operand or array.name, turned, value.data_ptr())
        if key not in self.made and (operand := array.operand_of(self.recipe)):
            self.made[key] = to_e4m3(torch, value.mT.contiguous() if turned else value, *operand[1:])
        return self.made[key]

    def numbers(self, array: Array, value: Tensor) -> Tensor:
        """The numbers of an input's `operand`, fp32, in the input's own order."""
        made: Tensor = from_e4m3(torch, self.operand(array, value), array.operand_of(self.recipe).scale)  # type: ignore[union-attr]
        return made.mT if array.quantized else made

    @property
    def options(self) -> dict[str, Any]:
        """Those of every call that has them."""
        return {"activation": self.activation, "transposed": self.transposed}

    def draw(self, name: str, array: Array) -> Tensor:
        """An input of a product, the same each time."""
        if name not in self.drawn:
            shape = [self.letters[letter] for letter in array.shape_in(self.options).split()]
            generator = torch.Generator(self.x.device).manual_seed(len(self.drawn))
            values = torch.randn(shape, device=self.x.device, generator=generator).mul_(shape[-1] ** -0.5)
            self.drawn[name] = values.to(DTYPES[array.dtype])
        return self.drawn[name]

    def in_use(self, name: str, value: Tensor) -> Tensor:
        """An array without the rows that no pair has."""
        return value[: len(self.row_pair)] if name in ROW_OUTPUTS else value


LAYERS_OWN = ("x", "up_proj", "down_proj", "scores", "d_out", "up_bias", "down_bias")


@dataclass(frozen=True)
class Output:
    """One output or workspace. index: what a line of it belongs to, "row", "expert", "token", "pair"; "" for a workspace.

    tile: lines and columns that one CTA makes at a time.  halves: 2 where gate and up of a hidden unit are one tile's.
    """

    index: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    tile: tuple[int, int] = SIMPLE_TILE
    halves: int = 1
    zeroed: bool = False  # the product adds to it


@dataclass(frozen=True)
class Call:
    """A product as a layer calls it.

    names: what the layer calls its inputs and outputs, where not as the product does; None: it does without.
    options: of the call.  needs: the bias without which a layer has no such call.  f32: gradients of weights are fp32.
    """

    product: str
    names: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    f32: bool = False

    @property
    def entry(self) -> Product:
        return PRODUCTS[self.product]

    @property
    def inputs(self) -> dict[str, Array]:
        """By the layer's names, in the order of the product's parameters; low-rank factors are not among them."""
        arrays = {array.name: array for array in self.entry.spec.inputs}
        names = [name for name in inspect.signature(self.entry.run).parameters if name in arrays]
        return {called: arrays[name] for name in names if (called := self.names.get(name, name)) is not None}

    @property
    def made(self) -> dict[str, Array]:
        """The outputs, by the layer's names."""
        return {self.names.get(a.name) or a.name: a for a in self.entry.spec.outputs}

    @property
    def given(self) -> tuple[str, ...]:
        """The inputs that other products make."""
        return tuple(name for name in self.inputs if name in MADE)

    def is_quantized(self, case: Case, array: Array) -> bool:
        """Whether an array of the product is e4m3."""
        return case.quantized and self.entry.spec.quantized and bool(array.scale)

    def takes(self, function: Any, case: Case, given: Mapping[str, Tensor], **others: Any) -> dict[str, Any]:
        """The arguments of ``function``, the product's or its formula, which takes rows in use only: arrays and options."""
        rows = None if function is self.entry.run else len(case.row_pair)

        def found(name: str, array: Array) -> Tensor | None:
            if name in LAYERS_OWN:
                value: Tensor | None = getattr(case, name)
                return value.mT.contiguous() if value is not None and case.transposed and array.transposed else value
            if name in MADE:
                return given[name]
            if array.optional and array.name not in LOW:
                return None
            return case.draw(name, array)[: rows if array.index == "row" else None]

        known: dict[str, Any] = {"dispatch": case.dispatch, **case.options, **self.options, **others}
        for name, array in self.inputs.items():
            value = known[array.name] = found(name, array)
            if value is not None and self.is_quantized(case, array):
                known[array.name] = (case.operand if rows is None else case.numbers)(array, value)
        low = [found(f"{a.name} of {self.product}", a) for a in self.entry.spec.inputs if case.rank and a.name in LOW]
        known |= {"low": tuple(low)} if low else {}
        return {name: known[name] for name in inspect.signature(function).parameters if name in known}

    def outputs(self, case: Case, given: Mapping[str, Tensor], config: TileConfig | None = None) -> dict[str, Output]:
        """By the layer's names, and "workspace" if the product takes one, on a GPU.  given: row arrays of all R rows."""
        spec, letters, options = self.entry.spec, case.letters, case.options | dict(self.options)
        taken = self.takes(self.entry.run, case, given)
        for array in self.inputs.values():
            value = taken[array.name]
            if value is not None and not isinstance(value, Quantized):
                letters.update(zip(array.shape_in(options).split(), value.shape, strict=True))
        tiles = config or self.entry.tiles_of(case.sizes, case.element) or TILES["down_forward"]
        halves, made = case.sizes.halves, dict[str, Output]()
        for name, array in self.made.items():
            made[name] = Output(
                array.index,
                tuple(letters[letter] for letter in array.shape.split()),
                torch.float32 if self.f32 and array.f32 else DTYPES[array.dtype],
                array.tile(tiles, halves) if array.tile else SIMPLE_TILE,
                halves if array.shape == "R h" else 1,
                zeroed=array.added,
            )
            if self.is_quantized(case, array):
                made[name] = replace(made[name], dtype=torch.float8_e4m3fn)
                made[f"{name}'s scales"] = Output("", scales_shape(array.scale, made[name].shape), torch.float32)
        letters["quantized"] = case.quantized and spec.quantized
        if case.x.is_cuda and spec.workspace is not None and (lengths := spec.workspace(letters, config)):
            made["workspace"] = Output("", lengths, torch.float32)
        return made

    def arguments(
        self, case: Case, given: Mapping[str, Tensor], out: Mapping[str, Tensor], config: TileConfig | None = None
    ) -> dict[str, Any]:
        """Those of the product's function.  out: the outputs and the workspace, by the names of `outputs`."""
        written: dict[str, Any] = {array.name: self._written(case, name, out) for name, array in self.made.items()}
        written |= {"workspace": out["workspace"]} if "workspace" in out else {}
        return self.takes(self.entry.run, case, given, config=config, **written)

    def numbers(self, case: Case, name: str, out: Mapping[str, Tensor]) -> Tensor:
        """An output's numbers, fp32 of a quantized one."""
        made = self._written(case, name, out)
        return from_e4m3(torch, made, self.made[name].scale) if isinstance(made, Quantized) else made  # type: ignore[no-any-return]

    def _written(self, case: Case, name: str, out: Mapping[str, Tensor]) -> Tensor | Quantized:
        quantized = self.is_quantized(case, self.made[name])
        return Quantized(out[name], out[f"{name}'s scales"]) if quantized else out[name]

    def run(
        self, case: Case, given: Mapping[str, Tensor], out: Mapping[str, Tensor], config: TileConfig | None = None
    ) -> None:
        """As `arguments` has them."""
        self.entry.run(**self.arguments(case, given, out, config))


# What a layer calls the arrays of a product, where it has other names for them, and what it calls besides.
NAMES: dict[str, dict[str, str | None]] = {
    "up_forward": {"bias": "up_bias"},
    "down_forward": {"bias": "down_bias"},
    "down_forward_fused": {"bias": "down_bias", "out_f32": "fused"},
    "up_backward_act_fused": {"dx_f32": "dx_fused"},
    "down_backward_weight": {"dw": "d_down"},
    "up_backward_weight": {"dw": "d_up"},
    "expert_row_sum": {"values": "dh", "scores": None, "out": "d_up_bias"},
}
NEEDS = {"bias_score_grad": "down_bias", "expert_row_sum": "up_bias"}
AGAIN = {  # behind which products
    "down_backward_weight": (
        Call("down_backward_weight", {"dw": "d_down_f32"}, f32=True),
        Call("expert_row_sum", {"values": "d_out", "out": "d_down_bias"}, {"gather": True}, "down_bias"),
    ),
    "up_backward_act": (Call("combine", {"y": "dx_rows", "scores": None, "out": "dx"}),),
    "up_backward_weight": (Call("up_backward_weight", {"dw": "d_up_f32"}, f32=True),),
}


def _calls() -> dict[str, Call]:
    """One of each product. An output whose name another product has gets the product's."""
    calls: dict[str, Call] = {}
    taken: set[str | None] = set()
    for name, entry in PRODUCTS.items():
        names = dict(NAMES.get(name, {}))
        for array in entry.spec.outputs:
            if array.name not in names and array.name in taken and not array.added:
                names[array.name] = f"{array.name} of {name}"
            taken.add(names.get(array.name, array.name))
        calls[name] = Call(name, names, needs=NEEDS.get(name, ""))
    return calls


CALLS = _calls()
"""By the registry's names (`blazeproto.gemm.PRODUCTS`)."""
LAYER = tuple(each for name, call in CALLS.items() for each in (call, *AGAIN.get(name, ())))
"""All calls of a layer, each behind those that make its inputs."""
MADE = {name for call in LAYER for name in call.made}
BACKWARD = {"d_out"}
"""The gradients: what is made of the output's."""
for _call in LAYER:
    BACKWARD |= _call.made.keys() if BACKWARD & _call.inputs.keys() else set()
ROW_OUTPUTS = {name for call in LAYER for name, array in call.made.items() if array.index == "row"}


def calls_of(case: Case) -> list[Call]:
    """Those of a layer with the case's biases."""
    return [call for call in LAYER if not call.needs or getattr(case, call.needs) is not None]


def everything_read(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Every input of a call, by name."""
    arrays = {name: getattr(case, name) for name in LAYERS_OWN} | case.drawn | given
    for (name, turned, _), made in case.made.items():
        name = f"{name}, turned" if turned else name
        arrays |= {f"{name} in e4m3": made.values, f"{name}'s scales": made.scales}
    return arrays | {f"dispatch.{name}": array for name, array in case.dispatch.arrays.items()}


# --- Memory that shows what is written to it -------------------------------------------------------------------------------

POISON = 0x7FE5  # in every 16 bits: a NaN in bf16 and in fp32, and no NaN that arithmetic makes
GUARD_LINES, MOST_GUARD = 128, 4 << 20  # of an output, before and after it: as many lines, but no more bytes
ALIGNMENT = 512  # bytes


def sums_of(arrays: Mapping[str, Tensor | None]) -> dict[str, int]:
    """The sum of the bits of each."""
    sums = {name: array.view(torch.int16).sum(dtype=torch.int64) for name, array in arrays.items() if array is not None}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def told_stray(name: str, counts: list[int]) -> list[str]:
    """The report of an output's guards. counts: of elements of 16 bits, before it, after it, and in rows that no pair has."""
    places = ("before its first element", "past its last element", "to rows that no pair has")
    return [f"{name}: wrote {2 * count} bytes {place}" for count, place in zip(counts, places, strict=True) if count]


class Poisoned:
    """An output between two guards, all of it poisoned before each run."""

    def __init__(self, output: Output, device: Any) -> None:
        line = output.shape[-1] * output.dtype.itemsize
        guard = -(-min(GUARD_LINES * line, MOST_GUARD) // ALIGNMENT) * ALIGNMENT // 2  # of 16 bits each
        size = output.dtype.itemsize * prod(output.shape) // 2
        self.words = torch.empty(2 * guard + size, dtype=torch.int16, device=device)
        self.guards = (self.words[:guard], self.words[guard + size :])
        self.values, self.output = self.words[guard : guard + size].view(output.dtype).view(output.shape), output

    def poison(self) -> None:
        self.words.fill_(POISON)
        if self.output.zeroed:
            self.values.zero_()

    def touched(self, used: int | None = None) -> Tensor:
        """(3,) int64: elements of 16 bits that were written before the output, after it, and from its line ``used`` on; None:
        all lines are in use."""
        begin, end = self.guards
        spare = self.values[len(self.values) if used is None else used :].flatten().view(torch.int16)
        return torch.stack([(words != POISON).sum() for words in (begin, end, spare)])
