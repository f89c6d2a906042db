"""``method="tiled"``: the paper's dense token-expert map, a tile at a time and as bits, so that it never leaves chip.

MoEBlaze §4.2 writes a T x E map to memory, counts its columns, and walks the columns to place tokens. Here a block
owns a chunk of consecutive tokens (about 8192 pairs) and takes it a tile at a time (256 tokens for K = 8). The tile's
map is E columns of bits in shared memory; a pair's place among its expert's pairs of the chunk is the number of bits
above its own, after the pairs of the tiles before:

                  expert 0  expert 1  expert 2 …                           K = 2
        token 0      1         .         1            before[w][e]: where e's begin, + bits in the words above
        token 1      .         1         1            place = before[w][e] + popc(word & lower bits)
        token 2      1         1         .                  = before[0][1] + popc(0b010) for token 2, expert 1
        …         ───────────────────────────  one 32-bit word per 32 tokens and expert

    count_pairs    every chunk counts its experts                 reads the ids, writes a (chunks, E) table
    scan_chunks    table[c][e] becomes the sum over chunks < c    reads and writes the table; not where chunks are few
    place_pairs    offsets; tile by tile: mark, scan the columns, look up, write token_index_map and stage the pairs
                   in the order of the experts; at the end write the chunk's part of expert_pair_indices in runs

Setting a bit is order-independent, so the shared atomics leave no trace: the result is unique, and the same to the bit
each time.

Floor: 4·T·K bytes of ids read (8 for int64) and 8·T·K written, over 4.24 TB/s. The ids are read twice here (12 -> 16
bytes a pair), plus the table: 4·E bytes a chunk, chunks being large enough that it stays below 5 % of the lists (see
`plan`). If chunks are few, each block of place_pairs reads the whole table, which lies in L2.
"""

# Numba infers types from values: int32() and uint32() keep arithmetic narrow (int32 + int32 is int64 otherwise), and an
# unsigned index spares the check for a negative one. Annotations would mean nothing here.
# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from blazeproto.dispatch.place import layout, place_pairs
from blazeproto.runtime.arch import HOPPER
from blazeproto.runtime.memory import part
from blazeproto.runtime.numba import cuda, int32, int64, uint32, uint64
from blazeproto.runtime.numba_kernel import NumbaKernel
from blazeproto.runtime.warp import inclusive_scan

SCAN_EXPERTS = 8  # experts of one block of scan_chunks: 32 bytes of a table row
TABLE_SHARE = 0.05  # of the bytes of the two index lists


# --- 1. Count --------------------------------------------------------------------------------------------------------


def count_pairs(threads: int, per_thread: int, copy_ids: bool) -> Any:
    """table[chunk][e] = number of the chunk's pairs that chose expert e; with int64 ids, also their int32 copy."""

    id_type, unsigned = (int64, uint64) if copy_ids else (int32, uint32)
    step = per_thread * threads

    def count_pairs(topk_experts, table, ids_copy, num_pairs, num_experts, chunk_pairs):
        counts = cuda.shared.array(0, int32)  # (E + 1,); the last one counts the pairs without an expert
        thread, chunk = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        expert = thread
        while expert <= num_experts:
            counts[uint32(expert)] = 0
            expert = int32(expert + threads)
        cuda.syncthreads()

        ids = cuda.local.array(per_thread, id_type)  # registers: all loads are in flight before the first is used
        none = unsigned(num_experts)  # as unsigned numbers, ids outside [0, E) are no less
        first = chunk * chunk_pairs
        left = int32(min(chunk_pairs, num_pairs - first))
        while left > 0:
            for i in range(per_thread):
                ids[i] = -1
                if int32(thread + i * threads) < left:
                    ids[i] = topk_experts[first + thread + i * threads]
            for i in range(per_thread):
                cuda.atomic.add(counts, uint32(min(unsigned(ids[i]), none)), int32(1))
            if copy_ids:
                for i in range(per_thread):
                    if int32(thread + i * threads) < left:
                        ids_copy[first + thread + i * threads] = ids[i] if unsigned(ids[i]) < none else -1
            first += step
            left = int32(left - step)
        cuda.syncthreads()
        expert = thread
        while expert < num_experts:
            table[chunk * num_experts + expert] = counts[uint32(expert)]
            expert = int32(expert + threads)

    return count_pairs


# --- 2. Scan over the chunks -----------------------------------------------------------------------------------------


