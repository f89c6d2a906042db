"""``method="tiled"``: the paper's dense token-expert map, a tile at a time and as bits, so that it never leaves chip.

MoEBlaze §4.2 writes a T x E map to memory, counts its columns, and walks the columns to place tokens. Here a block
owns a chunk of consecutive tokens and takes it a tile at a time (256 tokens by default). The tile's map is E columns
of bits in shared memory; a pair's place among its expert's tokens is the number of bits above its own:

                  expert 0  expert 1  expert 2 …                           K = 2
        token 0      1         .         1            before[w][e]: bits in the words above
        token 1      .         1         1            row = base[e] + before[w][e] + popc(word & lower bits)
        token 2      1         1         .                = base[1] + 0 + popc(0b010) for token 2, expert 1
        …         ───────────────────────────  one 32-bit word per 32 tokens and expert

    count_pairs    every chunk counts its experts                 reads the ids, writes a (chunks, E) table
    scan_chunks    table[c][e] becomes the sum over chunks < c    reads and writes the table
    place_pairs    offsets; then tile by tile: mark, scan the columns, look up, write both lists

Setting a bit is order-independent, so the shared atomics leave no trace: the result is unique, and the same to the bit
each time. Rows of one expert are first gathered in shared memory (`staged`), so that the list is written in runs.

Floor: 4·T·K bytes of ids read (8 for int64) and 8·T·K written, over 4.24 TB/s. The ids are read twice here (12 -> 16
bytes a pair), plus the table: 4·E bytes a chunk, chunks being large enough that it stays below 5 % of the lists (see
`plan`).
"""

# Numba infers types from values: int32() and uint32() keep arithmetic narrow (int32 + int32 is int64 otherwise), and an
# unsigned index spares the check for a negative one. Annotations would mean nothing here.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from blazeproto.dispatch.launch import Kernel
from blazeproto.dispatch.place import place_pairs

SCAN_EXPERTS = 8  # experts of one block of scan_chunks: 32 bytes of a table row
TABLE_SHARE = 0.05  # of the bytes of the two index lists


# --- 1. Count --------------------------------------------------------------------------------------------------------


def count_pairs(threads: int, per_thread: int, copy_ids: bool) -> Any:
    """table[chunk][e] = number of the chunk's pairs that chose expert e; with int64 ids, also their int32 copy."""

    id_type = int64 if copy_ids else int32

    def count_pairs(topk_experts, table, ids_copy, num_pairs, num_experts, chunk_pairs):
        counts = cuda.shared.array(0, int32)  # (E + 1,); the last one counts the pairs without an expert
        thread, chunk = cuda.threadIdx.x, cuda.blockIdx.x
        for e in range(thread, num_experts + 1, threads):
            counts[uint32(e)] = 0
        cuda.syncthreads()

        ids = cuda.local.array(per_thread, id_type)  # registers: all loads are in flight before the first is used
        experts = cuda.local.array(per_thread, int32)
        first = int64(chunk) * chunk_pairs
        last = min(first + chunk_pairs, num_pairs)
        while first < last:
            for i in range(per_thread):
                pair = first + i * threads + thread
                ids[i] = -1
                if pair < last:
                    ids[i] = topk_experts[pair]
            for i in range(per_thread):
                expert = ids[i]  # compared as wide as it came
                experts[i] = expert if 0 <= expert < num_experts else num_experts
                cuda.atomic.add(counts, uint32(experts[i]), int32(1))
            if copy_ids:
                for i in range(per_thread):
                    pair = first + i * threads + thread
                    if pair < last:
                        ids_copy[pair] = experts[i] if experts[i] < num_experts else -1
            first += per_thread * threads
        cuda.syncthreads()
        for e in range(thread, num_experts, threads):
            table[int64(chunk) * num_experts + e] = counts[uint32(e)]

    return count_pairs


# --- 2. Scan over the chunks -----------------------------------------------------------------------------------------


