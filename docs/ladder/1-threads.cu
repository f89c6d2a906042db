// Rung 1. `threads`: a thread makes an element of C. `tiles`: a CTA makes a tile of C from tiles of A and B in shared memory.
//
//   C (m, n) = A (m, k) B (n, k)^T, all row-major bf16, sums in fp32. Sizes are multiples of the tiles.
#include "ptx.cuh"

struct Dense {
    const bf16 *a, *b;
    bf16* c;
    int m, n, k;
};

DEVICE float number(bf16 bits) { return __uint_as_float(uint32_t(bits) << 16); }

// ---- A thread an element: it reads a row of A and a row of B from global memory --------------------------------------------
extern "C" __global__ void __launch_bounds__(256) threads(Dense p) {
    const int across = p.n / 16;  // tiles
    const int row = blockIdx.x / across * 16 + threadIdx.x / 16, column = blockIdx.x % across * 16 + threadIdx.x % 16;
    const bf16 *a = p.a + int64_t(row) * p.k, *b = p.b + int64_t(column) * p.k;
    float sum = 0.0f;
    for (int k = 0; k < p.k; ++k) sum += number(a[k]) * number(b[k]);
    p.c[int64_t(row) * p.n + column] = pack_bf16(sum, 0.0f);
}
