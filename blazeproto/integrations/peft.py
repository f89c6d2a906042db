"""LoRA on the experts of transformers' models by Hugging Face peft, without W + BA, by one line.

    from blazeproto.integrations.peft import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="blazeproto")
    model = get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))

peft wraps an experts module once for each weight that has adapters, one wrapper inside the other, and for every call puts W + BA
in the weight's place; backward makes a gradient of that size. If the experts implementation is "blazeproto", a wrapper hands
its active adapters' factors inwards instead, and the experts module computes `moe_mlp` with them:

    ParamWrapper(down_proj) ── B A of down ──> ParamWrapper(gate_up_proj) ── and of gate_up ──> experts

Adapters are peft's in every other respect: their names and shapes, saving, loading, merging. Modules on another code path
stay with peft (`explain` tells); options that neither computes right are refused by name (`REFUSED`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.autograd import LowRank
from blazeproto.integrations import transformers
from blazeproto.runtime.checks import require
from blazeproto.runtime.optional import look, need
from blazeproto.stored.weight import StoredWeight

__all__ = ["REFUSED", "explain", "register"]

REFUSED: dict[str, Callable[[Any, str], bool]] = {
    "DoRA": lambda wrapper, adapter: bool(wrapper.use_dora.get(adapter)),
    "lora_dropout": lambda wrapper, adapter: not isinstance(wrapper.lora_dropout[adapter], nn.Identity),
    "lora_bias": lambda wrapper, adapter: bool(wrapper.lora_bias.get(adapter)),
    "a variant of LoRA": lambda wrapper, adapter: adapter in wrapper.lora_variant,
}
"""What is refused in an active adapter of a wrapper, and how it is recognised. peft refuses most of it when an adapter is made;
a second adapter's bias it leaves out without a word."""

_WRAPPER = "peft.tuners.lora.layer:ParamWrapper"
_METHODS: dict[str, tuple[int, tuple[str, ...]] | None] = {
    f"{_WRAPPER}.{name}": call
    for name, call in {
        "forward": (2, ()),
        **dict.fromkeys(("get_base_layer", "get_param", "unmerge"), (1, ())),
        **dict.fromkeys(("merged", "disable_adapters", "active_adapters"), None),
    }.items()
} | {"peft.tuners.lora.model:LoraModel._check_merge_allowed": (1, ())}

# --- Which code path -----------------------------------------------------------------------------------------------------


def _why_peft(wrapper: Any) -> str | None:
    """What keeps a wrapped module from `moe_mlp`; None where nothing does."""
    experts = wrapper.get_base_layer()
    if not hasattr(experts, "is_transposed"):
        return "no experts with transformers' decorator"
    if (implementation := experts.config._experts_implementation) != transformers.NAME:
        return f'experts_implementation="{implementation}"'
    if (why := transformers._why_grouped_mm(experts)) is not None:
        return why
    while wrapper is not experts:
        if wrapper.parameter_name not in ("gate_up_proj", "up_proj", "down_proj"):
            return f"adapters of {wrapper.parameter_name}"
        if experts.is_transposed and wrapper.num_experts == 1:
            return "transposed weights of one expert, to which peft adds B A as to others"
        wrapper = wrapper.base_layer
    return None


def explain(model: nn.Module) -> dict[str, str]:
    """The code path of each wrapped module of a model, by its name: "factors", or "peft: ..." with the reason.

    peft, ``tuners/lora/layer.py``, has the wrapper.

    Args:
        model: a model with peft's adapters, or a wrapped module of it.

    Returns:
        The code paths, in the order of ``model.named_modules()``; {} where no parameter is targeted.

    Raises:
        ImportError: peft is missing, or not of a version from 0.20 on.
        TypeError: ``model`` is no module.
    """
    need("peft")
    from peft.tuners.lora.layer import ParamWrapper

    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    reasons = {
        name: _why_peft(module)
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper) and not name.endswith("base_layer")
    }
    return {name: "factors" if why is None else f"peft: {why}" for name, why in reasons.items()}


