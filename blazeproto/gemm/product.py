"""What every product has in common: a line in the registry, operands to check, a kernel made of tiles.

A product is one .py of this folder beside one .cu of cuda/ of the same name. Its file holds, in this order: what it computes
and the paper's line, the check (in the public function), the kernel, the plan, the launch, operations and least bytes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Self

from blazeproto.dispatch.structures import Addresses, Dispatch, addresses
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import (
    CHUNK,
    DEVICE_CONSTANTS,
    GATHERED_ELEMENTS,
    MAX_EXPERTS,
    SMEM_LIMIT,
    WARPGROUP,
    TileConfig,
)
from blazeproto.runtime.arrays import DeviceArray, current_device, current_stream, empty, expect

SHAPES = 1024  # whose plans are kept, of each product

DEBUG: tuple[str, ...] = ()
"""Further macros for every product's kernel (ptx.cuh: INJECT_DELAYS, SPIN_LIMIT=...), for tests and the fuzzer."""


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


@dataclass(frozen=True)
class Product:
    """One product, for all that lists products: compile-all, `prepare`, tuner, benchmarks, tests.

    run: the public function.  kernel: ``kernel(config, **variant)``, None where tiles don't matter.
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
    *,
    clusters: bool = False,
    epilogue_warpgroups: int = 0,
    epilogue_registers: int = 40,
    **macros: int | str,
) -> Kernel:
    """A kernel on top of mainloop.cuh: the same object for the same arguments.

    clusters: whether it may run in clusters, which only weight gradients do; ValueError for a config that does elsewhere.
    epilogue_warpgroups: 1 for a fourth warpgroup, which does the epilogue.
    """
    if config.cluster != 1 and not clusters:
        raise ValueError(f"config: expected cluster=1 for {entry}, got {config}")
    macros = {
        "BN": config.tile_n,
        "CLUSTER": config.cluster,
        "STAGES": config.stages,
        "DEFERRED": config.deferred,
        "EPILOGUE_WARPGROUPS": epilogue_warpgroups,
        "EPILOGUE_REGISTERS": epilogue_registers,
        **macros,
        **DEVICE_CONSTANTS,
    }
    threads, start_registers = (4 * WARPGROUP, 128) if epilogue_warpgroups else (3 * WARPGROUP, None)
    return Kernel(file, entry, macros, SMEM_LIMIT, threads, start_registers, tuple(f"-D{macro}" for macro in debug))


# --- The arrays of a call --------------------------------------------------------------------------------------------------


class Arguments:
    """The arrays of one call of a product, checked; those that the caller gives no memory for are made.

    A shape is written as in the docstrings, "E h d" for (E, h, d). T, R, P and E are the dispatch's; any other word is a
    width, which the first array that has it decides; a number is itself. "P" alone is met by any shape of P elements.

    TypeError for a wrong dtype, ValueError for anything else, naming the argument, what was expected and what came.
    """

    def __init__(self, dispatch: Dispatch, stream: int | None) -> None:
        self.dispatch, self.stream = dispatch, stream
        T, K = dispatch.num_tokens, dispatch.top_k
        P = T * K if K else dispatch.num_pairs
        self.sizes = {"T": T, "R": dispatch.num_rows, "P": P, "E": dispatch.num_experts}
        self.arrays: dict[str, Any] = {}  # by name: the caller's, or new ones
        self.views: dict[str, Any] = {}  # of these, as a launch takes them; None for an optional one that was not given

    def read(
        self,
        name: str,
        array: Any,
        shape: str,
        dtype: str = "bfloat16",
        *,
        optional: bool = False,
        gathered: bool = False,
    ) -> Self:
        """An array that must be given, unless it is ``optional``.  gathered: its rows are fetched by index."""
        self.arrays[name] = array
        self.views[name] = None if optional and array is None else self._checked(name, array, shape, dtype, gathered)
        return self

    def write(self, name: str, array: Any, shape: str, dtype: str = "bfloat16") -> Self:
        """An output or a workspace, whose lengths are known by now: a new one where ``array`` is None."""
        lengths: Any = self._lengths(shape)
        return self.read(name, empty(lengths, dtype) if array is None else array, shape, dtype)

    def located(self) -> Addresses:
        """Where the dispatch's lists lie, which are checked too, and where to launch: on the current GPU and the given stream,
        by default the current one of the first array."""
        shapes = {
            "expert_pair_indices": "R",
            "expert_token_offsets": str(self.sizes["E"] + 1),
            "token_index_map": str(self.sizes["P"]),
        }
        if self.dispatch.top_k is None:
            shapes |= {"pair_tokens": str(self.sizes["P"]), "token_offsets": str(self.sizes["T"] + 1)}
        lists: dict[str, Any] = {
            name: self._checked(f"dispatch.{name}", getattr(self.dispatch, name), shape, "int32")
            for name, shape in shapes.items()
        }
        first = next(array for array in self.views.values() if array is not None)
        stream = current_stream(first) if self.stream is None else self.stream
        return addresses(replace(self.dispatch, **lists), first.device, stream)

    def _lengths(self, shape: str) -> tuple[int | None, ...]:
        """None for one that no array has decided yet."""
        return tuple(int(word) if word.isdigit() else self.sizes.get(word) for word in shape.split())

    def _checked(self, name: str, array: Any, shape: str, dtype: str, gathered: bool = False) -> DeviceArray:
        by_pair = shape == "P"
        a = expect(name, array, dtype, None if by_pair else self._lengths(shape))
        if a.device != (here := current_device()):
            raise ValueError(f"{name}: expected an array on the current GPU, cuda:{here}, got one on cuda:{a.device}")
        odd_widths = dtype == "bfloat16" and any(width % CHUNK for width in a.shape[1:])
        for wrong, expected in (
            (odd_widths, f"widths that are multiples of {CHUNK}"),
            (by_pair and a.size != self.sizes["P"], f"{self.sizes['P']} elements, one a pair"),
            (len(a.shape) == 3 and not 1 <= a.shape[0] <= MAX_EXPERTS, f"1 to {MAX_EXPERTS} experts"),
            (gathered and a.size >= GATHERED_ELEMENTS, f"fewer than {GATHERED_ELEMENTS} elements to gather from"),
        ):
            if wrong:
                raise ValueError(f"{name}: expected {expected}, got shape {a.shape}")
        if not by_pair:
            self.sizes.update(zip(shape.split(), a.shape, strict=True))
        return a
