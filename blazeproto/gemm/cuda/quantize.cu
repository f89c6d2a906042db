// To fp8 (e4m3). Values that share a scale, a power of two, are divided by it and rounded (quantized.cuh).
//
//   quantize_rows      x (T, width) bf16 -> x_q, and a scale for each row (T,)
//   quantize_weights   W (E, m, k) bf16 -> W_q (E, m, k) and its transpose (E, k, m), of which blocks of 128 x 128 share a scale:
//                      (E, m / 128, k / 128), and transposed as well. W is read once. Of out and
//                      out_transposed one that is null is left out.
//
//   dequantize_rows    values (R, width), of which 128 columns of a row share a scale -> bf16, in which they are exact
//
//   block_offsets      offsets (E + 1,) -> how many blocks of 128 rows come before each expert's
//   transpose_rows     quantized rows, in expert order or tokens' gathered -> (width, blocks of 128 rows), each expert's filled up with
//                      zeros, of which blocks of 128 x 128 share a scale: (width / 128, blocks)
//
// Floors: 3 T width; 3 E m k, or 4 E m k for both orders; 2 R width bytes / 4.24 TB/s.
//
// -D: BLOCK    elements of a row that share a scale, and of a weight's block on each side
#include "quantized.cuh"

constexpr int PER_CHUNK = 16;          // e4m3 in 16 bytes
constexpr int LANES = BLOCK / PER_CHUNK;  // threads that have a row of a block

DEVICE uint4 load_chunk(const void* address) { return __ldg(reinterpret_cast<const uint4*>(address)); }

// 16 neighbouring bf16.
struct Sixteen {
    uint4 low, high;

    DEVICE Sixteen() : low(), high() {}
    DEVICE explicit Sixteen(const bf16* address) : low(load_chunk(address)), high(load_chunk(address + CHUNK)) {}

    DEVICE uint32_t largest(uint32_t than) const {
        than = larger_pair(larger_pair(larger_pair(larger_pair(than, low.x), low.y), low.z), low.w);
        return larger_pair(larger_pair(larger_pair(larger_pair(than, high.x), high.y), high.z), high.w);
    }

    DEVICE uint4 quantize(float inverse) const {
        return make_uint4(quantized(low.x, low.y, inverse), quantized(low.z, low.w, inverse), quantized(high.x, high.y, inverse),
                          quantized(high.z, high.w, inverse));
    }
};

// The largest magnitude of a block of threads, as an fp32's bits.
template <int THREADS>
DEVICE uint32_t largest_of_all(uint32_t pair) {
    __shared__ uint32_t largest[THREADS / 32];
    const uint32_t most = __reduce_max_sync(~0u, max(pair << 16, pair & 0xFFFF0000u));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    __syncthreads();
    uint32_t all = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) all = max(all, largest[warp]);
    return all;
}

extern "C" __global__ void __launch_bounds__(128) quantize_rows(const bf16* x, uint8_t* out, float* scales, int64_t width) {
    const int64_t row = blockIdx.x;
    const bf16* from = x + row * width;
    uint32_t pair = 0;
    for (int64_t at = threadIdx.x * PER_CHUNK; at < width; at += 128 * PER_CHUNK) pair = Sixteen(from + at).largest(pair);
    const Scale scale = scale_of(largest_of_all<128>(pair));
    if (threadIdx.x == 0) scales[row] = scale.scale;
    for (int64_t at = threadIdx.x * PER_CHUNK; at < width; at += 128 * PER_CHUNK)
        *reinterpret_cast<uint4*>(out + row * width + at) = Sixteen(from + at).quantize(scale.inverse);
}