def scan_chunks(threads: int, rows: int) -> Any:
    """table[c][e] becomes the sum of table[:c, e]; totals[e] = the sum of all.

    A block takes 8 experts; its threads are 8 columns wide, and each sums ``rows`` consecutive chunks of one column:

        thread  0 … 7    chunks 0 … rows-1      of experts 0 … 7
        thread  8 … 15   chunks rows … 2·rows-1

    More chunks than that are taken in turns.
    """
    groups = threads // SCAN_EXPERTS

    def scan_chunks(table, totals, num_chunks, num_experts):
        sums = cuda.shared.array(0, int32)  # (groups, 8) twice
        thread = int32(cuda.threadIdx.x)
        group = thread // SCAN_EXPERTS
        expert = int64(cuda.blockIdx.x) * SCAN_EXPERTS + thread % SCAN_EXPERTS
        counts = cuda.local.array(rows, int32)  # registers: one round trip to memory for all
        earlier = int32(0)  # the sum over the turns so far
        first = int64(group * rows)
        while first - group * rows < num_chunks:
            own = int32(0)
            for i in range(rows):
                counts[i] = 0
                if first + i < num_chunks and expert < num_experts:
                    counts[i] = table[(first + i) * num_experts + expert]
                own = int32(own + counts[i])

            running, sums_at = inclusive_scan(sums, thread, threads, SCAN_EXPERTS, own)
            before = int32(earlier + running - own)
            earlier = int32(earlier + sums[sums_at + threads - SCAN_EXPERTS + thread % SCAN_EXPERTS])
            for i in range(rows):
                if first + i < num_chunks and expert < num_experts:
                    table[(first + i) * num_experts + expert] = before
                before = int32(before + counts[i])
            first += groups * rows
            cuda.syncthreads()
        if group == 0 and expert < num_experts:
            totals[expert] = earlier

    return scan_chunks


# --- The host's side -------------------------------------------------------------------------------------------------


class BlockSizes(NamedTuple):
    """How the kernels are cut."""

    count_threads: int = 256
    count_per_thread: int = 8
    scan_threads: int = 1024
    scan_rows: int = 9  # chunks of a thread in one turn
    place_threads: int = 256
    place_warps: int = 32  # resident on a multiprocessor where shared memory has room, which bounds the registers
    min_tile: int = 256  # tokens
    max_tile: int = 1024
    tile_pairs: int = 4095
    chunk_pairs: int = 10240
    # 8 blocks for each of an H200's 132 multiprocessors; a constant, because a plan must not depend on the device.
    num_chunks: int = 1056
    few_chunks: int = 64  # up to which place_pairs sums the table itself: a launch less


SIZES = BlockSizes()  # the simulator's tests set smaller ones


class TiledPlan(NamedTuple):
    """One dispatch's tiles, chunks and memory; a function of shapes alone."""

    sizes: BlockSizes
    tile_tokens: int
    chunk_tokens: int  # a whole number of tiles
    num_chunks: int
    scanned: bool  # whether scan_chunks runs before place_pairs
    place_shared_bytes: int  # of a block of place_pairs
    place_blocks: int  # of them on a multiprocessor, which bounds the registers


SHARED_LIMIT = HOPPER.smem_limit
MAX_CHUNK_PAIRS = 65535  # a place, and a staged pair's number within its chunk, have 16 bits
SHARED_TOTAL, SHARED_RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor, and of each block for the system
REGISTERS = 65536  # of a multiprocessor


def plan(num_tokens: int, top_k: int, num_experts: int) -> TiledPlan:
    """Tiles of 2048 to 4095 pairs, chunks of whole tiles and about 8192 pairs.

    A tile's maps and places take 5·E/16 bytes a token: tiles are halved while that passes 46 KB, and while too few tokens
    remain to give every multiprocessor two. A chunk has as many tiles as leave ``num_chunks`` chunks, but at most
    ``chunk_pairs`` pairs, which all lie in shared memory, and at least enough to keep the table within TABLE_SHARE of the index
    lists (8·K bytes a token). On an H200 place_pairs took 33 us with four blocks of 256 threads on a multiprocessor and 41 with
    two of 512 (E = 128, K = 8); 62 where only two of 256 fit (512, 10). ValueError if nothing fits a block's shared memory.
    """
    return _plan(num_tokens, top_k, num_experts, SIZES)


