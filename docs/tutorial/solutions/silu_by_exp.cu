// Solution of silu_by_exp. For very negative x exp2_approx is infinite, its reciprocal 0, and SiLU 0, as it should be.
DEVICE float silu(float x) {
    constexpr float LOG2E = 1.4426950408889634f;
    return x * reciprocal_approx(1.0f + exp2_approx(-LOG2E * x));
}

DEVICE float act_of(float gate, float up) { return silu(gate) * up; }
