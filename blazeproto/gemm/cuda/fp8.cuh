// fp8 operands (e4m3), of kernels compiled with FP8: their products, summed in fp32, and what an epilogue quantizes.
//
// Only wgmma and epilogues know of bytes. All that moves operands moves them in pairs, as if each pair were one bf16: a stage's row
// of 128 bytes has 128 elements of the reduction, and widths and coordinates are half of what they are in elements.
//
// A tensor core keeps some 14 bits of a sum. So a consumer adds up each 128 elements of the reduction by themselves, in half of its
// columns at a time, and adds what comes out to sums in fp32; that leaves the tensor cores to the other consumer.
//
//   consumer 0   | wgmma, columns 0-127 | add | wgmma, 128-255 | add | wgmma of the next stage ...
//   consumer 1            | wgmma, columns 0-127 | add | wgmma, 128-255 | add | ...
//
// Weights have a scale for each block of 128 x 128, tokens one each, which the epilogue applies. Rows that an epilogue has quantized
// have one for each 128 elements, and so may tokens: scales of blocks are applied where sums are added.
//
// LOW_RANK: the stages of a low rank are bf16. They come last, and are added to the sums once these have their tokens' scales.
//
// -D: BLOCK_SCALES  1 where rows have a scale for each BLOCK elements of the reduction, by blocks, or gathered tokens by tokens
//     PAIRED_ROWS   1 where the epilogue quantizes. It wants four neighbouring columns in a thread; accumulators are two of each
//                   eight. So TMA loads each 16 rows of the weights as the even ones, then the odd ones:
//
//                   accumulators 4j + 2h + i, j even   columns 16 (j / 2) + 4 (l % 4) + 2 i
//                                             j odd    columns 16 (j / 2) + 4 (l % 4) + 2 i + 1
#pragma once
#include "mainloop.cuh"

constexpr int BLOCK = SWIZZLE_ROW;  // elements of a quantized row that share a scale, and of a stage
constexpr int SLICE = BN / 2;       // columns that are multiplied at a time, whose weights share a scale in a stage
constexpr int GROUP = 16;           // PAIRED_ROWS: neighbouring columns that four lanes have
static_assert(SLICE == 128, "m64n128k32");

#define WGMMA_E4M3(how, accumulate)                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PLACES64 "}, %64, %65, p, 1, 1;\n}\n" \
                 : ACC64(how)                                                                                \
                 : "l"(a), "l"(b), "r"(accumulate))

// D (64 x 128) += A (64 x 32) * B (32 x 128), both K-major. accumulate: 0 starts from zero.
DEVICE void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) { WGMMA_E4M3("+f", accumulate); }

// The same from zero, into registers that held nothing before. As an input of the first wgmma they would be taken outside of the
// mainloop too.
DEVICE void wgmma_e4m3_first(float (&d)[64], uint64_t a, uint64_t b) { WGMMA_E4M3("=f", 0); }

#undef WGMMA_E4M3

// Where the scales lie of this thread's two rows and of its two slices' weights, for one block of the reduction after the other.
// Offsets, since 32 bits are enough for them, and registers are short.
struct BlockScales {
    uint32_t weights, second;    // of the first slice, in b_scales; from there to the second slice's
    uint32_t rows, second_row = 0;  // BLOCK_SCALES: likewise of rows, in a_scales

    // Of a tile whose slices' columns are in these of an expert's column blocks.
    DEVICE BlockScales(int expert, int steps, int blocks, int first_block, int second_block)
        : weights((expert * blocks + first_block) * steps), second((second_block - first_block) * steps) {}

    // Rows past the last one get its scale.
    DEVICE void set_rows(int row, int last) {
        rows = min(row, last);
        second_row = min(row + 8, last) - rows;
    }

    // The same of gathered tokens, a row's and the eighth after it.
    DEVICE void set_tokens(int token, int second, int steps) {
        rows = token * steps;
        second_row = (second - token) * steps;
    }

