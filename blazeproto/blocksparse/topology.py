"""`Topology`: which 128 x 128 blocks a block-sparse matrix has. MegaBlocks §5.1.3 and §5.1.4: hybrid blocked-CSR-COO with
transpose indices. `Padding`: which rows its experts have, in whole blocks. `topology_of` makes both of a `Dispatch`.

        column  0 1 2          row_indices      0 0 1 2 2       block_offsets_t  0 3 1 2 4
    row 0       a b .          column_indices   0 1 1 0 2
        1       . c .          row_offsets      0 2 3 5         the transposed order is a d b c e
        2       d . e          column_offsets   0 2 4 5

H = X W_1 is block-diagonal but for the experts' unequal numbers of rows: MegaBlocks §4.1, figure 3. One kernel
(topology_kernels.py) makes all from the experts' offsets, without waiting for the device: shapes are bounds that the dispatch's
shapes give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np

from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.arguments import Arguments, TwinArguments
from blazeproto.gemm.blocks import BLOCK, FIELDS
from blazeproto.gemm.tiles import MAX_EXPERTS
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import NumbaKernel
from blazeproto.runtime.shown import Shown

THREADS = 512  # of a block: at least one an expert
MAX_BLOCKS = 132
PADDING = ("row_pairs", "pair_rows", "expert_row_offsets")


@dataclass(frozen=True)
class Topology(Shown):
    """The blocks of a matrix of ``shape`` (M, N), multiples of 128; B is a capacity, of which row_offsets[-1] are in use.

    row_indices, column_indices: (B,) int32, of each block, row by row.
    row_offsets: (M / 128 + 1,) int32, where each row's blocks begin.
    column_offsets: (N / 128 + 1,) int32, where each column's begin in the transposed order, column by column.
    block_offsets_t: (B,) int32, where each block of that order lies.
    tiles: (B, 4) int32: what SDD computes at a time: a block, its row, its column, and the next block's column where that is of
        the same row and belongs to it, else -1.  tile_count: (1,) int32.
    """

    shape: tuple[int, int]
    row_indices: Any
    column_indices: Any
    row_offsets: Any
    column_offsets: Any
    block_offsets_t: Any
    tiles: Any
    tile_count: Any

    @classmethod
    def of_blocks(cls, mask: Any) -> Self:
        """The topology of any set of blocks, with NumPy's arrays. MegaBlocks §5.1.3.

        mask (M / 128, N / 128) bool, NumPy's: True for each block that S keeps. TypeError or ValueError for anything else.
        """
        if not isinstance(mask, np.ndarray) or mask.dtype != bool:
            raise TypeError(f"mask: expected a NumPy array of bool, got {getattr(mask, 'dtype', type(mask).__name__)}")
        if mask.ndim != 2:
            raise ValueError(f"mask: expected two dimensions, got {mask.shape}")
        rows, columns = np.nonzero(mask)
        by_column = np.lexsort((rows, columns))
        row_offsets, column_offsets = (np.append(0, mask.sum(axis).cumsum()) for axis in (1, 0))
        places = np.arange(len(rows)) - row_offsets[rows]  # of each block in its row
        first = np.flatnonzero(places % 2 == 0)
        tiles = np.full((len(rows), 4), -1)
        following = np.minimum(first + 1, len(rows) - 1)
        second = np.where((following > first) & (rows[following] == rows[first]), columns[following], -1)
        tiles[: len(first)] = np.stack([first, rows[first], columns[first], second], axis=1)
        arrays = (rows, columns, row_offsets, column_offsets, by_column, tiles, [len(first)])
        shape = (mask.shape[0] * BLOCK, mask.shape[1] * BLOCK)
        return cls(shape, *(np.ascontiguousarray(array, np.int32) for array in arrays))


@dataclass(frozen=True)
class Padding(Shown):
    """Rows of pairs in expert order, each expert's padded to a multiple of 128; M of them, of which the last may be no expert's.

    row_pairs: (M,) int32, the pair in each row, or -1.  pair_rows: (P,) int32, the row of each pair, or -1.
    expert_row_offsets: (E + 1,) int32, where each expert's rows begin, and the end.

    For experts of 2, 0 and 1 pairs, were a block 4 rows high:

        row_pairs             1 3 - -   0 - - -   - - - -
        expert_row_offsets    0         4 4       8
    """

    row_pairs: Any
    pair_rows: Any
    expert_row_offsets: Any


# --- Of a dispatch ------------------------------------------------------------------------------------------------------


class BlockBounds(NamedTuple):
    """Sizes in blocks, which the host knows."""

    rows: int  # M / 128
    columns: tuple[int, ...]  # (E + 1,) where each expert's begin
    capacity: int  # B

    def of_topology(self, halves: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays, by name.  halves: times the columns."""
        sizes = {"B": halves * self.capacity, "rows": self.rows + 1, "columns": halves * self.columns[-1] + 1}
        return {
            name: tuple(int(word) if word.isdigit() else sizes[word] for word in words.split())
            for name, words in FIELDS.items()
        }


