// From accumulators to global memory, in slabs of 64 rows x 64 columns of bf16.
//
//   registers --stmatrix--> slab in shared memory (128-byte swizzle) --TMA store--> global
//                                                                    \--16-byte stores, predicated by row, at an expert's end
//
// A whole strip goes by TMA, which clips at the tensor's last column. A strip that crosses the expert's end must leave the next
// expert's rows alone, which TMA can't know. Who stores is the consumer itself (below: weight gradients) or somebody else
// (handover.cuh: all products by rows but the down backward one, which has slabs of its own).
#pragma once
#include "mainloop.cuh"

constexpr int SLAB_BYTES = STRIP * SWIZZLE_ROW;

// Where this lane's stmatrix/ldmatrix row lies for a 16-row x 16-column block: rows of this warp, columns 16 * block...
DEVICE uint32_t slab_address(uint32_t slab, int block) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
    const int row = warp * 16 + lane % 16, chunk = lane / 16;
    return (slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4)) ^ block << 5;
}

// The same for a transposed slab (row = accumulator column): 16 columns of the accumulator, this warp's 16 rows.
DEVICE uint32_t slab_address_transposed(uint32_t slab, int block) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
    const int row = block * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    return slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4);
}

// Row of the strip that accumulators 4j + 2h and 4j + 2h + 1 of this thread belong to.
DEVICE int strip_row(int h) {
    const int thread = thread_index();
    return thread / 32 % 4 * 16 + thread % 32 / 4 + h * 8;
}

DEVICE void warpgroup_sync() { named_barrier_sync(EPILOGUE_BARRIER + int(thread_index()) / WARPGROUP - 1, WARPGROUP); }

// A slab to global rows [0, rows) and columns [0, columns) of `out`, 16 bytes a thread, by COPIERS threads in a row.
template <int COPIERS = WARPGROUP>
DEVICE void store_slab_predicated(uint32_t slab, bf16* out, int64_t row_stride, int rows, int columns) {
    const int copier = thread_index() % COPIERS, chunk = copier % 8;
#pragma unroll 4
    for (int row = copier / 8; row < 64; row += COPIERS / 8) {
        if (row < rows && chunk * 8 < columns)
            *reinterpret_cast<uint4*>(out + row * row_stride + chunk * 8) =
                load_shared_16(slab + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4));
    }
    fence_proxy_async();  // the slab's next writer may be TMA
}

// Each consumer has two slabs for its strip.
constexpr int SLAB_PAIR_BYTES = 2 * SLAB_BYTES;

DEVICE uint32_t slabs_of(int strip) { return shared_at(EPILOGUE_OFFSET + strip * SLAB_PAIR_BYTES); }

// Where a consumer stores them itself: part i of an epilogue fills slab i % 2 and then calls `store_slab` or `skip_slab`, parts in
// order, an even number of them, so that the slabs alternate. One barrier a slab: it tells the storing thread that the slab
// is whole, and everybody that the other slab has been read out.
DEVICE uint32_t slab_of_part(int index) { return slabs_of(consumer_index()) + index % 2 * SLAB_BYTES; }

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

// An epilogue in parts: it has PARTS and `part<i>()` (registers have no addresses, so i is fixed when a part is compiled).
// DEFERRED 0 runs all parts at once, after a tile's mainloop. DEFERRED 1 runs them under the next tile's, one a stage and once it
// is `ready`; what they need stays in registers until then.
struct AlwaysReady {
    DEVICE static bool ready(int) { return true; }
};

template <class Epilogue>
struct Parts {
    Epilogue& epilogue;
    int next = Epilogue::PARTS;  // the first that still waits

    DEVICE explicit Parts(Epilogue& e) : epilogue(e) {}

    // After `hold`.
    DEVICE void start() {
        next = 0;
        if (!DEFERRED) run(1);
    }

    // While a stage is multiplied: the next part; with the last stage of a mainloop (`left` 1), all that still wait.
    DEVICE void run(int left) {
        if (next == Epilogue::PARTS || (left > 1 && !epilogue.ready(next))) return;
#pragma unroll 1
        for (int parts = left == 1 ? Epilogue::PARTS - next : next < Epilogue::PARTS; parts > 0; --parts) {
            run_only<0>();
            ++next;
        }
    }

   private:
    template <int I>
    DEVICE void run_only() {
        if constexpr (I < Epilogue::PARTS) {
            if (I == next) epilogue.template part<I>();
            else run_only<I + 1>();
        }
    }
};
