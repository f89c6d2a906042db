// Rows that travel while a product multiplies: its first CTAs send this rank's tokens to the ranks of their experts, and then take
// tiles like the others. Tiles come expert by expert, and so do the rows: a row goes where it is first needed, so that a tile
// begins once the rows of its expert and of those before it have come.
//
//   rank 0   CTA 0   | rows for experts 0, 1 | for 2, 3 | ...... | tile 61 | tile 73 | ...
//            CTA 16  | wait | tile 16 of expert 1  | tile 29 of expert 2   | tile 40 ...
//                        ^                            ^
//   rank 1   CTA 0   | rows for experts 0, 1 | for 2, 3 | ...... | tile 60 | ...         each warp counts in rank 0's memory
//
// GROUPS groups of a rank's experts have a count of each rank that sends: of its warps that have stored their rows for the group.
// Counts only grow, by as many warps a sending, and a launch knows from Progress how many sendings there were.
//
// Needs a kernel with TICKETS: CTAs that send come late to the tiles.
#pragma once
#include "meeting.cuh"

constexpr int SENDING_WARPS = 12;  // of a CTA that sends
constexpr int GROUPS = 32;         // of a rank's experts; a lane each
constexpr int CHUNKS_UNDER_WAY = 8;  // 16 bytes each, of a lane

struct Sending {
    Meeting meeting;
    const char* rows;    // (tokens, row_bytes) of this rank
    const int* line;     // token ranks + slot, in the order in which rows go: to rank (this + 1 + slot) % ranks
    const int* begins;   // (experts ranks + 1,) where in it the rows begin that an expert of a slot's rank needs first
    int64_t row_bytes, max_tokens;
    int64_t rows_at, counts_at;  // in each rank's memory, bytes: (ranks, max_tokens, row_bytes); (ranks, GROUPS)
    int64_t senders;     // CTAs that send, the same on all ranks
    int64_t blocks;      // of the grids of other exchanges
    int64_t awaited;     // whether tiles wait for the rows
};

DEVICE int experts_in_group(int experts) { return (experts + GROUPS - 1) / GROUPS; }

DEVICE uint32_t* count_of(const Sending& s, int at, int from, int group) {
    return reinterpret_cast<uint32_t*>(s.meeting.at(at, s.counts_at)) + from * GROUPS + group;
}

// By a warp, all of whose lanes have the same arguments.
DEVICE void copy_row(const char* row, char* to, int64_t bytes) {
    for (int64_t first = threadIdx.x % 32 * CHUNK_BYTES; first < bytes; first += CHUNKS_UNDER_WAY * 32 * CHUNK_BYTES) {
        uint4 v[CHUNKS_UNDER_WAY];
#pragma unroll
        for (int i = 0; i < CHUNKS_UNDER_WAY; ++i)
            if (const int64_t at = first + i * 32 * CHUNK_BYTES; at < bytes) v[i] = load_16(row + at);
#pragma unroll
        for (int i = 0; i < CHUNKS_UNDER_WAY; ++i)
            if (const int64_t at = first + i * 32 * CHUNK_BYTES; at < bytes) store_16(to + at, v[i]);
    }
}

// By a warp of a CTA that sends: every so many-th row of the line, and after each group of experts a count.
DEVICE void send_share(const Sending& s, int experts) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32, ranks = int(m.ranks), rank = int(m.rank), in_group = experts_in_group(experts);
    const int workers = int(s.senders) * SENDING_WARPS, all = load_s32(s.begins + experts * ranks);
    const int end_of_group = load_s32(s.begins + min((lane + 1) * in_group, experts) * ranks);  // lane: the group
    int i = int(blockIdx.x) * SENDING_WARPS + int(threadIdx.x) / 32;
    int entry = i < all ? load_s32(s.line + i) : 0;
    for (int group = 0; group * in_group < experts; ++group) {
        const int end = __shfl_sync(~0u, end_of_group, group);
        for (; i < end; i += workers) {
            const int token = entry / ranks, peer = (rank + 1 + entry % ranks) % ranks;
            if (i + workers < all) entry = load_s32(s.line + i + workers);  // comes while this row is copied
            copy_row(s.rows + token * s.row_bytes, m.at(peer, s.rows_at + (rank * s.max_tokens + token) * s.row_bytes),
                     s.row_bytes);
        }
        __syncwarp();
        if (s.awaited && lane < ranks) add_release_sys(count_of(s, lane, rank, group), 1);
    }
}

// By the whole CTA, before it takes tiles. awaited: where it keeps what counts must come to.
DEVICE void send_first(const Sending& s, int experts, uint32_t& awaited) {
    const Meeting& m = s.meeting;
    if (threadIdx.x == 0) awaited = (m.progress->sends + 1) * uint32_t(s.senders) * SENDING_WARPS;
    if (int(blockIdx.x) < s.senders) {
        begin_exchange(m);
        if (int(threadIdx.x) / 32 < SENDING_WARPS) send_share(s, experts);
        // As many as the blocks of other exchanges: their waits count all.
        if (blockIdx.x == 0 && threadIdx.x < m.ranks)
            add_release_sys(&m.flags(threadIdx.x)->arrived[m.rank], uint32_t(s.blocks));
    }
    __syncthreads();
    // The last CTA that has read the progress changes it.
    if (threadIdx.x == 0 && increment_acq_rel(&m.progress->ended, gridDim.x - 1) == gridDim.x - 1) {
        m.progress->epoch += 1;
        m.progress->sends += s.awaited != 0;
    }
}

// By a warp: the rows that tiles of this expert gather have come.
DEVICE void wait_for_rows(const Sending& s, int expert, int experts, uint32_t awaited) {
    const Meeting& m = s.meeting;
    const int lane = threadIdx.x % 32;
    if (lane < m.ranks)
        wait_until(count_of(s, int(m.rank), lane, expert / experts_in_group(experts)), awaited, m.patience_ns);
    __syncwarp();
}