def topology_of(
    dispatch: Dispatch, widths: int | tuple[int, ...], halves: int = 1, *, stream: int | None = None
) -> tuple[Topology, Topology, Padding]:
    """(up, down, padding): the topologies of H, (M, G N), and of act, (M, N), and what lies in their rows. MegaBlocks §4, §5.1.

    dispatch: of E experts, at most 512, and R rows. In its expert order each expert has ceil(rows / 128) rows of blocks, so that
    M = 128 (R // 128 + min(E, R)) is enough; those that are left have no blocks.
    widths: n, or n_e of each expert, multiples of 128. N is their sum; a row of blocks has the n_e / 128 columns of its expert.
    halves: G: 2 where H has gate and up, side by side for each expert: 2 n_e columns, whose topology is ``up``. 1: up is down.
    stream: a raw cudaStream_t; default: the caller's current one.

    Arrays are int32, of the kind that the dispatch has; B = (M / 128) (max n_e / 128), and G B for ``up``; what lies behind those
    in use is -1. TypeError or ValueError names the argument, what was expected and what came; nothing is launched.
    """
    checks.instance("dispatch", dispatch, Dispatch)
    made = topology_arrays(dispatch.token_index_map, dispatch, widths, halves, stream=stream)
    bounds = bounds_of(dispatch, widths, halves)
    (M, N), count = (BLOCK * bounds.rows, BLOCK * bounds.columns[-1]), len(FIELDS)
    down = Topology((M, N), *made[:count])
    up = Topology((M, halves * N), *made[count : 2 * count]) if halves > 1 else down
    return up, down, Padding(*made[-len(PADDING) :])


