"""The PTX instructions that compute lane by lane, by families; the sections are those of the PTX ISA 9.0.

``operation(("mad", "lo", "s32"))`` says how the sources' bits are to be viewed, and computes 32 lanes of them at once.
"""

from collections.abc import Callable
from functools import cache
from operator import methodcaller
from typing import NamedTuple

import numpy as np

from blazeproto.lab.machine import floats
from blazeproto.lab.machine.floats import F16, F32, F64, MODES, Function, finished, odd_sum, rounded

BOOL, U16, U32 = np.dtype(np.bool_), np.dtype(np.uint16), np.dtype(np.uint32)


class Operation(NamedTuple):
    """sources: how each source's bits are viewed; 8-bit types stand in the low half of 16-bit words.

    result: of the result's bits. function: arrays (32,), or (1,) for what all lanes share, of ``sources`` to an array of
    ``result``, which may be a source itself. The caller holds ``np.errstate(all="ignore")``, once around a run.
    """

    sources: tuple[np.dtype, ...]
    result: np.dtype
    function: Function


class Bound(NamedTuple):
    """|result - exact| is at most the larger of ``relative`` * |exact| and ``absolute``."""

    relative: float
    absolute: float = 0.0


# What the ISA allows the hardware, in whose place stands the exact value, rounded. sin and cos: between -2 pi and 2 pi.
_BOUNDS = {
    "div.approx": Bound(2**-22),  # 9.7.3.8, 2 ulp, for a divisor of 2^-126 to 2^126
    "div.full": Bound(2**-22),  # 9.7.3.8, 2 ulp
    "rcp.approx": Bound(2**-23),  # 9.7.3.13, 1 ulp
    "sqrt.approx": Bound(2**-23),  # 9.7.3.15
    "rsqrt.approx": Bound(2**-22.9),  # 9.7.3.16
    "sin.approx": Bound(0, 2**-20.5),  # 9.7.3.18
    "cos.approx": Bound(0, 2**-20.5),  # 9.7.3.19
    "lg2.approx": Bound(2**-22, 2**-22),  # 9.7.3.20
    "ex2.approx": Bound(2**-22),  # 9.7.3.21, 2 ulp
    "tanh.approx": Bound(2**-11),  # 9.7.3.22
}
APPROXIMATE = {f"{name}{ftz}.f32": bound for name, bound in _BOUNDS.items() for ftz in ("", ".ftz")}
APPROXIMATE.pop("tanh.approx.ftz.f32")

_KINDS = {f"{letter}{bits}": np.dtype(f"{code}{bits // 8}") for letter, code in (("s", "i"), ("u", "u"), ("b", "u"))
          for bits in (16, 32, 64)}  # fmt: skip
_FLOATS = {"f16": F16, "f32": F32, "f64": F64}
_TYPES = _KINDS | _FLOATS | {"pred": BOOL}


# --- Integers and bits ----------------------------------------------------------------------------------------------------
# Shifts by the width or more give zeros, or signs, in NumPy as in PTX.


def _high_product(kind: np.dtype) -> Function:
    """mul.hi"""
    bits = 4 * kind.itemsize  # of half a word
    if bits < 32:
        wide = _wider(kind)
        return lambda a, b: (a.astype(wide) * b.astype(wide) >> 2 * bits).astype(kind)
    mask = (1 << bits) - 1
    unsigned = methodcaller("astype", np.uint64)

    def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """By halves, the upper ones signed where the words are: no sum overflows."""
        (a_high, b_high), (a_low, b_low) = (a >> bits, b >> bits), (a & mask, b & mask)
        middle = a_high * b_low + (unsigned(a_low) * unsigned(b_low) >> bits).astype(kind)
        return a_high * b_high + (middle >> bits) + ((middle & mask) + a_low * b_high >> bits)

    return high


def _wide_product(kind: np.dtype) -> Function:
    """mul.wide"""
    wide = _wider(kind)
    return lambda a, b: a.astype(wide) * b.astype(wide)


def _wider(kind: np.dtype) -> np.dtype:
    return _KINDS[f"{'s' if kind.kind == 'i' else 'u'}{16 * kind.itemsize}"]


def _with(product: Callable[[np.dtype], Function]) -> Callable[[np.dtype], Function]:
    """mad: the product and a summand."""

    def make(kind: np.dtype) -> Function:
        multiply = product(kind)
        return lambda a, b, c: multiply(a, b) + c

    return make


