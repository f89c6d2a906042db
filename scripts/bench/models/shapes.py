"""Models by name: the sizes of one MoE layer of each."""

from blazeproto.gemm import Sizes

T = 16384


# d, n, E, K as SonicMoE's Table 3 has them, or as the model's published config.json; shared experts, biases and scores' functions
# are left out. The models that most people look for are the first: a run that ends early has them.
PUBLISHED = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Mixtral 8x7B": (4096, 14336, 8, 2),  # config.json
    "Qwen3-Next-80B-A3B": (2048, 512, 512, 10),
    "OLMoE": (2048, 1024, 64, 8),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8),
    "GLM-4.5-Air": (4096, 1408, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),  # config.json
    "Llama 4 Scout": (5120, 8192, 16, 1),  # config.json
    "Mixtral 8x22B": (6144, 16384, 8, 2),
    "Kimi K2": (7168, 2048, 384, 8),
    "MiniMax-Text-01": (6144, 9216, 32, 2),  # config.json
    "DBRX": (6144, 10752, 16, 4),
    "DeepSeek-V2": (5120, 1536, 160, 6),  # config.json
    "GLM-4.5": (5120, 1536, 160, 8),  # config.json
    "Phi-3.5-MoE": (4096, 6400, 16, 2),
    "Granite 3.1 MoE": (1536, 512, 40, 8),
    "Llama 4 Maverick": (5120, 8192, 128, 1),  # config.json
}
TOKENS = dict.fromkeys(PUBLISHED, T) | {"Kimi K2": 8192}
BY_NAME = {name: Sizes(TOKENS[name], *sizes) for name, sizes in PUBLISHED.items()}
