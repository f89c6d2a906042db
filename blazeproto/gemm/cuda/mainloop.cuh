// The mainloop shared by every product: a ring of shared-memory stages between one producer warpgroup and two consumers.
//
//   producer warpgroup                 ring of STAGES                       consumer warpgroups
//   TMA boxes        ---+       +---------+---------+---------+         +-- wgmma on rows 0..63 of the tile
//                       +-----> | A | B   | A | B   | A | B   | ------> |
//   gathered rows    ---+       +---------+---------+---------+         +-- wgmma on rows 64..127
//                                 full[s]: data landed, consumers may read
//                                 empty[s]: both consumers are done, the producer may write
//
// A stage holds BK = 64 steps of the reduction: K-major, a 128-byte swizzled row for each row of A; MN-major, one for each step.
//
// DEFERRED: the epilogue of a tile runs under the mainloop of the next one. After its last wgmma a consumer packs the
// accumulators (half the registers), starts the next tile, and stores or hands over some of the packed ones after each stage
// that it has issued.
//
//   consumer    mma tile 0 | pack | mma tile 1 .................. | pack | mma tile 2 ....
//                                 | part, part, part of tile 0           | part, part, part of tile 1
//
// CLUSTER 2 (weight gradients): two CTAs take neighbouring blocks of gathered columns and one block of ordered ones. Each loads half
// of the B stage and multicasts it to both, which halves what B costs in L2 bandwidth.
#pragma once
#include "wgmma.cuh"

constexpr int BK = 64;
constexpr int CONSUMERS = 2;
constexpr int WARPGROUP = 128;
constexpr int SMEM_LIMIT = 227 * 1024;  // dynamic shared memory a CTA may have; every kernel here asks for all of it
constexpr int THREADS = (1 + CONSUMERS + FINISHERS) * WARPGROUP;
constexpr int STRIP = 64;  // rows of a tile that one consumer works on
constexpr int BM = CONSUMERS * STRIP;
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PANEL_BYTES = BK * SWIZZLE_ROW;  // 64 k-rows of 64 MN-major elements

// FINISHERS 1: a fourth warpgroup takes over what the consumers have multiplied (up.cu). ptxas is not told of it: it would refuse a
// wgmma with 128 accumulators in a kernel whose threads start with 128 registers, though setmaxnreg gives consumers more before they
// come to one. gemm/cubin.py corrects what it wrote down.
//
// 65536 registers: 168 a thread at launch, 128 with a finisher; who needs few hands its share to the consumers.
constexpr int PTXAS_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = FINISHERS ? (512 - PRODUCER_REGISTERS - FINISHER_REGISTERS) / 2 : 232;

constexpr int EPILOGUE_BARRIER = 1;  // named barriers 1, 2: one a consumer warpgroup
constexpr int PRODUCER_BARRIER = 3;

constexpr int EMPTY_ARRIVALS = CONSUMERS * 4 * CLUSTER;  // one a consumer warp, from every CTA of the cluster
static_assert(BN == 128 || BN == 256, "the widths that wgmma.cuh has");

// Shared memory, all of it dynamic: the stages, then the epilogue's slabs; the tile schedule last, and before it the barriers.
constexpr int MAX_EXPERTS = 512;
constexpr int EPILOGUE_OFFSET = STAGES * STAGE_BYTES;
constexpr int SCHEDULE_OFFSET = SMEM_LIMIT - (MAX_EXPERTS + 4) * 4;
constexpr int BARRIER_OFFSET = SCHEDULE_OFFSET - 2 * STAGES * 8;

DEVICE uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t smem[];
    return smem;
}

DEVICE uint32_t shared_at(int offset) { return smem_address(shared_memory()) + offset; }

// Where in the ring a producer or consumer is: one number, for registers are short beside 128 accumulators and the 64 packed ones
// of the tile before.
struct Ring {
    uint32_t passed = 0;  // stages so far

    static_assert((STAGES & (STAGES - 1)) == 0, "`passed` wraps at 2^32");
    DEVICE uint32_t stage() const { return passed % STAGES; }
    DEVICE uint32_t phase() const { return passed / STAGES % 2; }  // of the barriers: which round it is
    DEVICE uint32_t a() const { return shared_at(stage() * STAGE_BYTES); }
    DEVICE uint32_t b() const { return a() + A_BYTES; }
    DEVICE uint32_t full_barrier() const { return shared_at(BARRIER_OFFSET + stage() * 8); }
    DEVICE uint32_t empty_barrier() const { return shared_at(BARRIER_OFFSET + (STAGES + stage()) * 8); }
    DEVICE Ring before(uint32_t stages) const { return {passed - stages}; }
    DEVICE void advance() { ++passed; }