def _quotient(kind: np.dtype) -> Function:
    """div, towards zero. By zero, which PTX leaves open, all ones."""
    ones = np.array([-1]).astype(kind)

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = np.floor_divide(a - np.fmod(a, b), b)
        np.copyto(result, ones, where=b == 0)
        return result

    return divide


def _remainder(kind: np.dtype) -> Function:
    """rem, of the dividend's sign. By zero, which PTX leaves open, all ones."""
    ones = np.array([-1]).astype(kind)

    def remain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = np.fmod(a, b)
        np.copyto(result, ones, where=b == 0)
        return result

    return remain


def _bit_length(kind: np.dtype) -> Function:
    """How many bits a number takes; of a negative one, its complement. uint32"""
    word = np.dtype(f"u{kind.itemsize}")
    steps = [np.array([1 << n], word) for n in range(3 + kind.itemsize.bit_length() - 1)]

    def length(a: np.ndarray) -> np.ndarray:
        bits = (a ^ (a >> 8 * kind.itemsize - 1) if kind.kind == "i" else a).view(word)
        for step in steps:
            bits = bits | bits >> step
        return np.bitwise_count(bits).astype(np.uint32)

    return length


def _leading_zeros(kind: np.dtype) -> Function:
    length, width = _bit_length(kind), 8 * kind.itemsize
    return lambda a: width - length(a)


def _find(kind: np.dtype) -> Function:
    """bfind: where the highest bit is that is no sign; all ones where there is none."""
    length = _bit_length(kind)
    return lambda a: length(a) - 1


def _find_shift(kind: np.dtype) -> Function:
    """bfind.shiftamt: by how much that bit is to be shifted to the top."""
    length, width = _bit_length(kind), 8 * kind.itemsize
    return lambda a: np.where(found := length(a), width - found, np.uint32(0xFFFFFFFF))