// A thread has 16 columns of a row.
extern "C" __global__ void __launch_bounds__(128)
dequantize_rows(const uint8_t* values, const float* scales, bf16* out, int64_t rows, int64_t width) {
    const int64_t chunk = int64_t(blockIdx.x) * 128 + threadIdx.x, row = chunk / (width / PER_CHUNK), column = chunk % (width / PER_CHUNK) * PER_CHUNK;
    if (row >= rows) return;
    const uint4 from = load_chunk(values + row * width + column);
    const float scale = __ldg(scales + column / BLOCK * rows + row);
    uint32_t made[PER_CHUNK / 2];
#pragma unroll
    for (int four = 0; four < PER_CHUNK / 4; ++four) {
        const float4 v = dequantized(four == 0 ? from.x : four == 1 ? from.y : four == 2 ? from.z : from.w, scale);
        made[2 * four] = pack_bf16(v.x, v.y), made[2 * four + 1] = pack_bf16(v.z, v.w);
    }
    uint4* to = reinterpret_cast<uint4*>(out + row * width + column);
    to[0] = make_uint4(made[0], made[1], made[2], made[3]), to[1] = make_uint4(made[4], made[5], made[6], made[7]);
}

// Columns of 4 x 4 bytes: the rows' first bytes, second bytes, and so on.
DEVICE void transpose_4x4(uint32_t (&rows)[4]) {
    const uint32_t a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32_t c = __byte_perm(rows[2], rows[3], 0x5140), d = __byte_perm(rows[2], rows[3], 0x7362);
    rows[0] = __byte_perm(a, c, 0x5410), rows[1] = __byte_perm(a, c, 0x7632);
    rows[2] = __byte_perm(b, d, 0x5410), rows[3] = __byte_perm(b, d, 0x7632);
}

constexpr int TURNED_ROWS = 4;  // of a thread

// A block's transpose to memory, of 128 x 128 at most, by a block of 256 threads: each has 16 columns, from `chunk` on, of rows 4 group
// to 4 group + 3. rows, columns: of the transpose, multiples of 16.
DEVICE void store_turned(const uint4 (&from)[TURNED_ROWS], int group, int chunk, uint8_t* out, int64_t stride, int64_t rows, int64_t columns) {
    constexpr int STRIDE = BLOCK / TURNED_ROWS + 1;  // words of four rows, in a row of the transpose: one more for the banks
    __shared__ uint32_t turned[BLOCK * STRIDE];
#pragma unroll
    for (int four = 0; four < PER_CHUNK / 4; ++four) {
        uint32_t words[TURNED_ROWS];
#pragma unroll
        for (int i = 0; i < TURNED_ROWS; ++i)
            words[i] = four == 0 ? from[i].x : four == 1 ? from[i].y : four == 2 ? from[i].z : from[i].w;
        transpose_4x4(words);
#pragma unroll
        for (int i = 0; i < 4; ++i) turned[(chunk + four * 4 + i) * STRIDE + group] = words[i];
    }
    __syncthreads();
#pragma unroll
    for (int row = group; row < BLOCK; row += 2 * BLOCK / LANES) {
        const uint32_t* words = turned + row * STRIDE + chunk / 4;
        if (row < rows && chunk < columns)
            *reinterpret_cast<uint4*>(out + row * stride + chunk) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// A block of 256 threads has a block of a weight: thread t 16 columns of rows 4 (t / 8) to 4 (t / 8) + 3.
extern "C" __global__ void __launch_bounds__(2 * BLOCK)
quantize_weights(const bf16* weights, uint8_t* out, float* scales, uint8_t* out_transposed, float* scales_transposed, int64_t m,
                 int64_t k) {
    constexpr int ROWS = TURNED_ROWS;
    const int64_t blocks_m = (m + BLOCK - 1) / BLOCK, blocks_k = (k + BLOCK - 1) / BLOCK;
    const int64_t expert = blockIdx.x / blocks_m, block_m = blockIdx.x % blocks_m, block_k = blockIdx.y;
    const int group = threadIdx.x / LANES, chunk = threadIdx.x % LANES * PER_CHUNK;
    const int64_t row = block_m * BLOCK + group * ROWS, column = block_k * BLOCK + chunk;
    const bool present = row < m && column < k;  // m and k are multiples of 16
    weights += expert * m * k;

    Sixteen values[ROWS];
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (present) values[i] = Sixteen(weights + (row + i) * k + column);
        pair = values[i].largest(pair);
    }
    const Scale scale = scale_of(largest_of_all<2 * BLOCK>(pair));
    if (threadIdx.x == 0) {
        if (out) scales[(expert * blocks_m + block_m) * blocks_k + block_k] = scale.scale;
        if (out_transposed) scales_transposed[(expert * blocks_k + block_k) * blocks_m + block_m] = scale.scale;
    }
    uint4 quantized_rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        quantized_rows[i] = values[i].quantize(scale.inverse);
        if (out && present) *reinterpret_cast<uint4*>(out + (expert * m + row + i) * k + column) = quantized_rows[i];
    }
    if (!out_transposed) return;
    store_turned(quantized_rows, group, chunk, out_transposed + (expert * k + block_k * BLOCK) * m + block_m * BLOCK, m,
                 k - block_k * BLOCK, m - block_m * BLOCK);
}

