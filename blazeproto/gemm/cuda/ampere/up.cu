// Up projection, forward, as ../up.cu.
//
//   H[r]   = x[token(r)] . W_up[e]^T (+ bias)      x (T, d) gathered, W_up (E, 2n, d) or (E, n, d), H (R, 2n) or (R, n)
//   act[r] = f(gate) * g(up), or f(H[r])           act (R, n), from H as rounded to bf16: backward recomputes the same act
//
//   accumulators --bias, bf16--> a plane of H   --16 bytes a lane--> global, 16 rows at a time
//                        \--f(gate) g(up)--> a plane of act   --16 bytes a lane--> global
//
// A thread has gate and up of the same units: at the same place of two blocks if they are halves of H (rows.cuh), side by side if
// they alternate (../layout.cuh).
#include "layout.cuh"
#include "rows.cuh"

constexpr int HALVES = GATED && !ALTERNATING ? 2 : 1;
constexpr int COLUMNS = BN / HALVES;           // of a half, in a tile; p.columns: of a half, in all
constexpr int WARP_UNITS = WARP_COLUMNS / (GATED ? 2 : 1);
constexpr int BLOCKS = WARP_COLUMNS / 8 / HALVES;  // of 8 columns, in a warp's part of a half
static_assert(STRIP_BYTES >= 2 * STRIP_PLANE, "H and act of 16 rows");

struct UpEpilogue {
    static constexpr int SEGMENT_STAGES = 0;
    const RowsParams& p;

    DEVICE explicit UpEpilogue(const RowsParams& params) : p(params) {}

    DEVICE void store(const Accumulators& acc, const RowTile& tile, uint32_t strip) const {
        const int column = tile.column + warp_column() / HALVES;
        const bf16* bias = p.bias + int64_t(tile.expert) * p.bias_stride + column + lane_index() % 4 * 2;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j) {
                    uint32_t pairs[HALVES];
#pragma unroll
                    for (int half = 0; half < HALVES; ++half) {
                        const float* both = acc[i][half * BLOCKS + j] + 2 * h;
                        const uint32_t b = HAS_BIAS && column + j * 8 < p.columns ? load_bf16x2(bias + half * p.columns + j * 8) : 0;
                        pairs[half] = pack_biased(both[0], both[1], b);
                        put_pair(strip, h, half * BLOCKS + j, pairs[half]);
                    }
                    put_act(strip + STRIP_PLANE, h, j, pairs[0], pairs[HALVES - 1]);
                    if (!GATED) __syncwarp();  // keeps the compiler from computing more units at a time than fit into registers
                }
            __syncwarp();
            const int row = tile.row + warp_row() + i * 16;
            store_rows(strip, row, tile.row_end - row, column);
            __syncwarp();
        }
    }

   private:
    DEVICE static void put_act(uint32_t plane, int h, int j, uint32_t first, uint32_t second) {
        if constexpr (ALTERNATING) {  // a lane has one unit: every second lane writes its own and its neighbour's
            const int lane = lane_index();
            const float act = act_of(bf16_low(first), bf16_high(first)), next = __shfl_down_sync(~0u, act, 1);
            if (lane % 2 == 0) store_shared_4(swizzled(plane, h * 8 + lane / 4, j / 2) + j % 2 * 8 + lane % 4 * 2, pack_bf16(act, next));
        } else {
            put_pair(plane, h, j, activate(first, second));
        }
    }

    // 16 rows of H and of act.
    DEVICE void store_rows(uint32_t strip, int row, int rows, int column) const {
        constexpr int CHUNKS = WARP_COLUMNS / HALVES / CHUNK;
        const int64_t width = int64_t(HALVES) * p.columns, units = ALTERNATING ? p.columns / 2 : p.columns;
        const int unit = ALTERNATING ? column / 2 : column;
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            store_plane<CHUNKS>(strip, p.out0_rows + row * width + half * p.columns + column, width, rows, p.columns - column, half * CHUNKS);
        store_plane<WARP_UNITS / CHUNK>(strip + STRIP_PLANE, p.out1_rows + row * units + unit, units, rows, units - unit);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) up_forward(const __grid_constant__ RowsParams p) {
    run<RowScheduler<COLUMNS>, RowLoads<HALVES>, UpEpilogue>(p);
}
