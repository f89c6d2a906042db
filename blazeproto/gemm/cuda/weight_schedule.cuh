// The tiles of the weight gradients: which cluster of CTAs computes which part of them, and in what order.
//
// A tile is CLUSTER * BM gathered columns by BN ordered ones of one expert. Its reduction runs over all rows of the expert,
// BK rows a step. There are two schedules:
//
//   data-parallel   Clusters take whole tiles round robin. Clusters that run at the same time find the same expert's rows in L2.
//   stream-K        All tiles are laid in one line, which is cut into work units of equal length, one for each cluster. It pays
//                   where an expert has so many rows that its tiles would take longer than all others'.
//
//   data-parallel   cluster 0 | tile 0 .............................. | 3 |        stream-K   cluster 0 | tile 0 ....... |
//                   cluster 1 | tile 1 .. | 4 |                                               cluster 1 | 0 ....... | 1  |
//                   cluster 2 | 2 | tile 5 |                                                  cluster 2 | 1 .. | 2 | 3 | 4 | 5 |
//
// Which of them takes less time follows from the offsets; every CTA computes the same answer for itself.
//
// To find a tile takes three divisions and loads of the offsets, some 1000 cycles, a quarter of a tile's time where experts have
// few rows. So a warp of the producer finds BATCH tiles at a time, one a lane, and writes them to shared memory, a tile ahead:
// who has seen a stage of a tile may read the slot of the next one. So a tile without steps has a stage too, an empty one.
//
// A work unit that begins or ends within a tile computes a partial tile, which it leaves in fp32. weight_sum.cu adds the
// partial tiles of a tile, in the order of the work units: the same sum every time. They lie in a workspace:
//
//   workspace   | for each work unit, int2: the tile that it continues, the tile that it begins and does not end; -1 for none |
//               | for each work unit, two partial tiles (CONTINUED, BEGUN) of each CTA of its cluster: BM x BN fp32, in the   |
//               | order in which threads have accumulators                                                                    |
#pragma once
#include "gather.cuh"
#include "schedule.cuh"

// Which of a tile's steps a work unit computes. CONTINUED: from a step within the tile on, to the tile's end or to the
// unit's. BEGUN: from the first step, but not to the last. WHOLE: all. The first two number the unit's places in the workspace.
enum Extent { CONTINUED, BEGUN, WHOLE };

struct alignas(16) WeightTile {
    int expert, row, row_end, i, j;
    Extent extent;
    int steps;
};

struct WeightScheduler {
    using Params = WeightParams;
    using Tile = WeightTile;
    static constexpr bool VARLEN_K = true, SKIPS = false;
    static constexpr int EMPTY_STAGES = 1;  // one, so that its slot of the next tile is seen too

    // Costs are in steps, of which there are fewer than 2^31: a GPU would need half a minute for those. A tile's epilogue
    // counts as one step. Stream-K costs more steps, for weight_sum.cu reads the partial tiles; and no two of its clusters
    // share rows in L2.
    static constexpr int EPILOGUE_STEPS = 1, STREAM_K_STEPS = 16;
    static constexpr int LEAST_UNIT = 8;  // steps
    DEVICE static int without_l2(int steps) { return steps + steps / 4; }

    // What this cluster does. In shared memory, because registers are short.
    struct Assignment {
        int i_blocks, blocks;         // of an expert
        int cluster, clusters;        // which of how many this is
        int longest;                  // steps of the cluster that has most in the data-parallel schedule
        int count;                    // of this cluster's tiles, partial ones too
        int first_tile, tile_stride;  // its tiles: the first, and how far the next one is
        int first_step, last_step;    // of the work unit: in the first tile, and before which in the last; 0: at the tile's end
        bool stream_k;
    };
    static constexpr int BATCH = STAGES < 8 ? 8 : 12;
    static_assert(BATCH > STAGES, "a slot is written again only when no warp can still need it");
    static constexpr int SMEM_OFFSET = BARRIER_OFFSET - 64 - 2 * BATCH * int(sizeof(WeightTile));
    static constexpr int SLOTS_OFFSET = SMEM_OFFSET + 64;
    static_assert(sizeof(Assignment) <= 64, "room for it before the slots");

    struct Place {  // a step of a tile
        int tile, step;
    };

    const WeightParams& p;

    // By the whole CTA.
    DEVICE explicit WeightScheduler(const WeightParams& params) : p(params) {
        if (threadIdx.x == 0) {
            Assignment& mine = assignment();
            mine.i_blocks = (p.gathered_width + CLUSTER * BM - 1) / (CLUSTER * BM);
            mine.blocks = mine.i_blocks * ((p.ordered_width + BN - 1) / BN);
            mine.cluster = blockIdx.x / CLUSTER;
            mine.clusters = gridDim.x / CLUSTER;
            mine.longest = 0;
        }
        if (p.units > 0) {
            const int* offsets = p.offsets;
            sum_before_experts(p.experts, [=](int e) { return steps_of(offsets[e + 1] - offsets[e]) + EPILOGUE_STEPS; });
            if (threadIdx.x < assignment().clusters) measure_data_parallel();
            __syncthreads();
        }
        if (threadIdx.x == 0) assign();
        __syncthreads();
        fill_slots(0);
        __syncthreads();
    }

