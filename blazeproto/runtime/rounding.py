"""Numbers rounded to bf16 in NumPy, which has no such type: to nearest, ties to even, as the GPU rounds what it stores."""

from typing import Any

import numpy as np


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Bits, uint16, of the bf16 numbers nearest to values, fp32 of any shape; a NaN stays one."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """The numbers, fp32, whose bits these are, uint16: bf16 is fp32's upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: Any) -> np.ndarray:
    """The bf16 numbers nearest to values, of any floating dtype, in that dtype; by way of fp32, as kernels accumulate."""
    values = np.asarray(values)
    return from_bfloat16_bits(bfloat16_bits(np.ascontiguousarray(values, np.float32))).astype(values.dtype)
