// add_up: out[t, :] = sum over the ranks r that have experts of token t, in order, of round(sum over its pairs there of S_p y_r)
//
//   y       (R, d)  bf16   on each rank the rows of the pairs that arrived there, in expert order
//   scores  (P,)    fp32   of those pairs: Y to O (HAS_SCORES 1); without them dX~ to dX
//   out     (T, d)  bf16   of this rank's own tokens; a rank's partial sum is rounded to bf16, and so is the sum of them
//
// The sum over experts of combine.cu, over experts of all ranks: a rank sends one partial sum a token back (DeepSeek-V3 §3.2).
//
//   rank 0   y of rank 1's tokens --> partial sums --> rank 1's memory, PART tokens, then a flag
//            y of its own tokens  --> partial sums + those that came, behind their flags --> out
//
// The first of the blocks, one in SENDERS, send parts, in order; the others finish this rank's own tokens, in the same order, so that
// NVLink and the memory are busy at once. Senders then help finish. Both queues use tickets. Senders never
// block, so every wait is satisfied.
//
// Floor: the larger of 2 (R + 2 T) d bytes / the memory's speed and the bytes of partial sums that leave / NVLink's rate.
//
// LANES threads compute a token's columns, a chunk at a time, and load it of all rows before they add any.
//
// -D: VARYING     1: a token's pairs are token_offsets[t] to [t + 1].  0: there are top_k a token
//     GROUP       pairs whose rows are in flight together
//     LANES       threads that have a token, a power of two, at most THREADS
//     HAS_SCORES  0 or 1
//     PART        tokens between two flags
//     SENDERS     see above
//     THREADS     threads in a block
//     BLOCKS_PER_SM  that have registers at once
#include "meeting.cuh"
#include "row_sum.cuh"

static_assert(THREADS % LANES == 0 && (LANES & (LANES - 1)) == 0, "a token's threads are a power of two, within a block");

struct AddUpParams {
    Meeting meeting;
    const bf16* y;
    const float* scores;
    const int* token_index_map;  // of the pairs that arrived, (P,)
    const int* token_offsets;    // where they vary: (ranks max_tokens + 1,), else null
    const int* token_ranks;      // (tokens,) of this rank's own
    bf16* out;                   // at the first of the columns
    int64_t tokens, max_tokens, top_k;
    int64_t columns, row_columns;   // of y; of out and of a partial sum
    int64_t dropping;  // whether pairs without a row may be here: what has none is then sent as zeros, else not at all
    int64_t sums_at, part_flags_at;  // in each rank's memory, bytes: (ranks - 1, max_tokens, row_columns) at the first of
                                     // the columns, in order of the ranks that send; (ranks, parts)
};

// A chunk of columns of a token's sum over the rows that this rank has of it. Returns whether there are any.
DEVICE bool sum_here(const AddUpParams& p, int64_t token, int64_t column, float (&sum)[CHUNK]) {
    int64_t pair = VARYING ? p.token_offsets[token] : token * p.top_k;
    const int64_t end = VARYING ? p.token_offsets[token + 1] : pair + p.top_k;
    bool any = false;
    for (; pair < end; pair += GROUP) {
        int row[GROUP];
        uint4 y_chunk[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; ++k) row[k] = pair + k < end ? load_s32(p.token_index_map + pair + k) : -1;
#pragma unroll
        for (int k = 0; k < GROUP; ++k) y_chunk[k] = load_chunk(p.y + row[k] * p.columns + column, row[k] >= 0);
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            if (row[k] < 0) continue;
            any = true;
            add(sum, y_chunk[k], HAS_SCORES ? load_f32(p.scores + pair + k) : 1.f);
        }
    }
    return any;
}

DEVICE uint32_t* part_flag(const AddUpParams& p, int peer, int from, int64_t part) {
    const int64_t parts = (p.max_tokens + PART - 1) / PART;
    return reinterpret_cast<uint32_t*>(p.meeting.at(peer, p.part_flags_at)) + from * parts + part;
}

