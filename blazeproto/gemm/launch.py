"""A launch as the driver wants it: tensor maps, addresses and numbers in one block of bytes, passed to the kernel by value.

The C++ side is a struct (``RowsParams``, ``WeightParams``): tensor maps first, then 8-byte words, then 4-byte ints. A
:class:`Plan` is that struct for one shape; a launch packs it into a buffer of its thread with every address new, so that
none outlives the launch: weights may lie elsewhere by the next call. Encoding a tensor map takes 2 µs, having the driver
change its address 0.4; writing it (`Plan.writes_addresses`) costs next to nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from struct import Struct, pack_into
from typing import Any, NamedTuple

from blazeproto import driver
from blazeproto.driver import arguments
from blazeproto.gemm.compile import Kernel

MAP_BYTES = 128  # sizeof(CUtensorMap); 64-byte aligned
_BFLOAT16, _L2_PROMOTION_256B = 9, 3  # CUtensorMapDataType, CUtensorMapL2promotion
_SWIZZLE_128B = 3  # CUtensorMapSwizzle: a box's row has 64 elements
_ADDRESS_BITS = 0x7FFF_FFFF_FFF0  # those that a map's address may have


SLAB = 64  # rows and columns of an epilogue store (epilogue.cuh)
SHAPES = 1024  # whose plans are kept, of each product


@cache
def num_sms(device: int) -> int:
    """Multiprocessors of a device."""
    from cupy.cuda import runtime

    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)


def persistent_grid(device: int, cluster: int, tiles_at_most: int) -> int:
    """CTAs of a persistent kernel: one a multiprocessor, fewer for less work, whole clusters. tiles_at_most: a cluster's."""
    count = min(num_sms(device), tiles_at_most * cluster)
    return max(count // cluster, 1) * cluster


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

    fields: the struct as ``layout`` has it, made by the first launch, which knows addresses. A used map is two of them, its
    first 8 bytes and the rest.
    writes_addresses: whether launches write a map's address as its first 8 bytes. NVIDIA doesn't say what is where in a map,
    so the first launch compares such maps with what the driver makes; should they differ, the driver sets every address.
    """

    def __init__(
        self,
        kernel: Kernel,
        boxes: Sequence[Box | None],
        num_words: int,
        numbers: Sequence[int],
        *,
        grid: int,
        device: int,
    ) -> None:
        self.numbers, self.grid, self.block = tuple(numbers), (grid, 1), kernel.threads
        self.function, self.shared_bytes = kernel.handle(device), kernel.dynamic_smem
        self.maps = {MAP_BYTES * index: box for index, box in enumerate(boxes) if box is not None}  # by offset
        words_offset = MAP_BYTES * len(boxes)
        self.numbers_offset = words_offset + 8 * num_words
        size = -(-(self.numbers_offset + 4 * len(numbers)) // 64) * 64  # the struct's: a multiple of its alignment
        between = [f"{end - begin - 8}s" for begin, end in pairwise([-8, *self.maps, words_offset])]
        self.layout = Struct("Q".join(between) + f"{num_words}Q{size - self.numbers_offset}s")
        self.addresses = slice(1, 1 + 2 * len(self.maps), 2)  # among the fields
        self.words = slice(self.addresses.stop, self.addresses.stop + num_words)
        self.fields: list[Any] = []
        self.writes_addresses = False

    def launch(self, stream: int, map_addresses: Sequence[int], words: Sequence[int]) -> None:
        """map_addresses: of the tensor maps that are used, in order."""
        if not self.fields:
            self._encode(map_addresses)
        self._fill(map_addresses, words, self.writes_addresses)
        driver.launch(self.function, self.grid, self.block, self.shared_bytes, stream)

    def _fill(self, map_addresses: Sequence[int], words: Sequence[int], write_addresses: bool) -> None:
        """This thread's buffer with the struct."""
        fields = self.fields.copy()
        fields[self.words] = words
        if write_addresses:
            fields[self.addresses] = map_addresses
        self.layout.pack_into(arguments.bytes, 0, *fields)
        if not write_addresses:
            for offset, address in zip(self.maps, map_addresses, strict=True):
                _tensor_map_call(_tensor_maps()[1], arguments.address + offset, address)

    def _encode(self, map_addresses: Sequence[int]) -> None:
        buffer, size = arguments.bytes, self.layout.size
        buffer[:size] = bytes(size)
        for (offset, box), array in zip(self.maps.items(), map_addresses, strict=True):
            rank = len(box.shape)
            shape, strides = (ctypes.c_uint64 * rank)(*box.shape), (ctypes.c_uint64 * rank)(*box.strides)
            sizes, steps = (ctypes.c_uint32 * rank)(*box.box), (ctypes.c_uint32 * rank)(*[1] * rank)
            lists = (ctypes.addressof(values) for values in (shape, strides, sizes, steps))
            options = (0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0)  # no interleave; out of bounds reads as zeros
            _tensor_map_call(_tensor_maps()[0], arguments.address + offset, _BFLOAT16, rank, array, *lists, *options)
        pack_into(f"{len(self.numbers)}i", buffer, self.numbers_offset, *self.numbers)
        self.fields = list(self.layout.unpack(buffer[:size]))
        flipped = [address ^ _ADDRESS_BITS for address in map_addresses]
        self.writes_addresses = self._writes_as_the_driver(map_addresses) and self._writes_as_the_driver(flipped)

    def _writes_as_the_driver(self, map_addresses: Sequence[int]) -> bool:
        """Whether maps with these addresses are the driver's if the addresses are written."""
        made = []
        for write in (True, False):
            try:
                self._fill(map_addresses, self.fields[self.words], write)
            except RuntimeError:  # the driver refuses an address where nothing lies
                return False
            made.append(bytes(arguments.bytes[: self.layout.size]))
        return made[0] == made[1]
