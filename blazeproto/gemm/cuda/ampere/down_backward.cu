// Down projection, backward to the activations, as ../down_backward.cu.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; stays in registers
//   act    = f(gate) * g(up), recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
// A warp takes 8 rows at a time. H of the next 8 is copied while these become dgate and dup, in place, and A':
//
//   8 rows      H --cp.async--> planes gate | up | .   --> dgate | dup | A' --16 bytes a lane--> dH, A'
//
// If gate and up alternate in H (../layout.cuh), the two planes are 128 columns of it, each with gate and up of 32 units.
//
// dH may be the same memory as H: a warp reads its part of H before it writes the same part of dH.
#include "layout.cuh"
#include "rows.cuh"

constexpr int GROUP_ROWS = 8, GROUP_PLANE = GROUP_ROWS * SWIZZLE_ROW, GROUPS = WARP_ROWS / GROUP_ROWS;
static_assert(STRIP_BYTES >= 2 * 3 * GROUP_PLANE, "gate, up and A' of 8 rows, and of the next 8");
static_assert(GROUPS == 8, "each of the four lanes of a row has the scores of two groups");

struct DownBackwardEpilogue {
    static constexpr int SEGMENT_STAGES = 0;
    const RowsParams& p;

    DEVICE explicit DownBackwardEpilogue(const RowsParams& params) : p(params) {}

