// Rung 6. All experts in one launch: rows gathered where they lie, tails, SwiGLU on the sums.
//   act[r] = silu(x[token] W[e, :n]^T) * (x[token] W[e, n:]^T),  token = pairs[r] / top_k,  offsets[e] <= r < offsets[e + 1]
//
//   warpgroup 0, the producer             ring of 4 stages                  warpgroups 1 and 2, 64 rows each
//   128 threads, cp.async  x rows ------> | A 128 | B 128 gate, 128 up | -> wgmma -> silu(acc[i]) * acc[i + 64] -> act
//   one thread, TMA        W boxes --------------------^
//
// Rows past an expert's end are zeros, never stored, and 64 of them are not multiplied. d: a multiple of BK; n: of 4.
#include "wgmma.cuh"
constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, UNITS = BN / 2, WARPGROUP = 128;  // UNITS: columns of act in a tile
constexpr int A_BYTES = BM * BK * 2, STRIP_BYTES = A_BYTES / 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BARRIERS = STAGES * STAGE_BYTES, PASS_ROWS = WARPGROUP / CHUNKS_IN_ROW, PASSES = BM / PASS_ROWS;

struct Grouped {
    TensorMap w;  // (E, 2, n, d) in boxes of 1 x 2 x UNITS x BK: gate and up of the same units
    const bf16* x;
    const int *pairs, *offsets;
    bf16* act;
    int tokens, d, n, experts, top_k;
};

extern __shared__ __align__(1024) uint8_t shared[];
DEVICE uint32_t stage_at(uint32_t passed) { return smem_address(shared) + passed % STAGES * STAGE_BYTES; }
DEVICE uint32_t full_at(uint32_t passed) { return smem_address(shared) + BARRIERS + passed % STAGES * 8; }
DEVICE uint32_t empty_at(uint32_t passed) { return full_at(passed) + STAGES * 8; }
DEVICE uint32_t parity_at(uint32_t passed) { return passed / STAGES % 2; }

// A place in the list of tiles, which goes expert by expert, then column by column, so that row blocks share weights in L2.
struct Tile {
    int expert = 0, before = 0, row, row_end, column;  // before: tiles of earlier experts
    DEVICE bool find(const Grouped& p, int index) {    // an index past the last one's
        for (; expert < p.experts; ++expert) {
            row = p.offsets[expert], row_end = p.offsets[expert + 1];
            const int blocks = (row_end - row + BM - 1) / BM, tiles = blocks * ((p.n + UNITS - 1) / UNITS), i = index - before;
            if (i < tiles) return row += i % blocks * BM, column = i / blocks * UNITS, true;
            before += tiles;
        }
        return false;
    }
};

// Thread t copies chunk t % 8 of rows t / 8, t / 8 + 16, ... Their addresses are found once a tile.
DEVICE void produce(const Grouped& p) {
    const int first = threadIdx.x / CHUNKS_IN_ROW, chunk = threadIdx.x % CHUNKS_IN_ROW;
    uint32_t passed = 0;
    Tile tile;
    for (int index = blockIdx.x; tile.find(p, index); index += gridDim.x) {
        const int row = tile.row + first;
        const bf16* rows[PASSES];
        for (int i = 0; i < PASSES; ++i)
            rows[i] = p.x + int64_t(p.pairs[min(row + i * PASS_ROWS, tile.row_end - 1)] / p.top_k) * p.d + chunk * CHUNK;
        for (int k = 0; k < p.d; k += BK, ++passed) {
            mbarrier_wait(empty_at(passed), parity_at(passed) ^ 1);
            if (threadIdx.x == 0)
                mbarrier_arrive_expect_tx(full_at(passed), B_BYTES),
                    tma_load_4d(stage_at(passed) + A_BYTES, &p.w, full_at(passed), k, tile.column, 0, tile.expert);
            const uint32_t to = swizzled(stage_at(passed), first, chunk);
            for (int i = 0; i < PASSES; ++i)
                cp_async_16(to + i * PASS_ROWS * SWIZZLE_ROW, rows[i] + k, row + i * PASS_ROWS < tile.row_end);
            cp_async_mbarrier_arrive(full_at(passed));  // once this thread's copies have landed
        }
    }
}

DEVICE float swiglu(float gate, float up) { return 0.5f * gate * (1.0f + tanh_approx(0.5f * gate)) * up; }
DEVICE void store(const Grouped& p, const float (&acc)[BN / 2], const Tile& tile, int strip) {
    const int lane = threadIdx.x % 32, odd = lane % 2, column = tile.column + odd * 8 + lane % 4 / 2 * 4;
    const int row = tile.row + strip * WGMMA_M + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < UNITS / 2; i += i % 8 ? 6 : 2) {  // two sums of each i and i + 4: this row's, or the one 8 below
        const int r = row + i % 8 * 4, c = column + i / 8 * 16;
        const uint32_t first = pack_bf16(swiglu(acc[i], acc[i + 64]), swiglu(acc[i + 1], acc[i + 65]));
        const uint32_t second = pack_bf16(swiglu(acc[i + 4], acc[i + 68]), swiglu(acc[i + 5], acc[i + 69]));
        const uint32_t other = __shfl_xor_sync(~0u, odd ? first : second, 1);  // four lanes store a whole sector, as on rung 5
        uint2* const four = reinterpret_cast<uint2*>(p.act + int64_t(r) * p.n + c);
        if (r < tile.row_end && c < p.n) *four = odd ? make_uint2(other, second) : make_uint2(first, other);
    }
}

DEVICE void consume(const Grouped& p, int strip) {
    const bool leads = threadIdx.x % 32 == 0;
    float acc[BN / 2];
    uint32_t passed = 0;
    Tile next;
    for (int index = blockIdx.x, more = next.find(p, index); more;) {
        const Tile tile = next;
        const bool idle = tile.row + strip * WGMMA_M >= tile.row_end;  // no row: the stages are only given back
        for (int k = 0; idle && k < p.d; k += BK, ++passed)
            mbarrier_wait(full_at(passed), parity_at(passed)), mbarrier_arrive_if(leads, empty_at(passed));
        for (int k = 0; !idle && k < p.d; k += BK, ++passed) {
            mbarrier_wait(full_at(passed), parity_at(passed));
            fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one
            const uint32_t at = stage_at(passed), a = descriptor_low(at + strip * STRIP_BYTES, 0), b = descriptor_low(at + A_BYTES, 0);
            pin_registers(acc);
            wgmma_fence();
            for (int i = 0; i < BK / WGMMA_K; ++i)
                wgmma<0, 0>(acc, matrix_descriptor(a + 2 * i), matrix_descriptor(b + 2 * i), k > 0 || i > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            mbarrier_arrive_if(leads && k > 0, empty_at(passed - 1));
        }
        more = next.find(p, index += gridDim.x);  // while the last products run
        wgmma_wait_group<0>();
        pin_registers(acc);
        mbarrier_arrive_if(leads && !idle, empty_at(passed - 1));
        if (!idle) store(p, acc, tile, strip);
    }
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1) grouped(const __grid_constant__ Grouped p) {
    for (int stage = 0; threadIdx.x == 0 && stage < STAGES; ++stage) {
        mbarrier_init(full_at(stage), 1 + WARPGROUP);  // the thread that issues TMA, and all threads' copies
        mbarrier_init(empty_at(stage), 2 * 4);         // every warp that reads the stage
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) setmaxnreg_dec<56>(), produce(p);
    else setmaxnreg_inc<224>(), consume(p, threadIdx.x / WARPGROUP - 1);  // 56 + 2 * 224 = 3 * 168
}
