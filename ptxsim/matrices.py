"""Matrices of the tensor core: where wgmma's operands lie in shared memory, which lane holds which element, and the product.

A matrix descriptor names an operand of wgmma, rows (M or N) x K, in shared memory. It has one of the canonical layouts of PTX ISA
9.7.15.5.1.2.1.3. A *span* is as many bytes as the swizzle has, or 16 without one. Eight spans follow each other:

    K-major    a span is a part of one row's K, and the eight are of 8 rows. The next 8 rows lie ``stride`` bytes on.
               Without swizzle the rows' next 16 bytes lie ``leading`` bytes on.
    MN-major   a span is some rows (M or N) of one k, and the eight are of 8 k. The next rows lie ``leading`` bytes on, the next
               8 k ``stride`` bytes. Without swizzle the two change places.

A swizzle then permutes the 16-byte chunks of 1024 bytes (of 512, of 256), by bits of the absolute address.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ptxsim.floats import E4M3
from ptxsim.memory import Refusal

SWIZZLES = (0, 128, 64, 32)  # bytes, by the descriptor's two highest bits
FIELDS = 0xC000_3FFF_3FFF_3FFF  # the descriptor's bits but for the base offset (49 to 51) and what is unused
PERIOD = 1024  # bytes after which every swizzle repeats
NAN = np.uint32(0x7FFF_FFFF).view(np.float32)  # the only one that the tensor core gives
E4M3_FRACTION = 13  # bits of a sum of fp8 products behind its largest addend's first


class Descriptor(NamedTuple):
    """PTX ISA 9.7.15.5.1.2.2, "Matrix descriptor format". In bytes: where the matrix starts in shared memory, the leading and the
    stride dimension's byte offsets, and the swizzle, one of 0, 32, 64, 128."""

    address: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def decode(cls, word: int) -> "Descriptor":
        """Raises Refusal for a base offset and for unused bits, which the machine does not know."""
        if word & ~FIELDS:
            raise Refusal(
                f"matrix descriptor {word:#018x}: expected no base offset (bits 49 to 51) and zeros in unused bits, "
                f"got {word & ~FIELDS:#x}"
            )
        address, leading, stride = ((word >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        return cls(address, leading, stride, SWIZZLES[word >> 62])


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """The places of the bytes at these addresses of shared memory: bits 4, 5, 6 exclusive or bits 7, 8, 9 for 128 bytes, fewer
    for fewer (PTX ISA 5.5.7, "Swizzling modes")."""
    return addresses ^ (addresses >> 3 & max(swizzle - 16, 0))


def operand_addresses(
    descriptor: Descriptor, rows: int, columns: int, transposed: bool, itemsize: int = 2
) -> np.ndarray:
    """The byte address in shared memory of each element of an operand of wgmma, int64 (rows, columns).

    rows: M or N.  columns: K, which is 32 / itemsize.  transposed: MN-major, as imm-trans says.  itemsize: bytes of an element.
    """
    start = descriptor.address % PERIOD
    offsets = _operand_offsets(start, *descriptor[1:], rows, columns, transposed, itemsize)
    return offsets + (descriptor.address - start)


@lru_cache(maxsize=1024)
def _operand_offsets(
    start: int, leading: int, stride: int, swizzle: int, rows: int, columns: int, transposed: bool, itemsize: int
) -> np.ndarray:
    """`operand_addresses` from the last multiple of PERIOD on; higher bits of an address have no part in the swizzle."""
    span = swizzle or 16
    row, k = np.ogrid[:rows, :columns]
    if transposed:
        width = span // itemsize
        next_rows, next_k = (leading, stride) if swizzle else (stride, leading)
        offset = row % width * itemsize + row // width * next_rows + k % 8 * span + k // 8 * next_k
    else:
        byte = k * itemsize
        offset = row % 8 * span + row // 8 * stride + byte % 16 + byte // 16 * (16 if swizzle else leading)
    return swizzled(start + offset, swizzle)


# --- Registers -----------------------------------------------------------------------------------------------------------


def fragment_to_matrix(fragment: np.ndarray) -> np.ndarray:
    """(4 warps, N / 2 registers, 32 lanes) -> (64, N): wgmma's D (PTX ISA 9.7.15.5.1.1, "Register fragments")."""
    return fragment.take(_accumulator(fragment.shape[1])[0])


def matrix_to_fragment(matrix: np.ndarray) -> np.ndarray:
    """(64, N) -> (4 warps, N / 2 registers, 32 lanes): the inverse of `fragment_to_matrix`."""
    return matrix.take(_accumulator(matrix.shape[1] // 2)[1])


@lru_cache(maxsize=64)
def _accumulator(registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Places: of each element of D (64, N) in the flat fragment, and of each of the fragment's in the flat matrix."""
    warp, register, lane = np.ogrid[:4, :registers, :32]
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    places = row * (2 * registers) + column
    return places.ravel().argsort().reshape(64, -1), places


def matrix_addresses(lane_addresses: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """The byte addresses that ldmatrix and stmatrix .m8n8.b16 access, int64 (count, 32 lanes, 2): a register's low half first.

    lane_addresses: (32,), lane 8 m + r has the address of row r of matrix m.  count: 1, 2, 4 (.x1, .x2, .x4).  transposed:
    .trans. PTX ISA 9.7.14.5.15, "ldmatrix", and 9.7.14.5.16, "stmatrix".
    """
    lane, half = np.mgrid[:32, :2]
    row, column = lane // 4, 2 * (lane % 4) + half  # of what a lane holds
    row, byte = (column, 2 * row) if transposed else (row, 2 * column)  # of what lies in memory
    return lane_addresses.astype(np.int64).reshape(4, 8)[:count, row] + byte


# --- The product ---------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, kind: str = "bf16") -> np.ndarray:
    """A B^T + C, fp32 (64, N), of wgmma.mma_async.m64nNk16.f32.bf16.bf16, or .f16.f16 (PTX ISA 9.7.15.5.2).

    a: (64, 16), b: (N, 16), the bits of bf16 or f16, which is ``kind``, as uint16.  c: (64, N) fp32, or None for zeros.

    Sums are made in float64, which holds them exactly where no addend is 2^24 times another, and rounded once, to nearest. So a
    sum that fp32 holds is exact, and the bits are the same with every BLAS. A Hopper GPU aligns the 16 products and c to the
    largest exponent among them, cuts each off below 2^-25 of it, adds, and cuts the sum off to fp32 (P. Xie et al. 2025,
    arXiv:2511.10909; F. Khattak, M. Mikaitis 2025, arXiv:2512.07004).

    The two may differ by 11.5 * 2^-24 of |A| |B|^T + |C|, summed over all of K, for each wgmma that adds to a sum: 2^-25 for each
    of 17 addends that the GPU cuts off, 2^-23 for its sum, 2^-24 for the rounding here.
    """
    product = _wide(a, kind) @ _wide(b, kind).T
    if c is not None:
        product += c
    result = product.astype(np.float32)
    np.copyto(result, NAN, where=np.isnan(result))
    return result


def multiply_e4m3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A B^T + C, fp32 (64, N), of wgmma.mma_async.m64nNk32.f32.e4m3.e4m3.  a: (64, 32), b: (N, 32), e4m3's bits as uint8.

    As `multiply_in_14_bits`.
    """
    return multiply_in_14_bits(E4M3[a], E4M3[b], c)


@np.errstate(all="ignore")
def multiply_in_14_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A B^T + C, fp32 (M, N), of numbers that are e4m3 times powers of two.  a: (M, 32), b: (N, 32), c: (M, N).

    As a Hopper GPU does: the 32 products and c are cut off below 2^-13 of the largest exponent among them, and added exactly.
    """
    addends = np.concatenate((a[:, None] * b[None], c[..., None]), axis=2).astype(np.float64)
    unit = np.exp2(np.frexp(np.abs(addends).max(axis=2, keepdims=True))[1] - 1.0 - E4M3_FRACTION)
    result = (np.trunc(addends / unit) * unit).sum(axis=2).astype(np.float32)
    return np.where(np.isnan(result), NAN, result)


def _wide(words: np.ndarray, kind: str) -> np.ndarray:
    """The bits of bf16 or f16 as float64."""
    numbers = words.view(np.float16) if kind == "f16" else (words.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float64)
