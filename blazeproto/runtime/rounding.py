"""Numbers rounded to bf16 and e4m3 in NumPy, which has no such types: to nearest, ties to even, as the GPU rounds."""

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


def _e4m3() -> np.ndarray:
    """(256,) fp32: sign, four bits of exponent, three of mantissa; no infinity, the largest magnitude is 448."""
    exponent, mantissa = np.arange(128) >> 3, np.arange(128) & 7
    magnitudes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitudes[127] = np.nan
    return np.concatenate((magnitudes, -magnitudes)).astype(np.float32)


E4M3 = _e4m3()
"""The number that each e4m3, a byte, is."""


def e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Bits, uint8, of the e4m3 numbers nearest to values, fp32 of any shape: at most 448; a NaN is 0x7F."""
    magnitudes = np.abs(values.astype(np.float64))
    with np.errstate(invalid="ignore"):
        step = np.exp2(np.maximum(np.frexp(magnitudes)[1] - 1, -6) - 3)
        nearest = np.minimum(np.rint(magnitudes / step) * step, E4M3[126])
    bits = np.searchsorted(E4M3[:127], nearest) | np.signbit(values) << 7
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)
