// Weight gradients in fp8: for every expert a product of two matrices that transpose_rows (quantize.cu) has turned, so that the
// reduction, over an expert's rows, is contiguous, and has filled up with zeros to whole blocks of 128 rows.
//
//   dW_down[e] (d, n)  = sum_r dO[token(r)]^T A'[r]    MoEBlaze Algorithm 1, line 18
//   dW_up[e]   (2n, d) = sum_r dH[r]^T x[token(r)]     Algorithm 1, line 29
//
//   left   (rows of dW, blocks of K)     --TMA-->  A (BM x 128)  \
//                                                                  wgmma, sums -> acc (BM x BN) -> slabs --TMA--> dW[e]
//   right  (columns of dW, blocks of K)  --TMA-->  B (BN x 128)  /
//
// A block of 128 columns and 128 rows shares a scale, on either side.
//
// Floor: max(2 d width R / 1480 TFLOP/s, ((d + width) R + 2 d width E) bytes / 4.24 TB/s).
#include "kernel.cuh"

struct WeightParams {
    TensorMap left, right;  // (blocks * 64, rows or columns), in pairs
    TensorMap out;          // (columns, rows, experts)
    const int* offsets;     // (experts + 1,): blocks before each expert's
    float* out_f32;
    const float *a_scales, *b_scales;  // (column blocks, blocks)
    int experts, gathered_width, ordered_width, accumulate;  // rows and columns of dW
    int rows;    // 1: what lies between the scales of one block of the reduction and the next
    int blocks;  // for which there is room
};

struct WeightTile {
    int expert, block, steps, i, j;
};

// Tiles round robin, an expert's rows by rows.
struct WeightScheduler {
    using Params = WeightParams;
    using Tile = WeightTile;
    static constexpr bool VARLEN_K = true, SKIPS = false;
    static constexpr int EMPTY_STAGES = 0;
    static constexpr int SMEM_OFFSET = BARRIER_OFFSET;
    const WeightParams& p;

    DEVICE explicit WeightScheduler(const WeightParams& params) : p(params) { __syncthreads(); }

    DEVICE int count() const { return tiles_of_this_cta(p.experts * i_blocks() * j_blocks()); }
    DEVICE bool has(int position) const { return position < count(); }

    DEVICE WeightTile at(int position) const {
        const int tile = blockIdx.x + position * gridDim.x, of_expert = i_blocks() * j_blocks();
        const int expert = tile / of_expert, block = tile % of_expert, first = __ldg(p.offsets + expert);
        return {expert, first, __ldg(p.offsets + expert + 1) - first, block % i_blocks() * BM, block / i_blocks() * BN};
    }

    DEVICE WeightTile strip_at(int position, int strip) const {
        WeightTile tile = at(position);
        tile.i += strip * STRIP;
        return tile;
    }

    DEVICE static int steps(const WeightTile& tile) { return tile.steps; }
    DEVICE static bool is_partial(const WeightTile&) { return false; }
    DEVICE static float4* partial(const WeightTile&) { return nullptr; }

   private:
    DEVICE int i_blocks() const { return (p.gathered_width + BM - 1) / BM; }
    DEVICE int j_blocks() const { return (p.ordered_width + BN - 1) / BN; }
};

struct WeightProducer {
    static constexpr int MN_A = 0, MN_B = 0;
    static constexpr int WARPS = 1;

    template <class Epilogue>
    DEVICE static void produce(const WeightParams& p, const WeightScheduler& scheduler) {
        if (threadIdx.x != 0) return;
        Ring ring;
        for (int position = 0; position < scheduler.count(); ++position) {
            MARK(AT, TILE);
            const WeightTile tile = scheduler.at(position);
            for (int step = 0; step < tile.steps; ++step) {
                ring.wait_until_empty();
                MARK(BEGIN, TMA);
                mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
                tma_load_2d(ring.a(), &p.left, ring.full_barrier(), (tile.block + step) * BK, tile.i);
                tma_load_2d(ring.b(), &p.right, ring.full_barrier(), (tile.block + step) * BK, tile.j);
                MARK(END, TMA);
                ring.advance();
            }
        }
    }
};

#include "weight_epilogue.cuh"

struct ScaledWeightEpilogue : WeightEpilogue {
    using WeightEpilogue::WeightEpilogue;

    DEVICE BlockScales block_scales(const WeightTile& of) const {
        const int j = of.j / BLOCK, last = (p.ordered_width - 1) / BLOCK;
        BlockScales scales(0, p.blocks, 0, j, min(j + 1, last));
        scales.weights += of.block;
        scales.rows = of.i / BLOCK * p.blocks + of.block;
        return scales;
    }
};

extern "C" __global__ void __launch_bounds__(PTXAS_THREADS, 1) weight_gradient_fp8(const __grid_constant__ WeightParams p) {
    run<WeightScheduler, WeightProducer, ScaledWeightEpilogue>(p);
}
