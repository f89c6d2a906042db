"""Numba's simulator made strict, for kernels of dynamic shared memory: what a GPU would only do now and then is an error.

- An index outside an array, negative ones too (NumPy would count from the end).
- A global element written twice by one kernel.
- A race in shared memory: between two barriers a word is written by one thread and read or written by another. Only
  atomics may meet.
- A shared word used before it was written: each block's memory begins as GARBAGE.

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

GARBAGE = 77_777_777
NOBODY, MANY = -1, -2


class Race(Exception):
    """Two threads met at a word of shared memory."""


class Memory:
    """A block's dynamic shared memory, in words, and who touched each since the last barrier."""

    def __init__(self, size: int) -> None:
        self.words = np.full(size, GARBAGE, np.int32)
        self.unsigned = self.words.view(np.uint32)
        self.written: list[tuple[int, int, bool]] = [(0, NOBODY, False)] * size  # interval, thread, by an atomic
        self.read: list[tuple[int, int]] = [(0, NOBODY)] * size


class View:
    """What cuda.shared.array(0, …) returns, or a slice of it."""

    def __init__(self, memory: Memory, words: np.ndarray, first: int, last: int) -> None:
        self.memory, self.words, self.first, self.last = memory, words, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def _place(self, index: int) -> int:
        if not 0 <= int(index) < len(self):
            raise IndexError(f"shared index {index} of {len(self)}")
        return self.first + int(index)

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            if stop < (index.stop or 0):
                raise IndexError(f"shared slice {index} of {len(self)}")
            return View(self.memory, self.words, self.first + start, self.first + stop)
        place = self._place(index)
        me = threading.current_thread()
        interval, writer, _ = self.memory.written[place]
        if interval == me.interval and writer != me.thread_id:
            raise Race(f"word {place}: thread {me.thread_id} reads what thread {writer} writes")
        interval, reader = self.memory.read[place]
        same = interval != me.interval or reader == me.thread_id
        self.memory.read[place] = (me.interval, me.thread_id if same else MANY)
        return self.words[place]

    def __setitem__(self, index, value) -> None:
        place = self._place(index)
        me = threading.current_thread()
        self._check_readers(place, me)
        interval, writer, _ = self.memory.written[place]
        if interval == me.interval and writer != me.thread_id:
            raise Race(f"word {place}: thread {me.thread_id} writes beside thread {writer}")
        self.memory.written[place] = (me.interval, me.thread_id, False)
        self.words[place] = value

    def atomically(self, index, change):
        place = self._place(index)
        me = threading.current_thread()
        self._check_readers(place, me)
        interval, writer, atomic = self.memory.written[place]
        if interval == me.interval and writer != me.thread_id and not atomic:
            raise Race(f"word {place}: an atomic of thread {me.thread_id} beside a write of thread {writer}")
        alone = interval != me.interval or writer == me.thread_id
        self.memory.written[place] = (me.interval, me.thread_id if alone else MANY, True)
        old = self.words[place]
        self.words[place] = change(old)
        return old

    def _check_readers(self, place: int, me) -> None:
        interval, reader = self.memory.read[place]
        if interval == me.interval and reader != me.thread_id:
            raise Race(f"word {place}: thread {me.thread_id} writes what thread {reader} reads")


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
        self.memory = Memory(size // 4)

    def array(self, shape, dtype, alignment=None) -> View:
        assert shape == 0 and dtype.bitwidth == 32
        words = self.memory.unsigned if dtype.name == "uint32" else self.memory.words
        return View(self.memory, words, 0, len(words))


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
