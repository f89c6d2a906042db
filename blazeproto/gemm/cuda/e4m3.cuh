// e4m3 in blocks (blazeproto/stored/fp8.py).
#pragma once
#include "quantized.cuh"

constexpr int BITS = 8;

struct Decoder {
    float scale;

    DEVICE Decoder(float of, int) : scale(of) {}

    DEVICE uint4 chunk(const uint32_t* words, int i) const {
        float numbers[CHUNK];
#if __CUDA_ARCH__ >= 890  // has instructions for it
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) {
            const float4 four = dequantized(words[2 * i + j / 4], scale);
            numbers[j] = four.x, numbers[j + 1] = four.y, numbers[j + 2] = four.z, numbers[j + 3] = four.w;
        }
#else
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const int first = int(words[2 * i + j / 4] << (24 - j % 4 * 8));  // the code in the first byte
            // Sign, exponent and mantissa in their places of an fp32 number. Its bias is 127 and not 7: it is 2^-120 times the number.
            numbers[j] = __uint_as_float(first >> 4 & 0x87F00000) * 0x1p120f * scale;
        }
#endif
        return pack_chunk(numbers);
    }
};
