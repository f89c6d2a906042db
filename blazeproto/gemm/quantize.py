"""To fp8 (e4m3) and back (cuda/quantize.cu): values that share a scale, a power of two, are divided by it and rounded.

What shares a scale: a token; 128 columns of a row; 128 x 128 elements of a weight. Its scale is the least power of two, at least
2^-126, that leaves no magnitude above 448, e4m3's largest; 1 where all are zero. Where one is Inf or NaN the scale is NaN, and so
is all that shares it. Rounding is to nearest, ties to even; below 2^-6 of a scale e4m3 has steps of 2^-9. So a quantized weight's
transpose is the transpose, quantized.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.product import build_of
from blazeproto.runtime import driver

BLOCK = 128
LARGEST = 448.0
PER_CHUNK, THREADS = 16, 128  # e4m3 that a thread moves at once; of a block that quantizes rows


class Quantized(NamedTuple):
    """values: e4m3.  scales: fp32."""

    values: Any
    scales: Any


def blocks(width: int) -> int:
    """Of BLOCK elements, the last of which may be short."""
    return -(-width // BLOCK)


# --- What the kernels compute, of NumPy arrays or torch tensors (m: numpy or torch) ---------------------------------------------


def scale_of(m: Any, largest: Any) -> Any:
    """The scale of values whose largest magnitude this is, fp32 of any shape."""
    bits = largest.view(m.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clip(1)  # 448 = 1.75 * 2^8
    made = (exponent << 23).view(m.float32)
    made = m.where(bits == 0, m.ones_like(made), made)
    return m.where(bits >= 0x7F800000, m.full_like(made, float("nan")), made)


def scales_of_rows(m: Any, x: Any) -> Any:
    """(T, width) fp32 -> (T, 1)."""
    return scale_of(m, abs(x).max(axis=1, keepdims=True)) if m is np else scale_of(m, x.abs().amax(1, True))


@cache
def kernel(entry: str, sources: Path | None = None) -> Kernel:
    """entry: a function of quantize.cu."""
    return Kernel("quantize.cu", entry, {"BLOCK": BLOCK}, sources=sources)


def _launch(entry: str, at: Addresses, grid: tuple[int, int], threads: int, *words: int) -> None:
    made = kernel(entry, build_of("quantize").sources)
    driver.launch(made.handle(at.device), grid, threads, 0, at.stream, words)


def launch_rows(x: Any, at: Addresses, out: Quantized) -> None:
    """x (T, width) bf16 -> values (T, width), scales (T,). Width: a multiple of 16."""
    count, width = x.shape
    if count:
        _launch("quantize_rows", at, (count, 1), THREADS, x.data_ptr(), *_at(out), width)


def launch_weights(weights: Any, at: Addresses, out: Quantized, transposed: Quantized) -> None:
    """weights (E, m, k) bf16 -> values (E, m, k), scales (E, m / 128, k / 128); and both with m and k exchanged, of what
    they hold the transposes. m, k: multiples of 16."""
    experts, m, k = weights.shape
    addresses = weights.data_ptr(), out.values.data_ptr(), transposed.values.data_ptr(), out.scales.data_ptr()
    grid = experts * blocks(m), blocks(k)
    _launch("quantize_weights", at, grid, 2 * THREADS, *addresses, transposed.scales.data_ptr(), m, k)


def launch_dequantize(rows: Quantized, at: Addresses, columns: range, out: Any) -> None:
    """rows (R, width), scales (width / 128, R) -> out (R, len(columns)) bf16. columns: whole blocks."""
    count, width = rows.values.shape
    if count and columns:
        values = rows.values.data_ptr() + columns.start
        scales = rows.scales.data_ptr() + 4 * columns.start // BLOCK * count
        grid = -(-count * len(columns) // (THREADS * PER_CHUNK)), 1
        _launch("dequantize_rows", at, grid, THREADS, values, scales, out.data_ptr(), count, width, len(columns))


def _at(of: Quantized) -> tuple[int, int]:
    return of.values.data_ptr(), of.scales.data_ptr()
