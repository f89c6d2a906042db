"""MXFP4, as gpt-oss's checkpoints have it: e2m1 values, the low nibble first, and a power of two for each 32 of a row.

OCP Microscaling Formats 1.0, section 5.2. A decoded number is exact in bf16.
"""

from functools import partial

import torch
from torch import Tensor

from blazeproto.gemm.tiles import MXFP4
from blazeproto.runtime.checks import require
from blazeproto.stored.weight import (
    FORMATS,
    Format,
    StoredWeight,
    check_scales,
    check_tensor,
    largest_of,
    of_nibbles,
    to_nibbles,
)

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*MAGNITUDES, *(-number for number in MAGNITUDES))
BYTES, SCALES = (torch.uint8, torch.int8), (torch.uint8, torch.float8_e8m0fnu)


def mxfp4(blocks: Tensor, scales: Tensor) -> StoredWeight:
    """A weight in MXFP4. Nothing is copied.

    blocks: (E, out, in / 32, 16) or (E, out, in / 2), uint8 or int8.
    scales: (E, out, in / 32), uint8 or float8_e8m0fnu: byte s stands for 2^(s - 127).

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    values = check_tensor("blocks", blocks, BYTES).view(torch.uint8)
    fits = values.dim() == 3 or (values.dim() == 4 and values.shape[3] == BLOCK // 2)
    require(
        fits and values.numel() > 0, "blocks", "shape (E, out, in / 32, 16) or (E, out, in / 2)", tuple(blocks.shape)
    )
    values = values.flatten(2)
    require(values.shape[2] % (BLOCK // 2) == 0, "blocks", f"in a multiple of {BLOCK}", 2 * values.shape[2])
    experts, out, packed = values.shape
    scales = check_tensor("scales", scales, SCALES, values).view(torch.uint8)
    shape = experts, out, packed * 2 // BLOCK
    require(scales.shape == shape, "scales", f"shape (E, out, in / 32) = {shape}", tuple(scales.shape))
    return StoredWeight(f"mxfp4 1 {BLOCK}", values, check_scales("scales", scales.view(torch.float8_e8m0fnu)))


def _quantize(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """To the nearest, ties to even; a scale is the largest magnitude's power of two over 4, so magnitudes above 6 become 6."""
    by_block, largest = largest_of(numbers, block)
    exponent = (largest.frexp().exponent - 3).clamp_min(-127)
    magnitudes = torch.ldexp(by_block.abs(), -exponent).view_as(numbers)
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32, device=numbers.device)
    codes = torch.bucketize(magnitudes, between, out_int32=True)  # of two as near, the lower
    codes += (codes % 2 == 1) & (magnitudes == between[codes.clamp_max(6)])
    scales = (exponent.squeeze((1, 3)) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return to_nibbles(codes + 8 * numbers.signbit()), scales


FORMATS["mxfp4"] = Format(
    MXFP4, (1, BLOCK), lambda *block: block == (1, BLOCK), partial(of_nibbles, numbers=NUMBERS), _quantize
)
