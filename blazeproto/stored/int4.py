"""int4 in groups, in the layout of compressed-tensors ("pack-quantized"): eight numbers an int32, the lowest bits first.

A number q from -8 to 7 is stored as q + 8, and so is a zero point. The number is (q - zero) * scale, rounded to bf16.
"""

from functools import partial

import torch
from torch import Tensor

from blazeproto.gemm.tiles import INT4
from blazeproto.runtime.checks import integer, require
from blazeproto.stored.weight import (
    FORMATS,
    Format,
    StoredWeight,
    check_block,
    check_scales,
    check_tensor,
    largest_of,
    of_nibbles,
    to_nibbles,
)

NUMBERS = tuple(map(float, range(-8, 8)))
PACKED = 8  # numbers in an int32


def int4(packed: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group: int) -> StoredWeight:
    """A weight in int4. Nothing is copied.

    packed: (E, out, in / 8) int32, numbers along in.  scales: (E, out, in / group), bfloat16 or float32.
    zeros: (E, out / 8, in / group) int32, zero points along out; None where all are 0.
    group: the numbers of a row that share a scale.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    values = check_tensor("packed", packed, (torch.int32,))
    require(values.dim() == 3 and values.numel() > 0, "packed", "shape (E, out, in / 8)", tuple(values.shape))
    experts, out, width = values.shape[0], values.shape[1], values.shape[2] * PACKED
    group = integer("group", group, least=1)
    check_block("group", (1, group), (experts, out, width), "int4")
    scales = check_tensor("scales", scales, (torch.bfloat16, torch.float32), values)
    shape = experts, out, width // group
    require(scales.shape == shape, "scales", f"shape (E, out, in / group) = {shape}", tuple(scales.shape))
    check_scales("scales", scales)
    if zeros is not None:
        zeros = check_tensor("zeros", zeros, (torch.int32,), values)
        require(out % PACKED == 0, "zeros", f"None, or out a multiple of {PACKED}", f"out = {out}")
        shape = experts, out // PACKED, width // group
        require(zeros.shape == shape, "zeros", f"shape (E, out / 8, in / group) = {shape}", tuple(zeros.shape))
    return StoredWeight(f"int4 1 {group}", values.view(torch.uint8), scales, zeros)


def _zeros(packed: Tensor) -> Tensor:
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32, device=packed.device)
    return ((packed[:, None] >> shifts[:, None] & 15) - 8).flatten(0, 1).float()


def _quantize(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """To the nearest, without zero points; a group's largest magnitude is 7.5 times its scale, in bf16."""
    by_block, largest = largest_of(numbers, block)
    scales = (largest / 7.5).bfloat16()
    codes = (by_block / scales.float()).nan_to_num_(0.0).round_().clamp_(-8, 7) + 8
    return to_nibbles(codes.view_as(numbers)), scales.squeeze((1, 3))


FORMATS["int4"] = Format(
    INT4,
    (1, 32),
    lambda rows, columns: rows == 1 and columns % 2 == 0,
    partial(of_nibbles, numbers=NUMBERS),
    _quantize,
    "scale",
    _zeros,
)
