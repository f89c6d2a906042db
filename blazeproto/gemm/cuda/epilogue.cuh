// From accumulators to global memory, in slabs of 64 rows x 64 columns of bf16.
//
//   registers --stmatrix--> slab in shared memory (128-byte swizzle) --TMA store--> global
//                                                                    \--16-byte stores, predicated by row, in an expert's last block
//
// A whole strip goes by TMA, which clips at the tensor's last column. A strip that crosses the expert's end must leave the next
// expert's rows alone, which TMA can't know.
#pragma once
#include "mainloop.cuh"

constexpr int SLAB_BYTES = 64 * SWIZZLE_ROW;

// Where this lane's stmatrix/ldmatrix row lies for a 16-row x 16-column block: rows of this warp, columns 16 * block...
DEVICE uint32_t slab_address(uint32_t slab, int block) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = warp * 16 + lane % 16, chunk = 2 * block + lane / 16;
    return slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4);
}

// The same for a transposed slab (row = accumulator column): 16 columns of the accumulator, this warp's 16 rows.
DEVICE uint32_t slab_address_transposed(uint32_t slab, int block) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = block * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    return slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4);
}

// Eight accumulators of a 16-column block as stmatrix takes them.
DEVICE void pack_block(uint32_t (&packed)[4], const float* acc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
}

DEVICE int warpgroup_thread() { return threadIdx.x % WARPGROUP; }
DEVICE int consumer_index() { return threadIdx.x / WARPGROUP - 1; }
DEVICE void warpgroup_sync() { named_barrier_sync(EPILOGUE_BARRIER + consumer_index(), WARPGROUP); }

// A slab to global rows [0, rows) and columns [0, columns) of `out`, 16 bytes a thread.
DEVICE void store_slab_predicated(uint32_t slab, bf16* out, int64_t row_stride, int rows, int columns) {
    const int chunk = warpgroup_thread() % 8;
#pragma unroll
    for (int row = warpgroup_thread() / 8; row < 64; row += WARPGROUP / 8) {
        if (row < rows && chunk * 8 < columns)
            *reinterpret_cast<uint4*>(out + row * row_stride + chunk * 8) =
                load_shared_16(slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4));
    }
    fence_proxy_async();  // the slab's next writer may be TMA
}

// A consumer warpgroup's staging slabs, used in turn; a slab is free again when the TMA store out of it has read it.
template <int BUFFERS>
struct SlabRing {
    uint32_t slabs;
    int next = 0;

    DEVICE explicit SlabRing(uint32_t address) : slabs(address) {}

    DEVICE uint32_t acquire() {
        if (warpgroup_thread() == 0) bulk_wait_group_read<BUFFERS - 1>();
        warpgroup_sync();
        return slabs + next * SLAB_BYTES;
    }

    // `store` issues the TMA store of a slab, `store_tail` the predicated one.
    template <class Store, class StoreTail>
    DEVICE void release(bool whole, Store store, StoreTail store_tail) {
        const uint32_t slab = slabs + next * SLAB_BYTES;
        fence_proxy_async();
        warpgroup_sync();
        if (!whole) store_tail(slab);
        if (warpgroup_thread() == 0) {
            if (whole) store(slab);
            bulk_commit_group();
        }
        next = (next + 1) % BUFFERS;
    }
};
