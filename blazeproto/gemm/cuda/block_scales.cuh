// How an epilogue of fp8 quantizes a strip's 128 columns: a row of them shares a scale.
//
// A thread has four neighbouring columns of each 16, in two rows, as pairs of bf16 (fp8.cuh: PAIRED_ROWS):
//
//   packed[4 g + 2 h]       columns 16 g + 4 (l % 4) and the next, row h * 8 + l / 4 of this warp's 16
//   packed[4 g + 2 h + 1]   the two columns after these
#pragma once
#include "epilogue.cuh"
#include "quantized.cuh"
#include "tiles.cuh"

constexpr int BLOCK_PAIRS = BLOCK / 4;  // of a thread

// The four accumulators of a group of 16 columns and a row, in the order of their columns.
DEVICE float4 of_group(const float* acc, int h) { return make_float4(acc[2 * h], acc[2 * h + 4], acc[2 * h + 1], acc[2 * h + 5]); }

// A block into a slab, of which `at` is slab_address(slab, 0); its scales to memory, by rows. tile: from this strip's first row on.
template <class Of = Scale>
DEVICE void quantize_block(const uint32_t* packed, uint32_t at, float* scales, const RowTile& tile) {
    Of of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < BLOCK_PAIRS; i += 4)
            largest = larger_pair(larger_pair(largest, packed[i + 2 * h]), packed[i + 2 * h + 1]);
        largest = larger_pair(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = larger_pair(largest, __shfl_xor_sync(~0u, largest, 2));
        of_row[h] = Of::of(max(largest << 16, largest & 0xFFFF0000u));
        const int row = tile.row + strip_row(h);
        if (threadIdx.x % 4 == 0 && row < tile.row_end) scales[row] = of_row[h].scale;
    }
#pragma unroll
    for (int block = 0; block < BLOCK / 32; ++block) {
        uint32_t quad[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) quad[i] = quantized(packed[block * 8 + 2 * i], packed[block * 8 + 2 * i + 1], of_row[i % 2]);
        stmatrix_x4(at ^ block << 5, quad);
    }
}
