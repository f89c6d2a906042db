"""fp8 tensors and their scales as one tensor of bytes, a record, so that operators pass and save one where they have one in bf16.

    rows       (R, width + width / 32)                values (R, width), then scales (width / 128, R) fp32
    weights    (E, m k + 4 (m / 128) (k / 128))       values (E, m, k), then scales (E, m / 128, k / 128) fp32; of one order, and
                                                      (1 or 2, E, ...) of the orders that are there

A record is one run of memory: its shape only says how long it is, and that a chunk's rows have a record of their own. An expert's
bytes are rounded up to 16, so that the second order begins where tensor maps can.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.operators import cast, ready
from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks, scales_shape
from blazeproto.gemm.tiles import ALIGNMENT
from blazeproto.stored.weight import StoredWeight


def row_bytes(width: int) -> int:
    """Bytes that a row takes in a record."""
    return width + 4 * width // BLOCK


def weight_bytes(m: int, k: int) -> int:
    """Bytes that an expert's weight (m, k) takes in a record."""
    return m * k + -(-4 * blocks(m) * blocks(k) // ALIGNMENT) * ALIGNMENT


def new_quantized(like: Tensor, scale: str, *shape: int) -> Quantized:
    """Uninitialised values of this shape, no record, and their scales.  scale: what shares one (`e4m3.scales_shape`)."""
    return Quantized(
        like.new_empty(shape, dtype=torch.float8_e4m3fn),
        like.new_empty(scales_shape(scale, shape), dtype=torch.float32),
    )


def new_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Uninitialised."""
    return like.new_empty(num_rows, row_bytes(width), dtype=torch.uint8)


def new_weights(like: Tensor, shape: Sequence[int], orders: int) -> Tensor:
    """Uninitialised, for a weight of this shape, (E, m, k), in one or two orders."""
    experts, m, k = shape
    return like.new_empty(orders, experts, weight_bytes(m, k), dtype=torch.uint8)


def rows_in(record: Tensor, width: int) -> Quantized:
    """Views of values and scales. width: of a row, a multiple of 128."""
    return quantized_in(record, "1x128", len(record), width)


def width_of(record: Tensor) -> int:
    """How wide the rows in it are."""
    return record.shape[1] * BLOCK // (BLOCK + 4)


def weight_in(record: Tensor, weight: Tensor, *, transposed: bool = False) -> Quantized:
    """Views of values and scales of a weight (E, m, k) in forward's order, a record's first, or of the transpose, its last."""
    order, shape = (record[-1], weight.shape[:0:-1]) if transposed else (record[0], weight.shape[1:])
    return quantized_in(order, "128x128", len(order), *shape)


def new_orders(
    weight: Tensor, orders: tuple[bool, bool], place: Tensor | None = None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """A record of a weight, and its orders, which one pass fills.  orders: whether forward's and the transpose are in it.
    place: a record of its own for the transpose."""
    record = new_weights(weight, weight.shape, sum(orders))
    back = record if orders[1] else place
    to = weight_in(record, weight) if orders[0] else None
    return record, to, None if back is None else weight_in(back, weight, transposed=True)


def quantized_in(record: Tensor, scale: str, *shape: int) -> Quantized:
    """Views of the values of this shape that a run of bytes begins with, and of their scales behind them.  scale: what shares
    one."""
    flat, end, scales = record.view(-1), prod(shape), scales_shape(scale, shape)
    of_scales = flat[end : end + 4 * prod(scales)]
    return Quantized(flat[:end].view(torch.float8_e4m3fn).view(shape), of_scales.view(torch.float32).view(scales))


def quantized_weight(
    quantize: Any,
    weight: Tensor | StoredWeight,
    dtype: torch.dtype,
    at: Any,
    kept: Tensor | None,
    place: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Quantized:
    """A weight, or its transpose, in e4m3.  quantize: a backend's ``quantize_weights``.  dtype: x's, to which it is rounded
    first.  kept: a record that has it already.  place: a record that gets the transpose, too. A `StoredWeight`'s numbers and
    scales stay as they are."""
    if isinstance(weight, StoredWeight):
        lying = weight.values.view(torch.uint8), weight.scales.float()
        codes, scales = (t.mT.contiguous() for t in lying) if transposed else lying
        return Quantized(codes.view(weight.values.dtype), scales)
    if kept is None:
        kept, *orders = new_orders(weight, (not transposed, transposed), place)
        quantize(ready(cast(weight, dtype)), at, *orders)
    return weight_in(kept, weight, transposed=transposed)
