// combine: out[t, :] = sum over the pairs p of token t, in slot order, of scores[p] * y[row of p, :]
//
//   y       (R, d)  bf16   one row a pair, in expert order
//   scores  (P,)    fp32   HAS_SCORES 1: Y to O.  HAS_SCORES 0 sums the rows as they are: dX~ to dX
//   out     (T, d)  bf16   fp32 sums, rounded once
//
// The last line of the paper's Algorithm 1 forward, and of its backward. Memory-bound: its floor is (R + T) * d * 2 bytes at the
// memory's speed. A token belongs to LANES threads, a thread to VECTORS chunks of 8 columns, and a thread asks for
// all its chunks of all K rows before it adds any. The next token's row numbers travel meanwhile:
//
//   rows of token i      ----.                    ----.
//   K row chunks             '-------- add, store     '-------- add, store
//   rows of token i+1         ----                     ----
//
// A pair without a row (-1: its expert lives elsewhere) adds nothing. Sums are the same, to the bit, for any grid.
//
// -D: TOP_K       pairs of a token: p = t * TOP_K + slot. 0: they vary, token t has pairs token_offsets[t] to [t + 1]
//     HAS_SCORES  0 or 1
//     LANES       threads that share a token, a power of two, at most THREADS
//     VECTORS     16-byte chunks of a row that a thread takes, LANES chunks apart
//     THREADS     threads in a block
#include "ptx.cuh"

constexpr int CHUNK = 8;  // bf16 columns in 16 bytes
constexpr int GROUP = 0 < TOP_K && TOP_K <= 16 ? TOP_K : 8;  // pairs whose rows are in flight together
constexpr bool ONE_GROUP = GROUP == TOP_K;
constexpr int TOKENS = THREADS / LANES;  // that a block works on at a time
constexpr int BLOCKS_PER_SM = 512 / THREADS;  // room for 128 registers: with fewer, ptxas moves loads behind sums to save some

static_assert(THREADS % LANES == 0 && (LANES & (LANES - 1)) == 0, "a token's threads are a power of two, within a block");

struct Pairs {
    int64_t begin, end;
};

DEVICE Pairs pairs_of(int64_t token, const int* token_offsets) {
    if (TOP_K > 0) return {token * TOP_K, token * TOP_K + TOP_K};
    return {token_offsets[token], token_offsets[token + 1]};
}

DEVICE void load_rows(int (&row)[GROUP], const int* token_index_map, int64_t begin, int64_t end) {
#pragma unroll
    for (int k = 0; k < GROUP; ++k) row[k] = ONE_GROUP || begin + k < end ? __ldg(token_index_map + begin + k) : -1;
}

// 16 bytes of a row, or zeros. A row is read once: not worth a place in L1. volatile: keeps all loads ahead of the sums.
DEVICE uint4 load_chunk(const bf16* address, bool wanted) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(__cvta_generic_to_global(address)), "r"(int(wanted)));
    return v;
}

DEVICE void add(float (&sum)[CHUNK], uint4 y, float weight) {
    const uint32_t two_columns[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += weight * bf16_low(two_columns[i]);
        sum[2 * i + 1] += weight * bf16_high(two_columns[i]);
    }
}

DEVICE uint4 round(const float (&sum)[CHUNK]) {
    return make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                      pack_bf16(sum[6], sum[7]));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
combine(const bf16* y, const float* scores, const int* token_index_map, const int* token_offsets, bf16* out,
        int64_t num_tokens, int64_t d) {
    const int64_t first_column = (int64_t(blockIdx.y) * VECTORS * LANES + threadIdx.x % LANES) * CHUNK;
    const int64_t stride = int64_t(gridDim.x) * TOKENS;
    int64_t token = int64_t(blockIdx.x) * TOKENS + threadIdx.x / LANES;
    if (token >= num_tokens) return;

    Pairs pairs = pairs_of(token, token_offsets);
    int row[GROUP];
    load_rows(row, token_index_map, pairs.begin, pairs.end);

    for (; token < num_tokens; token += stride) {
        float sum[VECTORS][CHUNK] = {};
        bool last_group;
        do {
            // Ask for everything...
            float weight[GROUP];
#pragma unroll
            for (int k = 0; k < GROUP; ++k)
                weight[k] = !HAS_SCORES ? 1.f : ONE_GROUP || row[k] >= 0 ? __ldg(scores + pairs.begin + k) : 0.f;
            uint4 y_chunk[GROUP][VECTORS];
#pragma unroll
            for (int k = 0; k < GROUP; ++k) {
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const int64_t column = first_column + v * LANES * CHUNK;
                    y_chunk[k][v] = load_chunk(y + row[k] * d + column, row[k] >= 0 && column < d);
                }
                if (row[k] < 0) weight[k] = 0;  // whatever the score: 0 * NaN is NaN
            }
            // ... and for the numbers of the rows that come next (past the last token: for that token's again) ...
            pairs.begin += GROUP;
            last_group = ONE_GROUP || pairs.begin >= pairs.end;
            if (last_group) pairs = pairs_of(min(token + stride, num_tokens - 1), token_offsets);
            load_rows(row, token_index_map, pairs.begin, pairs.end);
            // ... before using any.
#pragma unroll
            for (int k = 0; k < GROUP; ++k) {
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) add(sum[v], y_chunk[k][v], weight[k]);
            }
        } while (!last_group);

#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t column = first_column + v * LANES * CHUNK;
            if (column < d) *reinterpret_cast<uint4*>(out + token * d + column) = round(sum[v]);
        }
    }
}
