// Rows that travel while a product multiplies. Its first CTAs send this rank's tokens to the ranks of their experts, and then take
// tiles like the others, which have copied the rank's own tokens meanwhile. Tiles come expert by expert, and so do the rows: a row
// goes where it is needed first, so that a tile begins once the rows of its expert and of those before it have come.
//
//   rank 0   CTA 0   | rows for rank 1's experts 0, 1 | for 2, 3 | ......... | tile 232 of expert 3 | tile 364 ...
//            CTA 16  | own rows | wait | tile 0 of expert 0  | tile 116 ...
//                                    ^
//   rank 1   CTA 0   | rows for rank 0's experts 0, 1 | for 2, 3 | ......... | ...       each warp counts in rank 0's memory
//
// A rank's experts are in GROUPS groups, of which each but the first two is twice as long as the one before: tiles of the first can
// begin soon, and a warp has few waits for its stores. Each rank that sends has a count for each group: of its warps that have stored
// their rows for it. Counts only grow, by as many warps a sending, and a launch knows from Progress how many sendings there were.
//
// CTAs that send come `late` rounds late to the tiles (tiles.cuh), by the host's estimate; a bad one costs time alone.
#pragma once
#include "meeting.cuh"

constexpr int SENDING_WARPS = 12;    // of a CTA, that move rows
constexpr int GROUPS = 6;            // of a rank's experts
constexpr int CHUNKS_UNDER_WAY = 8;  // 16 bytes each, of a lane

struct Sending {
    Meeting meeting;
    const char* rows;    // (tokens, row_bytes) of this rank
    const int* line;     // token (ranks - 1) + slot, in the order in which rows go: to rank (this + 1 + slot) % ranks
    const int* begins;   // (experts (ranks - 1) + 1,) where in it the rows begin that an expert of a slot's rank needs first
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
    const int in_first = experts_in_first_group(experts), all = load_s32(s.begins + experts * slots);
    const int end_of_group = load_s32(s.begins + min(in_first << min(lane, GROUPS), experts) * slots);  // lane: the group
    int i = worker, entry = i < all ? load_s32(s.line + i) : 0;
    for (int group = 0; group == 0 || in_first << (group - 1) < experts; ++group) {
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

// By the whole CTA, before it takes tiles. number: where it keeps which sending this is, of those with tiles that wait.
DEVICE void send_first(const Sending& s, int experts, uint32_t& number) {
    const Meeting& m = s.meeting;
    const int warp = threadIdx.x / 32, senders = int(s.senders), cta = blockIdx.x;
    if (threadIdx.x == 0) number = m.progress->sends + 1;
    if (cta < senders) {
        begin_exchange(m);
        if (warp < SENDING_WARPS) send_rows(s, experts, cta * SENDING_WARPS + warp, senders * SENDING_WARPS);
        // As many as the blocks of other exchanges: their waits count all.
        if (cta == 0 && threadIdx.x < m.ranks)
            add_release_sys(&m.flags(threadIdx.x)->arrived[m.rank], uint32_t(s.blocks));
    } else if (warp < SENDING_WARPS) {
        const int workers = (int(gridDim.x) - senders) * SENDING_WARPS;
        for (int token = (cta - senders) * SENDING_WARPS + warp; token < s.tokens; token += workers)
            copy_row(s, token, int(m.rank));
        __syncwarp();
        if (s.awaited && threadIdx.x % 32 == 0) add_release_gpu(count_of(s, int(m.rank), int(m.rank), 0), 1);
    }
    __syncthreads();
    // The last CTA that has read the progress changes it.
    if (threadIdx.x == 0 && increment_acq_rel(&m.progress->ended, gridDim.x - 1) == gridDim.x - 1) {
        m.progress->epoch += 1;
        m.progress->sends += s.awaited != 0;
    }
}

// By a warp: the rows that tiles of this expert gather have come.
DEVICE void wait_for_rows(const Sending& s, int expert, int experts, uint32_t number) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32;
    const bool own = lane == m.rank;
    const uint32_t ctas = own ? gridDim.x - uint32_t(s.senders) : uint32_t(s.senders);
    if (lane < m.ranks)
        wait_until(count_of(s, int(m.rank), lane, own ? 0 : group_of(expert, experts)),
                   number * ctas * SENDING_WARPS, m.patience_ns);
    __syncwarp();
}
