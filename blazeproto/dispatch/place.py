"""The third kernel of ``method="tiled"``: a block takes its chunk's tiles one by one and writes both index lists.

`blazeproto.dispatch.tiled` has the picture of a tile's map, and the two kernels that come before.
"""

# As in tiled.py: int32() and uint32() keep arithmetic narrow, and an unsigned index spares a check.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

from numba import cuda, int32, int64, uint32

from blazeproto.dispatch.warp import block_scan, device


def place_pairs(threads: int, tile_tokens: int, top_k: int, share: int, parts: int) -> Any:
    """Both index lists and the offsets, from int32 ids.

    A thread scans ``share`` columns of the tile's map, or one of the ``parts`` that a column is cut into (one of the two
    is 1):

        share = 2, 256 threads     thread t: experts t and t + 256, so that neighbours read neighbouring banks
        parts = 2                  thread 2·e: the upper words of expert e;  thread 2·e + 1: the lower
    """
    num_words = tile_tokens // 32
    words = num_words // parts  # of a thread and column
    tile_pairs = tile_tokens * top_k
    per_thread = -(-tile_pairs // threads)

    @device
    def load(experts, ids, tile, left, thread):
        """The thread's pairs of a tile with ``left`` pairs, in strides of the block. All loads are in flight at once:
        nothing looks at what comes."""
        for i in range(per_thread):
            experts[i] = -1
            if int32(thread + i * threads) < left:
                experts[i] = ids[tile + thread + i * threads]

    def place_pairs(
        ids,
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
        scratch = shared[:threads]
        staged = shared[threads:]  # (tile_pairs,) expert << 16 | pair within the tile

        # All that comes from memory is asked for before the first of it is used.
        tile = chunk * chunk_pairs  # the tile's first pair
        last = min(tile + chunk_pairs, num_pairs)
        experts = cuda.local.array(per_thread, int32)  # registers, as all local arrays here
        load(experts, ids, tile, int32(min(last - tile, tile_pairs)), thread)
        counts = cuda.local.array(share, int32)
        starts = cuda.local.array(share, int32)
        ends = cuda.local.array(share, int32)
        own = int32(0)
        for i in range(share):
            e = int32(thread * share + i)  # consecutive experts, so that a scan over threads is one over experts
            counts[i] = starts[i] = ends[i] = 0
            if e < num_experts:
                counts[i] = ends[i] = totals[e]
                starts[i] = table[chunk * num_experts + e]
                if chunk + 1 < cuda.gridDim.x:
                    ends[i] = table[(chunk + 1) * num_experts + e]
            own = int32(own + counts[i])

        # Where each expert's rows begin: of all tokens, then of this chunk's.
        row, used = block_scan(scratch, thread, threads, own)
        row = int32(row - own)
        for i in range(share):
            e = int32(thread * share + i)
            if e < num_experts:
                base[uint32(e)] = row + starts[i]
                limit[uint32(e)] = row + ends[i]
                if chunk == 0:
                    expert_token_offsets[e] = row
            row = int32(row + counts[i])
        if chunk == 0 and thread == 0:
            expert_token_offsets[num_experts] = used

        # Pairs without an expert take no row: what they leave free at the end is marked.
        unused = used + chunk * threads + thread
        while unused < num_pairs:
            expert_pair_indices[unused] = -1
            unused += int64(cuda.gridDim.x) * threads

        my_first = int32(thread // parts)  # the first of the thread's columns, which are a block's width apart
        part = int32(thread % parts)
        my_word = int32(part * words * columns + my_first)
        column = cuda.local.array(words, uint32)
        places = cuda.local.array(per_thread, int32)
        rows = cuda.local.array(per_thread, int32)
        while tile < last:
            left = int32(min(last - tile, tile_pairs))

            # Mark: one bit a pair. As unsigned numbers, ids outside [0, E) are no less than E.
            word = thread
            while word < size:
                bits[uint32(word)] = 0
                word = int32(word + threads)
            cuda.syncthreads()
            for i in range(per_thread):
                experts[i] = int32(min(uint32(experts[i]), uint32(num_experts)))
                token = uint32(uint32(thread + i * threads) // uint32(top_k))
                if i * threads + threads <= tile_pairs or token < tile_tokens:  # the first is known when compiling
                    at = uint32(uint32(token >> uint32(5)) * uint32(columns) + uint32(experts[i]))
                    cuda.atomic.or_(bits, at, uint32(uint32(1) << uint32(token & uint32(31))))
            cuda.syncthreads()

            # Scan the columns: down an expert's words, then over the experts.
            own = int32(0)
            for i in range(share):
                if int32(my_first + i * threads) < num_experts:
                    for w in range(words):
                        column[w] = bits[uint32(my_word + i * threads + w * columns)]
                        own = int32(own + int32(cuda.popc(column[w])))
            place, num_staged = block_scan(scratch, thread, threads, own)
            place = int32(place - own)
            for i in range(share):
                e = int32(my_first + i * threads)
                if e < num_experts:
                    if part == 0:
                        to_row[uint32(e)] = base[uint32(e)] - place
                    if share > 1:  # too many registers to keep them all
                        for w in range(words):
                            column[w] = bits[uint32(my_word + i * threads + w * columns)]
                    for w in range(words):
                        before[uint32(my_word + i * threads + w * columns)] = place
                        place = int32(place + int32(cuda.popc(column[w])))
                ends[i] = place
            if thread < num_words:  # the tile's pairs that have no row are staged behind those that have one
                before[uint32(thread * columns + num_experts)] = num_staged
            cuda.syncthreads()
            if part == parts - 1:
                for i in range(share):
                    e = int32(my_first + i * threads)
                    if e < num_experts:
                        base[uint32(e)] = to_row[uint32(e)] + ends[i]

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
                    token_index_map[tile + thread + i * threads] = rows[i]
            this, tile = int32(tile), tile + tile_pairs
            load(experts, ids, tile, int32(min(last - tile, tile_pairs)), thread)  # the next
            cuda.syncthreads()

            # Write the runs: neighbouring places of one expert are neighbouring rows.
            for i in range(per_thread):
                place = int32(thread + i * threads)
                if place < num_staged:
                    entry = staged[uint32(place)]
                    row = int32(to_row[uint32(entry >> 16)] + place)
                    expert_pair_indices[row] = this + (entry & 0xFFFF)
            cuda.syncthreads()

        # An expert named twice in one token's row was counted twice and has one bit: the rows left over get a valid
        # pair.
        for i in range(share):
            e = int32(thread * share + i)
            if e < num_experts:
                for spare in range(base[uint32(e)], limit[uint32(e)]):
                    expert_pair_indices[spare] = chunk * chunk_pairs

    return place_pairs
