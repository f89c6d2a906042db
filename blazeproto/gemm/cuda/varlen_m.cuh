// Rows of every expert times that expert's weights: out[r, :] = a[r, :] . W[e] for offsets[e] <= r < offsets[e+1].
//
//   GATHER 0   a is already in expert order: TMA boxes of BM rows
//   GATHER 1   a[r] is token (pair_indices[r] / top_k) of `source`: the producer's threads copy 16-byte chunks (cp.async)
//
//   B_MN 0     weights (E, columns, reduction): B tiles K-major       B_MN 1   weights (E, reduction, columns): MN-major
//   HALVES 2   the tile's columns are two blocks of BN/2: gate rows and the up rows of the same hidden units
//
// One persistent CTA (or cluster) a multiprocessor walks the tiles of all experts; the host never learns a token count.
#pragma once
#include "epilogue.cuh"

constexpr int MAX_EXPERTS = 512;
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
    const int* pair_indices;
    const int* pair_tokens;  // token of a pair when experts per token vary, else null
    const int* offsets;      // (experts + 1,)
    bf16 *out0_rows, *out1_rows;
    const bf16* bias;      // (experts, HALVES * columns)
    const float* scores;   // by pair
    float* reduction_out;  // per-row partial sums, or an fp32 output
    int tokens, rows, experts, reduction, columns, top_k;
};

// The token a row of the buffers came from.
DEVICE int token_of_row(const RowsParams& p, int row) {
    const int pair = __ldg(p.pair_indices + row);
    return p.top_k ? pair / p.top_k : __ldg(p.pair_tokens + pair);
}

struct Tile {
    int expert;
    int row, row_end;  // first row of this CTA's tile; end of the expert's rows
    int column;        // first column, in units of the output (hidden units where HALVES is 2)
};

// Tiles in launch order: expert by expert; inside one, groups of ROW_GROUP row blocks, columns within a group, rows fastest.
struct TileScheduler {
    const int* first_block;  // (experts + 1,) in shared memory: row blocks of all experts before this one
    const int* offsets;
    int experts, column_blocks, tiles;

    // Called by the whole CTA; `first_block` has room for experts + 1 entries.
    DEVICE TileScheduler(const RowsParams& p, int* first_block_smem)
        : first_block(first_block_smem), offsets(p.offsets), experts(p.experts),
          column_blocks((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS) {
        for (int e = threadIdx.x; e < experts; e += THREADS)
            first_block_smem[e] = (p.offsets[e + 1] - p.offsets[e] + CLUSTER * BM - 1) / (CLUSTER * BM);
        __syncthreads();
        if (threadIdx.x < 32) {  // exclusive scan by one warp, a run of experts a lane
            const int run = (experts + 31) / 32, begin = threadIdx.x * run;
            int sum = 0;
            for (int e = begin; e < min(begin + run, experts); ++e) sum += first_block_smem[e];
            int before = sum;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, before, step);
                if (threadIdx.x >= step) before += other;
            }
            before -= sum;
            for (int e = begin; e < min(begin + run, experts); ++e) {
                const int blocks = first_block_smem[e];
                first_block_smem[e] = before;
                before += blocks;
            }
            if (threadIdx.x == 31) first_block_smem[experts] = before;
        }
        __syncthreads();
        tiles = first_block[experts] * column_blocks;
    }

    DEVICE Tile at(int index, int rank) const {
        const int block = index / column_blocks;
        int low = 0, high = experts;  // the last expert whose first block is at or before `block`
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (first_block[middle] <= block ? low : high) = middle;
        }
        // Experts without rows share their first block with the next one: `low` is the one that owns it.
        const int blocks = first_block[low + 1] - first_block[low];
        const int local = index - first_block[low] * column_blocks;
        const int group = local / (ROW_GROUP * column_blocks);
        const int in_group = local - group * ROW_GROUP * column_blocks;
        const int group_rows = min(ROW_GROUP, blocks - group * ROW_GROUP);
        const int row_block = group * ROW_GROUP + in_group % group_rows;
        return {low, offsets[low] + (row_block * CLUSTER + rank) * BM, offsets[low + 1],
                in_group / group_rows * TILE_COLUMNS};
    }
};

// ---- producer ------------------------------------------------------------------------------------------------------
// This CTA's share of the B boxes of one stage, multicast to the whole cluster.
DEVICE void load_weights(const RowsParams& p, const Ring& ring, const Tile& tile, int k, uint32_t rank) {
    constexpr uint16_t EVERYONE = (1 << CLUSTER) - 1;
#pragma unroll
    for (int i = 0; i < B_BOXES / CLUSTER; ++i) {
        const int box = rank * (B_BOXES / CLUSTER) + i;
        const uint32_t dst = ring.b() + box * B_BOX_BYTES;
        if constexpr (B_MN) {
            const int column = tile.column + box * PANEL;
            if constexpr (CLUSTER == 1) tma_load_3d(dst, &p.b, ring.full_barrier(), column, k, tile.expert);
            else tma_load_3d_multicast(dst, &p.b, ring.full_barrier(), column, k, tile.expert, EVERYONE);
        } else {
            constexpr int BOXES_A_HALF = B_BOXES / HALVES, BOX_ROWS = BN / B_BOXES;
            const int column = tile.column + box % BOXES_A_HALF * BOX_ROWS, half = box / BOXES_A_HALF;
            if constexpr (CLUSTER == 1) tma_load_4d(dst, &p.b, ring.full_barrier(), k, column, half, tile.expert);
            else tma_load_4d_multicast(dst, &p.b, ring.full_barrier(), k, column, half, tile.expert, EVERYONE);
        }
    }
}

