// The body of every product's kernel, the one place where warpgroups get their roles. A product is three types:
//
//   Scheduler   which tiles this CTA computes, and over how many stages   TileScheduler (tiles.cuh), WeightScheduler
//   Producer    how a tile's operands come into the ring                  RowProducer (varlen_m.cuh), WeightProducer
//   Epilogue    what becomes of a tile's accumulators                     in each product's .cu
//
//   warpgroup 0      Producer                | load tile 0 | load tile 1 | load tile 2 | ...
//   warpgroups 1, 2  multiply, Epilogue           | tile 0 | hold | tile 1, and parts of 0's epilogue | hold | tile 2, and ...
//   warpgroup 3, or idle warps of 0:
//                    Epilogue::store_staged                              | store tile 0 ..........|            | store tile 1 ...
//
// A Scheduler has
//   Params, Tile        the kernel's argument; what `at` returns
//   SMEM_OFFSET         where its part of shared memory begins
//   VARLEN_K            false: every tile takes `steps()` stages
//                       true: tile t takes `steps(t)`, perhaps none, and then EMPTY_STAGES, which are not read. It may be a
//                       partial tile, `is_partial(t)`: a sum over a part of the reduction, which is stored at `partial(t)`
//   count(), at(i)      how many tiles this CTA computes; the i-th of them
//   strip_at(i, strip)  the strip of it that this consumer, number `strip`, multiplies
//   SKIPS               whether some strips are not computed: then `computes(tile, strip)` tells which, there is no count
//   has(i)              whether there is an i-th tile
//
// A Producer has
//   MN_A, MN_B          1 where that operand lies MN-major in a stage
//   WARPS               how many warps of its warpgroup load; the others run Epilogue::store_staged
//   produce<Epilogue>(params, scheduler)   fills the ring with the stages of all of this CTA's tiles
//
// An Epilogue has SMEM_BYTES (for each consumer), a constructor (params) for the consumers, `hold(acc, tile, ring)`, which
// takes over the accumulators of a strip, and parts (below). A product with VARLEN_K also has `store_partial(acc, at)`.
// PlainEpilogue has defaults for the rest. SCALED operands: and `block_scales(tile)`, of fp8.cuh.
//
// A consumer whose strip is not computed calls `skip` instead of `hold`. Its parts run as ever, with whatever is in the
// registers, so that epilogue warps count the same parts for both strips; of a strip without rows they store nothing.
//
//   consumer 0   | tile 0 | hold | half tile, and parts of 0 .......| hold | tile 2, and parts of the half tile
//   consumer 1   | tile 0 | hold | parts of 0 | give its stages back       | tile 2, and parts that nobody stores
#pragma once
#include "mainloop.cuh"
#if FP8
#include "fp8.cuh"
using Element = E4m3;  // of operands
#else
using Element = Bf16;
#endif
#ifdef STORED
#include "decoders.cuh"
#endif
#ifdef SENDS
#include "schedule.cuh"
#endif

template <class Scheduler>
struct PlainEpilogue {
    using Params = typename Scheduler::Params;
    using Tile = typename Scheduler::Tile;

    // By one thread, before any use: initialises the epilogue's barriers.
    DEVICE static void init() {}

    // Called while a tile is multiplied: with its first stage if LOOKS_AHEAD, else with its last.
    static constexpr bool LOOKS_AHEAD = false;
    DEVICE void look_ahead(const Tile&) {}

    // SCALED, LOW_RANK: applies the scales of quantized tokens, and makes them 1, before low-rank factors' products are added.
    DEVICE void scale_sums(float (&)[BN / 2]) {}

    // Instead of `hold`, for a strip that is not computed: calls `skip_tile()`, which gives all of the tile's stages back.
    template <class SkipTile>
    DEVICE void skip(SkipTile skip_tile) {
        skip_tile();
    }

    // Whether the next part can run without waiting.
    DEVICE static bool ready(int) { return true; }

    // RowProducer, where it gathers, appends so many stages to a tile's, for `hold` to consume. One thread loads each of them.
    DEVICE static int ring_stages(const Params&, const Tile&) { return 0; }
    DEVICE static void load_stage(const Params&, const Ring&, const Tile&, int) {}

    // By the epilogue warps: those of the epilogue warpgroup, or of the producer's warpgroup those that do not load.
    DEVICE static void store_staged(const Params&, const Scheduler&) {}
};

// A consumer's epilogue in parts: it has PARTS, and `part<i>()` (accumulators are registers, which have no addresses, so
// the compiler must know i). DEFERRED 0 runs all parts at once, after a tile's mainloop. DEFERRED 1 runs them during the
// next tile's mainloop: one while each stage is multiplied, if it is `ready`. What the parts need, `hold` keeps in
// registers.
//
//   DEFERRED 1   | tile 0 | hold | tile 1: stage 0, part 0 | stage 1, part 1 | stage 2 | ... | hold | tile 2 ...
template <class Epilogue>
struct Parts {
    Epilogue& epilogue;
    int next = Epilogue::PARTS;  // the first that has not run

    DEVICE explicit Parts(Epilogue& e) : epilogue(e) {}

    // After `hold`.
    DEVICE void start() {
        next = 0;
        if (!DEFERRED) run(1);
    }

    // While a stage is multiplied: runs the next part; with the last stage of a tile, all that have not run. left: stages
    // from this one to the last.
    DEVICE void run(int left) {
        if (next == Epilogue::PARTS || (left > 1 && !epilogue.ready(next))) return;
        MARK(BEGIN, HAND_OVER);
#pragma unroll 1
        for (int parts = left == 1 ? Epilogue::PARTS - next : next < Epilogue::PARTS; parts > 0; --parts) {
            run_only<0>();
            ++next;
        }
        MARK(END, HAND_OVER);
    }

