// The mainloop of every product: a ring of shared-memory stages between a producer warpgroup and the consumer warpgroups.
//
//   producer warpgroup                 ring of STAGES                       consumer warpgroups
//   TMA boxes        ---+       +---------+---------+---------+         +-- wgmma on rows 0..63 of the tile
//                       +-----> | A | B   | A | B   | A | B   | ------> |
//   gathered rows    ---+       +---------+---------+---------+         +-- wgmma on rows 64..127
//                                 full[s]: data landed, consumers may read
//                                 empty[s]: both consumers are done, the producer may write
//
// A stage holds BK elements of the reduction: K-major, as a 128-byte swizzled row for each row of A; MN-major, as a row for
// each element. A consumer multiplies one strip of the tile, STRIP rows. A strip that lies
// past its expert's end may be skipped: its rows of A are not loaded, its consumer only gives the stages back, and the
// other one has the tensor cores for itself.
//
//   rows 0..63      consumer 0    | wgmma 0 .. | wgmma 1 .. | ...       | w 0 | w 1 | w 2 | ...
//   rows 64..127    consumer 1    | wgmma 0 .. | wgmma 1 .. | ...       |skip |skip |skip |          past the expert's end
//
// CLUSTER 2, in weight gradients: two CTAs compute neighbouring blocks of gathered columns and the same block of ordered columns.
// Each loads half of the B stage and multicasts it to both, which halves what B costs in L2 bandwidth. Elsewhere: pairs.cuh.
//
// -D: SMEM_LIMIT           bytes of dynamic shared memory that a CTA may have; every kernel here asks for all of it
//     WARPGROUP            threads of a warpgroup
//     BM, BN, BK           rows, columns and reduction elements of a tile's stage
//     STAGES, CLUSTER      as above
//     GATHER               1: the producer copies gathered rows by cp.async (gather.cuh).  0: it loads contiguous ones by TMA
//     EPILOGUE_WARPGROUPS  0, or 1: a fourth warpgroup that only runs the epilogue, on EPILOGUE_REGISTERS registers a thread
//     MAX_EXPERTS          for how many the schedule in shared memory has room
//     LOW_RANK             0, or how many wgmma of a tile's last stage have elements of the reduction, where it ends with a low
//                          rank (varlen_m.cuh)
#pragma once
#include "timeline.cuh"
#include "wgmma.cuh"

// A type of operands: whether blocks of them share scales. E4m3 (fp8.cuh): also a block's width, and the scales of a tile.
struct Bf16 { static constexpr bool SCALED = false; };

constexpr int STRIP = WGMMA_M;
constexpr int CONSUMERS = BM / STRIP;
constexpr int WARPGROUP_WARPS = WARPGROUP / 32;
constexpr int THREADS = (1 + CONSUMERS + EPILOGUE_WARPGROUPS) * WARPGROUP;
constexpr int A_BYTES = BM * BK * OPERAND_BYTES;
constexpr int B_BYTES = BN * BK * OPERAND_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int STRIP_BYTES = A_BYTES / CONSUMERS;  // a strip's part of A
constexpr int PANEL_BYTES = BK * SWIZZLE_ROW;  // an MN-major panel: BK rows

static_assert(WARPGROUP_WARPS == 4, "what the hardware calls a warpgroup");
static_assert(BM == CONSUMERS * STRIP, "a consumer for every strip of a tile");
static_assert(BN == 64 || BN == 128 || BN == 192 || BN == 256, "the widths that wgmma.cuh has");
static_assert(BK == PANEL, "a K-major stage is one panel wide");
static_assert(EPILOGUE_WARPGROUPS == 0 || EPILOGUE_WARPGROUPS == 1, "one is built");

