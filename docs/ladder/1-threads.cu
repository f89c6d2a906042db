// Rung 1. `threads`: a thread makes an element of C. `tiles`: a CTA makes a tile of C from tiles of A and B in shared memory.
//
//   C (m, n) = A (m, k) B (n, k)^T, all bf16 and row-major, sums in fp32. m, n and k are multiples of a tile's.
#include "ptx.cuh"

struct Dense {
    const bf16 *a, *b;
    bf16* c;
    int m, n, k;
};

// ---- A thread an element: it reads a row of A and a row of B from global memory --------------------------------------------
DEVICE float number(bf16 bits) { return __uint_as_float(uint32_t(bits) << 16); }

extern "C" __global__ void __launch_bounds__(256) threads(Dense p) {
    constexpr int SIDE = 16;  // of a CTA's tile
    const int across = p.n / SIDE;
    const int row = blockIdx.x / across * SIDE + threadIdx.x / SIDE, column = blockIdx.x % across * SIDE + threadIdx.x % SIDE;
    const bf16 *a = p.a + int64_t(row) * p.k, *b = p.b + int64_t(column) * p.k;
    float sum = 0.0f;
    for (int k = 0; k < p.k; ++k) sum += number(a[k]) * number(b[k]);
    p.c[int64_t(row) * p.n + column] = pack_bf16(sum, 0.0f);
}

// ---- Tiles in shared memory: each number is read from global memory once a CTA, and serves 64 elements of C ---------------
constexpr int TILE = 64, DEPTH = 32;  // a CTA makes TILE x TILE elements, DEPTH numbers of the reduction at a time
constexpr int EACH = 4;               // a thread makes EACH x EACH of them, from EACH numbers of A and of B

DEVICE uint4 load(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }

// A chunk of a row becomes part of a column: as fp32, so that a number is converted once and not in each product.
DEVICE void put(float (&tile)[DEPTH][TILE], int line, int first, uint4 chunk) {
    float x[CHUNK];
    unpack(x, chunk);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) tile[first + i][line] = x[i];  // neighbours in a warp write neighbouring banks
}

extern "C" __global__ void __launch_bounds__(256) tiles(Dense p) {
    __shared__ alignas(16) float a_tile[DEPTH][TILE], b_tile[DEPTH][TILE];
    const int across = p.n / TILE, row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
    // The thread copies a chunk of 8 numbers of one line of each tile,
    const int line = threadIdx.x % TILE, first = threadIdx.x / TILE * CHUNK;
    const bf16 *a = p.a + int64_t(row + line) * p.k + first, *b = p.b + int64_t(column + line) * p.k + first;
    // and makes the elements from (y, x) on.
    const int y = threadIdx.x / 16 * EACH, x = threadIdx.x % 16 * EACH;
    float sum[EACH][EACH] = {};
    for (int k = 0; k < p.k; k += DEPTH) {
        const uint4 of_a = load(a + k);
        const uint4 of_b = load(b + k);
        put(a_tile, line, first, of_a);
        put(b_tile, line, first, of_b);
        __syncthreads();  // both tiles are there
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const float4 u = *reinterpret_cast<const float4*>(&a_tile[i][y]), v = *reinterpret_cast<const float4*>(&b_tile[i][x]);
            const float us[EACH] = {u.x, u.y, u.z, u.w}, vs[EACH] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < EACH * EACH; ++j) sum[j / EACH][j % EACH] += us[j / EACH] * vs[j % EACH];
        }
        __syncthreads();  // all warps have read them
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        *reinterpret_cast<uint2*>(p.c + int64_t(row + y + j) * p.n + column + x) =
            make_uint2(pack_bf16(sum[j][0], sum[j][1]), pack_bf16(sum[j][2], sum[j][3]));
}
