// Blocks of a product of two matrices, those that a topology has (blocks.cuh). MegaBlocks section 5.1; appendix B, SDD.
//
//   S[r, c] = A[r, :] . B[:, c]     A (M, k), B (k, N), or with B_MN 0 (N, k): SDD^T; S (nnz, 128, 128)
//
// A tile is BN / 128 blocks of one row. They need not be neighbours: each has a piece of the B stage for itself.
//
//   rows of A          --TMA-->  A (128 x 64)   \
//                                                 wgmma -> acc (128 x BN) -> slabs --TMA--> block | next block
//   two columns of B   --TMA-->  B (BN x 64)    /
//
// CTAs take tiles round robin in the order of the blocks, so that those that run together share rows of A, and an expert's part of B.
//
// Floor: max(2 nnz 128^2 k / 785 TFLOP/s, 2 (M k + N k + nnz 128^2) bytes / 4.24 TB/s).
#include "blocks.cuh"

struct SampledTile {
    int block, row, column, next_column;
};

struct SampledScheduler {
    using Params = BlockParams;
    using Tile = SampledTile;
    static constexpr int SMEM_OFFSET = BARRIER_OFFSET;
    static constexpr bool VARLEN_K = false, SKIPS = false, GROUPED = false, TRANSPOSED = false;

    const BlockParams& p;

    DEVICE explicit SampledScheduler(const BlockParams& params) : p(params) { __syncthreads(); }

    DEVICE int steps() const { return (p.reduction + BK - 1) / BK; }
    DEVICE int count() const { return tiles_of_this_cta(__ldg(p.tile_count)); }
    DEVICE bool has(int position) const { return position < count(); }

    DEVICE Tile at(int position) const {
        const int4 tile = __ldg(p.tiles + blockIdx.x + position * gridDim.x);
        return {tile.x, tile.y, tile.z, tile.w};
    }
    DEVICE Tile strip_at(int position, int) const { return at(position); }

    DEVICE static void prefetch(const BlockParams&, const Tile&) {}

    // A block takes two slabs' columns.
    DEVICE static bool stores(const BlockParams&, const Tile& tile, int part) {
        return part * SLAB < BLOCK || tile.next_column >= 0;
    }
    DEVICE static void store(const BlockParams& p, const Tile& tile, int part, uint32_t slab) {
        const int block = tile.block + part * SLAB / BLOCK;
        tma_store_3d(&p.out, slab, part * SLAB % BLOCK, consumer_index() * STRIP, block);
    }
};

struct SampledProducer {
    static constexpr int MN_A = 0, MN_B = B_MN, WARPS = 1;

    template <class Epilogue>
    DEVICE static void produce(const BlockParams& p, const SampledScheduler& scheduler) {
        const int count = scheduler.count();
        if (threadIdx.x != 0 || count == 0) return;
        Ring ring;
        SampledTile next = scheduler.at(0);
        for (int position = 0; position < count; ++position) {
            MARK(AT, TILE);
            const SampledTile tile = next;
            if (position + 1 < count) next = scheduler.at(position + 1);  // so that it is there when it is needed
            // Of a tile of one block the other's columns are loaded again: its sums are not stored.
            const int other = tile.next_column < 0 ? tile.column : tile.next_column;
            for (int k = 0; k < p.reduction; k += BK) {
                ring.wait_until_empty();
                MARK(BEGIN, TMA);
                mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
                tma_load_2d(ring.a(), &p.a, ring.full_barrier(), k, tile.row * BLOCK);
                load_b<BLOCK>(p.b, ring, k, [&](int piece) { return (piece == 0 ? tile.column : other) * BLOCK; });
                MARK(END, TMA);
                ring.advance();
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(PTXAS_THREADS, 1) sdd(const __grid_constant__ BlockParams p) {
    run<SampledScheduler, SampledProducer, BlockEpilogue<SampledScheduler>>(p);
}
