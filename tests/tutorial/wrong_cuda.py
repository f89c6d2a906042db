"""Wrong solutions of the CUDA exercises, each by one mistake that people make. All of them compile."""

SILU = """
DEVICE float silu(float x) {{ return {x} * reciprocal_approx(1.0f + exp2_approx({power} * x)); }}

DEVICE float act_of(float gate, float up) {{ return {act}; }}
"""
RIGHT_SILU = {"x": "x", "power": "-1.4426950408889634f", "act": "silu(gate) * up"}

BACKWARD = """
        const float act = value * up, scaled = score[h] * d_a;
        d_score[h] += {d_score};
        return {{{d_gate}, {d_up}, {a}}};
"""
RIGHT = {
    "d_gate": "scaled * up * slope",
    "d_up": "scaled * value * up_slope",
    "a": "score[h] * act",
    "d_score": "d_a * act",
}

WRONG = {
    "silu_by_exp": {
        "base 2 instead of e": SILU.format(**RIGHT_SILU | {"power": "-1.0f"}),
        "gate and up exchanged": SILU.format(**RIGHT_SILU | {"act": "silu(up) * gate"}),
        "the sigmoid alone": SILU.format(**RIGHT_SILU | {"x": "1.0f"}),
        "SiLU of the product": SILU.format(**RIGHT_SILU | {"act": "silu(gate * up)"}),
    },
    "swiglu_backward": {
        "dS with the score in it": BACKWARD.format(**RIGHT | {"d_score": "scaled * act"}),
        "dgate without up": BACKWARD.format(**RIGHT | {"d_gate": "scaled * slope"}),
        "A' without the score": BACKWARD.format(**RIGHT | {"a": "act"}),
        "dup with the slope": BACKWARD.format(**RIGHT | {"d_up": "scaled * slope * up_slope"}),
    },
}
