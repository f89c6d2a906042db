"""Device arrays handed on: to a kernel as an argument, to CuPy as an array, to a stream as its work.

Under Numba's simulator, and on a target of launches, NumPy arrays take the place of device arrays, and the only stream is 0.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from blazeproto.runtime import optional, target
from blazeproto.runtime.arrays import ITEM_BYTES, DeviceArray, current_stream
from blazeproto.runtime.target import is_target, simulated

# --- Arguments -------------------------------------------------------------------------------------------------------


def argument(array: Any) -> Any:
    """A checked array, a view or a tensor, as a kernel takes it: its address. In the simulator the NumPy array, flat, which gets
    every argument back: of a read-only one, which is an input, a copy."""
    if not simulated():
        return array.data_ptr()
    flat = array.owner.reshape(-1)
    return flat if flat.flags.writeable else flat.copy()


def part(memory: Any, first: int, size: int, dtype: str) -> Any:
    """``size`` elements of ``dtype`` from byte ``first`` of an argument, as an argument."""
    if not simulated():
        return memory + first
    return memory.view("uint8")[first : first + size * ITEM_BYTES[dtype]].view(dtype)


def clear(memory: Any, size: int, device: int, stream: int) -> None:
    """Zero the ``size`` bytes of an argument, on a device's stream."""
    if simulated():
        memory[...] = 0
    elif is_target(device):
        target.here().clear(memory, size)
    elif size:
        optional.cupy().cuda.runtime.memsetAsync(memory, 0, size, stream)


# --- CuPy ------------------------------------------------------------------------------------------------------------


def as_cupy(array: DeviceArray) -> Any:
    """The same memory as a CuPy array; in the simulator, and on a target, the NumPy array."""
    if simulated() or is_target(array.device):
        return array.owner
    cupy = optional.cupy()
    memory = cupy.cuda.UnownedMemory(array.ptr, max(array.nbytes, 1), array.owner, array.device)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def on_stream(array: DeviceArray, stream: int | None) -> AbstractContextManager[int]:
    """Gives the stream to work on, and makes it and the array's device CuPy's current ones meanwhile.

    stream: a raw cudaStream_t; None: the caller's current one.
    """
    if simulated() or is_target(array.device):
        return nullcontext(0)
    cuda, stream = optional.cupy().cuda, current_stream(array) if stream is None else stream
    there = cuda.runtime.getDevice() == array.device and cuda.get_current_stream().ptr == stream
    return nullcontext(stream) if there else _entered(array.device, stream)


@contextmanager
def _entered(device: int, stream: int) -> Iterator[int]:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        external = cupy.cuda.Stream.from_external(_RawStream(stream))  # entered on the device that is current then
    else:  # before CuPy 14
        external = cupy.cuda.ExternalStream(stream, device)
    with cupy.cuda.Device(device), external:
        yield stream


class _RawStream(NamedTuple):
    """A cudaStream_t by the CUDA stream protocol."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address
