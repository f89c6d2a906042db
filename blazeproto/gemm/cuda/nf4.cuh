// NF4 (blazeproto/stored/nf4.py): 16 quantiles of a normal distribution, the high half of a byte first.
#pragma once
#include "nibbles.cuh"

struct Decoder : Codebook<false, true> {
    DEVICE static float number(int code) {
        constexpr float NUMBERS[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                       -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                       0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                       0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
        return NUMBERS[code];
    }

    DEVICE Decoder(float scale, int) {
        float numbers[16];
#pragma unroll
        for (int code = 0; code < 16; ++code) numbers[code] = number(code) * scale;
        set(numbers);
    }
};
