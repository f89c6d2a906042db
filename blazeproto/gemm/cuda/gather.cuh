// Gathering: which token each row belongs to, and copying tokens' rows into a stage with cp.async.
#pragma once
#include "mainloop.cuh"
#include "params.cuh"

// In one pass the producer warpgroup copies PASS_ROWS = 16 rows of 128 bytes: thread t copies chunk t % 8 of row t / 8.
// Copying is bound by the instructions of its four warps. So each thread computes the number of one row, which makes 128
// rows in all, and the eight threads that copy the row get its number by a shuffle. Warp w copies rows 4 w ... 4 w + 3 of
// every pass, and so its lanes compute those rows' numbers:
//
//   lane 0 1 2 3   4  5  6  7  ...   28  29  30  31
//   row  0 1 2 3   16 17 18 19 ...  112 113 114 115   of the 128, in warp 0
constexpr int PASS_ROWS = WARPGROUP / CHUNKS_IN_ROW;
constexpr int WARP_ROWS = PASS_ROWS / WARPGROUP_WARPS;  // of a pass, those that one warp copies
constexpr int NUMBERED_ROWS = WARPGROUP;                // rows whose numbers the warpgroup holds
constexpr uint32_t NO_ROW = ~0u;

DEVICE int gather_row() { return thread_index() / CHUNKS_IN_ROW; }
DEVICE int gather_column() { return thread_index() % CHUNKS_IN_ROW * CHUNK; }

// Where in a stage this thread's chunk of the first pass goes. In the next pass it goes PASS_ROWS rows further on.
DEVICE uint32_t gather_offset() {
    const int thread = thread_index();
    return swizzled(0, thread / CHUNKS_IN_ROW, thread % CHUNKS_IN_ROW);
}

// The pair in that one of the NUMBERED_ROWS rows from `row` on whose number this thread computes. For a row at `row_end` or
// later it is the pair in row `instead`, or -1 if `instead` is negative. The value is loaded, not waited for: call this
// well before `row_start`.
DEVICE int load_pair(const PairToToken& map, int row, int row_end, int instead = -1) {
    const int thread = thread_index(), lane = thread % 32;
    const int r = row + lane / WARP_ROWS * PASS_ROWS + thread / 32 * WARP_ROWS + lane % WARP_ROWS;
    if (r >= row_end && instead < 0) return -1;
    return __ldg(map.pair_indices + (r < row_end ? r : instead));
}

// The chunk at which the pair's token begins in a (tokens, width) matrix. Counted in chunks, 32 bits reach 64 GB.
DEVICE uint32_t row_start(const PairToToken& map, int pair, int width) {
    return pair < 0 ? NO_ROW : uint32_t(map.token(pair)) * uint32_t(width / CHUNK);
}

// Addresses of the chunks that this thread copies in PASSES passes from `first` on. own_start: `row_start` of the row whose
// number this thread has computed. chunks: this thread's chunk of the matrix's row 0.
//
// Make one before the wait for a stage: work between that wait and the copies delays the copies, and a shuffle would queue
// behind copies that are under way.
template <int PASSES>
struct RowChunks {
    const uint4* at[PASSES];
    uint32_t present = 0;  // a bit for each pass: whether there is a row

    DEVICE RowChunks(const uint4* chunks, uint32_t own_start, int first) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint32_t start = __shfl_sync(~0u, own_start, (first + pass) * WARP_ROWS + thread_index() % 32 / CHUNKS_IN_ROW);
            at[pass] = chunks + start;
            present |= uint32_t(start != NO_ROW) << pass;
        }
        pin();
    }

    // Goes on to the same chunks of the next panel of columns.
    DEVICE void next_panel() {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) at[pass] += CHUNKS_IN_ROW;
        pin();
    }

    // Has the compiler compute the addresses here, and not where they are used.
    DEVICE void pin() {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) asm volatile("" : "+l"(at[pass]));
    }
};

// Copies PANELS panels of the rows of the first COPIED passes. dst: this thread's chunk in the stage's first row. width_left:
// columns of the matrix from this thread's chunk on; chunks past them become zeros. EVERY_ROW false: rows that are not present
// become zeros too.
// The copies are only issued here; cp_async_mbarrier_arrive tells the stage's barrier when they have landed.
template <int PANELS, bool EVERY_ROW, int COPIED, int PASSES>
DEVICE void copy_rows(uint32_t dst, const RowChunks<PASSES>& rows, int width_left) {
#pragma unroll
    for (int pass = 0; pass < COPIED; ++pass) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_16(dst + panel * PANEL_BYTES + pass * PASS_ROWS * SWIZZLE_ROW, rows.at[pass] + panel * CHUNKS_IN_ROW,
                        (EVERY_ROW || rows.present >> pass & 1) && panel * PANEL < width_left);
    }
}
