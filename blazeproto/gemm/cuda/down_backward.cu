// Down projection, backward to the activations. MoEBlaze Algorithm 1, lines 20-28; SonicMoE Algorithm 3 and appendix D.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; stays in fp32
//   act    = f(gate) * g(up), recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
//   dO rows --gather--> A  \                                                           H
//                            wgmma -> acc = dA' -> slabs of 64 rows x 64 columns, fp32  \
//   W_down  --TMA-----> B  /                                   \--epilogue warpgroup-----+--> dH, A', dS
//
// An epilogue warpgroup does all that follows dA', while the consumers multiply the next tile. A consumer hands its strip over
// in parts of 64 columns, each through a slab of shared memory. It waits where a slab is still full, but for the last part of a
// tile: that one waits in registers, and is handed over during the next tile's mainloop.
//
//   consumer            mma tile 0 ... | part 0 | 1 | 2 | mma tile 1 . part 3 ........ | part 0 | 1 | 2 | mma tile 2 ...
//   epilogue warpgroup                 | H, part 0 | H, 1 | H, 2 | H, 3 |              | H, part 0 | H, 1 | ...
//                                        filled[strip][slab]   emptied[strip][slab]
//
// A tile of 256 columns leaves shared memory for one slab a strip, one of 192 or 128 for two: then nobody waits for a slab.
//
// A thread of the epilogue warpgroup makes 8 hidden units of a row at a time. It loads their H into registers and stores their dH and
// A', 16 bytes each, and the next H is under way meanwhile. Where gate and up alternate in H (layout.cuh), these are twice 4
// units that lie 32 apart, so that neighbouring lanes load neighbouring chunks.
//
// dH may be the same memory as H: the thread that stores a chunk of dH is the one that has loaded this chunk of H, and no other does.
//
// Floor: max(2 n d R / 785 TFLOP/s, (2 d T + 2 n d E + 2 (2n + 2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "down_backward.cuh"
#include "layout.cuh"

static_assert(EPILOGUE_WARPGROUPS == 1, "it makes dH, A' and dS");

constexpr int SLABS = BN == 256 ? 1 : 2;  // of a strip
constexpr int SLAB_ROW = SLAB * int(sizeof(float));
constexpr int SLAB_BYTES = STRIP * SLAB_ROW;
constexpr int SLAB_BARRIERS = EPILOGUE_OFFSET + CONSUMERS * SLABS * SLAB_BYTES;
constexpr int STRIP_PARTS = BN / SLAB;
constexpr int HELD = 1, AT_ONCE = STRIP_PARTS - HELD;  // parts that wait in registers; that do not

// ---- slabs ---------------------------------------------------------------------------------------------------------------
// The slab of a strip's part, counted over all tiles.
struct Slab {
    int strip;
    uint32_t part;

    DEVICE uint32_t index() const { return strip * SLABS + part % SLABS; }
    DEVICE uint32_t phase() const { return part / SLABS % 2; }
    DEVICE uint32_t at() const { return shared_at(EPILOGUE_OFFSET) + index() * SLAB_BYTES; }
    DEVICE uint32_t filled() const { return shared_at(SLAB_BARRIERS) + index() * 2 * BARRIER_BYTES; }
    DEVICE uint32_t emptied() const { return filled() + BARRIER_BYTES; }
};

// Where a chunk of 4 columns lies. Neither 8 lanes that read every other chunk of a row nor 16 that write 32 bytes of 4 rows have
// bank conflicts.
DEVICE uint32_t chunk_address(uint32_t slab, int row, int chunk) {
    return slab + row * SLAB_ROW + ((chunk ^ chunk >> 3 ^ (row & 3) << 1) << 4);
}

