// One hidden unit of the down projection's backward, for every type of operands (down_backward.cu, down_backward_fp8.cu).
#pragma once
#include "activation.cuh"
#include "varlen_m.cuh"

using Scheduler = TileScheduler<BN>;

// Of ROWS rows of a thread: S, and the sum of dS over the units so far.
template <int ROWS>
struct UnitsBackward {
    float score[ROWS], d_score[ROWS];

    // Of one hidden unit in row h. Adds to the row's sum of dS.
    DEVICE Unit of_unit(float gate, float up_value, float d_a, int h) {
        const auto [value, slope] = nonlinearity(gate);
        const auto [up, up_slope] = GATED ? linear_half(up_value) : ValueAndSlope{1.0f, 0.0f};
        const float act = value * up, d_a_scaled = score[h] * d_a;
        d_score[h] += d_a * act;
        return {d_a_scaled * up * slope, d_a_scaled * value * up_slope, score[h] * act};
    }
};
