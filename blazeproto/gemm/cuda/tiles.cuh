// How the rows of all experts are cut into tiles, and which CTA takes which, in what order.
//
// A tile is BM rows of one expert by TILE_COLUMNS columns. CTAs are persistent, one a multiprocessor, and take turns: expert by
// expert; inside one, groups of ROW_GROUP row blocks, columns within a group, rows fastest, so that what is read twice is read
// twice within a short time.
//
// To find a tile takes a search and three divisions, some 700 cycles by estimate, where a short reduction's tile has 4000. So a
// warp of the producer finds BATCH tiles at a time, one a lane, and leaves them in shared memory:
//
//   slots    | tiles 0 .. 15 | tiles 16 .. 31 |       then 32 .. 47 over the first ones: consumers are at most
//                                                           STAGES tiles behind, a finisher one more
#pragma once
#include "gather.cuh"
#include "schedule.cuh"

constexpr int ROW_GROUP = 8;  // row blocks that share their weights in L2 before the next column block
constexpr int TILE_COLUMNS = BN / HALVES;

struct RowsParams {
    TensorMap a;           // (reduction, rows), where rows are contiguous
    TensorMap b;           // the weights
    TensorMap h;           // H, read by the down backward epilogue
    TensorMap out0, out1;  // what the epilogue stores
    const bf16* source;    // (tokens, reduction) to gather from
    PairToToken pairs;
    const int* offsets;  // (experts + 1,)
    bf16 *out0_rows, *out1_rows;
    const bf16* bias;      // of the first expert's first column
    const float* scores;   // (pairs,)
    float* reduction_out;  // per-row partial sums, or an fp32 output
    int rows, experts, reduction, columns;
    int bias_stride;  // elements from one expert's bias to the next's
};

struct alignas(16) Tile {
    int expert;
    int row, row_end;  // first row of the tile; end of the expert's rows
    int column;        // first column, in units of the output (hidden units where HALVES is 2)
};

constexpr int BATCH = 16;
constexpr int SLOTS_OFFSET = BARRIER_OFFSET - 2 * BATCH * int(sizeof(Tile));
static_assert(BATCH > STAGES + 2, "a slot is filled again when nobody can still want it");

struct TileScheduler {
    const RowsParams& p;

    // By the whole CTA.
    DEVICE explicit TileScheduler(const RowsParams& params) : p(params) {
        const int* offsets = p.offsets;
        sum_before_experts(p.experts, [=](int e) { return (offsets[e + 1] - offsets[e] + BM - 1) / BM; });
        if (threadIdx.x == 0) count() = tiles_of_this_cta();
        __syncthreads();
    }

    DEVICE static int& count() { return before_expert()[MAX_EXPERTS + 1]; }  // of this CTA's tiles; consumers lack registers

    DEVICE static Tile* slots() { return reinterpret_cast<Tile*>(shared_memory() + SLOTS_OFFSET); }
    DEVICE int column_blocks() const { return (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

    // By the producer's first warp, when `position` reaches a multiple of BATCH: this CTA's tiles from there on.
    DEVICE void fill_slots(int position) const {
        const int mine = position + threadIdx.x;
        if (threadIdx.x < BATCH && mine < count()) slots()[mine % (2 * BATCH)] = find(mine);
        __syncwarp();
    }

    // The `position`-th tile of this CTA, once its slot is filled.
    DEVICE Tile at(int position) const {
        const int4 tile = *reinterpret_cast<const int4*>(slots() + position % (2 * BATCH));
        return {tile.x, tile.y, tile.z, tile.w};
    }

   private:
    DEVICE int tiles_of_this_cta() const {
        const int tiles = before_expert()[p.experts] * column_blocks();
        return (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    }

    DEVICE Tile find(int position) const {
        const int* blocks = before_expert();  // row blocks
        const int columns = column_blocks(), index = blockIdx.x + position * gridDim.x, block = index / columns;
        const int low = expert_at(block, p.experts);
        const int local = index - blocks[low] * columns;
        const int group = local / (ROW_GROUP * columns);
        const int in_group = local - group * ROW_GROUP * columns;
        const int group_rows = min(ROW_GROUP, blocks[low + 1] - blocks[low] - group * ROW_GROUP);
        const int row_block = group * ROW_GROUP + in_group % group_rows, column_block = in_group / group_rows;
        return {low, p.offsets[low] + row_block * BM, p.offsets[low + 1], column_block * TILE_COLUMNS};
    }
};