    template <class Params>
    DEVICE void load(const Params& p, float (&of_slice)[2], float (&of_row)[2]) {
        of_slice[0] = load_f32(p.b_scales + weights);
        of_slice[1] = load_f32(p.b_scales + (weights + second));
        ++weights;
        if (!BLOCK_SCALES) return;
        of_row[0] = load_f32(p.a_scales + rows);
        of_row[1] = load_f32(p.a_scales + (rows + second_row));
        rows += GATHER ? 1 : p.rows;
    }
};

// The last stages of a tile, of a low rank.
template <class Params>
DEVICE int low_rank_steps(const Params& p) {
    if constexpr (LOW_RANK > 0) return (p.rank + BK - 1) / BK;
    else return 0;
}

// Applies the scales of this thread's rows to its sums, after which they are 1: what is added then is not quantized.
DEVICE void apply_scales(float (&sum)[BN / 2], float (&of_row)[2]) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sum[i] *= of_row[i / 2 % 2];
    of_row[0] = of_row[1] = 1.0f;
}

struct E4m3 {
    static constexpr bool SCALED = true;
    static constexpr int BLOCK = ::BLOCK;
    using Scales = BlockScales;
};

// sum (this consumer's strip, STRIP x BN) = A * B over `steps` stages, but for those of a low rank.
template <class Params>
DEVICE void multiply(float (&sum)[BN / 2], Ring& ring, int strip, int steps, BlockScales scales, const Params& p) {
    constexpr uint32_t K_STEP = 32 / 16, SLICE_STEP = SLICE * SWIZZLE_ROW / 16;
    MARK(BEGIN, MMA);
    float of_slice[2], of_row[2], next_of_slice[2], next_of_row[2];
    scales.load(p, next_of_slice, next_of_row);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int left = steps - low_rank_steps(p); left > 0; --left) {
        ring.wait_until_full();
        if (GATHER) fence_proxy_async();  // as in mainloop.cuh
#pragma unroll
        for (int i = 0; i < 2; ++i) of_slice[i] = next_of_slice[i], of_row[i] = next_of_row[i];
        if (left > 1) scales.load(p, next_of_slice, next_of_row);
        const uint32_t a = descriptor_low(ring.a() + strip * STRIP * SWIZZLE_ROW, PANEL_BYTES);
        const uint32_t b = descriptor_low(ring.b(), PANEL_BYTES);
        float acc[SLICE / 2];  // the second slice's once the first one's are added
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < SWIZZLE_ROW / 32; ++k) {
                const uint64_t at_a = matrix_descriptor(a + k * K_STEP), at_b = matrix_descriptor(b + slice * SLICE_STEP + k * K_STEP);
                if (slice + k == 0) wgmma_e4m3_first(acc, at_a, at_b);
                else wgmma_e4m3(acc, at_a, at_b, k > 0);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            pin_registers(acc);
            if (slice == 1) ring.release();
#pragma unroll
            for (int i = 0; i < SLICE / 2; ++i) {
                const float scale = BLOCK_SCALES ? of_slice[slice] * of_row[i / 2 % 2] : of_slice[slice];
                float& to = sum[slice * SLICE / 2 + i];
                to = fmaf(acc[i], scale, to);
            }
        }
        ring.advance();
    }
    MARK(END, MMA);
}

// sum += low_rows * factor^T, in bf16.
template <class Producer, class Epilogue, class Params>
DEVICE void add_low_rank(float (&sum)[BN / 2], Ring& ring, int strip, Epilogue& epilogue, const Params& p, const Producer*) {
    epilogue.scale_sums(sum);
#pragma unroll 1
    for (int left = low_rank_steps(p); left > 0; --left) {
        if (left == 1) multiply_stage<Producer, true, LOW_RANK>(sum, ring, strip);
        else multiply_stage<Producer, true>(sum, ring, strip);
        wgmma_wait_group<0>();
        pin_registers(sum);
        ring.release();
        ring.advance();
    }
}

DEVICE void tma_load_5d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
