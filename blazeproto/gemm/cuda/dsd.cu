// A block-sparse matrix (blocks.cuh) times a dense one. MegaBlocks section 5.1; appendix B, DSD.
//
//   S_TRANSPOSED 0    out[r, :] = sum over the blocks of row r of     S[r, c]   . D[c, :]        DSD, DSD^T
//   S_TRANSPOSED 1    out[c, :] = sum over the blocks of column c of  S[r, c]^T . D[r, :]        DS^T D
//
//   B_MN 1            D (N, m) or (M, m), as it is multiplied      B_MN 0    D lies transposed, (m, N) or (m, M)
//   OUT_TRANSPOSED 1  out lies transposed, (m, N) or (m, M). A product with the sparse matrix on the right is the transposed
//                     one of these: DDS = (S^T D^T)^T, and DD^T S.
//
//   blocks of a line   --TMA-->  A (128 x 64), two stages a block  \
//                                                                    wgmma -> acc (128 x BN) -> slabs --TMA--> out
//   their rows of D    --TMA-->  B (BN x 64)                       /
//
// A transposed block is read as it lies: wgmma takes it MN-major. A line without blocks gives zeros.
//
// Floor: max(2 nnz 128^2 m / 785 TFLOP/s, 2 (nnz 128^2 + M m + N m) bytes / 4.24 TB/s).
//
// -D: S_TRANSPOSED, B_MN, OUT_TRANSPOSED   as above
#include "blocks.cuh"

struct LineTile {
    int line, column;  // of the output
};

struct LineScheduler {
    using Params = BlockParams;
    using Tile = LineTile;
    static constexpr int SMEM_OFFSET = BARRIER_OFFSET;
    static constexpr bool VARLEN_K = true, SKIPS = false, TRANSPOSED = OUT_TRANSPOSED;
    static constexpr int EMPTY_STAGES = 0;

    const BlockParams& p;

    DEVICE explicit LineScheduler(const BlockParams& params) : p(params) { __syncthreads(); }

    DEVICE int column_blocks() const { return (p.columns + BN - 1) / BN; }
    DEVICE int count() const { return tiles_of_this_cta(p.lines * column_blocks()); }
    DEVICE bool has(int position) const { return position < count(); }

    // Tiles of a line run together: they read the same blocks.
    DEVICE Tile at(int position) const {
        const int index = blockIdx.x + position * gridDim.x, columns = column_blocks();
        return {index / columns, index % columns * BN};
    }
    DEVICE Tile strip_at(int position, int) const { return at(position); }

    // The next tile's offsets into L1: consumers read them before they can multiply.
    DEVICE static void prefetch(const BlockParams& p, const Tile& tile) {
        const int columns = (p.columns + BN - 1) / BN;
        const int next = (tile.line * columns + tile.column / BN + int(gridDim.x)) / columns;
        if (next < p.lines) {
            int begin, end;
            asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(begin) : "l"(p.offsets + next));
            asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(end) : "l"(p.offsets + next + 1));
        }
    }

    DEVICE int begin(const Tile& tile) const { return __ldg(p.offsets + tile.line); }
    DEVICE int end(const Tile& tile) const { return __ldg(p.offsets + tile.line + 1); }
    DEVICE int steps(const Tile& tile) const { return (end(tile) - begin(tile)) * (BLOCK / BK); }
    DEVICE static bool is_partial(const Tile&) { return false; }
    DEVICE static int partial(const Tile&) { return 0; }

    DEVICE static bool stores(const BlockParams& p, const Tile& tile, int part) { return tile.column + part * SLAB < p.columns; }
    DEVICE static void store(const BlockParams& p, const Tile& tile, int part, uint32_t slab) {
        const int row = tile.line * BLOCK + consumer_index() * STRIP, column = tile.column + part * SLAB;
        tma_store_2d(&p.out, slab, OUT_TRANSPOSED ? row : column, OUT_TRANSPOSED ? column : row);
    }
};

struct LineProducer {
    static constexpr int MN_A = S_TRANSPOSED, MN_B = B_MN, WARPS = 1;

    // By one warp: a lane looks up one of the next 32 blocks, one thread loads.
    template <class Epilogue>
    DEVICE static void produce(const BlockParams& p, const LineScheduler& scheduler) {
        Ring ring;
        const int count = scheduler.count(), lane = threadIdx.x;
        for (int position = 0; position < count; ++position) {
            MARK(AT, TILE);
            const LineTile tile = scheduler.at(position);
            const int end = scheduler.end(tile);
            for (int first = scheduler.begin(tile); first < end; first += 32) {
                const int mine = min(first + lane, end - 1);
                const int own_block = S_TRANSPOSED ? __ldg(p.block_offsets_t + mine) : mine;
                const int own_place = __ldg((S_TRANSPOSED ? p.row_indices : p.column_indices) + own_block);
                for (int i = 0; i < min(32, end - first); ++i) {
                    const int block = __shfl_sync(~0u, own_block, i), place = __shfl_sync(~0u, own_place, i);
                    if (lane == 0) load_block(p, ring, tile, block, place);
                    ring.advance();
                    ring.advance();
                    __syncwarp();
                }
            }
        }
    }

   private:
    // place: the block's column in S, or its row where S is transposed.
    DEVICE static void load_block(const BlockParams& p, Ring ring, const LineTile& tile, int block, int place) {
#pragma unroll
        for (int k = 0; k < BLOCK; k += BK) {
            ring.wait_until_empty();
            MARK(BEGIN, TMA);
            mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
            if constexpr (S_TRANSPOSED) {
#pragma unroll
                for (int panel = 0; panel < BM / PANEL; ++panel)
                    tma_load_3d(ring.a() + panel * PANEL_BYTES, &p.a, ring.full_barrier(), panel * PANEL, k, block);
            } else {
                tma_load_3d(ring.a(), &p.a, ring.full_barrier(), k, 0, block);
            }
            load_b<BN>(p.b, ring, place * BLOCK + k, [&](int) { return tile.column; });
            MARK(END, TMA);
            ring.advance();
        }
    }
};

extern "C" __global__ void __launch_bounds__(PTXAS_THREADS, 1) dsd(const __grid_constant__ BlockParams p) {
    run<LineScheduler, LineProducer, BlockEpilogue<LineScheduler>>(p);
}
