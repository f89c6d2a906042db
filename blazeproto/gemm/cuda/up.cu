// Up projection, forward. MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2, "up-proj A kernel".
//
//   H[r]   = x[token(r)] . W_up[e]^T (+ bias)      x (T, d) gathered, W_up (E, 2n, d) or (E, n, d), H (R, 2n) or (R, n)
//   act[r] = SiLU(gate) * up                       act (R, n), from H as rounded to bf16, so that backward recomputes the same act
//
//   x rows  --gather-->  A (BM x 64)  \                       / H slabs   --TMA-->  H
//                                       wgmma -> acc (BM x BN)
//   W_up    --TMA----->  B (BN x 64)  /                       \ act slabs --TMA-->  act
//
// B stacks BN/2 gate rows over the BN/2 up rows of the same hidden units, so a thread holds gate and up of each of its elements
// and no interleaved copy of the weights exists.
//
// Floor: max(4 n d R / 785 TFLOP/s, (2 d T + 2 d 2n E + 2 (2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "activation.cuh"
#include "varlen_m.cuh"

struct UpEpilogue {
    static constexpr int SLABS = 2;
    static constexpr int SMEM_BYTES = SLABS * SLAB_BYTES;
    static constexpr int BARRIER_BYTES = 0;
    const RowsParams& p;
    SlabRing<SLABS> slabs;

    DEVICE UpEpilogue(const RowsParams& params, uint32_t smem, uint32_t) : p(params), slabs(smem) {}
    DEVICE void prefetch(const Tile&, int) {}

    DEVICE void add_bias(float (&acc)[BN / 2], const Tile& tile) const {
        const bf16* bias = p.bias + int64_t(tile.expert) * HALVES * p.columns;
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            constexpr int BLOCKS = TILE_COLUMNS / 8;
            const int column = tile.column + j % BLOCKS * 8 + threadIdx.x % 4 * 2;
            if (column >= p.columns) continue;
            const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(bias + j / BLOCKS * p.columns + column));
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[4 * j + i] += i % 2 ? bf16_high(pair) : bf16_low(pair);
        }
    }

    // One 64-column slab of H (`half` 0 gate, 1 up) or, with half < 0, of act.
    template <class Packed>
    DEVICE void store(const Tile& tile, int row, int column, int half, Packed packed) {
        if (column >= p.columns) return;
        const uint32_t slab = slabs.acquire();
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            uint32_t quad[4];
            packed(quad, block);
            stmatrix_x4(slab_address(slab, block), quad);
        }
        slabs.release(
            row + 64 <= tile.row_end,
            [&](uint32_t s) {
                if (half >= 0) tma_store_3d(&p.out0, s, column, half, row);
                else tma_store_2d(&p.out1, s, column, row);
            },
            [&](uint32_t s) {
                const int64_t stride = half >= 0 ? HALVES * p.columns : p.columns;
                bf16* out = half >= 0 ? p.out0_rows + half * p.columns : p.out1_rows;
                store_slab_predicated(s, out + row * stride + column, stride, tile.row_end - row, p.columns - column);
            });
    }

    DEVICE void operator()(float (&acc)[STRIPS][BN / 2], const Tile& tile, int first_row) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int row = tile.row + first_row + strip * 64;
            if (row >= tile.row_end) return;  // the same for the whole warpgroup
            if (HAS_BIAS) add_bias(acc[strip], tile);
#pragma unroll
            for (int slab = 0; slab < TILE_COLUMNS / 64; ++slab) {
                const int column = tile.column + slab * 64;
                const float* gate = acc[strip] + slab * 32;
                const float* up = gate + (HALVES - 1) * BN / 4;
                store(tile, row, column, 0, [&](uint32_t(&quad)[4], int block) { pack_block(quad, gate + block * 8); });
                if (HALVES == 2)
                    store(tile, row, column, 1, [&](uint32_t(&quad)[4], int block) { pack_block(quad, up + block * 8); });
                store(tile, row, column, -1, [&](uint32_t(&quad)[4], int block) {
                    uint32_t gates[4], ups[4];
                    pack_block(gates, gate + block * 8);
                    pack_block(ups, up + block * 8);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float low = nonlinearity<ACTIVATION>(bf16_low(gates[i])).value;
                        float high = nonlinearity<ACTIVATION>(bf16_high(gates[i])).value;
                        if (HALVES == 2) low *= bf16_low(ups[i]), high *= bf16_high(ups[i]);
                        quad[i] = pack_bf16(low, high);
                    }
                });
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    up_forward(const __grid_constant__ RowsParams p) {
    varlen_m<UpEpilogue>(p);
}
