// Two slabs change hands: a consumer fills its own with a part of its strip, and warps that don't multiply store them.
//
//   consumer   | fill | goes on multiplying ............... | fill |         32 KB: two slabs for each of two strips
//   others            | store, or make act first, store |          | store
//                filled[strip]                    emptied[strip]
//
// Neither waits for the other before it must: the consumer has the part in registers until its slabs are empty again.
#pragma once
#include "epilogue.cuh"

constexpr int PLANES = 2;  // slabs of a part
constexpr int PART_COLUMNS = PLANES * 64;
constexpr int HANDOVER_BYTES = SLAB_PAIR_BYTES + 2 * 8;  // of a strip: slabs and barriers
constexpr int HANDOVER_BARRIERS = EPILOGUE_OFFSET + CONSUMERS * SLAB_PAIR_BYTES;

DEVICE uint32_t filled_barrier(int strip) { return shared_at(HANDOVER_BARRIERS + strip * 16); }
DEVICE uint32_t emptied_barrier(int strip) { return shared_at(HANDOVER_BARRIERS + strip * 16 + 8); }

// A pair of accumulators as it is stored. Without a bias nothing is added: x + 0 is not always x, so the compiler would add.
DEVICE uint32_t pack_biased(float low, float high, uint32_t bias) {
    return HAS_BIAS ? pack_bf16(low + bf16_low(bias), high + bf16_high(bias)) : pack_bf16(low, high);
}

// The consumer's side.
struct Handover {
    uint32_t phase = 0;

    // By one thread, before any use. emptying_warps: how many share the work of emptying a strip's slabs.
    DEVICE static void init(int emptying_warps) {
        for (int strip = 0; strip < CONSUMERS; ++strip) {
            mbarrier_init(filled_barrier(strip), WARPGROUP / 32);
            mbarrier_init(emptied_barrier(strip), emptying_warps);
        }
        fence_mbarrier_init();
    }

    DEVICE bool empty() const { return __all_sync(~0u, mbarrier_test_wait(emptied_barrier(consumer_index()), phase ^ 1)); }

    // Filling is three steps. First: the slabs are empty. Returns where this lane's first matrix goes.
    DEVICE uint32_t wait_until_empty() const {
        const int strip = consumer_index();
        mbarrier_wait(emptied_barrier(strip), phase ^ 1);
        return slab_address(slabs_of(strip), 0);
    }

    // Second. `packed(plane, i)`: pair i of this thread's 16 pairs of columns in a slab.
    template <class Packed>
    DEVICE static void write(uint32_t at, Packed packed) {
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                uint32_t quad[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) quad[i] = packed(plane, quarter * 4 + i);
                stmatrix_x4((at ^ quarter << 5) + plane * SLAB_BYTES, quad);
            }
        }
    }

    // Third.
    DEVICE void publish() {
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_if(thread_index() % 32 == 0, filled_barrier(consumer_index()));
        phase ^= 1;
    }

    template <class Packed>
    DEVICE void fill(Packed packed) {
        write(wait_until_empty(), packed);
        publish();
    }
};
