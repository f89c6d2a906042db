// Down projection, backward to the activations. MoEBlaze Algorithm 1, lines 20-28; SonicMoE Algorithm 3 and appendix D.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; stays in registers
//   act    = f(gate) * up, recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
//   dO rows --gather--> A  \                        H slabs --TMA--> | gate | up |   (the next two are on their way during the mainloop)
//                            wgmma -> acc = dA'  ->   ldmatrix, derivative, stmatrix in place
//   W_down  --TMA-----> B  /                                         | dgate | dup | + | A' |  --TMA--> dH, A'
//
// Floor: max(2 n d R / 785 TFLOP/s, (2 d T + 2 n d E + 2 (2n + 2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "activation.cuh"
#include "varlen_m.cuh"

constexpr bool GATED = is_gated(ACTIVATION);

struct DownBackwardEpilogue {
    static constexpr int BUFFERS = 2;  // of H
    static constexpr int H_BYTES = (GATED ? 2 : 1) * SLAB_BYTES;
    static constexpr int SMEM_BYTES = BUFFERS * H_BYTES + SLAB_BYTES;
    static constexpr int BARRIER_BYTES = BUFFERS * 8;
    static constexpr int SLABS = BN / 64;  // of one strip
    const RowsParams& p;
    uint32_t h_buffers, a_slab, h_barriers;
    uint32_t h_phase = 0;     // bit b: parity of buffer b's next arrival
    float score[STRIPS][2];   // S of this thread's rows

    DEVICE DownBackwardEpilogue(const RowsParams& params, uint32_t smem, uint32_t barriers)
        : p(params), h_buffers(smem), a_slab(smem + BUFFERS * H_BYTES), h_barriers(barriers) {
        if (threadIdx.x >= WARPGROUP && warpgroup_thread() == 0) {
            for (int b = 0; b < BUFFERS; ++b) mbarrier_init(h_barriers + b * 8, 1);
            fence_mbarrier_init();
        }
    }

