// Frozen weights, decoded to bf16 between load and tensor core. A thread decodes a run: RUN neighbouring numbers of a row.
//
//   number = (value - zero) * scale in fp32, rounded to bf16: the bits of StoredWeight.decode (blazeproto/stored/weight.py)
//
// A format's file has:
//
//   BITS                          of a number
//   Decoder(scale, zero)          what the numbers of a run share
//   chunk(words, i)               the run's numbers 8 i to 8 i + 7
//
// -D: STORED         the format, as below      BLOCK_ROWS, BLOCK_COLUMNS   rows and columns of numbers that share a scale
//     SCALE_BYTES    1: e8m0, 2: bf16, 4: fp32     HAS_ZEROS               whether there are zero points
#pragma once
#include "params.cuh"

constexpr int RUN = 32;
static_assert(BLOCK_COLUMNS % RUN == 0, "a run has one scale");

#if STORED == 1
#include "mxfp4.cuh"
#elif STORED == 2
#include "int4.cuh"
#elif STORED == 3
#include "nf4.cuh"
#else
#include "e4m3.cuh"
#endif

constexpr int BLOCK_BYTES = BLOCK_ROWS * BLOCK_COLUMNS * BITS / 8;  // of numbers that share a scale

// Where an expert's numbers, scales and zero points begin.
struct Expert {
    const uint8_t *values, *scales;
    const int* zeros;

    DEVICE Expert(const RowsParams& p, int expert) {
        const int64_t start = int64_t(expert) * p.blocks_in_expert;
        values = p.values + start * BLOCK_BYTES;
        scales = p.scales + start * SCALE_BYTES;
        zeros = p.zeros + (HAS_ZEROS ? start / 8 : 0);
    }
};

// A run, from its load on until it is decoded.
struct Packed {
    uint32_t words[RUN * BITS / 32];
    uint32_t scale, zeros;  // as they lie in memory; zeros: those of 8 rows
    bool wanted;

    // `row` and `number`: of the expert's matrix.  A run that is not wanted becomes zeros; what is loaded then is the first one.
    DEVICE void load(const RowsParams& p, const Expert& of, int row, int number, bool is_wanted) {
        wanted = is_wanted;
        const int block = number / BLOCK_COLUMNS, scale_at = wanted ? row / BLOCK_ROWS * p.blocks_in_row + block : 0;
        const uint32_t row_bytes = p.blocks_in_row * (BLOCK_COLUMNS * BITS / 8);
        const uint8_t* const from = of.values + (wanted ? row * row_bytes + number * BITS / 8 : 0);  // below 4 GB
#pragma unroll
        for (int i = 0; i < RUN * BITS / 128; ++i) load_16(words + 4 * i, from + CHUNK_BYTES * i);
        const uint8_t* const scale_from = of.scales + scale_at * SCALE_BYTES;
        if (SCALE_BYTES == 1) scale = load_u8(scale_from);
        else if (SCALE_BYTES == 2) scale = load_u16(scale_from);
        else scale = load_s32(reinterpret_cast<const int*>(scale_from));
        zeros = HAS_ZEROS ? load_s32(of.zeros + (wanted ? row / 8 * p.blocks_in_row + block : 0)) : 0;
    }

    // Decodes it into four neighbouring chunks of a swizzled row, `at`. row: of the matrix, or its remainder modulo 8.
    // CLIPPED: nobody reads a run that is not wanted.
    template <bool CLIPPED = false>
    DEVICE void store(uint32_t stage, int at, int chunk, int row) const {
        const Decoder decoder(scale_of(scale), int(zeros >> row % 8 * 4 & 15));
#pragma unroll
        for (int i = 0; i < RUN / CHUNK; ++i)
            store_shared_16(swizzled(stage, at, chunk + i), CLIPPED || wanted ? decoder.chunk(words, i) : make_uint4(0, 0, 0, 0));
    }

   private:
    DEVICE static float scale_of(uint32_t bits) {
        if (SCALE_BYTES == 1) return __uint_as_float(bits ? bits << 23 : 1 << 22);  // 0: 2^-127
        return __uint_as_float(SCALE_BYTES == 2 ? bits << 16 : bits);
    }
};