def _reversed(kind: np.dtype) -> Function:
    """brev"""

    def reverse(a: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(np.ascontiguousarray(a[:, None]).view(np.uint8), axis=1, bitorder="little")
        return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(kind)[:, 0]

    return reverse


def _extract(kind: np.dtype) -> Function:
    """bfe: the field to the top, and down again, with zeros or its sign."""
    width = 8 * kind.itemsize

    def extract(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        rest = (width - np.minimum(length & 0xFF, width)).astype(kind)
        return a >> (position & 0xFF).astype(kind) << rest >> rest

    return extract


def _insert(kind: np.dtype) -> Function:
    """bfi: a's lowest bits into b."""
    one = np.ones(1, kind)

    def insert(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        at = (position & 0xFF).astype(kind)
        mask = (one << (length & 0xFF).astype(kind)) - one << at
        return b & ~mask | a << at & mask

    return insert


def _lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3: the table's bit 4a + 2b + c; the table is an immediate."""
    terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in range(8) if int(table[0]) >> n & 1]
    return np.bitwise_or.reduce(terms) if terms else np.zeros_like(a)


def _funnel(left: bool, wrap: bool) -> Function:
    """shf: a word of two, b above a, shifted."""

    def shift(a: np.ndarray, b: np.ndarray, amount: np.ndarray) -> np.ndarray:
        by = amount & 31 if wrap else np.minimum(amount, 32)
        return b << by | a >> 32 - by if left else b << 32 - by | a >> by

    return shift


_NIBBLES = np.array([[0, 4, 8, 12]], np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selection: np.ndarray) -> np.ndarray:
    """prmt: each byte one of eight, or the sign of one in all its bits."""
    chosen = selection[:, None] >> _NIBBLES & 15
    value = (a | b.astype(np.uint64) << 32)[:, None] >> ((chosen & 7) << 3) & 0xFF
    return np.where(chosen & 8, (value >> 7) * 0xFF, value).astype(np.uint8).view(np.uint32)[:, 0]


def _shift(compute: np.ufunc) -> Callable[[np.dtype], Function]:
    """shl and shr. Amounts have 32 bits: NumPy would widen 16-bit words to theirs."""

    def make(kind: np.dtype) -> Function:
        return compute if kind.itemsize > 2 else lambda a, by: compute(a, np.minimum(by, 16).astype(kind))

    return make


def _same(compute: Function) -> Callable[[np.dtype], Function]:
    """What NumPy computes alike for all types."""
    return lambda _: compute


class _Row(NamedTuple):
    letters: str  # of the types: s, u, b, f, p(red)
    operands: str  # result, then sources. t: the type; w: of twice its width; n: uint32; p: predicate; a: a shift's amount
    make: Callable[[np.dtype], Function]


_ROWS = {
    "add": _Row("su", "ttt", _same(np.add)),  # 9.7.1.1
    "sub": _Row("su", "ttt", _same(np.subtract)),  # 9.7.1.2
    "mul.lo": _Row("su", "ttt", _same(np.multiply)),  # 9.7.1.3
    "mul.hi": _Row("su", "ttt", _high_product),
    "mul.wide": _Row("su", "wtt", _wide_product),
    "mad.lo": _Row("su", "tttt", _with(_same(np.multiply))),  # 9.7.1.4
    "mad.hi": _Row("su", "tttt", _with(_high_product)),
    "mad.wide": _Row("su", "wttw", _with(_wide_product)),
    "sad": _Row("su", "tttt", _same(lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)))),  # 9.7.1.7
    "div": _Row("su", "ttt", _quotient),  # 9.7.1.8
    "rem": _Row("su", "ttt", _remainder),  # 9.7.1.9
    "abs": _Row("s", "tt", _same(np.abs)),  # 9.7.1.10
    "neg": _Row("s", "tt", _same(np.negative)),  # 9.7.1.11
    "min": _Row("su", "ttt", _same(np.minimum)),  # 9.7.1.12
    "max": _Row("su", "ttt", _same(np.maximum)),  # 9.7.1.13
    "popc": _Row("b", "nt", _same(lambda a: np.bitwise_count(a).astype(np.uint32))),  # 9.7.1.14
    "clz": _Row("b", "nt", _leading_zeros),  # 9.7.1.15
    "bfind": _Row("su", "nt", _find),  # 9.7.1.16
    "bfind.shiftamt": _Row("su", "nt", _find_shift),
    "brev": _Row("b", "tt", _reversed),  # 9.7.1.18
    "bfe": _Row("su", "ttnn", _extract),  # 9.7.1.19
    "bfi": _Row("b", "tttnn", _insert),  # 9.7.1.20
    "copysign": _Row("f", "ttt", _same(lambda a, b: np.copysign(b, a))),  # 9.7.3.2, of bits: a NaN keeps its payload
    "selp": _Row("subf", "tttp", _same(lambda a, b, p: np.where(p, a, b))),  # 9.7.6.3
    "and": _Row("bp", "ttt", _same(np.bitwise_and)),  # 9.7.8.1
    "or": _Row("bp", "ttt", _same(np.bitwise_or)),  # 9.7.8.2
    "xor": _Row("bp", "ttt", _same(np.bitwise_xor)),  # 9.7.8.3
    "not": _Row("bp", "tt", _same(np.invert)),  # 9.7.8.4
    "cnot": _Row("b", "tt", lambda kind: lambda a: (a == 0).astype(kind)),  # 9.7.8.5
    "lop3": _Row("b", "ttttn", _same(_lookup)),  # 9.7.8.6
    "shl": _Row("b", "tta", _shift(np.left_shift)),  # 9.7.8.8
    "shr": _Row("sub", "tta", _shift(np.right_shift)),  # 9.7.8.9
    "mov": _Row("subfp", "tt", _same(lambda a: a)),  # 9.7.9.3
    "prmt": _Row("b", "tttn", _same(_permute)),  # 9.7.9.7
}
_ROWS |= {  # 9.7.8.7
    f"shf.{side}.{how}": _Row("b", "tttn", _same(_funnel(side == "l", how == "wrap"))) for side in "lr" for how in ("wrap", "clamp")
}


def _row(words: tuple[str, ...]) -> Operation:
    row, kind = _ROWS[".".join(words[:-1])], _TYPES[words[-1]]
    named = {"t": kind, "n": U32, "p": BOOL, "a": kind if kind.itemsize == 4 else U32}
    if "w" in row.operands:
        named["w"] = _wider(kind)
    result, *sources = (named[letter] for letter in row.operands)
    return Operation(tuple(sources), result, row.make(kind))


# --- Comparisons: 9.7.6.2 -------------------------------------------------------------------------------------------------

