"""A launch as the driver wants it: tensor maps and scalars in one block of bytes, passed to the kernel by value.

The C++ side is a struct (``RowsParams``, ``WeightParams``): tensor maps first, then pointers, then ints. :class:`Launcher` packs
that struct. Nothing in it outlives the launch: weights may lie elsewhere by the next call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from blazeproto.gemm.compile import Kernel

MAP_BYTES = 128  # sizeof(CUtensorMap); 64-byte aligned
_BFLOAT16, _L2_PROMOTION_256B = 9, 3  # CUtensorMapDataType, CUtensorMapL2promotion
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SWIZZLE = {64: 3, 32: 2}  # CUtensorMapSwizzle by the box's row: 128 or 64 bytes


class Box(NamedTuple):
    """What one TMA instruction moves: ``box`` elements of a bf16 tensor of ``shape`` at ``ptr``.

    Innermost dimension first, as TMA counts. ``strides`` are in bytes and leave out the innermost, which is contiguous.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def box_2d(ptr: int, columns: int, rows: int, box: tuple[int, int]) -> Box:
    """Of a row-major (rows, columns) matrix."""
    return Box(ptr, (columns, rows), (2 * columns,), box)


def box_3d(ptr: int, shape: tuple[int, int, int], box: tuple[int, int, int]) -> Box:
    """Of a dense tensor; ``shape`` innermost first."""
    return Box(ptr, shape, (2 * shape[0], 2 * shape[0] * shape[1]), box)


def box_4d(ptr: int, shape: tuple[int, int, int, int], box: tuple[int, int, int, int]) -> Box:
    """Of a dense tensor; ``shape`` innermost first."""
    x, y, z, _ = shape
    return Box(ptr, shape, (2 * x, 2 * x * y, 2 * x * y * z), box)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    library.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return library


class _Scratch(threading.local):
    """A thread's aligned buffer for the struct, and one for the arrays that the tensor-map encoder reads."""

    STRUCT_BYTES = 1024

    def __init__(self) -> None:
        raw = np.zeros(self.STRUCT_BYTES + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.bytes = raw[start : start + self.STRUCT_BYTES]
        self.address = self.bytes.ctypes.data
        self.encoder = np.zeros(5 + 4 + 3 + 3, np.uint64)  # shape, strides, box and element strides (both 5 x uint32)
        self.encoder_address = self.encoder.ctypes.data
        self.encoder.view(np.uint32)[24:29] = 1


_scratch = _Scratch()


def _encode(where: int, box: Box) -> None:
    rank, at = len(box.shape), _scratch.encoder_address
    struct.pack_into(f"{rank}Q", _scratch.encoder, 0, *box.shape)
    struct.pack_into(f"{rank - 1}Q", _scratch.encoder, 40, *box.strides)
    struct.pack_into(f"{rank}I", _scratch.encoder, 72, *box.box)
    options = (0, _SWIZZLE[box.box[0]], _L2_PROMOTION_256B, 0)  # no interleave; what is out of bounds reads as zeros
    arguments = (where, _BFLOAT16, rank, box.ptr, at, at + 40, at + 72, at + 96, *options)
    error = _driver().cuTensorMapEncodeTiled(*arguments)
    if error == _INVALID_CONTEXT:  # a thread that has made no CUDA call yet, such as the autograd engine's
        import cupy

        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        error = _driver().cuTensorMapEncodeTiled(*arguments)
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error} for {box}")


class Stream(NamedTuple):
    """What CuPy's launch needs of a stream: its raw cudaStream_t."""

    ptr: int


def launch(
    kernel: Kernel,
    boxes: Sequence[Box | None],
    pointers: Sequence[int],
    numbers: Sequence[int],
    *,
    grid: int,
    block: int,
    stream: int,
) -> None:
    """Pack the struct (tensor maps, then 8-byte pointers, then 4-byte ints) and launch ``kernel`` with it."""
    for index, box in enumerate(boxes):
        if box is not None:
            _encode(_scratch.address + index * MAP_BYTES, box)
    offset = len(boxes) * MAP_BYTES
    struct.pack_into(f"{len(pointers)}Q{len(numbers)}i", _scratch.bytes, offset, *pointers, *numbers)
    used = offset + 8 * len(pointers) + 4 * len(numbers)
    size = -(-used // 64) * 64  # the struct's size: a multiple of its alignment
    argument: Any = _scratch.bytes[:size].view(_void(size))
    kernel.function()((grid, 1, 1), (block, 1, 1), (argument,), kernel.dynamic_smem, Stream(stream))


@lru_cache(maxsize=16)
def _void(size: int) -> np.dtype[np.void]:
    """A structured type of ``size`` bytes, which CuPy passes by value."""
    return np.dtype([("bytes", np.uint8, (size,))])
