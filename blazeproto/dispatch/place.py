"""The last kernel of ``method="tiled"``: a block takes its chunk's tiles one by one, then writes the chunk's rows.

`blazeproto.dispatch.tiled` has the picture of a tile's map, and what runs before.
"""

# As in tiled.py: int32() and uint32() keep arithmetic narrow, and an unsigned index spares a check.
# mypy: disable-error-code="no-untyped-def"
from typing import Any, NamedTuple

from blazeproto.runtime.numba import cuda, int32, int64, uint16, uint32, uint64
from blazeproto.runtime.warp import block_scan, device

TABLE_ROWS = 16  # that a thread of place_pairs has under way, where it sums the table


class Layout(NamedTuple):
    """The offsets of the parts of a block's shared memory, in ints. A row is one of expert_pair_indices; a place is one of
    the chunk's staged pairs, which lie in the order of the experts.

    At 0 lies ``before``: (words, columns) the place of a word's first bit, in 16 bits; at first the scratch of a scan.
    """

    columns: int  # E + 1, or up to three more: two neighbours' words can be read at once
    maps: int  # two of (words, columns) words of bits
    to_row: int  # (columns,) row - place
    staged: int  # (chunk_pairs,) expert << 16 | pair within the chunk


def layout(threads: int, tile_tokens: int, num_experts: int) -> Layout:
    columns = -(-(num_experts + 1) // 4) * 4  # so that the maps begin at a multiple of 8 bytes
    size = tile_tokens // 32 * columns
    maps = max(size // 2, 2 * threads)
    to_row = maps + 2 * size
    return Layout(columns, maps, to_row, to_row + columns)


def place_pairs(threads: int, tile_tokens: int, top_k: int, num_experts: int, scanned: bool) -> Any:
    """Both index lists and the offsets, from int32 ids.

    scanned: whether `scan_chunks` has been over the table. If not, chunks are few, and every block sums the table's
    columns itself, TABLE_ROWS at a time.

    The table says how many of the chunk's pairs chose each expert, so each column's first place is known, and a
    column is scanned by one thread without a look at the others. Two maps take turns: while one is scanned the other
    is cleared, and while places are looked up in one the next tile is marked in the other. That makes two barriers a
    tile:

        mark 0 | scan 0, clear 1 | look up 0, mark 1 | scan 1, clear 0 | look up 1, mark 0 | …  | write the chunk's rows

    A thread has ``share`` columns. An even number is taken in twos, a 64-bit read and a 32-bit write each: one
    by one, the threads of a warp would meet in every other bank.
    """
    words = tile_tokens // 32  # of a column
    tile_pairs = tile_tokens * top_k
    per_thread = -(-tile_pairs // threads)
    share = -(-num_experts // threads)
    # Column E takes the pairs without an expert, so that no step has to ask for them.
    columns, maps, first_row, first_staged = layout(threads, tile_tokens, num_experts)
    size = words * columns
    both_maps = 2 * maps + size  # one map's place from the other's: this less it

    @device
    def load(experts, ids, first, left, thread):
        """The thread's pairs of a tile with ``left`` pairs, in strides of the block. All loads are in flight at once:
        nothing looks at what comes."""
        for i in range(per_thread):
            experts[i] = -1
            if int32(thread + i * threads) < left:
                experts[i] = ids[first + thread + i * threads]

    @device
    def token_of(i, thread):
        """The token within the tile that the thread's i-th pair belongs to."""
        return uint32(uint32(thread + i * threads) // uint32(top_k))

    @device
    def word_of(token, expert):
        """The word of a (words, columns) array."""
        return uint32(uint32(token >> uint32(5)) * uint32(columns) + uint32(expert))

    @device
    def clear(two_bits, this_map, thread):
        first = uint32((uint32(this_map) >> uint32(1)) + uint32(thread))
        for i in range(-(-size // (2 * threads))):
            if 2 * (i + 1) * threads <= size or 2 * (thread + i * threads) < size:  # the first is known when compiling
                two_bits[uint64(first) + uint64(i * threads)] = 0

    @device
    def mark(bits, this_map, experts, thread):
        """One bit a pair. As unsigned numbers, ids outside [0, E) are no less than E."""
        for i in range(per_thread):
            experts[i] = int32(min(uint32(experts[i]), uint32(num_experts)))
            token = token_of(i, thread)
            if i * threads + threads <= tile_pairs or token < tile_tokens:
                at = uint32(uint32(this_map) + word_of(token, experts[i]))
                cuda.atomic.or_(bits, at, uint32(uint32(1) << uint32(token & uint32(31))))

    def place_pairs(
        ids,
        table,
        totals,
        expert_pair_indices,
        token_index_map,
        expert_token_offsets,
        num_pairs,
        chunk_pairs,
    ):
        thread = int32(cuda.threadIdx.x & (threads - 1))  # the mask changes nothing, but tells the compiler the range
        chunk = int64(cuda.blockIdx.x)
        bits = cuda.shared.array(0, uint32)
        two_bits = cuda.shared.array(0, uint64)  # the same memory, as all of these
        before = cuda.shared.array(0, uint16)
        shared = cuda.shared.array(0, int32)
        to_row, staged = shared[first_row:], shared[first_staged:]

        # All that comes from memory is asked for before the first of it is used.
        first = chunk * chunk_pairs  # the chunk's first pair
        left = int32(min(chunk_pairs, num_pairs - first))  # pairs of the chunk, this tile's and later ones
        experts = cuda.local.array(per_thread, int32)  # registers, as all local arrays here
        coming = cuda.local.array(per_thread, int32)  # the next tile's
        load(experts, ids, first, left, thread)
        load(coming, ids, first + tile_pairs, int32(left - tile_pairs), thread)
        counts = cuda.local.array(share, int32)
        starts = cuda.local.array(share, int32)
        ends = cuda.local.array(share, int32)
        of_chunk = cuda.local.array(TABLE_ROWS, int32)
        own = int32(0)
        own_staged = int32(0)
        for i in range(share):
            e = int32(thread * share + i)
            counts[i] = starts[i] = ends[i] = 0
            if e < num_experts and not scanned:
                batch = int64(0)  # the first of TABLE_ROWS chunks
                while batch < cuda.gridDim.x:
                    for c in range(TABLE_ROWS):
                        of_chunk[c] = 0
                        if batch + c < cuda.gridDim.x:
                            of_chunk[c] = table[(batch + c) * num_experts + e]
                    for c in range(TABLE_ROWS):
                        counts[i] += of_chunk[c]
                        starts[i] += of_chunk[c] if batch + c < chunk else 0
                        ends[i] += of_chunk[c] if batch + c <= chunk else 0
                    batch += TABLE_ROWS
            elif e < num_experts:
                counts[i] = ends[i] = totals[e]
                starts[i] = table[chunk * num_experts + e]
                if chunk + 1 < cuda.gridDim.x:
                    ends[i] = table[(chunk + 1) * num_experts + e]
            own = int32(own + counts[i])
            own_staged = int32(own_staged + ends[i] - starts[i])

        clear(two_bits, maps, thread)

        # Where each expert's rows begin, and its places.
        row, used, place, num_staged = block_scan(shared, thread, threads, own, own_staged)
        row, place = int32(row - own), int32(place - own_staged)
        for i in range(share):
            e = int32(thread * share + i)
            if e < num_experts:
                to_row[uint32(e)] = row + starts[i] - place
                if chunk == 0:
                    expert_token_offsets[e] = row
            row = int32(row + counts[i])
            ends[i] = place + ends[i] - starts[i]  # from here on the place where the next expert's begin,
            starts[i] = place  # and the next free one of this
            place = ends[i]
        if chunk == 0 and thread == 0:
            expert_token_offsets[num_experts] = used

        # Pairs without an expert take no row: what they leave free at the end is marked, by each block where its own
        # pairs would lie.
        unused = int32(max(int32(first), used) + thread)
        while unused < int32(first) + left:
            expert_pair_indices[unused] = -1
            unused = int32(unused + threads)

        column = cuda.local.array(words, uint64)  # its words, or two columns'
        places = cuda.local.array(per_thread, int32)
        rows = cuda.local.array(per_thread, int32)
        done = int32(0)  # pairs of the chunk
        this_map = int32(maps)
        mark(bits, this_map, experts, thread)
        while left > 0:
            other_map = int32(both_maps - this_map)
            cuda.syncthreads()

            # Down each column's words. The last of two may be column E or one of none: nobody asks for its places.
            if share % 2 == 0:
                for i in range(0, share, 2):
                    two = uint32(uint32(thread * share + i) >> uint32(1))
                    if 2 * two < num_experts:
                        top = uint32((uint32(this_map) >> uint32(1)) + two)
                        for w in range(words):
                            column[w] = two_bits[uint64(top) + uint64(w * columns // 2)]
                        for w in range(words):
                            both = uint32(uint32(starts[i]) | uint32(uint32(starts[i + 1]) << uint32(16)))
                            bits[uint64(two) + uint64(w * columns // 2)] = both  # where before's two lie
                            starts[i] += int32(cuda.popc(uint32(column[w])))
                            starts[i + 1] += int32(cuda.popc(uint32(column[w] >> uint64(32))))
            else:
                for i in range(share):
                    e = int32(thread * share + i)
                    if e < num_experts:
                        top = uint32(this_map + e)
                        for w in range(words):
                            column[w] = bits[uint64(top) + uint64(w * columns)]
                        for w in range(words):
                            before[uint32(w * columns + e)] = starts[i]
                            starts[i] += int32(cuda.popc(uint32(column[w])))
            clear(two_bits, other_map, thread)
            cuda.syncthreads()

            # Look up each pair's place, and with it the row. A pair without an expert has neither.
            here = int32(min(left, tile_pairs))
            for i in range(per_thread):
                token = token_of(i, thread)
                if i * threads + threads <= tile_pairs or token < tile_tokens:
                    at = word_of(token, experts[i])
                    lower = uint32(uint32(uint32(1) << uint32(token & uint32(31))) - uint32(1))
                    word = bits[uint32(uint32(this_map) + at)]
                    places[i] = int32(before[at]) + int32(cuda.popc(word & lower))
                    row = int32(to_row[uint32(experts[i])] + places[i])
                    rows[i] = row if experts[i] < num_experts else -1
            for i in range(per_thread):
                pair = int32(thread + i * threads)
                if experts[i] < num_experts and (i * threads + threads <= tile_pairs or pair < tile_pairs):
                    staged[uint32(places[i])] = int32(experts[i] << 16) | int32(done + pair)
            for i in range(per_thread):
                if int32(thread + i * threads) < here:
                    token_index_map[first + done + thread + i * threads] = rows[i]

            # The next tile, and what comes after that from memory.
            done, left = int32(done + tile_pairs), int32(left - tile_pairs)
            if left > 0:
                for i in range(per_thread):
                    experts[i] = coming[i]
                load(coming, ids, first + done + tile_pairs, int32(left - tile_pairs), thread)
                this_map = other_map
                mark(bits, this_map, experts, thread)

        # An expert named twice in one token's row was counted twice and has one bit: the places left over get a valid
        # pair, the chunk's first.
        for i in range(share):
            for spare in range(starts[i], ends[i]):
                staged[uint32(spare)] = int32(thread * share + i) << 16
        cuda.syncthreads()

        # Write the runs: neighbouring places of one expert are neighbouring rows.
        place = thread
        while place < num_staged:
            entry = uint32(staged[uint32(place)])
            row = int32(to_row[uint32(entry >> uint32(16))] + place)
            expert_pair_indices[row] = int32(first) + int32(entry & uint32(0xFFFF))
            place = int32(place + threads)

    return place_pairs
