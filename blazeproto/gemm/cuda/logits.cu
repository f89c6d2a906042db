// A router's logits: rows times one matrix, in fp32 sums, in an order that the widths alone decide.
//
//   logits[t] = x[t] . (W_0 + W_1)^T      x (T, d) bf16, W (parts, E, d) bf16, logits (T, E) fp32
//
// An fp32 weight is the sum of two bf16 parts but for 2^-16 of it. A tile's B stage holds both parts of the same experts, so
// that x is read once. A tensor core cuts the low bits off its running sum at every step, which shows after some hundred terms.
// So a sum is made of segments, of SEGMENT stages each, and these are added up in fp32 registers:
//
//   ring        | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | ...        stages of BK elements of d
//   wgmma       |-- segment 0 --|-- segment 1 --|
//   registers          total  +=  W_0's + W_1's  +=  ...      the other consumer multiplies meanwhile
//
// The order of a token's sums depends on d alone: neither on the number of tokens, nor on the tile's width.
//
// Floor: max(2 parts d E T / 785 TFLOP/s, (2 d T + 2 parts d E + 4 E T) bytes / 4.24 TB/s).
//
// -D: WEIGHT_PARTS   1 or 2
//     SEGMENT        as above
#include "epilogue.cuh"
#include "varlen_m.cuh"

constexpr int COLUMNS = BN / WEIGHT_PARTS;  // experts of a tile
constexpr int TOTALS = COLUMNS / 2;         // of a thread
static_assert(TOTALS <= 64, "sums beside so many accumulators fill a consumer's registers");

// ---- which tiles a CTA computes ------------------------------------------------------------------------------------------
// Tiles of the same rows are neighbours in the list, so that x comes from memory once.
struct LogitsScheduler {
    using Params = RowsParams;
    struct Tile {
        int index, segment;
    };
    static constexpr int SMEM_OFFSET = BARRIER_OFFSET;
    static constexpr bool VARLEN_K = true, SKIPS = false;
    static constexpr int EMPTY_STAGES = 0;

    const RowsParams& p;

    DEVICE explicit LogitsScheduler(const RowsParams& params) : p(params) { __syncthreads(); }

    DEVICE int stages() const { return (p.reduction + BK - 1) / BK; }
    DEVICE int segments() const { return (stages() + SEGMENT - 1) / SEGMENT; }
    DEVICE int tiles() const {
        return tiles_of_this_cta((p.rows + BM - 1) / BM * ((p.columns + COLUMNS - 1) / COLUMNS));
    }

    // What `consume` asks for: segments, one after the other.
    DEVICE int count() const { return tiles() * segments(); }
    DEVICE bool has(int position) const { return position < count(); }
    DEVICE Tile strip_at(int position, int) const { return {position / segments(), position % segments()}; }
    DEVICE int steps(const Tile& tile) const { return min(SEGMENT, stages() - tile.segment * SEGMENT); }
    DEVICE bool is_partial(const Tile& tile) const { return tile.segment + 1 < segments(); }
    DEVICE int partial(const Tile& tile) const { return tile.segment; }

    DEVICE static RowTile at(const RowsParams& p, int index) {
        const int blocks = (p.columns + COLUMNS - 1) / COLUMNS, place = blockIdx.x + index * gridDim.x;
        return {0, place / blocks * BM, p.rows, place % blocks * COLUMNS};
    }
};

// ---- producer ------------------------------------------------------------------------------------------------------------
struct LogitsProducer {
    static constexpr int MN_A = 0, MN_B = 0, WARPS = 1;

    template <class Epilogue>
    DEVICE static void produce(const RowsParams& p, const LogitsScheduler& scheduler) {
        if (threadIdx.x != 0) return;
        Ring ring;
        const int tiles = scheduler.tiles();
        for (int index = 0; index < tiles; ++index) {
            const RowTile tile = LogitsScheduler::at(p, index);
            for (int k = 0; k < p.reduction; k += BK) {
                ring.wait_until_empty();
                load_stage<COLUMNS>(p.a, p.b, ring, tile, k);
                ring.advance();
            }
        }
    }
};

// ---- consumer ------------------------------------------------------------------------------------------------------------
struct LogitsEpilogue : PlainEpilogue<LogitsScheduler> {
    static constexpr int SMEM_BYTES = 0, PARTS = 0;
    const RowsParams& p;
    float total[TOTALS] = {};

    DEVICE explicit LogitsEpilogue(const RowsParams& params) : p(params) {}

    template <int>
    DEVICE void part() {}

    // The end of a segment that is not a tile's last.
    DEVICE void store_partial(const float (&acc)[BN / 2], int) {
#pragma unroll
        for (int i = 0; i < TOTALS; ++i) total[i] += WEIGHT_PARTS == 2 ? acc[i] + acc[TOTALS + i] : acc[i];
    }

    DEVICE void hold(const float (&acc)[BN / 2], const LogitsScheduler::Tile& of, const Ring&) {
        store_partial(acc, of.segment);
        const RowTile tile = LogitsScheduler::at(p, of.index);
        const bool pairs = p.columns % 2 == 0;  // neighbours are stored together where that is aligned
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + consumer_index() * STRIP + strip_row(h);
            if (row >= tile.row_end) continue;
            float* const out = p.reduction_out + int64_t(row) * p.columns;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const int column = tile.column + j * 8 + threadIdx.x % 4 * 2;
                const float2 value = make_float2(total[4 * j + 2 * h], total[4 * j + 2 * h + 1]);
                if (pairs) {
                    if (column < p.columns) *reinterpret_cast<float2*>(out + column) = value;
                } else {
                    if (column < p.columns) out[column] = value.x;
                    if (column + 1 < p.columns) out[column + 1] = value.y;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TOTALS; ++i) total[i] = 0;
    }
};

extern "C" __global__ void __launch_bounds__(PTXAS_THREADS, 1) logits(const __grid_constant__ RowsParams p) {
    run<LogitsScheduler, LogitsProducer, LogitsEpilogue>(p);
}
