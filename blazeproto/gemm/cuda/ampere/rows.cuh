// The row products' part of the mainloop: out[r, :] = a[r, :] . W[e] for offsets[e] <= r < offsets[e+1].
//
//   GATHER 0   a is already in expert order          GATHER 1   a[r] is row token(pair_indices[r]) of `source`
//   B_MN 0     weights (E, columns, reduction)       B_MN 1     weights (E, reduction, columns)
//   LOW_RANK   the reduction goes on over `rank` elements more: contiguous low_rows, and low_weights laid out like W
//   STORED     W is a frozen weight, whose stage is decoded: registers between the load and the stage (../stored.cuh)
//
// Rows past the expert's end, and elements past the end of the reduction, become zeros in the stage.
//
// HALVES 2: two blocks of weights, gate and up, belong to the same output columns. A warp has 32 columns of each, so one thread has
// gate and up of the same unit:
//
//   B stage   | gate 0..31 | up 0..31 | gate 32..63 | up 32..63 | ...
//   warp      | w 0                   | w 1                     | ...
#pragma once
#include "mainloop.cuh"
#ifdef STORED
#include "stored.cuh"
#endif

// COLUMNS: of the output, in a tile.
template <int COLUMNS>
struct RowScheduler {
    using Params = RowsParams;
    using Tile = RowTile;
    const RowsParams& p;

    DEVICE explicit RowScheduler(const RowsParams& params) : p(params) {
        const int* offsets = p.offsets;
        sum_before_experts(p.experts, [=](int e) { return (offsets[e + 1] - offsets[e] + BM - 1) / BM; });
    }

    DEVICE int tiles() const { return before_expert()[p.experts] * ((p.columns + COLUMNS - 1) / COLUMNS); }
    DEVICE RowTile at(int index) const { return row_tile_at(p, index, COLUMNS); }
    DEVICE int steps(const RowTile&) const { return (p.reduction + BK - 1) / BK + (LOW_RANK ? (p.rank + BK - 1) / BK : 0); }
};

template <int HALVES>
struct RowLoads {
    static constexpr bool MN_A = false;
    static constexpr bool MN_B = B_MN;
    // In a pass, each thread copies one chunk, and all threads A_ROWS whole rows of 64 elements, or B_ROWS rows of an MN-major B.
    static constexpr int A_ROWS = THREADS / CHUNKS_IN_ROW, A_PASSES = BM / A_ROWS;
    static constexpr int B_CHUNKS = B_MN ? BN / CHUNK : CHUNKS_IN_ROW, B_ROWS = THREADS / B_CHUNKS, B_PASSES = (B_MN ? BK : BN) / B_ROWS;
    static_assert(HALVES == 1 || 32 % A_ROWS == 0, "a pass has rows of one half");

    const RowsParams& p;
    RowTile tile;                 // after `begin`, only LOW_RANK and STORED read it
    uint32_t rows[A_PASSES];      // where the rows begin, in chunks; GATHER: before the first stage, their pairs
    const uint8_t *a, *b;         // this thread's chunk of the next stage, in row 0 of `a` and in the first pass of B
    int left;                     // elements of the reduction, from the next stage on
    int rows_left, columns_left;  // of the tile, from this thread's first row of A and column of B on
    bool begun, in_low;           // whether the tile's first stage is copied; whether the low rank's part is reached
#ifdef STORED
    static constexpr int RUN_ROWS = THREADS * RUN / PANEL;  // swizzled rows that all threads decode at a time
    static_assert(BN == 2 * RUN_ROWS, "a thread has two runs of a stage");
    Packed packed;         // one of them
    bool pending = false;  // whether it is the second of a stage
#endif

    DEVICE explicit RowLoads(const RowsParams& params) : p(params) {}

    DEVICE static int a_row() { return threadIdx.x / CHUNKS_IN_ROW; }
    DEVICE static int chunk() { return threadIdx.x % CHUNKS_IN_ROW; }
    DEVICE static int b_row() { return threadIdx.x / B_CHUNKS; }

    // The half and the output column, within the tile, of row `at` of a K-major stage of B, or of column `at` of an MN-major one.
    DEVICE static constexpr int half_of(int at) { return HALVES == 2 ? at / 32 % 2 : 0; }
    DEVICE static constexpr int column_of(int at) { return HALVES == 2 ? at / 64 * 32 + at % 32 : at; }

    // Loads the rows' pairs, one stage before `copy` needs them.
    DEVICE void begin(const RowTile& of) {
        tile = of;
        begun = in_low = false;
        rows_left = tile.row_end - tile.row - a_row();
        columns_left = p.columns - tile.column - (B_MN ? column_of(threadIdx.x % B_CHUNKS * CHUNK) : b_row());
        if constexpr (GATHER) {
#pragma unroll
            for (int pass = 0; pass < A_PASSES; ++pass)
                rows[pass] = holds(pass) ? __ldg(p.pairs.pair_indices + tile.row + a_row() + pass * A_ROWS) : 0;
            start(p.source, p.reduction);
        } else {
            start_in_order(p.a, p.reduction);
        }
    }

#ifdef STORED
    // Loads the first run of the stage that `copy` makes next.
    DEVICE void load() {
        if (left > 0 && !(LOW_RANK && in_low)) load_run(0);  // else the low rank's part follows, in bf16
    }

