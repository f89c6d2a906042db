// Rung 2. Tensor cores: ldmatrix brings operands from shared memory to registers, mma.sync multiplies them.
//
//   C (m, n) = A (m, k) B (n, k)^T, all bf16 and row-major, sums in fp32. m, n and k are multiples of BM, BN and BK.
//
//   tile of 128 x 128       columns   0    32    64    96
//                  rows  0          | w 0 | w 1 | w 2 | w 3 |       a warp makes 64 x 32: 4 x 4 products of mma.sync,
//                  rows 64          | w 4 | w 5 | w 6 | w 7 |       16 x 8 each, from 16 numbers of the reduction
#include "ptx.cuh"

struct Dense {
    const bf16 *a, *b;
    bf16* c;
    int m, n, k;
};

constexpr int BM = 128, BN = 128, BK = 64;  // rows and columns of a tile, and the part of the reduction that is in shared memory
constexpr int THREADS = 256, WARP_M = 64, WARP_N = 32, MMA_K = 16;
constexpr int ROW_BYTES = BK * OPERAND_BYTES, CHUNKS = ROW_BYTES / CHUNK_BYTES;  // of a row in shared memory: 128 bytes, 8 chunks
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS, COPIES = BM / ROWS_AT_ONCE;       // a thread copies a chunk of every 32nd row
constexpr int A_BYTES = BM * ROW_BYTES, B_BYTES = BN * ROW_BYTES;

// Where a chunk of 16 bytes lies. Rows of 128 bytes begin in the same bank, so chunk c of 8 rows would too: an ldmatrix, which
// reads one chunk of 8 rows, would take 8 turns. With the chunks of a row swapped by its number it takes one.
DEVICE uint32_t place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row % 8)) * CHUNK_BYTES); }

using Accumulators = float[WARP_M / 16][WARP_N / 8][4];

// The products of all BK of a tile's reduction. ldmatrix: lane l names a row of 16 bytes; lanes 0..7 name a matrix of 8 x 8 for
// the first register, 8..15 for the second, and so on. The registers are then as mma.sync wants them.
DEVICE void multiply(Accumulators& sums, uint32_t a_tile, uint32_t b_tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 4 * WARP_M, column = warp % 4 * WARP_N;
#pragma unroll
    for (int step = 0; step < BK / MMA_K; ++step) {
        uint32_t a[WARP_M / 16][4], b[WARP_N / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i)  // rows 0..7 and 8..15 of the first 8 k, then of the second
            ldmatrix_x4(a[i], a_tile + place(row + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j)  // both 8 k of columns 0..7, then of 8..15
            ldmatrix_x4(b[j], b_tile + place(column + 16 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
            for (int j = 0; j < WARP_N / 8; ++j)
                mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

// Lane l holds rows l / 4 and l / 4 + 8 of each 16 x 8, columns 2 (l % 4) and the next.
DEVICE void store(const Accumulators& sums, const Dense& p, int row, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row += warp / 4 * WARP_M + lane / 4;
    column += warp % 4 * WARP_N + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<uint32_t*>(p.c + int64_t(row + 16 * i + 8 * h) * p.n + column + 8 * j) =
                    pack_bf16(sums[i][j][2 * h], sums[i][j][2 * h + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tensor_cores(Dense p) {
    __shared__ alignas(128) uint8_t tiles[A_BYTES + B_BYTES];
    const uint32_t a_tile = smem_address(tiles), b_tile = a_tile + A_BYTES;
    const int across = p.n / BN, row = blockIdx.x / across * BM, column = blockIdx.x % across * BN;
    const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;  // 8 threads copy the 128 bytes of a row
    const bf16* a = p.a + int64_t(row + line) * p.k + chunk * CHUNK;
    const bf16* b = p.b + int64_t(column + line) * p.k + chunk * CHUNK;
    Accumulators sums = {};
    for (int k = 0; k < p.k; k += BK) {
        uint32_t of_a[COPIES][4], of_b[COPIES][4];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            load_16(of_a[i], a + int64_t(i * ROWS_AT_ONCE) * p.k + k);
            load_16(of_b[i], b + int64_t(i * ROWS_AT_ONCE) * p.k + k);
        }
        __syncthreads();  // all warps have read the tiles before
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const uint32_t at = place(line + i * ROWS_AT_ONCE, chunk);
            store_shared_16(a_tile + at, make_uint4(of_a[i][0], of_a[i][1], of_a[i][2], of_a[i][3]));
            store_shared_16(b_tile + at, make_uint4(of_b[i][0], of_b[i][1], of_b[i][2], of_b[i][3]));
        }
        __syncthreads();  // both tiles are there
        multiply(sums, a_tile, b_tile);
    }
    store(sums, p, row, column);
}
