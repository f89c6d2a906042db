// Frozen weights on Hopper. The first CTAs of a launch decode part after part of expert after expert to bf16, into a ring of parts in
// global memory; the others multiply from there as from any weights. A part is what part_columns columns of the output need.
//
//   decoders   | part 0 -> slot 0 | part 1 -> slot 1 | part 0's tiles are read: part 2 -> slot 0 | ...
//   workers                       | tiles of part 0 .......... | tiles of part 1 .......... | tiles of part 2 ...
//
//   progress   | of each part, decoders that are done with it | of each part, its tiles whose weights have been read |
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
constexpr int RUNS_AHEAD = HAS_ZEROS ? 2 : 16 / BITS;  // that a thread has under way
constexpr int WARP_SLAB = 32 * RUN * int(sizeof(bf16));  // what a warp's runs are decoded to: 16 swizzled rows of two runs
constexpr int RUN_CHUNKS = RUN / CHUNK;

// Spins until `counter`, of progress, is `value`.
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
        wait_for(p.progress + part, p.decoders);
        fence_proxy_async_global();  // TMA reads what others wrote
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
DEVICE void decode_weights(const RowsParams& p, int tile_columns) {
    setmaxnreg_dec<DECODER_REGISTERS>();
    const int lane = threadIdx.x % 32, stride = p.decoders * THREADS, begin = blockIdx.x * THREADS + threadIdx.x / 32 * 32;
    const auto rows_of = [&](int part) { return p.offsets[part / p.parts + 1] - p.offsets[part / p.parts]; };
    const auto tiles_of = [&](int part) {
        const int columns = min(p.part_columns, p.columns - part % p.parts * p.part_columns);
        return (rows_of(part) + BM - 1) / BM * ((columns + tile_columns - 1) / tile_columns);
    };
    for (int index = 0; index < p.experts * p.parts; ++index) {
        const int before = index - p.slots;  // the last that the slot had
        const bool waits = before >= 0 && rows_of(before) > 0;
        if (waits && threadIdx.x == 0) wait_for(p.progress + p.experts * p.parts + before, tiles_of(before));
        if (waits) __syncthreads();
        if (rows_of(index) == 0) continue;
        const Part part(p, index);
        const int runs = part.runs();
        uint4* const out = reinterpret_cast<uint4*>(p.decoded) + int64_t(index % p.slots) * runs * RUN_CHUNKS;
        Packed ahead[RUNS_AHEAD];
#pragma unroll
        for (int i = 0; i < RUNS_AHEAD; ++i) part.load(ahead[i], begin + i * stride + lane);
        for (int first = begin; first < runs; first += RUNS_AHEAD * stride) {
#pragma unroll
            for (int i = 0; i < RUNS_AHEAD; ++i) {
                const int own = first + i * stride;  // the warp's first run, of 32 in a row
                const uint32_t slab = shared_at((threadIdx.x / 32 * 2 + i % 2) * WARP_SLAB);
                ahead[i].store<true>(slab, lane / 2, lane % 2 * RUN_CHUNKS, HAS_ZEROS ? part.row_of(part.slot_row(own + lane)) : 0);
                part.load(ahead[i], own + RUNS_AHEAD * stride + lane);
                __syncwarp();  // and the slab before this one has been read
#pragma unroll
                for (int j = 0; j < RUN_CHUNKS; ++j) {
                    const int chunk = j * 32 + lane;
                    if (own + chunk / RUN_CHUNKS < runs)
                        out[own * RUN_CHUNKS + chunk] = load_shared_16(swizzled(slab, chunk / CHUNKS_IN_ROW, chunk % CHUNKS_IN_ROW));
                }
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) add_release_gpu(p.progress + index, 1);
    }
}
