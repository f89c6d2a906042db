"""Wrong solutions of the CUDA exercises, each by one mistake that people make. All of them compile."""

from __future__ import annotations

SILU = """
DEVICE float silu(float x) {{ return x * reciprocal_approx(1.0f + exp2_approx(-{factor}f * x)); }}

DEVICE uint32_t activate(uint32_t gate, uint32_t up) {{
    return pack_bf16({low}, {high});
}}
"""
LOG2E = "1.4426950408889634"
LOW, HIGH = "silu(bf16_low(gate)) * bf16_low(up)", "silu(bf16_high(gate)) * bf16_high(up)"

BACKWARD = """
                const float d_a = d_acts[2 * i + j], act = value * up, scaled = score[h] * d_a;
                d_gate[j] = {d_gate};
                d_up[j] = {d_up};
                a[j] = {a};
                d_score[h] += {d_score};
"""
RIGHT = {
    "d_gate": "scaled * up * slope",
    "d_up": "scaled * value * up_slope",
    "a": "score[h] * act",
    "d_score": "d_a * act",
}

WRONG = {
    "silu_by_exp": {
        "base 2 instead of e": SILU.format(factor="1.0", low=LOW, high=HIGH),
        "gate and up exchanged": SILU.format(
            factor=LOG2E, low="silu(bf16_low(up)) * bf16_low(gate)", high="silu(bf16_high(up)) * bf16_high(gate)"
        ),
        "two columns exchanged": SILU.format(factor=LOG2E, low=HIGH, high=LOW),
        "up of the other column": SILU.format(factor=LOG2E, low=LOW, high="silu(bf16_high(gate)) * bf16_low(up)"),
    },
    "swiglu_backward": {
        "dS with the score in it": BACKWARD.format(**RIGHT | {"d_score": "scaled * act"}),
        "dgate without up": BACKWARD.format(**RIGHT | {"d_gate": "scaled * slope"}),
        "A' without the score": BACKWARD.format(**RIGHT | {"a": "act"}),
        "dup with the slope": BACKWARD.format(**RIGHT | {"d_up": "scaled * slope * up_slope"}),
    },
}
