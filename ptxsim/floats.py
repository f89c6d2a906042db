"""Floating point as PTX rounds it (PTX ISA 9.7.3): to nearest, to zero, down, up; subnormals; NaN. Arrays of lanes throughout.

Operations that NumPy lacks are made of float64: products of two float32 are exact there, and a sum that isn't ends in an odd bit,
so that rounding it again gives what one rounding would. Callers hold ``np.errstate(all="ignore")``.
"""

from collections.abc import Callable

import numpy as np

Function = Callable[..., np.ndarray]
F16, F32, F64 = map(np.dtype, ("f2", "f4", "f8"))
MODES = ("rn", "rz", "rm", "rp")  # to nearest even, to zero, down, up
KINDS = (F16, F32, F64)
# Constants are arrays without axes: NumPy takes three times as long for Python's numbers.
NAN = {
    F16: np.array(0x7FFF, np.uint16).view(F16),
    F32: np.array(0x7FFFFFFF, np.uint32).view(F32),
}  # float64's: as NumPy has it
ZERO, ONE, DOWN, UP = ({kind: np.array(value, kind) for kind in KINDS} for value in (0, 1, -np.inf, np.inf))
TINY = {kind: np.array(np.finfo(kind).tiny) for kind in KINDS}  # the least number that is not subnormal
LAST_BIT, BELOW_HALF, UPPER, SIXTEEN = (np.array(word, np.uint32) for word in (1, 0x7FFF, 0xFFFF0000, 16))


def rounded(values: np.ndarray, kind: np.dtype, mode: str) -> np.ndarray:
    """float64 to ``kind``, once. Overflow gives infinity or the largest number, as the mode says."""
    result = values.astype(kind)
    if mode == "rz":
        np.copyto(result, np.nextafter(result, ZERO[kind]), where=np.abs(result) > np.abs(values))
    elif mode == "rm":
        np.copyto(result, np.nextafter(result, DOWN[kind]), where=result > values)
    elif mode == "rp":
        np.copyto(result, np.nextafter(result, UP[kind]), where=result < values)
    return result


