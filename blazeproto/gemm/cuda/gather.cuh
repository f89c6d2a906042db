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

// The producer warpgroup copies WARPGROUP / 8 rows of 128 bytes at once: thread t chunk t % 8 of row t / 8.
constexpr int CHUNK = 8;  // bf16 elements in a 16-byte copy
constexpr int ROWS_A_PASS = WARPGROUP * CHUNK / PANEL;

DEVICE int gather_row() { return thread_index() / CHUNK; }
DEVICE int gather_column() { return thread_index() % CHUNK * CHUNK; }
DEVICE uint32_t gather_offset() {  // of this thread's chunk in the first pass; later ones are ROWS_A_PASS rows on
    const int thread = thread_index(), row = thread / CHUNK, chunk = thread % CHUNK;
    return row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4);
}

// The pairs of this thread's rows, or -1 past `row_end`. Only loads, and nothing here waits for them: call it well before
// `tokens_of`.
template <int PASSES>
DEVICE void load_pairs(int (&pair)[PASSES], const PairToToken& map, int row, int row_end) {
    const int first = row + gather_row();
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int r = first + pass * ROWS_A_PASS;
        pair[pass] = r < row_end ? __ldg(map.pair_indices + r) : -1;
    }
}

// Their tokens, and a mask of those that have one; the others point at row 0, which copy_rows then doesn't read.
template <int PASSES>
DEVICE uint32_t tokens_of(int (&token)[PASSES], const PairToToken& map, const int (&pair)[PASSES]) {
    uint32_t valid = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        token[pass] = pair[pass] < 0 ? 0 : map.token(pair[pass]);
        valid |= uint32_t(pair[pass] >= 0) << pass;
    }
    return valid;
}

// PANELS panels of 64 columns from column `left` of a row-major matrix; rows not in `valid` and columns past `width` become
// zeros. Only issues the copies: cp_async_mbarrier_arrive tells the stage's barrier when they have landed.
template <int PANELS, int PASSES>
DEVICE void copy_rows(uint32_t dst, const bf16* matrix, int width, int left, int (&row)[PASSES], uint32_t valid,
                      int panel_bytes) {
    const int column = left + gather_column();
    const bf16* from_column = matrix + column;
    const uint32_t first = dst + gather_offset();
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        asm volatile("" : "+r"(row[pass]));  // else the compiler keeps all the 64-bit products across steps, and spills
        const bf16* src = from_column + int64_t(row[pass]) * width;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const bool inside = (valid >> pass & 1) && column + panel * PANEL < width;
            cp_async_16(first + panel * panel_bytes + pass * ROWS_A_PASS * SWIZZLE_ROW, src + panel * PANEL, inside ? 16 : 0);
        }
    }
}
