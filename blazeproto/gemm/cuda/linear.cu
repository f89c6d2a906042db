// Rows times weights with nothing but a bias at the end: three of the products, by how they are compiled.
//
//   down forward          Y[r]   = act[r] . W_down[e]^T (+ bias)   contiguous, W_down (E, d, n) K-major. Algorithm 1, line 10
//   up backward, rows     dX~[r] = dH[r] . W_up[e]                 contiguous, W_up (E, 2n, d) MN-major. Algorithm 1, line 30
//   down forward, fused   O[token(r)] += S[pair(r)] Y[r]           FUSED_COMBINE: fp32 reductions into O (T, d); order not fixed
//
//   rows     --TMA or gather-->  A (BM x 64)  \
//                                               wgmma -> acc (BM x BN) -> slabs --TMA--> out (R, columns)
//   weights  --TMA------------>  B (BN x 64)  /
//
// Floor: max(2 columns reduction R / 785 TFLOP/s, 2 (reduction R + columns R + columns reduction E) bytes / 4.24 TB/s).
#include "varlen_m.cuh"

struct LinearEpilogue : PlainEpilogue {
    static constexpr int SMEM_BYTES = SLAB_PAIR_BYTES;
    static constexpr int PARTS = FUSED_COMBINE ? 0 : BN / 64, EAGER = 0;
    const RowsParams& p;
    uint32_t out[BN / 4];  // the strip as it is stored: pairs of bf16
    Tile tile;

    DEVICE explicit LinearEpilogue(const RowsParams& params) : p(params) {}

    DEVICE uint32_t bias_pair(int column) const {
        if (!HAS_BIAS || column >= p.columns) return 0;
        return load_bf16x2(p.bias + int64_t(tile.expert) * p.columns + column);
    }

    DEVICE void hold(const float (&acc)[BN / 2], const Tile& of, const Ring&) {
        tile = of;
        if constexpr (FUSED_COMBINE) {
            add_to_tokens(acc);
            return;
        }
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {
            const uint32_t bias = bias_pair(tile.column + i / 2 * 8 + threadIdx.x % 4 * 2);
            out[i] = pack_bf16(acc[2 * i] + bf16_low(bias), acc[2 * i + 1] + bf16_high(bias));
        }
    }

    template <int SLAB>
    DEVICE void part() {
        const int column = tile.column + SLAB * 64;
        if (column >= p.columns || tile.row >= tile.row_end) return skip_slab();  // the same for the whole warpgroup
        const uint32_t slab = slab_of_part(SLAB);
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) stmatrix_x4(slab_address(slab, quarter), out + SLAB * 16 + quarter * 4);
        store_slab(
            tile.row + STRIP <= tile.row_end, [&] { tma_store_2d(&p.out0, slab, column, tile.row); },
            [&] {
                store_slab_predicated(slab, p.out0_rows + int64_t(tile.row) * p.columns + column, p.columns,
                                      tile.row_end - tile.row, p.columns - column);
            });
    }

    DEVICE void add_to_tokens(const float (&acc)[BN / 2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + strip_row(h);
            if (row >= tile.row_end) continue;
            const int pair = __ldg(p.pairs.pair_indices + row);
            const float score = __ldg(p.scores + pair);
            float* token = p.reduction_out + int64_t(p.pairs.token(pair)) * p.columns;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const int column = tile.column + j * 8 + threadIdx.x % 4 * 2;
                if (column >= p.columns) continue;
                const uint32_t bias = bias_pair(column);
                reduce_add_f32x2(token + column, score * (acc[4 * j + 2 * h] + bf16_low(bias)),
                                 score * (acc[4 * j + 2 * h + 1] + bf16_high(bias)));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ RowsParams p) {
    varlen_m<LinearEpilogue>(p);
}
