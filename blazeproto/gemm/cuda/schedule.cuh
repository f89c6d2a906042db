// What every scheduler begins with: how much there is to do before each expert.
#pragma once
#include "mainloop.cuh"

// (experts + 1,): the sum of `count` over the experts before this one.
DEVICE int* before_expert() { return reinterpret_cast<int*>(shared_memory() + SCHEDULE_OFFSET); }

// By the whole CTA. `count(e)` of an expert.
template <class Count>
DEVICE void sum_before_experts(int experts, Count count) {
    int* before = before_expert();
    for (int e = threadIdx.x; e < experts; e += THREADS) before[e] = count(e);
    __syncthreads();
    if (threadIdx.x < 32) {  // exclusive scan by one warp, a run of experts a lane
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

// The last expert with `each` times what is before it at or below `position`. Experts of whom there is nothing share that with the
// next one: the one that owns it is found.
DEVICE int expert_at(int position, int experts, int each = 1) {
    const int* before = before_expert();
    int low = 0, high = experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (before[middle] * each <= position ? low : high) = middle;
    }
    return low;
}
