// Weight gradients, as ../weight.cu: for every expert, the gathered rows of one matrix against the expert-ordered rows of another.
//
//   TRANSPOSED 0   dW_down[e] (d, n)  = sum_r dO[token(r)]^T A'[r]    A is dO, gathered       MoEBlaze Algorithm 1, line 18
//   TRANSPOSED 1   dW_up[e]   (2n, d) = sum_r dH[r]^T x[token(r)]     B is x, gathered        Algorithm 1, line 29
//
// Both operands lie MN-major in a stage: a row of the stage is a row of the expert. GATHER 0: the gathered operand already lies in
// order. A tile is a whole reduction, over all rows of its expert; rows past the last become zeros. OUT_F32 1 writes fp32, and with
// `accumulate` adds to the old gradient.
#include "columns.cuh"

struct WeightEpilogue {
    static constexpr int SEGMENT_STAGES = 0;
    const WeightParams& p;

    DEVICE explicit WeightEpilogue(const WeightParams& params) : p(params) {}

    DEVICE void store(const Accumulators& acc, const WeightTile& tile, uint32_t strip) const {
        const WeightScheduler of(p);
        const int height = of.height(), width = of.width(), column = tile.j + warp_column();
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 0; j < WARP_COLUMNS / 8; ++j) put(strip, h, j, acc[i][j][2 * h], acc[i][j][2 * h + 1]);
            __syncwarp();
            const int row = tile.i + warp_row() + i * 16;
            const int64_t at = (int64_t(tile.expert) * height + row) * width + column;
            if (OUT_F32) store_f32(strip, p.out_f32 + at, width, height - row, width - column);
            else store_plane<WARP_COLUMNS / CHUNK>(strip, out_bf16() + at, width, height - row, width - column);
            __syncwarp();
        }
    }

   private:
    DEVICE bf16* out_bf16() const { return reinterpret_cast<bf16*>(const_cast<uint8_t*>(matrix(p.out).start)); }

    // As bf16 in one plane; as fp32 in two, each of 32 columns.
    DEVICE static void put(uint32_t strip, int h, int j, float first, float second) {
        const int lane = lane_index();
        if (!OUT_F32) return put_pair(strip, h, j, pack_bf16(first, second));
        const uint32_t place = swizzled(strip + j / 4 * STRIP_PLANE, h * 8 + lane / 4, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
        store_shared_8(place, make_uint2(__float_as_uint(first), __float_as_uint(second)));
    }

    DEVICE void store_f32(uint32_t strip, float* out, int width, int rows, int columns) const {
#pragma unroll 8
        for (int i = lane_index(); i < 16 * WARP_COLUMNS / 4; i += 32) {
            const int row = i / (WARP_COLUMNS / 4), chunk = i % (WARP_COLUMNS / 4);
            if (row >= rows || chunk * 4 >= columns) continue;
            float4* const to = reinterpret_cast<float4*>(out + int64_t(row) * width + chunk * 4);
            const uint4 bits = load_shared_16(swizzled(strip + chunk / 8 * STRIP_PLANE, row, chunk % 8));
            float4 sum = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
            if (p.accumulate) {
                const float4 before = *to;
                sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
            }
            *to = sum;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_gradient(const __grid_constant__ WeightParams p) {
    run<WeightScheduler, WeightLoads, WeightEpilogue>(p);
}
