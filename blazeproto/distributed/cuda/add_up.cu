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
// Blocks draw tickets. Parts are sent in order, and LAG parts later this rank's own tokens of the same number are finished: the
// wait for a flag is over by then, NVLink and memory are busy at once, and whatever a block waits for is sent by
// a block of a lower ticket, which waits for nothing.
//
// Floor: the larger of 2 (R + 2 T) d bytes / the memory's speed and the bytes of partial sums that leave / NVLink's rate.
//
// A warp has a token: its lanes keep the rows of the token's pairs, up to 32, and go through the columns together.
//
// -D: VARYING     1: a token's pairs are token_offsets[t] to [t + 1].  0: there are top_k a token
//     GROUP       pairs whose rows are in flight together
//     HAS_SCORES  0 or 1
//     PART        tokens between two flags
//     LAG         parts
//     THREADS     threads in a block
//     BLOCKS_PER_SM  that have registers at once
#include "meeting.cuh"
#include "row_sum.cuh"

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

// The pairs of a token of any rank, as a warp has them.
struct Pairs {
    int64_t begin, end;
    int row;       // of pair begin + lane: -1 where it has none here, or where there is no such pair
    float weight;  // its score

    DEVICE void load(const AddUpParams& p, int64_t from) {
        const int64_t pair = from + threadIdx.x % 32;
        row = pair < end ? load_s32(p.token_index_map + pair) : -1;
        weight = HAS_SCORES && row >= 0 ? load_f32(p.scores + pair) : 1.f;
    }

    DEVICE Pairs(const AddUpParams& p, int64_t token)
        : begin(VARYING ? p.token_offsets[token] : token * p.top_k),
          end(VARYING ? p.token_offsets[token + 1] : begin + p.top_k) {
        load(p, begin);
    }

    // Whether the token has a row here. Of a token with more than 32 pairs this is not asked.
    DEVICE bool any() const { return end - begin > 32 || __any_sync(~0u, row >= 0); }

    // A chunk of columns of the sum over the rows.
    DEVICE void add_to(const AddUpParams& p, int64_t column, float (&sum)[CHUNK]) {
        for (int64_t from = begin; from < end; from += 32) {
            if (end - begin > 32) load(p, from);
            for (int k = 0; k < min(end - from, int64_t(32)); k += GROUP) {
                uint4 y_chunk[GROUP];
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    const int r = k + i < 32 ? __shfl_sync(~0u, row, k + i) : -1;
                    y_chunk[i] = load_chunk(p.y + r * p.columns + column, r >= 0 && column < p.columns);
                }
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (k + i < 32 && __shfl_sync(~0u, row, k + i) >= 0)
                        add(sum, y_chunk[i], HAS_SCORES ? __shfl_sync(~0u, weight, k + i) : 1.f);
                }
            }
        }
    }
};

DEVICE uint32_t* part_flag(const AddUpParams& p, int peer, int from, int64_t part) {
    const int64_t parts = (p.max_tokens + PART - 1) / PART;
    return reinterpret_cast<uint32_t*>(p.meeting.at(peer, p.part_flags_at)) + from * parts + part;
}

// Where rank `from`'s partial sum of a token lies in rank `to`'s memory.
DEVICE bf16* sum_at(const AddUpParams& p, int to, int from, int64_t token) {
    const int64_t place = (from < to ? from : from - 1) * p.max_tokens + token;
    return reinterpret_cast<bf16*>(p.meeting.at(to, p.sums_at)) + place * p.row_columns;
}

DEVICE void send_part(const AddUpParams& p, int peer, int64_t part, uint32_t epoch) {
    const int64_t end = min((part + 1) * PART, p.max_tokens);
    for (int64_t token = part * PART + threadIdx.x / 32; token < end; token += THREADS / 32) {
        Pairs pairs(p, peer * p.max_tokens + token);
        if (!pairs.any() && !p.dropping) continue;
        bf16* to = sum_at(p, peer, int(p.meeting.rank), token);
        for (int64_t first = 0; first < p.columns; first += 32 * CHUNK) {
            const int64_t column = first + threadIdx.x % 32 * CHUNK;
            float sum[CHUNK] = {};
            pairs.add_to(p, column, sum);
            if (column < p.columns) store_16(to + column, round(sum));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) store_release_sys(part_flag(p, peer, int(p.meeting.rank), part), epoch);
}

DEVICE void finish_part(const AddUpParams& p, int64_t part, uint32_t epoch) {
    const Meeting& m = p.meeting;
    if (part * PART >= p.tokens) return;
    if (threadIdx.x < m.ranks && threadIdx.x != m.rank)
        wait_until(part_flag(p, int(m.rank), threadIdx.x, part), epoch, m.patience_ns);
    __syncthreads();
    const int64_t end = min((part + 1) * PART, p.tokens);
    for (int64_t token = part * PART + threadIdx.x / 32; token < end; token += THREADS / 32) {
        Pairs pairs(p, m.rank * p.max_tokens + token);
        const uint32_t ranks = uint32_t(load_s32(p.token_ranks + token));
        for (int64_t first = 0; first < p.columns; first += 32 * CHUNK) {
            const int64_t column = first + threadIdx.x % 32 * CHUNK;
            float own[CHUNK] = {}, sum[CHUNK] = {};
            if (ranks >> m.rank & 1) pairs.add_to(p, column, own);
            if (column >= p.columns) continue;
            for (uint32_t left = ranks; left; left &= left - 1) {
                const int from = __ffs(left) - 1;
                add(sum, from == m.rank ? round(own) : load_16(sum_at(p, int(m.rank), from, token) + column), 1.f);
            }
            store_16(p.out + token * p.row_columns + column, round(sum));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) add_up(const __grid_constant__ AddUpParams p) {
    __shared__ uint32_t drawn;
    const Meeting& m = p.meeting;
    const uint32_t epoch = begin_exchange(m);
    const uint32_t ranks = uint32_t(m.ranks), parts = uint32_t((p.max_tokens + PART - 1) / PART);
    while (true) {
        if (threadIdx.x == 0) drawn = atomicAdd(&m.progress->ticket, 1u);
        __syncthreads();
        const uint32_t step = drawn / ranks, turn = drawn % ranks;
        __syncthreads();  // before the next ticket is drawn
        if (step >= parts + LAG) break;
        if (turn + 1 < ranks) {
            if (step < parts) send_part(p, int((m.rank + 1 + turn) % ranks), step, epoch);
        } else if (step >= LAG) {
            finish_part(p, step - LAG, epoch);
        }
    }
    end_exchange(m, epoch, false);
}
