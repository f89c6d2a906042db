// A router's logits, as ../logits.cu: rows times one matrix, in fp32 sums, in an order that d alone decides.
//
//   logits[t] = x[t] . (W_0 + W_1)^T      x (T, d) bf16, W (parts, E, d) bf16, logits (T, E) fp32
//
// A tensor core truncates its running sum at every step. A sum is therefore cut into segments of SEGMENT stages, and fp32 registers
// add the segments up. To leave room for them, a warp multiplies 32 rows instead of 64. Both parts of a weight lie in a stage as gate
// and up do (rows.cuh), so a thread has both products of an expert.
#include "rows.cuh"

constexpr int COLUMNS = BN / WEIGHT_PARTS, BLOCKS = WARP_COLUMNS / 8 / WEIGHT_PARTS;

// Tiles of the same rows are neighbours, so that x comes from memory once.
struct LogitsScheduler {
    using Params = RowsParams;
    using Tile = RowTile;
    const RowsParams& p;

    DEVICE explicit LogitsScheduler(const RowsParams& params) : p(params) {}

    DEVICE int column_blocks() const { return (p.columns + COLUMNS - 1) / COLUMNS; }
    DEVICE int tiles() const { return (p.rows + BM - 1) / BM * column_blocks(); }
    DEVICE RowTile at(int index) const { return {0, index / column_blocks() * BM, p.rows, index % column_blocks() * COLUMNS}; }
    DEVICE int steps(const RowTile&) const { return (p.reduction + BK - 1) / BK; }
};

struct LogitsEpilogue {
    static constexpr int SEGMENT_STAGES = SEGMENT;
    const RowsParams& p;
    float total[WARP_ROWS / 16][BLOCKS][4] = {};

    DEVICE explicit LogitsEpilogue(const RowsParams& params) : p(params) {}

    // The end of a segment.
    DEVICE void add_segment(Accumulators& acc) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    total[i][j][x] += WEIGHT_PARTS == 2 ? acc[i][j][x] + acc[i][j + BLOCKS * (WEIGHT_PARTS - 1)][x] : acc[i][j][x];
                    acc[i][j][x] = acc[i][j + BLOCKS * (WEIGHT_PARTS - 1)][x] = 0;
                }
    }

    DEVICE void store(Accumulators& acc, const RowTile& tile, uint32_t) {
        add_segment(acc);
        const int lane = lane_index(), first = tile.column + warp_column() / WEIGHT_PARTS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = tile.row + warp_row() + i * 16 + h * 8 + lane / 4;
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j) {
                    const int column = first + j * 8;
                    float* const out = p.reduction_out + int64_t(row) * p.columns + column;
                    if (row < tile.row_end && column < p.columns) out[0] = total[i][j][2 * h];
                    if (row < tile.row_end && column + 1 < p.columns) out[1] = total[i][j][2 * h + 1];
                    total[i][j][2 * h] = total[i][j][2 * h + 1] = 0;
                }
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) logits(const __grid_constant__ RowsParams p) {
    run<LogitsScheduler, RowLoads<WEIGHT_PARTS>, LogitsEpilogue>(p);
}
