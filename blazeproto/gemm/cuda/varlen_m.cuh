// Rows of every expert times that expert's weights: out[r, :] = a[r, :] . W[e] for offsets[e] <= r < offsets[e+1]. The
// products' M dimension varies from expert to expert; the host never learns a token count.
//
//   GATHER 0   a is already in expert order: TMA boxes of BM rows
//   GATHER 1   a[r] is row token(pair_indices[r]) of `source`: the producer's threads copy 16-byte chunks (cp.async, gather.cuh)
//
//   B_MN 0     weights (E, columns, reduction): B tiles K-major       B_MN 1   weights (E, reduction, columns): MN-major
//
//   LOW_RANK   out[r, :] = a[r, :] . W[e] + low_rows[r, :] . L[e]: the reduction goes on over `rank` elements more, of contiguous
//              rows and of weights that lie as W does. With low_rows = a . A[e] that is LoRA, W + L A never made:
//
//              ring   | a, W | a, W | ... | a, W | low_rows, L | a, W of the next tile
//
//              Both are bf16 where a and W are quantized, too; then PAIRED_ROWS hold for L as for W.
//
// This is the producer: it fills the ring with the stages of tile after tile.
#pragma once
#include "kernel.cuh"
#include "tiles.cuh"

#if CLUSTER > 1
#include "pairs.cuh"
#else
static_assert(CLUSTER == 1, "measured slower with weights shared by two CTAs: an expert's last tiles are half empty more often");

// The B part of a stage: COLUMNS columns of the output from each of BN / COLUMNS halves of the weights, gate and up. K-major, the
// map's box is a whole block; MN-major it is a panel.
template <int COLUMNS>
DEVICE void load_weights(const TensorMap& weights, const Ring& ring, const RowTile& tile, int k) {
#if PAIRED_ROWS
    tma_load_5d(ring.b(), &weights, ring.full_barrier(), k, 0, 0, tile.column / GROUP, tile.expert * (BN / COLUMNS));
#else
    if constexpr (B_MN) {
#pragma unroll
        for (int panel = 0; panel < BN / PANEL; ++panel) {
            const uint32_t dst = ring.b() + panel * PANEL_BYTES;
            const int column = tile.column + panel * PANEL % COLUMNS, half = panel * PANEL / COLUMNS;
            if constexpr (COLUMNS == BN) tma_load_3d(dst, &weights, ring.full_barrier(), column, k, tile.expert);
            else tma_load_4d(dst, &weights, ring.full_barrier(), column, k, half, tile.expert);
        }
    } else {
        tma_load_4d(ring.b(), &weights, ring.full_barrier(), k, tile.column, 0, tile.expert);
    }
#endif
}
#endif

#ifndef STORED
template <int>
DEVICE RowTile in_slot(const RowsParams&, const RowTile& tile) { return tile; }
#endif

// A stage of contiguous rows and weights, by one thread.
template <int COLUMNS>
DEVICE void load_stage(const TensorMap& rows, const TensorMap& weights, const Ring& ring, const RowTile& tile, int k
                       IN_PAIRS(, bool shared)) {
    mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
    tma_load_2d(ring.a(), &rows, ring.full_barrier(), k, tile.row);
    load_weights<COLUMNS>(weights, ring, tile, k IN_PAIRS(, shared));
}

// FEW_ROWS: most rows of a tile lie past its expert's end. Otherwise such rows are copies of the expert's last one, so that no
// copy depends on a row; but then all CTAs that have such a tile read the same few lines of L2 over and over, which delays them
// all. Here they become zeros, unread.
#if FEW_ROWS
// Copies the rows that are there, which come first: rows_left of them from this thread's row of the first pass on.
template <int PASSES>
DEVICE void copy_present_rows(uint32_t dst, const RowChunks<PASSES>& rows, int rows_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
        cp_async_16(dst + pass * PASS_ROWS * SWIZZLE_ROW, rows.at[pass], pass * PASS_ROWS < rows_left);
}
#endif

struct RowProducer {
    static constexpr int MN_A = 0, MN_B = B_MN;
    static constexpr int WARPS = GATHER ? WARPGROUP_WARPS : 1;

    template <class Epilogue, class Scheduler>
    DEVICE static void produce(const RowsParams& p, const Scheduler& scheduler) {
        if constexpr (GATHER) produce_gathered<Epilogue>(p, scheduler);
        else produce_contiguous(p, scheduler);
    }