def bounds_of(dispatch: Dispatch, widths: Any, halves: int) -> BlockBounds:
    """The bounds, checked; raises what `topology_of` does."""
    num_experts = checks.integer("dispatch.num_experts", dispatch.num_experts, least=1)
    if checks.integer("halves", halves) not in (1, 2):
        raise ValueError(f"halves: expected 1 or 2, got {halves}")
    several = isinstance(widths, tuple | list)
    if several and len(widths) != num_experts:
        raise ValueError(f"widths: expected {num_experts}, one an expert, got {len(widths)}")
    for index, width in enumerate(widths if several else [widths]):
        name = f"widths[{index}]" if several else "widths"
        if checks.integer(name, width) < 1 or width % BLOCK:
            raise ValueError(f"{name}: expected a positive multiple of {BLOCK}, got {width}")
    of_experts = [width // BLOCK for width in (widths if several else [widths] * num_experts)]
    rows = dispatch.num_rows // BLOCK + min(num_experts, dispatch.num_rows)
    return BlockBounds(rows, tuple(accumulate(of_experts, initial=0)), rows * max(of_experts))


# --- The twin ------------------------------------------------------------------------------------------------------------


def _in_numpy(
    token_index_map: Any, dispatch: Dispatch, widths: Any, halves: int, *, stream: int | None = None
) -> tuple[Any, ...]:
    """The twin of `topology_arrays`: the blocks as a mask, the rows by the experts' offsets."""
    TwinArguments(locals()).lists()
    bounds, offsets = bounds_of(dispatch, widths, halves), dispatch.expert_token_offsets
    counts = -(-np.diff(offsets) // BLOCK)
    of_rows = np.repeat(np.arange(len(counts)), counts)  # the expert of each row of blocks

    def topology(halves: int) -> list[Any]:
        of_columns = np.repeat(np.arange(len(counts)), halves * np.diff(bounds.columns))
        mask = np.zeros((bounds.rows, len(of_columns)), bool)
        mask[: len(of_rows)] = of_rows[:, None] == of_columns
        made = Topology.of_blocks(mask)
        return [_padded(getattr(made, name), shape) for name, shape in bounds.of_topology(halves).items()]

    begins = BLOCK * np.append(0, counts.cumsum())  # of the experts' padded rows
    used = dispatch.expert_pair_indices[: offsets[-1]]
    rows = np.arange(len(used)) + np.repeat(begins[:-1] - offsets[:-1], np.diff(offsets))
    row_pairs, pair_rows = np.full(BLOCK * bounds.rows, -1, np.int32), np.full(len(token_index_map), -1, np.int32)
    row_pairs[rows], pair_rows[used] = used, rows
    down = topology(1)
    return (*down, *(topology(2) if halves > 1 else down), row_pairs, pair_rows, begins.astype(np.int32))


def _padded(values: Any, shape: tuple[int, ...]) -> Any:
    made = np.full(shape, -1, np.int32)
    made[: len(values)] = values
    return made


# --- The kernel ----------------------------------------------------------------------------------------------------------


@any_library(_in_numpy, dict.fromkeys([*FIELDS, *(f"up.{name}" for name in FIELDS), *PADDING], "int32"))
def topology_arrays(
    token_index_map: Any, dispatch: Dispatch, widths: Any, halves: int, *, stream: int | None = None
) -> tuple[Any, ...]:
    """The arrays of `topology_of`, one behind the other: down's, up's, or down's again, and the padding's."""
    given = Arguments(locals())
    lists, bounds = given.lists(), bounds_of(dispatch, widths, halves)
    if (num_experts := given.sizes["E"]) > MAX_EXPERTS:
        raise ValueError(f"dispatch.num_experts: expected at most {MAX_EXPERTS}, got {num_experts}")
    first, sizes = lists["token_index_map"], (bounds.rows, bounds.capacity, given.sizes["P"])
    padding = dict(zip(PADDING, ((BLOCK * bounds.rows,), (given.sizes["P"],), (num_experts + 1,)), strict=True))
    with memory.on_stream(first, stream) as stream:

        def made(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[Any, Any]]:
            """New arrays and their views."""
            return [arrays.output(name, None, "int32", shape, first) for name, shape in shapes.items()]

        down = made(bounds.of_topology(1))
        out = [*down, *(made(bounds.of_topology(halves)) if halves > 1 else down), *made(padding)]
        taken = (lists["expert_pair_indices"], lists["expert_token_offsets"], first, *(view for _, view in out))
        blocks = min(max(-(-max(BLOCK * sizes[0], halves * sizes[1], sizes[2]) // THREADS), 1), MAX_BLOCKS)
        pointers = [memory.argument(array) for array in taken]
        kernel(bounds.columns, halves).launch(first.device, stream, blocks, 0, *pointers, *sizes)
    return tuple(array for array, _ in out)


@lru_cache(maxsize=256)
def kernel(columns: tuple[int, ...], halves: int) -> NumbaKernel:
    """`topology_kernels.make_topology`."""
    from blazeproto.blocksparse import topology_kernels

    pointers = "int32* " * (3 + 2 * len(FIELDS) + len(PADDING))
    even = columns == tuple(range(0, columns[-1] + 1, columns[1]))
    return NumbaKernel(
        topology_kernels.make_topology,
        f"{pointers}int64 int64 int64",
        threads=THREADS,
        num_experts=len(columns) - 1,
        columns=columns[1:2] if even else columns,
        halves=halves,
    )
