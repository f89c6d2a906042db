"""`Topology`: which 128 x 128 blocks a block-sparse matrix has. MegaBlocks §5.1.3 and §5.1.4: hybrid blocked-CSR-COO with
transpose indices. `Padding`: which rows its experts have, in whole blocks.

        column  0 1 2          row_indices      0 0 1 2 2       block_offsets_t  0 3 1 2 4
    row 0       a b .          column_indices   0 1 1 0 2
        1       . c .          row_offsets      0 2 3 5         the transposed order is a d b c e
        2       d . e          column_offsets   0 2 4 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from blazeproto.gemm.blocks import BLOCK
from blazeproto.runtime.shown import Shown


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
    def of_blocks(cls, mask: Any) -> Topology:
        """The topology of any set of blocks, with NumPy's arrays. MegaBlocks §5.1.3.

        mask (M / 128, N / 128) bool, NumPy's: which blocks there are. TypeError or ValueError for anything else.
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
