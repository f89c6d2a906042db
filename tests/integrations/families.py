"""Tiny models of transformers' families: of each that has the decorator ``use_experts_implementation`` a configuration."""

import ast
import importlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 64
SMALL: dict[str, Any] = {  # by whatever name a configuration has for it; it ignores the others
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "first_k_dense_replace": 0,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "enable_moe_block": True,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
EXTRA: dict[str, dict[str, Any]] = {  # what a family needs besides
    "beam": {**SPARSE, "layer_types": ["full_attention", "full_attention"]},
    "flint": {"mlp_only_layers": []},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_state": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "mimo_v2_flash": {**SPARSE, "num_attention_heads": 8},
    "nemotron_h": {"layer_types": ["full_attention", "moe"], "moe_shared_expert_intermediate_size": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "num_key_value_heads": 2},
}
DOZEN = (
    *(
        "qwen3_moe",
        "qwen2_moe",
        "mixtral",
        "olmoe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "granitemoe",
        "minimax_m2",
    ),
    *("gpt_oss", "aria_text", "gemma4_text", "phimoe", "nemotron_h"),
)


@cache
def decorated() -> dict[str, list[str]]:
    """The classes with the decorator, by their family's folder: read from the sources, none is imported."""
    import transformers

    found: dict[str, list[str]] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if "@use_experts_implementation" not in (text := path.read_text()):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
                if "use_experts_implementation" in names:
                    found.setdefault(path.parent.name, []).append(f"{path.stem}.{node.name}")
    return found


@cache
def causal_families() -> list[str]:
    """Model types of a folder with the decorator that make a language model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    names = [name for folder in decorated() for name in (folder, f"{folder}_text")]
    return [
        name
        for name in names
        if name in CONFIG_MAPPING.keys()  # noqa: SIM118 - its `in` takes no string
        and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING
        and not getattr(CONFIG_MAPPING[name], "sub_configs", None)
    ]


def is_newest() -> bool:
    """Whether transformers is of the version whose families and classes these files name; earlier ones lack some."""
    import transformers

    return transformers.__version__.startswith("5.24.")


def of_this_version(names: Iterable[str]) -> list[Any]:
    """Families for `parametrize`: those that have no decorator in an earlier version are skipped there."""
    skip = pytest.mark.skip(reason="this version of transformers has no decorator there")
    return [n if is_newest() or n in causal_families() else pytest.param(n, marks=skip) for n in names]


def randomise(module: nn.Module) -> None:
    """Weights of a size that makes every gradient matter; biases too, which would be 0."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)


def configuration(family: str, **options: Any) -> Any:
    """A tiny one of a family (its model type)."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**{**SMALL, **EXTRA.get(family, {}), **options}, use_cache=False)


def tiny(family: str, **options: Any) -> Any:
    """A language model of a family, with random weights in float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    config = configuration(family)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert size < 6_000_000, f"{family} takes other names for its sizes: {size} parameters"
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    randomise(model)
    return model


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, (2, 12), generator=torch.Generator().manual_seed(1))


EXPERTS_CONFIG = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "swiglu_limit": 1.25,
    "swiglu_alpha": 1.702,
    "post_norm_eps": 1e-5,
    "moe_latent_size": None,
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 3.0,
}


def experts_alone(folder: str, name: str) -> Any:
    """An experts module without its model."""
    stem, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.{stem}")
    config = SimpleNamespace(**EXPERTS_CONFIG, _experts_implementation="eager")
    experts = getattr(module, kind)(config)
    randomise(experts)
    return experts
