// e4m3 in blocks (blazeproto/stored/fp8.py).
#pragma once
#include "ptx.cuh"

constexpr int BITS = 8;

struct Decoder {
    float scale;

    DEVICE Decoder(float of, int) : scale(of) {}

    DEVICE uint4 chunk(const uint32_t* words, int i) const {
        float numbers[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const uint32_t code = words[2 * i + j / 4] >> j % 4 * 8;
            // As the first bits of an fp32 number, whose exponent has a bias of 127 and not 7, it stands for 2^-120 times the number.
            numbers[j] = __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * 0x1p120f * scale;
        }
        return pack_chunk(numbers);
    }
};
