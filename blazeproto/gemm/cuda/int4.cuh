// int4 in groups (blazeproto/stored/int4.py): code q is the number q - 8, as of zero points; the low half of a byte first.
#pragma once
#include "nibbles.cuh"

struct Decoder : Codebook<false, false> {
    DEVICE static float number(int code) { return code; }

    // zero: a code; 8 without zero points.
    DEVICE Decoder(float scale, int zero) {
        float numbers[16], less = HAS_ZEROS ? float(zero) : 8.0f;
#pragma unroll
        for (int code = 0; code < 16; ++code) numbers[code] = (code - less) * scale;
        set(numbers);
    }
};
