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
    const bf16* bias;      // (experts, HALVES * columns)
    const float* scores;   // (pairs,)
    float* reduction_out;  // per-row partial sums, or an fp32 output
    int rows, experts, reduction, columns;
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
        count_blocks();
        if (threadIdx.x == 0) count() = tiles_of_this_cta();
        __syncthreads();
    }

    DEVICE static int& count() { return first_block()[MAX_EXPERTS + 1]; }  // of this CTA's tiles; consumers lack registers

    // (experts + 1,): row blocks of all experts before this one.
    DEVICE static int* first_block() { return reinterpret_cast<int*>(shared_memory() + SCHEDULE_OFFSET); }
    DEVICE static Tile* slots() { return reinterpret_cast<Tile*>(shared_memory() + SLOTS_OFFSET); }
    DEVICE int column_blocks() const { return (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

    DEVICE void count_blocks() const {
        int* blocks = first_block();
        const int experts = p.experts;
        for (int e = threadIdx.x; e < experts; e += THREADS) blocks[e] = (p.offsets[e + 1] - p.offsets[e] + BM - 1) / BM;
        __syncthreads();
        if (threadIdx.x < 32) {  // exclusive scan by one warp, a run of experts a lane
            const int run = (experts + 31) / 32, begin = threadIdx.x * run, end = min(begin + run, experts);
            int sum = 0;
            for (int e = begin; e < end; ++e) sum += blocks[e];
            int before = sum;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, before, step);
                if (threadIdx.x >= step) before += other;
            }
            before -= sum;
            for (int e = begin; e < end; ++e) {
                const int own = blocks[e];
                blocks[e] = before;
                before += own;
            }
            if (threadIdx.x == 31) blocks[experts] = before;
        }
        __syncthreads();
    }

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
        const int tiles = first_block()[p.experts] * column_blocks();
        return (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    }

    DEVICE Tile find(int position) const {
        const int* blocks = first_block();
        const int columns = column_blocks(), index = blockIdx.x + position * gridDim.x, block = index / columns;
        int low = 0, high = p.experts;  // the last expert whose first block is at or before `block`
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (blocks[middle] <= block ? low : high) = middle;
        }
        // Experts without rows share their first block with the next one: `low` is the one that owns it.
        const int local = index - blocks[low] * columns;
        const int group = local / (ROW_GROUP * columns);
        const int in_group = local - group * ROW_GROUP * columns;
        const int group_rows = min(ROW_GROUP, blocks[low + 1] - blocks[low] - group * ROW_GROUP);
        const int row_block = group * ROW_GROUP + in_group % group_rows, column_block = in_group / group_rows;
        return {low, p.offsets[low] + row_block * BM, p.offsets[low + 1], column_block * TILE_COLUMNS};
    }
};
