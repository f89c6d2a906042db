// The expert's nonlinearity, element by element in fp32, and its derivative. blazeproto/activations.py hands a kernel these macros
// when it is compiled:
//
//   ACTIVATION_IS_NAME   1 for the branch that it takes below; ACTIVATION is its NAME
//   ACTIVATION_LIMIT...  the parameters, of those that have them
//   GATED                1   H = [gate, up]   act = f(gate) * g(up)
//                        0   H = pre          act = f(pre)
//   PLAIN_UP             1   g(up) = up
#pragma once
#include "ptx.cuh"

#define TEXT_OF(name) #name
#define TEXT(macro) TEXT_OF(macro)

struct ValueAndSlope {
    float value, slope;
};

// cap tanh(x / cap) and its derivative, to some 2^-20 of each: tanh.approx, of 2^-11, would show in bf16.
DEVICE ValueAndSlope soft_cap(float x, float cap) {
    constexpr float TWICE_LOG2E = 2.8853900817779268f;
    const float scaled = x * (1.0f / cap), far = fabsf(scaled), square = scaled * scaled;
    const float e = exp2_approx(-TWICE_LOG2E * far), quotient = reciprocal_approx(1.0f + e);
    // Near 0 the quotient would lose digits: the series to scaled^9, whose next term is below 2^-23 of it.
    const float series = 1.0f + square * (-0.33333334f + square * (0.13333334f + square * (-0.053968254f + square * 0.021869488f)));
    const float t = far < 0.25f ? scaled * series : copysignf((1.0f - e) * quotient, x);
    return {cap * t, 4.0f * e * quotient * quotient};
}

// f and its derivative.
DEVICE ValueAndSlope nonlinearity(float x) {
#if ACTIVATION_IS_SILU
    // x sigmoid(x) by tanh: one trip to the special-function unit instead of two (exp, reciprocal).
    const float half = 0.5f * x, t = tanh_approx(half), sigmoid = 0.5f * t + 0.5f;
    const float value = half * t + half;
    return {value, sigmoid + value - value * sigmoid};
#elif ACTIVATION_IS_CLAMPED_SWIGLU
    // gpt-oss: c = min(gate, LIMIT), f = c sigmoid(ALPHA c), g = clamp(up, -LIMIT, LIMIT) + 1
    const bool clamped = x > ACTIVATION_LIMIT;
    const float c = clamped ? ACTIVATION_LIMIT : x, half = 0.5f * ACTIVATION_ALPHA * c;
    const float sigmoid = 0.5f * tanh_approx(half) + 0.5f, value = c * sigmoid;
    return {value, clamped ? 0.0f : sigmoid + ACTIVATION_ALPHA * value * (1.0f - sigmoid)};
#elif ACTIVATION_IS_LIMITED_SWIGLU
    // f = SiLU(min(gate, LIMIT)), g = clamp(up, -LIMIT, LIMIT)
    const bool clamped = x > ACTIVATION_LIMIT;
    const float half = 0.5f * (clamped ? ACTIVATION_LIMIT : x), t = tanh_approx(half), sigmoid = 0.5f * t + 0.5f;
    const float value = half * t + half;
    return {value, clamped ? 0.0f : sigmoid + value - value * sigmoid};
#elif ACTIVATION_IS_SOFTCAPPED_SWIGLU
    // f = GATE_CAP tanh(gate / GATE_CAP) sigmoid(gate), g = UP_CAP tanh(up / UP_CAP)
    const auto [capped, slope] = soft_cap(x, ACTIVATION_GATE_CAP);
    const float sigmoid = 0.5f * tanh_approx(0.5f * x) + 0.5f, value = capped * sigmoid;
    return {value, slope * sigmoid + value * (1.0f - sigmoid)};
#elif ACTIVATION_IS_RELU
    return {x <= 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f};  // NaN stays NaN
#elif ACTIVATION_IS_RELU2
    const float positive = x <= 0.0f ? 0.0f : x;  // NaN stays NaN
    return {positive * positive, 2.0f * positive};
#elif ACTIVATION_IS_GELU
    // Normal distribution: Abramowitz and Stegun 26.2.17, absolute error below 8e-8; one exponential serves value and slope.
    constexpr float INV_SQRT_2PI = 0.3989422804014327f, HALF_LOG2E = 0.7213475204444817f;
    const float density = INV_SQRT_2PI * exp2_approx(-HALF_LOG2E * x * x);
    const float t = reciprocal_approx(1.0f + 0.2316419f * fabsf(x));
    const float upper =
        density * t *
        (0.319381530f + t * (-0.356563782f + t * (1.781477937f + t * (-1.821255978f + t * 1.330274429f))));
    const float cdf = x > 0.0f ? 1.0f - upper : upper;
    return {x * cdf, cdf + x * density};
#elif ACTIVATION_IS_GELU_TANH
    // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), by an exponential: tanh.approx is not near enough
    // to 1 for the slope.
    constexpr float TWICE = 1.5957691216057308f, CUBE = 0.044715f, LOG2E = 1.4426950408889634f;
    const float square = x * x, sigmoid = reciprocal_approx(1.0f + exp2_approx(-LOG2E * TWICE * x * (1.0f + CUBE * square)));
    const float value = x * sigmoid;
    return {value, sigmoid + value * (1.0f - sigmoid) * (TWICE * (1.0f + 3.0f * CUBE * square))};
#else
    static_assert(false, "activation.cuh: nonlinearity has no branch for " TEXT(ACTIVATION));
#endif
}

// What the gated half is multiplied with, g(up), and its derivative.
DEVICE ValueAndSlope linear_half(float up) {
#if PLAIN_UP
    return {up, 1.0f};
#elif ACTIVATION_IS_CLAMPED_SWIGLU
    const bool above = up > ACTIVATION_LIMIT, below = up < -ACTIVATION_LIMIT;
    return {(above ? ACTIVATION_LIMIT : below ? -ACTIVATION_LIMIT : up) + 1.0f, above || below ? 0.0f : 1.0f};
#elif ACTIVATION_IS_LIMITED_SWIGLU
    const bool above = up > ACTIVATION_LIMIT, below = up < -ACTIVATION_LIMIT;
    return {above ? ACTIVATION_LIMIT : below ? -ACTIVATION_LIMIT : up, above || below ? 0.0f : 1.0f};
#elif ACTIVATION_IS_SOFTCAPPED_SWIGLU
    return soft_cap(up, ACTIVATION_UP_CAP);
#else
    static_assert(false, "activation.cuh: linear_half has no branch for " TEXT(ACTIVATION));
#endif
}

struct Unit {
    float d_gate, d_up, a;
};

// A hidden unit of one row, backward: from dA' and S the gradients of gate and up, and A' = S act. Adds <dA', act> to d_score.
DEVICE Unit backward_of_unit(float gate, float up_value, float d_a, float score, float& d_score) {
    const auto [value, slope] = nonlinearity(gate);
    const auto [up, up_slope] = GATED ? linear_half(up_value) : ValueAndSlope{1.0f, 0.0f};
    const float act = value * up, d_a_scaled = score * d_a;
    d_score += d_a * act;
    return {d_a_scaled * up * slope, d_a_scaled * value * up_slope, score * act};
}
