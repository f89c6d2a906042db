"""What every product has in common: a line in the registry, a kernel made of tiles. Its operands: arguments.py.

A product is one .py of this folder beside one .cu of cuda/ of the same name. Its file holds, in this order: what it computes
and the paper's line, the check (which its twin shares), the kernel, the plan, the launch, operations and least bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import DEVICE_CONSTANTS, SMEM_LIMIT, WARPGROUP, TileConfig

SHAPES = 1024  # whose plans are kept, of each product
TRANSPOSED = (
    "swiglu",
    "alternating(clamped_swiglu)",
)  # activations that layers with transposed weights have, in compile-all

DEBUG: tuple[str, ...] = ()
"""Further macros for every product's kernel (ptx.cuh: INJECT_DELAYS, SPIN_LIMIT=...; timeline.cuh: TIMELINE): for tests, fuzzer
and lab."""


# --- How kernels are compiled ----------------------------------------------------------------------------------------------


class Build(NamedTuple):
    """What a launch's kernel is compiled with beside its tiles: further macros, and sources other than the package's."""

    debug: tuple[str, ...] = ()
    sources: Path | None = None


_edited: list[tuple[str, Path]] = []  # product, sources: the last one of a product holds
_alone: ContextVar[Mapping[str, Build] | None] = ContextVar("builds", default=None)


def build_of(name: str) -> Build:
    """Of a product's kernels, for the launch that asks."""
    if (alone := _alone.get()) is not None:
        return alone.get(name, Build(DEBUG))
    if not _edited:  # as on the training path
        return Build(DEBUG)
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
    """What a product's cost depends on: T tokens, d model width, n expert width, E experts, K experts a token."""

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


class Layer(NamedTuple):
    """What decides which kernels a layer launches, whatever its number of tokens."""

    d_model: int
    top_k: int  # 0 if it varies
    activation: str
    up_bias: bool
    down_bias: bool
    fused: bool  # down_forward_fused runs instead of down_forward and combine
    f32_weight_grads: bool
    transposed: bool = False  # weights (E, d, G n) and (E, n, d)


@dataclass(frozen=True)
class Product:
    """One product, for all that lists products: compile-all, `prepare`, tuner, benchmarks, tests.

    name: as users call it.  run: the public function.  kernel: ``kernel(config, **variant)``, None where tiles don't matter.
    kernels: every kernel that the layers of tests and benchmarks reach.  for_layer: those that a layer launches.
    operations, least_bytes: of one call; `blazeproto.cost` turns them into floors.
    """

    name: str
    run: Callable[..., Any]
    kernels: Callable[[], Iterable[Kernel]]
    for_layer: Callable[[Layer], list[Kernel]]
    operations: Callable[[Sizes], float]
    least_bytes: Callable[[Sizes], float]
    kernel: Callable[..., Kernel] | None = None


@cache
def tiled_kernel(
    file: str,
    entry: str,
    config: TileConfig,
    debug: tuple[str, ...],
    sources: Path | None = None,
    *,
    clusters: bool = False,
    tickets: bool = False,
    widths: tuple[int, ...] = (128, 256),
    epilogue_warpgroups: int = 0,
    epilogue_registers: int = 40,
    low_rank: int = 0,
    **macros: int | str,
) -> Kernel:
    """A kernel on top of mainloop.cuh: the same object for the same arguments.

    clusters, tickets: whether it may run in clusters, or take tickets; ValueError for a config that does elsewhere.
    widths: the columns that its tiles may have; ValueError for a config of others.
    epilogue_warpgroups: 1 for a fourth warpgroup, which does the epilogue.
    low_rank: LOW_RANK of mainloop.cuh.
    """
    if (config.stages == 8) > (config.tile_n == 64):
        raise ValueError(f"config: expected stages=8 beside tile_n=64 alone, got {config}")
    if config.tile_n not in widths:
        raise ValueError(f"config: expected tile_n={' or '.join(map(str, widths))} for {entry}, got {config}")
    if config.cluster != 1 and not clusters:
        raise ValueError(f"config: expected cluster=1 for {entry}, got {config}")
    if config.tickets and not tickets:
        raise ValueError(f"config: expected tickets=False for {entry}, got {config}")
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
        **DEVICE_CONSTANTS,
    }
    threads, start_registers = (4 * WARPGROUP, 128) if epilogue_warpgroups else (3 * WARPGROUP, None)
    options = tuple(f"-D{macro}" for macro in debug)
    return Kernel(file, entry, macros, SMEM_LIMIT, threads, start_registers, options, sources)
