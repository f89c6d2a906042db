// The tiles of the row products: how the rows of all experts are cut into tiles, and which CTA computes which, in what order.
//
// A tile is BM rows of one expert by COLUMNS columns of the output. CTAs are persistent, one a multiprocessor, and take
// tiles from one list. The list goes expert by expert; within an expert by groups of ROW_GROUP row blocks; within a group
// column by column, and within a column row block by row block. So tiles that read the same rows or weights run close
// together in time, and find them in L2.
//
// CTAs take tiles round robin. With TICKETS, which only kernels that gather have, a strip that lies past the expert's end is
// skipped. Such a half tile takes less time than a whole one, so CTAs would drift apart, and the weights of too many experts
// would be wanted at a time. So whoever is done takes the next tile of the list, by an atomic addition:
//
//   CTA 0   | tile 0      | tile 4      | tile 7 ...
//   CTA 1   | 1    | tile 3      | 6    | tile 8 ...     tiles 1 and 6 are half
//   CTA 2   | tile 2      | tile 5      | tile 9 ...
//
// To find a tile takes a binary search and three divisions, some 700 cycles by estimate; a tile with a short reduction
// takes 4000. So a warp of the producer finds BATCH tiles at a time, one a lane, and writes them to shared memory for all
// warps. With TICKETS it finds one at a time, which long reductions hide (gemm/tiles.py says which launches take them).
//
//   slots    | tiles 0 .. 15 | tiles 16 .. 31 |       then tiles 32 .. 47 in place of 0 .. 15: consumers are at most
//                                                           STAGES tiles behind the producer, the epilogue warps one more
//
// -D: TICKETS    as above
//     CLUSTER    2: CTAs in pairs that share weights (pairs.cuh draws their order)
//     LOW_RANK   above 0: the reduction goes on over contiguous rows of a low rank (varlen_m.cuh)
#pragma once
#include "gather.cuh"
#include "schedule.cuh"

#if CLUSTER > 1
#define IN_PAIRS(...) __VA_ARGS__
#else
#define IN_PAIRS(...)
#endif

constexpr int BATCH = 16;
constexpr int SLOTS_OFFSET = BARRIER_OFFSET - 2 * BATCH * int(sizeof(RowTile));
static_assert(BATCH > STAGES + 3, "a slot is written again only when no warp can still need it");

// COLUMNS: of the output, in a tile. BN, or less where several blocks of weights belong to the same output columns.
template <int COLUMNS>
struct TileScheduler {
    using Params = RowsParams;
    using Tile = RowTile;
    static constexpr int SMEM_OFFSET = SLOTS_OFFSET;  // the schedule takes shared memory from here on
    static constexpr bool VARLEN_K = false, SKIPS = TICKETS;
    static constexpr int TILE_COLUMNS = COLUMNS;

    const RowsParams& p;

    // CTAs that take tiles, and which of them this one is.
#ifdef STORED
    DEVICE int ctas() const { return int(gridDim.x) - p.decoders; }
    DEVICE int cta() const { return int(blockIdx.x) - p.decoders; }
#else
    DEVICE static int ctas() { return gridDim.x; }
    DEVICE static int cta() { return blockIdx.x; }
#endif

    // The index in the list of this CTA's tile at `position`. CTAs that send rows begin some rounds later (sending.cuh).
#ifdef SENDS
    static_assert(!TICKETS, "CTAs take tiles round robin");
    DEVICE int index_at(int position) const {
        const Sending& s = p.sending;
        const int senders = int(s.senders), late = int(s.late), early = int(gridDim.x) - senders;
        if (int(blockIdx.x) < senders) position += late;
        return position < late ? position * early + int(blockIdx.x) - senders
                               : late * early + (position - late) * int(gridDim.x) + int(blockIdx.x);
    }
#else
    DEVICE int index_at(int position) const { return cta() + position * ctas(); }
#endif

    // By the whole CTA.
    DEVICE explicit TileScheduler(const RowsParams& params) : p(params) {
        const int* offsets = p.offsets;
#if CLUSTER > 1
        const int columns = column_blocks();
        sum_before_experts(p.experts, [=](int e) {
            const int blocks = (offsets[e + 1] - offsets[e] + BM - 1) / BM;
            return blocks / 2 * columns + blocks % 2 * ((columns + 1) / 2);
        });
#else
        sum_before_experts(p.experts, [=](int e) { return (offsets[e + 1] - offsets[e] + BM - 1) / BM; });
#endif
        if (threadIdx.x == 0) count() = own_tiles();
        __syncthreads();
        if constexpr (TICKETS) {
            if (threadIdx.x == 0) slots()[0] = find_or_end(cta());
            __syncthreads();
        }
    }

    // Of this CTA's tiles, without TICKETS. In shared memory, because consumers are short of registers.
    DEVICE static int& count() { return before_expert()[MAX_EXPERTS + 1]; }

    // Whether this CTA has a `position`-th tile. With TICKETS its slot says so.
    DEVICE bool has(int position) const { return TICKETS ? at(position).expert >= 0 : position < count(); }

    // Steps of the reduction, the same for every tile.
    DEVICE int steps() const { return (p.reduction + BK - 1) / BK + (LOW_RANK ? (p.rank + BK - 1) / BK : 0); }

