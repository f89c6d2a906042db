// Weight gradients: for every expert, the gathered rows of one matrix against the expert-ordered rows of another.
//
//   TRANSPOSED 0   dW_down[e] (d, n)  = sum_r dO[token(r)]^T A'[r]    MoEBlaze Algorithm 1, line 18; SonicMoE Algorithm 3
//   TRANSPOSED 1   dW_up[e]   (2n, d) = sum_r dH[r]^T x[token(r)]     Algorithm 1, line 29; SonicMoE Algorithm 5
//
//   gathered rows, 64 at a time --cp.async--> A (64 x BM)  \
//                                                            wgmma, both operands MN-major -> acc (BM x BN)
//   ordered rows,  64 at a time --TMA-------> B (64 x BN)  /      acc[i, j] = sum_r gathered[r, i] ordered[r, j]
//
// The gathered matrix is always A (d wide), so dW_up comes out transposed and is turned by stmatrix on its way out.
//
// The last block of an expert runs into the next expert's rows, or into rows nobody wrote. Both operands are zeroed there
// (0 x NaN is NaN): the producers copy the ordered rows too by cp.async, which writes zeros for what is past the end.
//
// OUT_F32 1 writes fp32; with `accumulate`, adds to what is there.
//
// Floor: max(2 d width R / 785 TFLOP/s, 2 (d T + width R + d width E) bytes / 4.24 TB/s).
#include "epilogue.cuh"

constexpr int A_PANELS = BM / PANEL, B_PANELS = BN / PANEL;
constexpr int CHUNKS = PANEL * 2 / 16;                    // 16-byte chunks in a panel's row
constexpr int ROWS_A_PASS = WARPGROUP / CHUNKS;           // rows the producers copy at once
constexpr int PASSES = BK / ROWS_A_PASS;
static_assert(!PINGPONG && GATHER && STRIPS == 1, "the one shape this kernel is written for");

struct WeightParams {
    TensorMap ordered;  // (width, rows)
    TensorMap out;      // bf16 output: (n, d, E) or (d, 2n, E)
    const bf16* gathered_rows;  // (tokens, d)
    const bf16* ordered_rows;   // (rows, width)
    const int* pair_indices;
    const int* pair_tokens;
    const int* offsets;
    float* out_f32;
    int experts, gathered_width, ordered_width, top_k, accumulate;
};

struct WeightTile {
    int expert, first_row, row_end, i, j;
};

struct WeightScheduler {
    const WeightParams& p;
    int i_blocks, j_blocks, tiles;

    DEVICE explicit WeightScheduler(const WeightParams& params)
        : p(params), i_blocks((p.gathered_width + CLUSTER * BM - 1) / (CLUSTER * BM)),
          j_blocks((p.ordered_width + BN - 1) / BN), tiles(p.experts * i_blocks * j_blocks) {}

    DEVICE WeightTile at(int index, int rank) const {
        const int expert = index / (i_blocks * j_blocks), block = index % (i_blocks * j_blocks);
        return {expert, __ldg(p.offsets + expert), __ldg(p.offsets + expert + 1), (block % i_blocks * CLUSTER + rank) * BM,
                block / i_blocks * BN};
    }
};

DEVICE int steps_of(const WeightTile& tile) { return (tile.row_end - tile.first_row + BK - 1) / BK; }

// ---- producer --------------------------------------------------------------------------------------------------------
struct WeightProducer {
    const WeightParams& p;
    Ring ring;
    uint32_t rank;
    int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    uint32_t swizzled = first * SWIZZLE_ROW + ((chunk ^ (first & 7)) << 4);

    DEVICE WeightProducer(const WeightParams& params, const Ring& r, uint32_t cta) : p(params), ring(r), rank(cta) {}

    // The pair of each of this thread's passes, or -1 past the expert's end. Only loads: nothing waits for them here.
    DEVICE void load_pairs(int (&pair)[PASSES], const WeightTile& tile, int row) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + first + pass * ROWS_A_PASS;
            pair[pass] = r < tile.row_end ? __ldg(p.pair_indices + r) : -1;
        }
    }

    DEVICE int token_of(int pair) const {
        if (pair < 0) return -1;
        return p.top_k ? pair / p.top_k : __ldg(p.pair_tokens + pair);
    }

    // PANELS panels of 64 columns from column `left` of a row-major matrix; source row -1 becomes zeros.
    template <int PANELS>
    DEVICE void copy_panels(uint32_t dst, const bf16* matrix, int width, int left, const int (&row)[PASSES]) const {
#pragma unroll 1  // unrolled, the addresses of all panels would not fit the producer's registers
        for (int panel = 0; panel < PANELS; ++panel) {
            const int column = left + panel * PANEL + chunk * 8;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const bool valid = row[pass] >= 0 && column < width;
                const bf16* src = matrix + (valid ? int64_t(row[pass]) * width + column : 0);
                cp_async_16(dst + panel * PANEL_BYTES + swizzled + pass * ROWS_A_PASS * SWIZZLE_ROW, src, valid ? 16 : 0);
            }
        }
    }

    DEVICE void load_ordered(const WeightTile& tile, int row) const {
        constexpr int SHARE = B_PANELS / CLUSTER;
        constexpr uint16_t EVERYONE = (1 << CLUSTER) - 1;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int panel = rank * SHARE + i, column = tile.j + panel * PANEL;
            const uint32_t dst = ring.b() + panel * PANEL_BYTES;
            if constexpr (CLUSTER == 1) tma_load_2d(dst, &p.ordered, ring.full_barrier(), column, row);
            else tma_load_2d_multicast(dst, &p.ordered, ring.full_barrier(), column, row, EVERYONE);
        }
    }

    DEVICE void produce(const WeightTile& tile) {
        int next_pair[PASSES];
        load_pairs(next_pair, tile, tile.first_row);
        for (int row = tile.first_row; row < tile.row_end; row += BK) {
            int token[PASSES];
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) token[pass] = token_of(next_pair[pass]);
            load_pairs(next_pair, tile, row + BK);  // a step ahead of their use
            const bool tail = row + BK > tile.row_end;
            mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            if (threadIdx.x == 0) {
                if (tail) {
                    mbarrier_arrive(ring.full_barrier());
                } else {
                    mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                    load_ordered(tile, row);
                }
            }
            copy_panels<A_PANELS>(ring.a(), p.gathered_rows, p.gathered_width, tile.i, token);
            if (tail) {
                int ordered_row[PASSES];
#pragma unroll
                for (int pass = 0; pass < PASSES; ++pass) {
                    const int r = row + first + pass * ROWS_A_PASS;
                    ordered_row[pass] = r < tile.row_end ? r : -1;
                }
                copy_panels<B_PANELS>(ring.b(), p.ordered_rows, p.ordered_width, tile.j, ordered_row);
            }
            cp_async_mbarrier_arrive(ring.full_barrier());
            ring.advance();
        }
    }
};

