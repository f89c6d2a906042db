"""Integers and bits, lane by lane: what computes each instruction of PTX ISA 9.7.1 and 9.7.8, made for a type.

Shifts by the width or more give zeros, or signs, in NumPy as in PTX. Callers hold ``np.errstate(all="ignore")``.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ptxsim.floats import Function

INTEGERS: dict[str, np.dtype] = {
    f"{letter}{bits}": np.dtype(f"{code}{bits // 8}")
    for letter, code in (("s", "i"), ("u", "u"), ("b", "u"))
    for bits in (16, 32, 64)
}


def _high_product(kind: np.dtype) -> Function:
    """mul.hi; of 64 bits with Python's integers, as no word is wider."""
    wide, bits = np.dtype(object) if kind.itemsize == 8 else wider(kind), 8 * kind.itemsize
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> bits).astype(kind)


def _wide_product(kind: np.dtype) -> Function:
    """mul.wide"""
    wide = wider(kind)
    return lambda a, b: a.astype(wide) * b.astype(wide)


def wider(kind: np.dtype) -> np.dtype:
    """The integer of twice the width; KeyError for the widest."""
    return INTEGERS[f"{'s' if kind.kind == 'i' else 'u'}{16 * kind.itemsize}"]


def _with(product: Callable[[np.dtype], Function]) -> Callable[[np.dtype], Function]:
    """mad: the product and a summand."""

    def make(kind: np.dtype) -> Function:
        multiply = product(kind)
        return lambda a, b, c: multiply(a, b) + c

    return make


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div, towards zero. By zero, which PTX leaves open, all ones."""
    return np.where(b == 0, ~np.zeros_like(a), np.floor_divide(a - np.fmod(a, b), b))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """rem, of the dividend's sign. By zero, which PTX leaves open, all ones."""
    return np.where(b == 0, ~np.zeros_like(a), np.fmod(a, b))


_LENGTHS = np.frompyfunc(int.bit_length, 1, 1)


def _of_length(compute: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[np.dtype], Function]:
    """clz and bfind. length: how many bits a number takes, of a negative one its complement. width: of the word."""

    def make(kind: np.dtype) -> Function:
        width = 8 * kind.itemsize
        return lambda a: compute(_LENGTHS(np.where(a < 0, ~a, a)).astype(np.uint32), width)

    return make


def _to_the_top(length: np.ndarray, width: int) -> np.ndarray:
    """bfind.shiftamt: by how much the highest bit is to be shifted; all ones where there is none."""
    return np.where(length, width - length, np.uint32(0xFFFFFFFF))


