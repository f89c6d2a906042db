// What goes to the ranks of a token's experts: share, send; and the scores' gradients back: send_back.
//
//   share       each rank's expert ids and scores go to all ranks, ids counted from the receiver's first expert
//   send        each token's row goes once to each rank that has any of its experts, an e4m3 row with its scale
//   send_back   the gradient of a pair's score goes from the rank of its expert to the rank of its token
//
// Rank q's tokens have places of their own in every rank's memory, from q max_tokens on, and its pairs from q pairs_of_rank on.
// So nothing has to be counted before it is sent, and a row's place depends on no other token. What is not sent is not read:
// pairs whose expert is elsewhere, and places beyond a rank's last pair, have the id NOWHERE.
//
//   rows in rank 1's memory      | rank 0's tokens            | rank 1's tokens            |      K experts of 4, 2 on each rank
//     tokens with an expert here | 0 .  2 3 .  (not used yet) | 0 1 .  3 4 5               |
//
// Floor of send: bytes of rows that leave the GPU / NVLink's rate one way.
#include "sending.cuh"

constexpr int NOWHERE = -(1 << 30);  // an expert id that is no rank's, also when a rank's first expert is added
constexpr int LOADS = 8;             // 16-byte chunks of a row that a lane has under way

struct ShareParams {
    Meeting meeting;
    const int* experts;        // (pairs,) ids of all ranks' experts
    const float* scores;       // (pairs,)
    const int* pair_tokens;    // (pairs,), and
    const int* token_offsets;  // (tokens + 1,) where the number of experts a token varies, else both null
    int* token_ranks;          // (tokens,) out: bit r: the token has an expert on rank r
    int* first_needed;         // (tokens, ranks - 1) out, or null: g (ranks - 1) + slot, g the first group of a slot's rank that has
                               // an expert of the token (sending.cuh), or -1
    int64_t tokens, pairs;     // of this rank
    int64_t max_tokens, pairs_of_rank;
    int64_t top_k;         // 0 where it varies
    int64_t experts_here;  // experts of one rank
    int64_t experts_at, scores_at, pair_tokens_at, token_offsets_at;  // in each rank's memory, bytes
};

DEVICE int64_t threads_before() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE int64_t threads_in_all() { return int64_t(gridDim.x) * blockDim.x; }

extern "C" __global__ void __launch_bounds__(THREADS) share(const __grid_constant__ ShareParams p) {
    const Meeting& m = p.meeting;
    const uint32_t epoch = begin_exchange(m);
    const int64_t first_pair = m.rank * p.pairs_of_rank, first_token = m.rank * p.max_tokens;

    for (int64_t pair = threads_before(); pair < p.pairs_of_rank; pair += threads_in_all()) {
        const bool there = pair < p.pairs;
        const int expert = there ? load_s32(p.experts + pair) : -1;
        const bool known = expert >= 0 && expert < p.experts_here * m.ranks;
        const float score = there ? load_f32(p.scores + pair) : 0.f;
        const int token = int(first_token) + (there && p.pair_tokens ? load_s32(p.pair_tokens + pair) : 0);
        for (int peer = 0; peer < m.ranks; ++peer) {
            const int id = known ? expert - peer * int(p.experts_here) : NOWHERE;
            reinterpret_cast<int*>(m.at(peer, p.experts_at))[first_pair + pair] = id;
            reinterpret_cast<float*>(m.at(peer, p.scores_at))[first_pair + pair] = score;
            if (p.pair_tokens) reinterpret_cast<int*>(m.at(peer, p.pair_tokens_at))[first_pair + pair] = token;
        }
    }
    for (int64_t token = threads_before(); token < p.max_tokens; token += threads_in_all()) {
        const bool there = token < p.tokens;
        const int64_t begin = p.top_k ? token * p.top_k : p.token_offsets[there ? token : p.tokens];
        const int64_t end = p.top_k ? begin + p.top_k : p.token_offsets[there ? token + 1 : p.tokens];
        if (there) {
            uint32_t ranks = 0;
            for (int64_t pair = begin; pair < end; ++pair) {
                const int expert = load_s32(p.experts + pair);
                if (expert >= 0 && expert < p.experts_here * m.ranks) ranks |= 1u << (expert / int(p.experts_here));
            }
            p.token_ranks[token] = int(ranks);
            const int slots = int(m.ranks) - 1, here = int(p.experts_here);
            for (int slot = 0; p.first_needed && slot < slots; ++slot) {
                const int first = int(m.rank + 1 + slot) % int(m.ranks) * here;
                int least = here;
                for (int64_t pair = begin; pair < end; ++pair) {
                    const int expert = load_s32(p.experts + pair);
                    if (expert >= first) least = min(least, expert - first);
                }
                p.first_needed[token * slots + slot] = least < here ? group_of(least, here) * slots + slot : -1;
            }
        }
        for (int peer = 0; peer < (p.top_k ? 0 : m.ranks); ++peer)
            reinterpret_cast<int*>(m.at(peer, p.token_offsets_at))[first_token + token] = int(first_pair + begin);
    }
    end_exchange(m, epoch, true);
}

