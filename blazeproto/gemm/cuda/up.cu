// Up projection, forward. MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2, "up-proj A kernel".
//
//   H[r]   = x[token(r)] . W_up[e]^T (+ bias)      x (T, d) gathered, W_up (E, 2n, d) or (E, n, d), H (R, 2n) or (R, n)
//   act[r] = f(gate) * g(up)                       act (R, n), from H as rounded to bf16: backward recomputes the same act
//            or f(H[r]) without a gate             f: a branch of activation.cuh
//
//   x rows  --gather-->  A (BM x 64)  \
//                                       wgmma -> acc (BM x BN) -> slabs of H --TMA----------------> H
//   W_up    --TMA----->  B (BN x 64)  /                              \--epilogue warpgroup--------> act
//
// Where gate and up are halves of H (layout.cuh), B stacks BN/2 gate rows over the BN/2 up rows of the same hidden units. So
// gate and up of a unit lie at the same place of two slabs, and no interleaved copy of the weights exists. Where they
// alternate, B is BN rows in a row, and a thread finds gate and up of a unit beside each other.
//
// An activation takes longer than the wgmma it could hide under, so an epilogue warpgroup computes it. A consumer stages
// its strip of H in two parts through the slab pipeline (slab_pipeline.cuh): the first part as soon as the tile is
// multiplied, the second, which waits in registers, while the next tile is.
//
//   consumer            mma tile 0 ... | part 0 | mma tile 1 . part 1 ........ | part 0 | mma tile 2 . part 1 ....
//   epilogue warpgroup                          | act, store |    | act, store |        | act, store |
//
// docs/kernels.md tells how this kernel came to be as it is.
//
// Floor: max(4 n d R / 785 TFLOP/s, (2 d T + 2 d 2n E + 2 (2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "layout.cuh"
#include "slab_pipeline.cuh"
#include "varlen_m.cuh"

static_assert(EPILOGUE_WARPGROUPS == 1, "it makes act and stores");
static_assert(PLANES == 2, "gate and up of the same hidden units are a part");
constexpr int HALVES = GATED && !ALTERNATING ? 2 : 1;  // of a tile's columns: gate and up, or one
constexpr int PART_OF_HALF = PART_COLUMNS / HALVES;    // columns of a half, in a part: p.columns counts them
constexpr int STRIP_PARTS = BN / PART_COLUMNS;         // parts of a tile's strip

using Scheduler = TileScheduler<BN / HALVES>;

// ---- consumer ------------------------------------------------------------------------------------------------------------
struct UpEpilogue : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = PIPELINE_BYTES;
    static constexpr int PARTS = STRIP_PARTS;
    const RowsParams& p;
    SlabPipeline pipeline;
    uint32_t slabs_at;   // where part 0 goes, from look_ahead to hold
    uint32_t h[BN / 8];  // part 1 as it is stored: pairs of bf16

    DEVICE explicit UpEpilogue(const RowsParams& params) : p(params) {}

    DEVICE static void init() { SlabPipeline::init(WARPGROUP_WARPS); }

    // Waits for the slabs while the tile's last wgmma run.
    DEVICE void look_ahead(const RowTile&) { slabs_at = pipeline.wait_until_empty(); }

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile& tile, const Ring&) {
        const int column = tile.column + threadIdx.x % 4 * 2;
        const bf16* bias_at = p.bias + int64_t(tile.expert) * p.bias_stride + column;
        const auto packed = [&](int i) {  // i = 2j + r: row r * 8 + l / 4 of this warp's, columns 8 j + 2 (l % 4) and the next
            const int half = i / 2 * 8 / Scheduler::TILE_COLUMNS, offset = i / 2 * 8 % Scheduler::TILE_COLUMNS;
            uint32_t bias = 0;
            if (HAS_BIAS && column + offset < p.columns) bias = load_bf16x2(bias_at + half * p.columns + offset);
            return pack_biased(acc[2 * i], acc[2 * i + 1], bias);
        };
        pipeline.write(slabs_at, [&](int plane, int i) { return packed(first_pair(0, plane) + i); });
        if constexpr (PARTS > 1) {
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
                for (int i = 0; i < PAIRS_IN_SLAB; ++i) h[plane * PAIRS_IN_SLAB + i] = packed(first_pair(1, plane) + i);
        }
    }

    // Part 0 will tell of full slabs, as after `hold`: what is in them has no rows and is not stored. A vote, because behind a
    // wait that each thread leaves by itself ptxas would keep stages and descriptors in vector registers.
    template <class SkipTile>
    DEVICE void skip(SkipTile skip_tile) {
        skip_tile();
        while (!pipeline.empty()) {
        }
    }

    // The first of the packed accumulators that belong to a plane of a part.
    DEVICE static constexpr int first_pair(int part, int plane) {
        return HALVES == 2 ? plane * BN / 8 + part * PAIRS_IN_SLAB : (part * PLANES + plane) * PAIRS_IN_SLAB;
    }

    DEVICE bool ready(int part) const { return part == 0 || pipeline.empty(); }

    template <int INDEX>
    DEVICE void part() {
        if constexpr (INDEX == 0) pipeline.publish();
        else pipeline.fill([&](int plane, int i) { return h[plane * PAIRS_IN_SLAB + i]; });
    }

    DEVICE static void store_staged(const RowsParams& p, const Scheduler& scheduler);
};