    DEVICE void wait_until_full() const { mbarrier_wait(full_barrier(), phase()); }
    DEVICE void wait_until_empty() const { mbarrier_wait(empty_barrier(), phase() ^ 1); }

    // By one thread, before any use. A stage is full by the TMA thread's expect_tx and, gathering, each producer thread's copies.
    DEVICE static void init() {
        for (Ring ring; ring.phase() == 0; ring.advance()) {
            mbarrier_init(ring.full_barrier(), GATHER ? 1 + WARPGROUP : 1);
            mbarrier_init(ring.empty_barrier(), EMPTY_ARRIVALS);
        }
        fence_mbarrier_init();
    }
};

// ---- consumer: one tile's products ---------------------------------------------------------------------------------
// Frees a stage for the producers of every CTA that writes into it.
DEVICE void release_stage(const Ring& ring) {
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER == 1) mbarrier_arrive_if(lane == 0, ring.empty_barrier());
    else mbarrier_arrive_cluster_if(lane < CLUSTER, ring.empty_barrier(), lane);
}

DEVICE int warpgroup_thread() { return thread_index() % WARPGROUP; }
DEVICE int consumer_index() { return int(thread_index()) / WARPGROUP - 1; }

// The same in all lanes of a warp: tells the compiler so, which then keeps it, and what follows from it, in uniform registers. It
// believes a reduction; a shuffle only where control flow is uniform anyway.
DEVICE int uniform(int value) { return __reduce_max_sync(~0u, value); }

// The products of the stage at `ring`, left in flight. ACCUMULATE: adds to acc.
template <int MN_A, int MN_B, bool ACCUMULATE>
DEVICE void multiply_stage(float (&acc)[BN / 2], const Ring& ring, int strip) {
    ring.wait_until_full();
    if (GATHER) fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one
    // K-major, a strip is 64 rows of the stage; MN-major, one panel: as many bytes either way.
    const uint32_t a = descriptor_low(ring.a() + strip * STRIP * SWIZZLE_ROW, PANEL_BYTES);
    const uint32_t b = descriptor_low(ring.b(), PANEL_BYTES);
    constexpr uint32_t K_MAJOR_STEP = WGMMA_K * 2 / 16, MN_MAJOR_STEP = WGMMA_K * SWIZZLE_ROW / 16;
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / WGMMA_K; ++k)
        wgmma<MN_A, MN_B>(acc, matrix_descriptor(a + k * (MN_A ? MN_MAJOR_STEP : K_MAJOR_STEP)),
                          matrix_descriptor(b + k * (MN_B ? MN_MAJOR_STEP : K_MAJOR_STEP)), ACCUMULATE || k > 0);
    wgmma_commit_group();
    pin_registers(acc);
}

// acc (this consumer's strip, STRIP x BN) = A * B over `steps` stages, at least one. MN_A, MN_B: 1 where that operand lies MN-major.
// strip: this consumer's index, a uniform value, so that descriptors are made in uniform registers.
// `meanwhile(left)` runs while the wgmma of a stage do; `left` counts the stages from this one to the last.
//
// A stage goes back to the producer as soon as it has been multiplied, whatever else waits: the later it goes, the later comes
// what it is filled with. The first stage is apart, for it doesn't add and frees nothing.
template <int MN_A, int MN_B, class Meanwhile>
DEVICE void multiply(float (&acc)[BN / 2], Ring& ring, int strip, int steps, Meanwhile meanwhile) {
    multiply_stage<MN_A, MN_B, false>(acc, ring, strip);
    for (int left = steps;; --left) {
        ring.advance();
        meanwhile(left);
        if (left == 1) break;
        multiply_stage<MN_A, MN_B, true>(acc, ring, strip);
        wgmma_wait_group<1>();  // one group stays in flight
        release_stage(ring.before(1));
    }
    wgmma_wait_group<0>();
    pin_registers(acc);
    release_stage(ring.before(1));
}
