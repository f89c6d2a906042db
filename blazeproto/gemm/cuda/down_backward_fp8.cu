// Down projection, backward to the activations, in fp8: down_backward.cu's, of quantized gradients, weights and H, which quantizes
// what it makes.
//
//   dA'[r] = S_dO[token(r)] S_W[e] (dO_q[token(r)] . W_q[e]^T)     dO_q (T, d) gathered, W_q (E, n, d); stays in registers
//   act    = f(gate) * g(up), from H_q (R, 2n) and its scales
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  rounded to bf16, then quantized like H
//   A'[r]  = S[p] act                            likewise, (R, n)
//
// H comes through the ring, 128 hidden units a stage, as in down_backward.cu: a consumer overwrites gate and up with dgate and dup,
// writes A' beside them, and all three are stored from the stage. A block's dgate, dup and A' are held in registers, as pairs of
// bf16, until the largest of each row is known.
//
//   ring    | A, B | A, B | ... | A, B |  gate | up | .   |  gate | up | .   |  A, B of the next tile
//                                            ldmatrix, derivative, quantize, stmatrix in place
//                                      | dgate | dup | A' |  --TMA--> dH_q, A'_q
//
// dH_q and its scales may be the same memory as H_q and its.
//
// Floor: max(2 n d R / 1480 TFLOP/s, (d T + n d E + (2n + 2n + n) R) bytes / 4.24 TB/s).
#include "block_scales.cuh"
#include "down_backward.cuh"

static_assert(GATED && PAIRED_ROWS && BN == 2 * BLOCK, "gate and up are halves of H; two blocks in a tile");

struct DownBackwardEpilogue : DownBackward<BLOCK, true> {
    using DownBackward::DownBackward;

    // By one thread of the producer.
    DEVICE static void load_stage(const RowsParams& p, const Ring& ring, const RowTile& of, int index) {
        mbarrier_arrive_expect_tx(ring.full_barrier(), 2 * PLANE_BYTES);
        tma_load_3d(ring.a(), &p.h, ring.full_barrier(), (of.column + index * BLOCK) / 2, of.row, 0);
    }