DEVICE void produce_contiguous(const RowsParams& p, Ring ring, const TileScheduler& scheduler, int first, int stride, uint32_t rank) {
    if (threadIdx.x != 0) return;
    for (int index = first; index < scheduler.tiles; index += stride) {
        const Tile tile = scheduler.at(index, rank);
        for (int k = 0; k < p.reduction; k += BK) {
            mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
            tma_load_2d(ring.a(), &p.a, ring.full_barrier(), k, tile.row);
            load_weights(p, ring, tile, k, rank);
            ring.advance();
        }
    }
}

DEVICE void produce_gathered(const RowsParams& p, Ring ring, const TileScheduler& scheduler, int first, int stride, uint32_t rank) {
    constexpr int CHUNKS = BK * 2 / 16, ROWS_A_PASS = WARPGROUP / CHUNKS, ROWS = BM / ROWS_A_PASS;
    const int chunk = threadIdx.x % CHUNKS, first_row = threadIdx.x / CHUNKS;
    const uint32_t swizzled = first_row * SWIZZLE_ROW + ((chunk ^ (first_row & 7)) << 4);
    for (int index = first; index < scheduler.tiles; index += stride) {
        const Tile tile = scheduler.at(index, rank);
        int token[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = tile.row + first_row + i * ROWS_A_PASS;
            token[i] = row < tile.row_end ? token_of_row(p, row) : -1;
        }
        for (int k = 0; k < p.reduction; k += BK) {
            mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            if (threadIdx.x == 0) {
                mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                load_weights(p, ring, tile, k, rank);
            }
            const int column = k + chunk * 8;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool valid = token[i] >= 0 && column < p.reduction;
                const bf16* src = p.source + (valid ? int64_t(token[i]) * p.reduction + column : 0);
                cp_async_16(ring.a() + swizzled + i * ROWS_A_PASS * SWIZZLE_ROW, src, valid ? 16 : 0);
            }
            cp_async_mbarrier_arrive(ring.full_barrier());
            ring.advance();
        }
    }
}

// ---- the kernel's body -----------------------------------------------------------------------------------------------
// An Epilogue has SMEM_BYTES (a consumer warpgroup's), a constructor (params, its shared memory), `prefetch(tile, first_row)` called
// before the mainloop and `operator()(acc, tile, first_row)` after it.
template <class Epilogue>
DEVICE void varlen_m(const RowsParams& p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    constexpr int EPILOGUE_OFFSET = STAGES * STAGE_BYTES;
    constexpr int BARRIER_OFFSET = EPILOGUE_OFFSET + CONSUMERS * Epilogue::SMEM_BYTES;
    constexpr int SCHEDULE_OFFSET = BARRIER_OFFSET + Ring::BARRIER_BYTES + CONSUMERS * Epilogue::BARRIER_BYTES;
    static_assert(SCHEDULE_OFFSET + (MAX_EXPERTS + 1) * 4 <= SMEM_LIMIT, "the stages and the epilogue do not fit");

    const uint32_t base = smem_address(smem);
    Ring ring(base, base + BARRIER_OFFSET);
    if (threadIdx.x == 0) ring.init();
    const int consumer = threadIdx.x / WARPGROUP - 1;
    Epilogue epilogue(p, base + EPILOGUE_OFFSET + max(consumer, 0) * Epilogue::SMEM_BYTES,
                      base + BARRIER_OFFSET + Ring::BARRIER_BYTES + max(consumer, 0) * Epilogue::BARRIER_BYTES);
    const TileScheduler scheduler(p, reinterpret_cast<int*>(smem + SCHEDULE_OFFSET));
    if constexpr (CLUSTER > 1) cluster_sync();

    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (consumer < 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (GATHER) produce_gathered(p, ring, scheduler, first, stride, rank);
        else produce_contiguous(p, ring, scheduler, first, stride, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const int steps = (p.reduction + BK - 1) / BK;
        const int first_row = PINGPONG ? 0 : consumer * WG_M;
        if (PINGPONG && consumer == 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);
        for (int index = first, turn = 0; index < scheduler.tiles; index += stride, ++turn) {
            if (PINGPONG && turn % CONSUMERS != consumer) {
                ring.advance(steps);
                continue;
            }
            const Tile tile = scheduler.at(index, rank);
            float acc[STRIPS][BN / 2];
            epilogue.prefetch(tile, first_row);
            if (PINGPONG) named_barrier_sync(TURN_BARRIER + consumer, 2 * WARPGROUP);
            multiply<0, B_MN>(acc, ring, steps, first_row);
            if (PINGPONG) named_barrier_arrive(TURN_BARRIER + 1 - consumer, 2 * WARPGROUP);
            epilogue(acc, tile, first_row);
        }
        if (warpgroup_thread() == 0) bulk_wait_group<0>();
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // a peer may still write into, or arrive in, this CTA's shared memory
}
