// Sums the pieces of those tiles of a weight gradient that several shares have made (weight_schedule.cuh).
//
//   share      0          1          2          3
//   line   ... | tile 4 | 5 ...... | .......... | .. | tile 6 ...       tile 5 = BEGUN of share 1 + CONTINUED of 2 + CONTINUED of 3
//
// Blocks take slices of tiles by turns; most launches find nothing to do. Always in the order of the shares. Memory-bound: 4 bytes in
// for each element of a piece, 2 or 4 out for the tile's.
//
// -D: BM, BN    a CTA's tile, of which each of THREADS threads, the consumers of weight.cu, has one float4 in every 4 * THREADS
//     SLICES    blocks of a tile
#include "ptx.cuh"

constexpr int QUADS = BM * BN / 4 / THREADS;  // of a thread

struct Output {
    void* data;  // (E, d, width), or transposed (E, width, d); fp32 or bf16
    int64_t gathered_width, ordered_width, transposed, f32, accumulate;

    // Two neighbours in a row of the tile.
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

DEVICE void add(float4& sum, const float4& value) {
    sum.x += value.x;
    sum.y += value.y;
    sum.z += value.z;
    sum.w += value.w;
}

extern "C" __global__ void __launch_bounds__(THREADS)
weight_sum(const int2* unfinished, const float4* pieces, void* out, int64_t shares, int64_t cluster, int64_t gathered_width,
           int64_t ordered_width, int64_t transposed, int64_t f32, int64_t accumulate) {
    const int thread = threadIdx.x;
    const int2 mine = thread < shares ? unfinished[thread] : int2{-1, -1};  // there are fewer shares than threads
    __shared__ int2 tiles[THREADS];
    tiles[thread] = mine;
    if (!__syncthreads_or(mine.y >= 0)) return;

    const Output output{out, gathered_width, ordered_width, transposed, f32, accumulate};
    const int64_t piece_quads = BM * BN / 4, share_quads = 2 * cluster * piece_quads;
    const int tile_height = cluster * BM, i_blocks = (int(gathered_width) + tile_height - 1) / tile_height;
    const int blocks = i_blocks * ((int(ordered_width) + BN - 1) / BN), slices = cluster * SLICES;
    for (int index = blockIdx.x; index < shares * slices; index += gridDim.x) {
        const int share = index / slices, rank = index % slices / SLICES, slice = index % SLICES, tile = tiles[share].y;
        if (tile < 0) continue;
        int later = 0;  // shares that go on with it: they follow one another
        while (share + later + 1 < shares && tiles[share + later + 1].x == tile) ++later;

        const float4* begun = pieces + share * share_quads + (cluster + rank) * piece_quads + thread;
        const float4* continued = pieces + (share + 1) * share_quads + rank * piece_quads + thread;
        // Thread, quad: as wgmma lays its accumulators. A warp has 16 rows, a quad two neighbours of a row and those 8 rows below.
        const int expert = tile / blocks, block = tile % blocks;
        const int64_t i = block % i_blocks * tile_height + rank * BM + thread / 32 * 16 + thread % 32 / 4;
        const int64_t j = block / i_blocks * BN + thread % 4 * 2;
        for (int quad = slice; quad < QUADS; quad += SLICES) {
            float4 sum = begun[quad * THREADS];
#pragma unroll 8
            for (int piece = 0; piece < later; ++piece) add(sum, continued[piece * share_quads + quad * THREADS]);
            output.put(expert, i, j + quad * 8, sum.x, sum.y);
            output.put(expert, i + 8, j + quad * 8, sum.z, sum.w);
        }
    }
}
