"""``method="dense"``: the three steps of MoEBlaze §4.2, free of atomics as there. For reading, not for speed.

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

It differs from the paper in five points:

- Paper: an entry of the map is the token's id. Here it is slot + 1, from which the pair follows; 0 is a token's id too.
- Paper: in step 1 a warp has some rows of the map. Here a thread has one pair.
- Paper: in steps 2 and 3 a block has one expert, and its threads have neighbouring tokens. Here neighbouring threads have
  neighbouring experts, so that a row of the map is read as it lies in memory.
- Paper: a location map holds where each entry of the map goes, and a kernel of its own writes there. Here the location is the
  counter of the loop that writes.
- Paper: step 3 writes the tokens by expert. Here it writes the pairs by expert, and their inverse, token_index_map.

Bytes: T·E of the map are written twice (cleared, marked) and read twice; then the ids and both lists.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blazeproto.dispatch.tiled import SCAN_EXPERTS, scan_chunks
from blazeproto.runtime.arrays import ITEM_BYTES
from blazeproto.runtime.memory import clear, part
from blazeproto.runtime.numba import cuda, int32, int64
from blazeproto.runtime.numba_kernel import NumbaKernel
from blazeproto.runtime.warp import inclusive_scan

MAX_TILES = 4096
MAX_SLOTS = 2**16 - 1  # of a token: the map's widest entry has 16 bits
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
        row = int32(inclusive_scan(scratch, thread, threads, 1, own)[0] - own)
        for e in range(first, last):
            expert_token_offsets[e] = row
            row = int32(row + totals[e])
        if thread == threads - 1:
            expert_token_offsets[num_experts] = row

    return expert_offsets


def route_indices(threads: int, top_k: int) -> Any:
    """Step 3. Both lists. The rows that no pair takes lie at the end and get -1."""

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


def plan(num_tokens: int, top_k: int) -> tuple[int, int, str]:
    """Tokens of a tile, the number of tiles, and the type of the map's entries."""
    if top_k > MAX_SLOTS:
        raise ValueError(f"top_k: expected at most {MAX_SLOTS} with method='dense', got {top_k}; use method='sort'")
    tile = max(TILE_TOKENS, -(-num_tokens // MAX_TILES))
    return tile, max(1, -(-num_tokens // tile)), "uint8" if top_k <= 255 else "uint16"


def workspace_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    """The table, the totals and the map."""
    _, tiles, slot_type = plan(num_tokens, top_k)
    return 4 * (tiles + 1) * num_experts + num_tokens * num_experts * ITEM_BYTES[slot_type]


def kernels(num_tokens: int, top_k: int, num_experts: int, ids: str) -> tuple[NumbaKernel, ...]:
    """The five, in the order of their launches. ids: their dtype, "int32" or "int64". Compiled when first launched."""
    return _kernels(top_k, ids, plan(num_tokens, top_k)[2])


@lru_cache(maxsize=256)
def _kernels(top_k: int, ids: str, slots: str) -> tuple[NumbaKernel, ...]:
    marked, routed = f"{ids}* {slots}* int32* int32* int64 int64", f"{slots}* int32* int32* int32* int32*"
    return (
        NumbaKernel(dense_token_map, marked, threads=THREADS, top_k=top_k, copy_ids=ids == "int64"),
        NumbaKernel(expert_lengths, f"{slots}* int32* int64 int64 int64 int64", threads=THREADS),
        NumbaKernel(scan_chunks, "int32* int32* int64 int64", threads=SCAN_THREADS, rows=SCAN_ROWS),
        NumbaKernel(expert_offsets, "int32* int32* int64", threads=THREADS),
        NumbaKernel(route_indices, f"{routed} int64 int64 int64 int64", threads=THREADS, top_k=top_k),
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
    made = kernels(num_tokens, top_k, num_experts, "int64" if copy else "int32")
    token_map_kernel, lengths, scan, sum_lengths, route = made
    tile_tokens, tiles, slot_type = plan(num_tokens, top_k)
    pairs, size, cells = num_tokens * top_k, tiles * num_experts, num_tokens * num_experts
    table, totals = part(workspace, 0, size, "int32"), part(workspace, 4 * size, num_experts, "int32")
    token_map = part(workspace, 4 * (size + num_experts), cells, slot_type)
    columns = (num_tokens, num_experts, tile_tokens, tiles)
    blocks = -(-size // THREADS)

    clear(token_map, cells * ITEM_BYTES[slot_type], device, stream)
    if pairs:
        marked = (ids, token_map, index_map, copy[0] if copy else ids, pairs, num_experts)
        token_map_kernel.launch(device, stream, -(-pairs // THREADS), 0, *marked)
    lengths.launch(device, stream, blocks, 0, token_map, table, *columns)
    scan_blocks = -(-num_experts // SCAN_EXPERTS)
    scan.launch(device, stream, scan_blocks, 8 * scan.threads, table, totals, tiles, num_experts)
    sum_lengths.launch(device, stream, 1, 8 * THREADS, totals, offsets, num_experts)
    route.launch(device, stream, blocks, 0, token_map, table, offsets, pair_indices, index_map, *columns)
