"""``method="dense"``: the three steps of MoEBlaze §4.2, as the paper writes them. No atomics; for reading, not for
speed.

    1. dense token map      map[token, expert] = slot + 1, all else 0               a thread a pair
    2. expert lengths       count each column's entries, tile by tile of tokens     a thread a (tile, expert)
                            sum over the tiles, then over the experts               scan_chunks of tiled.py; one block
    3. route indices        walk each column again; the running count is the row    a thread a (tile, expert)

                                  expert 0  1  2  3                       expert_pair_indices
        topk_experts    token 0      .   .  1  2      column 0: tokens 1, 2, 4 -> pairs 2, 4, 8, rows 0 1 2
        [2 3] [0 1]     token 1      1   2  .  .      column 1: tokens 1, 3    -> pairs 3, 6,    rows 3 4
        [0 3] [1 2]     token 2      1   .  .  2      …
        [0 3]           token 3      .   1  2  .
                        token 4      1   .  .  2

The paper gives a block to each expert and stores where every entry goes (its "location map"). Here neighbouring
threads take neighbouring experts, so that a row of the map is read as it lies in memory, and the location is the
loop's own counter.

Bytes: T·E of the map are written twice (cleared, marked) and read twice; then the ids and both lists.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64

from blazeproto.dispatch.launch import Buffers, Kernel, clear, part
from blazeproto.dispatch.tiled import SCAN_EXPERTS, scan_chunks
from blazeproto.dispatch.warp import inclusive_scan

MAX_TILES = 4096
TILE_TOKENS = 256  # at least
THREADS, SCAN_THREADS, SCAN_ROWS = 256, 1024, 32


def dense_token_map(threads: int, top_k: int, copy_ids: bool) -> Any:
    """Step 1. The map comes in cleared. Pairs get no row yet: an expert named twice in a token's row keeps one."""

    def dense_token_map(topk_experts, token_map, token_index_map, ids_copy, num_pairs, num_experts):
        pair = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if pair < num_pairs:
            expert = topk_experts[pair]
            valid = 0 <= expert < num_experts
            if valid:
                token_map[pair // top_k * num_experts + expert] = pair % top_k + 1
            if copy_ids:
                ids_copy[pair] = expert if valid else -1
            token_index_map[pair] = -1

    return dense_token_map


def expert_lengths(threads: int) -> Any:
    """Step 2. table[tile][e] = entries of column e in the tile's rows."""

    def expert_lengths(token_map, table, num_tokens, num_experts, tile_tokens, num_tiles):
        index = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if index < num_tiles * num_experts:
            tile, expert = index // num_experts, index % num_experts
            first = tile * tile_tokens
            count = int32(0)
            for token in range(first, min(first + tile_tokens, num_tokens)):
                if token_map[token * num_experts + expert] != 0:
                    count = int32(count + 1)
            table[index] = count

    return expert_lengths


def expert_offsets(threads: int) -> Any:
    """Between steps 2 and 3: the prefix sum over the experts' lengths. One block."""

    def expert_offsets(totals, expert_token_offsets, num_experts):
        scratch = cuda.shared.array(0, int32)
        thread = int32(cuda.threadIdx.x)
        share = (num_experts + threads - 1) // threads
        first = min(thread * share, num_experts)
        last = min(first + share, num_experts)
        own = int32(0)
        for e in range(first, last):
            own = int32(own + totals[e])
        row = int32(inclusive_scan(scratch, thread, int32(threads), own) - own)
        for e in range(first, last):
            expert_token_offsets[e] = row
            row = int32(row + totals[e])
        if thread == threads - 1:
            expert_token_offsets[num_experts] = row

    return expert_offsets


def route_indices(threads: int, top_k: int) -> Any:
    """Step 3. Both lists; rows that no pair took are marked at the end."""

    def route_indices(
        token_map,
        table,
        expert_token_offsets,
        expert_pair_indices,
        token_index_map,
        num_tokens,
        num_experts,
        tile_tokens,
        num_tiles,
    ):
        index = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        unused = expert_token_offsets[num_experts] + index
        while unused < num_tokens * top_k:
            expert_pair_indices[unused] = -1
            unused += int64(cuda.gridDim.x) * threads

        if index < num_tiles * num_experts:
            tile, expert = index // num_experts, index % num_experts
            row = int64(expert_token_offsets[expert]) + table[index]
            first = tile * tile_tokens
            for token in range(first, min(first + tile_tokens, num_tokens)):
                slot = int64(token_map[token * num_experts + expert])
                if slot != 0:
                    pair = token * top_k + slot - 1
                    expert_pair_indices[row] = pair
                    token_index_map[pair] = row
                    row += 1

    return route_indices


# --- The host's side -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    tile_tokens: int
    num_tiles: int
    slot_type: str  # of the map's entries

    def table_ints(self, num_experts: int) -> int:
        """The table and the totals."""
        return (self.num_tiles + 1) * num_experts


@lru_cache(maxsize=1024)
def plan(num_tokens: int, top_k: int) -> Plan:
    tile = max(TILE_TOKENS, -(-num_tokens // MAX_TILES))
    return Plan(tile, max(1, -(-num_tokens // tile)), "uint8" if top_k <= 255 else "uint16")


def workspace_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    chosen = plan(num_tokens, top_k)
    item = 1 if chosen.slot_type == "uint8" else 2
    return 4 * chosen.table_ints(num_experts) + num_tokens * num_experts * item


class Kernels(NamedTuple):
    token_map: Kernel
    lengths: Kernel
    scan: Kernel
    offsets: Kernel
    route: Kernel


@lru_cache(maxsize=256)
def kernels(top_k: int, ids: str, slots: str) -> Kernels:
    """The five kernels for one K and id type ("int32" or "int64"); compiled when first launched."""
    copy_ids, threads = ids == "int64", THREADS
    return Kernels(
        Kernel(
            dense_token_map,
            f"{ids}* {slots}* int32* int32* int64 int64",
            threads=threads,
            top_k=top_k,
            copy_ids=copy_ids,
        ),
        Kernel(expert_lengths, f"{slots}* int32* int64 int64 int64 int64", threads=threads),
        Kernel(scan_chunks, "int32* int32* int64 int64", threads=SCAN_THREADS, rows=SCAN_ROWS),
        Kernel(expert_offsets, "int32* int32* int64", threads=threads),
        Kernel(
            route_indices,
            f"{slots}* int32* int32* int32* int32* int64 int64 int64 int64",
            threads=threads,
            top_k=top_k,
        ),
    )


def run(buffers: Buffers, num_tokens: int, top_k: int, num_experts: int, ids: str, device: int, stream: int) -> None:
    """Launch the steps. ids: their dtype.  stream: a raw cudaStream_t."""
    chosen = plan(num_tokens, top_k)
    made = kernels(top_k, ids, chosen.slot_type)
    where = (device, stream)
    size, cells = chosen.num_tiles * num_experts, num_tokens * num_experts
    table, totals = part(buffers.workspace, 0, size, "int32"), part(buffers.workspace, 4 * size, num_experts, "int32")
    token_map = part(buffers.workspace, 4 * chosen.table_ints(num_experts), cells, chosen.slot_type)
    columns = (num_tokens, num_experts, chosen.tile_tokens, chosen.num_tiles)

    clear(token_map, cells * (1 if chosen.slot_type == "uint8" else 2), stream)
    pairs, threads = num_tokens * top_k, made.route.threads
    if pairs:
        made.token_map.launch(
            *where,
            -(-pairs // threads),
            0,
            buffers.ids,
            token_map,
            buffers.token_index_map,
            buffers.ids_copy,
            pairs,
            num_experts,
        )
    made.lengths.launch(*where, -(-size // threads), 0, token_map, table, *columns)
    scan_blocks = -(-num_experts // SCAN_EXPERTS)
    made.scan.launch(*where, scan_blocks, 8 * made.scan.threads, table, totals, chosen.num_tiles, num_experts)
    made.offsets.launch(*where, 1, 8 * threads, totals, buffers.expert_token_offsets, num_experts)
    made.route.launch(
        *where,
        -(-size // threads),
        0,
        token_map,
        table,
        buffers.expert_token_offsets,
        buffers.expert_pair_indices,
        buffers.token_index_map,
        *columns,
    )
