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
from blazeproto.dispatch.warp import inclusive_scan

SCAN_EXPERTS = 8  # experts of one block of scan_chunks: 32 bytes of a table row
TABLE_SHARE = 0.05  # of the bytes of the two index lists


# --- 1. Count --------------------------------------------------------------------------------------------------------


def count_pairs(threads: int, per_thread: int, copy_ids: bool) -> Any:
    """table[chunk][e] = number of the chunk's pairs that chose expert e; with int64 ids, also their int32 copy."""

    def count_pairs(topk_experts, table, ids_copy, num_pairs, num_experts, chunk_pairs):
        counts = cuda.shared.array(0, int32)  # (E + 1,); the last one counts the pairs without an expert
        thread, chunk = cuda.threadIdx.x, cuda.blockIdx.x
        for e in range(thread, num_experts + 1, threads):
            counts[uint32(e)] = 0
        cuda.syncthreads()

        experts = cuda.local.array(per_thread, int32)  # registers: all loads are in flight before the first is used
        first = int64(chunk) * chunk_pairs
        last = min(first + chunk_pairs, num_pairs)
        while first < last:
            for i in range(per_thread):
                pair = first + i * threads + thread
                experts[i] = num_experts
                if pair < last:
                    expert = topk_experts[pair]
                    if 0 <= expert < num_experts:  # compared as wide as it came
                        experts[i] = expert
            for i in range(per_thread):
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


# --- 3. Place --------------------------------------------------------------------------------------------------------


