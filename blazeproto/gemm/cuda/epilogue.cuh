// From accumulators to global memory, in slabs of SLAB rows x SLAB columns.
//
//   registers --stmatrix--> slab in shared memory (128-byte swizzle) --TMA store--> global
//
// TMA clips at the tensor's last column, and at the expert's last row (`tma_store_rows`). Either the consumer stores its slabs
// itself (below: the weight gradients, the block-sparse products), or epilogue warps do (slab_pipeline.cuh: up and linear). Down
// backward has no slabs: it stores from the ring (down_backward.cuh).
#pragma once
#include "kernel.cuh"

static_assert(SLAB == STRIP && SLAB == PANEL, "a slab is as high as a strip, and its rows are swizzled rows");

constexpr int SLAB_BYTES = SLAB * SWIZZLE_ROW;
constexpr int PAIRS_IN_SLAB = SLAB / 4;  // pairs of neighbouring accumulators that a thread has in a slab

// Where this lane's row of an stmatrix/ldmatrix lies: columns 16 * block and on, this warp's 16 rows.
DEVICE uint32_t slab_address(uint32_t slab, int block) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % WARPGROUP_WARPS;
    return swizzled(slab, warp * 16 + lane % 16, lane / 16) ^ block << 5;
}

// The same in a transposed slab, whose rows are accumulator columns: columns 16 * block and on of the accumulator, this
// warp's 16 rows.
DEVICE uint32_t slab_address_transposed(uint32_t slab, int block) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % WARPGROUP_WARPS;
    return swizzled(slab, block * 16 + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
}

// The row of the strip that accumulators 4j + 2h and 4j + 2h + 1 of this thread belong to.
DEVICE int strip_row(int h) {
    const int thread = thread_index();
    return thread / 32 % WARPGROUP_WARPS * 16 + thread % 32 / 4 + h * 8;
}

DEVICE void warpgroup_sync() { named_barrier_sync(CONSUMER_BARRIER + consumer_index(), WARPGROUP); }

// A slab to rows [row, row_end) of a matrix, SLAB of them at most, by a map that may end at any row (gemm/launch.py: rows_box).
DEVICE void tma_store_rows(const TensorMap* map, uint32_t slab, int column, int row, int row_end) {
    const int there = min(SLAB, row_end - row);
    tma_store_4d(map, slab, column, ROW_EDGE - there, row + there, ROW_EDGE);
}

// The same, of one half of H.
DEVICE void tma_store_rows(const TensorMap* map, uint32_t slab, int column, int row, int row_end, int half) {
    const int there = min(SLAB, row_end - row);
    tma_store_5d(map, slab, column, ROW_EDGE - there, row + there, ROW_EDGE, half);
}

// Each consumer has two slabs for its strip.
constexpr int SLAB_PAIR_BYTES = 2 * SLAB_BYTES;

DEVICE uint32_t slabs_of(int strip) { return shared_at(EPILOGUE_OFFSET + strip * SLAB_PAIR_BYTES); }

// Where a consumer stores its slabs itself: part i of its epilogue fills slab i % 2 and then calls `store_slab`, or
// `skip_slab` if it has nothing to store. Parts run in order, so that the slabs alternate; with an odd number of them
// the first one calls `skip_slab` before it writes. One barrier for each slab does for both: it tells the storing thread that this slab is full, and all threads that the other
// slab has been read.
DEVICE uint32_t slab_of_part(int index) { return slabs_of(consumer_index()) + index % 2 * SLAB_BYTES; }

// A slab's pairs of accumulators, by all of a consumer.
template <bool TURNED>
DEVICE void write_slab(uint32_t slab, const uint32_t* pairs) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        if (TURNED) stmatrix_x4_trans(slab_address_transposed(slab, quarter), pairs + quarter * 4);
        else stmatrix_x4(slab_address(slab, quarter), pairs + quarter * 4);
    }
}

DEVICE void skip_slab() {
    if (warpgroup_thread() == 0) bulk_wait_group_read<0>();
    warpgroup_sync();
}

// `store` issues the TMA store.
template <class Store>
DEVICE void store_slab(Store store) {
    fence_proxy_async();
    skip_slab();
    if (warpgroup_thread() == 0) {
        store();
        bulk_commit_group();
    }
}
