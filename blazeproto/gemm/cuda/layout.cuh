// How gate and up lie side by side in the weights of a gated layer, (E, 2n, d), and so in H, (R, 2n). GATE_UP is fixed when
// a kernel is compiled. (The other half of the weights' layout, their major order, is B_MN: varlen_m.cuh.)
//
//   HALVES        gate 0, gate 1, ..., gate n-1, up 0, up 1, ..., up n-1       as in Hugging Face's gate_up_proj
//   ALTERNATING   gate 0, up 0, gate 1, up 1, ...                              as in gpt-oss's
//
// Only the kernels that tell gate from up ask. Products that reduce over the 2n columns (linear.cu) or make them rows of a
// gradient (weight.cu) take either.
#pragma once
#include "activation.cuh"

enum class GateUp { HALVES, ALTERNATING };

constexpr bool ALTERNATING = GATED && GateUp::GATE_UP == GateUp::ALTERNATING;

DEVICE float act_of(float gate, float up) {
    const float value = nonlinearity(gate).value;
    return GATED ? value * linear_half(up).value : value;
}

// Of two pairs: gate and up of two units each; alternating, gate and up of one unit each.
DEVICE uint32_t activate(uint32_t first, uint32_t second) {
    if (ALTERNATING) return pack_bf16(act_of(bf16_low(first), bf16_high(first)), act_of(bf16_low(second), bf16_high(second)));
    return pack_bf16(act_of(bf16_low(first), bf16_low(second)), act_of(bf16_high(first), bf16_high(second)));
}
