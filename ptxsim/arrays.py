"""NumPy arrays in the memory that kernels see. They stay the caller's: kernels write to them in place.

arrays = Arrays()
out = arrays.empty((64,), np.float32)
Stepper(Program.read(ptx), None, (1,), (64,), arrays.address(out).to_bytes(8, "little"), memory=arrays.memory).finish()
"""

from typing import Any

import numpy as np

from ptxsim.memory import Memory


class Arrays:
    """A `Memory` of arrays: made here, or the caller's, which are added when `address` is first asked for them."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.known: dict[int, tuple[np.ndarray, int]] = {}  # by where the host has them

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array that nobody has written: a kernel that reads it gets an error. Any NumPy shape and dtype."""
        return self.add(np.empty(shape, dtype), written=False)

    def add(self, array: np.ndarray, written: bool = True, name: str = "") -> np.ndarray:
        """A contiguous array, which is to be no part of a larger one.  written, name: as in `address`."""
        said = f"{name or f'array {len(self.known)}'}, {array.dtype.name}{list(array.shape)}"
        address = self.memory.add(array, said, written=written, read_only=not array.flags.writeable)
        self.known[_place(array)] = array, address
        return array

    def address(self, array: np.ndarray, name: str = "", *, written: bool = True) -> int:
        """The address of the first element of an array or a part of one.

        name: what messages call it.  written: False for a new one whose contents nobody may read before they are written.
        ValueError if it overlaps an array that was added before, and is no part of it.
        """
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        begin, end = _place(root), _place(root) + root.nbytes
        for start, (known, address) in self.known.items():
            if start <= begin and end <= start + known.nbytes:
                return address + _place(array) - start
            if start < end and begin < start + known.nbytes:
                raise ValueError(f"{name or 'array'}: expected memory of its own, got some that another array has too")
        self.add(root, written, name)
        return self.known[begin][1] + _place(array) - begin


def _place(array: np.ndarray) -> int:
    """Where the host has its first element."""
    return int(array.__array_interface__["data"][0])
