"""The parts that all products share: a line in the registry, a kernel made of tiles. specification.py states their mathematics.

A product is declared in one .py, beside the .cu in cuda/ that it is compiled from; products that are alike share one (linear.cu:
four). The .py holds, in this order: what it computes and the paper's line, inputs, outputs and formula, the public function, the
kernel, the plan, the launch, the registry's entry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import product as every
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from blazeproto.gemm.arguments import Array
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import scales_shape
from blazeproto.gemm.recipe import RECIPES, Recipe, name_of
from blazeproto.gemm.specification import Specification
from blazeproto.gemm.stored import FEW_AHEAD, FEW_BLOCK, FEW_CTAS, FEW_TILES, Storage
from blazeproto.gemm.tiles import (
    BF16,
    BK,
    BM,
    DEVICE_CONSTANTS,
    E4M3,
    MAX_EXPERTS,
    QUANTIZED,
    SLAB,
    WARPGROUP,
    Element,
    TileConfig,
)
from blazeproto.runtime import checks
from blazeproto.runtime.arch import AMPERE, HOPPER, Arch
from blazeproto.runtime.arrays import ITEM_BYTES

SHAPES = 1024  # whose plans are kept, of each product
TRANSPOSED = (
    "swiglu",
    "alternating(clamped_swiglu)",
)  # activations that layers with transposed weights have, in compile-all
PAIR_BYTES = 4  # int32, fp32

DEBUG: tuple[str, ...] = ()
"""Further macros for every product's kernel (ptx.cuh: INJECT_DELAYS, SPIN_LIMIT=...; timeline.cuh: TIMELINE): for tests, fuzzer
and lab."""


# --- How kernels are compiled ----------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """The options that a kernel is compiled for, beside its tiles. A product reads those options that its kernels have.

    gather: rows are fetched by index.  transposed: weights (E, reduction, columns); a weight gradient: dW_up.
    bias: added.  activation: a name of `blazeproto.activations`.  rank: of low-rank factors, a multiple of 8, or 0.
    fused: a token's experts are summed in the product.  f32: into fp32.  scores: rows are weighed.
    dense_transposed, out_transposed: how a block-sparse product's dense operand and its output lie.
    element: the type of the operands that may be quantized.  floats: forward's scales are float32.
    arch: the architecture.  stored: of weights that the kernel decodes.  sends: rows to other ranks (cuda/sending.cuh).
    """

    gather: bool = False
    transposed: bool = False
    bias: bool = False
    activation: str = "swiglu"
    rank: int = 0
    fused: bool = False
    f32: bool = False
    scores: bool = False
    dense_transposed: bool = False
    out_transposed: bool = False
    element: Element = BF16
    floats: bool = False
    arch: Arch = HOPPER
    stored: Storage | None = None
    sends: bool = False

    @property
    def macros(self) -> dict[str, int | str]:
        """The macros of a kernel that decodes its weights, or sends rows."""
        return (self.stored.macros if self.stored else {}) | ({"SENDS": 1} if self.sends else {})

    @property
    def low_rank(self) -> int:
        """LOW_RANK of a kernel: the wgmma in the last of the stages that the factors take; in full stages all."""
        return min(-(-self.rank // BF16.k), BK // BF16.k)


class Build(NamedTuple):
    """Compile settings of a launch's kernel beside its tiles: further macros, and sources other than the package's."""

    debug: tuple[str, ...] = ()
    sources: Path | None = None


PLAIN, PACKAGE = Variant(), Build()
BOTH = (False, True)


def variants(**options: Iterable[Any]) -> list[Variant]:
    """One for every combination of values of these fields."""
    return [Variant(**dict(zip(options, values, strict=True))) for values in every(*options.values())]


QUANTIZED_VARIANTS = (*variants(element=[E4M3], bias=BOTH), *variants(element=[E4M3], bias=BOTH, rank=[16]))
"""The variants in `all_kernels` of quantized rows times weights."""

_edited: list[tuple[str, Path]] = []  # product, sources: the last one of a product holds
_alone: ContextVar[Mapping[str, Build] | None] = ContextVar("builds", default=None)


def build_of(name: str) -> Build:
    """The compile settings of a product's kernels, for the launch that asks."""
    plain = Build(DEBUG) if DEBUG else PACKAGE
    if (alone := _alone.get()) is not None:
        return alone.get(name, plain)
    if not _edited:  # as on the training path
        return plain
    return Build(DEBUG, next((sources for product, sources in reversed(_edited) if product == name), None))


