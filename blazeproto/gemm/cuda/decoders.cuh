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

constexpr int DECODER_REGISTERS = 96;  // of 128 at least, which a thread starts with
constexpr int RUNS_AHEAD = 4;          // that a thread has under way
constexpr int WARP_SLAB = 32 * RUN * int(sizeof(bf16));  // what a warp's runs are decoded to: 16 swizzled rows

// Spins until `counter`, of progress, is `value`.
DEVICE void wait_for(const uint32_t* counter, uint32_t value) {
    while (load_acquire_gpu(counter) < value) {
    }
}

// The tile, with its expert's slot in the place of its expert. By the thread that loads the weights, which are there then.
DEVICE RowTile in_slot(const RowsParams& p, RowTile tile) {
    wait_for(p.progress + tile.expert, p.decoders);
    fence_proxy_async();  // TMA wrote them, on another multiprocessor
    tile.expert %= p.slots;
    return tile;
}

// By one thread that has seen the tile's last stage full.
DEVICE void tell_read(const RowsParams& p, const RowTile& tile) { add_release_gpu(p.progress + p.experts + tile.expert, 1); }

// By all threads of a decoder. tile_columns: columns of a tile.
DEVICE void decode_weights(const RowsParams& p, int tile_columns) {
    setmaxnreg_dec<DECODER_REGISTERS>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = p.decoders * THREADS;
    const int runs_in_row = p.slot_columns / RUN, runs = p.slot_rows * runs_in_row;
    const int first_row = B_MN ? 0 : int(p.first_column), first_number = B_MN ? int(p.first_column) : 0;
    const int column_blocks = (p.columns + tile_columns - 1) / tile_columns, begin = blockIdx.x * THREADS + warp * 32;
    const auto rows_of = [&](int expert) { return p.offsets[expert + 1] - p.offsets[expert]; };
    for (int expert = 0; expert < p.experts; ++expert) {
        const int before = expert - p.slots;  // the last that the slot had
        if (before >= 0 && threadIdx.x == 0) wait_for(p.progress + p.experts + before, (rows_of(before) + BM - 1) / BM * column_blocks);
        __syncthreads();
        if (rows_of(expert) == 0) continue;
        const auto load = [&](Packed& packed, int run) {
            packed.load(p, expert, first_row + run / runs_in_row, first_number + run % runs_in_row * RUN, run < runs);
        };
        Packed ahead[RUNS_AHEAD];
#pragma unroll
        for (int i = 0; i < RUNS_AHEAD; ++i) load(ahead[i], begin + i * stride + lane);
        for (int first = begin; first < runs; first += RUNS_AHEAD * stride) {
#pragma unroll
            for (int i = 0; i < RUNS_AHEAD; ++i) {
                const int own = first + i * stride;  // the warp's first run
                const uint32_t slab = shared_at((warp * RUNS_AHEAD + i) * WARP_SLAB);
                if (lane == 0) bulk_wait_group_read<RUNS_AHEAD - 1>();
                __syncwarp();
                ahead[i].store(slab, lane / 2, lane % 2 * (RUN / CHUNK), first_row + (own + lane) / runs_in_row);
                load(ahead[i], own + RUNS_AHEAD * stride + lane);
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) {
                    if (own < runs) tma_store_3d(&p.decoded, slab, 0, own / 2, expert % p.slots);
                    bulk_commit_group();
                }
            }
        }
        if (lane == 0) bulk_wait_group<0>();
        __syncthreads();
        if (threadIdx.x == 0) add_release_gpu(p.progress + expert, 1);
    }
}
