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

// FINISHERS 1: a fourth warpgroup takes over what the consumers have multiplied (up.cu).
//
// 65536 registers: 168 a thread at launch, 128 with a finisher; who needs few hands its share to the consumers.
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = FINISHERS ? (512 - PRODUCER_REGISTERS - FINISHER_REGISTERS) / 2 : 232;
// Columns of one wgmma. ptxas refuses an instruction with 128 accumulators where threads start with 128 registers.
constexpr int WGMMA_N = FINISHERS ? 128 : BN;

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

// Where in the ring a producer or consumer is. The addresses follow from `stage`: registers are short beside 128 accumulators and
// the 64 packed ones of the tile before.
struct Ring {
    int stage = 0;
    uint32_t phase = 0;

    DEVICE uint32_t a() const { return shared_at(stage * STAGE_BYTES); }
    DEVICE uint32_t b() const { return a() + A_BYTES; }
    DEVICE uint32_t full_barrier() const { return shared_at(BARRIER_OFFSET + stage * 8); }
    DEVICE uint32_t empty_barrier() const { return shared_at(BARRIER_OFFSET + (STAGES + stage) * 8); }
    DEVICE uint32_t empty_barrier_before() const {
        return shared_at(BARRIER_OFFSET + (STAGES + (stage == 0 ? STAGES - 1 : stage - 1)) * 8);
    }

    DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }

    // By one thread, before any use. A stage is full by the TMA thread's expect_tx and, gathering, each producer thread's copies.
    DEVICE static void init() {
        for (Ring ring; ring.phase == 0; ring.advance()) {
            mbarrier_init(ring.full_barrier(), GATHER ? 1 + WARPGROUP : 1);
            mbarrier_init(ring.empty_barrier(), EMPTY_ARRIVALS);
        }
        fence_mbarrier_init();
    }
};

// ---- consumer: one tile's products ---------------------------------------------------------------------------------
// Frees a stage for the producers of every CTA that writes into it.
DEVICE void release_stage(uint32_t empty_barrier) {
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(empty_barrier);
    } else {
        if (lane < CLUSTER) mbarrier_arrive_cluster(empty_barrier, lane);
    }
}

DEVICE int warpgroup_thread() { return thread_index() % WARPGROUP; }
DEVICE int consumer_index() { return int(thread_index()) / WARPGROUP - 1; }

// acc (this consumer's strip, STRIP x BN) = A * B over `steps` stages. MN_A, MN_B: 1 where that operand lies MN-major.
// `meanwhile(left)` runs while the wgmma of a stage do; `left` counts the stages from this one to the last.
template <int MN_A, int MN_B, class Meanwhile>
DEVICE void multiply(float (&acc)[BN / 2], Ring& ring, int steps, Meanwhile meanwhile) {
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(ring.full_barrier(), ring.phase);
        if (GATHER) fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one
        // K-major, a strip is 64 rows of the stage; MN-major, one panel: as many bytes either way.
        const uint32_t a = ring.a() + consumer_index() * STRIP * SWIZZLE_ROW, b = ring.b();
        pin_registers(acc);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / WGMMA_K; ++k) {
            const uint32_t along_k_major = k * WGMMA_K * 2, along_mn_major = k * WGMMA_K * SWIZZLE_ROW;
            const uint64_t a_k = matrix_descriptor(a + (MN_A ? along_mn_major : along_k_major), PANEL_BYTES);
#pragma unroll
            for (int n = 0; n < BN; n += WGMMA_N) {
                const uint32_t b_n = b + n * (MN_B ? PANEL_BYTES / PANEL : SWIZZLE_ROW);
                wgmma<MN_A, MN_B>(reinterpret_cast<float(&)[WGMMA_N / 2]>(acc[n / 2]), a_k,
                                  matrix_descriptor(b_n + (MN_B ? along_mn_major : along_k_major), PANEL_BYTES), step > 0 || k > 0);
            }
        }
        wgmma_commit_group();
        pin_registers(acc);
        if (step > 0) {  // one group stays in flight; the stage before it is free
            wgmma_wait_group<1>();
            release_stage(ring.empty_barrier_before());
        }
        ring.advance();
        meanwhile(steps - step);
    }
    wgmma_wait_group<0>();
    pin_registers(acc);
    if (steps > 0) release_stage(ring.empty_barrier_before());
}
