"""Products with a block-sparse matrix: what sdd.py and dsd.py share. MegaBlocks §5.1; cuda/blocks.cuh has the format.

A matrix S (M, N) keeps some of its 128 x 128 blocks, values (B, 128, 128), row by row. The topology says where they belong; it is
a record of int32 arrays (`blazeproto.blocksparse.Topology`), of which nothing is taken but its fields:

    shape             (M, N), multiples of 128
    row_indices       (B,)                 a block's row of blocks
    column_indices    (B,)                 its column
    row_offsets       (M / 128 + 1,)       where each row's blocks begin
    column_offsets    (N / 128 + 1,)       where each column's begin in the transposed order
    block_offsets_t   (B,)                 where each block of the transposed order lies
    tiles             (B, 4)               block, row, column, and the next block's column or -1: what SDD computes at a time
    tile_count        (1,)                 how many there are

B is a capacity: there are row_offsets[-1] blocks, a number that the host need not know. Memory behind them is neither read nor
written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from blazeproto.gemm.arguments import Arguments, Array, TwinArguments
from blazeproto.gemm.launch import Params, dense_box
from blazeproto.gemm.specification import Specification
from blazeproto.gemm.tiles import BM
from blazeproto.runtime import checks

SWAPPED = str.maketrans("MN", "NM")
BLOCK = BM  # rows and columns of a block
SQUARE = f"{BLOCK} {BLOCK}"  # a block's shape
FIELDS = {
    "row_indices": "B",
    "column_indices": "B",
    "row_offsets": "rows",
    "column_offsets": "columns",
    "block_offsets_t": "B",
    "tiles": "B 4",
    "tile_count": "1",
}
BLOCK_PARAMS = Params(
    "BlockParams",
    "blocks.cuh",
    maps=("a", "b", "out"),
    words=("row_indices", "column_indices", "offsets", "block_offsets_t", "tiles", "tile_count"),
    numbers=("lines", "reduction", "columns"),
)


def values_box(count: int, box: tuple[int, int]) -> Any:
    """The box that TMA moves of values (B, 128, 128). box: columns and rows of a block."""
    return dense_box((BLOCK, BLOCK, max(count, 1)), (*box, 1))


class TopologyArrays(Protocol):
    """A shape and the arrays of `FIELDS`: `blazeproto.blocksparse.Topology`."""

    @property
    def shape(self) -> tuple[int, int]: ...


# --- Arguments -----------------------------------------------------------------------------------------------------------


class BlockArguments(Arguments):
    """The arrays of a call with a topology, checked. Letters: M, N of its shape, B its capacity."""

    def _known_sizes(self, call: Mapping[str, Any]) -> dict[str, int]:
        self.topology = topology = call["topology"]
        missing = [name for name in ("shape", *FIELDS) if not hasattr(topology, name)]
        if missing:
            raise TypeError(f"topology: expected a Topology, got {type(topology).__name__} without {missing[0]}")
        if not isinstance(topology.shape, tuple) or len(topology.shape) != 2:
            raise TypeError(f"topology.shape: expected two ints, got {topology.shape!r}")
        M, N = (checks.integer("topology.shape", size, least=0) for size in topology.shape)
        if M % BLOCK or N % BLOCK:
            raise ValueError(f"topology.shape: expected multiples of {BLOCK}, got {topology.shape}")
        (capacity,) = self._view("topology.row_indices", topology.row_indices).shape[:1] or (0,)
        return {"M": M, "N": N, "B": capacity, "rows": M // BLOCK + 1, "columns": N // BLOCK + 1}

    def lists(self) -> dict[str, Any]:
        """The topology's arrays, checked."""
        return {
            name: self._checked(f"topology.{name}", getattr(self.topology, name), shape, "int32")
            for name, shape in FIELDS.items()
        }


class TwinBlockArguments(BlockArguments, TwinArguments):
    """Those of a twin's call, NumPy's."""


@dataclass(frozen=True)
class BlockSpecification(Specification):
    """For a product that takes a topology and no dispatch. Its formula's ``m`` is a `Blocks`.

    The shapes hold for a call that transposes nothing. With ``transpose_s`` the dense matrices have M for N and N for M; one that
    is transposed itself lies the other way round.
    """

    arguments = BlockArguments, TwinBlockArguments

    def shape_in(self, array: Array, call: Mapping[str, Any]) -> str:
        """As `Specification.shape_in`."""
        shape = array.shape.translate(SWAPPED) if call.get("transpose_s") else array.shape
        return " ".join(reversed(shape.split())) if call.get(f"transpose_{array.name}") else shape

    def operations(self, call: Mapping[str, Any], stored: Callable[[Any], Any]) -> "Blocks":
        """As `Specification.operations`."""
        return Blocks(call["topology"])


# --- The formulas' operations ----------------------------------------------------------------------------------------------


class Blocks:
    """Operations on NumPy arrays with one topology; with ``join=torch.cat`` on torch's, which it differentiates."""

    def __init__(self, topology: Any, join: Callable[[list[Any]], Any] = np.concatenate) -> None:
        count = int(topology.row_offsets[-1])
        self.join = join
        self.rows, self.columns = topology.row_indices[:count], topology.column_indices[:count]
        order = topology.block_offsets_t[:count]
        self.lines = (
            (topology.row_offsets.tolist(), None, self.columns),
            (topology.column_offsets.tolist(), order, self.rows),
        )

    def sampled(self, a: Any, b: Any) -> Any:
        """(M, k), (k, N) → (blocks, 128, 128): the topology's blocks of a b."""
        of_rows = a.reshape(-1, BLOCK, a.shape[1])[self.rows]
        of_columns = b.reshape(len(b), -1, BLOCK).swapaxes(0, 1)[self.columns]
        return of_rows @ of_columns

    def times(self, values: Any, b: Any, *, transposed: bool) -> Any:
        """(B, 128, 128), (N, m) → (M, m): S b; ``transposed``: (M, m) → (N, m), S^T b. A line without blocks gives zeros."""
        offsets, order, places = self.lines[transposed]
        of_lines, b = [], b.reshape(len(b) // BLOCK, BLOCK, b.shape[1])
        for begin, end in pairwise(offsets):
            mine = slice(begin, end) if order is None else order[begin:end]
            blocks, parts = values[mine], b[places[mine]]
            blocks = blocks.swapaxes(1, 2) if transposed else blocks
            of_lines.append((blocks @ parts).sum(0))
        if not of_lines:  # no rows, of which gradients are zeros
            return values.reshape(-1, BLOCK)[:0] @ b.reshape(len(b) * BLOCK, b.shape[2])[:BLOCK]
        return self.join(of_lines)
