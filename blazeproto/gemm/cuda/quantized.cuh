// Quantizing to fp8 (e4m3): values that share a scale are divided by it and rounded to nearest, ties to even. gemm/e4m3.py has
// the twin. A scale is a power of two, or float32 as in inference engines.
#pragma once
#include "ptx.cuh"

// A power of two, and what values are multiplied by before they are rounded.
struct Scale {
    float scale, inverse;

    // Of values of which `bits`, as a float, is the largest magnitude: the least power of two, at least 2^-126, that leaves none
    // above 448. NaN where one is Inf or NaN, which makes all of them NaN.
    DEVICE static Scale of(uint32_t bits) {
        if (bits >= 0x7F800000u) return {__uint_as_float(0x7FFFFFFFu), __uint_as_float(0x7FFFFFFFu)};
        const int exponent = max(int(bits + 0x1FFFFFu >> 23) - 8, 1);  // 448 = 1.75 * 2^8
        return {__uint_as_float(uint32_t(exponent) << 23), __uint_as_float(uint32_t(254 - exponent) << 23)};
    }

    DEVICE float divide(float value) const { return value * inverse; }
};

// value / by, correctly rounded. inverse: 1 / by, correctly rounded. One correction is enough for a bf16 value: so says a trial of
// all 2^30 pairs of mantissas. A quotient too small to be corrected is 0 in e4m3, and -0 stays -0.
DEVICE float quotient(float value, float by, float inverse) {
    const float near = value * inverse;
    return fmaf(-fmaf(near, by, -value), inverse, near);
}

// A 448th of the largest magnitude, in float32, as vLLM has it: of rows divided, at least 1e-10 / 448; of weights multiplied by the
// reciprocal, as torch divides by a number on a GPU, at least 1e-4 / 448.
struct FloatScale {
    float scale, inverse;

    template <bool WEIGHTS = false>
    DEVICE static FloatScale of(uint32_t bits) {
        if (bits >= 0x7F800000u) return {__uint_as_float(0x7FFFFFFFu), __uint_as_float(0x7FFFFFFFu)};
        const float largest = fmaxf(__uint_as_float(bits), WEIGHTS ? 1e-4f : 1e-10f);
        const float scale = WEIGHTS ? largest * (1.0f / 448.0f) : quotient(largest, 448.0f, 1.0f / 448.0f);
        return {scale, __frcp_rn(scale)};
    }

    DEVICE float divide(float value) const { return quotient(value, scale, inverse); }
};

// Pairs of magnitudes, as bf16: the larger of each two, a NaN being larger than all numbers. `largest` has no signs.
DEVICE uint32_t larger_pair(uint32_t largest, uint32_t pair) {
    asm("max.u16x2 %0, %0, %1;" : "+r"(largest) : "r"(pair & 0x7FFF7FFFu));
    return largest;
}

DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return uint32_t(high) << 16 | low;
}

// Four values, in two pairs of bf16.
template <class By>
DEVICE uint32_t quantized(uint32_t low, uint32_t high, const By& by) {
    return pack_e4m3(by.divide(bf16_low(low)), by.divide(bf16_high(low)), by.divide(bf16_low(high)), by.divide(bf16_high(high)));
}

DEVICE float4 dequantized(uint32_t four, float scale) {
    float4 v;
    asm("{\n.reg .b16 ab, cd, a, b, c, d;\n.reg .b32 low, high;\n"
        "mov.b32 {ab, cd}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 low, ab;\n"  // fp16 holds every e4m3
        "cvt.rn.f16x2.e4m3x2 high, cd;\n"
        "mov.b32 {a, b}, low;\n"
        "mov.b32 {c, d}, high;\n"
        "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(four));
    return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
}
