"""Stored weights in a module: values are a frozen parameter of bytes, scales and zero points are buffers of bytes.

    gate_up_proj           uint8 (E, out, in / 2), of fp8 (E, out, in), of a checkpoint in MXFP4 (E, out, in / 32, 16)
    gate_up_proj_scales    uint8: the bytes of (E, out / rows, in / columns) scales; _absmax of nf4, _scale of int4, _scale_inv of
                           fp8, so that no state loads into a layer of another format
    gate_up_proj_zeros     uint8: the bytes of int4's zero points; no entry for a weight without

``module.to(dtype)`` and mixed precision cast each floating tensor of a module. They leave bytes alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blazeproto.runtime.checks import instance, one_of, require
from blazeproto.stored.fp8 import check_numbers
from blazeproto.stored.weight import FORMATS, StoredWeight, check_block, check_scales, quantize


def store(module: Any, names: Sequence[str], storage: str, *, transposed: bool = False) -> None:
    """Quantize a module's weights (E, out, in) of these names in place, one after another; on meta their shapes alone.
    transposed: they lie as (E, in, out).

    Raises:
        TypeError, ValueError: a weight or the format does not fit. The module is as it was, unless a later weight's numbers are
            not finite.
    """
    one_of("storage", storage, tuple(FORMATS))
    require(not module.stored, "storage", "weights that are not stored", f"stored ones: {', '.join(module.stored)}")
    (rows, columns), axes = FORMATS[storage].block, (1, 2 if transposed else 1)
    for name in names:
        check_block(f"{name}'s block", (rows, columns), getattr(module, name).transpose(*axes).shape, storage)
    for name in names:
        weight = getattr(module, name).transpose(*axes)
        one = quantize(torch.zeros(1, rows, columns, device="cpu") if weight.is_meta else weight, storage)
        new = (
            t.to("meta").repeat(len(weight), weight.shape[1] // rows, weight.shape[2] // columns)
            for t in one.tensors[:2]
        )
        hold(module, name, StoredWeight(one.how, next(new), next(new)) if weight.is_meta else one)


def hold(module: Any, name: str, weight: StoredWeight) -> None:
    """Put a stored weight in the place of a module's parameter of this name. ``module.stored`` says how it is stored."""
    instance("weight", weight, StoredWeight)
    setattr(module, name, nn.Parameter(weight.values.view(torch.uint8), requires_grad=False))
    for part, t in ((FORMATS[weight.format].scales, weight.scales), ("zeros", weight.zeros)):
        module.register_buffer(f"{name}_{part}", None if t is None else t.view(torch.uint8))
    if not module.stored:
        module.register_load_state_dict_pre_hook(_check_state)
    module.stored = {**module.stored, name: (weight.how, weight.scales.dtype)}


def held(module: Any, name: str) -> Any:
    """A module's weight as `blazeproto.moe_mlp` takes it: a `StoredWeight`, or the parameter."""
    weight = getattr(module, name)
    if name not in getattr(module, "stored", ()):
        return weight
    (how, dtype), zeros = module.stored[name], getattr(module, f"{name}_zeros")
    format = how.split()[0]
    values = weight.view(torch.float8_e4m3fn) if format == "fp8" else weight.flatten(2)
    scales = getattr(module, f"{name}_{FORMATS[format].scales}").view(dtype)
    return StoredWeight(how, values, scales, None if zeros is None else zeros.view(torch.int32))


def _check_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bytes alone, or they would be cast to bytes; values and their scales, or neither; and scales that may be."""
    for weight, (how, dtype) in module.stored.items():
        names = prefix + weight, f"{prefix}{weight}_{FORMATS[how.split()[0]].scales}"
        for name in names:
            got = getattr(state.get(name), "dtype", None if {*names} & state.keys() else torch.uint8)
            require(got == torch.uint8, name, f"bytes of {how!r}, as the layer stores it", got)
        if names[1] in state and not state[names[1]].is_meta:
            check_scales(names[1], state[names[1]].view(dtype))
        if how.startswith("fp8") and names[0] in state and not state[names[0]].is_meta:
            check_numbers(names[0], state[names[0]])
