"""Tensor copies against NumPy: boxes that reach past every edge, the rules of the ISA."""

from itertools import product as every
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mutants import check_all, mutated

from ptxsim import maps

GLOBAL = 0x7F00_0000_0000  # where the tensor begins


def bytes_at(addresses: np.ndarray, size: int) -> np.ndarray:
    return addresses[:, None] + np.arange(size)


def load(
    t: ModuleType, made: Any, coordinates: tuple[int, ...], memory: np.ndarray, shared: np.ndarray, at: int
) -> None:
    """One load; ``memory`` begins at GLOBAL."""
    origin, target, inside = t.transfer(made, coordinates, at)
    assert origin.dtype == target.dtype == np.int64 and inside.dtype == np.bool_
    size = made.bytes // len(inside)
    assert size * len(inside) == made.bytes and len(origin) == len(target) == len(inside)
    shared[bytes_at(target[~inside], size)] = 0
    shared[bytes_at(target[inside], size)] = memory.reshape(-1).view(np.uint8)[bytes_at(origin[inside] - GLOBAL, size)]


def store(
    t: ModuleType, made: Any, coordinates: tuple[int, ...], memory: np.ndarray, shared: np.ndarray, at: int
) -> None:
    target, origin, inside = t.transfer(made, coordinates, at)
    size = made.bytes // len(inside)
    memory.reshape(-1).view(np.uint8)[bytes_at(target[inside] - GLOBAL, size)] = shared[bytes_at(origin[inside], size)]


# --- Boxes past the edges --------------------------------------------------------------------------------------------------