    DEVICE static int thread_row(int h) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + h * 8; }

    // Slab `index` of the tile (strip by strip, columns within), into buffer index % BUFFERS. By one thread.
    DEVICE void load_h(const Tile& tile, int first_row, int index) const {
        const int buffer = index % BUFFERS;
        const uint32_t dst = h_buffers + buffer * H_BYTES, barrier = h_barriers + buffer * 8;
        const int row = tile.row + first_row + index / SLABS * 64, column = tile.column + index % SLABS * 64;
        mbarrier_arrive_expect_tx(barrier, H_BYTES);
        tma_load_3d(dst, &p.h, barrier, column, 0, row);
        if (GATED) tma_load_3d(dst + SLAB_BYTES, &p.h, barrier, column, 1, row);
    }

    // The last tile's stores have to be out of the buffers before the next tile's H comes in.
    DEVICE void prefetch(const Tile& tile, int first_row) {
        if (warpgroup_thread() == 0) {
            bulk_wait_group_read<0>();
            for (int index = 0; index < BUFFERS; ++index) load_h(tile, first_row, index);
        }
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = tile.row + first_row + strip * 64 + thread_row(h);
                score[strip][h] = row < tile.row_end ? __ldg(p.scores + __ldg(p.pair_indices + row)) : 0.0f;
            }
    }

    // One 16-column block in place: gate, up -> dgate, dup, and A'. Adds to the row sums of dS.
    DEVICE void differentiate(const float* d_act, uint32_t gate_slab, int block, const float (&s)[2], float (&d_score)[2]) const {
        uint32_t gates[4], ups[4], scaled[4];
        ldmatrix_x4(gates, slab_address(gate_slab, block));
        if (GATED) ldmatrix_x4(ups, slab_address(gate_slab + SLAB_BYTES, block));
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrices 0, 2: rows l / 4; 1, 3: rows 8 + l / 4
            const int h = i % 2;
            float d_gate[2], d_up[2], a[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const auto [value, slope] = nonlinearity<ACTIVATION>(j ? bf16_high(gates[i]) : bf16_low(gates[i]));
                const float up = GATED ? (j ? bf16_high(ups[i]) : bf16_low(ups[i])) : 1.0f;
                const float unscaled = d_act[2 * i + j], scaled_by_score = s[h] * unscaled, act = value * up;
                d_gate[j] = scaled_by_score * up * slope;
                d_up[j] = scaled_by_score * value;
                a[j] = s[h] * act;
                d_score[h] += unscaled * act;
            }
            gates[i] = pack_bf16(d_gate[0], d_gate[1]);
            ups[i] = pack_bf16(d_up[0], d_up[1]);
            scaled[i] = pack_bf16(a[0], a[1]);
        }
        stmatrix_x4(slab_address(gate_slab, block), gates);
        if (GATED) stmatrix_x4(slab_address(gate_slab + SLAB_BYTES, block), ups);
        stmatrix_x4(slab_address(a_slab, block), scaled);
    }

    DEVICE void store(uint32_t gate_slab, const Tile& tile, int row, int column) const {
        const bool whole = row + 64 <= tile.row_end;
        if (!whole) {
            const int64_t stride = (GATED ? 2 : 1) * p.columns;
            const int rows = tile.row_end - row, columns = p.columns - column;
            bf16* dh = p.out0_rows + row * stride + column;
            store_slab_predicated(gate_slab, dh, stride, rows, columns);
            if (GATED) store_slab_predicated(gate_slab + SLAB_BYTES, dh + p.columns, stride, rows, columns);
            store_slab_predicated(a_slab, p.out1_rows + int64_t(row) * p.columns + column, p.columns, rows, columns);
            warpgroup_sync();  // TMA may overwrite the buffer next
        }
        if (whole && warpgroup_thread() == 0) {
            tma_store_3d(&p.out0, gate_slab, column, 0, row);
            if (GATED) tma_store_3d(&p.out0, gate_slab + SLAB_BYTES, column, 1, row);
            tma_store_2d(&p.out1, a_slab, column, row);
            bulk_commit_group();
        }
    }

    // A row's sum over this tile's columns, in a fixed order: a thread's columns, then the four lanes of a row.
    DEVICE void store_score_gradient(float (&d_score)[2], const Tile& tile, int strip_row) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 1);
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 2);
            const int row = strip_row + thread_row(h);
            if (threadIdx.x % 4 == 0 && row < tile.row_end)
                p.reduction_out[int64_t(tile.column / TILE_COLUMNS) * p.rows + row] = d_score[h];
        }
    }

    DEVICE void operator()(float (&acc)[STRIPS][BN / 2], const Tile& tile, int first_row) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int strip_row = tile.row + first_row + strip * 64;
            float d_score[2] = {0.0f, 0.0f};
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const int index = strip * SLABS + slab, buffer = index % BUFFERS;
                const uint32_t gate_slab = h_buffers + buffer * H_BYTES;
                if (warpgroup_thread() == 0 && index > 0) {
                    bulk_wait_group_read<0>();  // slab index - 1 is out: its A' and its H buffer are free
                    if (index + BUFFERS - 1 < STRIPS * SLABS && index + BUFFERS - 1 >= BUFFERS)
                        load_h(tile, first_row, index + BUFFERS - 1);
                }
                mbarrier_wait(h_barriers + buffer * 8, h_phase >> buffer & 1);
                h_phase ^= 1 << buffer;
                warpgroup_sync();
#pragma unroll
                for (int block = 0; block < 4; ++block)
                    differentiate(acc[strip] + slab * 32 + block * 8, gate_slab, block, score[strip], d_score);
                fence_proxy_async();
                warpgroup_sync();
                store(gate_slab, tile, strip_row, tile.column + slab * 64);
            }
            store_score_gradient(d_score, tile, strip_row);
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    down_backward(const __grid_constant__ RowsParams p) {
    varlen_m<DownBackwardEpilogue>(p);
}
