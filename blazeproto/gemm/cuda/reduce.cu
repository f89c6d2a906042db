// The small sums beside the products: gradients of the scores and of the biases. Memory-bound, deterministic.
//
//   reduce_scores_grad       dS[p] = sum over j of partial[j, row of p]       partial (J, R) fp32, a line for each column tile
//   bias_score_grad          dS[p] += <dO[token of p], b_down[expert of p]>   what a down bias adds to the score's gradient
//   expert_row_sum           sums[e] = sum of an expert's rows (R, m) bf16, or of its tokens' rows (T, m) weighted by scores:
//   expert_row_sum_finish      partial sums, and then their sums
//
// dS = <dA', act> is SonicMoE's (Algorithm 3 and appendix D). MoEBlaze's Algorithm 1 leaves scores out; neither paper has
// biases.
//
// Floor: the bytes that are read and written / 4.24 TB/s.
//
// -D: TOP_K    pairs of a token: token = p / TOP_K. 0: they vary, token = pair_tokens[p]
//     THREADS  threads in a block
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;

DEVICE int64_t token_of(int pair, const int* pair_tokens) { return TOP_K > 0 ? pair / max(TOP_K, 1) : pair_tokens[pair]; }

// The expert whose rows include `row`: the last e with offsets[e] <= row.
DEVICE int expert_of(int row, const int* offsets, int num_experts) {
    int low = 0, high = num_experts;  // offsets[low] <= row < offsets[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (__ldg(offsets + middle) <= row ? low : high) = middle;
    }
    return low;
}

DEVICE uint4 load_chunk(const bf16* address) { return __ldg(reinterpret_cast<const uint4*>(address)); }

// ---- reduce_scores_grad: a thread a pair ------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_scores_grad(const float* partial, const int* token_index_map, float* d_scores, int64_t lines, int64_t num_rows,
                   int64_t num_pairs) {
    const int64_t pair = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (pair >= num_pairs) return;
    const int row = token_index_map[pair];
    float sum = 0;
    if (row >= 0) {
#pragma unroll 4
        for (int64_t j = 0; j < lines; ++j) sum += __ldg(partial + j * num_rows + row);
    }
    d_scores[pair] = sum;
}

// ---- bias_score_grad: a warp a token; lane k first finds the expert of the token's k-th pair --------------------------
extern "C" __global__ void __launch_bounds__(THREADS)
bias_score_grad(const bf16* d_out, const bf16* bias, const int* token_index_map, const int* offsets,
                const int* token_offsets, float* d_scores, int64_t num_tokens, int64_t num_experts, int64_t d) {
    const int64_t token = int64_t(blockIdx.x) * WARPS + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    if (token >= num_tokens) return;
    const int64_t begin = TOP_K > 0 ? token * TOP_K : token_offsets[token];
    const int64_t end = TOP_K > 0 ? begin + TOP_K : token_offsets[token + 1];

    for (int64_t first = begin; first < end; first += LANES) {
        const int row = first + lane < end ? token_index_map[first + lane] : -1;
        const int expert_of_lane = row >= 0 ? expert_of(row, offsets, num_experts) : -1;
        for (int k = 0; k < LANES && first + k < end; ++k) {
            const int expert = __shfl_sync(~0u, expert_of_lane, k);
            if (expert < 0) continue;
            float dot = 0;
            for (int64_t column = lane * CHUNK; column < d; column += LANES * CHUNK) {
                float a[CHUNK], b[CHUNK];
                unpack(a, load_chunk(d_out + token * d + column));
                unpack(b, load_chunk(bias + expert * d + column));
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) dot += a[i] * b[i];
            }
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0u, dot, distance);
            if (lane == 0) d_scores[first + k] += dot;
        }
    }
}

// ---- expert_row_sum: the rows in splits of equal size, so that one busy expert costs no more than many ----------------
//
//   rows    |---- split 0 ----|---- split 1 ----|---- split 2 ----|
//   experts |-- 0 --|-- 1 --|------------- 2 ----------------|- 3 -|
//   slots   |  0+0  |  0+1  |0+2|      1+2      |    2+2     | 2+3 |      slot = split + expert, one for each partial sum
//
// A block computes the partial sums of one split, 256 columns of them; expert_row_sum_finish then adds an expert's slots in
// order.
extern "C" __global__ void __launch_bounds__(THREADS)
expert_row_sum(const bf16* values, const int* pair_indices, const int* offsets, const int* pair_tokens, const float* scores,
               float* slots, int64_t num_experts, int64_t m, int64_t rows_per_split, int64_t gather) {
    __shared__ float sums[WARPS][LANES * CHUNK];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int64_t first_column = int64_t(blockIdx.x) * LANES * CHUNK, column = first_column + lane * CHUNK;
    const int split_begin = blockIdx.y * rows_per_split;
    const int split_end = min(split_begin + rows_per_split, int64_t(offsets[num_experts]));

    for (int begin = split_begin; begin < split_end;) {
        const int expert = expert_of(begin, offsets, num_experts);
        const int end = min(split_end, offsets[expert + 1]);
        float sum[CHUNK] = {};
        if (column < m) {
#pragma unroll 4
            for (int row = begin + warp; row < end; row += WARPS) {
                const int pair = pair_indices[row];
                const int64_t source = gather ? token_of(pair, pair_tokens) : row;
                const float weight = scores != nullptr ? __ldg(scores + pair) : 1.f;
                float x[CHUNK];
                unpack(x, load_chunk(values + source * m + column));
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) sum[i] += weight * x[i];
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sums[warp][lane * CHUNK + i] = sum[i];
        __syncthreads();
        for (int i = threadIdx.x; i < LANES * CHUNK && first_column + i < m; i += THREADS) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += sums[w][i];
            slots[(blockIdx.y + expert) * m + first_column + i] = total;
        }
        __syncthreads();
        begin = end;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
expert_row_sum_finish(const float* slots, const int* offsets, bf16* out_bf16, float* out_f32, int64_t m,
                      int64_t rows_per_split, int64_t accumulate) {
    const int64_t column = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t expert = blockIdx.y, begin = offsets[expert], end = offsets[expert + 1];
    if (column >= m) return;
    float total = 0;
    if (begin < end) {
#pragma unroll 4
        for (int64_t split = begin / rows_per_split; split <= (end - 1) / rows_per_split; ++split)
            total += __ldg(slots + (split + expert) * m + column);
    }
    const int64_t place = expert * m + column;
    if (out_f32 != nullptr) {
        out_f32[place] = accumulate ? out_f32[place] + total : total;
    } else {
        out_bf16[place] = pack_bf16(accumulate ? bf16_low(out_bf16[place]) + total : total, 0.f);
    }
}
