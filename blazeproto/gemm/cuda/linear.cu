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

struct LinearEpilogue {
    static constexpr int SLABS = 2;
    static constexpr int SMEM_BYTES = SLABS * SLAB_BYTES;
    static constexpr int BARRIER_BYTES = 0;
    const RowsParams& p;
    SlabRing<SLABS> slabs;

    DEVICE LinearEpilogue(const RowsParams& params, uint32_t smem, uint32_t) : p(params), slabs(smem) {}
    DEVICE void prefetch(const Tile&, int) {}

    // Bias of columns `column`, `column + 1`.
    DEVICE uint32_t bias_pair(const Tile& tile, int column) const {
        if (!HAS_BIAS || column >= p.columns) return 0;
        return __ldg(reinterpret_cast<const uint32_t*>(p.bias + int64_t(tile.expert) * p.columns + column));
    }

    DEVICE void store_slab(const float* acc, const Tile& tile, int row, int column) {
        const uint32_t slab = slabs.acquire();
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            uint32_t quad[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t bias = bias_pair(tile, column + block * 16 + i / 2 * 8 + threadIdx.x % 4 * 2);
                const float* pair = acc + block * 8 + 2 * i;
                quad[i] = pack_bf16(pair[0] + bf16_low(bias), pair[1] + bf16_high(bias));
            }
            stmatrix_x4(slab_address(slab, block), quad);
        }
        slabs.release(
            row + 64 <= tile.row_end, [&](uint32_t s) { tma_store_2d(&p.out0, s, column, row); },
            [&](uint32_t s) {
                store_slab_predicated(s, p.out0_rows + int64_t(row) * p.columns + column, p.columns, tile.row_end - row,
                                      p.columns - column);
            });
    }

    DEVICE void add_to_tokens(const float (&acc)[BN / 2], const Tile& tile, int strip_row) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = strip_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + h * 8;
            if (row >= tile.row_end) continue;
            const float score = __ldg(p.scores + __ldg(p.pair_indices + row));
            float* out = p.reduction_out + int64_t(token_of_row(p, row)) * p.columns;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const int column = tile.column + j * 8 + threadIdx.x % 4 * 2;
                if (column >= p.columns) continue;
                const uint32_t bias = bias_pair(tile, column);
                reduce_add_f32x2(out + column, score * (acc[4 * j + 2 * h] + bf16_low(bias)),
                                 score * (acc[4 * j + 2 * h + 1] + bf16_high(bias)));
            }
        }
    }

    DEVICE void operator()(float (&acc)[STRIPS][BN / 2], const Tile& tile, int first_row) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int row = tile.row + first_row + strip * 64;
            if (row >= tile.row_end) return;  // the same for the whole warpgroup
            if constexpr (FUSED_COMBINE) {
                add_to_tokens(acc[strip], tile, row);
            } else {
#pragma unroll
                for (int slab = 0; slab < BN / 64; ++slab)
                    if (tile.column + slab * 64 < p.columns)
                        store_slab(acc[strip] + slab * 32, tile, row, tile.column + slab * 64);
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ RowsParams p) {
    varlen_m<LinearEpilogue>(p);
}
