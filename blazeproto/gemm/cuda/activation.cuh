// The expert's nonlinearity, element by element in fp32, and its derivative. ACTIVATION is fixed when a kernel is compiled.
//
//   gated    H = [gate, up]   act = f(gate) * up    f = SiLU (SwiGLU) or GELU (GeGLU)
//   ungated  H = pre          act = f(pre)          f = ReLU, SiLU or GELU (erf form)
#pragma once
#include "ptx.cuh"

enum Activation { SWIGLU, GEGLU, RELU, SILU, GELU };

constexpr bool is_gated(int activation) { return activation == SWIGLU || activation == GEGLU; }

struct ValueAndSlope {
    float value, slope;
};

template <int ACTIVATION_KIND>
DEVICE ValueAndSlope nonlinearity(float x) {
    if constexpr (ACTIVATION_KIND == SWIGLU || ACTIVATION_KIND == SILU) {
        constexpr float LOG2E = 1.4426950408889634f;
        const float sigmoid = reciprocal_approx(1.0f + exp2_approx(-LOG2E * x));
        const float value = x * sigmoid;
        return {value, sigmoid + value - value * sigmoid};
    } else if constexpr (ACTIVATION_KIND == RELU) {
        return {fmaxf(x, 0.0f), x > 0.0f ? 1.0f : 0.0f};
    } else {
        constexpr float SQRT_HALF = 0.7071067811865476f, INV_SQRT_2PI = 0.3989422804014327f, HALF_LOG2E = 0.7213475204444817f;
        const float cdf = 0.5f + 0.5f * erff(x * SQRT_HALF);
        return {x * cdf, cdf + x * INV_SQRT_2PI * exp2_approx(-HALF_LOG2E * x * x)};
    }
}
