// To fp8 (e4m3). Values that share a scale are divided by it and rounded (quantized.cuh).
//
//   quantize_rows      x (T, width) bf16 -> x_q, and a scale for each row (T,), or FLOAT_SCALES for 128 columns of it (T, width / 128)
//   quantize_weights   W (E, m, k) bf16 -> W_q (E, m, k) and its transpose (E, k, m), of which blocks of 128 x 128 share a scale:
//                      (E, m / 128, k / 128), and transposed as well. W is read once. Of out and
//                      out_transposed one that is null is left out.
//   note_changes       W bf16 or fp32 -> whether it has changed, by hashes (E, m / 128, k / 128) of 512 elements of each block
//   refresh_weights    the same as quantize_weights in both orders, if note_changes says so
//
//   dequantize_rows    values (R, width), of which 128 columns of a row share a scale -> bf16, in which they are exact
//
//   block_offsets      offsets (E + 1,) -> how many blocks of 128 rows come before each expert's
//   transpose_rows     quantized rows, in expert order or tokens' gathered -> (width, blocks of 128 rows), each expert's filled up with
//                      zeros, of which blocks of 128 x 128 share a scale: (width / 128, blocks)
//
// Floors: 3 T width; 3 E m k, or 4 E m k for both orders, E m k / 16 where nothing has changed; 2 R width bytes / 4.24 TB/s.
//
// -D: BLOCK         elements of a row that share a scale, and of a weight's block on each side
//     FLOAT_SCALES  1 for float32 scales in place of powers of two
#include "quantized.cuh"

constexpr int PER_CHUNK = 16;          // e4m3 in 16 bytes
constexpr int LANES = BLOCK / PER_CHUNK;  // threads that have a row of a block

DEVICE uint4 load_chunk(const void* address) { return __ldg(reinterpret_cast<const uint4*>(address)); }

// 16 neighbouring bf16.
struct Sixteen {
    uint4 low, high;

    DEVICE Sixteen() : low(), high() {}
    DEVICE explicit Sixteen(const bf16* address) : low(load_chunk(address)), high(load_chunk(address + CHUNK)) {}

    DEVICE explicit Sixteen(const float* address) : low(rounded(address)), high(rounded(address + CHUNK)) {}

    DEVICE static uint4 rounded(const float* eight) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(eight)), b = __ldg(reinterpret_cast<const float4*>(eight) + 1);
        return make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
    }

    // Of these numbers in this order, and of `seed`.
    DEVICE uint32_t hash(uint32_t seed) const {
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (const uint32_t word : words) seed = (seed ^ word) * 0x9E3779B1u, seed ^= seed >> 15;
        return seed;
    }

    DEVICE uint32_t largest(uint32_t than) const {
        than = larger_pair(larger_pair(larger_pair(larger_pair(than, low.x), low.y), low.z), low.w);
        return larger_pair(larger_pair(larger_pair(larger_pair(than, high.x), high.y), high.z), high.w);
    }

    template <class By>
    DEVICE uint4 quantize(const By& by) const {
        return make_uint4(quantized(low.x, low.y, by), quantized(low.z, low.w, by), quantized(high.x, high.y, by),
                          quantized(high.z, high.w, by));
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
#if FLOAT_SCALES
    const uint32_t neighbours = ((1u << LANES) - 1) << threadIdx.x % 32 / LANES * LANES;
    for (int64_t at = threadIdx.x * PER_CHUNK; at < width; at += 128 * PER_CHUNK) {
        const Sixteen values(from + at);
        const uint32_t pair = values.largest(0);
        const FloatScale scale = FloatScale::of(__reduce_max_sync(neighbours, max(pair << 16, pair & 0xFFFF0000u)));
        if (threadIdx.x % LANES == 0) scales[(row * width + at) / BLOCK] = scale.scale;
        *reinterpret_cast<uint4*>(out + row * width + at) = values.quantize(scale);
    }
#else
    uint32_t pair = 0;
    for (int64_t at = threadIdx.x * PER_CHUNK; at < width; at += 128 * PER_CHUNK) pair = Sixteen(from + at).largest(pair);
    const Scale scale = Scale::of(largest_of_all<128>(pair));
    if (threadIdx.x == 0) scales[row] = scale.scale;
    for (int64_t at = threadIdx.x * PER_CHUNK; at < width; at += 128 * PER_CHUNK)
        *reinterpret_cast<uint4*>(out + row * width + at) = Sixteen(from + at).quantize(scale);
#endif
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

// A weight in blocks of 128 x 128, and where they are quantized to.
template <class T>
struct QuantizedWeight {
    const T* weights;
    uint8_t* out;
    float* scales;
    uint8_t* out_transposed;
    float* scales_transposed;
    int64_t m, k;
    const int64_t blocks_m = (m + BLOCK - 1) / BLOCK, blocks_k = (k + BLOCK - 1) / BLOCK;

    // By a block of 256 threads: thread t has 16 columns of rows 4 (t / 8) to 4 (t / 8) + 3. known: where `hash` goes, too, or null.
    DEVICE void make(int64_t expert, int64_t block_m, int64_t block_k, uint32_t* known = nullptr) const {
        constexpr int ROWS = TURNED_ROWS;
        const int group = threadIdx.x / LANES, chunk = threadIdx.x % LANES * PER_CHUNK;
        const int64_t row = block_m * BLOCK + group * ROWS, column = block_k * BLOCK + chunk;
        const bool present = row < m && column < k;  // m and k are multiples of 16
        Sixteen values[ROWS];
        uint32_t pair = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (present) values[i] = Sixteen(weights + (expert * m + row + i) * k + column);
            pair = values[i].largest(pair);
        }
#if FLOAT_SCALES
        const FloatScale of_block = FloatScale::of<true>(largest_of_all<2 * BLOCK>(pair));
        const Scale scale{of_block.scale, of_block.inverse};  // weights are multiplied by the inverse
#else
        const Scale scale = Scale::of(largest_of_all<2 * BLOCK>(pair));
#endif
        if (threadIdx.x == 0) {
            if (out) scales[(expert * blocks_m + block_m) * blocks_k + block_k] = scale.scale;
            if (out_transposed) scales_transposed[(expert * blocks_k + block_k) * blocks_m + block_m] = scale.scale;
        }
        uint4 quantized_rows[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            quantized_rows[i] = values[i].quantize(scale);
            if (out && present) *reinterpret_cast<uint4*>(out + (expert * m + row + i) * k + column) = quantized_rows[i];
        }
        if (!out_transposed) return;
        store_turned(quantized_rows, group, chunk, out_transposed + (expert * k + block_k * BLOCK) * m + block_m * BLOCK, m,
                     k - block_k * BLOCK, m - block_m * BLOCK);
        if (!known) return;
        __shared__ uint32_t of_warp[2 * BLOCK / 32];
        const bool hashed = present && chunk == hashed_chunk(group, block_k);
        const T* again = weights + (expert * m + row + hashed_row(block_m, block_k)) * k + column;  // from L1
        const uint32_t own = __reduce_add_sync(~0u, hashed ? Sixteen(again).hash(group) : 0);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
        __syncthreads();
        uint32_t sum = 0;
#pragma unroll
        for (const uint32_t each : of_warp) sum += each;
        if (threadIdx.x == 0) *known = sum | 1;
    }

    // Of each four rows one is hashed, and of this one a chunk.
    DEVICE static int hashed_row(int64_t block_m, int64_t block_k) { return int((block_m + block_k) % 4); }
    DEVICE static int hashed_chunk(int group, int64_t block_k) { return int((group + block_k) % LANES) * PER_CHUNK; }

    // By a warp: of 16 neighbours in each fourth row, others in the next row and in the next block. Never 0.
    DEVICE uint32_t hash(int64_t expert, int64_t block_m, int64_t block_k) const {
        const int lane = threadIdx.x % 32;
        const int64_t row = block_m * BLOCK + lane * 4 + hashed_row(block_m, block_k);
        const int64_t column = block_k * BLOCK + hashed_chunk(lane, block_k);
        const bool present = row < m && column < k;
        return __reduce_add_sync(~0u, present ? Sixteen(weights + (expert * m + row) * k + column).hash(lane) : 0) | 1;
    }
};

