"""A launch as the driver wants it: tensor maps, addresses and numbers in one block of bytes, passed to the kernel by value.

The C++ side is a struct (``RowsParams``, ``WeightParams``): tensor maps first, then 8-byte words, then 4-byte ints. A
:class:`Plan` is that struct for one shape; a launch copies it to a buffer of its thread and writes every address, so that
none outlives the launch: weights may lie elsewhere by the next call. Encoding a tensor map takes 2 µs, changing its address
0.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from struct import Struct, pack_into
from typing import Any, NamedTuple

from blazeproto import driver
from blazeproto.driver import arguments
from blazeproto.gemm.compile import Kernel

MAP_BYTES = 128  # sizeof(CUtensorMap); 64-byte aligned
_BFLOAT16, _L2_PROMOTION_256B = 9, 3  # CUtensorMapDataType, CUtensorMapL2promotion
_SWIZZLE_128B = 3  # CUtensorMapSwizzle: a box's row has 64 elements


class Box(NamedTuple):
    """What one TMA instruction moves: ``box`` elements of a bf16 tensor of ``shape``, wherever it lies.

    Innermost dimension first, as TMA counts. ``strides`` are in bytes and leave out the innermost, which is contiguous.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def box_2d(columns: int, rows: int, box: tuple[int, int]) -> Box:
    """Of a row-major (rows, columns) matrix."""
    return Box((columns, rows), (2 * columns,), box)


def box_3d(shape: tuple[int, int, int], box: tuple[int, int, int]) -> Box:
    """Of a dense tensor; ``shape`` innermost first."""
    return Box(shape, (2 * shape[0], 2 * shape[0] * shape[1]), box)


def box_4d(shape: tuple[int, int, int, int], box: tuple[int, int, int, int]) -> Box:
    """Of a dense tensor; ``shape`` innermost first."""
    x, y, z, _ = shape
    return Box(shape, (2 * x, 2 * x * y, 2 * x * y * z), box)


# --- Tensor maps -----------------------------------------------------------------------------------------------------


@cache
def _tensor_maps() -> tuple[Any, Any]:
    """cuTensorMapEncodeTiled and cuTensorMapReplaceAddress."""
    library = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter lock: the calls are short
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    encode, replace = library.cuTensorMapEncodeTiled, library.cuTensorMapReplaceAddress
    encode.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    replace.argtypes = [pointer, pointer]
    return encode, replace


def _tensor_map_call(function: Any, *arguments: int) -> None:
    error = function(*arguments)
    if error == driver.INVALID_CONTEXT:
        driver.make_context()
        error = function(*arguments)
    if error:
        raise RuntimeError(f"{function.__name__} failed with CUDA error {error}")


# --- Launches --------------------------------------------------------------------------------------------------------


class Plan:
    """A kernel with one struct as its argument, for one shape on one device: all but the addresses.

    boxes: of the struct's tensor maps; None for one that the kernel doesn't use.  num_words: how many 8-byte words follow.
    numbers: the ints after them.
    """

    def __init__(
        self,
        kernel: Kernel,
        boxes: Sequence[Box | None],
        num_words: int,
        numbers: Sequence[int],
        *,
        grid: int,
        block: int,
        device: int,
    ) -> None:
        self.boxes, self.numbers, self.grid, self.block = tuple(boxes), tuple(numbers), (grid, 1), block
        self.function, self.shared_bytes = kernel.handle(device), kernel.dynamic_smem
        self.map_offsets = [MAP_BYTES * index for index, box in enumerate(boxes) if box is not None]
        self.words, self.words_offset = Struct(f"{num_words}Q"), MAP_BYTES * len(boxes)
        used = self.words_offset + 8 * num_words + 4 * len(self.numbers)
        self.size = -(-used // 64) * 64  # the struct's: a multiple of its alignment
        self.extent = slice(self.size)
        self.struct: bytes | None = None  # made by the first launch, which knows addresses

    def launch(self, stream: int, map_addresses: Sequence[int], words: Sequence[int]) -> None:
        """map_addresses: of the tensor maps that are used, in order."""
        buffer, address, replace = arguments.bytes, arguments.address, _tensor_maps()[1]
        if self.struct is None:
            self.struct = self._encode(map_addresses)
        buffer[self.extent] = self.struct
        for offset, array in zip(self.map_offsets, map_addresses, strict=True):
            if replace(address + offset, array):
                _tensor_map_call(replace, address + offset, array)
        self.words.pack_into(buffer, self.words_offset, *words)
        driver.launch(self.function, self.grid, self.block, self.shared_bytes, stream)

    def _encode(self, map_addresses: Sequence[int]) -> bytes:
        buffer, address = arguments.bytes, arguments.address
        buffer[self.extent] = bytes(self.size)
        boxes = [box for box in self.boxes if box is not None]
        for offset, box, array in zip(self.map_offsets, boxes, map_addresses, strict=True):
            rank = len(box.shape)
            shape, strides = (ctypes.c_uint64 * rank)(*box.shape), (ctypes.c_uint64 * rank)(*box.strides)
            sizes, steps = (ctypes.c_uint32 * rank)(*box.box), (ctypes.c_uint32 * rank)(*[1] * rank)
            lists = (ctypes.addressof(values) for values in (shape, strides, sizes, steps))
            options = (0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0)  # no interleave; out of bounds reads as zeros
            _tensor_map_call(_tensor_maps()[0], address + offset, _BFLOAT16, rank, array, *lists, *options)
        pack_into(f"{len(self.numbers)}i", buffer, self.words_offset + self.words.size, *self.numbers)
        return bytes(buffer[self.extent])
