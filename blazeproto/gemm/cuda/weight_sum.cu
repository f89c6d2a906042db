// Adds the partial tiles of those tiles of a weight gradient that several stream-K work units have computed
// (weight_schedule.cuh).
//
//   work unit   0          1          2          3
//   line    ... | tile 4 | 5 ...... | .......... | .. | tile 6 ...     tile 5 = BEGUN of unit 1 + CONTINUED of 2 + CONTINUED of 3
//
// Blocks take slices of tiles round robin; most launches find nothing to do. A sum always goes in the order of the work
// units, so that it is the same every time. Memory-bound: it reads 4 bytes for each element of a partial tile, and writes 2
// or 4 for each of a tile.
//
// -D: BM, BN     a CTA's tile
//     WARPGROUP  threads of a warpgroup
//     SLICES     how many blocks share a CTA's tile
//     THREADS    of a block: as many as weight.cu has consumer threads, for each reads what one of those has written
#include "wgmma.cuh"

static_assert(THREADS == BM / WGMMA_M * WARPGROUP, "as many as weight.cu has consumer threads");
constexpr int QUADS = BM * BN / 4 / THREADS;  // of four accumulators, in a thread

struct Output {
    void* data;  // (E, d, width), or transposed (E, width, d); fp32 or bf16
    int64_t gathered_width, ordered_width, transposed, f32, accumulate;

    // Writes two neighbours in a row of the tile.
    DEVICE void put(int64_t expert, int64_t i, int64_t j, float first, float second) const {
        if (i >= gathered_width || j >= ordered_width) return;
        const int64_t at = expert * gathered_width * ordered_width + (transposed ? j * gathered_width + i : i * ordered_width + j);
        const int64_t next = at + (transposed ? gathered_width : 1);
        if (f32) {
            float* out = static_cast<float*>(data);
            out[at] = accumulate ? out[at] + first : first;
            out[next] = accumulate ? out[next] + second : second;
        } else {
            bf16* out = static_cast<bf16*>(data);
            const uint32_t pair = pack_bf16(first, second);
            out[at] = bf16(pair);
            out[next] = bf16(pair >> 16);
        }
    }
};

DEVICE void add(float4& sum, const float4& v) { sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w); }

extern "C" __global__ void __launch_bounds__(THREADS)
weight_sum(const int2* unfinished, const float4* partials, void* out, int64_t units, int64_t cluster, int64_t gathered_width,
           int64_t ordered_width, int64_t transposed, int64_t f32, int64_t accumulate) {
    const int thread = threadIdx.x;
    const int2 mine = thread < units ? unfinished[thread] : int2{-1, -1};  // there are fewer units than threads
    __shared__ int2 tiles[THREADS];
    tiles[thread] = mine;
    if (!__syncthreads_or(mine.y >= 0)) return;

    const Output output{out, gathered_width, ordered_width, transposed, f32, accumulate};
    const int64_t partial_quads = BM * BN / 4, unit_quads = 2 * cluster * partial_quads;
    const int tile_height = cluster * BM, i_blocks = (int(gathered_width) + tile_height - 1) / tile_height;
    const int blocks = i_blocks * ((int(ordered_width) + BN - 1) / BN), slices = cluster * SLICES;
    for (int index = blockIdx.x; index < units * slices; index += gridDim.x) {
        const int unit = index / slices, rank = index % slices / SLICES, slice = index % SLICES, tile = tiles[unit].y;
        if (tile < 0) continue;
        int later = 0;  // units that continue the tile: they come one after the other
        while (unit + later + 1 < units && tiles[unit + later + 1].x == tile) ++later;

        const float4* begun = partials + unit * unit_quads + (cluster + rank) * partial_quads + thread;
        const float4* continued = partials + (unit + 1) * unit_quads + rank * partial_quads + thread;
        // Where wgmma has the accumulators (wgmma.cuh): a warp has 16 rows; a quad is two neighbours in a row and two 8
        // rows below.
        const int expert = tile / blocks, block = tile % blocks;
        const int64_t i = block % i_blocks * tile_height + rank * BM + thread / 32 * 16 + thread % 32 / 4;
        const int64_t j = block / i_blocks * BN + thread % 4 * 2;
        for (int quad = slice; quad < QUADS; quad += SLICES) {
            float4 sum = begun[quad * THREADS];
#pragma unroll 8
            for (int next = 0; next < later; ++next) add(sum, continued[next * unit_quads + quad * THREADS]);
            output.put(expert, i, j + quad * 8, sum.x, sum.y);
            output.put(expert, i + 8, j + quad * 8, sum.z, sum.w);
        }
    }
}