@contextmanager
def edited(name: str, sources: Path) -> Iterator[None]:
    """Every launch of a product, in whatever thread, takes kernels of these sources: autograd has threads of its own."""
    entry = (name, sources)
    _edited.append(entry)
    try:
        yield
    finally:
        del _edited[next(index for index, other in enumerate(_edited) if other is entry)]


@contextmanager
def alone(builds: Mapping[str, Build]) -> Iterator[None]:
    """Launches from here take these builds, and the package's own of other products, whatever is `edited`."""
    token = _alone.set(builds)
    try:
        yield
    finally:
        _alone.reset(token)


# --- The registry's entries ------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The sizes of a layer and of its products: T tokens, d model width, n expert width, E experts, K experts a token, 0 where
    they vary."""

    T: int
    d: int
    n: int
    E: int
    K: int
    halves: int = 2  # 1 without a gate

    @property
    def rows(self) -> int:
        """R = T K: a row for every pair."""
        return self.T * self.K

    @property
    def h(self) -> int:
        """G n: columns of H."""
        return self.halves * self.n

    @property
    def letters(self) -> dict[str, int]:
        """The sizes that the letters of an `Array`'s shape stand for."""
        return {"T": self.T, "R": self.rows, "P": self.rows, "E": self.E, "d": self.d, "n": self.n, "h": self.h}

    def __str__(self) -> str:
        return f"T{self.T}-d{self.d}-n{self.n}-E{self.E}-K{self.K}"


