"""bitsandbytes' NF4: 16 quantiles of a normal distribution, the high nibble first, and an absmax for each 64 of a row.

Dettmers et al., QLoRA, arXiv 2305.14314, section 3. A number is a float32 product, rounded to bf16.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.gemm.tiles import NF4
from blazeproto.runtime.checks import instance, require
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

BLOCKS = (32, 64, 128)
NUMBERS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Nested(NamedTuple):
    """The tensors that decode a double-quantized absmax: code[absmax] * nested absmax + offset.

    Fields:
        code: (256,) float32, bitsandbytes' ``nested_quant_map``.
        absmax: float32, one for each 256 of absmax, ``nested_absmax``.
        offset: a float32 scalar.
    """

    code: Tensor
    absmax: Tensor
    offset: Any


def nf4(
    packed: Tensor,
    absmax: Tensor,
    *,
    shape: tuple[int, int, int],
    block: int = 64,
    nested: Nested | None = None,
) -> StoredWeight:
    """A weight in NF4. Values are not copied.

    packed: (any,) uint8, E * out * in / 2 bytes of any shape.
    absmax: (any,) float32, one for each block; with ``nested`` uint8, which is expanded to float32 once.
    shape: (E, out, in). Blocks may not run over rows.  block: 32, 64 or 128 numbers.
    nested: the tensors that decode a double-quantized absmax.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    three = (
        isinstance(shape, tuple | list) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)
    )
    require(three, "shape", "(E, out, in)", repr(shape))
    experts, out, width = shape
    check_block("block", (1, block), shape, "nf4")
    instance("nested", nested, Nested, optional=True)
    values = check_tensor("packed", packed, (torch.uint8,))
    count = experts * out * width
    require(2 * values.numel() == count, "packed", f"{count // 2} bytes for shape {tuple(shape)}", values.numel())
    of_absmax = (torch.float32,) if nested is None else (torch.uint8,)
    absmax = check_tensor("absmax", absmax, of_absmax, values).flatten()
    require(absmax.numel() == count // block, "absmax", f"{count // block}, one for each block", absmax.numel())
    if nested is not None:
        absmax = _expanded(absmax, nested)
    scales = check_scales("absmax", absmax).view(experts, out, width // block)
    return StoredWeight(f"nf4 1 {block}", values.view(experts, out, width // 2), scales)


def _expanded(absmax: Tensor, nested: Nested) -> Tensor:
    code, outer = (
        check_tensor(f"nested.{name}", getattr(nested, name), (torch.float32,), absmax) for name in ("code", "absmax")
    )
    count = -(-absmax.numel() // 256)
    require(code.numel() == 256, "nested.code", "256 numbers", code.numel())
    require(outer.numel() == count, "nested.absmax", f"{count}, one for each 256 of absmax", outer.numel())
    scales = outer.flatten().repeat_interleave(256)[: absmax.numel()]
    offset = torch.as_tensor(nested.offset, dtype=torch.float32, device=absmax.device).detach()
    require(offset.numel() == 1, "nested.offset", "one number", tuple(offset.shape))
    return code.flatten().index_select(0, absmax.int()) * scales + offset


def _quantize(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """To the nearest number."""
    by_block, largest = largest_of(numbers, block)
    table = torch.tensor(NUMBERS, dtype=torch.float32, device=numbers.device)
    relative = (by_block / largest).nan_to_num_(0.0)  # a block of zeros
    codes = torch.bucketize(relative.view_as(numbers), (table[1:] + table[:-1]) / 2)
    return to_nibbles(codes, high_first=True), largest.squeeze((1, 3))


FORMATS["nf4"] = Format(
    NF4,
    (1, 64),
    lambda rows, columns: rows == 1 and columns in BLOCKS,
    partial(of_nibbles, numbers=NUMBERS, high_first=True),
    _quantize,
    "absmax",
)
