// Solution of silu_by_exp. For very negative x exp2_approx is infinite, its reciprocal 0, and SiLU 0, as it should be.
DEVICE float silu(float x) {
    constexpr float LOG2E = 1.4426950408889634f;
    return x * reciprocal_approx(1.0f + exp2_approx(-LOG2E * x));
}

DEVICE uint32_t activate(uint32_t gate, uint32_t up) {
    return pack_bf16(silu(bf16_low(gate)) * bf16_low(up), silu(bf16_high(gate)) * bf16_high(up));
}
