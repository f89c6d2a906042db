// Down projection, backward to the activations. MoEBlaze Algorithm 1, lines 20-28; SonicMoE Algorithm 3 and appendix D.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; stays in registers
//   act    = f(gate) * g(up), recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
//   dO rows --gather--> A  \
//                            wgmma -> acc = dA'
//   W_down  --TMA-----> B  /
//
// H comes through the same ring, in stages behind the tile's last A and B. A stage of 48 KB has room for 64 hidden units of
// the tile's 128 rows three times, so a consumer overwrites gate and up with dgate and dup, writes A' beside them, and all
// three are stored from the stage. So the epilogue needs no shared memory beside the ring, and while it works on H the next
// tile's A and B are loaded.
//
//   ring    | A, B | A, B | ... | A, B |  gate | up | .   |  gate | up | .   |  ...  | A, B of the next tile
//                                            ldmatrix, derivative, stmatrix in place
//                                      | dgate | dup | A' |  --TMA--> dH, A'
//
// Where gate and up alternate in H (layout.cuh), the two planes are its next 128 columns: gate and up of 32 hidden units each.
// ldmatrix would give a thread gate and up of other units than it has dA' of, so it loads and stores 8 bytes: of two units.
//
// dH may be the same memory as H: a tile loads its own rows of H before it stores their dH, and of the rows that it loads
// past its expert's end it uses nothing.
//
// Floor: max(2 n d R / 785 TFLOP/s, (2 d T + 2 n d E + 2 (2n + 2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "down_backward.cuh"
#include "layout.cuh"

static_assert(!DEFERRED, "dA' stays in fp32: no registers for it beside the next tile's accumulators");
constexpr int H_COLUMNS = SLAB;  // hidden units in a stage

struct DownBackwardEpilogue : DownBackward<H_COLUMNS, false> {
    static constexpr int H_BYTES = (GATED ? 2 : 1) * PLANE_BYTES;
    static constexpr bool LOOKS_AHEAD = true;
    using DownBackward::DownBackward;

    // By one thread of the producer.
    DEVICE static void load_stage(const RowsParams& p, const Ring& ring, const RowTile& of, int index) {
        const int column = of.column + index * H_COLUMNS;
        mbarrier_arrive_expect_tx(ring.full_barrier(), H_BYTES);
        if constexpr (ALTERNATING) {
            for (int plane = 0; plane < 2; ++plane)
                tma_load_3d(ring.a() + plane * PLANE_BYTES, &p.h, ring.full_barrier(), 2 * column + plane * SLAB, of.row, 0);
        } else {
            tma_load_3d(ring.a(), &p.h, ring.full_barrier(), column, of.row, 0);
        }
    }

