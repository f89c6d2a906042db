// Rows that travel while a product multiplies. Its first CTAs send this rank's tokens to the ranks of their experts, and then take
// tiles like the others, which have copied the rank's own tokens meanwhile. Tiles come expert by expert, and rows by groups of
// experts: a row goes with the first group that needs it, and a tile begins once the rows of its group and of those before it have
// come.
//
//   rank 0   CTA 0   | rows for rank 1's experts 0, 1 | for 2, 3 | ......... | tile 232 of expert 3 | tile 364 ...
//            CTA 16  | own rows | wait | tile 0 of expert 0  | tile 116 ...
//                                    ^
//   rank 1   CTA 0   | rows for rank 0's experts 0, 1 | for 2, 3 | ......... | ...       each warp counts in rank 0's memory
//
// A rank's experts are in GROUPS groups, of which each but the first two is twice as long as the one before: tiles of the first can
// begin soon, and a warp has few waits for its stores. Each rank that sends has a count for each group: of its warps that have stored
// their rows for it. The rank's own rows, which CTAs take by tickets, count in the first. Counts only grow; Progress says from where on.
//
// CTAs that send come `late` rounds late to the tiles (tiles.cuh), by the host's estimate; a bad one costs time alone.
#pragma once
#include "meeting.cuh"

constexpr int SENDING_WARPS = 12;    // of a CTA, that move rows
constexpr int GROUPS = 6;            // of a rank's experts
constexpr int CHUNKS_UNDER_WAY = 8;  // 16 bytes each, of a lane
constexpr int OWN_ROWS = 2;          // of a ticket

struct Sending {
    Meeting meeting;
    const char* rows;    // (tokens, row_bytes) of this rank
    const int* line;     // token (ranks - 1) + slot, in the order in which rows go: to rank (this + 1 + slot) % ranks
    const int* begins;   // (GROUPS (ranks - 1) + 1,) where in it the rows begin that a group of a slot's rank needs first
    int64_t tokens, row_bytes, max_tokens;
    int64_t rows_at, counts_at;  // in each rank's memory, bytes: (ranks, max_tokens, row_bytes); (ranks, GROUPS)
    int64_t blocks;              // of the grids of other exchanges
    int64_t awaited;             // whether tiles wait for the rows
    int64_t senders;             // CTAs that send, the same on all ranks
    int64_t late;                // rounds of tiles without them
};

DEVICE int experts_in_first_group(int experts) { return (experts + (1 << (GROUPS - 1)) - 1) >> (GROUPS - 1); }
DEVICE int group_of(int expert, int experts) { return 32 - __clz(expert / experts_in_first_group(experts)); }

DEVICE uint32_t* count_of(const Sending& s, int at, int from, int group) {
    return reinterpret_cast<uint32_t*>(s.meeting.at(at, s.counts_at)) + from * GROUPS + group;
}

// By a warp, to the place that a token of this rank has on a rank.
DEVICE void copy_row(const Sending& s, int token, int peer) {
    const char* row = s.rows + token * s.row_bytes;
    char* to = s.meeting.at(peer, s.rows_at + (s.meeting.rank * s.max_tokens + token) * s.row_bytes);
    for (int64_t first = threadIdx.x % 32 * CHUNK_BYTES; first < s.row_bytes; first += CHUNKS_UNDER_WAY * 32 * CHUNK_BYTES) {
        uint4 v[CHUNKS_UNDER_WAY];
#pragma unroll
        for (int i = 0; i < CHUNKS_UNDER_WAY; ++i)
            if (const int64_t at = first + i * 32 * CHUNK_BYTES; at < s.row_bytes) v[i] = load_16(row + at);
#pragma unroll
        for (int i = 0; i < CHUNKS_UNDER_WAY; ++i)
            if (const int64_t at = first + i * 32 * CHUNK_BYTES; at < s.row_bytes) store_16(to + at, v[i]);
    }
}

// By warp `worker` of `workers`: every so many-th row of the line, and after each group of experts a count.
DEVICE void send_rows(const Sending& s, int experts, int worker, int workers) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32, ranks = int(m.ranks), rank = int(m.rank), slots = ranks - 1;
    const int end_of_group = load_s32(s.begins + min(lane + 1, GROUPS) * slots);  // lane: the group
    const int all = __shfl_sync(~0u, end_of_group, GROUPS - 1), last = group_of(experts - 1, experts);
    int i = worker, entry = i < all ? load_s32(s.line + i) : 0;
    for (int group = 0; group <= last; ++group) {
        const int end = __shfl_sync(~0u, end_of_group, group);
        for (; i < end; i += workers) {
            const int token = entry / slots, peer = (rank + 1 + entry % slots) % ranks;
            if (i + workers < all) entry = load_s32(s.line + i + workers);  // comes while this row is copied
            copy_row(s, token, peer);
        }
        __syncwarp();
        if (s.awaited && lane < ranks && lane != rank) add_release_sys(count_of(s, lane, rank, group), 1);
    }
}

// By a warp: this rank's own rows, a few a ticket, with the warps that come to it.
DEVICE void copy_own_rows(const Sending& s) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32;
    for (;;) {
        int token = lane == 0 ? int(atomicAdd(&m.progress->tickets[0], OWN_ROWS)) : 0;
        token = __shfl_sync(~0u, token, 0);
        if (token >= s.tokens) break;
        const int end = min(token + OWN_ROWS, int(s.tokens)), count = end - token;
        for (; token < end; ++token) copy_row(s, token, int(m.rank));
        __syncwarp();
        if (s.awaited && lane == 0) add_release_gpu(count_of(s, int(m.rank), int(m.rank), 0), count);
    }
}

// The targets of counts: of warps of another rank, and of this rank's own rows.
struct Awaited {
    uint32_t warps, own;
};

// By the whole CTA, before it takes tiles. awaited: where it keeps that.
DEVICE void send_first(const Sending& s, int experts, Awaited& awaited) {
    const Meeting& m = s.meeting;
    const int warp = threadIdx.x / 32, senders = int(s.senders), cta = blockIdx.x;
    if (threadIdx.x == 0)
        awaited = {(m.progress->sends + 1) * uint32_t(senders) * SENDING_WARPS, m.progress->rows + uint32_t(s.tokens)};
    if (cta < senders) {
        begin_exchange(m);
        if (warp < SENDING_WARPS) send_rows(s, experts, cta * SENDING_WARPS + warp, senders * SENDING_WARPS);
        // As many as the blocks of other exchanges: their waits count all.
        if (cta == 0 && threadIdx.x < m.ranks)
            add_release_sys(&m.flags(threadIdx.x)->arrived[m.rank], uint32_t(s.blocks));
    } else if (warp < SENDING_WARPS) {
        copy_own_rows(s);
    }
    __syncthreads();
    // The last CTA that has read the progress, and drawn tickets, changes it.
    if (threadIdx.x == 0 && increment_acq_rel(&m.progress->ended, gridDim.x - 1) == gridDim.x - 1) {
        m.progress->tickets[0] = 0;
        m.progress->epoch += 1;
        if (s.awaited) {
            m.progress->sends += 1;
            m.progress->rows += uint32_t(s.tokens);
        }
    }
}

// By a warp: the rows that tiles of this expert gather have come.
DEVICE void wait_for_rows(const Sending& s, int expert, int experts, const Awaited& awaited) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32;
    const bool own = lane == m.rank;
    if (lane < m.ranks)
        wait_until(count_of(s, int(m.rank), lane, own ? 0 : group_of(expert, experts)), own ? awaited.own : awaited.warps,
                   m.patience_ns);
    __syncwarp();
}
