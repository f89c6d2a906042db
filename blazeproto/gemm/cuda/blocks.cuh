// Products with a block-sparse matrix: what sdd.cu and dsd.cu share. MegaBlocks section 5.1; appendix B has its kernels.
//
// A matrix S (M, N) of 128 x 128 blocks keeps only some of them, (nnz, 128, 128), row by row. Its topology says where they belong:
//
//   row_offsets (M / 128 + 1,)      block row r has blocks row_offsets[r] to row_offsets[r + 1]     (blocked CSR)
//   column_indices (nnz,)           the block column of each
//   row_indices (nnz,)              the block row of each                                           (blocked COO)
//   column_offsets (N / 128 + 1,)   block column c has entries column_offsets[c] to [c + 1] of ...
//   block_offsets_t (nnz,)          ... the transposed order: where each of its blocks lies         (transpose indices)
//   tiles (nnz, 4)                  what SDD computes at a time: a block, its row, its column, and the column of the next
//                                   block where that is in the same row and belongs to the tile, else -1
//
// A block is as high as a tile: a line of blocks, a row or a column of S, has BM of its rows or columns.
#pragma once
#include "epilogue.cuh"

static_assert(CLUSTER == 1 && !GATHER, "operands come by TMA, to one CTA");
constexpr int BLOCK = BM;

struct BlockParams {
    TensorMap a, b, out;
    const int *row_indices, *column_indices;
    const int* offsets;  // dsd.cu: of block rows, or of block columns where S is transposed
    const int* block_offsets_t;
    const int4* tiles;
    const int* tile_count;
    int lines;      // dsd.cu: block rows of the output
    int reduction;  // sdd.cu: columns of a
    int columns;    // dsd.cu: of the output
};

// The B part of a stage: BN columns of the output. K-major, PIECE of them lie together, and each piece's first is given.
// MN-major, a panel of columns takes BK rows.
template <int PIECE, class FirstColumn>
DEVICE void load_b(const TensorMap& b, const Ring& ring, int k, FirstColumn first_column) {
    constexpr int STEP = B_MN ? PANEL : PIECE;
#pragma unroll
    for (int at = 0; at < BN; at += STEP) {
        const int column = first_column(at / PIECE) + at % PIECE;
        const uint32_t dst = ring.b() + at * SWIZZLE_ROW;
        if constexpr (B_MN) tma_load_2d(dst, &b, ring.full_barrier(), column, k);
        else tma_load_2d(dst, &b, ring.full_barrier(), k, column);
    }
}

// Accumulators to bf16, and slab by slab to memory. The Scheduler knows where a tile's slabs belong:
//   stores(p, tile, part)           whether there is anything of columns 64 * part and on
//   store(p, tile, part, slab)      issues the TMA store of this consumer's slab
//   prefetch(p, tile)               called while a tile is multiplied: loads what the next one's start reads
//   TRANSPOSED                      whether slabs are stored transposed
template <class Scheduler>
struct BlockEpilogue : PlainEpilogue<Scheduler> {
    static constexpr bool LOOKS_AHEAD = true;  // a tile is loaded from memory
    static constexpr int SMEM_BYTES = SLAB_PAIR_BYTES;
    static constexpr int PARTS = BN / SLAB;
    const BlockParams& p;
    uint32_t out[BN / 4];
    typename Scheduler::Tile tile;

    DEVICE explicit BlockEpilogue(const BlockParams& params) : p(params) {}

    DEVICE void look_ahead(const typename Scheduler::Tile& of) { Scheduler::prefetch(p, of); }

    DEVICE void hold(const float (&acc)[BN / 2], const typename Scheduler::Tile& of, const Ring&) {
        tile = of;
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) out[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }

    template <int INDEX>
    DEVICE void part() {
        if (PARTS % 2 && INDEX == 0) skip_slab();  // the slabs don't alternate from tile to tile: the last one has been read
        if (!Scheduler::stores(p, tile, INDEX)) return skip_slab();
        const uint32_t slab = slab_of_part(INDEX);
        write_slab<Scheduler::TRANSPOSED>(slab, out + INDEX * PAIRS_IN_SLAB);
        MARK(BEGIN, STORE);
        store_slab([&] { Scheduler::store(p, tile, INDEX, slab); });
        MARK(END, STORE);
    }

    // There are no partial tiles.
    DEVICE static void store_partial(const float (&)[BN / 2], int) {}
};
