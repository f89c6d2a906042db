"""Launching a loaded kernel by addresses, whoever compiled it: Numba, NVRTC.

CuPy's driver module takes raw addresses and adds 0.2 µs to what the driver takes; a `cupy.cuda.Function` looks at every argument
and takes 6.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from struct import Struct
from typing import Any
from weakref import WeakSet

from blazeproto.runtime import optional
from blazeproto.runtime.target import Handle, is_target

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class ArgumentBuffer(threading.local):
    """A thread's buffer for a kernel's arguments, which the driver has read when a launch returns."""

    BYTES = 4096  # as many as a kernel may take

    def __init__(self) -> None:
        memory = (ctypes.c_char * (self.BYTES + 64))()
        start = -ctypes.addressof(memory) % 64  # tensor maps are 64-byte aligned
        self.bytes = memoryview(memory).cast("B")[start : start + self.BYTES]
        self.address = ctypes.addressof(memory) + start
        words = range(self.address, self.address + self.BYTES, 8)
        self._pointers = (ctypes.c_uint64 * len(words))(*words)
        # Of a struct at the start of the buffer the first is read, of a row of words each.
        self.pointers = ctypes.addressof(self._pointers)


arguments = ArgumentBuffer()


@cache
def _driver() -> Any:
    return optional.cupy().cuda.driver


def make_context() -> None:
    """For a thread that has made no CUDA call yet, such as the autograd engine's."""
    import cupy

    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())


def load(code: bytes, entry: str, device: int, shared_bytes: int | None = None) -> Any:
    """A kernel of a cubin on a device (a CUDA ordinal): a ``cupy.cuda.Function``, whose ``ptr`` is the CUfunction, and which
    keeps the code loaded.

    shared_bytes: of dynamic shared memory that launches may ask for; None: all that a block may have beside its static memory.
    """
    cuda = optional.cupy().cuda
    driver, runtime = cuda.driver, cuda.runtime
    with cuda.Device(device):
        module = cuda.Module()
        module.load(code)
        function = module.get_function(entry)
        if shared_bytes is None:
            most = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
            shared_bytes = most - driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    return function


class Loadable:
    """A kernel, whoever compiles it, that is loaded once on each device."""

    _functions: dict[int, Any]  # by CUDA ordinal

    def _code_for(self, device: int) -> tuple[bytes, str, int | None]:
        """A cubin for a device, its entry, and the dynamic shared memory as `load` takes it; compiled if need be."""
        raise NotImplementedError

    def load(self, device: int) -> Any:
        """The kernel on a device (a CUDA ordinal), by `load`. Compiled and loaded the first time; for a target neither."""
        if is_target(device):
            return Handle(self)
        if device not in self._functions:
            code, entry, shared_bytes = self._code_for(device)
            # Of two threads the first one's stays: replacing it would unload code that the other may be launching.
            self._functions.setdefault(device, load(code, entry, device, shared_bytes))
            LOADED.add(self)
        return self._functions[device]


LOADED: WeakSet[Loadable] = WeakSet()  # on any device


@lru_cache(maxsize=32)
def _words(count: int) -> Struct:
    return Struct(f"{count}q")


def launch(
    function: int | Handle,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    stream: int,
    words: Sequence[int] | None = None,
) -> None:
    """cuLaunchKernel. function: a CUfunction, or a `target.Handle`, which launches on a target.  stream: a cudaStream_t.

    words: the arguments of a kernel that takes 8-byte words, addresses and int64 numbers. None: the arguments lie in this
    thread's ``arguments`` already.
    """
    if type(function) is Handle:
        parameters = function.parameters if words is None else _words(len(words)).pack(*words)
        return function.launch(grid, threads, shared_bytes, parameters)
    if words is not None:
        _words(len(words)).pack_into(arguments.bytes, 0, *words)
    driver, pointers = _driver(), arguments.pointers
    try:
        driver.launchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)
    except driver.CUDADriverError as error:
        if error.status != INVALID_CONTEXT:
            raise
        make_context()
        driver.launchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)