    // Decodes the second run of the stage that `copy` made last.
    DEVICE void finish(uint32_t stage) {
        if (pending) decode_run(stage + A_BYTES, 1);
        pending = false;
    }
#endif

    DEVICE bool done() const { return begun && left <= 0 && (!LOW_RANK || in_low); }

    DEVICE void copy(uint32_t stage) {
        next_part();
        copy_a(stage);
#ifdef STORED
        if (!LOW_RANK || !in_low) {
            decode_run(stage + A_BYTES, 0);
            load_run(1);
            pending = true;
        } else
#endif
            copy_b(stage + A_BYTES);
        a += BK * OPERAND_BYTES;
        b += B_MN ? BK * weights().strides[0] : BK * OPERAND_BYTES;
        left -= BK;
    }

   private:
#ifdef STORED
    // A swizzled row of the stage, K-major or MN-major, is two runs.
    DEVICE static int run_row(int i) { return threadIdx.x / 2 + i * RUN_ROWS; }

    DEVICE void load_run(int i) {
        const int at = run_row(i), first = threadIdx.x % 2 * RUN;
        const int column = tile.column + (B_MN ? at / BK * PANEL + first : column_of(at));
        const int reduced = p.reduction - left + (B_MN ? at % BK : first), of_weight = int(p.first_column) + half_of(at) * p.columns + column;
        packed.load(p, Expert(p, tile.expert), B_MN ? reduced : of_weight, B_MN ? of_weight : reduced, column < p.columns && reduced < p.reduction);
    }

    DEVICE void decode_run(uint32_t stage, int i) const { packed.store(stage, run_row(i), threadIdx.x % 2 * (RUN / CHUNK), run_row(i)); }
#endif

    // Prepares the addresses of a tile's first stage, and of the low rank's first stage.
    DEVICE void next_part() {
        if (GATHER && !begun) {
#pragma unroll
            for (int pass = 0; pass < A_PASSES; ++pass) rows[pass] = uint32_t(p.pairs.token(rows[pass])) * uint32_t(p.reduction / CHUNK);
        }
        if (LOW_RANK && begun && !in_low && left <= 0) {
            in_low = true;
            start_in_order(p.low_rows, p.rank);
        }
        begun = true;
    }

    DEVICE void copy_a(uint32_t stage) const {
        const uint32_t place = stage + swizzled(0, a_row(), chunk());
        const bool wanted = chunk() * CHUNK < left;
#pragma unroll
        for (int pass = 0; pass < A_PASSES; ++pass)
            cp_async_16(place + pass * A_ROWS * SWIZZLE_ROW, a + uint64_t(rows[pass]) * CHUNK_BYTES, wanted && holds(pass));
    }

    DEVICE void copy_b(uint32_t stage) const {
        const int64_t stride = weights().strides[0], half = weights().strides[1];
        if constexpr (B_MN) {
            const int at = threadIdx.x % B_CHUNKS;
            const uint32_t place = stage + at / CHUNKS_IN_ROW * PANEL_BYTES + swizzled(0, b_row(), at % CHUNKS_IN_ROW);
            const bool wanted = columns_left > 0;
#pragma unroll
            for (int pass = 0; pass < B_PASSES; ++pass)
                cp_async_16(place + pass * B_ROWS * SWIZZLE_ROW, b + pass * B_ROWS * stride, wanted && b_row() + pass * B_ROWS < left);
        } else {
            const uint32_t place = stage + swizzled(0, b_row(), chunk());
            const int columns = chunk() * CHUNK < left ? columns_left : 0;
#pragma unroll
            for (int pass = 0; pass < B_PASSES; ++pass) {
                const int at = pass * B_ROWS;
                cp_async_16(place + at * SWIZZLE_ROW, b + half_of(at) * half + column_of(at) * stride, column_of(at) < columns);
            }
        }
    }

    DEVICE const Matrix& weights() const { return matrix(LOW_RANK && in_low ? p.low_weights : p.b); }  // strides: row; half, if any; expert

    DEVICE bool holds(int pass) const { return pass * A_ROWS < rows_left; }

    DEVICE void start(const void* source, int width) {
        const Matrix& w = weights();
        left = width;
        a = static_cast<const uint8_t*>(source) + chunk() * CHUNK_BYTES;
        const int64_t expert = tile.expert * w.strides[B_MN && HALVES == 1 ? 1 : 2];
        if constexpr (B_MN) {
            const int at = threadIdx.x % B_CHUNKS * CHUNK;
            b = w.start + expert + half_of(at) * w.strides[1] + b_row() * w.strides[0] + (tile.column + column_of(at)) * OPERAND_BYTES;
        } else {
            b = w.start + expert + (tile.column + b_row()) * w.strides[0] + chunk() * CHUNK_BYTES;
        }
    }

    DEVICE void start_in_order(const TensorMap& place, int width) {
        const Matrix& m = matrix(place);
#pragma unroll
        for (int pass = 0; pass < A_PASSES; ++pass) rows[pass] = (a_row() + pass * A_ROWS) * (width / CHUNK);
        start(m.start + tile.row * m.strides[0], width);
    }
};