extern "C" __global__ void __launch_bounds__(32) block_offsets(const int* offsets, int* out, int64_t experts) {
    int before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int e = base + threadIdx.x;
        int sum = e < experts ? (offsets[e + 1] - offsets[e] + BLOCK - 1) / BLOCK : 0;
        const int own = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (threadIdx.x >= step) sum += other;
        }
        if (e < experts) out[e] = before + sum - own;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) out[experts] = before;
}

// A block of 256 threads has 128 columns of a block of rows: thread t 16 columns of rows 4 (t / 8) to 4 (t / 8) + 3. pair_indices: null
// where rows lie in expert order, with scales (width / 128, rows); else of tokens, scales (tokens,). multiplier, shift: in halves of a
// word, as PairToToken has them; pair_tokens: likewise, or null. values, scales: of the first column that is wanted.
extern "C" __global__ void __launch_bounds__(2 * BLOCK)
transpose_rows(const uint8_t* values, const float* scales, const int* pair_indices, const int* pair_tokens, uint64_t division,
               const int* offsets, const int* blocks_before, uint8_t* out, float* out_scales, int64_t experts, int64_t rows,
               int64_t width, int64_t columns, int64_t blocks) {
    const int block = blockIdx.x;
    if (block >= blocks_before[experts]) return;
    int expert = 0, high = experts;
    while (high - expert > 1) {
        const int middle = (expert + high) / 2;
        (blocks_before[middle] <= block ? expert : high) = middle;
    }
    const int group = threadIdx.x / LANES, chunk = threadIdx.x % LANES * PER_CHUNK;
    const int64_t column = int64_t(blockIdx.y) * BLOCK + chunk;
    const int first = offsets[expert] + (block - blocks_before[expert]) * BLOCK + group * TURNED_ROWS, end = offsets[expert + 1];
    uint4 from[TURNED_ROWS];
    float scale[TURNED_ROWS];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < TURNED_ROWS; ++i) {
        from[i] = {}, scale[i] = 0.0f;
        if (first + i >= end) continue;
        int64_t row = first + i, at = int64_t(blockIdx.y) * rows + row;
        if (pair_indices) {
            const int pair = __ldg(pair_indices + row);
            at = row = pair_tokens ? __ldg(pair_tokens + pair) : int(uint64_t(pair) * uint32_t(division) >> (division >> 32));
        }
        if (column < columns) from[i] = load_chunk(values + row * width + column);
        scale[i] = __ldg(scales + at);
        largest = max(largest, __float_as_uint(scale[i]));
    }
    __shared__ uint32_t of_warp[2 * BLOCK / 32];
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < 2 * BLOCK / 32; ++warp) largest = max(largest, of_warp[warp]);
    if (threadIdx.x == 0) out_scales[blockIdx.y * blocks + block] = __uint_as_float(largest);
    const float inverse = __uint_as_float((254u << 23) - largest);  // of a power of two
#pragma unroll
    for (int i = 0; i < TURNED_ROWS; ++i) {
        const float by = largest > 0x7F800000u ? __uint_as_float(largest) : scale[i] * inverse;
        const auto requantized = [=](uint32_t four) {
            const float4 v = dequantized(four, by);
            return pack_e4m3(v.x, v.y, v.z, v.w);
        };
        from[i] = make_uint4(requantized(from[i].x), requantized(from[i].y), requantized(from[i].z), requantized(from[i].w));
    }
    store_turned(from, group, chunk, out + int64_t(blockIdx.y) * BLOCK * blocks * BLOCK + int64_t(block) * BLOCK, blocks * BLOCK,
                 columns - int64_t(blockIdx.y) * BLOCK, BLOCK);
}
