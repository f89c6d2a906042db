"""Numbers in e4m3: values that share a scale are divided by it and rounded. The functions compute the same as
the kernels (cuda/quantized.cuh), on NumPy arrays or torch tensors (m: numpy or torch).

A token shares a scale, or 128 columns of a row or of a token, or 128 x 128 elements of a weight. If one value is Inf or NaN, the
scale is NaN, and so are all values that share it. Rounding is to nearest, ties to even; below 2^-6 of a scale e4m3 has steps of
2^-9. So a quantized weight's transpose is the transpose, quantized.

"power_of_two"  The scale is the least power of two, at least 2^-126, that leaves no magnitude above 448, e4m3's largest.
"float32"       The scale is a 448th of the largest magnitude, at least of 1e-10, in float32, as in vLLM. A weight's is at
                least a 448th of 1e-4. There magnitude and values are multiplied by reciprocals.
"""

from typing import Any, NamedTuple

import numpy as np

from blazeproto.runtime.rounding import E4M3, e4m3_bits

BLOCK = 128
LARGEST = 448.0
LEAST, LEAST_OF_WEIGHTS = 1e-10, 1e-4  # magnitudes of "float32" scales


class Quantized(NamedTuple):
    """values: e4m3.  scales: fp32."""

    values: Any
    scales: Any


def blocks(width: int) -> int:
    """The number of blocks of BLOCK elements, the last of which may be short."""
    return -(-width // BLOCK)


def scale_of(m: Any, largest: Any) -> Any:
    """The scale of values whose largest magnitude this is, fp32 of any shape."""
    bits = largest.view(m.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clip(1)  # 448 = 1.75 * 2^8
    return m.where(bits >= 0x7F800000, m.full_like(largest, float("nan")), (exponent << 23).view(m.float32))


def _sides(scale: str, width: int) -> tuple[int, int]:
    """How many rows and columns of a matrix share a scale."""
    return {"token": (1, width), "128x128": (BLOCK, BLOCK)}.get(scale, (1, BLOCK))


def scales_shape(scale: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of values of this shape.  scale: what shares one (`blazeproto.gemm.recipe.Operand`).

    "token": of (T, width) (T,).  "1x128": of (R, width) (width / 128, R).  "token 1x128": of (T, width) (T, width / 128).
    "128x128": of (E, m, k), or of (m, k), (E, m / 128, k / 128).
    """
    rows, columns = _sides(scale, values[-1])
    counts = (-(-values[-2] // rows), -(-values[-1] // columns))
    return {"token": counts[:1], "1x128": counts[::-1], "128x128": (*values[:-2], *counts)}.get(scale, counts)


def to_e4m3(m: Any, values: Any, scale: str, scale_values: str = "power_of_two") -> Quantized:
    """Numbers of any dtype, quantized. scale, scale_values: of an `Operand`. Shapes: `scales_shape`. NumPy, which has no e4m3,
    gets bits, uint8."""
    by_block = _by_block(m, values.astype(m.float32) if m is np else values.to(m.float32), scale)
    largest, of_weights = m.amax(abs(by_block), (-3, -1)), scale == "128x128"
    if floats := scale_values == "float32":
        # On a GPU torch would multiply by the reciprocal of a number, too, but it divides by a tensor.
        largest = largest.clip(LEAST_OF_WEIGHTS if of_weights else LEAST)
        scales = largest * np.float32(1 / LARGEST).item() if of_weights else largest / m.full_like(largest, LARGEST)
        scales = m.where(scales < float("inf"), scales, m.full_like(scales, float("nan")))
    else:
        scales = scale_of(m, largest)
    by = scales[..., :, None, :, None]
    made = _from_blocks(by_block * (1 / by) if floats and of_weights else by_block / by, values.shape)
    made = e4m3_bits(made) if m is np else made.to(m.float8_e4m3fn)
    if scale in ("token", "1x128"):
        scales = scales.T.reshape(scales_shape(scale, values.shape))
    return Quantized(made, np.ascontiguousarray(scales) if m is np else scales.contiguous())


def from_e4m3(m: Any, of: Quantized, scale: str) -> Any:
    """The numbers, fp32."""
    by_block = _by_block(m, E4M3[of.values] if m is np else of.values.to(m.float32), scale)
    columns_of_rows = (by_block.shape[-2], by_block.shape[-4])
    scales = of.scales.reshape(columns_of_rows).T if scale in ("token", "1x128") else of.scales
    return _from_blocks(by_block * scales[..., :, None, :, None], of.values.shape)


def in_e4m3(m: Any, values: Any, scale: str, scale_values: str = "power_of_two") -> Any:
    """The numbers that quantizing makes of these, fp32."""
    return from_e4m3(m, to_e4m3(m, values, scale, scale_values), scale)


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
