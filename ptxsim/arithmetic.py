"""The PTX instructions that compute lane by lane, by families; sections are numbered as in the PTX ISA 9.0.

``operation(("mad", "lo", "s32"))`` says how the sources' bits are to be viewed, and computes 32 lanes of them at once.
"""

from collections.abc import Callable
from functools import cache, partial
from operator import methodcaller
from typing import NamedTuple

import numpy as np

from ptxsim import floats
from ptxsim.floats import (
    F16,
    F32,
    F64,
    MODES,
    Function,
    Maker,
    approximating,
    choose,
    finished,
    odd_sum,
    rounded,
    rounding,
)
from ptxsim.integers import FAMILIES, INTEGERS, Family, same, wider

BOOL, U16, U32 = map(np.dtype, ("?", "u2", "u4"))


class Operation(NamedTuple):
    """sources: how each source's bits are viewed; 8-bit types stand in the low half of 16-bit words.

    result: of the result's bits. function: arrays (32,), or (1,) for what all lanes share, of ``sources`` to an array of
    ``result``, which may be a source itself. The caller holds ``np.errstate(all="ignore")``, once around a run.
    """

    sources: tuple[np.dtype, ...]
    result: np.dtype
    function: Function


_FLOATS: dict[str, np.dtype] = {"f16": F16, "f32": F32, "f64": F64}
_NUMBERS = INTEGERS | _FLOATS


# --- Integers, bits and moves ---------------------------------------------------------------------------------------------


def _of_family(family: Family, of: str) -> Operation:
    kind = (_NUMBERS | {"pred": BOOL})[of]
    named = {"t": kind, "n": U32, "p": BOOL, "a": kind if kind.itemsize == 4 else U32}
    if "w" in family.operands:
        named["w"] = wider(kind)
    result, *sources = (named[letter] for letter in family.operands)
    return Operation(tuple(sources), result, family.make(kind))


# --- Comparisons: 9.7.6.2 -------------------------------------------------------------------------------------------------

_LESS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
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
    kind, ftz = _NUMBERS[of], "ftz" in modifiers
    plain = (_FLOAT_COMPARISONS if of in _FLOATS else _INTEGER_COMPARISONS)[name]
    compare = (lambda a, b: plain(floats.flushed(a), floats.flushed(b))) if ftz else plain
    combining = [_LOGIC[word] for word in modifiers if word != "ftz"]
    if not combining:
        return Operation((kind, kind), BOOL, compare)
    (combine,) = combining
    return Operation((kind, kind, BOOL), BOOL, lambda a, b, p: combine(compare(a, b), p))


# --- Floating point -------------------------------------------------------------------------------------------------------

_ALL = ("f16", "f32", "f64")
_FLOAT_FAMILIES: dict[str, tuple[int, tuple[str, ...], Maker]] = {  # how many sources, of which types
    "add": (2, _ALL, rounding(odd_sum, np.add)),  # 9.7.3.3
    "sub": (2, _ALL, rounding(lambda a, b, mode: odd_sum(a, -b, mode), np.subtract)),  # 9.7.3.4
    "mul": (2, _ALL, rounding(lambda a, b, _: a * b, np.multiply)),  # 9.7.3.5
    "fma": (3, ("f16", "f32"), rounding(lambda a, b, c, mode: odd_sum(a * b, c, mode))),  # 9.7.3.6
    "mad": (3, ("f32",), rounding(lambda a, b, c, mode: odd_sum(a * b, c, mode))),  # 9.7.3.7
    "div": (2, ("f32", "f64"), rounding(lambda a, b, _: a / b)),  # 9.7.3.8
    "abs": (1, _ALL, same(np.abs)),  # 9.7.3.9: of a NaN some NaN, in hardware that of all results
    "neg": (1, _ALL, same(np.negative)),  # 9.7.3.10
    "min": (2, _ALL, same(partial(choose, np.fmin, np.bitwise_or))),  # 9.7.3.11
    "max": (2, _ALL, same(partial(choose, np.fmax, np.bitwise_and))),  # 9.7.3.12
    "min.NaN": (2, ("f16", "f32"), same(partial(choose, np.minimum, np.bitwise_or))),
    "max.NaN": (2, ("f16", "f32"), same(partial(choose, np.maximum, np.bitwise_and))),
    "rcp": (1, ("f32", "f64"), rounding(lambda a, _: 1 / a)),  # 9.7.3.13
    "sqrt": (1, ("f32", "f64"), rounding(lambda a, _: np.sqrt(a))),  # 9.7.3.15
    "div.approx": (2, ("f32",), approximating(floats.fast_quotient)),
    "div.full": (2, ("f32",), approximating(np.divide)),
    "rcp.approx": (1, ("f32",), approximating(np.reciprocal)),
    "sqrt.approx": (1, ("f32",), approximating(np.sqrt)),
    "rsqrt.approx": (1, ("f32",), approximating(lambda a: 1 / np.sqrt(a))),  # 9.7.3.16
    "sin.approx": (1, ("f32",), approximating(np.sin)),
    "cos.approx": (1, ("f32",), approximating(np.cos)),
    "lg2.approx": (1, ("f32",), approximating(np.log2)),
    "ex2.approx": (1, ("f32",), approximating(np.exp2)),
    "tanh.approx": (1, ("f32",), approximating(np.tanh)),
}
_MODIFIERS = (*MODES, "ftz", "sat")


def _floating(words: tuple[str, ...]) -> Operation:
    count, types, make = _FLOAT_FAMILIES[".".join(word for word in words[:-1] if word not in _MODIFIERS)]
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
    ("f32", "bf16"): ((U16,), F32, floats.from_bf16),
    ("e4m3x2", "f32"): ((F32, F32), U16, floats.e4m3_pair),
    ("f16x2", "e4m3x2"): ((U16,), U32, floats.from_e4m3_pair),
}