// ---- epilogue warpgroup --------------------------------------------------------------------------------------------------
DEVICE uint4 activate(uint4 gate, uint4 up) {
    return make_uint4(activate(gate.x, up.x), activate(gate.y, up.y), activate(gate.z, up.z), activate(gate.w, up.w));
}

DEVICE uint2 activate(uint4 alternating) {
    return make_uint2(activate(alternating.x, alternating.y), activate(alternating.z, alternating.w));
}

// Evicts the chunk from L2 first: nobody reads H before backward, and act is more than L2 holds.
template <class Chunk>
DEVICE void store(bf16* out, Chunk chunk) {
    __stcs(reinterpret_cast<Chunk*>(out), chunk);
}

#if ACTIVATION_IS_GELU
constexpr bool ONE_AT_A_TIME = HALVES == 1;  // its formula leaves too few registers for both planes
#else
constexpr bool ONE_AT_A_TIME = false;
#endif

// One part of one strip. H leaves by TMA; act by 16 bytes a thread (by 8 where gate and up alternate). A thread reads its slabs
// one pass at a time: more reads at once would keep wgmma from its operands.
DEVICE void store_part(const RowsParams& p, const RowTile& tile, int part, int strip) {
    const int thread = warpgroup_thread(), first_row = thread / CHUNKS_IN_ROW, chunk = thread % CHUNKS_IN_ROW;
    const int row = tile.row + strip * STRIP, column = tile.column + part * PART_OF_HALF, own_column = column + chunk * CHUNK;
    const uint32_t slabs = slabs_of(strip);
    uint32_t at = swizzled(slabs, first_row, chunk);
    if (thread == 0 && row < tile.row_end) {
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
            tma_store_rows(&p.out0, slabs + plane * SLAB_BYTES, HALVES == 2 ? column : column + plane * SLAB, row, tile.row_end,
                           HALVES == 2 ? plane : 0);
        bulk_commit_group();
    }
    int64_t column_zero = int64_t(row + first_row) * p.columns;  // of the row, in one half of H
#pragma unroll
    for (int pass = 0; pass < STRIP / PASS_ROWS; ++pass) {
        const bool in_expert = row + first_row + pass * PASS_ROWS < tile.row_end;
        uint4 h[PLANES];
#pragma unroll
        for (int plane = 0; plane < PLANES && !ONE_AT_A_TIME; ++plane) h[plane] = load_shared_16(at + plane * SLAB_BYTES);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            if (ONE_AT_A_TIME) h[plane] = load_shared_16(at + plane * SLAB_BYTES);
            const int own = own_column + (HALVES == 2 ? 0 : plane * SLAB);
            if (!in_expert || own >= p.columns) continue;
            if (ALTERNATING) store(p.out1_rows + (column_zero + own) / 2, activate(h[plane]));
            else if (plane < PLANES / HALVES) store(p.out1_rows + column_zero + own, activate(h[plane], h[HALVES - 1]));
        }
        at += PASS_ROWS * SWIZZLE_ROW;
        column_zero += PASS_ROWS * p.columns;
    }
    __syncwarp();
    if (thread == 0) bulk_wait_group_read<0>();
    if (thread % 32 == 0) mbarrier_arrive(emptied_barrier(strip));
}

DEVICE void UpEpilogue::store_staged(const RowsParams& p, const Scheduler& scheduler) {
    uint32_t phase = 0;
    for (int position = 0; scheduler.has(position); ++position) {
        MARK(AT, TILE);
#pragma unroll 1
        for (int part = 0; part < STRIP_PARTS; ++part) {
#pragma unroll 1
            for (int strip = 0; strip < CONSUMERS; ++strip) {
                MARK(BEGIN, WAIT_FULL);
                mbarrier_wait(filled_barrier(strip), phase);
                MARK(END, WAIT_FULL);
                MARK(BEGIN, STORE);
                store_part(p, scheduler.at(position), part, strip);
                MARK(END, STORE);
            }
            phase ^= 1;
        }
    }
    if (warpgroup_thread() == 0) bulk_wait_group<0>();
}

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    up_forward(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, UpEpilogue>(p);
}
