// The schedulers' first step: how much work precedes each expert's. Include it after a mainloop.cuh, which defines THREADS and
// SCHEDULE_OFFSET, its place in shared memory.
#pragma once
#include "params.cuh"

// (experts + 1,): the sum of `count` over the experts before this one.
DEVICE int* before_expert() { return reinterpret_cast<int*>(shared_memory() + SCHEDULE_OFFSET); }

#ifdef SENDS
DEVICE Awaited& rows_awaited() { return *reinterpret_cast<Awaited*>(before_expert() + MAX_EXPERTS + 2); }
#endif

// By the whole CTA. `count(e)`: the work of expert e.
template <class Count>
DEVICE void sum_before_experts(int experts, Count count) {
    int* before = before_expert();
    for (int e = threadIdx.x; e < experts; e += THREADS) before[e] = count(e);
    __syncthreads();
    if (threadIdx.x < 32) {  // exclusive scan by one warp; a lane has a run of consecutive experts
        const int run = (experts + 31) / 32, begin = threadIdx.x * run, end = min(begin + run, experts);
        int sum = 0;
        for (int e = begin; e < end; ++e) sum += before[e];
        int running = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, running, step);
            if (threadIdx.x >= step) running += other;
        }
        running -= sum;
        for (int e = begin; e < end; ++e) {
            const int own = before[e];
            before[e] = running;
            running += own;
        }
        if (threadIdx.x == 31) before[experts] = running;
    }
    __syncthreads();
}

// The expert at `position` of the line of all work, each unit of which is `each` long: the last one whose work begins there or
// before. Experts without work begin where the next expert does; being the last, the one that has work is found.
DEVICE int expert_at(int position, int experts, int each = 1) {
    const int* before = before_expert();
    int low = 0, high = experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (before[middle] * each <= position ? low : high) = middle;
    }
    return low;
}

constexpr int ROW_GROUP = 8;  // row blocks that use the same weights before the next column block comes

// A tile of the row products: the one at `index` of the list that tiles.cuh describes. `before_expert` counts row blocks.
// tile_columns: columns of a tile.
DEVICE RowTile row_tile_at(const RowsParams& p, int index, int tile_columns) {
    const int* blocks = before_expert();
    const int columns = (p.columns + tile_columns - 1) / tile_columns, block = index / columns;
    const int expert = expert_at(block, p.experts);
    const int local = index - blocks[expert] * columns;
    const int group = local / (ROW_GROUP * columns);
    const int in_group = local - group * ROW_GROUP * columns;
    const int group_rows = min(ROW_GROUP, blocks[expert + 1] - blocks[expert] - group * ROW_GROUP);
    const int row_block = group * ROW_GROUP + in_group % group_rows, column_block = in_group / group_rows;
    return {expert, p.offsets[expert] + row_block * BM, p.offsets[expert + 1], column_block * tile_columns};
}
