"""Tensor maps, and what one tensor copy of TMA moves: which bytes of global memory go to which of shared memory, or back.

Tiled mode (PTX ISA 5.5, "Tensors", and 9.7.9.27, "cp.async.bulk.tensor"), of maps as cuTensorMapEncodeTiled makes them without
interleave and element strides. This is address arithmetic alone; copies check the memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ptxsim.checks import expect
from ptxsim.matrices import PERIOD, SWIZZLES, swizzled
from ptxsim.memory import Refusal

CHUNK = 16  # bytes: what a swizzle moves as one
SHARED_ALIGNMENT = 128


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that a copy moves. Dimensions are counted from the innermost.

    address: of the tensor, in bytes, a multiple of 16.  shape: in elements.  strides: in bytes, multiples of 16, without
    the innermost dimension's, which is contiguous.  box: in elements, up to 256 in a dimension; a row has a multiple of 16 bytes.
    itemsize: bytes of an element.  swizzle: 0, 32, 64 or 128 bytes; a box's row has just as many (cuTensorMapEncodeTiled allows
    fewer, which is not modelled).  fill_nan: loads fill with NaN what lies outside the tensor, instead of zeros.

    Raises ValueError naming what was expected.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    itemsize: int
    swizzle: int = 128
    fill_nan: bool = False

    def __post_init__(self) -> None:
        rank, strides, box = len(self.shape), self.strides, self.box
        row = box[0] * self.itemsize if box else 0
        rules = (  # of cuTensorMapEncodeTiled
            ("address", self.address % CHUNK == 0, "a multiple of 16", self.address),
            ("shape", 1 <= rank <= 5, "1 to 5 dimensions", self.shape),
            ("shape", all(1 <= size <= 2**32 for size in self.shape), "sizes from 1 to 2^32", self.shape),
            ("strides", len(strides) == rank - 1, f"{rank - 1}, of all dimensions but the innermost", strides),
            ("strides", all(s % CHUNK == 0 <= s < 2**40 for s in strides), "multiples of 16 below 2^40", strides),
            ("box", len(box) == rank, f"{rank} dimensions, as the shape has", box),
            ("box", all(1 <= size <= 256 for size in box), "sizes from 1 to 256", box),
            ("itemsize", self.itemsize in (1, 2, 4, 8), "1, 2, 4 or 8 bytes", self.itemsize),
            ("swizzle", self.swizzle in SWIZZLES, f"one of {sorted(SWIZZLES)} bytes", self.swizzle),
            ("box", row % CHUNK == 0, "rows of a multiple of 16 bytes", f"{row} bytes"),
            ("box", row == (self.swizzle or row), f"rows of the swizzle's {self.swizzle} bytes", f"{row} bytes"),
        )
        for what, holds, expected, got in rules:
            expect(f"tensor map's {what}", holds, expected, got)

    @property
    def bytes(self) -> int:
        """The bytes that a load adds by complete_tx: the whole box, including its part outside the tensor."""
        return prod(self.box) * self.itemsize


def transfer(
    tensor_map: TensorMap, coordinates: Sequence[int], shared_address: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of a box: byte addresses in global and in shared memory, int64, and whether a piece lies inside the
    tensor, bool. 1-D each, in the box's order.

    coordinates: of the box's first element, innermost first, signed.  shared_address: in bytes, a multiple of 128.

    A piece has ``tensor_map.bytes // len(inside)`` bytes: 16, or one element where pieces of 16 bytes would lie across the
    tensor's edge or not begin at multiples of 16 in global memory. For a piece outside, a load writes zeros (NaN with
    fill_nan) to shared memory, a store writes nothing, and its global address means nothing. The swizzle goes by the absolute
    shared address, so a box may begin at any multiple of 128.

    Raises Refusal for a wrong number of coordinates and a misaligned shared address.
    """
    shape, box, itemsize = tensor_map.shape, tensor_map.box, tensor_map.itemsize
    expect(
        "coordinates",
        len(coordinates) == len(shape),
        f"{len(shape)}, as the tensor map's dimensions",
        len(coordinates),
        Refusal,
    )
    expect(
        "shared address of a tensor copy",
        shared_address % SHARED_ALIGNMENT == 0,
        "a multiple of 128",
        f"{shared_address:#x}",
        Refusal,
    )
    first = [int(c) for c in coordinates]
    past_edge = shape[0] * itemsize % CHUNK and first[0] + box[0] > shape[0]
    piece = itemsize if past_edge or first[0] * itemsize % CHUNK else CHUNK
    start = shared_address % PERIOD
    global_offsets, shared_offsets = _offsets(box, tensor_map.strides, itemsize, tensor_map.swizzle, piece, start)
    inside = np.zeros((*box[:0:-1], box[0] * itemsize // piece), bool)
    limits = [(max(-begin, 0), max(size - begin, 0)) for begin, size in zip(first, shape, strict=True)]
    elements = piece // itemsize
    inner = slice(limits[0][0] // elements, limits[0][1] // elements)
    inside[(*(slice(*limit) for limit in limits[:0:-1]), inner)] = True
    corner = first[0] * itemsize + sum(c * stride for c, stride in zip(first[1:], tensor_map.strides, strict=True))
    at = (tensor_map.address + corner + 2**63) % 2**64 - 2**63  # addresses wrap
    return global_offsets + at, shared_offsets + (shared_address - start), inside.ravel()


@lru_cache(maxsize=512)
def _offsets(
    box: tuple[int, ...], strides: tuple[int, ...], itemsize: int, swizzle: int, piece: int, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece lies, in bytes: in global memory from the box's first element on, in shared memory from the multiple of
    PERIOD on, ``start`` bytes behind which the box begins."""
    pieces = (*box[:0:-1], box[0] * itemsize // piece)
    index = np.indices(pieces, dtype=np.int64).reshape(len(box), -1)
    in_global = np.array([*strides[::-1], piece]) @ index
    return in_global, swizzled(start + piece * np.arange(in_global.size, dtype=np.int64), swizzle)
