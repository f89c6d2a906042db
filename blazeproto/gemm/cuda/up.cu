// Up projection, forward. MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2, "up-proj A kernel".
//
//   H[r]   = x[token(r)] . W_up[e]^T (+ bias)      x (T, d) gathered, W_up (E, 2n, d) or (E, n, d), H (R, 2n) or (R, n)
//   act[r] = f(gate) * up                          act (R, n), from H as rounded to bf16: backward recomputes the same act
//            or f(H[r]) without a gate             f by ACTIVATION (activation.cuh): SiLU, GELU, ReLU
//
//   x rows  --gather-->  A (BM x 64)  \                       / H slabs   --TMA-->  H
//                                       wgmma -> acc (BM x BN)
//   W_up    --TMA----->  B (BN x 64)  /                       \ act slabs --TMA-->  act
//
// B stacks BN/2 gate rows over the BN/2 up rows of the same hidden units, so a thread holds gate and up of each of its elements
// and no interleaved copy of the weights exists. docs/kernels.md tells how this kernel came to be as it is.
//
// Floor: max(4 n d R / 785 TFLOP/s, (2 d T + 2 d 2n E + 2 (2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "activation.cuh"
#include "varlen_m.cuh"

struct UpEpilogue : PlainEpilogue {
    static constexpr int SMEM_BYTES = SLAB_PAIR_BYTES;
    static constexpr int SLABS_A_BLOCK = HALVES + 1;  // of 64 hidden units: H's gate, H's up, act
    static constexpr int PARTS = TILE_COLUMNS / 64 * SLABS_A_BLOCK;
    static constexpr int EAGER = PARTS / 2;  // to wait with more than the other half takes too many registers
    const RowsParams& p;
    uint32_t h[BN / 4];  // the strip of H as it is stored: pairs of bf16
    Tile tile;

    DEVICE explicit UpEpilogue(const RowsParams& params) : p(params) {}

    DEVICE void hold(const float (&acc)[BN / 2], const Tile& of, const Ring&) {
        tile = of;
        const int column = tile.column + threadIdx.x % 4 * 2;
        const bf16* bias_at = p.bias + int64_t(tile.expert) * HALVES * p.columns + column;
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {  // h[2j + r]: row r * 8 + l / 4 of this warp's, columns 8 j + 2 (l % 4) and the next
            const int half = i / 2 * 8 / TILE_COLUMNS, offset = i / 2 * 8 % TILE_COLUMNS;
            uint32_t bias = 0;
            if (HAS_BIAS && column + offset < p.columns) bias = load_bf16x2(bias_at + half * p.columns + offset);
            h[i] = pack_bf16(acc[2 * i] + bf16_low(bias), acc[2 * i + 1] + bf16_high(bias));
        }
    }

    DEVICE static uint32_t activate(uint32_t gate, uint32_t up) {
        float low = nonlinearity<ACTIVATION>(bf16_low(gate)).value, high = nonlinearity<ACTIVATION>(bf16_high(gate)).value;
        if (HALVES == 2) low *= bf16_low(up), high *= bf16_high(up);
        return pack_bf16(low, high);
    }

    // One slab of 64 columns: gate, up or act of 64 hidden units.
    template <int INDEX>
    DEVICE void part() {
        const int block = INDEX / SLABS_A_BLOCK, kind = INDEX % SLABS_A_BLOCK;
        const bool is_act = kind == HALVES;
        const int column = tile.column + block * 64;
        if (column >= p.columns || tile.row >= tile.row_end) return skip_slab();  // the same for the whole warpgroup
        const uint32_t slab = slab_of_part(INDEX);
        const uint32_t* gate = h + block * 16;
        const uint32_t* up = gate + (HALVES - 1) * BN / 8;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            uint32_t quad[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = quarter * 4 + i;
                quad[i] = is_act ? activate(gate[at], up[at]) : kind == 0 ? gate[at] : up[at];
            }
            stmatrix_x4(slab_address(slab, quarter), quad);
        }
        store_slab(
            tile.row + STRIP <= tile.row_end,
            [&] {
                if (is_act) tma_store_2d(&p.out1, slab, column, tile.row);
                else tma_store_3d(&p.out0, slab, column, tile.row, kind);
            },
            [&] {
                const int64_t stride = is_act ? p.columns : HALVES * p.columns;
                bf16* out = is_act ? p.out1_rows : p.out0_rows + kind * p.columns;
                store_slab_predicated(slab, out + tile.row * stride + column, stride, tile.row_end - tile.row,
                                      p.columns - column);
            });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    up_forward(const __grid_constant__ RowsParams p) {
    varlen_m<UpEpilogue>(p);
}
