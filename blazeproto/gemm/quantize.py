"""To fp8 (e4m3) and back (cuda/quantize.cu): values that share a scale, a power of two, are divided by it and rounded.

What shares a scale: a token; 128 columns of a row; 128 x 128 elements of a weight. Its scale is the least power of two, at least
2^-126, that leaves no magnitude above 448, e4m3's largest. Where one is Inf or NaN the scale is NaN, and so
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
from blazeproto.runtime.rounding import E4M3, e4m3_bits

BLOCK = 128
LARGEST = 448.0
THREADS = 128  # of a block that quantizes rows


class Quantized(NamedTuple):
    """values: e4m3.  scales: fp32."""

    values: Any
    scales: Any


def blocks(width: int) -> int:
    """How many of BLOCK elements there are, the last of which may be short."""
    return -(-width // BLOCK)


# --- What the kernels compute, of NumPy arrays or torch tensors (m: numpy or torch) ---------------------------------------------


def scale_of(m: Any, largest: Any) -> Any:
    """The scale of values whose largest magnitude this is, fp32 of any shape."""
    bits = largest.view(m.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clip(1)  # 448 = 1.75 * 2^8
    return m.where(bits >= 0x7F800000, m.full_like(largest, float("nan")), (exponent << 23).view(m.float32))


def _e4m3(m: Any, values: Any) -> Any:
    """NumPy, which has no such type, gets bits, uint8."""
    return e4m3_bits(values) if m is np else values.to(m.float8_e4m3fn)


def _fp32(m: Any, values: Any) -> Any:
    return E4M3[values] if m is np else values.to(m.float32)


def _float32(m: Any, values: Any) -> Any:
    return values.astype(m.float32) if m is np else values.to(m.float32)


def _sides(scale: str, width: int) -> tuple[int, int]:
    """How many rows and columns of a matrix share a scale."""
    return {"token": (1, width), "1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}[scale]


def scales_shape(scale: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of values of this shape.  scale: what shares one (`blazeproto.gemm.recipe.Operand`).

    "token": of (T, width) (T,).  "1x128": of (R, width) (width / 128, R).  "128x128": of (E, m, k), or of (m, k),
    (E, m / 128, k / 128).
    """
    rows, columns = _sides(scale, values[-1])
    counts = (-(-values[-2] // rows), -(-values[-1] // columns))
    return {"token": counts[:1], "1x128": counts[::-1], "128x128": (*values[:-2], *counts)}[scale]


def to_e4m3(m: Any, values: Any, scale: str) -> Quantized:
    """Numbers of any dtype, quantized. Shapes: `scales_shape`."""
    by_block = _by_block(m, _float32(m, values), scale)
    scales = scale_of(m, m.amax(abs(by_block), (-3, -1)))
    made = _e4m3(m, _from_blocks(by_block / scales[..., :, None, :, None], values.shape))
    return Quantized(made, scales if scale == "128x128" else scales.T.reshape(scales_shape(scale, values.shape)))


def from_e4m3(m: Any, of: Quantized, scale: str) -> Any:
    """The numbers, fp32."""
    by_block = _by_block(m, _fp32(m, of.values), scale)
    columns_of_rows = (by_block.shape[-2], by_block.shape[-4])
    scales = of.scales if scale == "128x128" else of.scales.reshape(columns_of_rows).T
    return _from_blocks(by_block * scales[..., :, None, :, None], of.values.shape)


def _by_block(m: Any, values: Any, scale: str) -> Any:
    """(..., rows, a, columns, b), a x b share a scale; the last are filled up with zeros."""
    sides = _sides(scale, values.shape[-1])
    for dim, side in zip((-2, -1), sides, strict=True):
        shape = list(values.shape)
        shape[dim] = -shape[dim] % side
        if shape[dim]:
            zeros = m.zeros_like(values[:1], shape=shape) if m is np else values.new_zeros(shape)
            values = m.concatenate((values, zeros), dim)
    *experts, rows, columns = values.shape
    return values.reshape(*experts, rows // sides[0], sides[0], columns // sides[1], sides[1])


def _from_blocks(by_block: Any, shape: Any) -> Any:
    *experts, rows, a, columns, b = by_block.shape
    return by_block.reshape(*experts, rows * a, columns * b)[..., : shape[-2], : shape[-1]]


# --- Launches ------------------------------------------------------------------------------------------------------------------


@cache
def kernel(entry: str, sources: Path | None = None) -> Kernel:
    """entry: a function of quantize.cu."""
    return Kernel("quantize.cu", entry, {"BLOCK": BLOCK}, sources=sources)


def kernels() -> list[Kernel]:
    """All of them."""
    return list(map(kernel, ("quantize_rows", "quantize_weights", "block_offsets", "transpose_rows")))


class OnStream(NamedTuple):
    """Where a launch that needs no dispatch goes: a CUDA ordinal, a raw cudaStream_t."""

    device: int
    stream: int


def _launch(entry: str, at: Addresses | OnStream, grid: tuple[int, int], threads: int, *words: int) -> None:
    made = kernel(entry, build_of("quantize").sources)
    driver.launch(made.handle(at.device), grid, threads, 0, at.stream, words)


def launch_rows(x: Any, at: Addresses, out: Quantized) -> None:
    """x (T, width) bf16 -> values (T, width), scales (T,). Width: a multiple of 16."""
    count, width = x.shape
    if count:
        _launch("quantize_rows", at, (count, 1), THREADS, x.data_ptr(), *_at(out), width)


def launch_weights(weights: Any, at: Addresses | OnStream, out: Quantized | None, transposed: Quantized | None) -> None:
    """weights (E, m, k) bf16 -> values (E, m, k), scales (E, m / 128, k / 128); of the transpose with m and k exchanged. None:
    that order is not wanted. m, k: multiples of 16."""
    experts, m, k = weights.shape
    to = [(0, 0) if order is None else _at(order) for order in (out, transposed)]
    _launch(
        "quantize_weights", at, (experts * blocks(m), blocks(k)), 2 * THREADS, weights.data_ptr(), *to[0], *to[1], m, k
    )


def most_blocks(num_rows: int, experts: int) -> int:
    """How many blocks of 128 rows experts may have together, the last one of each being short."""
    return num_rows // BLOCK + min(num_rows, experts)


def launch_block_offsets(at: Addresses, out: Any) -> None:
    """-> out (E + 1,) int32: how many blocks of 128 rows come before each expert's, and in all."""
    _launch("block_offsets", at, (1, 1), 32, at.expert_token_offsets, out.data_ptr(), at.num_experts)


def launch_transpose(
    rows: Quantized, at: Addresses, blocks_before: Any, columns: range, out: Quantized, *, gather: bool
) -> None:
    """rows (R, width), scales (width / 128, R), or with ``gather`` tokens (T, width), scales (T,) -> some columns' transpose
    (len(columns), 128 B), scales (len(columns) / 128, B), B being `most_blocks`. An expert's rows are filled up to whole blocks
    of 128 with zeros; 128 x 128 share a scale, the largest of their rows'. blocks_before: of `launch_block_offsets`."""
    width, count, made = rows.values.shape[1], blocks(len(columns)), most_blocks(at.num_rows, at.num_experts)
    pairs_at, tokens_at, division = at.pair_to_token
    if made and count:
        values, scales = rows.values.data_ptr() + columns.start, rows.scales.data_ptr()
        scales += 0 if gather else 4 * columns.start // BLOCK * at.num_rows
        lists = (pairs_at if gather else 0, tokens_at, division, at.expert_token_offsets, blocks_before.data_ptr())
        numbers = (at.num_experts, at.num_rows, width, len(columns), made)
        _launch("transpose_rows", at, (made, count), 2 * THREADS, values, scales, *lists, *_at(out), *numbers)


def _at(of: Quantized) -> tuple[int, int]:
    return of.values.data_ptr(), of.scales.data_ptr()
