"""Numba's simulator made strict, for kernels of dynamic shared memory: what a GPU would only do now and then is an error.

- An index outside an array, negative ones too (NumPy would count from the end).
- A global element written twice by one kernel.
- A race in shared memory: between two barriers an element is written by one thread and read or written by another.
  Only atomics may meet. Elements of all types lie in the same memory, of which 16 bits are looked at by themselves.
- A shared element used before it was written: each block's memory begins as GARBAGE.

    with strict(): cuda.jit(function)[blocks, threads, 0, shared_bytes](*arrays)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from numba.cuda.simulator import kernel, kernelapi
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

GARBAGE = 0x7777  # in each 16 bits
NOBODY, MANY = -1, -2


class Race(Exception):
    """Two threads met in shared memory."""


class Memory:
    """A block's dynamic shared memory, in 16 bits each, and who touched them since the last barrier."""

    def __init__(self, size: int) -> None:
        self.halves = np.full(size, GARBAGE, np.uint16)
        self.written: list[tuple[int, int, bool]] = [(0, NOBODY, False)] * size  # interval, thread, by an atomic
        self.read: list[tuple[int, int]] = [(0, NOBODY)] * size

    def reading(self, place: int, me) -> None:
        interval, writer, _ = self.written[place]
        if interval == me.interval and writer != me.thread_id:
            raise Race(f"byte {2 * place}: thread {me.thread_id} reads what thread {writer} writes")
        interval, reader = self.read[place]
        same = interval != me.interval or reader == me.thread_id
        self.read[place] = (me.interval, me.thread_id if same else MANY)

    def writing(self, place: int, me, atomic: bool) -> None:
        interval, reader = self.read[place]
        if interval == me.interval and reader != me.thread_id:
            raise Race(f"byte {2 * place}: thread {me.thread_id} writes what thread {reader} reads")
        interval, writer, with_atomic = self.written[place]
        alone = interval != me.interval or writer == me.thread_id
        if not alone and not (atomic and with_atomic):
            raise Race(f"byte {2 * place}: thread {me.thread_id} writes beside thread {writer}")
        self.written[place] = (me.interval, me.thread_id if alone else MANY, atomic)


class View:
    """What cuda.shared.array(0, …) returns, or a slice of it."""

    def __init__(self, memory: Memory, elements: np.ndarray, first: int, last: int) -> None:
        self.memory, self.elements, self.first, self.last = memory, elements, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def _place(self, index: int) -> int:
        if not 0 <= int(index) < len(self):
            raise IndexError(f"shared index {index} of {len(self)}")
        return self.first + int(index)

    def _halves(self, place: int) -> range:
        width = self.elements.itemsize // 2
        return range(place * width, (place + 1) * width)

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            if stop < (index.stop or 0):
                raise IndexError(f"shared slice {index} of {len(self)}")
            return View(self.memory, self.elements, self.first + start, self.first + stop)
        place = self._place(index)
        for half in self._halves(place):
            self.memory.reading(half, threading.current_thread())
        return self.elements[place]

    def __setitem__(self, index, value) -> None:
        place = self._place(index)
        for half in self._halves(place):
            self.memory.writing(half, threading.current_thread(), atomic=False)
        whole = self.elements.dtype.kind in "iu"
        if whole and not np.iinfo(self.elements.dtype).min <= int(value) <= np.iinfo(self.elements.dtype).max:
            raise OverflowError(f"{value} in {self.elements.dtype}")
        self.elements[place] = value

    def atomically(self, index, change):
        place = self._place(index)
        for half in self._halves(place):
            self.memory.writing(half, threading.current_thread(), atomic=True)
        old = self.elements[place]
        self.elements[place] = change(old)
        return old


class Atomics:
    """cuda.atomic, on shared memory alone."""

    lock = threading.Lock()

    def add(self, view: View, index, value):
        with self.lock:
            return view.atomically(index, lambda old: old + value)

    def or_(self, view: View, index, value):
        with self.lock:
            return view.atomically(index, lambda old: old | value)


class Shared:
    """cuda.shared."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = Memory(size // 2)
        self.static: dict[int, np.ndarray] = {}  # what warp.py's simulated helpers use, which is not looked at

    def array(self, shape, dtype, alignment=None) -> View | np.ndarray:
        if shape:
            return self.static.setdefault(shape, np.zeros(shape, dtype.name))
        assert dtype.bitwidth >= 16
        elements = self.memory.halves[: self.size // (dtype.bitwidth // 8) * (dtype.bitwidth // 16)].view(dtype.name)
        return View(self.memory, elements, 0, len(elements))


class Global(FakeCUDAArray):
    """An array in global memory."""

    def __init__(self, array, stream=0) -> None:
        super().__init__(array, stream)
        self.times = np.zeros(array.shape, np.uint8)

    def _check(self, index) -> int:
        if not 0 <= int(index) < len(self._ary):
            raise IndexError(f"index {index} of {len(self._ary)}")
        return int(index)

    def __getitem__(self, index):
        return self._ary[self._check(index)]

    def __setitem__(self, index, value) -> None:
        index = self._check(index)
        self.times[index] += 1
        if self.times[index] > 1:
            raise Race(f"element {index} of {len(self._ary)} was written before")
        self._ary[index] = value


class Thread(kernel.BlockThread):
    """Waits at a real barrier: the simulator's own polls its threads, too slow for hundreds."""

    interval = 1

    def syncthreads(self) -> None:
        self._manager.barrier.wait()
        self.interval += 1

    def run(self) -> None:
        super().run()
        if self.exception is not None:
            self._manager.barrier.abort()


class Block(kernel.BlockManager):
    module: kernelapi.FakeCUDAModule

    def run(self, point, *arguments) -> None:
        self.barrier = threading.Barrier(self._block_dim[0])
        shared = self.module._shared
        self.module._shared = Shared(shared.size)
        threads = [
            Thread(lambda: self._f(*arguments), self, point, where, self._debug)
            for where in np.ndindex(*self._block_dim)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [thread.exception for thread in threads if thread.exception is not None]
        raised.sort(key=lambda pair: pair[0].__class__ is threading.BrokenBarrierError)  # the cause first
        if raised:
            raise raised[0][0].with_traceback(raised[0][1])


class Module(kernelapi.FakeCUDAModule):
    """What ``cuda`` means in a kernel."""

    def __init__(self, grid_dim, block_dim, dynshared_size) -> None:
        super().__init__(grid_dim, block_dim, dynshared_size)
        self._shared, self._atomic = Shared(dynshared_size), Atomics()
        Block.module = self


@contextmanager
def strict() -> Iterator[None]:
    with (
        mock.patch.object(kernel, "FakeCUDAModule", Module),
        mock.patch.object(kernel, "BlockManager", Block),
        mock.patch("numba.cuda.simulator.cudadrv.devicearray.FakeCUDAArray", Global),
    ):
        yield
