// Rows times weights, and nothing after that but a bias. It is four of the products, by how it is compiled.
//
//   down forward          Y[r]   = act[r] . W_down[e]^T (+ bias)   contiguous, W_down (E, d, n) K-major. Algorithm 1, line 10
//   up backward, rows     dX~[r] = dH[r] . W_up[e]                 contiguous, W_up (E, 2n, d) MN-major. Algorithm 1, line 30
//   down forward, fused   O[token(r)] += S[pair(r)] Y[r]           FUSED_COMBINE 1: fp32 reductions into O (T, d), in no fixed
//                                                                  order. MoEBlaze section 3.1
//   up backward, fused    dX[token(r)] += dX~[r]                   FUSED_COMBINE 2: likewise, without S. Section 3.2, step 3
//
// FP16 1: rows and weights are fp16, each row of the output is multiplied by a scale: a router's dX.
//
//   rows     --TMA or gather-->  A (BM x 64)  \
//                                               wgmma -> acc (BM x BN) -> slabs --TMA--> out (R, columns)
//   weights  --TMA------------>  B (BN x 64)  /
//
// All of the epilogue runs during the next tile's mainloop: a consumer packs its accumulators, and an epilogue warp for
// each strip stores them (slab_pipeline.cuh). Where rows are contiguous, the producer's warpgroup has three warps to spare
// for that; where they are gathered, there is an epilogue warpgroup.
//
// Floor: max(2 columns reduction R / 785 TFLOP/s, 2 (reduction R + columns R + columns reduction E) bytes / 4.24 TB/s).
#include "slab_pipeline.cuh"
#include "varlen_m.cuh"

using Scheduler = TileScheduler<BN>;

struct LinearEpilogue : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = PIPELINE_BYTES;
    static constexpr int PARTS = FUSED_COMBINE ? 0 : BN / PART_COLUMNS;
    const RowsParams& p;
    SlabPipeline pipeline;
    uint32_t out[BN / 4];  // the strip as it is stored: pairs of bf16

    DEVICE explicit LinearEpilogue(const RowsParams& params) : p(params) {}

    DEVICE static void init() { SlabPipeline::init(1); }

    DEVICE uint32_t bias_pair(const RowTile& tile, int column) const {
        if (!HAS_BIAS || column >= p.columns) return 0;
        return load_bf16x2(p.bias + int64_t(tile.expert) * p.bias_stride + column);
    }

#if FP16
    float scale[2];  // of this thread's rows

    DEVICE void look_ahead(const RowTile& tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = load_f32(p.scores + min(tile.row + strip_row(h), p.rows - 1));
    }
#endif

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile& tile, const Ring&) {
        if constexpr (FUSED_COMBINE) {
            add_to_tokens(acc, tile);
            return;
        }
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {
#if FP16
            out[i] = pack_bf16(acc[2 * i] * scale[i % 2], acc[2 * i + 1] * scale[i % 2]);
            continue;
#endif
            const uint32_t bias = bias_pair(tile, tile.column + i / 2 * 8 + threadIdx.x % 4 * 2);
            out[i] = pack_biased(acc[2 * i], acc[2 * i + 1], bias);
        }
    }

    template <class Of = Element>
    DEVICE typename Of::Scales block_scales(const RowTile& tile) const {
        const int block = tile.column / Of::BLOCK;
        typename Of::Scales scales(tile.expert, (p.reduction + BK - 1) / BK, (p.bias_stride + Of::BLOCK - 1) / Of::BLOCK, block,
                                   min(block + 1, (p.columns - 1) / Of::BLOCK));
        scales.set_rows(tile.row + strip_row(0), tile.row_end - 1);
        return scales;
    }

    DEVICE bool ready(int) const { return pipeline.empty(); }

    template <int INDEX>
    DEVICE void part() {
        pipeline.fill([&](int plane, int i) { return out[(INDEX * PLANES + plane) * PAIRS_IN_SLAB + i]; });
    }

    // One warp a strip; the first warp of the warpgroup may be the producer.
    DEVICE static void store_staged(const RowsParams& p, const Scheduler& scheduler) {
        const int strip = warpgroup_thread() / 32 - 1, lane = threadIdx.x % 32;
        if (PARTS == 0 || strip < 0 || strip >= CONSUMERS) return;
        uint32_t phase = 0;
        for (int position = 0; scheduler.has(position); ++position) {
            MARK(AT, TILE);
#pragma unroll 1
            for (int part = 0; part < PARTS; ++part) {
                MARK(BEGIN, WAIT_FULL);
                mbarrier_wait(filled_barrier(strip), phase);
                MARK(END, WAIT_FULL);
                MARK(BEGIN, STORE);
                phase ^= 1;
                const RowTile tile = scheduler.at(position);
                const int row = tile.row + strip * STRIP;
                const bool whole = row + STRIP <= tile.row_end;
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) {
                    const uint32_t slab = slabs_of(strip) + plane * SLAB_BYTES;
                    const int column = tile.column + part * PART_COLUMNS + plane * SLAB;
                    if (!whole) {
                        store_slab_predicated<32>(slab, p.out0_rows + int64_t(row) * p.columns + column, p.columns,
                                                  tile.row_end - row, p.columns - column);
                    } else if (lane == 0 && column < p.columns) {
                        tma_store_2d(&p.out0, slab, column, row);
                    }
                }
                __syncwarp();
                if (lane == 0) {
                    bulk_commit_group();
                    bulk_wait_group_read<0>();
                    mbarrier_arrive(emptied_barrier(strip));
                }
                MARK(END, STORE);
            }
        }
        if (lane == 0) bulk_wait_group<0>();
    }

    DEVICE void add_to_tokens(const float (&acc)[BN / 2], const RowTile& tile) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + strip_row(h);
            if (row >= tile.row_end) continue;
            const int pair = __ldg(p.pairs.pair_indices + row);
            const float score = FUSED_COMBINE == 2 ? 1.0f : __ldg(p.scores + pair);
            float* token = p.reduction_out + int64_t(p.pairs.token(pair)) * p.columns;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const int column = tile.column + j * 8 + threadIdx.x % 4 * 2;
                if (column >= p.columns) continue;
                const uint32_t bias = bias_pair(tile, column);
                reduce_add_f32x2(token + column, score * (acc[4 * j + 2 * h] + bf16_low(bias)),
                                 score * (acc[4 * j + 2 * h + 1] + bf16_high(bias)));
            }
        }
    }
};

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    linear(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, LinearEpilogue>(p);
}
