"""The papers' own figures: MoEBlaze (H100, PyTorch 2.0.1, CUDA 12.1) and SonicMoE (H100), as figures give it in their texts."""

# MoEBlaze Table 2: (activation, T) -> ms and MB of MoEBlaze, ms and MB of MegaBlocks; None: out of memory.
SCALE: dict[tuple[str, int], tuple[float, int, float | None, int | None]] = {
    ("swiglu", 8192): (1.0, 155, 1.8, 495),
    ("swiglu", 32768): (2.3, 477, 5.9, 1931),
    ("swiglu", 131072): (7.7, 1766, 22.5, 7675),
    ("swiglu", 524288): (28.7, 6918, None, None),
    ("swiglu", 2097152): (115.2, 27528, None, None),
    ("silu", 8192): (0.7, 108, 1.4, 303),
    ("silu", 32768): (1.8, 334, 4.4, 1163),
    ("silu", 131072): (6.3, 1238, 16.1, 4603),
    ("silu", 524288): (24.0, 4854, None, None),
    ("silu", 2097152): (95.3, 19320, None, None),
}

# MoEBlaze Table 3, 1 M tokens: model -> sorting and hash, ms.
DISPATCH = {
    "Qwen3": (5.1, 2.1),
    "DeepSeek-V3": (6.8, 3.0),
    "DBRX": (1.7, 0.9),
    "Mixtral 8x22B": (1.9, 1.4),
    "gpt-oss-120b": (3.6, 1.9),
    "Granite": (3.8, 1.6),
}

# MoEBlaze Table 5, and Table 4 where the two differ: (d, E, n) -> by line ms and MB.
LINES = ("torch, sort", "kernels, sort", "recomputing, sort", "recomputing, tiled")
ABLATION: dict[tuple[int, int, int], tuple[tuple[str, int], ...]] = {
    (256, 512, 128): (("1076", 8166), ("352", 6294), ("340", 5782), ("336", 5766)),
    (256, 128, 256): (("654", 11750), ("324; 333", 7958), ("290", 6934), ("287", 6918)),
    (512, 32, 512): (("887", 22278), ("561", 14646), ("511", 12598), ("509", 12582)),
}

# MoEBlaze §6.3 and §6.5, of Figures 3 and 5: (configuration, activation) -> MB of MoEBlaze and of MegaBlocks.
FIGURE_MEMORY = {("conf4", "silu"): "6100, 22000", ("conf4 of the text", "silu"): "6100, 22000"}
FIGURE_MEMORY |= {("conf3", "swiglu"): "10000, 40000"}
FIGURE_SPEED = {"silu": "1.4 to 3.7", "swiglu": "2 to 6.2"}  # over MegaBlocks: §6.4, §6.6

GATHER_OVERHEAD = 0.30  # MoEBlaze §7.3, about

# SonicMoE: Figure 1, §6.1, §6.2, §1, in the order of `tables.claims`.
CLAIMS = ("0.88 (0.86 to 0.91)", "0.55", "1.40", "1.83")
ROUNDING_GAIN = {("top-right", 128): "1.165, 1.061, 1.094"}  # §6.3.2: forward, backward, both

# SonicMoE Tables 1a and 6a: by our run's name, perplexity in training and in validation; None: not printed.
PERPLEXITY: dict[str, tuple[float | None, float]] = {
    "rounded": (16.22, 15.92),
    "ours": (16.34, 15.94),
    "rounded_down": (16.44, 16.10),
    "expert_choice": (16.83, 18.61),
    "rounded_sr_f": (None, 15.93),
    "rounded_nr_s": (None, 15.91),
    "rounded_balance_f": (None, 15.93),
    "rounded_up": (None, 15.89),
}