def place_pairs(threads: int, tile_tokens: int, top_k: int) -> Any:
    """Both index lists and the offsets."""
    num_words = tile_tokens // 32
    tile_pairs = tile_tokens * top_k
    per_thread = -(-tile_pairs // threads)

    def place_pairs(
        topk_experts,
        table,
        totals,
        expert_pair_indices,
        token_index_map,
        expert_token_offsets,
        num_pairs,
        num_experts_wide,
        chunk_pairs,
    ):
        num_experts = int32(num_experts_wide)
        thread = int32(cuda.threadIdx.x & (threads - 1))  # of itself no news, but the compiler learns the range
        chunk = int64(cuda.blockIdx.x)

        # Shared memory. A row is a place in expert_pair_indices; a place is one in this tile's staged pairs.
        # Column E of the map takes the pairs without an expert, so that no step below has to ask for them.
        columns = int32(num_experts + 1)
        size = int32(num_words * columns)
        bits = cuda.shared.array(0, uint32)[:size]  # (num_words, E + 1)
        shared = cuda.shared.array(0, int32)[size:]
        before = shared[:size]  # (num_words, E + 1) place of the word's first bit
        shared = shared[size:]
        to_row = shared[:columns]  # (E + 1,) row - place
        base = shared[columns : 2 * columns]  # (E,) next free row of this chunk
        limit = shared[2 * columns : 3 * columns]  # (E,) the row where the next chunk's begin
        shared = shared[3 * columns :]
        scratch = shared[: 2 * threads]
        staged = shared[2 * threads :]  # (tile_pairs,) expert << 16 | pair within the tile

        # A thread owns `share` consecutive experts, so that a scan over threads is a scan over experts.
        share = int32((num_experts + threads - 1) // threads)
        scanning = num_experts if share == 1 else int32(threads)
        my_first = int32(min(thread * share, num_experts))
        my_last = int32(min(my_first + share, num_experts))

        # Where each expert's rows begin: of all tokens, then of this chunk's.
        own = int32(0)
        for e in range(my_first, my_last):
            own = int32(own + totals[e])
        row = int32(inclusive_scan(scratch, thread, scanning, own) - own)
        for e in range(my_first, my_last):
            if chunk == 0:
                expert_token_offsets[e] = row
            base[uint32(e)] = row + table[chunk * num_experts + e]
            if chunk + 1 < cuda.gridDim.x:
                limit[uint32(e)] = row + table[(chunk + 1) * num_experts + e]
            else:
                limit[uint32(e)] = row + totals[e]
            row = int32(row + totals[e])
        cuda.syncthreads()
        if thread == scanning - 1:
            scratch[0] = row
        cuda.syncthreads()
        used = int64(scratch[0])
        if chunk == 0 and thread == 0:
            expert_token_offsets[num_experts] = used

        # Pairs without an expert take no row: what they leave free at the end is marked.
        unused = used + chunk * threads + thread
        while unused < num_pairs:
            expert_pair_indices[unused] = -1
            unused += int64(cuda.gridDim.x) * threads

        experts = cuda.local.array(per_thread, int32)  # registers, all three
        places = cuda.local.array(per_thread, int32)
        rows = cuda.local.array(per_thread, int32)
        tile = chunk * chunk_pairs  # the tile's first pair
        last = min(tile + chunk_pairs, num_pairs)
        while tile < last:
            mine = tile + thread  # the thread's first pair of the tile; the others follow in strides of the block
            left = int32(min(last - tile, tile_pairs))
            for i in range(per_thread):
                experts[i] = num_experts
                if int32(thread + i * threads) < left:
                    expert = topk_experts[mine + i * threads]
                    if 0 <= expert < num_experts:
                        experts[i] = expert

            # Mark: one bit a pair.
            word = thread
            while word < size:
                bits[uint32(word)] = 0
                word = int32(word + threads)
            cuda.syncthreads()
            for i in range(per_thread):
                token = uint32(uint32(thread + i * threads) // uint32(top_k))
                if i * threads + threads <= tile_pairs or token < tile_tokens:  # the first is known when compiling
                    at = uint32(uint32(token >> uint32(5)) * uint32(columns) + uint32(experts[i]))
                    cuda.atomic.or_(bits, at, uint32(uint32(1) << uint32(token & uint32(31))))
            cuda.syncthreads()

            # Scan the columns: down an expert's words, then over the experts.
            own = int32(0)
            for e in range(my_first, my_last):
                count = int32(0)
                for w in range(num_words):
                    at = uint32(w * columns + e)
                    before[at] = count
                    count = int32(count + int32(cuda.popc(bits[at])))
                to_row[uint32(e)] = count
                own = int32(own + count)
            place = int32(inclusive_scan(scratch, thread, scanning, own) - own)
            for e in range(my_first, my_last):
                for w in range(num_words):
                    before[uint32(w * columns + e)] += place
                count = to_row[uint32(e)]
                to_row[uint32(e)] = base[uint32(e)] - place
                base[uint32(e)] += count
                place = int32(place + count)
            cuda.syncthreads()
            if thread == scanning - 1:
                scratch[0] = place  # how many of the tile's pairs have a row; those that have none are staged behind
                for w in range(num_words):
                    before[uint32(w * columns + num_experts)] = place
                to_row[uint32(num_experts)] = 0
            cuda.syncthreads()

            # Look up each pair's place, and with it the row.
            for i in range(per_thread):
                token = uint32(uint32(thread + i * threads) // uint32(top_k))
                if i * threads + threads <= tile_pairs or token < tile_tokens:
                    at = uint32(uint32(token >> uint32(5)) * uint32(columns) + uint32(experts[i]))
                    lower = uint32(uint32(uint32(1) << uint32(token & uint32(31))) - uint32(1))
                    places[i] = before[at] + cuda.popc(bits[at] & lower)
                    rows[i] = to_row[uint32(experts[i])] + places[i] if experts[i] < num_experts else -1
            for i in range(per_thread):
                pair = int32(thread + i * threads)
                if i * threads + threads <= tile_pairs or pair < tile_pairs:
                    staged[uint32(places[i])] = int32(experts[i] << 16) | pair
                if pair < left:
                    token_index_map[mine + i * threads] = rows[i]
            cuda.syncthreads()

            # Write the runs: neighbouring places of one expert are neighbouring rows.
            num_staged = scratch[0]
            place = thread
            while place < num_staged:
                entry = staged[uint32(place)]
                row = int32(to_row[uint32(entry >> 16)] + place)
                expert_pair_indices[row] = int32(tile) + (entry & 0xFFFF)
                place = int32(place + threads)
            tile += tile_pairs
            cuda.syncthreads()

        # An expert named twice in one token's row was counted twice and has one bit: the rows left over get a valid
        # pair.
        for e in range(my_first, my_last):
            for spare in range(base[uint32(e)], limit[uint32(e)]):
                expert_pair_indices[spare] = chunk * chunk_pairs

    return place_pairs


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
    return 4 * (2 * words + 3 * (num_experts + 1) + 2 * threads + tile_tokens * top_k)


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


@lru_cache(maxsize=256)
def kernels(sizes: Sizes, tile_tokens: int, top_k: int, ids: str) -> Kernels:
    """The three kernels for one K, tile and id type ("int32" or "int64"); compiled when first launched."""
    threads = sizes.threads
    per_thread = -(-tile_tokens * top_k // threads)  # pairs of a tile in registers: what decides how many blocks fit
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
            f"{ids}* int32* int32* int32* int32* int32* int64 int64 int64",
            threads=threads,
            min_blocks=4 if per_thread <= 8 else 3 if per_thread <= 12 else 2 if per_thread <= 24 else 1,
            tile_tokens=tile_tokens,
            top_k=top_k,
        ),
    )
