"""wgmma's operands, fragments and products against the PTX ISA's formulas."""

from itertools import product as every
from types import ModuleType

import numpy as np
import pytest
from mutants import check_all, mutated

from ptxsim import matrices

PANEL_BYTES = 64 * 128


def bf16(values: np.ndarray) -> np.ndarray:
    """Cut off to bf16; its bits."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def word_of(address: int, leading: int, stride: int, code: int) -> int:
    """A descriptor as wgmma.cuh makes it."""
    return code << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | (address & 0x3FFFF) >> 4


def check_descriptor(m: ModuleType) -> None:
    for code, swizzle in enumerate((0, 128, 64, 32)):
        word = word_of(0x2B410, 0x2000, 0x400, code)
        assert m.Descriptor.decode(word) == (0x2B410, 0x2000, 0x400, swizzle)
    assert m.Descriptor.decode(word_of(0x1002B410, 0x3FFF0, 0x3FFF0, 1)) == (0x2B410, 0x3FFF0, 0x3FFF0, 128)


# "Exact layout" of the figures on canonical layouts in PTX ISA 9.7.15.5.1.2.1.3, in elements: (sizes, strides) of rows and of k.
FIGURES = [
    ("K major, none, tf32", 4, False, 0, (64, 32), ((8, 2), (4, 32)), ((4, 2), (1, 64))),
    ("K major, 32 bytes, tf32", 4, False, 32, (4, 64), ((8, 2), (8, 64)), ((4, 2), (1, 4))),
    ("MN major, none, bf16", 2, True, 0, (128, 64), ((8, 1, 2), (1, 8, 64)), ((8, 2), (8, 128))),
    ("MN major, 32 bytes, bf16", 2, True, 32, (128, 256), ((8, 2, 2), (1, 8, 128)), ((8, 2), (16, 256))),
    ("MN major, 64 bytes, bf16", 2, True, 64, (256, 512), ((8, 4, 2), (1, 8, 256)), ((8, 2), (32, 512))),
]


def places(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Offsets of a mode of a CuTe layout; its first size varies fastest."""
    return [sum(i * s for i, s in zip(index[::-1], strides, strict=True)) for index in every(*map(range, sizes[::-1]))]


def check_figures(m: ModuleType) -> None:
    for name, itemsize, transposed, swizzle, (leading, stride), rows, columns in FIGURES:
        row, k = np.array(places(*rows)), np.array(places(*columns))
        for start in (0, 0x4000 + 1024, 0x4000 + 80):
            linear = start + itemsize * (row[:, None] + k[None])
            right = linear ^ (linear >> 3 & {0: 0, 32: 0x10, 64: 0x30}[swizzle])
            descriptor = m.Descriptor(start, leading * itemsize, stride * itemsize, swizzle)
            got = m.operand_addresses(descriptor, len(row), len(k), transposed, itemsize)
            assert got.dtype == np.int64 and np.array_equal(got, right), (name, start)


