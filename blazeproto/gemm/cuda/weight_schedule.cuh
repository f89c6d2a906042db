// Which cluster of CTAs makes which part of the weight gradients, and in what order.
//
// A tile is CLUSTER * BM gathered columns by BN ordered ones of one expert; its reduction runs over all of the expert's rows, BK a
// step. Clusters take whole tiles by turns, so that those at work at a time share an expert's rows in L2. Where an expert has so many
// rows that its tiles would outlast all others', the tiles are laid in one line instead, which is cut into equal shares:
//
//   by turns   cluster 0 | tile 0 .............................. | 3 |        in shares   cluster 0 | tile 0 ....... |
//              cluster 1 | tile 1 .. | 4 |                                                cluster 1 | 0 ....... | 1  |
//              cluster 2 | 2 | tile 5 |                                                   cluster 2 | 1 .. | 2 | 3 | |
//
// Which takes less the offsets tell, and every CTA works it out for itself.
//
// A tile in pieces is summed by weight_sum.cu, in the order of the pieces: the same sum every time. A piece is left in fp32:
//
//   workspace   | int2 for each share: the tile that it goes on with, the tile that it leaves unfinished; -1 none |
//               | for each share, two pieces (CONTINUED, BEGUN) of each CTA of its cluster, BM x BN, as accumulators lie in threads |
#pragma once
#include "gather.cuh"
#include "schedule.cuh"

struct WeightParams {
    TensorMap ordered;   // (width, rows)
    TensorMap in_order;  // (d, rows); GATHER 0
    TensorMap out;       // bf16 output: (n, d, E) or (d, 2n, E)
    const bf16* gathered_rows;  // (tokens, d), or, GATHER 0, (rows, d)
    const bf16* ordered_rows;   // (rows, width)
    PairToToken pairs;
    const int* offsets;
    float* out_f32;
    int2* unfinished;  // (shares,)
    float4* pieces;
    int experts, gathered_width, ordered_width, accumulate;
    int shares;  // at most; 0: every tile is made whole
};

// What a piece of a tile is. The first two number a share's places in the workspace.
enum Piece { CONTINUED, BEGUN, WHOLE };

struct WeightTile {
    int expert, row, row_end, i, j;
    Piece piece;
};

DEVICE int steps_of(int rows) { return (rows + BK - 1) / BK; }

struct WeightScheduler {
    // Costs are in steps, of which there are fewer than 2^31: a GPU would need half a minute. A tile's epilogue counts as one; sharing
    // makes two more, of pieces, that weight_sum must read. Where all is shared, no two clusters find their rows in L2.
    static constexpr int EPILOGUE = 1, SHARING = 16;
    static constexpr int LEAST_SHARE = 8;
    DEVICE static int without_l2(int steps) { return steps + steps / 4; }

