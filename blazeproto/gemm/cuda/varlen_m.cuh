// Rows of every expert times that expert's weights: out[r, :] = a[r, :] . W[e] for offsets[e] <= r < offsets[e+1].
//
//   GATHER 0   a is already in expert order: TMA boxes of BM rows
//   GATHER 1   a[r] is row token(pair_indices[r]) of `source`: the producer's threads copy 16-byte chunks (cp.async, gather.cuh)
//
//   B_MN 0     weights (E, columns, reduction): B tiles K-major       B_MN 1   weights (E, reduction, columns): MN-major
//   HALVES 2   the tile's columns are two blocks of BN/2: gate rows and the up rows of the same hidden units
//
// Persistent CTAs, one a multiprocessor, walk the tiles of all experts; the host never learns a token count. In order below: the
// scheduler that cuts experts into tiles, the producer that fills the ring with a tile's stages, and the body of the kernel.
#pragma once
#include "epilogue.cuh"
#include "gather.cuh"

constexpr int ROW_GROUP = 8;  // row blocks that share their weights in L2 before the next column block
constexpr int B_BOXES = B_MN ? BN / PANEL : (CLUSTER > HALVES ? CLUSTER : HALVES);
constexpr int B_BOX_BYTES = B_BYTES / B_BOXES;
static_assert(B_BOXES % CLUSTER == 0, "every CTA of a cluster loads the same number of weight boxes");
constexpr int TILE_COLUMNS = BN / HALVES;  // hidden units or output columns a tile covers

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

struct Tile {
    int expert;
    int row, row_end;  // first row of this CTA's tile; end of the expert's rows
    int column;        // first column, in units of the output (hidden units where HALVES is 2)
};

// Tiles in launch order: expert by expert; inside one, groups of ROW_GROUP row blocks, columns within a group, rows fastest.
struct TileScheduler {
    const RowsParams& p;
    int tiles;

    DEVICE explicit TileScheduler(const RowsParams& params) : p(params) {}

    // (experts + 1,): row blocks, of CLUSTER * BM rows, of all experts before this one.
    DEVICE static int* first_block() { return reinterpret_cast<int*>(shared_memory() + SCHEDULE_OFFSET); }
    DEVICE int column_blocks() const { return (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

    // By the whole CTA, before `at`.
    DEVICE void build() {
        int* first = first_block();
        const int experts = p.experts;
        for (int e = threadIdx.x; e < experts; e += THREADS)
            first[e] = (p.offsets[e + 1] - p.offsets[e] + CLUSTER * BM - 1) / (CLUSTER * BM);
        __syncthreads();
        if (threadIdx.x < 32) {  // exclusive scan by one warp, a run of experts a lane
            const int run = (experts + 31) / 32, begin = threadIdx.x * run, end = min(begin + run, experts);
            int sum = 0;
            for (int e = begin; e < end; ++e) sum += first[e];
            int before = sum;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, before, step);
                if (threadIdx.x >= step) before += other;
            }
            before -= sum;
            for (int e = begin; e < end; ++e) {
                const int blocks = first[e];
                first[e] = before;
                before += blocks;
            }
            if (threadIdx.x == 31) first[experts] = before;
        }
        __syncthreads();
        tiles = first[experts] * column_blocks();
    }

    DEVICE Tile at(int index, int rank) const {
        const int* first = first_block();
        const int columns = column_blocks(), block = index / columns;
        int low = 0, high = p.experts;  // the last expert whose first block is at or before `block`
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (first[middle] <= block ? low : high) = middle;
        }
        // Experts without rows share their first block with the next one: `low` is the one that owns it.
        const int blocks = first[low + 1] - first[low];
        const int local = index - first[low] * columns;
        const int group = local / (ROW_GROUP * columns);
        const int in_group = local - group * ROW_GROUP * columns;
        const int group_rows = min(ROW_GROUP, blocks - group * ROW_GROUP);
        const int row_block = group * ROW_GROUP + in_group % group_rows;
        return {low, p.offsets[low] + (row_block * CLUSTER + rank) * BM, p.offsets[low + 1],
                in_group / group_rows * TILE_COLUMNS};
    }
};

