"""fp8 tensors and their scales as one tensor of bytes, a record, so that operators pass and save one where they have one in bf16.

    rows       (R, width + width / 32)                values (R, width), then scales (width / 128, R) fp32
    weights    (E, m k + 4 (m / 128) (k / 128))       values (E, m, k), then scales (E, m / 128, k / 128) fp32; of one order, and
                                                      (1 or 2, E, ...) of the orders that are there

A record is one run of memory: its shape only says how long it is, and that a chunk's rows have a record of their own. An expert's
bytes are rounded up to 16, so that the second order begins where tensor maps can.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks, scales_shape
from blazeproto.gemm.tiles import ALIGNMENT


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
    """Uninitialised, for a weight of this shape, (E, m, k), in so many orders."""
    experts, m, k = shape
    return like.new_empty(orders, experts, weight_bytes(m, k), dtype=torch.uint8)


def rows_in(record: Tensor, width: int) -> Quantized:
    """Views of values and scales. width: of a row, a multiple of 128."""
    return _views(record, "1x128", len(record), width)


def width_of(record: Tensor) -> int:
    """How wide the rows in it are."""
    return record.shape[1] * BLOCK // (BLOCK + 4)


def weights_in(record: Tensor, m: int, k: int) -> Quantized:
    """Views of values and scales of one order. m, k: as that has them."""
    return _views(record, "128x128", len(record), m, k)


def _views(record: Tensor, scale: str, *shape: int) -> Quantized:
    flat, end, scales = record.view(-1), prod(shape), scales_shape(scale, shape)
    of_scales = flat[end : end + 4 * prod(scales)]
    return Quantized(flat[:end].view(torch.float8_e4m3fn).view(shape), of_scales.view(torch.float32).view(scales))
