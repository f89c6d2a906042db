"""The lane-wise instructions against exact arithmetic: Python's integers and fractions, rounded by rules written out here."""

import math
import random
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ptx_programs import INSTRUCTIONS

from ptxsim import arithmetic
from ptxsim.arithmetic import Operation, operation

Operations = Callable[[tuple[str, ...]], Operation | None]
MODES = ("rn", "rz", "rm", "rp")
NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF, "bf16": 0x7FFF}
WIDTHS = (16, 32, 64)
EDGES_F32 = [
    *(0x00000000, 0x00000001, 0x00000003, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF, 0x0C000000, 0x33800000),
    *(0x33800001, 0x3EFFFFFF, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000, 0x3FC00000),
    *(0x40200000, 0x4B000001, 0x4B800001, 0x4F000000, 0x4EFFFFFF, 0x5F000000, 0x7F000001, 0x7F7FFFFF, 0x7F800000),
    *(0x7FC00000, 0x7F800001, 0x7FFFFFFF),
]
EDGES_F32 += [bits | 0x80000000 for bits in EDGES_F32]


class Bound(NamedTuple):
    """|result - exact| is at most the larger of ``relative`` * |exact| and ``absolute``."""

    relative: float
    absolute: float = 0.0


# Errors that the ISA allows the hardware. The machine computes the exact value, rounded. sin and cos: between -2 pi and 2 pi.
BOUNDS = {
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
APPROXIMATE = {f"{name}{ftz}.f32": bound for name, bound in BOUNDS.items() for ftz in ("", ".ftz")}


def perform(operations: Operations, opcode: str, *sources: Iterable) -> np.ndarray:
    """The result's bits; sources as values of the types that the operation names, or as their bits where these are floats."""
    found = operations(tuple(opcode.split(".")))
    assert found is not None, opcode
    arrays = []
    for source, kind in zip(sources, found.sources, strict=True):
        words = np.dtype(f"u{kind.itemsize}") if kind.kind == "f" else kind
        arrays.append(np.array(list(source), words).view(kind))
    kept = [array.copy() for array in arrays]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = found.function(*arrays)
    assert result.dtype == found.result and result.shape == arrays[0].shape, opcode
    assert all(now.tobytes() == before.tobytes() for now, before in zip(arrays, kept, strict=True)), (
        "a source was changed"
    )
    return result.view(f"u{result.itemsize}") if result.dtype.kind == "f" else result


def same(opcode: str, found: np.ndarray, expected: list, sources: Iterable[tuple]) -> None:
    wrong = [(hex(f), hex(e), s) for f, e, s in zip(found.tolist(), expected, sources, strict=True) if f != e]
    assert not wrong, f"{opcode}: {len(wrong)} of {len(expected)} wrong; the first: got, expected, sources {wrong[0]}"


def agrees(operations: Operations, opcode: str, cases: list[tuple], expected: list) -> None:
    """An opcode of all cases' sources."""
    same(opcode, perform(operations, opcode, *zip(*cases, strict=True)), expected, cases)


# --- Exact rounding -------------------------------------------------------------------------------------------------------

FORMATS = {"f16": (11, -24, 16, "e"), "bf16": (8, -133, 128, "f"), "f32": (24, -149, 128, "f")}


def value_of(bits: int, kind: str = "f32") -> float:
    if kind == "f32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0] if kind == "f16" else value_of(bits << 16)


def bits_of(value: float, kind: str = "f32") -> int:
    """For a value that the type has."""
    if math.isnan(value):
        return NAN[kind]
    bits = int.from_bytes(struct.pack("<" + FORMATS[kind][3], value), "little")
    return bits >> 16 if kind == "bf16" else bits


def round_exactly(number: Fraction, kind: str, mode: str, negative_zero: bool = False) -> float:
    """IEEE 754: precision, the exponents of the least bit and of what is too large."""
    precision, least, beyond, _ = FORMATS[kind]
    if not number:
        return -0.0 if negative_zero else 0.0
    sign, size = math.copysign(1, number), abs(number)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    whole, rest = divmod(size / unit, 1)
    up = {"rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1), "rz": False}
    whole += up.get(mode, rest > 0 and (mode == "rp") == (sign > 0))
    if whole * unit < Fraction(2) ** beyond:
        return sign * float(whole * unit)
    to_infinity = mode == "rn" or (mode != "rz" and (mode == "rp") == (sign > 0))
    return sign * (
        math.inf if to_infinity else float((2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** (beyond - 1))
    )


def fused(a: float, b: float, c: float, kind: str, mode: str) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    signs = {math.copysign(1, a) * math.copysign(1, b), math.copysign(1, c)}
    negative_zero = signs == {-1} or (mode == "rm" and len(signs) == 2)
    return round_exactly(Fraction(a) * Fraction(b) + Fraction(c), kind, mode, negative_zero)


def divided(a: float, b: float, kind: str, mode: str) -> float:
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (a == b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if b == 0 or math.isinf(a):
        return sign * math.inf
    return sign * 0.0 if math.isinf(b) else round_exactly(Fraction(a) / Fraction(b), kind, mode, sign < 0)


def root(a: float, kind: str, mode: str) -> float:
    """By an integer root of 60 digits, with what is left over as a last one."""
    if not a > 0 or math.isinf(a):
        return a if a == 0 or a == math.inf else math.nan
    scaled = Fraction(a) * 4**300
    whole = math.isqrt(scaled.numerator)
    assert scaled.denominator == 1
    return round_exactly(Fraction(2 * whole + (whole * whole != scaled), 2 ** (300 + 1)), kind, mode)


def flush(bits: int) -> int:
    return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits


# --- What there is to compute with ----------------------------------------------------------------------------------------


def triples() -> list[tuple[int, int, int]]:
    """Bits of a, b, c: random, cancelling, just beside the middle of two float32, subnormal, overflowing."""
    draw = random.Random(0)
    found = [tuple(draw.choice(EDGES_F32) for _ in range(3)) for _ in range(1500)]
    found += [tuple(draw.getrandbits(32) for _ in range(3)) for _ in range(300)]

    def scaled(whole: int, exponent: int) -> int:
        return bits_of(math.ldexp(whole, exponent))

    for _ in range(300):
        a, b = draw.getrandbits(12) | 0x801, draw.getrandbits(13) | 0x1001  # the product is odd and has 24 or 25 bits
        small = draw.choice((0, 1, -1)) * draw.choice((1, 3, 0x800001))
        found.append((scaled(a, 0), scaled(b, 0), scaled(small, -draw.choice((30, 60, 100)))))
        found.append((scaled(a, -80), scaled(b, -draw.randint(60, 80)), scaled(small, -149)))
        sign = draw.choice((1, -1))
        near = 0x800000 + draw.choice(
            (1, 0, 2, 0x3FF)
        )  # a product of 2^-24 and 2^-47 of it, beside 1: a tie but for the 94th bit
        found.append(
            (scaled(sign * near, -23 - 12), scaled(0x800001, -23 - 12), scaled(draw.getrandbits(23) | 0x800000, -23))
        )
        found.append(
            (scaled(sign * near, -23 - 75), scaled(0x800001, -23 - 75), scaled(draw.getrandbits(22) | 1, -149))
        )
        a, b = draw.getrandbits(23) | 0x800000, draw.getrandbits(23) | 0x800000
        whole = round_exactly(Fraction(a * b), "f32", "rn")
        found.append((scaled(a, 0), scaled(b, 0), bits_of(-whole)))
        found.append((scaled(a, 60), scaled(sign * b, draw.randint(18, 23)), scaled(a, 104)))
        shift = draw.randint(-160, -130)
        found.append(
            (scaled(a, shift // 2), scaled(b, shift - shift // 2 - 23), scaled(sign * draw.getrandbits(12), -149))
        )
    return found


def pairs() -> list[tuple[int, int]]:
    draw = random.Random(1)
    found = [(0, 1 << 31), (1 << 31, 0)] * 9 + draw.sample(list(product(EDGES_F32, EDGES_F32)), 1200)
    for _ in range(200):
        found.append((draw.getrandbits(32), draw.getrandbits(32)))
        found.append((draw.randint(0x3F000000, 0x40FFFFFF), draw.randint(0x3F000000, 0x40FFFFFF)))
        found.append((draw.randint(0, 0x03FFFFFF), draw.randint(0x3F000000, 0x43FFFFFF)))
    return found


TRIPLES, PAIRS = triples(), pairs()
VALUES = [(a,) for a in EDGES_F32 + [b for _, b in PAIRS[-600:]]]


def integers(bits: int, signed: bool, more: int = 40) -> list[int]:
    draw = random.Random(bits)
    found = [
        0,
        1,
        2,
        3,
        7,
        bits - 1,
        bits,
        2 ** (bits // 2),
        2 ** (bits - 1) - 1,
        2 ** (bits - 1),
        2 ** (bits - 1) + 1,
        2**bits - 1,
    ]
    found += [draw.getrandbits(bits) >> draw.choice((0, 0, bits // 2, bits - 5)) for _ in range(more)]
    return [wrap(number, bits, signed) for number in found]


def wrap(number: int, bits: int, signed: bool) -> int:
    number %= 2**bits
    return number - 2**bits if signed and number >> bits - 1 else number


# --- Integers -------------------------------------------------------------------------------------------------------------


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def remainder(a: int, b: int) -> int:
    return a - quotient(a, b) * b if b else -1


TWO: dict[str, Callable[[int, int, int], int]] = {  # a, b, the bits of the type
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul.lo": lambda a, b, _: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "div": lambda a, b, _: quotient(a, b),
    "rem": lambda a, b, _: remainder(a, b),
    "min": lambda a, b, _: min(a, b),
    "max": lambda a, b, _: max(a, b),
}


def check_integers(operations: Operations) -> None:
    for signed, bits in product((True, False), WIDTHS):
        kind, cases = f"{'su'[not signed]}{bits}", list(product(integers(bits, signed), repeat=2))
        for name, compute in TWO.items():
            agrees(operations, f"{name}.{kind}", cases, [wrap(compute(a, b, bits), bits, signed) for a, b in cases])
        three = [(a, b, wrap(a * 77 + b, bits, signed)) for a, b in cases]
        for name in ("mad.lo", "mad.hi", "sad"):
            if name == "sad":
                expected = [wrap(c + abs(a - b), bits, signed) for a, b, c in three]
            else:
                expected = [wrap((a * b >> (bits if name == "mad.hi" else 0)) + c, bits, signed) for a, b, c in three]
            agrees(operations, f"{name}.{kind}", three, expected)
        if bits < 64:
            agrees(operations, f"mul.wide.{kind}", cases, [a * b for a, b in cases])
            agrees(operations, f"mad.wide.{kind}", three, [wrap(a * b + c, 2 * bits, signed) for a, b, c in three])


def length(a: int) -> int:
    return (~a if a < 0 else a).bit_length()


ONE: dict[str, tuple[str, Callable[[int, int], int]]] = {  # the types' letters, and what becomes of a
    "neg": ("s", lambda a, _: -a),
    "abs": ("s", lambda a, _: abs(a)),
    "not": ("b", lambda a, _: ~a),
    "cnot": ("b", lambda a, _: int(a == 0)),
    "popc": ("b", lambda a, _: a.bit_count()),
    "clz": ("b", lambda a, bits: bits - a.bit_length()),
    "brev": ("b", lambda a, bits: int(f"{a:0{bits}b}"[::-1], 2)),
    "bfind": ("su", lambda a, _: length(a) - 1),
    "bfind.shiftamt": ("su", lambda a, bits: bits - length(a) if length(a) else -1),
}


def check_bits(operations: Operations) -> None:
    """Single words, shifts, bit fields, logic."""
    for (name, (letters, compute)), bits in product(ONE.items(), WIDTHS):
        for letter in letters:
            cases = [(a,) for a in integers(bits, letter == "s")]
            counts = name in ("popc", "clz", "bfind", "bfind.shiftamt")
            agrees(
                operations,
                f"{name}.{letter}{bits}",
                cases,
                [wrap(compute(a, bits), 32 if counts else bits, letter == "s" and not counts) for (a,) in cases],
            )
    amounts = (0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 65535, 65536, 2**31, 2**32 - 1)
    for bits, letter in product(WIDTHS, "bsu"):
        cases = [(a, by) for a in integers(bits, letter == "s", 6) for by in amounts]
        found = perform(operations, f"shr.{letter}{bits}", [a for a, _ in cases], amount_of(bits, letter, cases))
        same(f"shr.{letter}{bits}", found, [a >> min(by, bits) for a, by in cases], cases)
    for bits in WIDTHS:
        cases = [(a, by) for a in integers(bits, False, 6) for by in amounts]
        agrees(operations, f"shl.b{bits}", cases, [(a << min(by, bits)) % 2**bits for a, by in cases])
        check_fields(operations, bits)
    check_words(operations)


def amount_of(bits: int, letter: str, cases: list[tuple[int, int]]) -> list[int]:
    """32 bits as the operation views them."""
    return [wrap(by, 32, bits == 32 and letter == "s") for _, by in cases]


def check_fields(operations: Operations, bits: int) -> None:
    """bfe and bfi as the ISA's pseudo-code has them, bit by bit."""
    if bits == 16:
        return
    places = (0, 1, 5, bits - 1, bits, bits + 3, 255, 256, 2**32 - 1)
    for letter in "su":
        cases = [(a, p, n) for a in integers(bits, letter == "s", 3) for p in places for n in places]
        expected = []
        for a, position, count in cases:
            position, count, word = position & 255, count & 255, a % 2**bits
            sign = 0 if letter == "u" or not count else word >> min(position + count - 1, bits - 1) & 1
            kept = [word >> position + i & 1 if i < count and position + i < bits else sign for i in range(bits)]
            expected.append(wrap(sum(bit << i for i, bit in enumerate(kept)), bits, letter == "s"))
        agrees(operations, f"bfe.{letter}{bits}", cases, expected)
    words = integers(bits, False, 2)
    inserts = [(a, b, p, n) for a, b in zip(words, words[::-1], strict=True) for p in places for n in places]
    expected = []
    for a, b, position, count in inserts:
        made = [b >> i & 1 for i in range(bits)]
        for i in range(min(count & 255, max(bits - (position & 255), 0))):
            made[(position & 255) + i] = a >> i & 1
        expected.append(sum(bit << i for i, bit in enumerate(made)))
    agrees(operations, f"bfi.b{bits}", inserts, expected)


def check_words(operations: Operations) -> None:
    """Logic on words and predicates, prmt, lop3, shf, selp, mov."""
    logic = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
    for (name, compute), kind in product(logic.items(), ("b16", "b32", "b64", "pred")):
        words = [False, True] if kind == "pred" else integers(int(kind[1:]), False, 5)
        cases = list(product(words, repeat=2))
        agrees(operations, f"{name}.{kind}", cases, [compute(a, b) for a, b in cases])
    assert perform(operations, "not.pred", [True, False]).tolist() == [False, True]
    words = integers(32, False, 20)
    a, b, c = words, words[::-1], words[5:] + words[:5]
    expected = []
    for x, y, chosen in zip(a, b, c, strict=True):
        source = [(y << 32 | x) >> 8 * i & 255 for i in range(8)]
        picked = [(chosen >> 4 * i & 15) for i in range(4)]
        given = [(255 * (source[n & 7] >> 7) if n & 8 else source[n]) for n in picked]
        expected.append(int.from_bytes(bytes(given), "little"))
    same("prmt.b32", perform(operations, "prmt.b32", a, b, c), expected, zip(a, b, c, strict=True))
    for table in (0, 0x96, 0xE8, 0xF8, 0xFF, 0x1B):
        bit = [
            [table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1 for i in range(32)]
            for x, y, z in zip(a, b, c, strict=True)
        ]
        expected = [sum(value << i for i, value in enumerate(row)) for row in bit]
        same(
            "lop3.b32", perform(operations, "lop3.b32", a, b, c, [table] * len(a)), expected, zip(a, b, c, strict=True)
        )
    amounts = [(7 * n) % 70 for n in range(len(a))]
    for side, how in product("lr", ("wrap", "clamp")):
        by = [n & 31 if how == "wrap" else min(n, 32) for n in amounts]
        both = [y << 32 | x for x, y in zip(a, b, strict=True)]
        expected = [(w << n >> 32 if side == "l" else w >> n) % 2**32 for w, n in zip(both, by, strict=True)]
        found = perform(operations, f"shf.{side}.{how}.b32", a, b, amounts)
        same(f"shf.{side}.{how}", found, expected, zip(a, b, amounts, strict=True))
    for bits, letter in product(WIDTHS, "bsu"):
        a = integers(bits, letter == "s")
        chosen = [n % 3 == 0 for n in range(len(a))]
        found = perform(operations, f"selp.{letter}{bits}", a, a[::-1], chosen).tolist()
        assert found == [x if p else y for x, y, p in zip(a, a[::-1], chosen, strict=True)]
        assert perform(operations, f"mov.{letter}{bits}", a).tolist() == a


# --- Comparisons ----------------------------------------------------------------------------------------------------------

ORDERED: dict[str, Callable] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def check_comparisons(operations: Operations) -> None:
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    for letter, bits in product("sub", WIDTHS):
        cases = list(product(integers(bits, letter == "s", 4), repeat=2))
        for name in {"s": ORDERED, "u": [*ORDERED, *unsigned], "b": ("eq", "ne")}[letter]:
            agrees(
                operations,
                f"setp.{name}.{letter}{bits}",
                cases,
                [ORDERED[unsigned.get(name, name)](a, b) for a, b in cases],
            )
    values = [(value_of(a), value_of(b)) for a, b in PAIRS]
    unordered = [math.isnan(a) or math.isnan(b) for a, b in values]
    for name, compute in ORDERED.items():
        for word, of_nan in ((name, False), (name + "u", True)):
            agrees(
                operations,
                f"setp.{word}.f32",
                PAIRS,
                [of_nan if n else compute(a, b) for (a, b), n in zip(values, unordered, strict=True)],
            )
    for word, expected in (("num", [not n for n in unordered]), ("nan", unordered)):
        agrees(operations, f"setp.{word}.f32", PAIRS, expected)
    assert perform(operations, "setp.gt.ftz.f32", [1, 0x800000], [0, 0]).tolist() == [False, True]
    found = perform(operations, "setp.lt.xor.s32", [1, 1, 2, 2], [2, 2, 1, 1], [True, False, True, False])
    assert found.tolist() == [False, True, True, False]


# --- Floating point -------------------------------------------------------------------------------------------------------


@cache
def exact(name: str, mode: str) -> list[int]:
    """The bits of TRIPLES, PAIRS or VALUES computed in fractions, and rounded."""
    if name == "fma":
        return [bits_of(fused(*map(value_of, triple), "f32", mode)) for triple in TRIPLES]
    if name in ("rcp", "sqrt"):
        values = [value_of(a) for (a,) in VALUES]
        return [bits_of(divided(1.0, a, "f32", mode) if name == "rcp" else root(a, "f32", mode)) for a in values]
    compute: Callable[[float, float], float] = {
        "add": lambda a, b: fused(a, 1.0, b, "f32", mode),
        "sub": lambda a, b: fused(a, 1.0, -b, "f32", mode),
        "mul": lambda a, b: fused(a, b, math.copysign(0, a) * math.copysign(1, b), "f32", mode),
        "div": lambda a, b: divided(a, b, "f32", mode),
    }[name]
    return [bits_of(compute(value_of(a), value_of(b))) for a, b in PAIRS]


def check_fused(operations: Operations) -> None:
    for mode in MODES:
        agrees(operations, f"fma.{mode}.f32", TRIPLES, exact("fma", mode))


def check_sums_and_products(operations: Operations) -> None:
    for mode, name in product(MODES, ("add", "sub", "mul")):
        agrees(operations, f"{name}.{mode}.f32", PAIRS, exact(name, mode))
    for name in ("add", "sub", "mul"):
        plain, stated = (perform(operations, f"{name}{mode}.f32", *zip(*PAIRS, strict=True)) for mode in ("", ".rn"))
        assert np.array_equal(plain, stated)


def check_quotients(operations: Operations) -> None:
    for mode, (name, cases) in product(MODES, (("div", PAIRS), ("rcp", VALUES), ("sqrt", VALUES))):
        agrees(operations, f"{name}.{mode}.f32", cases, exact(name, mode))


def lesser(a: int, b: int) -> int:
    """The less of two float32, by their bits: NaN loses, -0 is less than +0."""
    numbers = [bits for bits in (a, b) if not math.isnan(value_of(bits))]
    return min(numbers, key=lambda bits: (value_of(bits), math.copysign(1, value_of(bits)))) if numbers else NAN["f32"]


def check_extremes_and_signs(operations: Operations) -> None:
    def turned(bits: int) -> int:
        return bits ^ 0x80000000

    least = [lesser(a, b) for a, b in PAIRS]
    most = [
        NAN["f32"] if math.isnan(value_of(a)) and math.isnan(value_of(b)) else turned(lesser(turned(a), turned(b)))
        for a, b in PAIRS
    ]
    for name, expected in (("min", least), ("max", most)):
        agrees(operations, f"{name}.f32", PAIRS, expected)
        some = [NAN["f32"] if not_number(*pair) else one for pair, one in zip(PAIRS, expected, strict=True)]
        agrees(operations, f"{name}.NaN.f32", PAIRS, some)
    a = [bits for (bits,) in VALUES]
    numbers = [not math.isnan(value_of(bits)) for bits in a]
    for name, compute in (("neg", turned), ("abs", lambda bits: bits & 0x7FFFFFFF)):
        expected = [compute(bits) if n else NAN["f32"] for bits, n in zip(a, numbers, strict=True)]
        same(name, perform(operations, f"{name}.f32", a), expected, VALUES)
    agrees(operations, "copysign.f32", PAIRS, [(x & 0x80000000) | (y & 0x7FFFFFFF) for x, y in PAIRS])
    assert perform(operations, "mov.f32", a).tolist() == a, "moves change no bit"
    assert perform(operations, "selp.f32", a, a, [True] * len(a)).tolist() == a


def not_number(*words: int) -> bool:
    return any(math.isnan(value_of(bits)) for bits in words)


def check_flushing_and_saturation(operations: Operations) -> None:
    """.ftz: subnormal sources and results are zeros of their sign. .sat: in [+0, 1], NaN is +0."""
    values = [(value_of(flush(a)), value_of(flush(b))) for a, b in PAIRS]
    agrees(
        operations,
        "mul.ftz.f32",
        PAIRS,
        [flush(bits_of(fused(a, b, math.copysign(0, a) * math.copysign(1, b), "f32", "rn"))) for a, b in values],
    )
    agrees(operations, "add.rz.ftz.f32", PAIRS, [flush(bits_of(fused(a, 1.0, b, "f32", "rz"))) for a, b in values])
    a = [bits for (bits,) in VALUES]
    expected = [bits_of(min(max(value_of(bits), 0.0), 1.0)) if value_of(bits) > 0 else 0 for bits in a]
    same("cvt.sat", perform(operations, "cvt.sat.f32.f32", a), expected, VALUES)
    same("mul.sat", perform(operations, "mul.sat.f32", a, [0x3F800000] * len(a)), expected, VALUES)
    same("cvt.ftz.sat", perform(operations, "cvt.ftz.sat.f32.f32", a), [flush(bits) for bits in expected], VALUES)


def check_halves(operations: Operations) -> None:
    """float16 computes too; its sources are all edges and some more."""
    draw = random.Random(3)
    edges = [0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00]
    words = [*edges, *(0x8000 | bits for bits in edges), *(draw.getrandbits(16) for _ in range(20))]
    cases = [(a, b, draw.choice(words)) for a, b in product(words, repeat=2)]
    for mode in MODES:
        agrees(
            operations,
            f"fma.{mode}.f16",
            cases,
            [bits_of(fused(*(value_of(bits, "f16") for bits in case), "f16", mode), "f16") for case in cases],
        )
    expected = [bits_of(fused(value_of(a, "f16"), 1.0, value_of(b, "f16"), "f16", "rn"), "f16") for a, b, _ in cases]
    same("add.f16", perform(operations, "add.f16", *list(zip(*cases, strict=True))[:2]), expected, cases)


# --- Conversions ----------------------------------------------------------------------------------------------------------


def check_conversions_of_integers(operations: Operations) -> None:
    for (of, width), (to, bits), sat in product(product("su", (8, *WIDTHS)), product("su", (8, *WIDTHS)), ("", ".sat")):
        cases = [(a,) for a in integers(width, of == "s")]
        words = [wrap(a, max(width, 16), of == "s") for (a,) in cases]
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if to == "s" else (0, 2**bits - 1)
        expected = [min(max(a, low), high) if sat else wrap(a, bits, to == "s") for (a,) in cases]
        opcode = f"cvt{sat}.{to}{bits}.{of}{width}"
        same(opcode, perform(operations, opcode, words), expected, cases)
    assert perform(operations, "cvt.s32.s8", [0x1280, 0x127F]).tolist() == [-128, 127], "the low byte counts"
    for mode, of, width, kind in product(MODES, "su", WIDTHS, ("f32", "f16")):
        draw = random.Random(width)
        near = [1 << draw.randint(25, 62) | 1 << draw.randint(0, 20) | draw.getrandbits(1) for _ in range(300)]
        halfway = [
            ((1 << 24 | draw.getrandbits(24)) << 1 | 1) << shift | draw.getrandbits(1)
            for shift in range(38)
            for _ in range(4)
        ]
        cases = [
            (wrap(a, width, of == "s"),)
            for a in integers(width, False) + (near + halfway if width == 64 else [2**24 + 1, 2**25 + 3])
        ]
        opcode = f"cvt.{mode}.{kind}.{of}{width}"
        agrees(operations, opcode, cases, [bits_of(round_exactly(Fraction(a), kind, mode), kind) for (a,) in cases])


def check_conversions_to_integers(operations: Operations) -> None:
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    draw = random.Random(4)
    values = [a for (a,) in VALUES] + [bits_of(n / 2) for n in range(-9, 10)]
    values += [draw.choice((0, 0x80000000)) | draw.randint(0x3F000000, 0x5FFFFFFF) for _ in range(300)]
    for (mode, compute), to, bits in product(whole.items(), "su", WIDTHS):
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if to == "s" else (0, 2**bits - 1)
        nan = wrap(2**63, 64, to == "s") if bits == 64 else 0
        expected = []
        for value in map(value_of, values):
            limit = high if value > 0 else low
            expected.append(
                nan if math.isnan(value) else limit if math.isinf(value) else min(max(compute(value), low), high)
            )
        opcode = f"cvt.{mode}.{to}{bits}.f32"
        same(opcode, perform(operations, opcode, values), expected, [(value,) for value in values])
        if bits == 32:
            found = perform(operations, f"cvt.{mode}.f32.f32", values)
            kept = [v if not math.isfinite(v) else math.copysign(compute(v), v) for v in map(value_of, values)]
            same(f"cvt.{mode}.f32.f32", found, [bits_of(float(v)) for v in kept], [(value,) for value in values])
    assert perform(operations, "cvt.rpi.ftz.s32.f32", [1, 0x800000]).tolist() == [0, 1]
    assert perform(operations, "cvt.rpi.s32.f32", [1, 0x800000]).tolist() == [1, 1]
    assert perform(operations, "cvt.rzi.s32.f64", [0x7FF8000000000000]).tolist() == [-(2**31)]


def check_conversions_of_floats(operations: Operations) -> None:
    draw = random.Random(5)
    a = [bits for (bits,) in VALUES]
    a += [draw.getrandbits(16) << 16 | draw.choice((0x7FFF, 0x8000, 0x8001)) for _ in range(200)]  # beside the middle
    a += [draw.randint(0x33000000, 0x387FFFFF) for _ in range(200)]  # subnormal in float16
    b = a[::-1]
    cases = list(zip(a, b, strict=True))
    for kind, mode in (("bf16", "rn"), ("bf16", "rz"), ("f16", "rn"), ("f16", "rz"), ("f16", "rm"), ("f16", "rp")):
        halves = {bits: bits_of(rounded(value_of(bits), kind, mode), kind) for bits in a}
        same(kind, perform(operations, f"cvt.{mode}.{kind}.f32", a), [halves[bits] for bits in a], [(x,) for x in a])
        if kind == "bf16" or mode in ("rn", "rz"):
            found = perform(operations, f"cvt.{mode}.{kind}x2.f32", a, b)
            same(kind + "x2", found, [halves[x] << 16 | halves[y] for x, y in cases], cases)
    words = sorted({bits >> 16 for bits in a})
    assert perform(operations, "cvt.f32.bf16", words).tolist() == [bits << 16 for bits in words]
    same(
        "f16",
        perform(operations, "cvt.f32.f16", words),
        [bits_of(value_of(bits, "f16")) for bits in words],
        [(x,) for x in words],
    )
    wide = [struct.unpack("<Q", struct.pack("<d", 1 + draw.getrandbits(30) * 2.0**-52))[0] for _ in range(200)]
    for mode in MODES:
        numbers = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in wide]
        expected = [bits_of(round_exactly(Fraction(x), "f32", mode)) for x in numbers]
        same("f64", perform(operations, f"cvt.{mode}.f32.f64", wide), expected, [(x,) for x in wide])


def rounded(value: float, kind: str, mode: str) -> float:
    return round_exactly(Fraction(value), kind, mode, math.copysign(1, value) < 0) if math.isfinite(value) else value


CHECKS = [
    check_integers,
    check_bits,
    check_comparisons,
    check_fused,
    check_sums_and_products,
    check_quotients,
    check_extremes_and_signs,
    check_flushing_and_saturation,
    check_halves,
    check_conversions_of_integers,
    check_conversions_to_integers,
    check_conversions_of_floats,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_against_exact_arithmetic(check: Callable[[Operations], None]) -> None:
    check(operation)


# --- A mutant of each rule fails its check --------------------------------------------------------------------------------

MUTANTS = [
    ("floats", "    if error.dot(error):", "    if False:", check_fused),  # rounded twice
    ("floats", "bits -= beyond", "bits -= False", check_fused),
    ("floats", "bits |= beyond | (side > ZERO[F64])", "bits |= beyond", check_fused),
    (
        "floats",
        "bits |= beyond | (side > ZERO[F64])",
        "bits |= ~(side == ZERO[F64])",
        check_fused,
    ),  # infinity becomes NaN
    ("floats", "np.abs(result) > np.abs(values)", "result > values", check_sums_and_products),
    ("floats", "DOWN[kind]), where=result > values", "DOWN[kind]), where=result >= values", check_fused),
    ("floats", "UP[kind]), where=result < values", "UP[kind]), where=result <= values", check_fused),
    ("floats", 'if mode == "rm" and not', "if False and not", check_sums_and_products),
    ("floats", "np.copyto(result, NAN[kind], where=result != result)", "pass", check_sums_and_products),
    ("floats", "if total != total:\n            np", "if False:\n            np", check_extremes_and_signs),
    ("floats", "equal.dot(equal)", "False", check_extremes_and_signs),
    ("floats", "flushed(inner(*map(flushed, sources)))", "flushed(inner(*sources))", check_flushing_and_saturation),
    (
        "floats",
        "flushed(inner(*map(flushed, sources)))",
        "inner(*map(flushed, sources))",
        check_flushing_and_saturation,
    ),
    ("floats", "values > zero", "values >= zero", check_flushing_and_saturation),
    ("floats", "& LAST_BIT) + BELOW_HALF", "& LAST_BIT) + LAST_BIT", check_conversions_of_floats),
    (
        "floats",
        "((bits >> SIXTEEN) & LAST_BIT) + BELOW_HALF",
        "LAST_BIT + BELOW_HALF",
        check_conversions_of_floats,
    ),  # ties up
    ("floats", "NAN[F32].view(np.uint32), where", "bits, where", check_conversions_of_floats),
    (
        "floats",
        "rounded(half.astype(F64), F16, mode)",
        'rounded(half.astype(F64), F16, "rn")',
        check_conversions_of_floats,
    ),
    (
        "floats",
        "for source in sources], mode), kind, mode)",
        'for source in sources], mode), kind, "rn")',
        check_quotients,
    ),
    ("arithmetic", "rounded(odd_sum((a >> 32)", "rounded(np.add((a >> 32)", check_conversions_of_integers),
    ("integers", "np.floor_divide(a - np.fmod(a, b), b)", "np.floor_divide(a, b)", check_integers),
    ("integers", "np.fmod(a, b))\n", "np.remainder(a, b))\n", check_integers),
    (
        "arithmetic",
        "bounds.max, where=values >= beyond",
        "bounds.max, where=values > beyond",
        check_conversions_to_integers,
    ),
    ("arithmetic", "nan, where=values != values", "0, where=values != values", check_conversions_to_integers),
    ("arithmetic", '"rpi": np.ceil', '"rpi": np.rint', check_conversions_to_integers),
    ("arithmetic", '"ne": lambda a, b: (a < b) | (a > b)', '"ne": np.not_equal', check_comparisons),
    ("arithmetic", '"geu": lambda a, b: ~(a < b)', '"geu": np.greater_equal', check_comparisons),
    ("integers", "np.minimum(length & 0xFF, width)", "length & 0xFF", check_bits),
    ("arithmetic", "kind if kind.itemsize == 4 else U32", "U32", check_bits),
]


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_a_mutant_fails(module: str, old: str, new: str, check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, package = Path(arithmetic.__file__).parent, arithmetic.__name__.rpartition(".")[0]
    for name in ("floats", "integers", "arithmetic"):
        source = (folder / f"{name}.py").read_text()
        assert name != module or source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}.py"
        made = types.ModuleType(f"{package}.{name}")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        monkeypatch.setattr(sys.modules[package], name, made)
        exec(compile(source.replace(old, new) if name == module else source, f"{name}.py", "exec"), vars(made))
    with pytest.raises((AssertionError, OverflowError)):
        check(made.operation)


# --- All opcodes, shapes, approximations ----------------------------------------------------------------------------------

BITS = {"r": 32, "R": 32, "s": 32, "b": 32, "f": 32, "x": 32, "d": 64, "D": 64, "h": 16, "p": 1}


def bits_in(kind: np.dtype) -> int:
    return 1 if kind == np.bool_ else 8 * kind.itemsize


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda instruction: instruction[0])
def test_every_opcode_of_the_programs_is_known(instruction: tuple[str, ...]) -> None:
    """With registers as wide as theirs; a source that is the same in all lanes may come as one number."""
    opcode, result, *taken = instruction
    found = operation(tuple(opcode.split(".")))
    assert found is not None
    assert bits_in(found.result) == BITS[result] and [bits_in(kind) for kind in found.sources] == [
        BITS[letter] for letter in taken
    ]
    draw = np.random.default_rng(6)
    for single in product((False, True), repeat=len(taken)):
        words = [draw.integers(0, 2, (32, kind.itemsize), np.uint8) * 85 for kind in found.sources]
        sources = [
            (word % 2).view(kind)[:, 0] if kind == np.bool_ else word.view(kind)[:, 0]
            for word, kind in zip(words, found.sources, strict=True)
        ]
        given = [a[:1] if one else a for a, one in zip(sources, single, strict=True)]
        spread = [np.full(32, a[0], a.dtype) if one else a for a, one in zip(sources, single, strict=True)]
        with np.errstate(all="ignore"):
            few, all_lanes = found.function(*given), found.function(*spread)
        assert few.dtype == all_lanes.dtype == found.result and few.shape == ((1,) if all(single) else (32,))
        assert np.broadcast_to(few, 32).tobytes() == all_lanes.tobytes()


UNKNOWN = "ret bra.uni ld.global.f32 atom.shared.add.u32 shfl.sync.idx.b32 add.f32x2 add.rm.f64 fma.rn.f64 add.cc.u32"
UNKNOWN += (
    " add.rx.f32 cvt.s32 setp.lt.pred setp.ltu.s32 shl.s32 and.s32 min.f32.f32 mul.wide.s64 cvt.rm.bf16.f32 cvt.f32.b7"
)
UNKNOWN += " cvt.f32.s32 cvt.rz.f64.s64 cvt.rni.f32.f64 cvt.f32.f64 cvt.relu.rn.bf16.f32"


@pytest.mark.parametrize("opcode", UNKNOWN.split())
def test_what_is_no_lane_wise_arithmetic_has_no_operation(opcode: str) -> None:
    assert operation(tuple(opcode.split("."))) is None


EXACT: dict[str, Callable[..., float]] = {
    "div.approx": lambda a: 1.5 / a,
    "div.full": lambda a: 1.5 / a,
    "rcp.approx": lambda a: 1 / a,
    "sqrt.approx": math.sqrt,
    "rsqrt.approx": lambda a: 1 / math.sqrt(a),
    "sin.approx": math.sin,
    "cos.approx": math.cos,
    "lg2.approx": math.log2,
    "ex2.approx": lambda a: 2.0**a,
    "tanh.approx": math.tanh,
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximations_are_within_their_bounds(opcode: str) -> None:
    draw, name, bound = random.Random(7), opcode.replace(".ftz", "").removesuffix(".f32"), APPROXIMATE[opcode]
    values = [bits_of(struct.unpack("<f", struct.pack("<f", draw.uniform(0.001, 6)))[0]) for _ in range(500)]
    found = perform(operation, opcode, *([[0x3FC00000] * len(values)] if name.startswith("div") else []), values)
    for bits, result in zip(values, map(value_of, found.tolist()), strict=True):
        wanted = EXACT[name](value_of(bits))
        assert abs(result - wanted) <= max(bound.relative * abs(wanted), bound.absolute)


INF, NEGATIVE = 0x7F800000, 0x80000000
SPECIAL = {  # the ISA's tables, by bits; sources -infinity, -1, -0, +0, +infinity, NaN
    "rcp.approx.f32": (NEGATIVE, 0xBF800000, INF | NEGATIVE, INF, 0, NAN["f32"]),
    "sqrt.approx.f32": (NAN["f32"], NAN["f32"], NEGATIVE, 0, INF, NAN["f32"]),
    "rsqrt.approx.f32": (NAN["f32"], NAN["f32"], INF | NEGATIVE, INF, 0, NAN["f32"]),
    "sin.approx.f32": (NAN["f32"], None, NEGATIVE, 0, NAN["f32"], NAN["f32"]),
    "cos.approx.f32": (NAN["f32"], None, 0x3F800000, 0x3F800000, NAN["f32"], NAN["f32"]),
    "lg2.approx.f32": (NAN["f32"], NAN["f32"], INF | NEGATIVE, INF | NEGATIVE, INF, NAN["f32"]),
    "ex2.approx.f32": (0, 0x3F000000, 0x3F800000, 0x3F800000, INF, NAN["f32"]),
    "tanh.approx.f32": (0xBF800000, None, NEGATIVE, 0, 0x3F800000, NAN["f32"]),
}


@pytest.mark.parametrize("opcode", SPECIAL)
def test_special_values(opcode: str) -> None:
    found = perform(operation, opcode, [INF | NEGATIVE, 0xBF800000, NEGATIVE, 0, INF, 0x7FC00000]).tolist()
    assert not [pair for pair in zip(found, SPECIAL[opcode], strict=True) if pair[1] not in (None, pair[0])]


def test_subnormal_numbers_of_approximations() -> None:
    """rcp.approx.ftz takes them for zeros and gives none; tanh passes them on; ex2 gives them, but with .ftz."""
    assert perform(operation, "rcp.approx.ftz.f32", [0x80000001, 0x7F7FFFFF]).tolist() == [INF | NEGATIVE, 0]
    assert perform(operation, "tanh.approx.f32", [0x80000001, 0x007FFFFF]).tolist() == [0x80000001, 0x007FFFFF]
    assert perform(operation, "ex2.approx.f32", [bits_of(-130.0)]).tolist() == [1 << 19]
    assert perform(operation, "ex2.approx.ftz.f32", [bits_of(-130.0)]).tolist() == [0]
    large, infinite = bits_of(math.ldexp(1, 127)), INF
    assert perform(operation, "div.approx.f32", [0x3F800000, infinite], [large, large]).tolist() == [0, NAN["f32"]]
    assert perform(operation, "div.full.f32", [0x3F800000], [large]).tolist() == [1 << 22]