// A multiprocessor has 65536 registers: 168 a thread for the three warpgroups at launch, 128 with an epilogue warpgroup.
// Warpgroups that need few give theirs to the consumers, whose count is a multiple of 8.
//
// ptxas is not told of an epilogue warpgroup: it would refuse a wgmma with 128 accumulators in a kernel whose threads start
// with 128 registers, although setmaxnreg gives consumers more before they come to one. gemm/cubin.py corrects what ptxas
// wrote down.
constexpr int PTXAS_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int REGISTER_BUDGET = EPILOGUE_WARPGROUPS ? 4 * 128 : 3 * 168;  // of one thread of every warpgroup together
#if defined(SENDS) && GATHER && CLUSTER > 1
constexpr int PRODUCER_REGISTERS = 48;  // it waits for rows, too
#else
constexpr int PRODUCER_REGISTERS = 40;
#endif
constexpr int CONSUMER_REGISTERS =
    (REGISTER_BUDGET - PRODUCER_REGISTERS - EPILOGUE_WARPGROUPS * EPILOGUE_REGISTERS) / CONSUMERS / 8 * 8;

constexpr int CONSUMER_BARRIER = 1;  // named barriers 1, 2: one for each consumer warpgroup
constexpr int PRODUCER_BARRIER = CONSUMER_BARRIER + CONSUMERS;

// Shared memory, all of it dynamic:  | stages | the epilogue's slabs | tiles of this CTA | the ring's barriers | schedule |
// With TIMELINE a few words more come last.
constexpr int EPILOGUE_OFFSET = STAGES * STAGE_BYTES;
constexpr int SCHEDULE_OFFSET = SMEM_LIMIT - TIMELINE_BYTES - (MAX_EXPERTS + 4) * int(sizeof(int));
constexpr int BARRIER_BYTES = 8;
constexpr int BARRIER_OFFSET = SCHEDULE_OFFSET - 2 * STAGES * BARRIER_BYTES;

DEVICE uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t smem[];
    return smem;
}

DEVICE uint32_t shared_at(int offset) { return smem_address(shared_memory()) + offset; }

// ---- who a thread is -------------------------------------------------------------------------------------------------
DEVICE int warpgroup_thread() { return thread_index() % WARPGROUP; }
DEVICE int consumer_index() { return int(thread_index()) / WARPGROUP - 1; }  // -1: the producer

// `value`, which is the same in all lanes of a warp. The compiler learns that it is, and keeps it, and what follows from it, in
// uniform registers. It believes a reduction everywhere, a shuffle only where control flow is uniform anyway.
DEVICE int uniform(int value) { return __reduce_max_sync(~0u, value); }

// Tiles of this CTA, of `all` that the grid takes round robin.
DEVICE int tiles_of_this_cta(int all) { return (all - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x); }

// ---- the ring --------------------------------------------------------------------------------------------------------
// The position of a producer or consumer in the ring. It is one number, because a consumer has few registers left beside 128
// accumulators and the 64 packed ones of the tile before.
struct Ring {
    uint32_t passed = 0;  // stages so far

    static_assert((STAGES & (STAGES - 1)) == 0, "`passed` wraps at 2^32");
    DEVICE uint32_t stage() const { return passed % STAGES; }
    DEVICE uint32_t phase() const { return passed / STAGES % 2; }  // of the barriers: the parity of the round
    DEVICE uint32_t a() const { return shared_at(stage() * STAGE_BYTES); }
    DEVICE uint32_t b() const { return a() + A_BYTES; }
    DEVICE uint32_t full_barrier() const { return shared_at(BARRIER_OFFSET + stage() * BARRIER_BYTES); }
    DEVICE uint32_t empty_barrier() const { return shared_at(BARRIER_OFFSET + (STAGES + stage()) * BARRIER_BYTES); }
    DEVICE Ring before(uint32_t stages) const { return {passed - stages}; }
    DEVICE void advance() { ++passed; }

    DEVICE void wait_until_full() const {
        MARK(BEGIN, WAIT_FULL);
        mbarrier_wait(full_barrier(), phase());
        MARK(END, WAIT_FULL);
    }

    DEVICE void wait_until_empty() const {
        MARK(BEGIN, WAIT_EMPTY);
        mbarrier_wait(empty_barrier(), phase() ^ 1);
        MARK(END, WAIT_EMPTY);
    }