// ---- producer ------------------------------------------------------------------------------------------------------
// This CTA's share of the B boxes of one stage, multicast to the whole cluster.
DEVICE void load_weights(const RowsParams& p, const Ring& ring, int expert, int first_column, int k, uint32_t rank) {
    constexpr uint16_t EVERYONE = (1 << CLUSTER) - 1;
#pragma unroll
    for (int i = 0; i < B_BOXES / CLUSTER; ++i) {
        const int box = rank * (B_BOXES / CLUSTER) + i;
        const uint32_t dst = ring.b() + box * B_BOX_BYTES;
        if constexpr (B_MN) {
            const int column = first_column + box * PANEL;
            if constexpr (CLUSTER == 1) tma_load_3d(dst, &p.b, ring.full_barrier(), column, k, expert);
            else tma_load_3d_multicast(dst, &p.b, ring.full_barrier(), column, k, expert, EVERYONE);
        } else {
            constexpr int BOXES_A_HALF = B_BOXES / HALVES, BOX_ROWS = BN / B_BOXES;
            const int column = first_column + box % BOXES_A_HALF * BOX_ROWS, half = box / BOXES_A_HALF;
            if constexpr (CLUSTER == 1) tma_load_4d(dst, &p.b, ring.full_barrier(), k, column, half, expert);
            else tma_load_4d_multicast(dst, &p.b, ring.full_barrier(), k, column, half, expert, EVERYONE);
        }
    }
}

DEVICE void produce_contiguous(const RowsParams& p, Ring ring, const TileScheduler& scheduler, int first, int stride,
                               uint32_t rank) {
    if (threadIdx.x != 0) return;
    for (int index = first; index < scheduler.tiles; index += stride) {
        const Tile tile = scheduler.at(index, rank);
        for (int k = 0; k < p.reduction; k += BK) {
            mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
            tma_load_2d(ring.a(), &p.a, ring.full_barrier(), k, tile.row);
            load_weights(p, ring, tile.expert, tile.column, k, rank);
            ring.advance();
        }
    }
}

DEVICE void produce_gathered(const RowsParams& p, Ring ring, const TileScheduler& scheduler, int first, int stride,
                             uint32_t rank) {
    constexpr int PASSES = BM / ROWS_A_PASS;
    int next_pair[PASSES];
    const auto load_pairs_of = [&](int index) {
        const Tile tile = scheduler.at(index, rank);
        load_pairs(next_pair, p.pairs, tile.row, tile.row_end);
    };
    if (first < scheduler.tiles) load_pairs_of(first);
    for (int index = first; index < scheduler.tiles; index += stride) {
        int token[PASSES];
        const uint32_t valid = tokens_of(token, p.pairs, next_pair);
        const Tile tile = scheduler.at(index, rank);  // again: recomputing takes fewer registers than keeping
        if (index + stride < scheduler.tiles) load_pairs_of(index + stride);  // a tile ahead of their use
        for (int k = 0; k < p.reduction; k += BK) {
            mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            if (threadIdx.x == 0) {
                mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                load_weights(p, ring, tile.expert, tile.column, k, rank);
            }
            copy_rows<1>(ring.a(), p.source, p.reduction, k, token, valid, 0);
            cp_async_mbarrier_arrive(ring.full_barrier());
            ring.advance();
        }
    }
}

// ---- the kernel's body -----------------------------------------------------------------------------------------------
// An Epilogue has SMEM_BYTES (a consumer's), a constructor (params), `init()` by the whole warpgroup, `prefetch(tile)` during the
// mainloop, early if it PREFETCHES, `hold(acc, tile)` which takes over the accumulators, and parts (epilogue.cuh: Parts).
template <class Epilogue>
DEVICE void varlen_m(const RowsParams& p) {
    static_assert(EPILOGUE_OFFSET + CONSUMERS * Epilogue::SMEM_BYTES <= BARRIER_OFFSET, "the stages and the epilogue do not fit");
    if (threadIdx.x == 0) Ring::init();
    Epilogue epilogue(p);
    if (consumer_index() >= 0) epilogue.init();
    TileScheduler scheduler(p);
    scheduler.build();
    if constexpr (CLUSTER > 1) cluster_sync();

    Ring ring;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (consumer_index() < 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (GATHER) produce_gathered(p, ring, scheduler, first, stride, rank);
        else produce_contiguous(p, ring, scheduler, first, stride, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const int steps = (p.reduction + BK - 1) / BK;
        Parts<Epilogue> parts(epilogue);
        // With how many stages left the tile is looked up: at the last, or, if the epilogue prefetches something of it, as soon
        // as the tile before is stored.
        const int tile_at = Epilogue::PREFETCHES ? max(steps - Parts<Epilogue>::WAITING, 1) : 1;
        for (int index = first; index < scheduler.tiles; index += stride) {
            Tile tile;
            float acc[BN / 2];
            multiply<0, B_MN>(acc, ring, steps, [&](int left) {
                parts.run(left);
                if (left == tile_at) {  // no sooner than needed: a tile takes registers
                    tile = scheduler.at(index, rank);
                    tile.row += consumer_index() * STRIP;
                    epilogue.prefetch(tile);
                }
            });
            epilogue.hold(acc, tile);
            parts.start();
        }
        parts.run(1);
        if (warpgroup_thread() == 0) bulk_wait_group<0>();
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // a peer may still write into, or arrive in, this CTA's shared memory
}