// ---- epilogue --------------------------------------------------------------------------------------------------------
struct WeightEpilogue {
    static constexpr int SLABS = 2;
    static constexpr int SMEM_BYTES = SLABS * SLAB_BYTES;
    const WeightParams& p;
    SlabRing<SLABS> slabs;

    DEVICE WeightEpilogue(const WeightParams& params, uint32_t smem) : p(params), slabs(smem) {}

    DEVICE void store_slab(const float* acc, const WeightTile& tile, int i, int j) {
        const uint32_t slab = slabs.acquire();
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            uint32_t quad[4];
            pack_block(quad, acc + block * 8);
            if (TRANSPOSED) stmatrix_x4_trans(slab_address_transposed(slab, block), quad);
            else stmatrix_x4(slab_address(slab, block), quad);
        }
        slabs.release(
            true, [&](uint32_t s) { tma_store_3d(&p.out, s, TRANSPOSED ? i : j, TRANSPOSED ? j : i, tile.expert); },
            [](uint32_t) {});
    }

    DEVICE void store_f32(const float (&acc)[BN / 2], const WeightTile& tile, int i0) const {
        float* out = p.out_f32 + int64_t(tile.expert) * p.gathered_width * p.ordered_width;
        const int64_t i_stride = TRANSPOSED ? 1 : p.ordered_width, j_stride = TRANSPOSED ? p.gathered_width : 1;
#pragma unroll
        for (int x = 0; x < BN / 2; ++x) {
            const int i = i0 + threadIdx.x / 32 % 4 * 16 + x / 2 % 2 * 8 + threadIdx.x % 32 / 4;
            const int j = tile.j + x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2;
            if (i >= p.gathered_width || j >= p.ordered_width) continue;
            float* address = out + i * i_stride + j * j_stride;
            *address = p.accumulate ? *address + acc[x] : acc[x];
        }
    }

    DEVICE void operator()(const float (&acc)[BN / 2], const WeightTile& tile) {
        const int i = tile.i + consumer_index() * WG_M;
        if (i >= p.gathered_width) return;
        if constexpr (OUT_F32) {
            store_f32(acc, tile, i);
        } else {
#pragma unroll
            for (int slab = 0; slab < BN / 64; ++slab)
                if (tile.j + slab * 64 < p.ordered_width) store_slab(acc + slab * 32, tile, i, tile.j + slab * 64);
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    weight_gradient(const __grid_constant__ WeightParams p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    constexpr int EPILOGUE_OFFSET = STAGES * STAGE_BYTES;
    constexpr int BARRIER_OFFSET = EPILOGUE_OFFSET + CONSUMERS * WeightEpilogue::SMEM_BYTES;
    static_assert(BARRIER_OFFSET + Ring::BARRIER_BYTES <= SMEM_LIMIT, "the stages and the epilogue do not fit");

    const uint32_t base = smem_address(smem);
    Ring ring(base, base + BARRIER_OFFSET);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_sync();

    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const WeightScheduler scheduler(p);
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        WeightProducer producer(p, ring, rank);
        for (int index = first; index < scheduler.tiles; index += stride) producer.produce(scheduler.at(index, rank));
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        WeightEpilogue epilogue(p, base + EPILOGUE_OFFSET + consumer_index() * WeightEpilogue::SMEM_BYTES);
        for (int index = first; index < scheduler.tiles; index += stride) {
            const WeightTile tile = scheduler.at(index, rank);
            float acc[STRIPS][BN / 2];
#pragma unroll
            for (int x = 0; x < BN / 2; ++x) acc[0][x] = 0.0f;  // what an expert without tokens keeps
            multiply<1, 1>(acc, ring, steps_of(tile), consumer_index() * WG_M);
            epilogue(acc[0], tile);
        }
        if (warpgroup_thread() == 0) bulk_wait_group<0>();
    }
    if constexpr (CLUSTER > 1) cluster_sync();
}
