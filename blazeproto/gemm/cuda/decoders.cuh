// Frozen weights on Hopper. The first CTAs of a launch decode expert after expert to bf16, into a ring of experts in global memory;
// the others multiply from there as from any weights.
//
//   decoders   | expert 0 -> slot 0 | expert 1 -> slot 1 | expert 0's tiles are read: expert 2 -> slot 0 | ...
//   workers                         | tiles of expert 0 .......... | tiles of expert 1 .......... | tiles of expert 2 ...
//
//   progress   | (experts,) decoders that are done with it | (experts,) its tiles whose weights have been read |
//
// So an expert is decoded once a launch, however many rows it has, and L2 holds most of the ring. Decoded in shared memory, as on
// Ampere, a weight would be decoded again for every row block, and its stores would keep wgmma from its operands.
#pragma once
#include "mainloop.cuh"
#include "stored.cuh"

constexpr int DECODER_REGISTERS = 112;  // of 128 at least, which a thread starts with
constexpr int RUNS = 16 / BITS;         // that a thread decodes at a time
constexpr int WARP_RUNS = 32 * RUNS;   // what a warp does, one after the other in memory
constexpr int WARP_SLAB = WARP_RUNS * RUN * int(sizeof(bf16));  // what these are decoded to, swizzled rows of two runs

// Spins until `counter`, of progress, is `value`.
DEVICE void wait_for(const uint32_t* counter, uint32_t value) {
    while (load_acquire_gpu(counter) < value) {
    }
}

// By the thread that loads a tile's weights, which are there then. known: the expert of the tile before. Returns the tile with its
// expert's slot in the place of its expert.
DEVICE RowTile in_slot(const RowsParams& p, RowTile tile, int& known) {
    if (tile.expert != known) {
        wait_for(p.progress + tile.expert, p.decoders);
        fence_proxy_async();  // TMA wrote them, on another multiprocessor
        known = tile.expert;
    }
    tile.expert %= p.slots;
    return tile;
}

// By one thread that has seen the tile's last stage full.
DEVICE void tell_read(const RowsParams& p, const RowTile& tile) { add_release_gpu(p.progress + p.experts + tile.expert, 1); }

// By all threads of a decoder. tile_columns: columns of a tile.
//
// A fence waits for loads too, so a warp loads, decodes, fences and stores much at a time, and other warps have the multiprocessor
// meanwhile.
DEVICE void decode_weights(const RowsParams& p, int tile_columns) {
    setmaxnreg_dec<DECODER_REGISTERS>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = THREADS / 32;
    const int runs_in_row = p.slot_columns / RUN, runs = p.slot_rows * runs_in_row;
    const uint32_t reciprocal = ~0u / runs_in_row + 1;  // run / runs_in_row = run * reciprocal >> 32, below 2^32 / runs_in_row
    const int first_row = B_MN ? 0 : int(p.first_column), first_number = B_MN ? int(p.first_column) : 0;
    const int column_blocks = (p.columns + tile_columns - 1) / tile_columns;
    const uint32_t slab = shared_at(warp * WARP_SLAB);
    const auto rows_of = [&](int expert) { return p.offsets[expert + 1] - p.offsets[expert]; };
    for (int expert = 0; expert < p.experts; ++expert) {
        const int before = expert - p.slots;  // the last that the slot had
        if (before >= 0 && threadIdx.x == 0) wait_for(p.progress + p.experts + before, (rows_of(before) + BM - 1) / BM * column_blocks);
        __syncthreads();
        if (rows_of(expert) == 0) continue;
        const Expert from(p, expert);
        for (int first = (int(blockIdx.x) * warps + warp) * WARP_RUNS; first < runs; first += p.decoders * warps * WARP_RUNS) {
            Packed packed[RUNS];
            int rows[RUNS];
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const int run = first + 32 * i + lane, row = runs_in_row == 1 ? run : int(__umulhi(run, reciprocal));
                rows[i] = first_row + row;
                packed[i].load(p, from, rows[i], first_number + (run - row * runs_in_row) * RUN, run < runs);
            }
            if (lane == 0) bulk_wait_group_read<0>();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RUNS; ++i) packed[i].store<true>(slab, 16 * i + lane / 2, lane % 2 * (RUN / CHUNK), rows[i]);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                tma_store_3d(&p.decoded, slab, 0, first / 2, expert % p.slots);
                bulk_commit_group();
            }
        }
        if (lane == 0) bulk_wait_group<0>();
        __syncthreads();
        if (threadIdx.x == 0) add_release_gpu(p.progress + expert, 1);
    }
}
