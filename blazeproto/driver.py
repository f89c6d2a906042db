"""Launching a loaded kernel by addresses: what `dispatch` and `gemm` have in common.

CuPy's driver module takes raw addresses and adds 0.2 µs to what the driver takes; a `cupy.cuda.Function` looks at every argument
and takes 6. What CuPy cannot ask for, a programmatic dependent launch, goes to cuLaunchKernelEx through ctypes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from struct import Struct
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; ``value`` is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint64 * 8))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Arguments(threading.local):
    """A thread's buffer for a kernel's arguments, which the driver has read when a launch returns.

    And, for dependent launches, a LaunchConfig of which a launch writes all before ``attributes``.
    """

    BYTES = 1024

    def __init__(self) -> None:
        memory = (ctypes.c_char * (self.BYTES + 64))()
        start = -ctypes.addressof(memory) % 64  # tensor maps are 64-byte aligned
        self.bytes = memoryview(memory).cast("B")[start : start + self.BYTES]
        self.address = ctypes.addressof(memory) + start
        words = range(self.address, self.address + self.BYTES, 8)
        self._pointers = (ctypes.c_uint64 * len(words))(*words)
        # Of a struct at the start of the buffer the first is read, of a row of words each.
        self.pointers = ctypes.addressof(self._pointers)

        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1  # int programmaticStreamSerializationAllowed
        config = LaunchConfig(attributes=ctypes.addressof(self._attribute), num_attributes=1)
        self.config = memoryview((ctypes.c_char * ctypes.sizeof(config)).from_buffer(config)).cast("B")
        self.config_address = ctypes.addressof(config)


arguments = Arguments()


@cache
def _driver() -> Any:
    import cupy

    return cupy.cuda.driver


def make_context() -> None:
    """For a thread that has made no CUDA call yet, such as the autograd engine's."""
    import cupy

    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())


def launch(
    function: int, grid: tuple[int, int], threads: int, shared_bytes: int, stream: int, dependent: bool = False
) -> None:
    """cuLaunchKernel with what lies in this thread's ``arguments``. function: a CUfunction.  stream: a cudaStream_t.

    dependent: a programmatic dependent launch. The kernel may start before the one ahead of it in the stream has ended,
    and has to wait (``griddepcontrol.wait``) before it touches what that one reads or writes.
    """
    if dependent:
        _launch_dependent(function, grid, threads, shared_bytes, stream)
        return
    driver, pointers = _driver(), arguments.pointers
    try:
        driver.launchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)
    except driver.CUDADriverError as error:
        if error.status != INVALID_CONTEXT:
            raise
        make_context()
        driver.launchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)


_WHERE = Struct("7IQ")  # of a LaunchConfig: grid, block, shared_bytes, stream


@cache
def _launch_kernel_ex() -> Any:
    # Without the interpreter lock: where the device's queue is full, a launch waits for the device.
    launch_kernel_ex = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch_kernel_ex.argtypes = [ctypes.c_void_p] * 4
    return launch_kernel_ex


def _launch_dependent(function: int, grid: tuple[int, int], threads: int, shared_bytes: int, stream: int) -> None:
    _WHERE.pack_into(arguments.config, 0, *grid, 1, threads, 1, 1, shared_bytes, stream)
    launch_kernel_ex, call = _launch_kernel_ex(), (arguments.config_address, function, arguments.pointers, None)
    error = launch_kernel_ex(*call)
    if error == INVALID_CONTEXT:
        make_context()
        error = launch_kernel_ex(*call)
    if error:
        raise _driver().CUDADriverError(error)


@lru_cache(maxsize=32)
def _words(count: int) -> Struct:
    return Struct(f"{count}q")


def launch_words(
    function: int,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    stream: int,
    words: Sequence[int],
    dependent: bool = False,
) -> None:
    """Launch a kernel whose arguments are 8-byte words: addresses and int64 numbers."""
    _words(len(words)).pack_into(arguments.bytes, 0, *words)
    launch(function, grid, threads, shared_bytes, stream, dependent)