    // Runs with the tile's first stage. By then the last stage of the tile before is stored, and its release costs no wait;
    // and the scores, which take two loads one after the other, arrive before they are needed.
    DEVICE void look_ahead(const RowTile& of) {
        release_stored();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = of.row + strip_row(h);
            score[h] = row < of.row_end ? load_f32(p.scores + load_s32(p.pairs.pair_indices + row)) : 0.0f;
        }
    }

    DEVICE void hold(const float (&acc)[BN / 2], const RowTile& of, Ring& ring) {
        tile = of;
        d_score[0] = d_score[1] = 0.0f;
#pragma unroll
        for (int index = 0; index < BN / H_COLUMNS; ++index) {
            const int column = tile.column + index * H_COLUMNS;
            if (IN_PAIRS(true ||) column < p.columns) {  // the whole CTA decides alike
                ring.wait_until_full();
                work_on_stage(acc + index * (H_COLUMNS / 2), ring, column);
                ring.advance();
            }
        }
        store_score_gradient();
    }

   private:
    DEVICE void work_on_stage(const float* d_acts, const Ring& ring, int column) {
        const uint32_t gates = ring.a() + consumer_index() * STRIP * SWIZZLE_ROW, scaled = gates + 2 * PLANE_BYTES;
#pragma unroll
        for (int block = 0; block < H_COLUMNS / 16; ++block) {
            if constexpr (ALTERNATING) differentiate_alternating(d_acts + block * 8, gates, block, slab_address(scaled, block));
            else differentiate(d_acts + block * 8, slab_address(gates, block), slab_address(scaled, block));
        }
        fence_proxy_async();
        release_stored();  // the stage before this one: TMA has read it by now
        warpgroup_sync();
        MARK(BEGIN, STORE);
        const int first = ALTERNATING ? 2 * column : column;  // of the first plane's columns of H
        if (warpgroup_thread() == 0 && tile.row < tile.row_end) {
            tma_store_rows(&p.out0, gates, first, tile.row, tile.row_end, 0);
            if (ALTERNATING) tma_store_rows(&p.out0, gates + PLANE_BYTES, first + SLAB, tile.row, tile.row_end, 0);
            else if (GATED) tma_store_rows(&p.out0, gates + PLANE_BYTES, column, tile.row, tile.row_end, 1);
            tma_store_rows(&p.out1, scaled, column, tile.row, tile.row_end);
            bulk_commit_group();
        }
        MARK(END, STORE);
        unreleased = ring.empty_barrier();
    }

    // A block of 16 hidden units in place: gate, up -> dgate, dup, and A'.
    DEVICE void differentiate(const float* d_acts, uint32_t gates_at, uint32_t scaled_at) {
        uint32_t gates[4], ups[4] = {}, scaled[4];
        ldmatrix_x4(gates, gates_at);
        if (GATED) ldmatrix_x4(ups, gates_at + PLANE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrices 0, 2: rows l / 4; 1, 3: rows 8 + l / 4
            const int h = i % 2;
            const Unit low = of_unit(bf16_low(gates[i]), bf16_low(ups[i]), d_acts[2 * i], h);
            const Unit high = of_unit(bf16_high(gates[i]), bf16_high(ups[i]), d_acts[2 * i + 1], h);
            gates[i] = pack_bf16(low.d_gate, high.d_gate);
            ups[i] = pack_bf16(low.d_up, high.d_up);
            scaled[i] = pack_bf16(low.a, high.a);
        }
        stmatrix_x4(gates_at, gates);
        if (GATED) stmatrix_x4(gates_at + PLANE_BYTES, ups);
        stmatrix_x4(scaled_at, scaled);
    }

    // The same where gate and up alternate: 16 units are 32 columns of H, half a plane. This thread has dA' of two units in each
    // of two groups of eight, in two rows.
    DEVICE void differentiate_alternating(const float* d_acts, uint32_t planes, int block, uint32_t scaled_at) {
        uint32_t scaled[4];
        const uint32_t plane = planes + block / 2 * PLANE_BYTES;
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int h = i % 2, chunk = block % 2 * 4 + i / 2 * 2 + lane / 2;
            const uint32_t at = swizzled(plane, strip_row(h), chunk) + lane % 2 * 8;
            uint2 pairs = load_shared_8(at);
            const Unit first = of_unit(bf16_low(pairs.x), bf16_high(pairs.x), d_acts[2 * i], h);
            const Unit second = of_unit(bf16_low(pairs.y), bf16_high(pairs.y), d_acts[2 * i + 1], h);
            pairs = make_uint2(pack_bf16(first.d_gate, first.d_up), pack_bf16(second.d_gate, second.d_up));
            store_shared_8(at, pairs);
            scaled[i] = pack_bf16(first.a, second.a);
        }
        stmatrix_x4(scaled_at, scaled);
    }
};

extern "C" __global__ void IN_PAIRS(__cluster_dims__(CLUSTER, 1, 1)) __launch_bounds__(PTXAS_THREADS, 1)
    down_backward(const __grid_constant__ RowsParams p) {
    run<Scheduler, RowProducer, DownBackwardEpilogue>(p);
}
