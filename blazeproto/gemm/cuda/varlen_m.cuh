// Rows of every expert times that expert's weights: out[r, :] = a[r, :] . W[e] for offsets[e] <= r < offsets[e+1].
//
//   GATHER 0   a is already in expert order: TMA boxes of BM rows
//   GATHER 1   a[r] is row token(pair_indices[r]) of `source`: the producer's threads copy 16-byte chunks (cp.async, gather.cuh)
//
//   B_MN 0     weights (E, columns, reduction): B tiles K-major       B_MN 1   weights (E, reduction, columns): MN-major
//   HALVES 2   the tile's columns are two blocks of BN/2: gate rows and the up rows of the same hidden units
//
// Persistent CTAs walk the tiles of all experts (tiles.cuh); the host never learns a token count. In order below: what an epilogue
// has, the producer that fills the ring with a tile's stages, and the body of the kernel.
#pragma once
#include "epilogue.cuh"
#include "tiles.cuh"

static_assert(CLUSTER == 1, "measured slower with weights shared by two CTAs: an expert's last tiles are half empty more often");

// ---- epilogue ------------------------------------------------------------------------------------------------------
// What the kernel's body asks of an epilogue: SMEM_BYTES (a consumer's), a constructor (params), `hold(acc, tile, ring)` which takes
// over the accumulators, and parts (epilogue.cuh: Parts). And, unless it is plain, what follows.
struct PlainEpilogue : AlwaysReady {
    static constexpr bool LOOKS_AHEAD = false;  // whether look_ahead comes as early in a tile's mainloop as it can
    DEVICE void look_ahead(const Tile&) {}
    // Stages that the producer of gathered rows appends to a tile's, how one thread fills them, for `hold` to consume.
    DEVICE static int ring_stages(const RowsParams&, const Tile&) { return 0; }
    DEVICE static void load_stage(const RowsParams&, const Ring&, const Tile&, int) {}
    // By warps that neither load nor multiply: the finisher's, or, where rows are contiguous, all of the producer's but the first.
    DEVICE static void finish(const RowsParams&, const TileScheduler&) {}
};

// ---- producer ------------------------------------------------------------------------------------------------------
// The B part of a stage.
DEVICE void load_weights(const RowsParams& p, const Ring& ring, const Tile& tile, int k) {
    if constexpr (B_MN) {
#pragma unroll
        for (int panel = 0; panel < BN / PANEL; ++panel)
            tma_load_3d(ring.b() + panel * PANEL_BYTES, &p.b, ring.full_barrier(), tile.column + panel * PANEL, k, tile.expert);
    } else {
        tma_load_4d(ring.b(), &p.b, ring.full_barrier(), k, tile.column, 0, tile.expert);
    }
}

// By one warp, of which one thread does everything but find tiles.
DEVICE void produce_contiguous(const RowsParams& p, Ring ring, const TileScheduler& scheduler) {
    for (int position = 0; position < scheduler.count(); ++position) {
        if (position % BATCH == 0) scheduler.fill_slots(position);
        if (threadIdx.x == 0) {
            const Tile tile = scheduler.at(position);
            for (int k = 0; k < p.reduction; k += BK) {
                ring.wait_until_empty();
                mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
                tma_load_2d(ring.a(), &p.a, ring.full_barrier(), k, tile.row);
                load_weights(p, ring, tile, k);
                ring.advance();
            }
        }
        __syncwarp();
    }
}

// By the whole warpgroup.
template <class Epilogue>
DEVICE void produce_gathered(const RowsParams& p, Ring ring, const TileScheduler& scheduler) {
    static_assert(BM == NUMBERED_ROWS);
    const uint32_t offset = gather_offset();
    const int column = gather_column();
    int next_pair = -1;
    const auto look_ahead = [&](int position) {
        if (position >= scheduler.count()) return;
        if (position % BATCH == 0) {
            if (threadIdx.x < 32) scheduler.fill_slots(position);
            named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);
        }
        const Tile tile = scheduler.at(position);
        next_pair = load_pair(p.pairs, tile.row, tile.row_end, tile.row_end - 1);
    };
    look_ahead(0);
    for (int position = 0; position < scheduler.count(); ++position) {
        const uint4* chunks = reinterpret_cast<const uint4*>(p.source + column);
        RowChunks<BM / ROWS_A_PASS> rows(chunks, row_start(p.pairs, next_pair, p.reduction), 0);
        look_ahead(position + 1);  // the pairs, a tile ahead of their use
        const Tile tile = scheduler.at(position);
        for (int k = 0; k < p.reduction; k += BK) {
            ring.wait_until_empty();
            if (threadIdx.x == 0) {
                mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                load_weights(p, ring, tile, k);
            }
            copy_rows<1, true>(ring.a() + offset, rows, p.reduction - k - column);
            cp_async_mbarrier_arrive(ring.full_barrier());
            ring.advance();
            rows.next_panel();
        }
        for (int index = 0; index < Epilogue::ring_stages(p, tile); ++index) {
            ring.wait_until_empty();
            if (threadIdx.x == 0) Epilogue::load_stage(p, ring, tile, index);
            mbarrier_arrive(ring.full_barrier());
            ring.advance();
        }
    }
}

// ---- the kernel's body -----------------------------------------------------------------------------------------------
template <class Epilogue>
DEVICE void varlen_m(const RowsParams& p) {
    static_assert(EPILOGUE_OFFSET + CONSUMERS * Epilogue::SMEM_BYTES <= SLOTS_OFFSET, "the stages and the epilogue do not fit");
    if (threadIdx.x == 0) Ring::init();
    Epilogue epilogue(p);
    const TileScheduler scheduler(p);

    Ring ring;
    if (consumer_index() < 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (GATHER) {
            produce_gathered<Epilogue>(p, ring, scheduler);
        } else {
            if (threadIdx.x < 32) produce_contiguous(p, ring, scheduler);
            else Epilogue::finish(p, scheduler);
        }
    } else if (FINISHERS && consumer_index() == CONSUMERS) {
        setmaxnreg_dec<FINISHER_REGISTERS>();
        Epilogue::finish(p, scheduler);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const int steps = (p.reduction + BK - 1) / BK, strip = uniform(consumer_index());
        Parts<Epilogue> parts(epilogue);
        // With how many stages left the tile is looked up: at the last, or, if the epilogue looks ahead, at the first.
        const int tile_at = Epilogue::LOOKS_AHEAD ? steps : 1;
        const int count = uniform(scheduler.count());
        for (int position = 0; position < count; ++position) {
            Tile tile;
            float acc[BN / 2];
            multiply<0, B_MN>(acc, ring, strip, steps, [&](int left) {
                parts.run(left);
                if (left == tile_at) {  // no sooner than needed: a tile takes registers
                    tile = scheduler.at(position);
                    tile.row += consumer_index() * STRIP;
                    epilogue.look_ahead(tile);
                }
            });
            epilogue.hold(acc, tile, ring);
            parts.start();
        }
        parts.run(1);
        if (warpgroup_thread() == 0) bulk_wait_group<0>();
    }
}
