// Rung 3. A ring of stages in shared memory, filled by cp.async: stages are copied while another one is multiplied.
//
//   C (m, n) = A (m, k) B (n, k)^T, all bf16 and row-major, sums in fp32. m, n and k are multiples of BM, BN and BK.
//
//   step        0       1       2       3          A stage holds BK = 64 of the reduction. cp.async moves 16 bytes from global to
//   copies      s2      s0      s1      s2         shared memory without a register, and the thread goes on. `multiply` and
//   products    s0      s1      s2      s0         `store` are those of rung 2; blazeproto/gemm/cuda/ampere goes on from here.
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
constexpr int A_BYTES = BM * ROW_BYTES, STAGE_BYTES = A_BYTES + BN * ROW_BYTES, STAGES = 3;

// Where a chunk of 16 bytes lies: swizzled, so that ldmatrix has no bank conflicts.
DEVICE uint32_t place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row % 8)) * CHUNK_BYTES); }

using Accumulators = float[WARP_M / 16][WARP_N / 8][4];

DEVICE void multiply(Accumulators& sums, uint32_t a_tile, uint32_t b_tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 4 * WARP_M, column = warp % 4 * WARP_N;
#pragma unroll
    for (int step = 0; step < BK / MMA_K; ++step) {
        uint32_t a[WARP_M / 16][4], b[WARP_N / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i)
            ldmatrix_x4(a[i], a_tile + place(row + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j)
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

// This thread's part of a stage: a chunk of every 32nd row of A and of B. `place` repeats every 8 rows.
DEVICE void copy(uint32_t to, const bf16* a, const bf16* b, int64_t rows_apart) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        cp_async_16(to + i * ROWS_AT_ONCE * ROW_BYTES, a + i * rows_apart, true);
        cp_async_16(to + i * ROWS_AT_ONCE * ROW_BYTES + A_BYTES, b + i * rows_apart, true);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ring(Dense p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t stages = smem_address(shared);
    const int across = p.n / BN, row = blockIdx.x / across * BM, column = blockIdx.x % across * BN, steps = p.k / BK;
    const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;  // 8 threads copy the 128 bytes of a row
    const bf16* a = p.a + int64_t(row + line) * p.k + chunk * CHUNK;
    const bf16* b = p.b + int64_t(column + line) * p.k + chunk * CHUNK;
    const int64_t rows_apart = int64_t(ROWS_AT_ONCE) * p.k;
    const uint32_t to = stages + place(line, chunk);
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy(to + step * STAGE_BYTES, a + step * BK, b + step * BK, rows_apart);
        cp_async_commit_group();  // a group a step, an empty one past the end
    }
    Accumulators sums = {};
    for (int step = 0; step < steps; ++step) {
        const int ahead = step + STAGES - 1;  // the step whose stage is copied now, to where step - 1 was
        cp_async_wait_group<STAGES - 2>();    // this thread's copies of this step have landed,
        __syncthreads();                      // and all threads' copies; and all warps have multiplied step - 1
        if (ahead < steps) copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);
        cp_async_commit_group();
        const uint32_t stage = stages + step % STAGES * STAGE_BYTES;
        multiply(sums, stage, stage + A_BYTES);
    }
    store(sums, p, row, column);
}