// Where rank `from`'s partial sum of a token lies in rank `to`'s memory.
DEVICE bf16* sum_at(const AddUpParams& p, int to, int from, int64_t token) {
    const int64_t place = (from < to ? from : from - 1) * p.max_tokens + token;
    return reinterpret_cast<bf16*>(p.meeting.at(to, p.sums_at)) + place * p.row_columns;
}

DEVICE void send_part(const AddUpParams& p, int peer, int64_t part) {
    const int64_t end = min((part + 1) * PART, p.max_tokens);
    for (int64_t token = part * PART + threadIdx.x / LANES; token < end; token += THREADS / LANES) {
        bf16* to = sum_at(p, peer, int(p.meeting.rank), token);
        for (int64_t column = threadIdx.x % LANES * CHUNK; column < p.columns; column += LANES * CHUNK) {
            float sum[CHUNK] = {};
            if (!sum_here(p, peer * p.max_tokens + token, column, sum) && !p.dropping) break;
            store_16(to + column, pack_chunk(sum));
        }
    }
}

DEVICE void finish_part(const AddUpParams& p, int64_t part, uint32_t epoch) {
    const Meeting& m = p.meeting;
    if (part * PART >= p.tokens) return;
    if (threadIdx.x < m.ranks && threadIdx.x != m.rank)
        wait_until(part_flag(p, int(m.rank), threadIdx.x, part), epoch, m.patience_ns);
    __syncthreads();
    const int64_t end = min((part + 1) * PART, p.tokens);
    for (int64_t token = part * PART + threadIdx.x / LANES; token < end; token += THREADS / LANES) {
        const uint32_t ranks = uint32_t(load_s32(p.token_ranks + token));
        for (int64_t column = threadIdx.x % LANES * CHUNK; column < p.columns; column += LANES * CHUNK) {
            float own[CHUNK] = {}, sum[CHUNK] = {};
            if (ranks >> m.rank & 1) sum_here(p, m.rank * p.max_tokens + token, column, own);
            for (uint32_t left = ranks; left; left &= left - 1) {
                const int from = __ffs(left) - 1;
                add(sum, from == m.rank ? pack_chunk(own) : load_16(sum_at(p, int(m.rank), from, token) + column), 1.f);
            }
            store_16(p.out + token * p.row_columns + column, pack_chunk(sum));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) add_up(const __grid_constant__ AddUpParams p) {
    __shared__ uint32_t drawn[2];
    const Meeting& m = p.meeting;
    const uint32_t epoch = begin_exchange(m);
    const uint32_t others = uint32_t(m.ranks) - 1, parts = uint32_t((p.max_tokens + PART - 1) / PART);

    auto part_of = [&](uint32_t ticket) { return ticket / others; };
    auto peer_of = [&](uint32_t ticket) { return int((m.rank + 1 + ticket % others) % m.ranks); };
    // Thread 0 draws a ticket while the one before is worked on.
    auto draw = [&](int kind, int turn) {
        if (threadIdx.x == 0) drawn[turn] = atomicAdd(&m.progress->tickets[kind], 1u);
    };
    const bool sends = blockIdx.x * SENDERS < gridDim.x && others;
    if (sends) {
        draw(1, 0);
        for (int turn = 0;; turn ^= 1) {
            __syncthreads();
            const uint32_t ticket = drawn[turn];
            if (ticket >= parts * others) break;
            draw(1, turn ^ 1);
            send_part(p, peer_of(ticket), part_of(ticket));
            __syncthreads();
            if (threadIdx.x == 0)
                store_release_sys(part_flag(p, peer_of(ticket), int(m.rank), part_of(ticket)), epoch);
        }
        __syncthreads();
    }
    draw(0, 0);
    for (int turn = 0;; turn ^= 1) {
        __syncthreads();
        const uint32_t ticket = drawn[turn];
        if (ticket >= parts) break;
        draw(0, turn ^ 1);
        finish_part(p, ticket, epoch);
    }
    end_exchange(m, epoch, false);
}
