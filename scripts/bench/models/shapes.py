"""Models by name: the sizes of one MoE layer of each."""

from typing import NamedTuple

from blazeproto.gemm import Sizes

T = 16384
TABLE_3 = "SonicMoE, Table 3"
CONFIG = "its published config.json"


class Model(NamedTuple):
    """A layer's sizes, and where they are published. Its shared experts, biases and scores' function are left out."""

    name: str
    sizes: Sizes
    source: str


def _model(name: str, d: int, n: int, E: int, K: int, source: str, tokens: int = T) -> Model:
    return Model(name, Sizes(tokens, d, n, E, K), source)


# Those that most people look for stand in front: a run that ends early has them.
MODELS = (
    _model("Qwen3-30B-A3B", 2048, 768, 128, 8, TABLE_3),
    _model("gpt-oss-120b", 2880, 2880, 128, 4, TABLE_3),
    _model("DeepSeek-V3", 7168, 2048, 256, 8, TABLE_3),
    _model("Mixtral 8x7B", 4096, 14336, 8, 2, CONFIG),
    _model("Qwen3-Next-80B-A3B", 2048, 512, 512, 10, TABLE_3),
    _model("OLMoE", 2048, 1024, 64, 8, TABLE_3),
    _model("Qwen3-235B-A22B", 4096, 1536, 128, 8, TABLE_3),
    _model("GLM-4.5-Air", 4096, 1408, 128, 8, TABLE_3),
    _model("gpt-oss-20b", 2880, 2880, 32, 4, CONFIG),
    _model("Llama 4 Scout", 5120, 8192, 16, 1, CONFIG),
    _model("Mixtral 8x22B", 6144, 16384, 8, 2, TABLE_3),
    _model("Kimi K2", 7168, 2048, 384, 8, TABLE_3, tokens=8192),
    _model("MiniMax-Text-01", 6144, 9216, 32, 2, CONFIG),
    _model("DBRX", 6144, 10752, 16, 4, TABLE_3),
    _model("DeepSeek-V2", 5120, 1536, 160, 6, CONFIG),
    _model("GLM-4.5", 5120, 1536, 160, 8, CONFIG),
    _model("Phi-3.5-MoE", 4096, 6400, 16, 2, TABLE_3),
    _model("Granite 3.1 MoE", 1536, 512, 40, 8, TABLE_3),
    _model("Llama 4 Maverick", 5120, 8192, 128, 1, CONFIG),
)
BY_NAME = {model.name: model for model in MODELS}
