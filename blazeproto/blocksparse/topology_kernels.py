"""The kernel of `topology_of`: every entry in closed form, once each block of threads has added up the experts.

Expert e has r rows of blocks, T_e / 128 rounded up, and w columns, n_e / 128. Its r w blocks lie together in either order, from
block ``first`` on, the sum of r w over the experts before it:

    block first + i w + j                   row i, column j of the expert
    entry first + j r + i of the transposed order: the same block
    tile  i ceil(w / 2) + k                 blocks 2 k and 2 k + 1 of row i; 2 k alone at the end of an odd row

A thread finds the expert of an entry among the E sums in shared memory. For H with gate and up, w is 2 n_e / 128.

Floor: bytes, 4 for each entry of a list, 16 of tiles. At T = 32768, E = 64, K = 8, n = 1024: 2.6 MB
written (with gate and up 3.6 MB), 2.1 MB read.
"""

# As in dispatch/tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from typing import Any

import numpy as np

from blazeproto.runtime.numba import cuda, int32, int64
from blazeproto.runtime.warp import WARP, block_scan, device

HEIGHT = 128  # of a block: gemm.blocks.BLOCK


@device
def expert_of(offsets, num_experts, place):
    """The last e with offsets[e] <= place, which is below offsets[E]: what has entries, for of equal offsets it is the last."""
    low, high = int32(0), int32(num_experts)
    while high - low > 1:
        middle = int32((low + high) >> 1)
        if offsets[middle] <= place:
            low = middle
        else:
            high = middle
    return low