    // Runs before the tile's first stage is multiplied. By then the last stage of the tile before is stored.
    DEVICE void look_ahead(const RowTile& of) {
        release_stored();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = of.row + strip_row(h);
            score[h] = token_scale[h] = 0.0f;
            if (row >= of.row_end) continue;
            const int pair = load_s32(p.pairs.pair_indices + row);
            score[h] = load_f32(p.scores + pair);
            token_scale[h] = load_f32(p.a_scales + p.pairs.token(pair));
        }
    }

    DEVICE void scale_sums(float (&acc)[BN / 2]) { apply_scales(acc, token_scale); }

    DEVICE BlockScales block_scales(const RowTile& of) const {
        const int block = of.column / BLOCK;
        return {of.expert, (p.reduction + BK - 1) / BK, p.columns / BLOCK, block, min(block + 1, p.columns / BLOCK - 1)};
    }

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile& of, Ring& ring) {
        tile = of;
        d_score[0] = d_score[1] = 0.0f;
        float d_acts[BLOCK / 2];
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) d_acts[i] = acc[i];
#pragma unroll 1  // or the compiler would mix the blocks, which takes registers
        for (int column = tile.column; column < tile.column + BN; column += BLOCK) {
            if (IN_PAIRS(true ||) column < p.columns) {  // the whole CTA decides alike
                ring.wait_until_full();
                work_on_stage(d_acts, ring, column);
                ring.advance();
            }
#pragma unroll
            for (int i = 0; i < BLOCK / 2; ++i) d_acts[i] = acc[BLOCK / 2 + i];
        }
        store_score_gradient();
    }

   private:
    // Where the scales of a plane's block lie, by rows.
    DEVICE int64_t scales_of(int column, int plane) const { return int64_t((plane * p.columns + column) / BLOCK) * p.rows; }

    DEVICE void work_on_stage(const float* d_acts, const Ring& ring, int column) {
        const uint32_t gates = ring.a() + consumer_index() * STRIP * SWIZZLE_ROW;
        uint32_t at = slab_address(gates, 0);
        uint32_t d_gate[BLOCK_PAIRS], d_up[BLOCK_PAIRS], scaled[BLOCK_PAIRS];
        if (column < p.columns) {
            at = differentiate(d_acts, at, column, d_gate, d_up, scaled);
            warpgroup_sync();  // all have read H, and its scales
            quantize_block(d_gate, at, p.out0_scales + scales_of(column, 0), tile);
            quantize_block(d_up, at + PLANE_BYTES, p.out0_scales + scales_of(column, 1), tile);
            quantize_block(scaled, at + 2 * PLANE_BYTES, p.out1_scales + scales_of(column, 0), tile);
        }
        fence_proxy_async();
        release_stored();  // the stage before this one: TMA has read it by now
        warpgroup_sync();
        MARK(BEGIN, STORE);
        if (warpgroup_thread() == 0 && column < p.columns && tile.row < tile.row_end) {
            tma_store_rows(&p.out0, gates, column / 2, tile.row, tile.row_end, 0);
            tma_store_rows(&p.out0, gates + PLANE_BYTES, column / 2, tile.row, tile.row_end, 1);
            tma_store_rows(&p.out1, gates + 2 * PLANE_BYTES, column / 2, tile.row, tile.row_end);
            bulk_commit_group();
        }
        MARK(END, STORE);
        unreleased = ring.empty_barrier();
    }

    // Of this strip's block: gate, up -> dgate, dup, A', packed. gates_at: of gate's block, slab_address(..., 0), which is returned.
    DEVICE uint32_t differentiate(const float* d_acts, uint32_t gates_at, int column, uint32_t* d_gate, uint32_t* d_up,
                                  uint32_t* scaled) {
        float gate_scale[2] = {}, up_scale[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + strip_row(h);
            if (row >= tile.row_end) continue;
            gate_scale[h] = __ldcg(p.h_scales + scales_of(column, 0) + row);
            up_scale[h] = __ldcg(p.h_scales + scales_of(column, 1) + row);
        }
#pragma unroll
        for (int block = 0; block < BLOCK / 32; ++block) {
            uint32_t gate_quad[4], up_quad[4];
            ldmatrix_x4(gate_quad, gates_at ^ block << 5);
            ldmatrix_x4(up_quad, (gates_at ^ block << 5) + PLANE_BYTES);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // matrices 0, 2: rows l / 4; 1, 3: rows 8 + l / 4
                const int h = i % 2, group = 2 * block + i / 2, at = 4 * group + 2 * h;
                const float4 of = of_group(d_acts + group * 8, h);
                const float4 gate = dequantized(gate_quad[i], gate_scale[h]), up = dequantized(up_quad[i], up_scale[h]);
                const float s = token_scale[h];
                uint32_t made = 0;
                const Unit units[4] = {of_unit(gate.x, up.x, s * of.x, h),
                                       of_unit(gate.y, up.y, s * of.y, h),
                                       of_unit(gate.z, up.z, s * of.z, h),
                                       of_unit(gate.w, up.w, s * of.w, h)};
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const Unit &low = units[2 * pair], &high = units[2 * pair + 1];
                    d_gate[at + pair] = pack_bf16(low.d_gate, high.d_gate);
                    d_up[at + pair] = pack_bf16(low.d_up, high.d_up);
                    scaled[at + pair] = pack_bf16(low.a, high.a);
                    made |= d_gate[at + pair] | d_up[at + pair] | scaled[at + pair];
                }
                // ptxas would put off what is packed and added here until the block's end, and keep all that goes into it. So what
                // comes next seems to depend on it: `zero` is 0, which ptxas does not know.
                const int zero = LOW_RANK ? p.bias_stride : p.rank;
                made |= __float_as_uint(d_score[h]);
                if (i < 3) gate_quad[i + 1] += made & zero;
                else gates_at += made & zero;
            }
        }
        return gates_at;
    }
};

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    down_backward_fp8(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, DownBackwardEpilogue>(p);
}
