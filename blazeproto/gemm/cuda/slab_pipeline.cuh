// The slab pipeline: a consumer stages a part of its strip in two slabs of shared memory, and epilogue warps store them, so
// that the consumer goes on multiplying.
//
//   consumer        | fill | goes on multiplying ............... | fill |         32 KB: two slabs for each of two strips
//   epilogue warps         | store, or make act first, store |          | store
//                    filled[strip]                    emptied[strip]
//
// The consumer waits only if its slabs are still full when it needs them; until then it has the part in registers.
#pragma once
#include "epilogue.cuh"

constexpr int PLANES = BN / SLAB % 2 ? 1 : 2;  // slabs of a part
constexpr int PART_COLUMNS = PLANES * SLAB;
constexpr int PIPELINE_BYTES = SLAB_PAIR_BYTES + 2 * BARRIER_BYTES;  // of a strip: slabs and barriers
constexpr int PIPELINE_BARRIERS = EPILOGUE_OFFSET + CONSUMERS * SLAB_PAIR_BYTES;

DEVICE uint32_t filled_barrier(int strip) { return shared_at(PIPELINE_BARRIERS + strip * 2 * BARRIER_BYTES); }
DEVICE uint32_t emptied_barrier(int strip) { return shared_at(PIPELINE_BARRIERS + strip * 2 * BARRIER_BYTES + BARRIER_BYTES); }

// The consumer's side.
struct SlabPipeline {
    uint32_t phase = 0;

    // By one thread, before any use. emptying_warps: how many share the work of emptying a strip's slabs.
    DEVICE static void init(int emptying_warps) {
        for (int strip = 0; strip < CONSUMERS; ++strip) {
            mbarrier_init(filled_barrier(strip), WARPGROUP_WARPS);
            mbarrier_init(emptied_barrier(strip), emptying_warps);
        }
        fence_mbarrier_init();
    }

    DEVICE bool empty() const { return __all_sync(~0u, mbarrier_test_wait(emptied_barrier(consumer_index()), phase ^ 1)); }

    // To fill the slabs takes three steps. First: wait until they are empty. Returns where this lane's first matrix goes.
    DEVICE uint32_t wait_until_empty() const {
        const int strip = consumer_index();
        MARK(BEGIN, WAIT_EMPTY);
        mbarrier_wait(emptied_barrier(strip), phase ^ 1);
        MARK(END, WAIT_EMPTY);
        return slab_address(slabs_of(strip), 0);
    }

    // Second: write them. `packed(plane, i)`: pair i of this thread's PAIRS_IN_SLAB in that slab.
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

    // Third: tell the epilogue warps that they are full.
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