def _reversed(a: np.ndarray) -> np.ndarray:
    """brev"""
    bits = np.unpackbits(np.ascontiguousarray(a[:, None]).view(np.uint8), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


def _extract(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: the field to the top, and down again, with zeros or its sign."""
    width = 8 * a.itemsize
    rest = (width - np.minimum(length & 0xFF, width)).astype(a.dtype)
    return a >> (position & 0xFF).astype(a.dtype) << rest >> rest


def _insert(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfi: a's lowest bits into b."""
    at, one = (position & 0xFF).astype(a.dtype), np.ones(1, a.dtype)
    mask = (one << (length & 0xFF).astype(a.dtype)) - one << at
    return b & ~mask | a << at & mask


def _lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3: the table's bit 4a + 2b + c; the table is an immediate."""
    result = a & ~a
    for n in range(8):
        if int(table[0]) >> n & 1:
            result = result | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result


def _funnel(left: bool, wrap: bool, a: np.ndarray, b: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """shf: a word of two, b above a, shifted."""
    by = amount & 31 if wrap else np.minimum(amount, 32)
    return b << by | a >> 32 - by if left else b << 32 - by | a >> by


_NIBBLES = np.array([[0, 4, 8, 12]], np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selection: np.ndarray) -> np.ndarray:
    """prmt: each byte one of eight, or the sign of one in all its bits."""
    chosen = selection[:, None] >> _NIBBLES & 15
    value = (a | b.astype(np.uint64) << 32)[:, None] >> ((chosen & 7) << 3) & 0xFF
    return np.where(chosen & 8, (value >> 7) * 0xFF, value).astype(np.uint8).view(np.uint32)[:, 0]


def _select(a: np.ndarray, b: np.ndarray, first: np.ndarray) -> np.ndarray:
    """selp"""
    return np.where(first, a, b)


def _shift(compute: np.ufunc) -> Callable[[np.dtype], Function]:
    """shl and shr. Amounts have 32 bits: NumPy would widen 16-bit words to theirs."""

    def make(kind: np.dtype) -> Function:
        return compute if kind.itemsize > 2 else lambda a, by: compute(a, np.minimum(by, 16).astype(kind))

    return make


def same(compute: Function) -> Callable[..., Function]:
    """An operation that NumPy computes alike for all types."""
    return lambda *_: compute


class Family(NamedTuple):
    """letters: of the types: s, u, b, f, p(red). make: from a type to its function.

    operands: the result, then the sources. t: of the type; w: twice as wide; n: uint32; p: predicate; a: a shift's amount.
    """

    letters: str
    operands: str
    make: Callable[[np.dtype], Function]


FAMILIES = {
    "add": Family("su", "ttt", same(np.add)),  # 9.7.1.1
    "sub": Family("su", "ttt", same(np.subtract)),  # 9.7.1.2
    "mul.lo": Family("su", "ttt", same(np.multiply)),  # 9.7.1.3
    "mul.hi": Family("su", "ttt", _high_product),  # 9.7.1.3
    "mul.wide": Family("su", "wtt", _wide_product),  # 9.7.1.3
    "mad.lo": Family("su", "tttt", _with(same(np.multiply))),  # 9.7.1.4
    "mad.hi": Family("su", "tttt", _with(_high_product)),  # 9.7.1.4
    "mad.wide": Family("su", "wttw", _with(_wide_product)),  # 9.7.1.4
    "sad": Family("su", "tttt", same(lambda a, b, c: np.add(c, np.maximum(a, b) - np.minimum(a, b)))),  # 9.7.1.7
    "div": Family("su", "ttt", same(_quotient)),  # 9.7.1.8
    "rem": Family("su", "ttt", same(_remainder)),  # 9.7.1.9
    "abs": Family("s", "tt", same(np.abs)),  # 9.7.1.10
    "neg": Family("s", "tt", same(np.negative)),  # 9.7.1.11
    "min": Family("su", "ttt", same(np.minimum)),  # 9.7.1.12
    "max": Family("su", "ttt", same(np.maximum)),  # 9.7.1.13
    "popc": Family("b", "nt", same(lambda a: np.bitwise_count(a).astype(np.uint32))),  # 9.7.1.14
    "clz": Family("b", "nt", _of_length(lambda length, width: width - length)),  # 9.7.1.15
    "bfind": Family("su", "nt", _of_length(lambda length, width: length - 1)),  # 9.7.1.16
    "bfind.shiftamt": Family("su", "nt", _of_length(_to_the_top)),  # 9.7.1.16
    "brev": Family("b", "tt", same(_reversed)),  # 9.7.1.18
    "bfe": Family("su", "ttnn", same(_extract)),  # 9.7.1.19
    "bfi": Family("b", "tttnn", same(_insert)),  # 9.7.1.20
    "copysign": Family("f", "ttt", same(lambda a, b: np.copysign(b, a))),  # 9.7.3.2, of bits: a NaN keeps its payload
    "selp": Family("subf", "tttp", same(_select)),  # 9.7.6.3
    "and": Family("bp", "ttt", same(np.bitwise_and)),  # 9.7.8.1
    "or": Family("bp", "ttt", same(np.bitwise_or)),  # 9.7.8.2
    "xor": Family("bp", "ttt", same(np.bitwise_xor)),  # 9.7.8.3
    "not": Family("bp", "tt", same(np.invert)),  # 9.7.8.4
    "cnot": Family("b", "tt", lambda kind: lambda a: (a == 0).astype(kind)),  # 9.7.8.5
    "lop3": Family("b", "ttttn", same(_lookup)),  # 9.7.8.6
    "shl": Family("b", "tta", _shift(np.left_shift)),  # 9.7.8.8
    "shr": Family("sub", "tta", _shift(np.right_shift)),  # 9.7.8.9
    "mov": Family("subfp", "tt", same(lambda a: a)),  # 9.7.9.3
    "prmt": Family("b", "tttn", same(_permute)),  # 9.7.9.7
}
FAMILIES |= {  # 9.7.8.7
    f"shf.{side}.{how}": Family("b", "tttn", same(partial(_funnel, side == "l", how == "wrap")))
    for side in "lr"
    for how in ("wrap", "clamp")
}
