"""e4m3 with a scale for each block of 128 x 128, as checkpoints of DeepSeek-V3 and Qwen3 have it.

A number is a float32 product, rounded to bf16. Checkpoints call the scales "scale_inv"; they are multiplied by.
"""

import torch
from torch import Tensor

from blazeproto.gemm.e4m3 import LARGEST
from blazeproto.gemm.tiles import E4M3
from blazeproto.runtime.checks import require
from blazeproto.stored.weight import (
    FORMATS,
    Format,
    StoredWeight,
    check_block,
    check_scales,
    check_tensor,
    largest_of,
)

SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
NAN = 0x7F  # the code; with the sign 0xFF


def check_numbers(name: str, values: Tensor) -> None:
    """ValueError for codes of e4m3, by expert, that are NaN."""
    require(all(not (one.view(torch.uint8) & NAN == NAN).any() for one in values), name, "numbers", "NaN codes")


def fp8(weight: Tensor, scale_inv: Tensor, *, block: tuple[int, int] = (128, 128)) -> StoredWeight:
    """A weight in e4m3. Nothing is copied.

    weight: (E, out, in) of dtype float8_e4m3fn.  scale_inv: (E, out / rows, in / columns), float32, bfloat16 or float8_e8m0fnu.
    block: the rows and columns that share a scale.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    values = check_tensor("weight", weight, (torch.float8_e4m3fn,))
    require(values.dim() == 3 and values.numel() > 0, "weight", "shape (E, out, in)", tuple(values.shape))
    check_block("block", block, values.shape, "fp8")
    check_numbers("weight", values)
    experts, out, width = values.shape
    shape = experts, out // block[0], width // block[1]
    scales = check_tensor("scale_inv", scale_inv, SCALES, values)
    require(scales.shape == shape, "scale_inv", f"shape (E, out / rows, in / columns) = {shape}", tuple(scales.shape))
    return StoredWeight(f"fp8 {block[0]} {block[1]}", values, check_scales("scale_inv", scales))


def _quantize(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """To the nearest; a block's largest magnitude becomes 448."""
    by_block, largest = largest_of(numbers, block)
    scales = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # so that 0 is divided by a number
    values = (by_block / scales).view_as(numbers)
    return values.to(torch.float8_e4m3fn), scales.squeeze((1, 3))


FORMATS["fp8"] = Format(E4M3, (128, 128), lambda *_: True, Tensor.float, _quantize, "scale_inv")