    DEVICE static int count() { return uniform(assignment().count); }
    DEVICE static bool has(int position) { return position < count(); }
    DEVICE static int rank() { return blockIdx.x % CLUSTER; }

    // By the producer, before it loads the tile at `position`: finds the batch that begins with the next.
    DEVICE void look_ahead(int position) const {
        if ((position + 1) % BATCH != 0) return;
        MARK(BEGIN, SCHEDULE);
        if (threadIdx.x < 32) fill_slots(position + 1);
        MARK(END, SCHEDULE);
        if (GATHER) named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);
        else __syncwarp();
    }

    // The `position`-th tile of this cluster, this CTA's part of it.
    DEVICE static WeightTile at(int position) { return slots()[position % (2 * BATCH)]; }

    // The same, this consumer's strip of it.
    DEVICE static WeightTile strip_at(int position, int strip) {
        WeightTile tile = at(position);
        tile.i += strip * STRIP;
        return tile;
    }

    DEVICE static int steps(const WeightTile& tile) { return tile.steps; }
    DEVICE static bool is_partial(const WeightTile& tile) { return tile.extent != WHOLE; }

    DEVICE float4* partial(const WeightTile& tile) const {
        return p.partials + int64_t((assignment().cluster * 2 + tile.extent) * CLUSTER + rank()) * (BM * BN / 4);
    }

   private:
    DEVICE static Assignment& assignment() { return *reinterpret_cast<Assignment*>(shared_memory() + SMEM_OFFSET); }
    DEVICE static WeightTile* slots() { return reinterpret_cast<WeightTile*>(shared_memory() + SLOTS_OFFSET); }

    DEVICE void fill_slots(int position) const {
        const int mine = position + threadIdx.x;
        if (threadIdx.x < BATCH && mine < assignment().count) slots()[mine % (2 * BATCH)] = find(mine);
    }

    DEVICE WeightTile find(int position) const {
        const Assignment& mine = assignment();
        const int tile = mine.first_tile + position * mine.tile_stride, expert = tile / mine.blocks, block = tile % mine.blocks;
        WeightTile found{expert, __ldg(p.offsets + expert), __ldg(p.offsets + expert + 1),
                         (block % mine.i_blocks * CLUSTER + rank()) * BM, block / mine.i_blocks * BN, WHOLE};
        if (mine.stream_k) {
            const int begin = position == 0 ? mine.first_step : 0, end = position + 1 == mine.count ? mine.last_step : 0;
            if (end > 0) found.row_end = found.row + end * BK;
            found.row += begin * BK;
            found.extent = begin > 0 ? CONTINUED : end > 0 ? BEGUN : WHOLE;
        }
        found.steps = steps_of(found.row_end - found.row);
        return found;
    }

    DEVICE static int steps_of(int rows) { return (rows + BK - 1) / BK; }
    DEVICE static int cost(int expert) { return before_expert()[expert + 1] - before_expert()[expert]; }  // of one tile
    DEVICE static int blocks() { return assignment().blocks; }
    DEVICE int tiles() const { return p.experts * blocks(); }

    // What lies at `position` of the line of all tiles, each as long as it costs.
    DEVICE Place place_at(int position) const {
        const int expert = expert_at(position, p.experts, blocks());
        const int rest = position - before_expert()[expert] * blocks();
        const int tile = expert * blocks() + rest / cost(expert), step = rest % cost(expert);
        const bool in_epilogue = step > 0 && step + EPILOGUE_STEPS >= cost(expert);
        return in_epilogue ? Place{tile + 1, 0} : Place{tile, step};
    }

    // Makes `longest`. Thread c adds up the steps of cluster c.
    DEVICE void measure_data_parallel() const {
        int steps = 0;
        for (int tile = threadIdx.x; tile < tiles(); tile += assignment().clusters) steps += cost(tile / blocks());
        atomicMax(&assignment().longest, steps);
    }

    // By one thread.
    DEVICE void assign() const {
        Assignment& mine = assignment();
        mine.first_tile = mine.cluster;
        mine.tile_stride = mine.clusters;
        mine.count = (tiles() - mine.cluster + mine.clusters - 1) / mine.clusters;
        mine.first_step = mine.last_step = 0;
        mine.stream_k = false;
        if (p.units == 0) return;

        const int all = before_expert()[p.experts] * blocks(), units = min(max(all / LEAST_UNIT, 1), p.units);
        mine.stream_k = without_l2(all / units) + STREAM_K_STEPS < mine.longest;
        int2 unfinished{-1, -1};
        if (mine.stream_k && mine.cluster >= units) {
            mine.count = 0;
        } else if (mine.stream_k) {
            const int length = all / units, longer = all % units;  // the first `longer` units have one step more
            const auto cut = [&](int unit) { return place_at(unit * length + min(unit, longer)); };
            const Place from = cut(mine.cluster), to = cut(mine.cluster + 1);
            mine.first_tile = from.tile;
            mine.tile_stride = 1;
            mine.count = to.tile - from.tile + (to.step > 0);
            mine.first_step = from.step;
            mine.last_step = to.step;
            if (from.step > 0) unfinished.x = from.tile;
            if (to.step > 0 && (to.tile > from.tile || from.step == 0)) unfinished.y = to.tile;
        }
        if (mine.cluster < p.units && rank() == 0) p.unfinished[mine.cluster] = unfinished;
    }
};
