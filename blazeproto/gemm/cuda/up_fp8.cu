// Up projection, forward, in fp8: up.cu's, of quantized tokens and weights, which quantizes what it makes.
//
//   H[r]   = S_x[token(r)] S_W[e] (x_q[token(r)] . W_q[e]^T) (+ bias)   x_q (T, d) gathered, W_q (E, 2n, d); H rounded to bf16
//   act[r] = f(gate) * g(up)                                      rounded to bf16
//   H_q, act_q and their scales: a row's 128 columns share one    H_q (R, 2n), act_q (R, n); (2n / 128, R), (n / 128, R)
//
// BLOCK_SCALES 1: vLLM's bits. S_x (T, d / 128) is applied where sums are added, act's scales are float32, and SiLU(gate) is rounded to
// bf16 before up multiplies it.
//
//   x_q rows  --gather-->  A (BM x 128)  \
//                                          wgmma, sums -> gate, up (64 x 128 a consumer) -> two slabs --TMA--> H_q
//   W_q       --TMA----->  B (BN x 128)  /                              \--> act -> one of them again --TMA--> act_q
//
// A tile is 128 hidden units: B stacks their gate rows over their up rows, so a thread has gate and up of a unit. A consumer makes
// act while its H leaves; meanwhile the other consumer multiplies.
//
// Floor: max(4 n d R / 1480 TFLOP/s, (d T + 2 n d E + 3 n R) bytes / 4.24 TB/s).
#include "activation.cuh"
#include "block_scales.cuh"
#include "varlen_m.cuh"

static_assert(GATED && PAIRED_ROWS && BN == 2 * BLOCK, "gate and up of 128 hidden units, each with a scale for a row");

using Scheduler = TileScheduler<BLOCK>;
#if BLOCK_SCALES
using OfAct = FloatScale;
#else
using OfAct = Scale;
#endif

struct UpEpilogue : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = SLAB_PAIR_BYTES;
    static constexpr int PARTS = 0;
    const RowsParams& p;
    float token_scale[2];  // of this thread's rows

    DEVICE explicit UpEpilogue(const RowsParams& params) : p(params) {}

    DEVICE int token(int row) const { return p.pairs.token(load_s32(p.pairs.pair_indices + row)); }

    DEVICE void look_ahead(const RowTile& tile) {
        if (BLOCK_SCALES) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + strip_row(h);
            token_scale[h] = 0.0f;
            if (row < tile.row_end) token_scale[h] = load_f32(p.a_scales + token(row));
        }
    }

    DEVICE void scale_sums(float (&acc)[BN / 2]) {
        if (!BLOCK_SCALES) apply_scales(acc, token_scale);
    }

    DEVICE BlockScales block_scales(const RowTile& tile) const {
        const int blocks = p.columns / BLOCK, gate = tile.column / BLOCK, steps = (p.reduction + BK - 1) / BK;
        BlockScales scales(tile.expert, steps, 2 * blocks, gate, blocks + gate);
        if (BLOCK_SCALES) {
            const int row = tile.row + strip_row(0), last = tile.row_end - 1;
            scales.set_tokens(token(min(row, last)), token(min(row + 8, last)), steps);
        }
        return scales;
    }

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile& tile, const Ring&) {
        uint32_t gate[BLOCK_PAIRS], up[BLOCK_PAIRS];  // block_scales.cuh: packed
        const bf16* bias = p.bias + int64_t(tile.expert) * p.bias_stride + tile.column;
        scaled(acc, bias, gate);
        scaled(acc + BN / 4, bias + p.columns, up);

        const uint32_t at = slab_address(slabs_of(consumer_index()), 0);
        float* h_scales = p.out0_scales + int64_t(tile.column / BLOCK) * p.rows;
        skip_slab();  // the act of the tile before has been read
        quantize_block(gate, at, h_scales, tile);
        quantize_block(up, at + SLAB_BYTES, h_scales + int64_t(p.columns / BLOCK) * p.rows, tile);
        publish(2, [&](uint32_t slab, int half) {
            tma_store_rows(&p.out0, slab, tile.column / 2, tile.row, tile.row_end, half);
        });

#pragma unroll
        for (int i = 0; i < BLOCK_PAIRS; ++i) {
#if BLOCK_SCALES && ACTIVATION_IS_SILU
            const uint32_t silu = pack_bf16(silu_of(bf16_low(gate[i])), silu_of(bf16_high(gate[i])));
            gate[i] = pack_bf16(bf16_low(silu) * bf16_low(up[i]), bf16_high(silu) * bf16_high(up[i]));
#else
            const float low = act_of(bf16_low(gate[i]), bf16_low(up[i])), high = act_of(bf16_high(gate[i]), bf16_high(up[i]));
            gate[i] = pack_bf16(low, high);
#endif
        }
        skip_slab();  // H has been read
        quantize_block<OfAct>(gate, at, p.out1_scales + int64_t(tile.column / BLOCK) * p.rows, tile);
        publish(1, [&](uint32_t slab, int) { tma_store_rows(&p.out1, slab, tile.column / 2, tile.row, tile.row_end); });
    }

   private:
    // A block of the sums, scaled, with its columns' biases, and packed.
    DEVICE void scaled(const float* acc, const bf16* bias, uint32_t* packed) const {
#pragma unroll
        for (int group = 0; group < BLOCK / GROUP; ++group) {
            const bf16* of_columns = bias + group * GROUP + threadIdx.x % 4 * 4;
            const uint32_t low = HAS_BIAS ? load_bf16x2(of_columns) : 0, high = HAS_BIAS ? load_bf16x2(of_columns + 2) : 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 of = of_group(acc + group * 8, h);
                const float by = BLOCK_SCALES ? 1.0f : token_scale[h];
                packed[group * 4 + 2 * h] = pack_biased(by * of.x, by * of.y, low);
                packed[group * 4 + 2 * h + 1] = pack_biased(by * of.z, by * of.w, high);
            }
        }
    }

    DEVICE static float silu_of(float gate) { return gate / (1.0f + expf(-gate)); }

    DEVICE static float act_of(float gate, float up) { return nonlinearity(gate).value * linear_half(up).value; }

    // Stores `count` slabs.
    template <class Store>
    DEVICE static void publish(int count, Store store) {
        const uint32_t slabs = slabs_of(consumer_index());
        fence_proxy_async();
        warpgroup_sync();
        if (warpgroup_thread() == 0) {
            for (int i = 0; i < count; ++i) store(slabs + i * SLAB_BYTES, i);
            bulk_commit_group();
        }
    }
};

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    up_forward_fp8(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, UpEpilogue>(p);
}