   private:
    template <int I>
    DEVICE void run_only() {
        if constexpr (I < Epilogue::PARTS) {
            if (I == next) epilogue.template part<I>();
            else run_only<I + 1>();
        }
    }
};

// By a consumer warpgroup.
template <class Scheduler, class Producer, class Epilogue>
DEVICE void consume(const typename Scheduler::Params& p, const Scheduler& scheduler) {
    constexpr bool VARLEN_K = Scheduler::VARLEN_K, SKIPS = Scheduler::SKIPS;
    Epilogue epilogue(p);
    Ring ring;
    int steps = 0;
    if constexpr (!VARLEN_K) steps = scheduler.steps();
    const int strip = uniform(consumer_index());
    Parts<Epilogue> parts(epilogue);
    const int count = uniform(scheduler.count());  // VARLEN_K needs more registers, so it reads the count again for every tile
    bool computes = true;                          // this consumer's strip of the tile
    const auto look_at = [&](int position) {
        if constexpr (SKIPS) computes = uniform(scheduler.computes(scheduler.at(position), strip));
    };
    look_at(0);
    for (int position = 0; SKIPS      ? uniform(scheduler.has(position))
                           : VARLEN_K ? scheduler.has(position)
                                      : position < count;
         ++position) {
        MARK(AT, TILE);
        typename Scheduler::Tile tile;
        if constexpr (VARLEN_K) {
            tile = scheduler.strip_at(position, strip);
            steps = uniform(scheduler.steps(tile));
            if (steps == 0) {  // an expert without rows: its sums are zero
                const float zeros[BN / 2] = {};
                skip_stages(ring, Scheduler::EMPTY_STAGES);
                parts.run(1);
                epilogue.hold(zeros, tile, ring);
                parts.start();
                continue;
            }
        } else if constexpr (SKIPS) {
            if (!computes) {
                parts.run(1);  // nothing is multiplied that they could run under
                epilogue.skip([&] { skip_stages(ring, steps + Epilogue::ring_stages(p, scheduler.at(position))); });
                parts.start();
                look_at(position + 1);
                continue;
            }
        }
        float acc[BN / 2];
        if constexpr (Element::SCALED) {
            ring.wait_until_full();  // then the tile's slot has been written
            epilogue.look_ahead(scheduler.strip_at(position, strip));
            multiply(acc, ring, strip, steps, epilogue.block_scales(scheduler.strip_at(position, strip)), p);
            if constexpr (LOW_RANK > 0) add_low_rank(acc, ring, strip, epilogue, p, static_cast<const Producer*>(nullptr));
            tile = scheduler.strip_at(position, strip);
            look_at(position + 1);
        } else {
            multiply<Producer>(acc, ring, strip, steps, [&](int left) {
                parts.run(left);
                if (left == (Epilogue::LOOKS_AHEAD ? steps : 1)) {  // no sooner than needed: a tile takes registers
                    if constexpr (!VARLEN_K) tile = scheduler.strip_at(position, strip);
                    epilogue.look_ahead(tile);
                }
                if (left == 1) look_at(position + 1);
            });
        }
#ifdef STORED
        if (strip == 0 && warpgroup_thread() == 0) tell_read<Scheduler::TILE_COLUMNS>(p, tile);
#endif
        if constexpr (VARLEN_K) {
            if (scheduler.is_partial(tile)) {
                MARK(BEGIN, STORE);
                epilogue.store_partial(acc, scheduler.partial(tile));
                MARK(END, STORE);
                continue;
            }
        }
        MARK(BEGIN, HAND_OVER);
        epilogue.hold(acc, tile, ring);
        MARK(END, HAND_OVER);
        parts.start();
    }
    parts.run(1);
    if (warpgroup_thread() == 0) bulk_wait_group<0>();
}

template <class Scheduler, class Producer, class Epilogue>
DEVICE void run(const typename Scheduler::Params& p) {
    static_assert(EPILOGUE_OFFSET + CONSUMERS * Epilogue::SMEM_BYTES <= Scheduler::SMEM_OFFSET,
                  "the stages and the epilogue do not fit");
#ifdef STORED
    if (int(blockIdx.x) < p.decoders) return decode_weights(p, Scheduler::TILE_COLUMNS);
    if (threadIdx.x == 0) known_part() = 0;
#endif
#ifdef SENDS
    send_first(p.sending, p.experts, rows_awaited());
#endif
    if (threadIdx.x == 0) {
        Ring::init();
        Epilogue::init();
    }
    START_TIMELINE();
    if constexpr (CLUSTER > 1) {  // the CTAs of a cluster write into each other's stages
        __syncthreads();
        cluster_sync();
    }
    const Scheduler scheduler(p);

    if (int(threadIdx.x) < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (Producer::WARPS == WARPGROUP_WARPS || threadIdx.x < Producer::WARPS * 32) {
            MARK(BEGIN, PRODUCER);
            Producer::template produce<Epilogue>(p, scheduler);
            MARK(END, PRODUCER);
        } else {
            MARK(BEGIN, EPILOGUE);
            Epilogue::store_staged(p, scheduler);
            MARK(END, EPILOGUE);
        }
    } else if (EPILOGUE_WARPGROUPS && consumer_index() == CONSUMERS) {
        setmaxnreg_dec<EPILOGUE_REGISTERS>();
        MARK(BEGIN, EPILOGUE);
        Epilogue::store_staged(p, scheduler);
        MARK(END, EPILOGUE);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        MARK(BEGIN, CONSUMER);
        consume<Scheduler, Producer, Epilogue>(p, scheduler);
        MARK(END, CONSUMER);
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // no CTA ends while the other may still write to it
}