def _conversion(words: tuple[str, ...]) -> Operation:
    """cvt{.rounding}{.ftz}{.sat}.to.from"""
    _, *modifiers, to, of = words
    mode = next((word for word in modifiers if word in MODES or word in _WHOLE), "")
    sat, ftz = "sat" in modifiers, "ftz" in modifiers
    if to == "e4m3x2" and modifiers != ["rn", "satfinite"]:
        raise KeyError(words)
    modifiers = [word for word in modifiers if word != "satfinite" or to != "e4m3x2"]
    if set(modifiers) - {mode, "sat", "ftz"}:
        raise KeyError(words)
    if (halves := _HALVES.get((to, of))) and (mode in ("rn", "rz") or of == "bf16"):
        sources, result, convert = halves
        return Operation(sources, result, lambda *values: convert(*values, mode))
    kinds = _BYTES | _NUMBERS
    source, result = kinds[of], kinds[to]
    convert = _CONVERSIONS[source.kind == "f", result.kind == "f"](source, result, mode, sat)
    if ftz and source == F32:
        convert = _chain(floats.flushed, convert)
    if ftz and result == F32:
        convert = _chain(convert, floats.flushed)
    if of in _BYTES:  # they stand in words of 16 bits
        source, convert = INTEGERS[f"{of[0]}16"], _chain(methodcaller("astype", source), convert)
    if to in _BYTES:
        result = INTEGERS[f"{to[0]}16"]
        convert = _chain(convert, methodcaller("astype", result))
    return Operation((source,), result, convert)


def _chain(first: Function, second: Function) -> Function:
    return lambda values: second(first(values))


def _between_integers(source: np.dtype, result: np.dtype, _: str, sat: bool) -> Function:
    """Cut off, or widened by the source's sign; .sat: the nearest number of that type."""
    ours, theirs = np.iinfo(source), np.iinfo(result)
    low, high = max(ours.min, theirs.min), min(ours.max, theirs.max)
    return (lambda a: np.clip(a, low, high).astype(result)) if sat else methodcaller("astype", result)


def _to_float(source: np.dtype, result: np.dtype, mode: str, _: bool) -> Function:
    if mode not in MODES or (source.itemsize == 8 and result == F64 and mode != "rn"):
        raise KeyError(mode)
    if source.itemsize < 8 or result == F64:
        return lambda a: rounded(a.astype(F64), result, mode)
    return lambda a: rounded(odd_sum((a >> 32).astype(F64) * 2**32, (a & 0xFFFFFFFF).astype(F64)), result, mode)


def _to_integer(source: np.dtype, result: np.dtype, mode: str, _: bool) -> Function:
    """A value out of range becomes the nearest number of the type; NaN 0, or the highest bit alone in 64 bits or of float64."""
    whole, bounds = _WHOLE[mode], np.iinfo(result)
    low, beyond = float(bounds.min), float(bounds.max + 1)
    highest = np.array(1 << bounds.bits - 1, f"u{result.itemsize}").view(result)
    nan = highest if bounds.bits == 64 or source == F64 else 0

    def convert(a: np.ndarray) -> np.ndarray:
        values = whole(a.astype(F64))
        integers = values.astype(result)
        np.copyto(integers, bounds.max, where=values >= beyond)
        np.copyto(integers, bounds.min, where=values < low)
        np.copyto(integers, nan, where=values != values)
        return integers

    return convert


def _between_floats(source: np.dtype, result: np.dtype, mode: str, sat: bool) -> Function:
    if mode in _WHOLE and source == result:
        return finished(_WHOLE[mode], result, sat=sat)
    if (mode in MODES) != (result.itemsize < source.itemsize):
        raise KeyError(mode)
    return finished(lambda a: rounded(a.astype(F64), result, mode) if mode else a.astype(result), result, sat=sat)


_CONVERSIONS = {  # whether the source is a float, whether the result is
    (False, False): _between_integers,
    (False, True): _to_float,
    (True, False): _to_integer,
    (True, True): _between_floats,
}


def _larger_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.u16x2"""
    return np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16


def _bf16_pair_fma(*pairs: np.ndarray) -> np.ndarray:
    """fma.rn.bf16x2: each half rounded once, subnormals kept. 9.7.4.4"""

    def of(shift: int) -> np.ndarray:
        a, b, c = ((((pair >> shift) & 0xFFFF) << 16).view(F32).astype(F64) for pair in pairs)
        total = odd_sum(a * b, c, "rn")
        cut = rounded(total, F32, "rz")
        cut.view(U32)[...] |= cut != total  # what is cut shows in the last bit
        return floats.bf16_above(cut, "rn") >> 16

    return of(16) << 16 | of(0)


@cache
def operation(words: tuple[str, ...]) -> Operation | None:
    """The function that an opcode, split at its points, computes in each lane; None outside these families."""
    try:
        if words == ("max", "u16x2"):  # 9.7.1.13
            return Operation((U32, U32), U32, _larger_halves)
        if words == ("fma", "rn", "bf16x2"):
            return Operation((U32, U32, U32), U32, _bf16_pair_fma)
        if words[0] in ("setp", "cvt"):
            return _comparison(words) if words[0] == "setp" else _conversion(words)
        family = FAMILIES.get(".".join(words[:-1]))
        return _of_family(family, words[-1]) if family and words[-1][0] in family.letters else _floating(words)
    except (KeyError, ValueError):  # a word that the tables lack, or too few or many of them
        return None