// ---- consumer ------------------------------------------------------------------------------------------------------------
struct DownBackwardEpilogue : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = SLABS * (SLAB_BYTES + 2 * BARRIER_BYTES);
    static constexpr int PARTS = HELD;
    uint32_t handed = 0;  // parts so far
    float held[HELD * SLAB / 2];

    DEVICE explicit DownBackwardEpilogue(const RowsParams&) {}

    DEVICE static void init() {
        for (int slab = 0; slab < CONSUMERS * SLABS; ++slab) {
            mbarrier_init(shared_at(SLAB_BARRIERS) + slab * 2 * BARRIER_BYTES, WARPGROUP_WARPS);
            mbarrier_init(shared_at(SLAB_BARRIERS) + slab * 2 * BARRIER_BYTES + BARRIER_BYTES, WARPGROUP_WARPS);
        }
        fence_mbarrier_init();
    }

    DEVICE Slab slab() const { return {consumer_index(), handed}; }

    // A vote, because behind a wait that each thread leaves by itself ptxas would keep stages and descriptors in vector registers.
    DEVICE bool ready(int) const { return __all_sync(~0u, mbarrier_test_wait(slab().emptied(), slab().phase() ^ 1)); }

    DEVICE void wait_until_empty() const {
        MARK(BEGIN, WAIT_EMPTY);
        while (!ready(0)) {
        }
        MARK(END, WAIT_EMPTY);
    }

    DEVICE void publish() {
        __syncwarp();
        mbarrier_arrive_if(thread_index() % 32 == 0, slab().filled());
        ++handed;
    }

    DEVICE void hand_over(const float* sums) {
        wait_until_empty();
        const int lane = thread_index() % 32;
        const uint32_t at = chunk_address(slab().at(), thread_index() / 32 % WARPGROUP_WARPS * 16 + lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < SLAB / 8; ++j) {
            const uint32_t columns = at ^ (2 * j ^ j / 4) << 4;
            store_shared_f32x2(columns, sums[4 * j], sums[4 * j + 1]);
            store_shared_f32x2(columns + 8 * SLAB_ROW, sums[4 * j + 2], sums[4 * j + 3]);
        }
        publish();
    }

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile&, const Ring&) {
#pragma unroll
        for (int part = 0; part < AT_ONCE; ++part) hand_over(acc + part * SLAB / 2);
#pragma unroll
        for (int i = 0; i < HELD * SLAB / 2; ++i) held[i] = acc[AT_ONCE * SLAB / 2 + i];
    }

    // Tells of as many parts as `hold`: what is in them has no rows and is not stored.
    template <class SkipTile>
    DEVICE void skip(SkipTile skip_tile) {
        skip_tile();
#pragma unroll 1
        for (int part = 0; part < AT_ONCE; ++part) {
            wait_until_empty();
            publish();
        }
    }

    template <int INDEX>
    DEVICE void part() {
        hand_over(held + INDEX * SLAB / 2);
    }

    DEVICE static void store_staged(const RowsParams& p, const Scheduler& scheduler);
};

// ---- epilogue warpgroup --------------------------------------------------------------------------------------------------
// A tile's parts come in turn, of each its strips, and of a strip four passes of 16 rows, 8 lanes a row.
constexpr int PASSES = STRIP / PASS_ROWS;
constexpr int STEPS = STRIP_PARTS * CONSUMERS * PASSES;
constexpr int H_WIDTH = GATED ? 2 : 1;  // columns of H for a hidden unit
constexpr int APART = ALTERNATING ? SLAB / 2 : CHUNK / 2;  // of a thread's two quads of units

// Of one step: which row, and which columns. A thread has units [column, +4) and [column + APART, +4).
struct Step {
    int row, column;
    bool in_expert;

    DEVICE Step(const RowTile& tile, int step) {
        const int thread = warpgroup_thread();
        row = tile.row + step % (CONSUMERS * PASSES) * PASS_ROWS + thread / CHUNKS_IN_ROW;
        column = tile.column + step / (CONSUMERS * PASSES) * SLAB + thread % CHUNKS_IN_ROW * (ALTERNATING ? CHUNK / 2 : CHUNK);
        in_expert = row < tile.row_end;
    }

    DEVICE bool has(const RowsParams& p, int quad) const { return in_expert && column + quad * APART < p.columns; }

    // Where the first unit's gate lies in H; where up does, or the gate of the other quad, counted from there.
    DEVICE int64_t in_h(const RowsParams& p) const {
        return int64_t(row) * (H_WIDTH * p.columns) + (ALTERNATING ? 2 * column : column);
    }
    DEVICE static int other(const RowsParams& p) { return ALTERNATING ? 2 * APART : p.columns; }
};

// gate, up -> dgate, dup of a thread's units, in place; and A'.
struct Units : UnitsBackward<1> {
    uint32_t h[CHUNK] = {}, a[CHUNK / 2];

    DEVICE void load(const RowsParams& p, const Step& step) {
#pragma unroll
        for (int chunk = 0; chunk < H_WIDTH; ++chunk) {
            uint4 words = {};
            if (step.has(p, ALTERNATING ? chunk : 0)) words = load_global_16(p.h_rows + step.in_h(p) + chunk * step.other(p));
            h[4 * chunk] = words.x, h[4 * chunk + 1] = words.y, h[4 * chunk + 2] = words.z, h[4 * chunk + 3] = words.w;
        }
    }

