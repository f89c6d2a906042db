// To fp8 (e4m3) and back. Values that share a scale, a power of two, are divided by it and rounded (quantized.cuh).
//
//   quantize_rows      x (T, width) bf16 -> x_q, and a scale for each row (T,)
//   quantize_weights   W (E, m, k) bf16 -> W_q (E, m, k) and its transpose (E, k, m), of which blocks of 128 x 128 share a scale:
//                      (E, m / 128, k / 128), and transposed as well. W is read once. A null
//                      out_transposed is left out.
//   dequantize_rows    columns of rows that epilogues have quantized, and their scales (blocks, rows) -> bf16 (R, columns)
//
// Floors: 3 T width, 4 E m k and 3 R columns bytes / 4.24 TB/s.
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

// Columns of 4 x 4 bytes: the rows' first bytes, second bytes, and so on.
DEVICE void transpose_4x4(uint32_t (&rows)[4]) {
    const uint32_t a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32_t c = __byte_perm(rows[2], rows[3], 0x5140), d = __byte_perm(rows[2], rows[3], 0x7362);
    rows[0] = __byte_perm(a, c, 0x5410), rows[1] = __byte_perm(a, c, 0x7632);
    rows[2] = __byte_perm(b, d, 0x5410), rows[3] = __byte_perm(b, d, 0x7632);
}

// A block of 256 threads has a block of a weight: thread t 16 columns of rows 4 (t / 8) to 4 (t / 8) + 3.
extern "C" __global__ void __launch_bounds__(2 * BLOCK)
quantize_weights(const bf16* weights, uint8_t* out, float* scales, uint8_t* out_transposed, float* scales_transposed, int64_t m,
                 int64_t k) {
    constexpr int ROWS = 4, STRIDE = BLOCK / ROWS + 1;  // words of four rows, in a column of the transposed block: one more for the banks
    __shared__ uint32_t turned[BLOCK * STRIDE];
    const int64_t blocks_m = (m + BLOCK - 1) / BLOCK, blocks_k = (k + BLOCK - 1) / BLOCK;
    const int64_t expert = blockIdx.x / blocks_m, block_m = blockIdx.x % blocks_m, block_k = blockIdx.y;
    const int group = threadIdx.x / LANES, chunk = threadIdx.x % LANES * PER_CHUNK;
    const int64_t row = block_m * BLOCK + group * ROWS, column = block_k * BLOCK + chunk;
    const bool present = row < m && column < k;  // m and k are multiples of 16
    weights += expert * m * k, out += expert * m * k;

    Sixteen values[ROWS];
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (present) values[i] = Sixteen(weights + (row + i) * k + column);
        pair = values[i].largest(pair);
    }
    const Scale scale = scale_of(largest_of_all<2 * BLOCK>(pair));
    if (threadIdx.x == 0) {
        scales[(expert * blocks_m + block_m) * blocks_k + block_k] = scale.scale;
        if (out_transposed) scales_transposed[(expert * blocks_k + block_k) * blocks_m + block_m] = scale.scale;
    }
    uint4 quantized_rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        quantized_rows[i] = values[i].quantize(scale.inverse);
        if (present) *reinterpret_cast<uint4*>(out + (row + i) * k + column) = quantized_rows[i];
    }
    if (!out_transposed) return;
#pragma unroll
    for (int four = 0; four < PER_CHUNK / 4; ++four) {
        uint32_t words[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) words[i] = four == 0   ? quantized_rows[i].x
                                                  : four == 1 ? quantized_rows[i].y
                                                  : four == 2 ? quantized_rows[i].z
                                                              : quantized_rows[i].w;
        transpose_4x4(words);
#pragma unroll
        for (int i = 0; i < 4; ++i) turned[(chunk + four * 4 + i) * STRIDE + group] = words[i];
    }
    __syncthreads();
    const int64_t to_column = block_m * BLOCK + chunk;
#pragma unroll
    for (int pass = 0; pass < ROWS; ++pass) {
        const int from = group + pass * 2 * BLOCK / LANES;
        const int64_t to_row = block_k * BLOCK + from;
        const uint32_t* words = turned + from * STRIDE + chunk / 4;
        if (to_row < k && to_column < m)
            *reinterpret_cast<uint4*>(out_transposed + (expert * k + to_row) * m + to_column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Threads have 16 columns of a row each. values: of the first column that is wanted; width: of a row of them.
extern "C" __global__ void __launch_bounds__(128)
dequantize_rows(const uint8_t* values, const float* scales, bf16* out, int64_t rows, int64_t width, int64_t columns) {
    const int64_t at = (int64_t(blockIdx.x) * 128 + threadIdx.x) * PER_CHUNK, row = at / columns, column = at % columns;
    if (row >= rows) return;
    const uint4 four = load_chunk(values + row * width + column);
    const float scale = __ldg(scales + column / BLOCK * rows + row);
    uint4 made[2];
    uint32_t* words = reinterpret_cast<uint32_t*>(made);
    const uint32_t from[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 v = dequantized(from[i], scale);
        words[2 * i] = pack_bf16(v.x, v.y), words[2 * i + 1] = pack_bf16(v.z, v.w);
    }
    *reinterpret_cast<uint4*>(out + at) = made[0];
    *reinterpret_cast<uint4*>(out + at + CHUNK) = made[1];
}