@lru_cache(maxsize=1024)
def _plan(num_tokens: int, top_k: int, num_experts: int, sizes: BlockSizes) -> TiledPlan:
    tile = sizes.max_tile
    while tile > sizes.min_tile and (tile * top_k > sizes.tile_pairs or num_tokens < 264 * tile):
        tile //= 2
    while tile > 32 and (tile * top_k > 8192 or 5 * tile * num_experts // 16 > 46 * 1024):
        tile //= 2
    least = 4 * num_experts / (TABLE_SHARE * 8 * top_k)
    tiles = min(-(-num_tokens // (tile * sizes.num_chunks)), sizes.chunk_pairs // (tile * top_k))
    chunk = tile * max(1, tiles, -(-int(least) // tile))
    shared = 4 * (layout(sizes.place_threads, tile, num_experts).staged + chunk * top_k)
    if shared > SHARED_LIMIT or chunk * top_k > MAX_CHUNK_PAIRS:
        raise ValueError(
            f"num_experts={num_experts}, top_k={top_k}: method='tiled' needs {shared} bytes of shared memory, "
            f"expected at most {SHARED_LIMIT}; use method='sort'"
        )
    # What a thread must hold: four numbers of each of its pairs, though not all four at once, or a column's words.
    registers = 24 + max(3 * -(-tile * top_k // sizes.place_threads), tile // 32 + 8)
    blocks = min(
        32 * sizes.place_warps // sizes.place_threads,
        SHARED_TOTAL // (shared + SHARED_RESERVED),
        REGISTERS // (registers * sizes.place_threads),
    )
    chunks = max(1, -(-num_tokens // chunk))
    return TiledPlan(sizes, tile, chunk, chunks, chunks > sizes.few_chunks, shared, max(1, blocks))


def workspace_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    """The table and the totals."""
    return 4 * (plan(num_tokens, top_k, num_experts).num_chunks + 1) * num_experts


def kernels(num_tokens: int, top_k: int, num_experts: int, ids: str) -> tuple[NumbaKernel, ...]:
    """count_pairs, scan_chunks where place_pairs does not sum the table itself, and place_pairs.

    ids: their dtype, "int32" or "int64". Compiled when first launched.
    """
    chosen = plan(num_tokens, top_k, num_experts)
    return _kernels(chosen.sizes, chosen.tile_tokens, chosen.place_blocks, chosen.scanned, top_k, num_experts, ids)


@lru_cache(maxsize=256)
def _kernels(
    sizes: BlockSizes, tile_tokens: int, place_blocks: int, scanned: bool, top_k: int, num_experts: int, ids: str
) -> tuple[NumbaKernel, ...]:
    scan = NumbaKernel(scan_chunks, "int32* int32* int64 int64", threads=sizes.scan_threads, rows=sizes.scan_rows)
    return (
        NumbaKernel(
            count_pairs,
            f"{ids}* int32* int32* int64 int64 int64",
            threads=sizes.count_threads,
            min_blocks=8,
            per_thread=sizes.count_per_thread,
            copy_ids=ids == "int64",
        ),
        *([scan] if scanned else []),
        NumbaKernel(
            place_pairs,
            "int32* int32* int32* int32* int32* int32* int64 int64",
            threads=sizes.place_threads,
            min_blocks=place_blocks,
            tile_tokens=tile_tokens,
            top_k=top_k,
            num_experts=num_experts,
            scanned=scanned,
        ),
    )


def run(
    ids: Any,
    lists: Sequence[Any],
    workspace: Any,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    device: int,
    stream: int,
) -> None:
    """Launch the kernels; see build.py."""
    pair_indices, offsets, index_map, *copy = lists
    chosen = plan(num_tokens, top_k, num_experts)
    count, *scan, place = kernels(num_tokens, top_k, num_experts, "int64" if copy else "int32")
    chunks, pairs, chunk_pairs = chosen.num_chunks, num_tokens * top_k, chosen.chunk_tokens * top_k
    size, narrow_ids = chunks * num_experts, copy[0] if copy else ids
    table, totals = part(workspace, 0, size, "int32"), part(workspace, 4 * size, num_experts, "int32")
    counted = (ids, table, narrow_ids, pairs, num_experts, chunk_pairs)
    count.launch(device, stream, chunks, 4 * (num_experts + 1), *counted)
    for kernel in scan:
        blocks = -(-num_experts // SCAN_EXPERTS)
        kernel.launch(device, stream, blocks, 8 * kernel.threads, table, totals, chunks, num_experts)
    placed = (narrow_ids, table, totals, pair_indices, index_map, offsets, pairs, chunk_pairs)
    place.launch(device, stream, chunks, chosen.place_shared_bytes, *placed)
