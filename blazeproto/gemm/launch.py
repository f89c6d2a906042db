"""A launch as the driver wants it: tensor maps, addresses and numbers in one block of bytes, passed to the kernel by value.

The C++ side is a struct, which `Params` describes: tensor maps first, then 8-byte words, then 4-byte ints. A
`Plan` is that struct for one shape. A launch packs it into a buffer of its thread with every address new, so that
none outlives the launch: weights may lie elsewhere by the next call. Encoding a tensor map takes 2 µs, having the driver
change its address 0.4.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from math import prod
from struct import Struct, pack_into
from typing import Any, NamedTuple

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import BF16, Element
from blazeproto.runtime import driver, optional
from blazeproto.runtime.driver import arguments
from blazeproto.runtime.target import FIRST_DEVICE, Handle, is_target

MAP_BYTES = 128  # sizeof(CUtensorMap); 64-byte aligned
_L2_PROMOTION_256B = 3  # CUtensorMapL2promotion
ROW_EDGE = 1 << 30  # cuda/ptx.cuh has it too
_SWIZZLE_128B = 3  # CUtensorMapSwizzle: a box's row has 64 elements


@cache
def num_sms(device: int) -> int:
    """Multiprocessors of a device."""
    if is_target(device):
        return device - FIRST_DEVICE
    runtime = optional.cupy().cuda.runtime
    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)


def persistent_grid(device: int, cluster: int, tiles_at_most: int) -> int:
    """CTAs of a persistent kernel: one a multiprocessor, fewer for less work, whole clusters. tiles_at_most: a cluster's."""
    count = min(num_sms(device), tiles_at_most * cluster)
    return max(count // cluster, 1) * cluster


class Box(NamedTuple):
    """The box that one TMA instruction moves: ``box`` elements of a tensor of ``shape``, wherever it lies.

    Innermost dimension first, as TMA counts. ``strides`` are in bytes and leave out the innermost, which is contiguous.
    ragged: whether a copy may end at any row (`rows_box`).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: Element = BF16
    ragged: bool = False


def dense_box(shape: tuple[int, ...], box: tuple[int, ...], element: Element = BF16) -> Box:
    """For a tensor without gaps; ``shape`` innermost first: (columns, rows) of a row-major (rows, columns) matrix."""
    return Box(shape, tuple(element.bytes * prod(shape[:dim]) for dim in range(1, len(shape))), box, element)


def rows_box(tensor: Box) -> Box:
    """The same tensor with its rows, dimension 1, counted by three coordinates, so that a copy may end at any row.

    The copy of ``there`` rows of a box from ``row`` on begins at (ROW_EDGE - there, row + there, ROW_EDGE). The first of these
    has ROW_EDGE rows, and TMA clips at its edge: the box's other rows lie past it, wherever the tensor goes on. The first two add
    up to row + ROW_EDGE; the third one's stride takes ROW_EDGE rows away again, because addresses wrap at 2^64. A map that began
    so much before the tensor would be simpler, but TMA wants memory where a map begins.
    """
    (columns, rows, *shape), (row, *strides) = tensor.shape, tensor.strides
    (width, height, *box), element = tensor.box, tensor.element
    counts, boxes = (columns, ROW_EDGE, rows + 1, ROW_EDGE + 1, *shape), (width, height, 1, 1, *box)
    return Box(counts, (row, row, 2**64 // ROW_EDGE - row, *strides), boxes, element, ragged=True)


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


class Params(NamedTuple):
    """A kernel's argument, a C++ struct: the names of its tensor maps, 8-byte words and ints, in the order of the file.

    A test compiles a kernel that compares the two, so that they cannot drift apart (tests/gemm/test_compile.py).
    """

    struct: str
    header: str
    maps: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def words_offset(self) -> int:
        return MAP_BYTES * len(self.maps)

    @property
    def numbers_offset(self) -> int:
        return self.words_offset + 8 * len(self.words)

    @property
    def size(self) -> int:
        """Bytes: a multiple of a tensor map's alignment."""
        return -(-(self.numbers_offset + 4 * len(self.numbers)) // 64) * 64


class Plan:
    """A kernel with one struct as its argument, for one shape on one device: all but the addresses.

    boxes: of the struct's tensor maps; None for one that the kernel doesn't use.  numbers: the struct's ints. An architecture
    without tensor maps gets a matrix in each one's place (cuda/ampere/mainloop.cuh): its address, then its strides.
    """

    def __init__(
        self,
        kernel: Kernel,
        params: Params,
        boxes: Sequence[Box | None],
        numbers: Sequence[int],
        *,
        grid: int,
        device: int,
    ) -> None:
        assert len(boxes) == len(params.maps) and len(numbers) == len(params.numbers)
        assert params.size <= arguments.BYTES
        self.boxes = {MAP_BYTES * index: box for index, box in enumerate(boxes) if box is not None}  # by offset
        self.words, self.words_offset = Struct(f"{len(params.words)}Q"), params.words_offset
        self.template = bytearray(
            params.size
        )  # the struct, without addresses; its maps are encoded by the first launch
        pack_into(f"{len(numbers)}i", self.template, params.numbers_offset, *numbers)
        self.launch = (kernel.handle(device), (grid, 1), kernel.threads, kernel.dynamic_smem)
        self.encoded = False
        self.kernel, self.on_target = kernel, is_target(device)
        if not kernel.arch.tensor_maps:
            for offset, box in self.boxes.items():
                strides = (box.strides[0], *box.strides[3:]) if box.ragged else box.strides
                pack_into(f"{len(strides)}q", self.template, offset + 8, *strides)

    def fill(
        self, map_addresses: Sequence[int], words: Sequence[int]
    ) -> tuple[int | Handle, tuple[int, int], int, int]:
        """Write the struct into this thread's buffer; the arguments of `driver.launch`, but for the stream.

        map_addresses: of the tensor maps that are used, in order.
        """
        if self.on_target:
            return self._for_target(map_addresses, words)
        buffer, size = arguments.bytes, len(self.template)
        buffer[:size] = self.template
        if not self.kernel.arch.tensor_maps:
            self._pack(buffer, map_addresses, words)
            return self.launch
        encode, replace = _tensor_maps()
        for (offset, box), address in zip(self.boxes.items(), map_addresses, strict=True):
            if self.encoded:
                _tensor_map_call(replace, arguments.address + offset, address)
            else:
                _tensor_map_call(encode, arguments.address + offset, *_description(box, address))
        self.words.pack_into(buffer, self.words_offset, *words)
        if not self.encoded:
            self.template[: self.words_offset] = buffer[: self.words_offset]
            self.encoded = True
        return self.launch

    def _pack(self, struct: bytearray | memoryview, map_addresses: Sequence[int], words: Sequence[int]) -> None:
        """Addresses into a struct that has, in the place of a tensor map, a matrix's address and strides."""
        for offset, address in zip(self.boxes, map_addresses, strict=True):
            pack_into("q", struct, offset, address)
        self.words.pack_into(struct, self.words_offset, *words)

    def _for_target(
        self, map_addresses: Sequence[int], words: Sequence[int]
    ) -> tuple[Handle, tuple[int, int], int, int]:
        """As `fill`; the struct, and each tensor map as its box and address, go with the kernel's handle."""
        struct = self.template.copy()
        if not self.kernel.arch.tensor_maps:
            self._pack(struct, map_addresses, words)
            return Handle(self.kernel, bytes(struct)), *self.launch[1:]
        self.words.pack_into(struct, self.words_offset, *words)
        boxes = {at: (box, address) for (at, box), address in zip(self.boxes.items(), map_addresses, strict=True)}
        return Handle(self.kernel, bytes(struct), boxes), *self.launch[1:]


def _description(box: Box, address: int) -> tuple[Any, ...]:
    """The arguments of cuTensorMapEncodeTiled: no interleave, and what is out of bounds reads as zeros."""
    rank = len(box.shape)
    longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    lists = (longs(*box.shape), longs(*box.strides), ints(*box.box), ints(*[1] * rank))
    return box.element.tma, rank, address, *lists, 0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0
