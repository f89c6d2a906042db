// Which token a row of the buffers came from, and copying such rows into a stage with cp.async.
#pragma once
#include "mainloop.cuh"

// token = pair / top_k. An integer division is thirty instructions and the producers do one a row: multiply and shift instead,
// exact for pairs below 2^31 (gemm/rows.py: `division`). Where experts per token vary, the token is looked up.
struct PairToToken {
    const int* pair_indices;  // (rows,) the pair in each row
    const int* pair_tokens;   // (pairs,), or null
    uint32_t multiplier, shift;

    DEVICE int token(int pair) const {
        return pair_tokens ? __ldg(pair_tokens + pair) : int(uint64_t(pair) * multiplier >> shift);
    }
};

// The producer warpgroup copies WARPGROUP / 8 rows of 128 bytes at once, a pass: thread t chunk t % 8 of row t / 8. Copying is
// bound by the instructions of its four warps, so a row's number is found by one thread, for 128 rows at once, and shuffled
// to the eight that copy the row; warp w copies, and so finds, rows 4 w ... 4 w + 3 of every pass:
//
//   lane 0 1 2 3   4  5  6  7  ...   28  29  30  31
//   row  0 1 2 3   16 17 18 19 ...  112 113 114 115   of the 128, in warp 0
constexpr int CHUNK = 8;  // bf16 elements in a 16-byte copy
constexpr int ROWS_A_PASS = WARPGROUP * CHUNK / PANEL;
constexpr int ROWS_A_WARP = ROWS_A_PASS / 4;  // of a pass
constexpr int NUMBERED_ROWS = WARPGROUP;      // whose numbers the warpgroup holds
constexpr uint32_t NO_ROW = ~0u;

DEVICE int gather_row() { return thread_index() / CHUNK; }
DEVICE int gather_column() { return thread_index() % CHUNK * CHUNK; }
DEVICE uint32_t gather_offset() {  // of this thread's chunk in the first pass; later ones are ROWS_A_PASS rows on
    const int thread = thread_index(), row = thread / CHUNK, chunk = thread % CHUNK;
    return row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4);
}

// The pair in this thread's one of NUMBERED_ROWS rows; past `row_end` that of row `instead`, or -1. Nothing here waits for the
// load: call it well before `row_start`.
DEVICE int load_pair(const PairToToken& map, int row, int row_end, int instead = -1) {
    const int thread = thread_index(), lane = thread % 32;
    const int r = row + lane / ROWS_A_WARP * ROWS_A_PASS + thread / 32 * ROWS_A_WARP + lane % ROWS_A_WARP;
    if (r >= row_end && instead < 0) return -1;
    return __ldg(map.pair_indices + (r < row_end ? r : instead));
}

// Where the pair's token begins in a (tokens, width) matrix, in chunks: 32 bits reach 64 GB.
DEVICE uint32_t row_start(const PairToToken& map, int pair, int width) {
    return pair < 0 ? NO_ROW : uint32_t(map.token(pair)) * uint32_t(width / CHUNK);
}

// Of the rows that this thread copies in PASSES passes from `first` on, the addresses of its chunks, each from the lane that has the
// row's number; `chunks` is this thread's chunk of row 0. All of it before the wait for a stage: what comes between that and the
// copies makes them late, and a shuffle would queue behind copies.
template <int PASSES>
struct RowChunks {
    const uint4* at[PASSES];
    uint32_t present = 0;  // a bit for each

    DEVICE RowChunks(const uint4* chunks, uint32_t own_start, int first) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint32_t start = __shfl_sync(~0u, own_start, (first + pass) * ROWS_A_WARP + thread_index() % 32 / CHUNK);
            at[pass] = chunks + start;
            present |= uint32_t(start != NO_ROW) << pass;
        }
        pin();
    }

    // The same chunks of the next panel of columns.
    DEVICE void next_panel() {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) at[pass] += PANEL / CHUNK;
        pin();
    }

    // Computed here, not where they are used.
    DEVICE void pin() {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) asm volatile("" : "+l"(at[pass]));
    }
};

// To `dst`, this thread's chunk in a stage's first row: of every row, PANELS panels of 64 columns. Chunks at `width_left` columns or
// more past `at` become zeros, and, where not EVERY_ROW is there, all of a row that isn't. Only issues the copies:
// cp_async_mbarrier_arrive tells the stage's barrier when they have landed.
template <int PANELS, bool EVERY_ROW, int PASSES>
DEVICE void copy_rows(uint32_t dst, const RowChunks<PASSES>& rows, int width_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_16(dst + panel * PANEL_BYTES + pass * ROWS_A_PASS * SWIZZLE_ROW, rows.at[pass] + panel * (PANEL / CHUNK),
                        (EVERY_ROW || rows.present >> pass & 1) && panel * PANEL < width_left);
    }
}
