// The arguments of the products' kernels, one struct each, and the tile that the row products cut their rows into. The host packs
// them (gemm/rows.py, gemm/weight.py).
#pragma once
#include "ptx.cuh"
#ifdef SENDS
#include "sending.cuh"
#endif

// token = pair / top_k. An integer division is thirty instructions and the producer does one a row. So the host turns it
// into a multiplication and a shift, exact for pairs below 2^31 (gemm/rows.py: `division`). Where the number of experts
// varies from token to token, the token is looked up in pair_tokens.
struct PairToToken {
    const int* pair_indices;  // (rows,) the pair in each row
    const int* pair_tokens;   // (pairs,), or null
    uint32_t multiplier, shift;

    DEVICE int token(int pair) const {
        return pair_tokens ? __ldg(pair_tokens + pair) : int(uint64_t(pair) * multiplier >> shift);
    }
};

struct RowsParams {
    TensorMap a;           // (reduction, rows), where rows are contiguous
    TensorMap b;           // the weights
    TensorMap h;           // H, read by the down backward epilogue
    TensorMap out0, out1;  // what the epilogue stores
    TensorMap low_rows, low_weights;  // LOW_RANK: (rank, rows), and like b
#ifdef STORED
    TensorMap decoded;  // what b reads, as decoders write it (decoders.cuh): (64, slot_rows slot_columns / 64, slots)
#endif
    const bf16* source;    // (tokens, reduction) to gather from
    PairToToken pairs;
    const int* offsets;  // (experts + 1,)
    bf16 *out0_rows, *out1_rows;
    const bf16* bias;      // of the first expert's first column
    const float* scores;   // (pairs,)
    float* reduction_out;  // per-row partial sums, or an fp32 output
    uint32_t* tickets;     // a zero that this launch counts its tiles with, and leaves zero
#if FP8
    const float* a_scales;              // of tokens (tokens,), or BLOCK_SCALES (reduction blocks, rows) or (tokens, reduction blocks)
    const float* b_scales;              // (experts, column blocks, reduction blocks)
    const float* h_scales;              // (column blocks of H, rows)
    float *out0_scales, *out1_scales;   // (column blocks, rows), of outputs that are quantized
#endif
#ifdef STORED
    const uint8_t* scales;  // (experts, rows of blocks, blocks in a row)
    const int* zeros;       // HAS_ZEROS: eight rows' in a word
    int64_t first_column;   // of the weights' columns: the first that is an output column
    const uint8_t* values;
    uint32_t* progress;     // (2, experts, parts), zeros
#endif
#ifdef SENDS
    Sending sending;  // of the rows that this product gathers, or a later one
#endif
    int rows, experts, reduction, columns;
    int bias_stride;  // columns of the weights: elements from one expert's bias to the next's
    int rank;         // LOW_RANK: elements of the reduction that follow the others
#ifdef STORED
    int blocks_in_row, blocks_in_expert;
    int parts, part_columns, part_shift, slots, slot_rows, slot_columns, decoders;
#endif
};

struct alignas(16) RowTile {
    int expert;
    int row, row_end;  // first row of the tile; end of the expert's rows
    int column;        // first column of the output (a hidden unit, where the columns are gate and up)
};

struct WeightParams {
    TensorMap ordered;   // (width, rows)
    TensorMap in_order;  // (d, rows); GATHER 0
    TensorMap out;       // bf16 output: (n, d, E) or (d, 2n, E)
    const bf16* gathered_rows;  // (tokens, d), or, GATHER 0, (rows, d)
    const bf16* ordered_rows;   // (rows, width)
    PairToToken pairs;
    const int* offsets;
    float* out_f32;
    int2* unfinished;  // (units,)
    float4* partials;
    int experts, gathered_width, ordered_width, accumulate;
    int units;  // work units, at most; 0: data-parallel, whatever the offsets
};

#ifdef HAS_BIAS
// A pair of accumulators as it is stored. Without a bias the addition is left out: the compiler would keep x + 0, which is
// not x for every x.
DEVICE uint32_t pack_biased(float low, float high, uint32_t bias) {
    return HAS_BIAS ? pack_bf16(low + bf16_low(bias), high + bf16_high(bias)) : pack_bf16(low, high);
}
#endif