@dataclass(frozen=True)
class Product:
    """One product, for all that lists products: compile-all, `prepare`, tuner, benchmarks, lab, tests.

    name: as users call it.  run: the public function.  spec: its inputs, outputs and formula.
    kernels: every kernel that the layers of tests and benchmarks reach.
    kernel: ``kernel(config, variant, build)``, of these or its own tiles; None where tiles don't matter.
    parts: ``parts(sizes, config, variant, build)``: the kernels of one call, the main one first; None: its ``kernel`` alone.
    in_layer: ``in_layer(sizes, up, down)``: with which sizes, tiles and variants a layer calls it, whatever its number of tokens,
    whose up and down projections are such variants; None: no layer calls it.
    variants: the ones of ``kernels`` with plain tiles, which other architectures' kernels have too.
    tiles: those that a call of these sizes takes.  variant: its own, but for what a caller asks for.
    options: the fields of `Variant` that a caller may ask for; of quantized operands the activation alone.
    phases: "forward", "backward": where every layer has it, in the order of the registry.
    fixed_order: whether every run gives the same bits.
    """

    name: str
    run: Callable[..., Any]
    spec: Specification
    kernels: Callable[[], Iterable[Kernel]]
    kernel: Callable[[TileConfig | None, Variant, Build], Kernel] | None = None
    parts: Callable[[Sizes, Any, Variant, Build], list[Kernel]] | None = None
    in_layer: Callable[[Sizes, Variant, Variant], Iterable[tuple[Sizes, Any, Variant]]] | None = None
    variants: tuple[Variant, ...] = ()
    tiles: Callable[[Sizes], TileConfig] | None = None
    variant: Variant = PLAIN
    options: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    fixed_order: bool = True

    @property
    def elements(self) -> tuple[Element, ...]:
        """The types of operands that it takes."""
        return (BF16, E4M3) if self.spec.quantized else (BF16,)

    def element_of(self, precision: str | Recipe) -> Element:
        """The type of operands for a ``precision``. ValueError for one that the product, or nothing, runs in."""
        element = RECIPES[name_of(precision)].element
        checks.require(element in self.elements, "precision", f"'bf16' for {self.name}", repr(precision))
        return element

    def for_layer(self, sizes: Sizes, up: Variant, down: Variant) -> list[Kernel]:
        """The kernels that a layer of these ``sizes`` launches, with the sources that are `edited`.  up, down: variants of its
        projections."""
        calls, build = self.in_layer(sizes, up, down) if self.in_layer else (), build_of(self.name)
        return [kernel for call in calls for kernel in self.launches(*call, build)]

    def launches(self, sizes: Sizes, config: TileConfig | None, variant: Variant, build: Build) -> list[Kernel]:
        """The kernels of one call with these ``sizes``, ``config``, ``variant`` and ``build``, the main one first."""
        if self.parts is not None:
            return self.parts(sizes, config, variant, build)
        return [self.kernel(config, variant, build)] if self.kernel else []

    def operations(self, sizes: Sizes) -> float:
        """With these ``sizes``: each row is multiplied with its expert's matrix, or makes a part of it. A multiplication and an
        addition are two."""
        matrices = [shape[1:] for _, shape in self._counted() if len(shape) == 3]
        return sum(2.0 * sizes.rows * prod(sizes.letters[letter] for letter in matrix) for matrix in matrices)

    def least_bytes(self, sizes: Sizes, precision: str | Recipe = "bf16") -> float:
        """With these ``sizes``: every input read once and every output written once, without those that are optional.
        precision: of the operands; quantized ones have scales."""
        recipe = RECIPES[name_of(precision)]
        total = PAIR_BYTES * sizes.rows * len(self.spec.by_pair)
        for array, letters in self._counted():
            shape, operand = tuple(sizes.letters[letter] for letter in letters), array.operand_of(recipe)
            total += prod(shape) * (recipe.element.bits // 8 if operand else ITEM_BYTES[array.dtype])
            total += ITEM_BYTES["float32"] * prod(scales_shape(operand.scale, shape)) if operand else 0
        return float(total)

    def tiles_of(self, sizes: Sizes, element: Element = BF16) -> TileConfig | None:
        """The tiles that a call of these ``sizes`` and this ``element`` takes, None where it is not made of tiles."""
        return QUANTIZED if element.scales else self.tiles(sizes) if self.tiles else None

    def _counted(self) -> list[tuple[Array, list[str]]]:
        """The arrays that count, and the letters of their shapes."""
        arrays = (*self.spec.inputs, *self.spec.outputs)
        return [(array, array.shape.split()) for array in arrays if array.counted or not array.optional]


@cache
def tiled_kernel(
    file: str,
    entry: str,
    config: TileConfig,
    build: Build,
    *,
    cluster_widths: tuple[int, ...] = (),
    tails: bool = False,
    widths: tuple[int, ...] = (128, 256),
    epilogue_warpgroups: int = 0,
    epilogue_registers: int = 40,
    low_rank: int = 0,
    arch: Arch = HOPPER,
    **macros: int | str,
) -> Kernel:
    """A kernel on top of its architecture's mainloop.cuh: the same object for the same arguments.

    tails: whether it may have `tickets` and `few_rows`.  widths: the columns that its tiles may have.  cluster_widths: those that
    they may have in clusters of two. ValueError for a config of others.
    epilogue_warpgroups: 1 for a fourth warpgroup, which does the epilogue.
    low_rank: LOW_RANK of mainloop.cuh.
    """
    if arch is AMPERE:
        return _kernel_of_ampere(file, entry, config, build, tuple((macros | {"LOW_RANK": low_rank > 0}).items()))
    alone, narrow = config.cluster == 1, config.tile_n == 64
    or_wide = "".join(f" or tile_n={width}" for width in cluster_widths)
    for holds, expected in (
        (config.stages != 8 or narrow, "stages=8 beside tile_n=64 alone"),
        (config.tile_n in widths, f"tile_n={' or '.join(map(str, widths))} for {entry}"),
        (alone or config.tile_n in cluster_widths, f"cluster=1{or_wide} for {entry}"),
        (tails or not config.tickets, f"tickets=False for {entry}"),
        (tails or not config.few_rows, f"few_rows=False for {entry}"),
        (alone or not config.tickets, f"tickets=False beside cluster={config.cluster}"),
    ):
        checks.require(holds, "config", expected, config)
    macros = {
        "BN": config.tile_n,
        "CLUSTER": config.cluster,
        "STAGES": config.stages,
        "DEFERRED": config.deferred,
        "TICKETS": config.tickets,
        "EPILOGUE_WARPGROUPS": epilogue_warpgroups,
        "EPILOGUE_REGISTERS": epilogue_registers,
        "LOW_RANK": low_rank,
        **macros,
        **({"FEW_ROWS": True} if config.few_rows else {}),
        "SMEM_LIMIT": arch.smem_limit,
        **DEVICE_CONSTANTS,
    }
    threads, start_registers = (4 * WARPGROUP, 128) if epilogue_warpgroups else (3 * WARPGROUP, None)
    options = tuple(f"-D{macro}" for macro in build.debug)
    return Kernel(file, entry, macros, arch.smem_limit, threads, start_registers, options, build.sources, arch)


@cache
def _kernel_of_ampere(
    file: str, entry: str, config: TileConfig, build: Build, macros: tuple[tuple[str, int | str], ...]
) -> Kernel:
    """A warp multiplies WARP_ROWS, of ``macros`` or 64, by 64 of a tile (cuda/ampere/mainloop.cuh); or, of few rows and frozen
    weights, all rows of a tile by 16 (few_rows.cu)."""
    options = tuple(f"-D{macro}" for macro in build.debug)
    if config == FEW_TILES:
        smem = 2 * FEW_BLOCK * FEW_AHEAD * 256 + 4 * (MAX_EXPERTS + 1)  # two stages and the schedule
        own: dict[str, int | str] = {"BN": config.tile_n, "BM": FEW_BLOCK, "AHEAD": FEW_AHEAD, "CTAS": FEW_CTAS}
        of = DEVICE_CONSTANTS | dict(macros) | own | {"SMEM_LIMIT": smem}
        path = f"{AMPERE.folder}/few_rows.cu"
        return Kernel(path, entry, of, smem, 2 * config.tile_n, None, options, build.sources, AMPERE)
    plain = TileConfig(tile_n=config.tile_n, stages=2, deferred=False)
    fits = config == plain and config.tile_n in (128, 256)
    checks.require(fits, "config", "tile_n=128 or 256, stages=2, deferred=False and no other option on ampere", config)
    sizes = {"BN": config.tile_n, "STAGES": config.stages, "WARP_ROWS": 64}
    defines = {**sizes, **dict(macros), "SMEM_LIMIT": AMPERE.smem_limit, **DEVICE_CONSTANTS}
    threads = 32 * (BM // int(defines["WARP_ROWS"])) * (config.tile_n // SLAB)
    path = f"{AMPERE.folder}/{file}"
    return Kernel(path, entry, defines, AMPERE.smem_limit, threads, None, options, build.sources, AMPERE)


def quantized_kernel(
    file: str,
    entry: str,
    config: TileConfig | None,
    build: Build,
    macros: Mapping[str, int | str],
    variant: Variant,
    *,
    gather: bool = True,
    floats: bool = False,
) -> Kernel:
    """`tiled_kernel` of quantized operands.  variant: bias, rank, arch.  gather: whether it takes tokens, and quantizes the rows
    that it makes; else it takes operands in blocks.  floats: whether tokens have float32 scales, in blocks too."""
    operands = {
        "B_MN": 0,
        "HAS_BIAS": int(variant.bias),
        "FP8": 1,
        "GATHER": gather,
        "BLOCK_SCALES": floats or not gather,
    }
    how: dict[str, Any] = {**operands, "PAIRED_ROWS": gather, "low_rank": variant.low_rank, "arch": variant.arch}
    return tiled_kernel(file, entry, config or QUANTIZED, build, tails=gather, widths=(256,), **how | {**macros})