def make_topology(threads: int, num_experts: int, columns: tuple[int, ...], halves: int) -> Any:
    """down's arrays, up's with ``halves`` 2, and the padding's.

    columns: (E + 1,) where each expert's blocks' columns begin; (n / 128,) where all have as many.
    """
    few = len(columns) == 1
    given = np.array(columns, np.int32)
    size, scratch_size = num_experts + 1, 2 * threads // WARP

    @device
    def write(
        half,
        row_indices,
        column_indices,
        row_offsets,
        column_offsets,
        block_offsets_t,
        tiles,
        tile_count,
        first_row,
        first_block,
        first_tile,
        first_column,
        num_rows,
        capacity,
    ):
        """One topology, with ``half`` times the columns and blocks; first_...: of each expert, and the end."""
        thread = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        all_threads = int64(cuda.gridDim.x) * threads
        blocks, num_tiles = half * first_block[num_experts], first_tile[num_experts]
        if thread == 0:
            tile_count[0] = num_tiles
        for at in range(thread, half * capacity, all_threads):
            row, column, transposed = int32(-1), int32(-1), int32(-1)
            if at < blocks:
                e = expert_of(first_block, num_experts, at // half)
                high, wide = first_row[e + 1] - first_row[e], half * (first_column[e + 1] - first_column[e])
                inside = int32(at - half * first_block[e])
                row = int32(first_row[e] + inside // wide)
                column = int32(half * first_column[e] + inside % wide)
                transposed = int32(half * first_block[e] + inside % high * wide + inside // high)
            row_indices[at], column_indices[at], block_offsets_t[at] = row, column, transposed
            block, row, column, following = int32(-1), int32(-1), int32(-1), int32(-1)
            if at < num_tiles:
                e = expert_of(first_tile, num_experts, at)
                wide = int32(half * (first_column[e + 1] - first_column[e]))
                in_row = int32((wide + 1) >> 1)
                inside = int32(at - first_tile[e])
                i, k = int32(inside // in_row), int32(2 * (inside % in_row))
                block = int32(half * first_block[e] + i * wide + k)
                row, column = int32(first_row[e] + i), int32(half * first_column[e] + k)
                following = int32(column + 1) if k + 1 < wide else int32(-1)
            tiles[4 * at], tiles[4 * at + 1], tiles[4 * at + 2], tiles[4 * at + 3] = block, row, column, following
        for at in range(thread, num_rows + 1, all_threads):
            begin = blocks
            if at < first_row[num_experts]:
                e = expert_of(first_row, num_experts, at)
                wide = first_column[e + 1] - first_column[e]
                begin = half * (first_block[e] + (at - first_row[e]) * wide)
            row_offsets[at] = int32(begin)
        for at in range(thread, half * first_column[num_experts] + 1, all_threads):
            begin = blocks
            if at < half * first_column[num_experts]:
                e = expert_of(first_column, num_experts, at // half)
                high = first_row[e + 1] - first_row[e]
                begin = half * first_block[e] + (at - half * first_column[e]) * high
            column_offsets[at] = int32(begin)

    @device
    def place(
        pair_indices, offsets, index_map, row_pairs, pair_rows, row_offsets, first_row, begins, num_rows, num_pairs
    ):
        """The padding.  begins: the experts' offsets."""
        thread = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        all_threads = int64(cuda.gridDim.x) * threads
        for at in range(thread, num_experts + 1, all_threads):
            row_offsets[at] = int32(HEIGHT * first_row[at])
        for at in range(thread, HEIGHT * num_rows, all_threads):
            pair = int32(-1)
            if at < HEIGHT * first_row[num_experts]:
                e = expert_of(first_row, num_experts, at // HEIGHT)
                row = begins[e] + at - HEIGHT * first_row[e]
                if row < begins[e + 1]:
                    pair = pair_indices[row]
            row_pairs[at] = pair
        for at in range(thread, num_pairs, all_threads):
            row = index_map[at]
            if row >= 0:
                e = expert_of(begins, num_experts, row)
                row = int32(HEIGHT * first_row[e] + row - begins[e])
            pair_rows[at] = row

    def make_topology(
        pair_indices, offsets, index_map,
        row_indices, column_indices, row_offsets, column_offsets, block_offsets_t, tiles, tile_count,
        up_row_indices, up_column_indices, up_row_offsets, up_column_offsets, up_block_offsets_t, up_tiles, up_tile_count,
        row_pairs, pair_rows, expert_row_offsets,
        num_rows, capacity, num_pairs,
    ):  # fmt: skip
        scratch = cuda.shared.array(scratch_size, int32)
        begins = cuda.shared.array(size, int32)
        first_row = cuda.shared.array(size, int32)
        first_block = cuda.shared.array(size, int32)
        first_tile = cuda.shared.array(size, int32)
        first_column = cuda.shared.array(size, int32)
        table = cuda.const.array_like(given)

        e = int32(cuda.threadIdx.x)
        rows, wide, column = int32(0), int32(0), int32(0)
        if e < num_experts:
            begins[e] = offsets[e]
            rows = int32((offsets[e + 1] - offsets[e] + HEIGHT - 1) // HEIGHT)
            column = int32(e * table[0] if few else table[e])
            wide = int32(table[0] if few else table[e + 1] - table[e])
            first_column[e] = column
        row, all_rows, block, all_blocks = block_scan(scratch, e, threads, rows, int32(rows * wide))
        cuda.syncthreads()  # the scratch has been read
        own_tiles = int32(rows * ((wide + 1) >> 1))
        tile, all_tiles, _, _ = block_scan(scratch, e, threads, own_tiles, int32(0))
        if e < num_experts:
            first_row[e] = int32(row - rows)
            first_block[e] = int32(block - rows * wide)
            first_tile[e] = int32(tile - own_tiles)
        if e == num_experts - 1:
            begins[num_experts] = offsets[num_experts]
            first_row[num_experts] = all_rows
            first_block[num_experts] = all_blocks
            first_tile[num_experts] = all_tiles
            first_column[num_experts] = int32(column + wide)
        cuda.syncthreads()

        write(
            1, row_indices, column_indices, row_offsets, column_offsets, block_offsets_t, tiles, tile_count,
            first_row, first_block, first_tile, first_column, num_rows, capacity,
        )  # fmt: skip
        if halves == 2:  # twice the columns are as many tiles as down has blocks
            write(
                2, up_row_indices, up_column_indices, up_row_offsets, up_column_offsets, up_block_offsets_t, up_tiles,
                up_tile_count, first_row, first_block, first_block, first_column, num_rows, capacity,
            )  # fmt: skip
        place(
            pair_indices, offsets, index_map, row_pairs, pair_rows, expert_row_offsets, first_row, begins, num_rows,
            num_pairs,
        )  # fmt: skip

    return make_topology
