// Down projection, backward to the activations. MoEBlaze Algorithm 1, lines 20-28; SonicMoE Algorithm 3 and appendix D.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; never rounded
//   act    = f(gate) * g(up), recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
//   dO rows --gather--> A  \                                             H --\
//                            wgmma -> acc = dA' -> slabs in fp32 --> epilogue warpgroup --> dH, A', dS
//   W_down  --TMA-----> B  /
//
// An epilogue warpgroup does all that follows dA', while the consumers multiply the next tile. A consumer hands its strip over in
// parts of 64 columns, through one or two slabs of shared memory. The last part waits in registers, and is handed over during the
// next tile's mainloop.
//
//   consumer            mma tile 0 ... | part 0 | 1 | 2 | mma tile 1 . part 3 ............. | part 0 | 1 | 2 | mma tile 2 ...
//   epilogue warpgroup                 | part 0 | 1 | 2 | 3 of each strip |                 | part 0 | 1 | ...
//                                        filled[slab]  emptied[slab]
//
// Shared memory has room for one slab a strip beside tiles of 256 columns, for two beside 192 or 128. With two no consumer waits
// for a slab; with one it waits until the epilogue warpgroup has read two of its parts.
//
// A thread of the epilogue warpgroup makes 8 hidden units of a row at a time. It loads their H from global memory one pass ahead,
// and stores dH and A' from registers, 16 bytes each. Where gate and up alternate in H (layout.cuh), its units are twice 4 that lie
// 32 apart, so that neighbouring lanes load neighbouring chunks. The next tile's H is on its way to L2 meanwhile.
//
// dH may be the same memory as H: each chunk of it is loaded and stored by one thread, in this order.
//
// Floor: max(2 n d R / 785 TFLOP/s, (2 d T + 2 n d E + 2 (2n + 2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "down_backward.cuh"
#include "epilogue.cuh"
#include "layout.cuh"

static_assert(EPILOGUE_WARPGROUPS == 1, "it makes dH, A' and dS");

constexpr int SLABS = BN == 256 ? 1 : 2;  // of a strip
constexpr int SLAB_ROW = SLAB * int(sizeof(float));
constexpr int SUMS_BYTES = STRIP * SLAB_ROW;  // of a slab
constexpr int SLAB_BARRIERS = EPILOGUE_OFFSET + CONSUMERS * SLABS * SUMS_BYTES;
constexpr int STRIP_PARTS = BN / SLAB;
constexpr int HELD = 1, AT_ONCE = STRIP_PARTS - HELD;  // parts that wait in registers; that do not

// ---- slabs ---------------------------------------------------------------------------------------------------------------
// The slab of a strip's part, counted over all tiles.
struct Slab {
    int strip;
    uint32_t part;

    DEVICE uint32_t index() const { return strip * SLABS + part % SLABS; }
    DEVICE uint32_t phase() const { return part / SLABS % 2; }
    DEVICE uint32_t at() const { return shared_at(EPILOGUE_OFFSET) + index() * SUMS_BYTES; }
    DEVICE uint32_t filled() const { return shared_at(SLAB_BARRIERS) + index() * 2 * BARRIER_BYTES; }
    DEVICE uint32_t emptied() const { return filled() + BARRIER_BYTES; }
};

// Where a chunk of 4 columns lies. Bank conflicts are avoided: 8 lanes read every other chunk of a row, or 8 neighbouring ones;
// 16 lanes write two chunks of each of 4 rows.
DEVICE uint32_t chunk_address(uint32_t slab, int row, int chunk) {
    return slab + row * SLAB_ROW + ((chunk ^ chunk >> 3 ^ (row & 3) << 1) << 4);
}

