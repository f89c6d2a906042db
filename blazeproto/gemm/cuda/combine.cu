// combine: out[t, :] = sum over the pairs p of token t, in slot order, of scores[p] * y[row of p, :]
//
//   y       (R, d)  bf16   a row for each pair, in expert order
//   scores  (P,)    fp32   HAS_SCORES 1: Y to O.  HAS_SCORES 0 sums the rows as they are: dX~ to dX
//   out     (T, d)  bf16   fp32 sums, rounded once; out_stride elements from one token to the next, so that it may be
//                          some columns of a wider matrix
//
// The sum over experts: MoEBlaze sections 2.3 and 3.1 ("Output Aggregation") forward, 3.2 ("Token Gradient Accumulation")
// backward; SonicMoE's expert aggregation. The paper's Algorithm 1 leaves it out.
//
//   y rows of token t   | ... chunk c ... |  \
//   (K of them)         | ... chunk c ... |   +-- times scores, sum, round --> out   | ... chunk c ... |
//                       | ... chunk c ... |  /
//
// LANES threads compute a token's columns. A thread has VECTORS chunks, which lie LANES chunks apart.
//
// A thread loads its chunks of GROUP rows before it adds any: of all K rows if K is fixed and at most 16, else of 8 at a time.
// No thread goes on to another token: while one block ends, others on its multiprocessor have loads under way.
//
// A pair without a row (-1: its expert lives elsewhere) adds nothing.
//
// Floor: 2 (R + T) d bytes / 4.24 TB/s.
//
// -D: TOP_K       pairs of a token: p = t * TOP_K + slot. 0: they vary, token t has pairs token_offsets[t] to [t + 1]
//     HAS_SCORES  0 or 1
//     LANES       threads that have a token, a power of two, at most THREADS
//     VECTORS     16-byte chunks of a row that a thread takes
//     THREADS     threads in a block
#include "ptx.cuh"

constexpr int GROUP = 0 < TOP_K && TOP_K <= 16 ? TOP_K : 8;  // pairs whose rows are in flight together
constexpr bool ONE_GROUP = GROUP == TOP_K;
constexpr int TOKENS = THREADS / LANES;  // of a block
constexpr int BLOCKS_PER_SM = 512 / THREADS;  // room for 128 registers: with fewer, ptxas moves loads behind sums to save some

static_assert(THREADS % LANES == 0 && (LANES & (LANES - 1)) == 0, "a token's threads are a power of two, within a block");

#include "row_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
combine(const bf16* y, const float* scores, const int* token_index_map, const int* token_offsets, bf16* out,
        int64_t num_tokens, int64_t d, int64_t out_stride) {
    const int64_t first_column = (int64_t(blockIdx.y) * VECTORS * LANES + threadIdx.x % LANES) * CHUNK;
    const int64_t token = int64_t(blockIdx.x) * TOKENS + threadIdx.x / LANES;
    if (token >= num_tokens) return;
    int64_t pair = TOP_K > 0 ? token * TOP_K : token_offsets[token];
    const int64_t end = TOP_K > 0 ? pair + TOP_K : token_offsets[token + 1];

    float sum[VECTORS][CHUNK] = {};
    for (; pair < end; pair += GROUP) {
        int row[GROUP];
        float weight[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const bool present = ONE_GROUP || pair + k < end;
            row[k] = present ? __ldg(token_index_map + pair + k) : -1;
            weight[k] = !HAS_SCORES ? 1.f : present ? __ldg(scores + pair + k) : 0.f;
        }
        uint4 y_chunk[GROUP][VECTORS];
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t column = first_column + v * LANES * CHUNK;
                y_chunk[k][v] = load_chunk(y + row[k] * d + column, row[k] >= 0 && column < d);
            }
            if (row[k] < 0) weight[k] = 0;  // its score may be NaN, and 0 * NaN is NaN
        }
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) add(sum[v], y_chunk[k][v], weight[k]);
        }
        if (ONE_GROUP) break;
    }

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = first_column + v * LANES * CHUNK;
        if (column < d) *reinterpret_cast<uint4*>(out + token * out_stride + column) = pack_chunk(sum[v]);
    }
}
