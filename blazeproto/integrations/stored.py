"""Stored weights in the experts of transformers' models, made by `store_experts` or read from a checkpoint.

    register(storage="mxfp4")                      # gpt-oss's checkpoints are loaded as their bytes lie
    store_experts(model, "nf4")                    # a bf16 model; save_pretrained and from_pretrained keep it stored

A module keeps its class, names and biases. A weight becomes a uint8 parameter of its name and a uint8 buffer of its scales,
(E, out, ...) also if the module is transposed.
"""

from typing import Any

import torch
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    Mxfp4HfQuantizer,
    QuantizationConfigMixin,
    register_quantization_config,
    register_quantizer,
)

from blazeproto.runtime.checks import instance, one_of, require
from blazeproto.stored.module import held, store
from blazeproto.stored.mxfp4 import BLOCK
from blazeproto.stored.weight import check_scales

NAME = "blazeproto"


def store_experts(model: Any, storage: str) -> Any:
    """Quantize the experts of a transformers model in place, freeze them, and set the experts implementation "blazeproto".

    One weight after another, in slices of an expert's rows. Beyond the model as it was, this weight in ``storage`` and less than
    one expert's weight in bf16 exist.
    Dettmers et al., QLoRA, arXiv 2305.14314.

    Args:
        model: a transformers model, before adapters; changed and returned.
        storage: a name of `blazeproto.stored.FORMATS`.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    instance("model", model, torch.nn.Module)
    found: list[Any] = [module for module in model.modules() if hasattr(module, "is_transposed")]
    known = bool(found) and hasattr(model, "set_experts_implementation")
    require(known, "model", "a transformers model with experts", type(model).__name__)
    for experts in found:
        experts.stored = getattr(experts, "stored", {})
        store(
            experts,
            ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"),
            storage,
            transposed=experts.is_transposed,
        )
    model.set_experts_implementation(NAME)
    model.config.quantization_config = StoredConfig(storage)
    return model


@register_quantization_config(NAME)
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The entry of config.json for a model of `store_experts`."""

    dequantize = False

    def __init__(self, storage: str, **_: Any) -> None:
        self.quant_method, self.storage = NAME, storage


@register_quantizer(NAME)
class StoredQuantizer(Mxfp4HfQuantizer):  # type: ignore[misc]
    """Makes room for stored weights before transformers loads them. It needs no kernels and works on any device."""

    is_trainable = True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """ValueError for a checkpoint that is not stored."""
        require(self.pre_quantized, "quantization_config", "None, then store_experts", "one for a bf16 checkpoint")

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if not self.quantization_config.dequantize:
            store_experts(model, getattr(self.quantization_config, "storage", "mxfp4"))
        blocks = not hasattr(self.quantization_config, "storage")
        for parameter in (p for p in model.parameters() if blocks and p.dtype == torch.uint8):
            parameter.data = parameter.data.unflatten(2, (-1, BLOCK // 2))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for of, name in ((module, name) for module in model.modules() for name in getattr(module, "stored", ())):
            check_scales(f"{name}_scales", held(of, name).scales)

    def get_weight_conversions(self) -> Any:
        """Blocks take the weight's name. Scales have theirs."""
        if self.quantization_config.dequantize:
            return super().get_weight_conversions()
        names = () if hasattr(self.quantization_config, "storage") else ("gate_up_proj", "down_proj")
        return [WeightRenaming(f"{n}_blocks", f"{n}(?!_)") for n in names]  # reversed: of neither biases nor scales


def load_stored(storage: str | None) -> None:
    """Let ``from_pretrained`` read what `store_experts` made; "mxfp4": gpt-oss's checkpoints too."""
    one_of("storage", "mxfp4" if storage is None else storage, ("mxfp4",))
    AUTO_QUANTIZER_MAPPING[storage or NAME] = StoredQuantizer  # `register_quantizer` refuses a name that is taken