struct SendParams {
    Meeting meeting;
    const char* rows;        // (tokens, row_bytes)
    const float* scales;     // (tokens,) of e4m3 rows, else null
    const int* token_ranks;  // (tokens,)
    int64_t tokens, max_tokens, row_bytes;
    int64_t rows_at;  // in each rank's memory: (ranks, max_tokens, row_bytes), then the scales (ranks, max_tokens)
};

extern "C" __global__ void __launch_bounds__(THREADS) send(const __grid_constant__ SendParams p) {
    const Meeting& m = p.meeting;
    const uint32_t epoch = begin_exchange(m);
    const int lane = threadIdx.x % 32;

    for (int64_t token = threads_before() / 32; token < p.tokens; token += threads_in_all() / 32) {
        const uint32_t ranks = uint32_t(load_s32(p.token_ranks + token));
        const char* row = p.rows + token * p.row_bytes;
        const int64_t there = p.rows_at + (m.rank * p.max_tokens + token) * p.row_bytes;
        for (int64_t first = lane * CHUNK_BYTES; first < p.row_bytes; first += LOADS * 32 * CHUNK_BYTES) {
            uint4 v[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int64_t byte = first + i * 32 * CHUNK_BYTES;
                v[i] = byte < p.row_bytes ? load_16(row + byte) : uint4{};
            }
            for (uint32_t left = ranks; left; left &= left - 1) {
                char* to = m.at(__ffs(left) - 1, there);
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const int64_t byte = first + i * 32 * CHUNK_BYTES;
                    if (byte < p.row_bytes) store_16(to + byte, v[i]);
                }
            }
        }
    }
    const int64_t scales_at = p.rows_at + m.ranks * p.max_tokens * p.row_bytes;
    for (int64_t token = threads_before(); p.scales && token < p.tokens; token += threads_in_all()) {
        const uint32_t ranks = uint32_t(load_s32(p.token_ranks + token));
        const float scale = load_f32(p.scales + token);
        for (int peer = 0; peer < m.ranks; ++peer)  // all lanes have the same, so that a warp's stores are neighbours
            if (ranks >> peer & 1) reinterpret_cast<float*>(m.at(peer, scales_at))[m.rank * p.max_tokens + token] = scale;
    }
    end_exchange(m, epoch, true);
}

struct SendBackParams {
    Meeting meeting;
    const float* values;         // (ranks pairs_of_rank,) of the pairs that arrived here
    const uint8_t* here;         // the same: whether the pair's expert is here
    int64_t pairs_of_rank;
    int64_t values_at;  // in each rank's memory: (pairs of that rank,), zeros before
};

extern "C" __global__ void __launch_bounds__(THREADS) send_back(const __grid_constant__ SendBackParams p) {
    const Meeting& m = p.meeting;
    const uint32_t epoch = begin_exchange(m);
    for (int64_t pair = threads_before(); pair < m.ranks * p.pairs_of_rank; pair += threads_in_all()) {
        if (!p.here[pair]) continue;
        const int peer = int(pair / p.pairs_of_rank);
        reinterpret_cast<float*>(m.at(peer, p.values_at))[pair - peer * p.pairs_of_rank] = load_f32(p.values + pair);
    }
    end_exchange(m, epoch, true);
}