def check_stages(m: ModuleType) -> None:
    """Every step of a stage of 64 elements of k, in panels of 128 bytes a row, as kernels advance their descriptors."""
    for (length, mn_major), start in every(((64, False), (256, False), (64, True), (256, True)), (0, 3 * 49152)):
        for step in range(4):
            at = start + step * (16 * 128 if mn_major else 32)
            descriptor = m.Descriptor.decode(word_of(at, PANEL_BYTES, 1024, 1))
            got = m.operand_addresses(descriptor, length, 16, mn_major)
            for row, k in ((0, 0), (1, 7), (8, 8), (13, 15), (length - 1, 9), (length // 2 + 5, 3)):
                byte = 2 * (16 * step + k)
                linear = PANEL_BYTES * (row // 64) + 64 * byte + 2 * (row % 64) if mn_major else 128 * row + byte
                assert got[row, k] == start + (linear ^ (linear >> 3 & 0x70))
            assert len(np.unique(got)) == got.size


def check_fragment(m: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for n in (8, 64, 192, 256):
        matrix = rng.normal(size=(64, n)).astype(np.float32)
        fragment = m.matrix_to_fragment(matrix)
        assert fragment.shape == (4, n // 2, 32) and fragment.dtype == np.float32
        assert np.array_equal(m.fragment_to_matrix(fragment), matrix)
        warp, i, lane = np.ogrid[:4, : n // 2, :32]
        row, column = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
        assert np.array_equal(fragment, matrix[row, column])


def check_ldmatrix(m: ModuleType) -> None:
    rng = np.random.default_rng(0)
    lanes = (rng.permutation(64)[:32] * 16).astype(np.uint32)
    for count, transposed in every((1, 2, 4), (False, True)):
        got = m.matrix_addresses(lanes, count, transposed)
        assert got.shape == (count, 32, 2) and got.dtype == np.int64
        for matrix, lane, half in every(range(count), range(32), range(2)):
            row, column = lane // 4, 2 * (lane % 4) + half
            if transposed:
                row, column = column, row
            assert got[matrix, lane, half] == lanes[8 * matrix + row] + 2 * column


def check_exact_sums(m: ModuleType) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (rows, 16)) / 4 for rows in (64, 256))
    c = (rng.integers(-(2**20), 2**20, (64, 256)) / 16).astype(np.float32)
    for given in (None, c):
        got = m.multiply(bf16(a), bf16(b), given)
        assert got.dtype == np.float32 and np.array_equal(got, a @ b.T + (0 if given is None else c))
    a, b = np.zeros((64, 16)), np.ones((8, 16))
    a[:, 0], a[:, 5] = 2.0**26, 1.0
    assert np.all(m.multiply(bf16(a), bf16(b), np.full((64, 8), -(2.0**26), np.float32)) == 1)


def check_not_numbers(m: ModuleType) -> None:
    a, b = np.ones((64, 16)), np.ones((8, 16))
    a[3, 4], b[2, 4], b[5, 4], a[7, 1] = np.inf, 0.0, -1.0, np.nan
    got = m.multiply(bf16(a), bf16(b), None)
    wrong = np.zeros((64, 8), bool)
    wrong[3, 2] = wrong[7] = True
    assert np.array_equal(got.view(np.uint32) == 0x7FFFFFFF, wrong)
    assert got[3, 5] == -np.inf and got[3, 0] == np.inf and got[0, 0] == 16


def truncated(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """As a Hopper GPU adds: addends cut off below 2^-25 of the largest one's power of two, the sum to fp32 toward zero."""
    addends = np.concatenate([a[:, None] * b[None], c[:, :, None]], axis=2)
    quantum = np.ldexp(1.0, np.frexp(np.abs(addends).max(2))[1] - 26)
    exact = (np.trunc(addends / quantum[:, :, None]) * quantum[:, :, None]).sum(2)
    nearest = exact.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, np.float32(0)), nearest)


def check_truncation(m: ModuleType) -> None:
    """Eight instructions in a row, of operands of one sign and of both, large and small."""
    rng = np.random.default_rng(0)
    for lowest in (0.0, -1.0):
        ours, gpu, magnitudes = np.zeros((64, 64), np.float32), np.zeros((64, 64)), np.zeros((64, 64))
        for _ in range(8):
            a, b = (bf16(rng.uniform(lowest, 1, (64, 16)) ** 5) for _ in range(2))
            ours = m.multiply(a, b, ours)
            gpu = truncated(*(values_of(x).astype(np.float64) for x in (a, b)), gpu).astype(np.float64)
            magnitudes += np.abs(values_of(a)) @ np.abs(values_of(b)).T
        off = np.abs(ours - gpu) / (8 * 12 * 2.0**-24 * magnitudes)  # as `multiply` counts
        assert 0.02 < off.max() <= 1


def check_fp16(m: ModuleType) -> None:
    """Numbers that only f16 has, subnormal ones too, whose sums fp32 holds."""
    a, b = (np.full((rows, 16), value, np.float16) for rows, value in ((64, 1 + 2.0**-10), (8, 2.0**-24)))
    got = m.multiply(a.view(np.uint16), b.view(np.uint16), None, "f16")
    assert (got == 16 * (1 + 2.0**-10) * 2.0**-24).all()


CHECKS = (
    check_fp16,
    check_descriptor,
    check_figures,
    check_stages,
    check_fragment,
    check_ldmatrix,
    check_exact_sums,
    check_not_numbers,
    check_truncation,
)


@pytest.mark.parametrize("check", CHECKS)
def test_matrices(check: object) -> None:
    check(matrices)  # type: ignore[operator]


@pytest.mark.parametrize(
    "word", [1 << 49 | 1 << 62, 7 << 49, 1 << 14, 1 << 30, 1 << 46, 1 << 52, 1 << 61, 1 << 64], ids=hex
)
def test_a_descriptor_with_other_bits_is_refused(word: int) -> None:
    with pytest.raises(ValueError, match=f"matrix descriptor {word:#018x}: expected no base offset"):
        matrices.Descriptor.decode(word)


MUTANTS = [
    ("SWIZZLES = (0, 128, 64, 32)", "SWIZZLES = (0, 32, 64, 128)"),
    ("for bit in (0, 16, 32)", "for bit in (0, 32, 16)"),
    ("addresses >> 3 &", "addresses >> 4 &"),
    ("max(swizzle - 16, 0)", "max(swizzle - 16, 16)"),
    ("start = descriptor.address % PERIOD", "start = descriptor.address % 16"),
    ("PERIOD = 1024", "PERIOD = 64"),
    ("(leading, stride) if swizzle else (stride, leading)", "(leading, stride)"),
    ("row // width * next_rows", "row // 64 * next_rows"),
    ("k % 8 * span", "k % 8 * 128"),
    ("k // 8 * next_k", "k // 4 * next_k"),
    ("row // 8 * stride + byte", "row // 8 * 1024 + byte"),
    ("(16 if swizzle else leading)", "16"),
    ("swizzled(start + offset, swizzle)", "start + swizzled(offset, swizzle)"),
    ("8 * (register // 2 % 2)", "8 * (register % 2)"),
    ("8 * (register // 4)", "8 * (register // 8)"),
    ("2 * (lane % 4) + register % 2", "lane % 4 + 4 * (register % 2)"),
    ("places.ravel().argsort()", "places.ravel()"),
    ("row, column = lane // 4, 2 * (lane % 4) + half", "row, column = lane % 8, 2 * (lane // 8) + half"),
    ("(column, 2 * row)", "(row, 2 * column)"),
    ("reshape(4, 8)", "reshape(8, 4).T"),
    ("product += c", "product -= c"),
    ("_wide(a, kind) @ _wide(b, kind).T", "(_wide(a, kind).astype(np.float32) @ _wide(b, kind).astype(np.float32).T)"),
    ('if kind == "f16" else', 'if kind == "f17" else'),
    ("np.copyto(result, NAN, where=np.isnan(result))", "pass"),
]


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_wrong_formula_is_seen(old: str, new: str) -> None:
    mutant = mutated(matrices, old, new)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_all(CHECKS, mutant)