   private:
    // By one warp: all its lanes find tiles, one thread loads.
    template <class Scheduler>
    DEVICE static void produce_contiguous(const RowsParams& p, const Scheduler& scheduler) {
        static_assert(!TICKETS, "taken where rows are gathered");
        Ring ring;
        uint32_t ticket = 0;
        for (int position = 0; scheduler.has(position); ++position) {
            if (scheduler.begins_batch(position)) scheduler.fill_slots(position, ticket);
            if (threadIdx.x == 0) {
                MARK(AT, TILE);
                const RowTile tile = scheduler.at(position), with_weights = in_slot<Scheduler::TILE_COLUMNS>(p, tile);
                IN_PAIRS(const bool shared = scheduler.shares(tile);)
                for (int k = 0; k < p.reduction; k += BK) {
                    ring.wait_until_empty();
                    MARK(BEGIN, TMA);
                    load_stage<Scheduler::TILE_COLUMNS>(p.a, p.b, ring, with_weights, k IN_PAIRS(, shared));
                    MARK(END, TMA);
                    ring.advance();
                }
                for (int k = 0; LOW_RANK && k < p.rank; k += BK) {
                    ring.wait_until_empty();
                    load_stage<Scheduler::TILE_COLUMNS>(p.low_rows, p.low_weights, ring, tile, k IN_PAIRS(, shared));
                    ring.advance();
                }
            }
            __syncwarp();
        }
    }

    // By the whole warpgroup: every thread copies, one thread loads the weights. A tile's pairs are loaded one tile ahead.
    template <class Epilogue, class Scheduler>
    DEVICE static void produce_gathered(const RowsParams& p, const Scheduler& scheduler) {
        static_assert(BM == NUMBERED_ROWS, "a thread of the warpgroup computes one row's number");
        Ring ring;
        const uint32_t offset = gather_offset();
        const int column = gather_column();
        int next_pair = -1;
        uint32_t ticket = threadIdx.x < 32 ? scheduler.first_ticket() : 0;
        const auto look_ahead = [&](int position) {
            if (!TICKETS && !scheduler.has(position)) return;
            if (scheduler.begins_batch(position)) {
                if (threadIdx.x < 32) scheduler.fill_slots(position, ticket);
                named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);
            }
            if (TICKETS && !scheduler.has(position)) return;
            const RowTile tile = scheduler.at(position);
            next_pair = load_pair(p.pairs, tile.row, tile.row_end, tile.row_end - 1);
        };
        look_ahead(0);
        for (int position = 0; scheduler.has(position); ++position) {
            MARK(AT, TILE);
#ifdef SENDS
            wait_for_rows(p.sending, scheduler.at(position).expert, p.experts, rows_awaited());
#endif
            const uint4* chunks = reinterpret_cast<const uint4*>(p.source + column);
            RowChunks<BM / PASS_ROWS> rows(chunks, row_start(p.pairs, next_pair, p.reduction), 0);
            look_ahead(position + 1);
            const RowTile tile = scheduler.at(position);
#if FEW_ROWS
            const int rows_left = tile.row_end - tile.row - gather_row();
#else
            const bool both = scheduler.computes(tile, 1);
#endif
            IN_PAIRS(const bool shared = scheduler.shares(tile);)
            const RowTile with_weights = threadIdx.x == 0 ? in_slot<Scheduler::TILE_COLUMNS>(p, tile) : tile;
            for (int k = 0; k < p.reduction; k += BK) {
                ring.wait_until_empty();
                if (threadIdx.x == 0) {
                    MARK(BEGIN, TMA);
                    mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                    load_weights<Scheduler::TILE_COLUMNS>(p.b, ring, with_weights, k IN_PAIRS(, shared));
                    MARK(END, TMA);
                }
                MARK(BEGIN, COPY);
                const int width_left = p.reduction - k - column;
#if FEW_ROWS
                copy_present_rows(ring.a() + offset, rows, width_left > 0 ? rows_left : 0);
#else
                if (both) copy_rows<1, true, BM / PASS_ROWS>(ring.a() + offset, rows, width_left);
                else copy_rows<1, true, STRIP / PASS_ROWS>(ring.a() + offset, rows, width_left);
#endif
                cp_async_mbarrier_arrive(ring.full_barrier());
                MARK(END, COPY);
                ring.advance();
                rows.next_panel();
            }
            for (int k = 0; LOW_RANK && k < p.rank; k += BK) {
                ring.wait_until_empty();
                if (threadIdx.x == 0) load_stage<Scheduler::TILE_COLUMNS>(p.low_rows, p.low_weights, ring, tile, k IN_PAIRS(, shared));
                mbarrier_arrive(ring.full_barrier());
                ring.advance();
            }
            for (int index = 0; index < Epilogue::ring_stages(p, tile); ++index) {
                ring.wait_until_empty();
                if (threadIdx.x == 0) Epilogue::load_stage(p, ring, tile, index);
                mbarrier_arrive(ring.full_barrier());
                ring.advance();
            }
        }
    }
};