    // What this cluster does. In shared memory, for registers are short.
    struct Assignment {
        int i_blocks, blocks;         // of an expert
        int cluster, clusters;        // which of how many this is
        int longest;                  // what turns take, of the cluster that they take longest
        int count;                    // of its tiles and pieces
        int first_tile, tile_stride;  // its tiles; the next one is so many on
        int first_step, last_step;    // a share begins within its first tile, and ends within its last; 0: at the tile's end
        bool shared;
    };
    static constexpr int OFFSET = BARRIER_OFFSET - 64;
    static_assert(sizeof(Assignment) <= BARRIER_OFFSET - OFFSET, "room for it before the barriers");

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
        if (p.shares > 0) {
            const int* offsets = p.offsets;
            sum_before_experts(p.experts, [=](int e) { return steps_of(offsets[e + 1] - offsets[e]) + EPILOGUE; });
            if (threadIdx.x < assignment().clusters) take_turns();
            __syncthreads();
        }
        if (threadIdx.x == 0) assign();
        __syncthreads();
    }

    DEVICE static Assignment& assignment() { return *reinterpret_cast<Assignment*>(shared_memory() + OFFSET); }
    DEVICE static int count() { return uniform(assignment().count); }
    DEVICE static int rank() { return blockIdx.x % CLUSTER; }

    // The `position`-th tile or piece of this cluster's work, this CTA's part of it.
    DEVICE WeightTile at(int position) const {
        const Assignment& mine = assignment();
        const int tile = uniform(mine.first_tile + position * mine.tile_stride), blocks = uniform(mine.blocks);
        const int expert = tile / blocks, block = tile % blocks, i_blocks = uniform(mine.i_blocks);
        WeightTile found{expert, __ldg(p.offsets + expert), __ldg(p.offsets + expert + 1),
                         (block % i_blocks * CLUSTER + rank()) * BM, block / i_blocks * BN, WHOLE};
        if (uniform(mine.shared)) {
            const int begin = uniform(position == 0 ? mine.first_step : 0);
            const int end = uniform(position + 1 == mine.count ? mine.last_step : 0);
            if (end > 0) found.row_end = found.row + end * BK;
            found.row += begin * BK;
            found.piece = begin > 0 ? CONTINUED : end > 0 ? BEGUN : WHOLE;
        }
        return found;
    }

    DEVICE float4* piece(Piece which) const {
        return p.pieces + int64_t((assignment().cluster * 2 + which) * CLUSTER + rank()) * (BM * BN / 4);
    }

   private:
    DEVICE static int cost(int expert) { return before_expert()[expert + 1] - before_expert()[expert]; }  // of one tile
    DEVICE static int blocks() { return assignment().blocks; }
    DEVICE int tiles() const { return p.experts * blocks(); }

    // In the line of all tiles, each as long as it costs.
    DEVICE Place place_at(int position) const {
        const int expert = expert_at(position, p.experts, blocks());
        const int rest = position - before_expert()[expert] * blocks();
        const int tile = expert * blocks() + rest / cost(expert), step = rest % cost(expert);
        const bool in_epilogue = step > 0 && step + EPILOGUE >= cost(expert);
        return in_epilogue ? Place{tile + 1, 0} : Place{tile, step};
    }

    // What turns take; thread c, for cluster c.
    DEVICE void take_turns() const {
        int taken = 0;
        for (int tile = threadIdx.x; tile < tiles(); tile += assignment().clusters) taken += cost(tile / blocks());
        atomicMax(&assignment().longest, taken);
    }

    // By one thread.
    DEVICE void assign() const {
        Assignment& mine = assignment();
        mine.first_tile = mine.cluster;
        mine.tile_stride = mine.clusters;
        mine.count = (tiles() - mine.cluster + mine.clusters - 1) / mine.clusters;
        mine.first_step = mine.last_step = 0;
        mine.shared = false;
        if (p.shares == 0) return;

        const int all = before_expert()[p.experts] * blocks(), shares = min(max(all / LEAST_SHARE, 1), p.shares);
        mine.shared = without_l2(all / shares) + SHARING < mine.longest;
        int2 unfinished{-1, -1};
        if (mine.shared && mine.cluster >= shares) {
            mine.count = 0;
        } else if (mine.shared) {
            const int share = all / shares, longer = all % shares;
            const auto cut = [&](int before) { return place_at(before * share + min(before, longer)); };
            const Place from = cut(mine.cluster), to = cut(mine.cluster + 1);
            mine.first_tile = from.tile;
            mine.tile_stride = 1;
            mine.count = to.tile - from.tile + (to.step > 0);
            mine.first_step = from.step;
            mine.last_step = to.step;
            if (from.step > 0) unfinished.x = from.tile;
            if (to.step > 0 && (to.tile > from.tile || from.step == 0)) unfinished.y = to.tile;
        }
        if (mine.cluster < p.shares && rank() == 0) p.unfinished[mine.cluster] = unfinished;
    }
};