def scan_chunks(threads: int, max_chunks: int) -> Any:
    """table[c][e] becomes the sum of table[:c, e]; totals[e] = the sum of all.

    A block takes 8 experts; its threads are 8 columns wide, and each sums `rows` consecutive chunks of one column:

        thread  0 … 7    chunks 0 … rows-1      of experts 0 … 7
        thread  8 … 15   chunks rows … 2·rows-1
    """
    groups = threads // SCAN_EXPERTS
    rows = -(-max_chunks // groups)

    def scan_chunks(table, totals, num_chunks, num_experts):
        sums = cuda.shared.array(0, int32)  # (groups, 8) twice
        thread = int32(cuda.threadIdx.x)
        group = thread // SCAN_EXPERTS
        expert = int64(cuda.blockIdx.x) * SCAN_EXPERTS + thread % SCAN_EXPERTS
        counts = cuda.local.array(rows, int32)  # registers: one round trip to memory for all
        own = int32(0)
        for i in range(rows):
            chunk = group * rows + i
            counts[i] = 0
            if chunk < num_chunks and expert < num_experts:
                counts[i] = table[chunk * num_experts + expert]
            own = int32(own + counts[i])

        # The same scan as warp.inclusive_scan, in strides of 8 threads.
        running = own
        read = int32(0)
        sums[thread] = running
        cuda.syncthreads()
        distance = int32(SCAN_EXPERTS)
        while distance < threads:
            if thread >= distance:
                running = int32(running + sums[read + thread - distance])
            read = int32(threads - read)
            sums[read + thread] = running
            cuda.syncthreads()
            distance = int32(distance * 2)

        before = int32(running - own)
        if expert < num_experts:
            for i in range(rows):
                chunk = group * rows + i
                if chunk < num_chunks:
                    table[chunk * num_experts + expert] = before
                before = int32(before + counts[i])
            if group == groups - 1:
                totals[expert] = running

    return scan_chunks


# --- The host's side -------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """How the three kernels are cut."""

    threads: int = 256  # of count_pairs and place_pairs
    count_per_thread: int = 8
    scan_threads: int = 1024
    # 8 blocks for each of an H200's 132 multiprocessors; a constant, because a plan must not depend on the device.
    max_chunks: int = 1056
    min_tile: int = 256  # tokens
    max_tile: int = 1024


SIZES = Sizes()  # the simulator's tests set smaller ones


class Plan(NamedTuple):
    """One dispatch's tiles, chunks and memory; a function of shapes alone."""

    sizes: Sizes
    tile_tokens: int
    chunk_tokens: int  # a whole number of tiles
    num_chunks: int
    place_shared_bytes: int  # of a block of place_pairs

    def workspace_ints(self, num_experts: int) -> int:
        """The table and the totals."""
        return (self.num_chunks + 1) * num_experts


def place_shared_bytes(threads: int, tile_tokens: int, top_k: int, num_experts: int) -> int:
    words = tile_tokens // 32 * (num_experts + 1)
    return 4 * (2 * words + 3 * (num_experts + 1) + threads + tile_tokens * top_k)


SHARED_LIMIT = 227 * 1024  # bytes a Hopper block may have


@lru_cache(maxsize=1024)
def plan(num_tokens: int, top_k: int, num_experts: int) -> Plan:
    """Tiles of about 2048 pairs, chunks of whole tiles, at most ``max_chunks`` of them.

    A tile's map takes E/4 bytes a token: tiles are halved while that passes 32 KB, and while there are too few tokens
    to give every multiprocessor two. A chunk is large enough that the table keeps to TABLE_SHARE of the index lists
    (8·K bytes a token). ValueError if no tile fits a block's shared memory.
    """
    sizes = SIZES
    tile = sizes.max_tile
    while tile > sizes.min_tile and (
        tile * top_k >= 4096 or tile * num_experts // 4 > 32 * 1024 or num_tokens < 264 * tile
    ):
        tile //= 2
    while tile > 32 and tile * top_k > 8192:
        tile //= 2
    shared = place_shared_bytes(sizes.threads, tile, top_k, num_experts)
    while tile > 32 and shared > SHARED_LIMIT:
        tile //= 2
        shared = place_shared_bytes(sizes.threads, tile, top_k, num_experts)
    if shared > SHARED_LIMIT:
        raise ValueError(
            f"num_experts={num_experts}, top_k={top_k}: method='tiled' needs {shared} bytes of shared memory, "
            f"expected at most {SHARED_LIMIT}; use method='sort'"
        )
    least = 4 * num_experts / (TABLE_SHARE * 8 * top_k)
    tiles = max(1, -(-num_tokens // (tile * sizes.max_chunks)), -(-int(least) // tile))
    chunk = tiles * tile
    return Plan(sizes, tile, chunk, max(1, -(-num_tokens // chunk)), shared)


class Kernels(NamedTuple):
    count_pairs: Kernel
    scan: Kernel
    place: Kernel


def kernels(sizes: Sizes, tile_tokens: int, top_k: int, num_experts: int, ids: str) -> Kernels:
    """The three kernels for one tile, K, E and id type ("int32" or "int64"); compiled when first launched."""
    share = -(-num_experts // sizes.threads)
    parts = 1
    while 2 * parts * num_experts <= sizes.threads and 2 * parts <= tile_tokens // 32:
        parts *= 2
    return _kernels(sizes, tile_tokens, top_k, share, parts, ids)


@lru_cache(maxsize=256)
def _kernels(sizes: Sizes, tile_tokens: int, top_k: int, share: int, parts: int, ids: str) -> Kernels:
    threads = sizes.threads
    # What bounds the registers: as many blocks as these pairs of a tile leave room for, and no more than shared memory.
    per_thread = -(-tile_tokens * top_k // threads)
    min_blocks = 4 if per_thread <= 10 else 3 if per_thread <= 12 else 2 if per_thread <= 24 else 1
    fitting = SHARED_LIMIT // place_shared_bytes(threads, tile_tokens, top_k, threads * share // parts)
    return Kernels(
        Kernel(
            count_pairs,
            f"{ids}* int32* int32* int64 int64 int64",
            threads=threads,
            min_blocks=8,
            per_thread=sizes.count_per_thread,
            copy_ids=ids == "int64",
        ),
        Kernel(scan_chunks, "int32* int32* int64 int64", threads=sizes.scan_threads, max_chunks=sizes.max_chunks),
        Kernel(
            place_pairs,
            "int32* int32* int32* int32* int32* int32* int64 int64 int64",
            threads=threads,
            min_blocks=max(1, min(min_blocks, fitting)),
            tile_tokens=tile_tokens,
            top_k=top_k,
            share=share,
            parts=parts,
        ),
    )