def odd_sum(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a + b in float64, its last bit odd where it is not exact: rounded to half as many bits it is a + b rounded once.

    From S. Boldo, G. Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd",
    IEEE Transactions on Computers 57(4), 2008. A sum of zero is negative under rm unless both are +0, as IEEE 754 has it.
    """
    total = a + b
    second = total - a
    error = (a - (total - second)) + (b - second)  # Knuth's TwoSum: a + b = total + error
    if error.dot(error):  # no error of float32's products is so small that its square is zero
        side = error * total  # NaN where the sum is infinite
        beyond, bits = side < ZERO[F64], total.view(np.int64)
        bits -= beyond  # towards zero; then the bits that were cut show in the last one
        bits |= beyond | (side > ZERO[F64])
    if mode == "rm" and not total.all():
        np.copyto(total, -0.0, where=(total == ZERO[F64]) & (np.signbit(a) | np.signbit(b)))
    return total


def flushed(values: np.ndarray) -> np.ndarray:
    """.ftz: zeros, of the same sign, for what is subnormal."""
    return values * (np.abs(values) >= TINY[values.dtype])


def saturated(values: np.ndarray) -> np.ndarray:
    """.sat: within [+0, 1]; NaN gives +0."""
    zero = ZERO[values.dtype]
    return np.where(values > zero, np.minimum(values, ONE[values.dtype]), zero)


def finished(compute: Function, kind: np.dtype, ftz: bool = False, sat: bool = False) -> Function:
    """``compute`` with the NaN that the GPU gives, and with .ftz and .sat. Its result must be an array of its own."""

    def with_nan(*sources: np.ndarray) -> np.ndarray:
        result = compute(*sources)
        total = result.dot(result)  # the fastest way to see that there is a NaN
        if total != total:
            np.copyto(result, NAN[kind], where=result != result)
        return result

    inner = (lambda *sources: saturated(compute(*sources))) if sat else with_nan if kind in NAN else compute
    return (lambda *sources: flushed(inner(*map(flushed, sources)))) if ftz else inner


# --- The instructions -----------------------------------------------------------------------------------------------------
# Each takes the type and the rounding, and returns what computes. float64 comes with rn alone.

Maker = Callable[[np.dtype, str], Function]


def rounding(exact: Function, nearest: Function | None = None) -> Maker:
    """``exact``, of float64 sources and the mode, rounded once.  nearest: what NumPy has for rn.

    A float64 quotient or root of float32 is never so near to a float32, or to the middle of two, that rounding it again errs.
    """

    def make(kind: np.dtype, mode: str) -> Function:
        if nearest and mode == "rn":
            return nearest
        return lambda *sources: rounded(exact(*[source.astype(F64) for source in sources], mode), kind, mode)

    return make


def choose(number: np.ufunc, of_equals: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min and max. ``number`` is what NumPy has, for which zeros are equal; -0 is less than +0."""
    result, equal = number(a, b), a == b
    if equal.dot(equal):  # whether any is
        word = np.dtype(f"u{a.itemsize}")
        np.copyto(result, of_equals(a.view(word), b.view(word)).view(a.dtype), where=equal)
    return result


def approximating(compute: Function) -> Maker:
    """The float64 function, rounded: within what the ISA allows the hardware."""
    return lambda kind, _: lambda *sources: compute(*(source.astype(F64) for source in sources)).astype(kind)


def fast_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx (9.7.3.8): a * (1/b), where 1/b is flushed, so that it is 0 for 2^126 < |b|, and NaN where a is infinite."""
    inverse = ONE[F64] / b
    return a * (inverse * (np.abs(inverse) >= TINY[F32]))


# --- bfloat16 -------------------------------------------------------------------------------------------------------------


def from_bf16(bits: np.ndarray, _: str) -> np.ndarray:
    """uint16 to float32, exact in every mode."""
    return (bits.astype(np.uint32) << SIXTEEN).view(F32)


def bf16_above(values: np.ndarray, mode: str) -> np.ndarray:
    """float32 rounded to bfloat16, in the upper half of a uint32 whose lower half is anything; NaN is 0x7fff. mode: rn or rz."""
    bits = values.view(np.uint32)
    result = bits + (((bits >> SIXTEEN) & LAST_BIT) + BELOW_HALF) if mode == "rn" else bits.copy()
    total = values.dot(values)
    if total != total:
        np.copyto(result, NAN[F32].view(np.uint32), where=values != values)
    return result


def to_bf16(values: np.ndarray, mode: str) -> np.ndarray:
    """float32 to uint16."""
    return (bf16_above(values, mode) >> SIXTEEN).astype(np.uint16)


def bf16_pair(upper: np.ndarray, lower: np.ndarray, mode: str) -> np.ndarray:
    """Two float32 to a uint32."""
    return bf16_above(upper, mode) & UPPER | bf16_above(lower, mode) >> SIXTEEN


def f16_pair(upper: np.ndarray, lower: np.ndarray, mode: str) -> np.ndarray:
    """Two float32 to a uint32."""
    halves = [with_f16_nan(rounded(half.astype(F64), F16, mode)).view(np.uint16) for half in (upper, lower)]
    return halves[0].astype(np.uint32) << SIXTEEN | halves[1]


# --- fp8: e4m3 ------------------------------------------------------------------------------------------------------------

_EXPONENT, _MANTISSA = np.arange(128) >> 3, np.arange(128) & 7
_MAGNITUDES = np.where(_EXPONENT == 0, _MANTISSA * 2.0**-9, (8 + _MANTISSA) * 2.0 ** (_EXPONENT - 10.0))
_MAGNITUDES[127] = np.nan  # no infinity: the largest number is 448
E4M3 = np.concatenate((_MAGNITUDES, -_MAGNITUDES)).astype(np.float32)
"""The number, fp32, that each e4m3, a byte, is: a sign, four bits of exponent, three of mantissa."""


def e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Bits, uint8, of the e4m3 numbers nearest to values, fp32 of any shape, .satfinite; a NaN is 0x7F."""
    magnitudes = np.abs(values.astype(F64))
    step = np.exp2(np.maximum(np.frexp(magnitudes)[1] - 1, -6) - 3)
    nearest = np.minimum(np.rint(magnitudes / step) * step, E4M3[126])
    bits = np.searchsorted(E4M3[:127], nearest) | np.signbit(values) << 7
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)


def e4m3_pair(upper: np.ndarray, lower: np.ndarray, _: str) -> np.ndarray:
    """Two float32 to a uint16, .satfinite."""
    return e4m3_bits(upper).astype(np.uint16) << np.uint16(8) | e4m3_bits(lower)


def from_e4m3_pair(pair: np.ndarray, _: str) -> np.ndarray:
    """A uint16 to two float16 in a uint32, exact."""
    halves = [with_f16_nan(E4M3[byte].astype(F16)).view(np.uint16) for byte in (pair >> 8, pair & 0xFF)]
    return halves[0].astype(np.uint32) << SIXTEEN | halves[1]


with_f16_nan = finished(np.positive, F16)