    DEVICE void differentiate(const float (&d_acts)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            uint32_t &x = h[ALTERNATING ? 2 * i : i], &y = h[ALTERNATING ? 2 * i + 1 : 4 + i];
            const Unit one = of_unit(bf16_low(x), ALTERNATING ? bf16_high(x) : bf16_low(y), d_acts[2 * i], 0);
            const Unit two = of_unit(ALTERNATING ? bf16_low(y) : bf16_high(x), bf16_high(y), d_acts[2 * i + 1], 0);
            x = ALTERNATING ? pack_bf16(one.d_gate, one.d_up) : pack_bf16(one.d_gate, two.d_gate);
            y = ALTERNATING ? pack_bf16(two.d_gate, two.d_up) : pack_bf16(one.d_up, two.d_up);
            a[i] = pack_bf16(one.a, two.a);
        }
    }

    DEVICE void store(const RowsParams& p, const Step& step) const {
        bf16* const scaled = p.out1_rows + int64_t(step.row) * p.columns + step.column;
#pragma unroll
        for (int chunk = 0; chunk < H_WIDTH; ++chunk)
            if (step.has(p, ALTERNATING ? chunk : 0))
                *reinterpret_cast<uint4*>(p.out0_rows + step.in_h(p) + chunk * step.other(p)) =
                    make_uint4(h[4 * chunk], h[4 * chunk + 1], h[4 * chunk + 2], h[4 * chunk + 3]);
        if constexpr (ALTERNATING) {
#pragma unroll
            for (int quad = 0; quad < 2; ++quad)
                if (step.has(p, quad))
                    *reinterpret_cast<uint2*>(scaled + quad * APART) = make_uint2(a[2 * quad], a[2 * quad + 1]);
        } else if (step.has(p, 0)) {
            *reinterpret_cast<uint4*>(scaled) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
};

// A part of a tile's H to L2, a row each thread.
DEVICE void prefetch_part(const RowsParams& p, const RowTile& tile, int part) {
    const int row = tile.row + warpgroup_thread(), column = tile.column + part * SLAB;
    if (row >= tile.row_end || column >= p.columns) return;
    const bf16* at = p.h_rows + int64_t(row) * (H_WIDTH * p.columns) + (ALTERNATING ? 2 * column : column);
    prefetch_l2(at);
    if (GATED) prefetch_l2(at + (ALTERNATING ? SLAB : p.columns));
}

DEVICE void DownBackwardEpilogue::store_staged(const RowsParams& p, const Scheduler& scheduler) {
    const int thread = warpgroup_thread(), lane = thread % 32;
    const int first = thread / CHUNKS_IN_ROW, chunk = thread % CHUNKS_IN_ROW;
    uint32_t parts = 0;  // handed over by each consumer before this tile
    for (int position = 0; scheduler.has(position); ++position, parts += STRIP_PARTS) {
        mbarrier_wait(Slab{0, parts}.filled(), Slab{0, parts}.phase());  // then the slots of this tile and the next one are written
        MARK(AT, TILE);
        const RowTile tile = scheduler.at(position);
        // A lane keeps S and dS of one row in which its warp works: that of lanes 8 (lane % 4) and on, in pass lane / 4 of both strips.
        const int own_row = tile.row + lane / 4 * PASS_ROWS + thread / 32 * WARP_ROWS + lane % WARP_ROWS;
        float score = 0.0f, d_score = 0.0f;
        if (own_row < tile.row_end) score = load_f32(p.scores + load_s32(p.pairs.pair_indices + own_row));
        Units next;
        next.load(p, Step(tile, 0));
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const int pass = step % PASSES, strip = step / PASSES % CONSUMERS, part = step / (CONSUMERS * PASSES);
            const Slab slab{strip, parts + part};
            if (pass == 0) {
                MARK(BEGIN, WAIT_FULL);
                mbarrier_wait(slab.filled(), slab.phase());
                MARK(END, WAIT_FULL);
                if (strip == 0 && scheduler.has(position + 1)) prefetch_part(p, scheduler.at(position + 1), part);
            }
            const int row = pass * PASS_ROWS + first, other = ALTERNATING ? CHUNKS_IN_ROW + chunk : 2 * chunk + 1;
            float d_acts[CHUNK];
            load_shared_f32x4(d_acts, chunk_address(slab.at(), row, ALTERNATING ? chunk : 2 * chunk));
            load_shared_f32x4(d_acts + 4, chunk_address(slab.at(), row, other));
            if (pass == PASSES - 1) {
                __syncwarp();
                mbarrier_arrive_if(lane == 0, slab.emptied());
            }
            Units units = next;
            const Step here(tile, step);
            if (step + 1 < STEPS) next.load(p, Step(tile, step + 1));
            if (!__any_sync(~0u, here.in_expert)) continue;
            units.score[0] = __shfl_sync(~0u, score, step % (CONSUMERS * PASSES) * 4 + lane / CHUNKS_IN_ROW);
            units.d_score[0] = 0.0f;
            units.differentiate(d_acts);
            units.store(p, here);
            float sum = units.d_score[0];
#pragma unroll
            for (int distance = 1; distance < CHUNKS_IN_ROW; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
            sum = __shfl_sync(~0u, sum, lane % WARP_ROWS * CHUNKS_IN_ROW);
            if (lane / 4 == step % (CONSUMERS * PASSES)) d_score += sum;
        }
        if (own_row < tile.row_end) p.reduction_out[int64_t(tile.column / BN) * p.rows + own_row] = d_score;
    }
}

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    down_backward(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, DownBackwardEpilogue>(p);
}