extern "C" __global__ void __launch_bounds__(2 * BLOCK)
quantize_weights(const bf16* weights, uint8_t* out, float* scales, uint8_t* out_transposed, float* scales_transposed, int64_t m,
                 int64_t k) {
    const QuantizedWeight<bf16> weight{weights, out, scales, out_transposed, scales_transposed, m, k};
    weight.make(blockIdx.x / weight.blocks_m, blockIdx.x % weight.blocks_m, blockIdx.y);
}

constexpr int WARPS = 2 * BLOCK / 32;  // blocks of a weight that a block of threads looks at: neighbours in a row

// A warp a block. hashes: zeros where nothing has been made; behind them the number of the last call that has found a change.
template <class T>
DEVICE void note(const QuantizedWeight<T>& weight, uint32_t* hashes, int64_t experts, int call) {
    const int64_t block_k = int64_t(blockIdx.y) * WARPS + threadIdx.x / 32;
    if (block_k >= weight.blocks_k) return;
    const uint32_t now = weight.hash(blockIdx.x / weight.blocks_m, blockIdx.x % weight.blocks_m, block_k);
    uint32_t& known = hashes[blockIdx.x * weight.blocks_k + block_k];
    if (threadIdx.x % 32 || known == now) return;
    known = now;
    atomicMax(reinterpret_cast<int*>(hashes + experts * weight.blocks_m * weight.blocks_k), call);
}

// Also where nothing has been made: then all is zero, and so is `call`.
template <class T>
DEVICE void refresh(const QuantizedWeight<T>& weight, uint32_t* hashes, int64_t experts, int call) {
    if (int(hashes[experts * weight.blocks_m * weight.blocks_k]) != call) return;
    weight.make(blockIdx.x / weight.blocks_m, blockIdx.x % weight.blocks_m, blockIdx.y, hashes + blockIdx.x * weight.blocks_k + blockIdx.y);
}

#define ENTRIES(T, OF, AT_ONCE)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(2 * BLOCK)                                                                         \
    note_changes##OF(const T* weights, int64_t m, int64_t k, uint32_t* hashes, int64_t experts, int call) {                         \
        note(QuantizedWeight<T>{weights, nullptr, nullptr, nullptr, nullptr, m, k}, hashes, experts, call);                         \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(2 * BLOCK, AT_ONCE)                                                                \
    refresh_weights##OF(const T* weights, uint8_t* out, float* scales, uint8_t* out_transposed, float* scales_transposed, int64_t m, \
                        int64_t k, uint32_t* hashes, int64_t experts, int call) {                                                   \
        refresh(QuantizedWeight<T>{weights, out, scales, out_transposed, scales_transposed, m, k}, hashes, experts, call);          \
    }
#if FLOAT_SCALES
ENTRIES(bf16, , 4)  // blocks of threads on a multiprocessor, as many as have registers
#else
ENTRIES(bf16, , 5)
#endif
ENTRIES(float, _f32, 4)
#undef ENTRIES

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