# --- Factors -------------------------------------------------------------------------------------------------------------


def factors(wrapper: Any) -> LowRank | None:
    """The active adapters of a wrapper side by side; None where none act, or they are merged into the weight."""
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()  # as peft does
    active = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged or not active:
        return None
    for adapter in active:
        for what, found in REFUSED.items():
            if found(wrapper, adapter):
                raise ValueError(
                    f'experts_implementation="{transformers.NAME}": expected adapters of plain LoRA; adapter {adapter!r} of '
                    f"{wrapper.parameter_name} has {what}"
                )
    pairs = [_pair(wrapper, adapter) for adapter in active]
    if len(pairs) == 1:
        return pairs[0]
    return LowRank(torch.cat([pair.a for pair in pairs], dim=1), torch.cat([pair.b for pair in pairs], dim=2))


def _pair(wrapper: Any, adapter: str) -> LowRank:
    """One adapter's factors, which peft keeps flat: A (E r, in), by expert, and B (out, r E), by rank."""
    num_experts, dtype = wrapper.num_experts, wrapper.get_param().dtype

    def taken(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float32 and dtype != torch.float64 else t.to(dtype)

    a = taken(wrapper.lora_A[adapter].weight).unflatten(0, (num_experts, -1))
    b = taken(wrapper.lora_B[adapter].weight).unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    return LowRank(a, b * wrapper.scaling[adapter])


def _handing_factors_in(of_peft: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrapper's forward, in place of peft's."""

    def forward(self: Any, x: Tensor, *args: Any, low_rank: Any = None, **kwargs: Any) -> Tensor:
        if low_rank is None and (why := "adapter_names" if "adapter_names" in kwargs else _why_peft(self)):
            require(not transformers.is_stored(self.get_base_layer()), "adapters", "factors beside stored experts", why)
            return of_peft(self, x, *args, **kwargs)
        up, down = low_rank or (None, None)
        low_rank = (up, factors(self)) if self.parameter_name == "down_proj" else (factors(self), down)
        made: Tensor = self.base_layer(x, *args, low_rank=low_rank, **kwargs)
        return made

    return forward


def _get_param(wrapper: Any) -> Any:
    """A wrapper's get_param: of a stored weight two bytes with the shape, dtype and device that adapters need."""
    experts = wrapper.get_base_layer()
    if not isinstance(weight := transformers.weight_of(experts, wrapper.parameter_name), StoredWeight):
        return weight
    whole = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
    return whole.mT if experts.is_transposed else whole


def _refusing_to_merge(of_peft: Callable[..., None]) -> Callable[..., None]:
    """A model's check before it merges adapters of any layer: merging would add to a stored weight's bytes."""

    def check(self: Any) -> None:
        require(
            not any(map(transformers.is_stored, self.model.modules())),
            "merge",
            "experts that are not stored",
            "stored ones",
        )
        of_peft(self)

    return check


# --- Registering ---------------------------------------------------------------------------------------------------------


def register() -> None:
    """Let adapters on experts' weights run as factors; and what `blazeproto.integrations.transformers.register` does, unless
    it was called before, whose precision then stays.

    Once a process, before or after a model is made; again is harmless. It replaces the forward of peft's ``ParamWrapper``, which
    does as before wherever the experts implementation is not "blazeproto", and for stored weights ``get_param`` and the check
    before merging. peft, ``tuners/lora/layer.py``.

    Raises:
        ImportError: peft is missing, not of a version from 0.20 on, or without what this uses of it; or transformers, likewise.
    """
    need("peft")
    look("peft", _METHODS)
    need("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if transformers.NAME not in ALL_EXPERTS_FUNCTIONS:
        transformers.register()
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.lora.model import LoraModel

    if ParamWrapper.forward.__module__ != __name__:
        ParamWrapper.forward = _handing_factors_in(ParamWrapper.forward)
        ParamWrapper.get_param = _get_param
        LoraModel._check_merge_allowed = _refusing_to_merge(LoraModel._check_merge_allowed)
