// The mainloop shared by every product: a ring of shared-memory stages between one producer warpgroup and two consumers.
//
//   producer warpgroup                 ring of STAGES                       consumer warpgroups
//   TMA boxes        ---+       +---------+---------+---------+         +-- wgmma on rows 0..63 of the tile
//                       +-----> | A | B   | A | B   | A | B   | ------> |
//   gathered rows    ---+       +---------+---------+---------+         +-- wgmma on rows 64..127
//                                 full[s]: data landed, consumers may read
//                                 empty[s]: both consumers are done, the producer may write
//
// A stage holds BK = 64 steps of the reduction: one 128-byte swizzled row a row of A (or, MN-major, a row a step).
//
// COOPERATIVE (PINGPONG 0): both consumers work on one tile, WG_M rows each. PINGPONG 1: tiles alternate between the
// consumers, so that the epilogue of one runs under the mainloop of the other.
//
// CLUSTER 2: two CTAs take neighbouring row blocks of one expert and one block of columns. Each loads half of the B stage
// and multicasts it to both, which halves what the weights cost in L2 bandwidth.
#pragma once
#include "wgmma.cuh"

constexpr int BK = 64;
constexpr int CONSUMERS = 2;
constexpr int WARPGROUP = 128;
constexpr int SMEM_LIMIT = 227 * 1024;  // dynamic shared memory a CTA may have; every kernel here asks for all of it
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int STRIPS = WG_M / 64;  // 64-row accumulator strips a consumer holds
constexpr int BM = PINGPONG ? WG_M : CONSUMERS * WG_M;
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PANEL_BYTES = BK * SWIZZLE_ROW;  // 64 k-rows of 64 MN-major elements

// 65536 registers: 168 a thread at launch; the producer hands its share to the consumers.
constexpr int PRODUCER_REGISTERS = GATHER ? 40 : 24;
constexpr int CONSUMER_REGISTERS = GATHER ? 232 : 240;

constexpr int EPILOGUE_BARRIER = 1;  // named barriers 1, 2: one a consumer warpgroup
constexpr int TURN_BARRIER = 3;      // named barriers 3, 4: whose turn to issue wgmma (ping-pong)

constexpr int EMPTY_ARRIVALS = (PINGPONG ? 1 : CONSUMERS) * 4 * CLUSTER;  // one a consumer warp, from every CTA of the cluster
static_assert(WG_M % 64 == 0 && BN % 64 == 0, "wgmma strips and swizzle panels are 64 wide");

struct Ring {
    uint32_t data, full, empty;  // shared-memory addresses
    int stage = 0;
    uint32_t phase = 0;

    DEVICE Ring(uint32_t data_address, uint32_t barriers)
        : data(data_address), full(barriers), empty(barriers + STAGES * 8) {}

    DEVICE uint32_t a() const { return data + stage * STAGE_BYTES; }
    DEVICE uint32_t b() const { return a() + A_BYTES; }
    DEVICE uint32_t full_barrier() const { return full + stage * 8; }
    DEVICE uint32_t empty_barrier() const { return empty + stage * 8; }

    DEVICE void advance(int steps = 1) {
        stage += steps;
        phase ^= (stage / STAGES) & 1;
        stage %= STAGES;
    }

    static constexpr int BARRIER_BYTES = 2 * STAGES * 8;

    // By one thread, before any use. A stage is full by the TMA thread's expect_tx and, gathering, every producer thread's copies.
    DEVICE void init() const {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, GATHER ? 1 + WARPGROUP : 1);
            mbarrier_init(empty + s * 8, EMPTY_ARRIVALS);
        }
        fence_mbarrier_init();
    }
};

// ---- consumer: one tile's products ---------------------------------------------------------------------------------
// Frees a stage for the producers of every CTA that writes into it.
DEVICE void release_stage(const Ring& ring) {
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(ring.empty_barrier());
    } else {
        if (lane < CLUSTER) mbarrier_arrive_cluster(ring.empty_barrier(), lane);
    }
}

// acc[strip] (64 x BN) = A strip * B over `steps` stages. MN_A, MN_B: 1 where that operand lies MN-major.
template <int MN_A, int MN_B>
DEVICE void multiply(float (&acc)[STRIPS][BN / 2], Ring& ring, int steps, int first_row) {
    Ring previous = ring;
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(ring.full_barrier(), ring.phase);
        if (GATHER) fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one
        const uint32_t a = ring.a(), b = ring.b();
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) pin_registers(acc[strip]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / WGMMA_K; ++k) {
            const uint64_t b_descriptor = MN_B ? matrix_descriptor(b + k * WGMMA_K * SWIZZLE_ROW, PANEL_BYTES)
                                               : matrix_descriptor(b + k * WGMMA_K * 2, 0);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const int row = first_row + strip * 64;
                const uint64_t a_descriptor =
                    MN_A ? matrix_descriptor(a + row / PANEL * PANEL_BYTES + k * WGMMA_K * SWIZZLE_ROW, PANEL_BYTES)
                         : matrix_descriptor(a + row * SWIZZLE_ROW + k * WGMMA_K * 2, 0);
                wgmma<MN_A, MN_B>(acc[strip], a_descriptor, b_descriptor, step > 0 || k > 0);
            }
        }
        wgmma_commit_group();
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) pin_registers(acc[strip]);
        if (step > 0) {  // one group stays in flight; the stage before it is free
            wgmma_wait_group<1>();
            release_stage(previous);
        }
        previous = ring;
        ring.advance();
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) pin_registers(acc[strip]);
    if (steps > 0) release_stage(previous);
}
