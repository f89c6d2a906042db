// Rung 4. TMA: one thread copies whole boxes, and a barrier in shared memory counts the bytes that have landed.
//
//   C (m, n) = A (m, k) B (n, k)^T, all bf16 and row-major, sums in fp32. m, n and k are multiples of BM, BN and BK.
//
//   thread 0    expects 48 KB at full[s], starts two copies ----> | A 128 x 64 | B 256 x 64 |   stage s of 4
//   8 warps     wait for full[s], ldmatrix and mma.sync, arrive at empty[s]
//   thread 0    waits for empty[s], and fills the stage again
//
// On rung 3 all threads compute addresses, copy 16 bytes at a time, and meet at a __syncthreads in each step. Here a tensor map
// has the addresses, the copy swizzles, and only thread 0 waits for other warps. The tile is larger: registers hold sums alone.
#include "swizzle.cuh"

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 64, WARPS = BM / WARP_ROWS * (BN / WARP_COLUMNS), THREADS = 32 * WARPS;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BARRIERS = STAGES * STAGE_BYTES;  // where they lie in shared memory, behind the stages
constexpr int ROW_GROUP = 16;                   // row blocks of a tile order that keeps A and B in L2

struct Dense {
    TensorMap a, b;  // boxes of BM x BK and BN x BK, 128-byte swizzle
    bf16* c;
    int m, n, k;
};

extern __shared__ __align__(1024) uint8_t shared[];

// The ring, at one step of the reduction. A barrier's phase ends once for each round, so a wait names the round's parity.
DEVICE uint32_t stage_at(uint32_t step) { return smem_address(shared) + step % STAGES * STAGE_BYTES; }
DEVICE uint32_t full_at(uint32_t step) { return smem_address(shared) + BARRIERS + step % STAGES * 8; }
DEVICE uint32_t empty_at(uint32_t step) { return full_at(step) + STAGES * 8; }
DEVICE uint32_t parity_at(uint32_t step) { return step / STAGES % 2; }

struct Tile {
    int row, column;
};

// Groups of ROW_GROUP row blocks; in a group column by column. So the 132 tiles that run at a time read few different rows.
DEVICE Tile tile_at(const Dense& p, int index) {
    const int columns = p.n / BN, group = index / (ROW_GROUP * columns), left = index % (ROW_GROUP * columns);
    const int rows = min(ROW_GROUP, p.m / BM - group * ROW_GROUP);
    return {(group * ROW_GROUP + left % rows) * BM, left / rows * BN};
}

// By thread 0. In the first round the stage is empty: a wait for the parity before the first phase ends at once.
DEVICE void load(const Dense& p, const Tile& tile, int step) {
    mbarrier_wait(empty_at(step), parity_at(step) ^ 1);
    fence_proxy_async();  // ldmatrix read the stage through the generic proxy, TMA writes through the async one
    mbarrier_arrive_expect_tx(full_at(step), STAGE_BYTES);
    tma_load_2d(stage_at(step), &p.a, full_at(step), step * BK, tile.row);
    tma_load_2d(stage_at(step) + A_BYTES, &p.b, full_at(step), step * BK, tile.column);
}

// The fragments of 16 elements of k: 64 rows of A, 64 of B. a_at, b_at: this lane's chunks of the first 16 rows.
struct Fragments {
    uint32_t a[4][4], b[4][4];

    DEVICE void load(uint32_t a_at, uint32_t b_at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ldmatrix_x4(a[i], a_at + i * 16 * SWIZZLE_ROW);
            ldmatrix_x4(b[i], b_at + i * 16 * SWIZZLE_ROW);
        }
    }

    DEVICE void multiply(float (&acc)[4][8][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) mma_m16n8k16(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) tma(const __grid_constant__ Dense p) {
    const Tile tile = tile_at(p, blockIdx.x);
    const int steps = p.k / BK;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full_at(stage), 1);       // thread 0's arrival, and the bytes that it expects
            mbarrier_init(empty_at(stage), WARPS);  // an arrival of each warp
        }
        fence_mbarrier_init();
        for (int step = 0; step < min(STAGES, steps); ++step) load(p, tile, step);
    }
    __syncthreads();

    // A lane's chunks: of A, rows 0..15 at k 0..7, then at k 8..15; of B, rows 0..7 at both, then rows 8..15.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 4 * WARP_ROWS, column = warp % 4 * WARP_COLUMNS;  // of the tile, this warp's first
    const uint32_t a_offset = swizzled(0, row + lane % 16, lane / 16);
    const uint32_t b_offset = swizzled(A_BYTES, column + lane / 16 * 8 + lane % 8, lane / 8 % 2);

    float acc[4][8][4] = {};
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full_at(step), parity_at(step));
        const uint32_t a = stage_at(step) + a_offset, b = stage_at(step) + b_offset;
        Fragments fragments[2];
        fragments[0].load(a, b);
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {  // chunks 2i and 2i + 1 of a row: an exclusive or, as the swizzle is one
            if (i + 1 < BK / 16) fragments[(i + 1) % 2].load(a ^ (i + 1) << 5, b ^ (i + 1) << 5);
            fragments[i % 2].multiply(acc);
        }
        __syncwarp();
        mbarrier_arrive_if(lane == 0, empty_at(step));
        // The stage of the step before: by now the other warps have left it, too.
        if (threadIdx.x == 0 && step > 0 && step + STAGES - 1 < steps) load(p, tile, step + STAGES - 1);
    }

    bf16* at = p.c + int64_t(tile.row + row + lane / 4) * p.n + tile.column + column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i)  // 8 rows each
#pragma unroll
        for (int j = 0; j < 8; ++j)
            *reinterpret_cast<uint32_t*>(at + int64_t(i) * 8 * p.n + j * 8) =
                pack_bf16(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
}