def indices(
    tensor: np.ndarray, box: tuple[int, ...], coordinates: tuple[int, ...]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tensor's indices that the box covers in each dimension, outermost first, and their places in the box."""
    made = []
    for extent, size, begin in zip(tensor.shape, box[::-1], coordinates[::-1], strict=True):
        places = np.array([i for i in range(size) if 0 <= begin + i < extent], np.int64)
        made.append((places + begin, places))
    return made


def expected(tensor: np.ndarray, box: tuple[int, ...], coordinates: tuple[int, ...]) -> np.ndarray:
    """The box, zeros outside the tensor; outermost dimension first."""
    made, (inside, places) = np.zeros(box[::-1], tensor.dtype), zip(*indices(tensor, box, coordinates), strict=True)
    made[np.ix_(*places)] = tensor[np.ix_(*inside)]
    return made


def unswizzled(shared: np.ndarray, at: int, size: int, swizzle: int) -> np.ndarray:
    """The bytes in order. A chunk's place in its 128 bytes is turned by the number of the 128 bytes in shared memory."""
    chunk = at // 16 + np.arange(size // 16)
    rows = {128: 8, 64: 4, 32: 2, 0: 1}[swizzle]
    return shared.reshape(-1, 16)[chunk // 8 * 8 + (chunk % 8 ^ chunk // 8 % rows)].ravel()


BOXES = [  # a box's row is the swizzle's; rows of the tensors of 77 and 14 elements end within 16 bytes
    (np.uint16, (12, 72), (64, 8), 128),
    (np.uint16, (5, 7, 96), (32, 4, 3), 64),
    (np.uint16, (20, 77), (64, 8), 128),
    (np.uint16, (5, 40), (64, 8), 128),  # the box is larger
    (np.float32, (3, 2, 9, 14), (8, 4, 2, 2), 32),
    (np.uint8, (2, 2, 3, 4, 200), (48, 2, 2, 2, 1), 0),
]


def cases() -> Any:
    """Tensors, boxes, and corners of the box: inside, past each edge, past all, and wholly outside."""
    for dtype, shape, box, swizzle in BOXES:
        size = np.dtype(dtype).itemsize
        row_bytes = -(-shape[-1] * size // 16) * 16  # a stride is a multiple of 16
        memory = np.random.default_rng(0).integers(1, 200, (*shape[:-1], row_bytes // size)).astype(dtype)
        strides = tuple(int(np.prod(memory.shape[-d:])) * size for d in range(1, len(shape)))
        columns = (-16, -3, 0, 16, shape[-1] - box[0] + 8, shape[-1] - 8, shape[-1] - 3, 300, -box[0])
        rows = (-1, 0, 1, shape[-2] - 1, shape[-2], -box[1])
        for number, corner in enumerate(every(columns, rows)):
            rest = tuple((number + d) % 4 - 1 for d in range(len(shape) - 2))
            yield memory, (shape[::-1], strides, box, size, swizzle), (*corner, *rest)


def check_loads_past_the_edges(t: ModuleType) -> None:
    for number, (memory, given, corner) in enumerate(cases()):
        shape, _, box, size, swizzle = given
        shared, at = np.full(1 << 14, 0xFF, np.uint8), 1024 + 128 * (number % 5)
        load(t, t.TensorMap(GLOBAL, *given), corner, memory, shared, at)
        count = int(np.prod(box)) * size
        tensor = memory[..., : shape[0]]
        got = unswizzled(shared, at, count, swizzle).view(memory.dtype).reshape(box[::-1])
        assert np.array_equal(got, expected(tensor, box, corner)), (given, corner)
        others = np.ones(1 << 14, bool)
        others[at // 128 * 128 : -(-(at + count) // 128) * 128] = False
        assert np.all(shared[others] == 0xFF)


def check_stores_past_the_edges(t: ModuleType) -> None:
    for number, (memory, given, corner) in enumerate(cases()):
        made, at = t.TensorMap(GLOBAL, *given), 1024 + 128 * (number % 5)
        shared, before = np.full(1 << 14, 0xFF, np.uint8), memory.copy()
        load(t, made, (0,) * len(corner), memory, shared, at)
        store(t, made, corner, memory, shared, at)
        tensor, right = before[..., : given[0][0]], before.copy()
        inside, places = zip(*indices(tensor, made.box, corner), strict=True)
        right[np.ix_(*inside)] = expected(tensor, made.box, (0,) * len(corner))[np.ix_(*places)]
        assert np.array_equal(memory, right), (given, corner)  # also what pads a row


def check_pieces(t: ModuleType) -> None:
    """16 bytes where that is right, an element elsewhere; the whole box counts."""
    made = t.TensorMap(GLOBAL, (77, 50), (160,), (64, 8), 2)
    assert made.bytes == 1024
    for corner, pieces in (((0, 0), 64), ((8, -4), 64), ((16, 0), 512), ((3, 0), 512), ((-64, 90), 64)):
        assert len(t.transfer(made, corner, 0)[2]) == pieces, corner
    made = t.TensorMap(GLOBAL, (72, 50), (160,), (64, 8), 2)
    assert len(t.transfer(made, np.array([16, 2**30 + 8], np.int32), 128)[2]) == 64


CHECKS = (
    check_loads_past_the_edges,
    check_stores_past_the_edges,
    check_pieces,
)


@pytest.mark.parametrize("check", CHECKS)
def test_tensor_map(check: Any) -> None:
    check(maps)


MAP: dict[str, Any] = {
    "address": GLOBAL, "shape": (64, 50), "strides": (128,), "box": (64, 8), "itemsize": 2, "swizzle": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"address": GLOBAL + 8}, "address: expected a multiple of 16"),
        ({"shape": (), "strides": (), "box": ()}, "shape: expected 1 to 5 dimensions, got"),
        ({"shape": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "shape: expected 1 to 5 dimensions, got"),
        ({"shape": (64, 0)}, "shape: expected sizes from 1 to 2"),
        ({"shape": (64, 2**32 + 1)}, "shape: expected sizes from 1 to 2"),
        ({"strides": (128, 128)}, "strides: expected 1, of all dimensions but the innermost"),
        ({"strides": (136,)}, "strides: expected multiples of 16 below"),
        ({"strides": (2**40,)}, "strides: expected multiples of 16 below"),
        ({"box": (64,)}, "box: expected 2 dimensions"),
        ({"box": (64, 0)}, "box: expected sizes from 1 to 256"),
        ({"box": (64, 257)}, "box: expected sizes from 1 to 256"),
        ({"itemsize": 3}, "itemsize: expected 1, 2, 4 or 8 bytes, got 3"),
        ({"swizzle": 96}, "swizzle: expected one of"),
        ({"box": (60, 8), "swizzle": 0}, "box: expected rows of a multiple of 16 bytes, got 120 bytes"),
        ({"box": (128, 8)}, "box: expected rows of the swizzle's 128 bytes, got 256 bytes"),
        ({"box": (32, 8)}, "box: expected rows of the swizzle's 128 bytes, got 64 bytes"),
    ],
)
def test_a_map_against_the_rules_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor map's {message}"):
        maps.TensorMap(**MAP | changed)


def test_a_copy_against_the_rules_is_refused() -> None:
    made = maps.TensorMap(**MAP)
    with pytest.raises(ValueError, match="coordinates: expected 2, as the tensor map's dimensions, got 3"):
        maps.transfer(made, (0, 0, 0), 0)
    with pytest.raises(ValueError, match="shared address of a tensor copy: expected a multiple of 128, got 0x440"):
        maps.transfer(made, (0, 0), 1024 + 64)


MUTANTS = [
    ("return prod(self.box) * self.itemsize", "return prod(self.box)"),
    ("first[0] + box[0] > shape[0]", "first[0] + box[0] >= shape[0] + 64"),
    ("past_edge or first[0] * itemsize % CHUNK", "past_edge"),
    ("start = shared_address % PERIOD", "start = 0"),
    ("max(-begin, 0)", "0"),
    ("max(size - begin, 0)", "size"),
    ("max(size - begin, 0)", "size - begin"),
    ("limits[0][0] // elements", "0"),
    ("limits[0][1] // elements", "limits[0][1]"),
    ("limits[:0:-1]", "limits[1:]"),
    ("first[0] * itemsize + sum", "first[0] + sum"),
    ("tensor_map.address + corner", "tensor_map.address"),
    ("tensor_map.strides, strict=True))", "tensor_map.strides[::-1], strict=True))"),
    ("(shared_address - start)", "shared_address"),
    ("[*strides[::-1], piece]", "[*strides, piece]"),
    ("[*strides[::-1], piece]", "[*strides[::-1], itemsize]"),
    ("swizzled(start + piece * np.arange(in_global.size, dtype=np.int64), swizzle)",
     "start + piece * np.arange(in_global.size, dtype=np.int64)"),
    ("swizzled(start + piece * np", "start + swizzled(piece * np"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_wrong_formula_is_seen(old: str, new: str) -> None:
    mutant = mutated(maps, old, new)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_all(CHECKS, mutant)
