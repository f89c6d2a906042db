// Rows times weights, plus a bias, as ../linear.cu. Two of its products:
//
//   down forward        Y[r]   = act[r] . W_down[e]^T (+ bias)   W_down (E, d, n) K-major. MoEBlaze Algorithm 1, line 10
//   up backward, rows   dX~[r] = dH[r] . W_up[e]                 W_up (E, 2n, d) MN-major. Algorithm 1, line 30
#include "rows.cuh"

static_assert(!FUSED_COMBINE, "sums of a token's experts are combine.cu's");

struct LinearEpilogue {
    static constexpr int SEGMENT_STAGES = 0;
    const RowsParams& p;

    DEVICE explicit LinearEpilogue(const RowsParams& params) : p(params) {}

    DEVICE void store(const Accumulators& acc, const RowTile& tile, uint32_t strip) const {
        const int column = tile.column + warp_column(), own = column + lane_index() % 4 * 2;
        const bf16* bias = p.bias + int64_t(tile.expert) * p.bias_stride + own;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i) {
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; ++j) {
                const uint32_t b = HAS_BIAS && own + j * 8 < p.columns ? load_bf16x2(bias + j * 8) : 0;
#pragma unroll
                for (int h = 0; h < 2; ++h) put_pair(strip, h, j, pack_biased(acc[i][j][2 * h], acc[i][j][2 * h + 1], b));
            }
            __syncwarp();
            const int row = tile.row + warp_row() + i * 16;
            store_plane<WARP_COLUMNS / CHUNK>(strip, p.out0_rows + int64_t(row) * p.columns + column, p.columns, tile.row_end - row,
                                              p.columns - column);
            __syncwarp();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear(const __grid_constant__ RowsParams p) {
    run<RowScheduler<BN>, RowLoads<1>, LinearEpilogue>(p);
}
