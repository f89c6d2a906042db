"""The gates and activations of transformers' experts modules, as activations of `blazeproto.activations`."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from blazeproto.activations import activation_named, alternating

LIBRARIES = ("torch.nn.modules.activation", "transformers.activations")
FUNCTIONS = {  # the class of act_fn, and f of blazeproto.activations
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
PLAIN_FUNCTIONS = {nn.functional.silu: "silu", nn.functional.relu: "relu"}  # where act_fn is no module
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


def _act_fn(experts: nn.Module) -> str | None:
    """The name of f where act_fn is one of the table's."""
    act_fn = getattr(experts, "act_fn", None)
    if not isinstance(act_fn, nn.Module):
        return next((name for function, name in PLAIN_FUNCTIONS.items() if act_fn is function), None)
    kind = type(act_fn)
    return FUNCTIONS.get(kind.__name__) if kind.__module__ in LIBRARIES else None


def _glu_of_act_fn(experts: nn.Module) -> str | None:
    return GATED.get(_act_fn(experts) or "")


def _with(activation: str, **attributes: str) -> Callable[[nn.Module], str | None]:
    """What tells the name of a gate with parameters, each of which is an attribute of the module."""

    def name(experts: nn.Module) -> str:
        values = [f"{parameter}={float(attrgetter(path)(experts))!r}" for parameter, path in attributes.items()]
        return _in_table(f"{activation}({','.join(values)})")

    return name


def _limited_of_act_fn(experts: nn.Module) -> str | None:
    return _with("limited_swiglu", limit="limit")(experts) if _act_fn(experts) == "silu" else None


def _of_fp8(experts: nn.Module) -> str | None:
    """The gate of transformers' fp8 experts, if none of its parameters is set."""
    return (
        None
        if any(
            getattr(experts, name, None) is not None
            for name in ("gate_softcap", "swiglu_alpha", "swiglu_limit", "limit")
        )
        else _glu_of_act_fn(experts)
    )


def _softcapped(experts: nn.Module) -> str | None:
    """Inkling's gate, whose act_fn is a module of its own file that takes gate and up."""
    if full_name(type(experts.act_fn)) != full_name(type(experts)).replace("Experts", "SoftcappedSwiGLU"):
        return None
    return _with("softcapped_swiglu", gate_cap="act_fn.gate_softcap.softcap", up_cap="act_fn.up_softcap.softcap")(
        experts
    )


@torch.compiler.assume_constant_result  # a compiler would trace the regular expression that reads a name
def _in_table(name: str, alternates: bool = False) -> str:
    """The name under which the table has an activation."""
    return alternating(name) if alternates else activation_named(name).name


DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
MODELS: dict[str, Callable[[nn.Module], str | None]] = {  # the gates of transformers.models, as an activation
    "beam.modeling_beam.BeamExperts": _glu_of_act_fn,
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts": _limited_of_act_fn,
    "glm5_next.modeling_glm5_next.Glm5NextTextExperts": _with("limited_swiglu", limit="swiglu_limit"),
    "gpt_oss.modeling_gpt_oss.GptOssExperts": _with("clamped_swiglu", limit="limit", alpha="alpha"),
    "hy_v4.modeling_hy_v4.HYV4Experts": _with("limited_swiglu", limit="swiglu_limit"),
    "hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts": _with("limited_swiglu", limit="swiglu_limit"),
    "inkling2.modeling_inkling2.Inkling2Experts": _softcapped,
    "inkling2_loop.modeling_inkling2_loop.Inkling2LoopExperts": _softcapped,
    "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts": _with(
        "clamped_swiglu", limit="swiglu_limit", alpha="swiglu_alpha"
    ),
    "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts": _with(
        "clamped_swiglu", limit="limit", alpha="alpha"
    ),
}
GATES = {
    DEFAULT_GATE: _glu_of_act_fn,
    "transformers.integrations.finegrained_fp8.FP8Experts._apply_gate": _of_fp8,
} | {f"transformers.models.{name}._apply_gate": gate for name, gate in MODELS.items()}


def gate_name(experts: Any) -> str:
    own = "_apply_gate" in experts.__dict__
    return full_name(experts._apply_gate) if own else full_name(type(experts), "_apply_gate")


@torch.compiler.assume_constant_result  # a compiler reads no __qualname__
def full_name(thing: Any, attribute: str = "") -> str:
    """The full name of a class or a function, or of that attribute of a class."""
    named = getattr(thing, attribute) if attribute else thing
    return f"{named.__module__}.{named.__qualname__}"


def activation_of(experts: nn.Module) -> str | None:
    """The activation of the table that a module's experts have, or None."""
    if not experts.has_gate:
        return _act_fn(experts)
    name = GATES.get(gate_name(experts), lambda _: None)(experts)
    return name if name is None or experts.is_concatenated else _in_table(name, True)