    // By one thread, before any use. A stage is full after the arrival of the thread that issues TMA, and, where rows are
    // gathered, one of each producer thread's copies. It is empty after an arrival of every consumer warp of every CTA in
    // the cluster.
    DEVICE static void init() {
        for (Ring ring; ring.phase() == 0; ring.advance()) {
            mbarrier_init(ring.full_barrier(), GATHER ? 1 + WARPGROUP : 1);
            mbarrier_init(ring.empty_barrier(), CONSUMERS * WARPGROUP_WARPS * CLUSTER);
        }
        fence_mbarrier_init();
    }

    // By a consumer: frees the stage for the producers of every CTA that writes into it.
    DEVICE void release() const {
        const int lane = threadIdx.x % 32;
        if constexpr (CLUSTER == 1) mbarrier_arrive_if(lane == 0, empty_barrier());
        else mbarrier_arrive_cluster_if(lane < CLUSTER, empty_barrier(), lane);
    }
};

// ---- the consumers' products -----------------------------------------------------------------------------------------
// Starts the products of the stage at `ring` and does not wait for them. ACCUMULATE: adds to acc. COUNT: how many wgmma, each over
// WGMMA_K elements of the reduction.
template <class Producer, bool ACCUMULATE, int COUNT = BK / WGMMA_K>
DEVICE void multiply_stage(float (&acc)[BN / 2], const Ring& ring, int strip) {
    constexpr int MN_A = Producer::MN_A, MN_B = Producer::MN_B;
    ring.wait_until_full();
    if (GATHER) fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one
    // K-major, a strip is STRIP rows of the stage; MN-major, it is one panel: as many bytes either way.
    const uint32_t a = descriptor_low(ring.a() + strip * STRIP * SWIZZLE_ROW, PANEL_BYTES);
    const uint32_t b = descriptor_low(ring.b(), PANEL_BYTES);
    constexpr uint32_t K_MAJOR_STEP = WGMMA_K * OPERAND_BYTES / 16, MN_MAJOR_STEP = WGMMA_K * SWIZZLE_ROW / 16;
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
        wgmma<MN_A, MN_B>(acc, matrix_descriptor(a + k * (MN_A ? MN_MAJOR_STEP : K_MAJOR_STEP)),
                          matrix_descriptor(b + k * (MN_B ? MN_MAJOR_STEP : K_MAJOR_STEP)), ACCUMULATE || k > 0);
    wgmma_commit_group();
    pin_registers(acc);
}

// acc (this consumer's strip, STRIP x BN) = A * B over `steps` stages, at least one. Producer: how it has laid the operands.
// strip: this consumer's index, a uniform value, so that descriptors are made in uniform registers.
// `meanwhile(left)` runs while the wgmma of a stage do; `left` counts the stages from this one to the last.
//
// A consumer releases a stage as soon as it has multiplied it, before any other work: the producer can then fill it the
// earlier. The first stage is apart, because it overwrites acc and there is no stage before it to release.
template <class Producer, class Meanwhile>
DEVICE void multiply(float (&acc)[BN / 2], Ring& ring, int strip, int steps, Meanwhile meanwhile) {
    MARK(BEGIN, MMA);
    multiply_stage<Producer, false>(acc, ring, strip);
    for (int left = steps;; --left) {
        ring.advance();
        meanwhile(left);
        if (left == 1) break;
        if (LOW_RANK > 0 && left == 2) multiply_stage<Producer, true, LOW_RANK>(acc, ring, strip);
        else multiply_stage<Producer, true>(acc, ring, strip);
        wgmma_wait_group<1>();  // one group stays in flight
        ring.before(1).release();
    }
    wgmma_wait_group<0>();
    pin_registers(acc);
    MARK(END, MMA);
    ring.before(1).release();
}

// Gives back `stages` stages without reading them.
DEVICE void skip_stages(Ring& ring, int stages) {
#pragma unroll 1
    for (; stages > 0; --stages) {
        ring.wait_until_full();
        ring.release();
        ring.advance();
    }
}
