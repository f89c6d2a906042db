// MXFP4 (blazeproto/stored/mxfp4.py): e2m1, the low half of a byte first.
#pragma once
#include "nibbles.cuh"

struct Decoder : Codebook<true, false> {
    DEVICE Decoder(float scale, int) {
        set({0.0f, 0.5f * scale, scale, 1.5f * scale, 2 * scale, 3 * scale, 4 * scale, 6 * scale});
    }
};
