// Frozen weights on Hopper. The first CTAs of a launch decode part after part of expert after expert to bf16, into a ring of parts in
// global memory; the others multiply from there as from any weights. A part is what part_columns columns of the output need.
//
//   decoders   | part 0 -> slot 0 | part 1 -> slot 1 | part 0's tiles are read: part 2 -> slot 0 | ...
//   workers                       | tiles of part 0 .......... | tiles of part 1 .......... | tiles of part 2 ...
//
//   progress   | of each part, decoders' warps that are done with it | of each part, its tiles whose weights have been read |
//
// So an expert is decoded once a launch, however many rows it has. Decoded in shared memory, as on Ampere, a weight would be decoded
// again for every row block, and its stores would keep wgmma from its operands. Tiles of an expert with more than ROW_GROUP row
// blocks come back to its first part: the ring has room for more parts than an expert has. Workers and decoders wait for each
// other: the grid has at most a CTA a multiprocessor, so that all run at once.
#pragma once
#include "mainloop.cuh"
#include "schedule.cuh"
#include "stored.cuh"

constexpr int DECODER_REGISTERS = 104;  // of 128 at least, which a thread starts with
constexpr int RUNS = 16 / BITS;         // that a thread decodes at a time
constexpr int WARP_RUNS = 32 * RUNS;    // what a warp does, one after the other in memory
constexpr int WARP_SLAB = WARP_RUNS * RUN * int(sizeof(bf16));  // what these are decoded to, swizzled rows of two runs
constexpr int RUN_CHUNKS = RUN / CHUNK;

// Spins until `counter`, of progress, is at least `value`.
DEVICE void wait_for(const uint32_t* counter, uint32_t value) {
    while (load_acquire_gpu(counter) < value) {
    }
}

// A part has 2^part_shift tiles of columns.
template <int TILE_COLUMNS>
DEVICE int part_at(const RowsParams& p, const RowTile& tile) {
    return tile.expert * p.parts + (tile.column / TILE_COLUMNS >> p.part_shift);
}

// One more than the part of the tile before, or 0: a producer that gathers has no register for it.
DEVICE int& known_part() { return before_expert()[MAX_EXPERTS + 2]; }

// By the thread that loads a tile's weights, which are there then. Returns the tile with its part's slot in the place of its expert,
// and its column in the part.
template <int TILE_COLUMNS>
DEVICE RowTile in_slot(const RowsParams& p, RowTile tile) {
    const int part = part_at<TILE_COLUMNS>(p, tile);
    if (part + 1 != known_part()) {
        wait_for(p.progress + part, p.decoders * (THREADS / 32));
        fence_proxy_async_global();  // what was acquired is TMA's to read
        known_part() = part + 1;
    }
    tile.expert = part % p.slots;
    tile.column -= part % p.parts * p.part_columns;
    return tile;
}

// By one thread that has seen the tile's last stage full.
template <int TILE_COLUMNS>
DEVICE void tell_read(const RowsParams& p, const RowTile& tile) {
    add_release_gpu(p.progress + p.experts * p.parts + part_at<TILE_COLUMNS>(p, tile), 1);
}

// A part, while a decoder's threads decode it.
struct Part {
    const RowsParams& p;
    const Expert from;
    const int column;         // the first that it is for
    const uint32_t reciprocal;  // run / runs_in_row = run * reciprocal >> 32, below 2^32 / runs_in_row

    DEVICE Part(const RowsParams& params, int part)
        : p(params), from(p, part / p.parts), column(part % p.parts * p.part_columns), reciprocal(~0u / runs_in_row() + 1) {}

    DEVICE int runs_in_row() const { return p.slot_columns / RUN; }
    DEVICE int runs() const { return p.slot_rows * runs_in_row(); }
    DEVICE int slot_row(int run) const { return runs_in_row() == 1 ? run : int(__umulhi(run, reciprocal)); }

    // The weights' row that belongs to a row of the slot, where gate and up may be halves.
    DEVICE int row_of(int row) const {
        if (B_MN) return row;
        const int half = row >= p.part_columns;
        return int(p.first_column) + column + row + half * (p.columns - p.part_columns);
    }

    DEVICE void load(Packed& packed, int run) const {
        const int row = slot_row(run), number = (run - row * runs_in_row()) * RUN;
        const int own = column + (B_MN ? number : row >= p.part_columns ? row - p.part_columns : row);
        packed.load(p, from, row_of(row), B_MN ? int(p.first_column) + own : number, run < runs() && own < p.columns);
    }
};

// By all threads of a decoder. tile_columns: columns of a tile.
//
// Each warp goes through the parts by itself. It tells of a part when the first stores of the next are on their way, so that it need not
// wait for its own; but before it waits for a slot, for whoever has that slot may wait for just this part. A fence waits for loads
// too, so a warp loads, decodes, fences and stores much at a time, and other warps have the multiprocessor meanwhile.
DEVICE void decode_weights(const RowsParams& p, int tile_columns) {
    setmaxnreg_dec<DECODER_REGISTERS>();
    const int lane = threadIdx.x % 32, warps = p.decoders * (THREADS / 32);
    const int begin = (int(blockIdx.x) * (THREADS / 32) + int(threadIdx.x) / 32) * WARP_RUNS;
    const uint32_t slab = shared_at(threadIdx.x / 32 * WARP_SLAB);
    const uint32_t* const read = p.progress + p.experts * p.parts;
    const auto rows_of = [&](int part) { return p.offsets[part / p.parts + 1] - p.offsets[part / p.parts]; };
    const auto tiles_of = [&](int part) {
        const int columns = min(p.part_columns, p.columns - part % p.parts * p.part_columns);
        return uint32_t((rows_of(part) + BM - 1) / BM * ((columns + tile_columns - 1) / tile_columns));
    };
    int untold = -1;  // lane 0: a part that this warp has stored and not told of
    for (int index = 0; index < p.experts * p.parts; ++index) {
        if (rows_of(index) == 0) continue;
        int before = index - p.slots;  // the last that the slot had
        while (before >= 0 && rows_of(before) == 0) before -= p.slots;
        if (lane == 0 && before >= 0 && load_acquire_gpu(read + before) < tiles_of(before)) {
            bulk_wait_group<0>();
            if (untold >= 0) add_release_gpu(p.progress + untold, 1);
            untold = -1;
            wait_for(read + before, tiles_of(before));
        }
        __syncwarp();
        const Part part(p, index);
        const int runs = part.runs();
        for (int first = begin; first < runs; first += warps * WARP_RUNS) {
            Packed packed[RUNS];
#pragma unroll
            for (int i = 0; i < RUNS; ++i) part.load(packed[i], first + 32 * i + lane);
            if (lane == 0) bulk_wait_group_read<0>();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUNS; ++i)
                packed[i].store<true>(slab, 16 * i + lane / 2, lane % 2 * RUN_CHUNKS,
                                      HAS_ZEROS ? part.row_of(part.slot_row(first + 32 * i + lane)) : 0);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                tma_store_3d(&p.decoded, slab, 0, first / 2, index % p.slots);
                bulk_commit_group();
                if (untold >= 0) {
                    bulk_wait_group<1>();
                    add_release_gpu(p.progress + untold, 1);
                    untold = -1;
                }
            }
        }
        if (lane == 0) {
            if (untold >= 0) {  // this warp has no runs, of any part
                bulk_wait_group<0>();
                add_release_gpu(p.progress + untold, 1);
            }
            untold = index;
        }
    }
    if (lane == 0) {
        bulk_wait_group<0>();
        if (untold >= 0) add_release_gpu(p.progress + untold, 1);
    }
}
