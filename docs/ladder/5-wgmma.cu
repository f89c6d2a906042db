// Rung 5. wgmma reads both operands from shared memory, and warps specialise.
//
//   C (m, n) = A (m, k) B (n, k)^T, all bf16 and row-major, sums in fp32. m, n and k are multiples of BM, BN and BK.
//
//   warpgroup 0, the producer            ring of 4 stages                 warpgroups 1 and 2, the consumers
//   one thread, TMA  ------------------> | A 128 x 64 | B 256 x 64 |  -->  1: wgmma on rows 0..63 of the tile
//                                        full[s]: the bytes are there      2: wgmma on rows 64..127
//                                        empty[s]: both have read
//
// One wgmma multiplies 64 x 16 by 16 x 256. No thread loads fragments; only the sums are in registers, 128 of each thread. The
// producer gives registers to the consumers, and fills the ring for the next tile while they store this one.
#include "wgmma.cuh"

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int WARPGROUP = 128, CONSUMERS = BM / WGMMA_M, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BARRIERS = STAGES * STAGE_BYTES;  // where they lie in shared memory, behind the stages
constexpr int ROW_GROUP = 16;                   // row blocks of a tile order that keeps A and B in L2

struct Dense {
    TensorMap a, b;  // boxes of BM x BK and BN x BK
    bf16* c;
    int m, n, k;
};

extern __shared__ __align__(1024) uint8_t shared[];

// The ring, by the number of stages that a thread has passed. A barrier's phase ends once a round: a wait names its parity.
DEVICE uint32_t stage_at(uint32_t passed) { return smem_address(shared) + passed % STAGES * STAGE_BYTES; }
DEVICE uint32_t full_at(uint32_t passed) { return smem_address(shared) + BARRIERS + passed % STAGES * 8; }
DEVICE uint32_t empty_at(uint32_t passed) { return full_at(passed) + STAGES * 8; }
DEVICE uint32_t parity_at(uint32_t passed) { return passed / STAGES % 2; }

struct Tile {
    int row, column;
};

// Groups of ROW_GROUP row blocks; in a group column by column. So the 132 tiles that run at a time read few different rows.
DEVICE Tile tile_at(const Dense& p, int index) {
    const int columns = p.n / BN, group = index / (ROW_GROUP * columns), left = index % (ROW_GROUP * columns);
    const int rows = min(ROW_GROUP, p.m / BM - group * ROW_GROUP);
    return {(group * ROW_GROUP + left % rows) * BM, left / rows * BN};
}

DEVICE void produce(const Dense& p, int tiles) {
    uint32_t passed = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for (int k = 0; k < p.k; k += BK, ++passed) {
            mbarrier_wait(empty_at(passed), parity_at(passed) ^ 1);
            mbarrier_arrive_expect_tx(full_at(passed), STAGE_BYTES);
            tma_load_2d(stage_at(passed), &p.a, full_at(passed), k, tile.row);
            tma_load_2d(stage_at(passed) + A_BYTES, &p.b, full_at(passed), k, tile.column);
        }
    }
}

// acc[4j + 2h + i] of lane l in warp w of the four is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + i. Neighbouring lanes
// exchange halves of two j, so that each stores 8 bytes and four lanes store a whole sector of 32.
DEVICE void store(const Dense& p, const float (&acc)[BN / 2], int row, int column) {
    const int lane = threadIdx.x % 32, odd = lane % 2;
    bf16* at = p.c + int64_t(row + threadIdx.x / 32 % 4 * 16 + lane / 4) * p.n + column + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < BN / 2; i += 8)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t first = pack_bf16(acc[i + 2 * h], acc[i + 2 * h + 1]);
            const uint32_t second = pack_bf16(acc[i + 4 + 2 * h], acc[i + 5 + 2 * h]);
            const uint32_t other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            const uint2 four = odd ? make_uint2(other, second) : make_uint2(first, other);
            *reinterpret_cast<uint2*>(at + int64_t(h) * 8 * p.n + i * 2) = four;
        }
}

DEVICE void consume(const Dense& p, int tiles, int strip) {
    const bool leads = threadIdx.x % 32 == 0;
    float acc[BN / 2];
    uint32_t passed = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        for (int k = 0; k < p.k; k += BK, ++passed) {
            mbarrier_wait(full_at(passed), parity_at(passed));
            const uint32_t a = descriptor_low(stage_at(passed) + strip * WGMMA_M * SWIZZLE_ROW, 0);
            const uint32_t b = descriptor_low(stage_at(passed) + A_BYTES, 0);
            pin_registers(acc);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / WGMMA_K; ++i)  // 16 elements of k are 32 bytes; descriptors count in 16
                wgmma<0, 0>(acc, matrix_descriptor(a + 2 * i), matrix_descriptor(b + 2 * i), k > 0 || i > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();  // this stage's products go on; those of the stage before are done
            mbarrier_arrive_if(leads && k > 0, empty_at(passed - 1));
        }
        wgmma_wait_group<0>();
        pin_registers(acc);
        mbarrier_arrive_if(leads, empty_at(passed - 1));
        const Tile tile = tile_at(p, index);
        store(p, acc, tile.row + strip * WGMMA_M, tile.column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) specialised(const __grid_constant__ Dense p) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full_at(stage), 1);
            mbarrier_init(empty_at(stage), CONSUMERS * 4);  // an arrival of every warp that reads the stage
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int tiles = p.m / BM * (p.n / BN), warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) produce(p, tiles);
    } else {
        setmaxnreg_inc<232>();  // 40 + 2 * 232 = 3 * 168, which the CTA was launched with
        consume(p, tiles, warpgroup - 1);
    }
}
