// The weight gradients' part of the mainloop: the list of tiles, and how both operands, MN-major, are copied into a stage.
#pragma once
#include "mainloop.cuh"

struct WeightTile {
    int expert, row, row_end, i, j;  // the expert's rows: the reduction. i, j: first row and column of the gradient
};

// Tiles of an expert are neighbours, so they find its rows in L2. They come in groups of 2 ROW_GROUP blocks of the gradient's rows,
// within a group column by column: tiles that run at the same time read few columns of either operand.
struct WeightScheduler {
    using Params = WeightParams;
    using Tile = WeightTile;
    const WeightParams& p;

    DEVICE explicit WeightScheduler(const WeightParams& params) : p(params) {}

    // Rows and columns of the gradient.
    DEVICE int height() const { return TRANSPOSED ? p.ordered_width : p.gathered_width; }
    DEVICE int width() const { return TRANSPOSED ? p.gathered_width : p.ordered_width; }
    DEVICE int blocks_down() const { return (height() + BM - 1) / BM; }
    DEVICE int blocks() const { return blocks_down() * ((width() + BN - 1) / BN); }
    DEVICE int tiles() const { return p.experts * blocks(); }
    DEVICE static int steps(const WeightTile& tile) { return (tile.row_end - tile.row + BK - 1) / BK; }

    DEVICE WeightTile at(int index) const {
        const int expert = index / blocks(), block = index % blocks();
        const int in_groups = 2 * ROW_GROUP * (blocks() / blocks_down()), group = block / in_groups * 2 * ROW_GROUP;
        const int in_group = block % in_groups, rows = min(2 * ROW_GROUP, blocks_down() - group);
        return {expert, p.offsets[expert], p.offsets[expert + 1], (group + in_group % rows) * BM, in_group / rows * BN};
    }
};

// One operand: WIDTH columns of a matrix's rows. GATHERED: its rows are fetched by index.
template <int WIDTH, bool GATHERED>
struct Columns {
    static constexpr int CHUNKS = WIDTH / CHUNK, ROWS = THREADS / CHUNKS, PASSES = BK / ROWS;
    static_assert(ROWS % 8 == 0, "a chunk's swizzle is the same in every pass");
    int column;  // of this thread's chunk

    // PairToToken::token, without a branch.
    DEVICE static int token(const PairToToken& map, uint32_t pair) {
        return load_s32_or(map.pair_tokens ? map.pair_tokens + pair : nullptr, int(uint64_t(pair) * map.multiplier >> map.shift));
    }

    DEVICE void begin(int first) { column = first + threadIdx.x % CHUNKS * CHUNK; }

    // Copies a stage's rows, from `first` on; rows from `end` on become zeros. pairs: the address of their pairs in shared memory.
    DEVICE void copy(uint32_t stage, const PairToToken& map, uint32_t pairs, const bf16* matrix, int width, int first, int end) const {
        const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const uint32_t place = stage + chunk / CHUNKS_IN_ROW * PANEL_BYTES + swizzled(0, row, chunk % CHUNKS_IN_ROW);
        int from[PASSES];
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) from[pass] = GATHERED ? load_shared_4(pairs + (row + pass * ROWS) * 4) : first + row + pass * ROWS;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int at = row + pass * ROWS;
            if (GATHERED) from[pass] = token(map, from[pass]);
            cp_async_16(place + pass * ROWS * SWIZZLE_ROW, matrix + int64_t(from[pass]) * width + column, column < width && first + at < end);
        }
    }
};

struct WeightLoads {
    static constexpr bool MN_A = true, MN_B = true;
    static constexpr int PAIRS_OFFSET = SCHEDULE_OFFSET, PAIRS_BYTES = BK * 4;
    static_assert(STAGES == 2, "the pairs of a stage land with the stage before it");
    const WeightParams& p;
    Columns<BM, GATHER && !TRANSPOSED> a;
    Columns<BN, GATHER && TRANSPOSED> b;
    int row, row_end;  // from the next stage on
    uint32_t pairs = smem_address(shared_memory()) + PAIRS_OFFSET;  // of the next stage's rows: one of two places

    DEVICE explicit WeightLoads(const WeightParams& params) : p(params) {}

    DEVICE void begin(const WeightTile& tile) {
        row = tile.row;
        row_end = tile.row_end;
        a.begin(tile.i);
        b.begin(tile.j);
        copy_pairs();
    }

    DEVICE bool done() const { return row >= row_end; }

    DEVICE void copy(uint32_t stage) {
        if (TRANSPOSED) {
            a.copy(stage, p.pairs, pairs, p.ordered_rows, p.ordered_width, row, row_end);
            b.copy(stage + A_BYTES, p.pairs, pairs, p.gathered_rows, p.gathered_width, row, row_end);
        } else {
            a.copy(stage, p.pairs, pairs, p.gathered_rows, p.gathered_width, row, row_end);
            b.copy(stage + A_BYTES, p.pairs, pairs, p.ordered_rows, p.ordered_width, row, row_end);
        }
        row += BK;
        pairs ^= PAIRS_BYTES;
        copy_pairs();
    }

   private:
    DEVICE void copy_pairs() const {
        static_assert(PAIRS_OFFSET % (2 * PAIRS_BYTES) == 0, "one bit tells the places apart");
        const int at = row + threadIdx.x;
        if (GATHER && threadIdx.x < BK && !done()) cp_async_4(pairs + threadIdx.x * 4, p.pairs.pair_indices + at, at < row_end);
    }
};