_LESS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_INTEGER_COMPARISONS = _LESS | {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_FLOAT_COMPARISONS: dict[str, Function] = {
    **_LESS,  # false where one is NaN, but for ne in NumPy
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),  # these are true where one is NaN
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _comparison(words: tuple[str, ...]) -> Operation:
    """setp.comparison{.and, .or, .xor of a predicate}{.ftz}.type"""
    _, name, *modifiers, of = words
    kind = (_KINDS | _FLOATS)[of]
    compare = (_FLOAT_COMPARISONS if of in _FLOATS else _INTEGER_COMPARISONS)[name]
    if "ftz" in modifiers:
        modifiers.remove("ftz")
        return _combined(modifiers, kind, lambda a, b: compare(floats.flushed(a), floats.flushed(b)))
    return _combined(modifiers, kind, compare)


def _combined(modifiers: list[str], kind: np.dtype, compare: Function) -> Operation:
    if not modifiers:
        return Operation((kind, kind), BOOL, compare)
    (logic,) = (_LOGIC[word] for word in modifiers)
    return Operation((kind, kind, BOOL), BOOL, lambda a, b, p: logic(compare(a, b), p))


# --- Floating point -------------------------------------------------------------------------------------------------------

_Maker = Callable[[np.dtype, str], Function]
_FLOAT_ROWS: dict[str, tuple[int, tuple[str, ...], _Maker]] = {  # how many sources, of which types
    "add": (2, ("f16", "f32", "f64"), floats.adding),
    "sub": (2, ("f16", "f32", "f64"), floats.subtracting),
    "mul": (2, ("f16", "f32", "f64"), floats.multiplying),
    "fma": (3, ("f16", "f32"), floats.fusing),
    "mad": (3, ("f32",), floats.fusing),
    "div": (2, ("f32", "f64"), floats.dividing),
    "abs": (1, ("f16", "f32", "f64"), lambda *_: np.abs),  # 9.7.3.9: of a NaN some NaN, in hardware that of all results
    "neg": (1, ("f16", "f32", "f64"), lambda *_: np.negative),  # 9.7.3.10
    "min": (2, ("f16", "f32", "f64"), floats.choosing(np.fmin, np.bitwise_or)),
    "max": (2, ("f16", "f32", "f64"), floats.choosing(np.fmax, np.bitwise_and)),
    "min.NaN": (2, ("f16", "f32"), floats.choosing(np.minimum, np.bitwise_or)),
    "max.NaN": (2, ("f16", "f32"), floats.choosing(np.maximum, np.bitwise_and)),
    "rcp": (1, ("f32", "f64"), floats.inverting),
    "sqrt": (1, ("f32", "f64"), floats.rooting),
    "div.approx": (2, ("f32",), floats.approximating(floats.fast_quotient)),
    "div.full": (2, ("f32",), floats.approximating(np.divide)),
    "rcp.approx": (1, ("f32",), floats.approximating(np.reciprocal)),
    "sqrt.approx": (1, ("f32",), floats.approximating(np.sqrt)),
    "rsqrt.approx": (1, ("f32",), floats.approximating(lambda a: 1 / np.sqrt(a))),
    "sin.approx": (1, ("f32",), floats.approximating(np.sin)),
    "cos.approx": (1, ("f32",), floats.approximating(np.cos)),
    "lg2.approx": (1, ("f32",), floats.approximating(np.log2)),
    "ex2.approx": (1, ("f32",), floats.approximating(np.exp2)),
    "tanh.approx": (1, ("f32",), floats.approximating(np.tanh)),
}
_MODIFIERS = (*MODES, "ftz", "sat")


def _floating(words: tuple[str, ...]) -> Operation:
    count, types, make = _FLOAT_ROWS[".".join(word for word in words[:-1] if word not in _MODIFIERS)]
    kind, mode = _FLOATS[words[-1]], next((word for word in words if word in MODES), "rn")
    if words[-1] not in types or (kind == F64 and mode != "rn"):
        raise KeyError(words[-1])
    return Operation((kind,) * count, kind, finished(make(kind, mode), kind, "ftz" in words, "sat" in words))


# --- Conversions: 9.7.9.21 ------------------------------------------------------------------------------------------------

_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_BYTES = {"s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}
_HALVES: dict[tuple[str, str], tuple[tuple[np.dtype, ...], np.dtype, Callable[..., np.ndarray]]] = {
    ("bf16x2", "f32"): ((F32, F32), U32, floats.bf16_pair),  # the first source in the upper half
    ("f16x2", "f32"): ((F32, F32), U32, floats.f16_pair),
    ("bf16", "f32"): ((F32,), U16, floats.to_bf16),
}


def _conversion(words: tuple[str, ...]) -> Operation:
    """cvt{.rounding}{.ftz}{.sat}.to.from"""
    _, *modifiers, to, of = words
    mode = next((word for word in modifiers if word in MODES or word in _WHOLE), "")
    sat, ftz = "sat" in modifiers, "ftz" in modifiers
    if set(modifiers) - {mode, "sat", "ftz"}:
        raise KeyError(words)
    if (to, of) == ("f32", "bf16"):
        return Operation((U16,), F32, floats.from_bf16)
    if (halves := _HALVES.get((to, of))) and mode in ("rn", "rz"):
        sources, result, convert = halves
        return Operation(sources, result, lambda *values: convert(*values, mode))
    kinds = _BYTES | _KINDS | _FLOATS
    source, result = kinds[of], kinds[to]
    convert = _CONVERSIONS[source.kind == "f", result.kind == "f"](source, result, mode, sat)
    if ftz and source == F32:
        convert = _chain(floats.flushed, convert)
    if ftz and result == F32:
        convert = _chain(convert, floats.flushed)
    if of in _BYTES:  # they stand in words of 16 bits
        source, convert = np.dtype(f"{source.kind}2"), _chain(methodcaller("astype", source), convert)
    if to in _BYTES:
        result = np.dtype(f"{result.kind}2")
        convert = _chain(convert, methodcaller("astype", result))
    return Operation((source,), result, convert)


def _chain(first: Function, second: Function) -> Function:
    return lambda values: second(first(values))


def _between_integers(source: np.dtype, result: np.dtype, _: str, sat: bool) -> Function:
    """Cut off, or widened by the source's sign; .sat: the nearest number that there is."""
    ours, theirs = np.iinfo(source), np.iinfo(result)
    low, high = max(ours.min, theirs.min), min(ours.max, theirs.max)
    return (lambda a: np.clip(a, low, high).astype(result)) if sat else methodcaller("astype", result)


def _to_float(source: np.dtype, result: np.dtype, mode: str, _: bool) -> Function:
    if source.itemsize < 8 or (mode == "rn" and result != F16):
        exact = methodcaller("astype", F64)
        return methodcaller("astype", result) if mode == "rn" and result != F16 else lambda a: rounded(exact(a), result, mode)
    if result == F64:
        raise KeyError(mode)
    return lambda a: rounded(odd_sum((a >> 32).astype(F64) * 2**32, (a & 0xFFFFFFFF).astype(F64)), result, mode)


def _to_integer(source: np.dtype, result: np.dtype, mode: str, _: bool) -> Function:
    """What is out of range becomes the nearest number that there is; NaN 0, or the highest bit alone in 64 bits or of float64."""
    whole, bounds = _WHOLE[mode], np.iinfo(result)
    low, beyond = float(bounds.min), float(bounds.max + 1)
    nan = np.array([1 << bounds.bits - 1 if bounds.bits == 64 or source == F64 else 0], f"u{result.itemsize}").view(result)

    def convert(a: np.ndarray) -> np.ndarray:
        values = whole(a.astype(F64))
        integers = values.astype(result)
        np.copyto(integers, bounds.max, where=values >= beyond)
        np.copyto(integers, bounds.min, where=values < low)
        np.copyto(integers, nan, where=values != values)
        return integers

    return convert


def _between_floats(source: np.dtype, result: np.dtype, mode: str, sat: bool) -> Function:
    if mode in _WHOLE:
        convert: Function = _WHOLE[mode]
    elif result.itemsize < source.itemsize:
        convert = lambda a: rounded(a.astype(F64), result, mode)  # noqa: E731
    else:
        convert = methodcaller("astype", result)
    return finished(convert, result, sat=sat)


_CONVERSIONS = {  # whether the source is a float, whether the result is
    (False, False): _between_integers,
    (False, True): _to_float,
    (True, False): _to_integer,
    (True, True): _between_floats,
}


@cache
def operation(words: tuple[str, ...]) -> Operation | None:
    """What an opcode, split at its points, computes in each lane; None where it is none of these families."""
    try:
        if words[0] in ("setp", "cvt"):
            return _comparison(words) if words[0] == "setp" else _conversion(words)
        row = ".".join(words[:-1]) in _ROWS and words[-1][0] in _ROWS[".".join(words[:-1])].letters
        return _row(words) if row else _floating(words)
    except (KeyError, ValueError):  # a word that the tables lack, or too few or many of them
        return None