    // Whether the producer has to find tiles before it reads the one at `position`.
    DEVICE static bool begins_batch(int position) { return TICKETS ? position > 0 : position % BATCH == 0; }

    // By the producer's first warp, at its start: the ticket of this CTA's second tile.
    DEVICE uint32_t first_ticket() const { return TICKETS && threadIdx.x == 0 && has(0) ? take_ticket() : 0; }

    // By the producer's first warp, where `position` begins a batch: finds this CTA's tiles from there on. With TICKETS it does
    // so before it loads the tile before that: who has seen a stage of a tile may read the slot of the next one.
    DEVICE void fill_slots(int position, uint32_t& ticket) const {
        MARK(BEGIN, SCHEDULE);
        if constexpr (TICKETS) {
            if (threadIdx.x == 0) {
                const RowTile tile = slots()[position % (2 * BATCH)] = find_or_end(ctas() + ticket);
                if (tile.expert >= 0) ticket = take_ticket();  // arrives while a tile is loaded
            }
        } else {
            const int mine = position + threadIdx.x;
            if (threadIdx.x < BATCH && mine < count()) slots()[mine % (2 * BATCH)] = find(index_at(mine));
        }
        __syncwarp();
        MARK(END, SCHEDULE);
    }

    // The `position`-th tile of this CTA, once its slot is filled.
    DEVICE RowTile at(int position) const {
        const int4 tile = *reinterpret_cast<const int4*>(slots() + position % (2 * BATCH));
        return {tile.x, tile.y, tile.z, tile.w};
    }

    // The same, from the first row of this consumer's strip on.
    DEVICE RowTile strip_at(int position, int) const {
        RowTile tile = at(position);
        tile.row += consumer_index() * STRIP;  // computed anew: this takes no register during the mainloop
        return tile;
    }

    // Whether a strip of a tile is computed.
    DEVICE static bool computes(const RowTile& tile, int strip) { return !SKIPS || tile.row + strip * STRIP < tile.row_end; }

   private:
    DEVICE static RowTile* slots() { return reinterpret_cast<RowTile*>(shared_memory() + SLOTS_OFFSET); }
    DEVICE int column_blocks() const { return (p.columns + COLUMNS - 1) / COLUMNS; }

    DEVICE int tiles() const { return before_expert()[p.experts] * (CLUSTER > 1 ? CLUSTER : column_blocks()); }

#ifdef SENDS
    DEVICE int own_tiles() const {
        const Sending& s = p.sending;
        const int senders = int(s.senders), late = int(s.late), early = int(gridDim.x) - senders, left = tiles() - late * early;
        const int after = max(0, (left - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x));
        if (int(blockIdx.x) < senders) return after;
        return after + min(late, (tiles() - int(blockIdx.x) + senders + early - 1) / early);
    }
#elif CLUSTER > 1
    DEVICE int own_tiles() const {
        const int clusters = gridDim.x / CLUSTER;
        return (before_expert()[p.experts] - int(blockIdx.x) / CLUSTER + clusters - 1) / clusters;
    }
#else
    DEVICE int own_tiles() const { return (tiles() - cta() + ctas() - 1) / ctas(); }
#endif

    // The first tile of a CTA needs no ticket, and its last ticket is for no tile. So as many are taken as there are tiles,
    // after which the counter is zero again.
    DEVICE uint32_t take_ticket() const { return atomicInc(p.tickets, tiles() - 1); }

    DEVICE RowTile find_or_end(int index) const { return index < tiles() ? find(index) : RowTile{-1, 0, 0, 0}; }

#if CLUSTER > 1
    // The tile at `index` of the list of units, of which each CTA of a cluster has one. A tile that is not there lies past the
    // expert's end.
    DEVICE RowTile find(int index) const {
        const int* units = before_expert();
        const int unit = index / CLUSTER, rank = index % CLUSTER, columns = column_blocks();
        const int low = expert_at(unit, p.experts), begin = p.offsets[low], end = p.offsets[low + 1];
        const int local = unit - units[low], blocks = (end - begin + BM - 1) / BM, pairs = blocks / 2;
        if (local < pairs * columns) {
            constexpr int GROUP = ROW_GROUP / 2;
            const int group = local / (GROUP * columns);
            const int in_group = local - group * GROUP * columns;
            const int group_pairs = min(GROUP, pairs - group * GROUP);
            const int row_block = 2 * (group * GROUP + in_group % group_pairs) + rank;
            return {low, begin + row_block * BM, end, in_group / group_pairs * COLUMNS};
        }
        const int column_block = 2 * (local - pairs * columns) + rank;
        return {low, column_block < columns ? begin + (blocks - 1) * BM : end, end, column_block * COLUMNS};
    }

   public:
    // Whether the other CTA of the cluster has the same expert's and columns' weights.
    DEVICE bool shares(const RowTile& tile) const {
        if (blockIdx.x % CLUSTER == 0) return tile.row + BM < tile.row_end;
        return tile.row < tile.row_end && (tile.row - p.offsets[tile.expert]) / BM % 2 == 1;
    }
#else
    DEVICE RowTile find(int index) const { return row_tile_at(p, index, COLUMNS); }
#endif
};