    DEVICE void store(const Accumulators& acc, const RowTile& tile, uint32_t strip) const {
        const int lane = lane_index(), column = tile.column + warp_column(), first_row = tile.row + warp_row();
        // The four lanes of a row share its score and dS: lane q of them has those of groups 2 q and 2 q + 1.
        float scores[2], d_scores[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + lane % 4 * 16 + half * 8;
            scores[half] = row < tile.row_end ? __ldg(p.scores + __ldg(p.pairs.pair_indices + row)) : 0.0f;
        }
        copy_h(strip, first_row, tile.row_end, column);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int row = first_row + group * GROUP_ROWS, half = group % 2;
            const uint32_t planes = strip + half * 3 * GROUP_PLANE;
            if (group + 1 < GROUPS) copy_h(strip + (1 - half) * 3 * GROUP_PLANE, row + GROUP_ROWS, tile.row_end, column);
            if (group + 1 < GROUPS) cp_async_wait_group<1>();
            else cp_async_wait_group<0>();
            __syncwarp();
            const float score = __shfl_sync(~0u, scores[half], lane / 4 * 4 + group / 2);
            float d_score = 0;
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; ++j) differentiate(acc[group / 2][j] + 2 * half, planes, j, score, d_score);
            d_score += __shfl_xor_sync(~0u, d_score, 1);
            d_score += __shfl_xor_sync(~0u, d_score, 2);
            if (lane % 4 == group / 2) d_scores[half] = d_score;
            __syncwarp();
            store_rows(planes, row, tile.row_end - row, column);
            __syncwarp();
        }
        store_score_gradient(d_scores, tile, strip);
    }

   private:
    // Copies 8 rows of H into planes; rows past the expert's end and columns past the last become zeros.
    DEVICE void copy_h(uint32_t planes, int row, int row_end, int column) const {
        const int64_t width = (GATED ? 2 : 1) * p.columns;
#pragma unroll
        for (int i = 0; i < (GATED ? 4 : 2); ++i) {
            const int plane = i / 2, own = i % 2 * 4 + lane_index() / 8, chunk = lane_index() % 8 * CHUNK;
            const int at = ALTERNATING ? 2 * column + plane * WARP_COLUMNS + chunk : column + chunk;
            const bf16* from = reinterpret_cast<const bf16*>(matrix(p.h).start) + (row + own) * width + (ALTERNATING ? 0 : plane * p.columns) + at;
            const bool there = row + own < row_end && at < (ALTERNATING ? 2 : 1) * p.columns;
            cp_async_16(swizzled(planes + plane * GROUP_PLANE, own, chunk / CHUNK), from, there);
        }
        cp_async_commit_group();
    }

    // Two units of a row, in block j of 8, whose dA' is d_a: gate, up -> dgate, dup in place, and A'. Adds their part of the row's dS.
    DEVICE static void differentiate(const float* d_a, uint32_t planes, int j, float score, float& d_score) {
        const uint32_t of_a = pair_place(planes + 2 * GROUP_PLANE, 0, j);
        if constexpr (ALTERNATING) {
            const int lane = lane_index(), chunk = j % 4 * 2 + lane % 4 / 2;
            const uint32_t place = swizzled(planes + j / 4 * GROUP_PLANE, lane / 4, chunk) + lane % 2 * 8;
            const uint2 units = load_shared_8(place);
            const Unit one = backward_of_unit(bf16_low(units.x), bf16_high(units.x), d_a[0], score, d_score);
            const Unit two = backward_of_unit(bf16_low(units.y), bf16_high(units.y), d_a[1], score, d_score);
            store_shared_8(place, make_uint2(pack_bf16(one.d_gate, one.d_up), pack_bf16(two.d_gate, two.d_up)));
            store_shared_4(of_a, pack_bf16(one.a, two.a));
        } else {
            const uint32_t of_gate = pair_place(planes, 0, j), of_up = of_gate + GROUP_PLANE;
            const uint32_t gates = load_shared_4(of_gate), ups = GATED ? load_shared_4(of_up) : 0;
            const Unit one = backward_of_unit(bf16_low(gates), bf16_low(ups), d_a[0], score, d_score);
            const Unit two = backward_of_unit(bf16_high(gates), bf16_high(ups), d_a[1], score, d_score);
            store_shared_4(of_gate, pack_bf16(one.d_gate, two.d_gate));
            if (GATED) store_shared_4(of_up, pack_bf16(one.d_up, two.d_up));
            store_shared_4(of_a, pack_bf16(one.a, two.a));
        }
    }

    // 8 rows of dH and of A'.
    DEVICE void store_rows(uint32_t planes, int row, int rows, int column) const {
        constexpr int CHUNKS = WARP_COLUMNS / CHUNK;
        const int64_t width = (GATED ? 2 : 1) * p.columns;
        bf16* dh = p.out0_rows + row * width + (ALTERNATING ? 2 : 1) * column;
        const int left = p.columns - column;
        store_plane<CHUNKS, GROUP_ROWS>(planes, dh, width, rows, ALTERNATING ? 2 * left : left);
        if (ALTERNATING) store_plane<CHUNKS, GROUP_ROWS>(planes + GROUP_PLANE, dh + WARP_COLUMNS, width, rows, 2 * left - WARP_COLUMNS);
        else if (GATED) store_plane<CHUNKS, GROUP_ROWS>(planes + GROUP_PLANE, dh + p.columns, width, rows, left);
        store_plane<CHUNKS, GROUP_ROWS>(planes + 2 * GROUP_PLANE, p.out1_rows + int64_t(row) * p.columns + column, p.columns, rows, left);
    }

    // A row's sum over this tile's columns, in a fixed order: a thread's columns, the four lanes of a row, the warps across.
    DEVICE void store_score_gradient(const float (&d_scores)[2], const RowTile& tile, uint32_t strip) const {
        const int lane = lane_index(), warp = threadIdx.x / 32;
        __syncthreads();  // the strips are stored
        float* const sums = reinterpret_cast<float*>(shared_memory() + (strip - smem_address(shared_memory()))) - warp * (STRIP_BYTES / 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[warp % WARPS_ACROSS * BM + warp_row() + lane % 4 * 16 + half * 8 + lane / 4] = d_scores[half];
        __syncthreads();
        const int row = threadIdx.x;
        if (row >= BM || tile.row + row >= tile.row_end) return;
        float sum = 0;
#pragma unroll
        for (int across = 0; across < WARPS_ACROSS; ++across) sum += sums[across * BM + row];
        p.reduction_out[int64_t(tile.column / BN) * p.rows + tile.row + row] = sum;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) down_backward(const __grid_constant__ RowsParams p) {
    run<RowScheduler<BN>, RowLoads<1>, DownBackwardEpilogue>(p);
}