// ---- consumer ------------------------------------------------------------------------------------------------------------
struct DownBackwardEpilogue : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = SLABS * (SUMS_BYTES + 2 * BARRIER_BYTES);
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

    // A vote: behind a wait that each thread leaves by itself ptxas would keep stages and descriptors in vector registers.
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

    // sums: a part's accumulators of this thread.
    DEVICE void hand_over(const float* sums) {
        wait_until_empty();
        const int lane = thread_index() % 32;
        const uint32_t at = chunk_address(slab().at(), strip_row(0), lane % 4 / 2) + lane % 2 * 8;
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
// A strip takes four passes of 16 rows. In each a warp has 4 rows, and 8 lanes have a row.
constexpr int PASSES = STRIP / PASS_ROWS;
constexpr int STEPS = STRIP_PARTS * CONSUMERS;
constexpr int H_WIDTH = GATED ? 2 : 1;                     // columns of H for a hidden unit
constexpr int APART = ALTERNATING ? SLAB / 2 : CHUNK / 2;  // of a thread's two quads of units

// A step is a part of one strip. First come two parts of each strip: then the consumer of 256 columns can hand the third over, and
// begins the next tile.
//
//   step    0   1   2   3   4   5   6   7
//   strip   0   0   1   1   0   1   0   1
//   part    0   1   0   1   2   2   3   3
DEVICE int strip_of(int step) { return step < 4 ? step / 2 : step % 2; }
DEVICE int part_of(int step) { return step < 4 ? step % 2 : step / 2; }

// Of a step: this thread's row in the first pass, and its first column. It has units [column, +4) and
// [column + APART, +4).
struct Place {
    int row, column, rows_left;

    DEVICE Place(const RowTile& tile, int step) {
        const int thread = thread_index() % WARPGROUP;
        row = tile.row + strip_of(step) * STRIP + thread / CHUNKS_IN_ROW;
        column = tile.column + part_of(step) * SLAB + thread % CHUNKS_IN_ROW * (ALTERNATING ? CHUNK / 2 : CHUNK);
        rows_left = tile.row_end - row;
    }

    DEVICE bool has(const RowsParams& p, int pass, int quad) const {
        return pass * PASS_ROWS < rows_left && column + quad * APART < p.columns;
    }

    // In elements: where this thread's first chunk lies in H and dH, and in A'.
    DEVICE int64_t in_h(const RowsParams& p) const {
        return int64_t(row) * (H_WIDTH * p.columns) + column * (ALTERNATING ? 2 : 1);
    }
    DEVICE int64_t in_a(const RowsParams& p) const { return int64_t(row) * p.columns + column; }
};

// From there to chunk 0 or 1 of a pass: gate and up of 8 units; alternating, both of 4 units.
DEVICE int64_t to_chunk(const RowsParams& p, int pass, int chunk) {
    if (ALTERNATING) return int64_t(p.columns) * (pass * PASS_ROWS * H_WIDTH) + chunk * 2 * APART;
    return int64_t(p.columns) * (pass * PASS_ROWS * H_WIDTH + chunk);
}

// Eight hidden units of a row: gate and up, which become dgate and dup in place; and A'.
struct Units : UnitsBackward<1> {
    uint32_t h[CHUNK] = {}, a[CHUNK / 2];

    DEVICE void load(const RowsParams& p, const bf16* at, const Place& place, int pass) {
#pragma unroll
        for (int chunk = 0; chunk < H_WIDTH; ++chunk)
            load_global_16_or_0(h + 4 * chunk, at + to_chunk(p, pass, chunk), place.has(p, pass, ALTERNATING ? chunk : 0));
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

    DEVICE void store(const RowsParams& p, bf16* d_h, bf16* scaled, const Place& place, int pass) const {
#pragma unroll
        for (int chunk = 0; chunk < H_WIDTH; ++chunk)
            store_global_16_if(place.has(p, pass, ALTERNATING ? chunk : 0), d_h + to_chunk(p, pass, chunk), h + 4 * chunk);
        scaled += int64_t(p.columns) * (pass * PASS_ROWS);
        if constexpr (ALTERNATING) {
            store_global_8_if(place.has(p, pass, 0), scaled, a);
            store_global_8_if(place.has(p, pass, 1), scaled + APART, a + 2);
        } else {
            store_global_16_if(place.has(p, pass, 0), scaled, a);
        }
    }
};

// A part of a tile's H to L2, a row each thread.
DEVICE void prefetch_part(const RowsParams& p, const RowTile& tile, int part) {
    const int row = tile.row + warpgroup_thread(), column = tile.column + part * SLAB;
    if (row >= tile.row_end || column >= p.columns) return;
    const bf16* at = p.h_rows + int64_t(row) * (H_WIDTH * p.columns) + column * (ALTERNATING ? 2 : 1);
    prefetch_l2(at);
    if (GATED) prefetch_l2(at + (ALTERNATING ? SLAB : p.columns));
}

// The sum of d_score[pass] over the 8 lanes of a row, for pass lane % 4: each exchange halves how many sums a lane has.
DEVICE float sum_of_own_pass(const float (&d_score)[PASSES]) {
    static_assert(PASSES == 4 && CHUNKS_IN_ROW == 8, "three exchanges, two of which choose");
    const int lane = thread_index() % 32;
    const bool odd = lane & 1, high = lane & 2;
    const float first = (odd ? d_score[1] : d_score[0]) + __shfl_xor_sync(~0u, odd ? d_score[0] : d_score[1], 1);
    const float second = (odd ? d_score[3] : d_score[2]) + __shfl_xor_sync(~0u, odd ? d_score[2] : d_score[3], 1);
    const float sum = (high ? second : first) + __shfl_xor_sync(~0u, high ? first : second, 2);
    return sum + __shfl_xor_sync(~0u, sum, 4);
}

DEVICE void DownBackwardEpilogue::store_staged(const RowsParams& p, const Scheduler& scheduler) {
    // A lane keeps S and dS of one of its warp's rows: in strip lane / 4 % 2 and pass lane % 4, that of lanes 8 (lane / 8) and on.
    const auto own_row = [](const RowTile& tile) {
        const int thread = thread_index() % WARPGROUP;
        return tile.row + thread / PASSES % CONSUMERS * STRIP + thread % PASSES * PASS_ROWS + thread / CHUNKS_IN_ROW;
    };
    const auto own_pair = [&](const RowTile& tile) {
        return own_row(tile) < tile.row_end ? load_s32(p.pairs.pair_indices + own_row(tile)) : -1;
    };
    const auto score_of = [&](int pair) { return pair < 0 ? 0.0f : load_f32(p.scores + pair); };
    const auto tile_at = [&](int position) {
        return TICKETS || scheduler.has(position) ? scheduler.at(position) : RowTile{-1, 0, 0, 0};
    };
    if (!scheduler.has(0)) return;
    // Whoever has seen a part of a tile may read its slot and the next one's. They are read anew each time: a tile takes registers.
    mbarrier_wait(Slab{0, 0}.filled(), 0);
    Place place(scheduler.at(0), 0);
    const bf16* h_at = p.h_rows + place.in_h(p);
    Units units[2];  // this pass's, and the next one's, whose H is under way
    units[0].load(p, h_at, place, 0);
    float score = score_of(own_pair(scheduler.at(0)));
    for (int position = 0; scheduler.has(position); ++position) {
        MARK(AT, TILE);
        float next_score = 0.0f, d_score_of_own = 0.0f;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const int strip = strip_of(step), part = part_of(step);
            const Slab slab{strip, uint32_t(position * STRIP_PARTS + part)};
            MARK(BEGIN, WAIT_FULL);
            mbarrier_wait(slab.filled(), slab.phase());
            MARK(END, WAIT_FULL);
            MARK(BEGIN, STORE);
            const int lane = thread_index() % 32, first_row = gather_row() % PASS_ROWS, chunk = lane % CHUNKS_IN_ROW;
            const int quad = ALTERNATING ? chunk : 2 * chunk, other = ALTERNATING ? CHUNKS_IN_ROW + chunk : 2 * chunk + 1;
            const uint32_t quad_at = chunk_address(slab.at(), first_row, quad);
            const uint32_t other_at = chunk_address(slab.at(), first_row, other);
            float d_acts[PASSES][CHUNK], d_score[PASSES];
            const auto take = [&](int pass) {
                load_shared_f32x4(d_acts[pass], quad_at + pass * PASS_ROWS * SLAB_ROW);
                load_shared_f32x4(d_acts[pass] + 4, other_at + pass * PASS_ROWS * SLAB_ROW);
            };
#pragma unroll
            for (int pass = 0; pass < PASSES / 2; ++pass) take(pass);
            if (strip == 0) {
                const RowTile next_tile = tile_at(position + 1);
                prefetch_part(p, next_tile, part);
                if (part == 0) next_score = __int_as_float(own_pair(next_tile));  // on the way: each load has a step's time
                if (part == 1) next_score = score_of(__float_as_int(next_score));
            }
            bf16 *const d_h = p.out0_rows + place.in_h(p), *const scaled = p.out1_rows + place.in_a(p);
            Place next = place;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                Units& of = units[pass % 2];
                if (pass + 1 == PASSES) {  // goes on to the next step, which may be the next tile's first
                    const int next_step = (step + 1) % STEPS;
                    next = Place(tile_at(position + (next_step == 0)), next_step);
                    h_at = p.h_rows + next.in_h(p);
                }
                units[1 - pass % 2].load(p, h_at, next, (pass + 1) % PASSES);
                of.score[0] = __shfl_sync(~0u, score, lane / CHUNKS_IN_ROW * CHUNKS_IN_ROW + strip * PASSES + pass);
                of.d_score[0] = 0.0f;
                of.differentiate(d_acts[pass]);
                of.store(p, d_h, scaled, place, pass);
                d_score[pass] = of.d_score[0];
                if (pass == 0) {  // not before: with the registers of all passes the kernel would spill
#pragma unroll
                    for (int later = PASSES / 2; later < PASSES; ++later) take(later);
                    __syncwarp();
                    mbarrier_arrive_if(lane == 0, slab.emptied());
                }
            }
            const float sum = sum_of_own_pass(d_score);
            if (lane / PASSES % CONSUMERS == strip) d_score_of_own += sum;
            place = next;
            MARK(END, STORE);
        }
        const RowTile tile = scheduler.at(position);
        if (own_row(tile) < tile.row_end)
            p.reduction_out[int64_t(tile.column / BN) * p.rows + own_row(tile)] = d_score_of_own;
        score = next_score;
    }
}

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    down_backward(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, DownBackwardEpilogue>(p);
}
