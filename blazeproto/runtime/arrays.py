"""A device array as the kernels see it: pointer, shape, dtype, strides. No code behind this module knows which library made it.

`view` takes a torch, CuPy, Numba or JAX array without copying and costs about 1 µs for a torch tensor, where a DLPack exchange
costs 16. torch is never imported here: a tensor is known by its methods, and its stream asked of the torch that made it.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``), and where launches go to a target (target.py), NumPy arrays take the place
of device arrays.
"""

import sys
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from blazeproto.runtime import checks, optional, target
from blazeproto.runtime.target import is_target, simulated

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
NO_DEVICE = -1  # the ``device`` of a view of host memory


class DeviceArray(NamedTuple):
    """A view: owns no memory itself, but keeps ``owner`` alive. ``strides`` count elements, ``device`` is a CUDA ordinal, or
    the ordinal of a target of launches."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str  # "bfloat16", "float32", "int32"…
    strides: tuple[int, ...]
    device: int
    owner: Any

    def data_ptr(self) -> int:
        """As a torch tensor has it."""
        return self.ptr

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; a dimension of one element may have any stride."""
        wanted = _row_major_strides(self.shape)
        if self.strides == wanted or not self.size:
            return True
        return all(n == 1 or got == want for n, got, want in zip(self.shape, self.strides, wanted, strict=True))

    def __repr__(self) -> str:  # without the owner, whose repr may copy from the device
        return f"DeviceArray({self.dtype}{list(self.shape)} at {self.ptr:#x} on cuda:{self.device})"


@lru_cache(maxsize=4096)
def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


_TORCH_DTYPES: dict[Any, str] = {}  # torch.bfloat16 → "bfloat16", filled as dtypes are met


def view(array: Any, name: str = "array") -> DeviceArray:
    """A device array's pointer, shape, dtype, strides and device, for the kernels.

    array: a DeviceArray (returned as it is), a torch tensor, a CuPy array, or anything with ``__cuda_array_interface__`` or
    ``__dlpack__``. uint16 counts as bfloat16, for libraries that lack the type (CuPy without ml_dtypes, Numba).
    name: what to call it in an error. TypeError if it is no array, ValueError if it isn't on a CUDA device.
    """
    kind = type(array)
    if kind is DeviceArray:
        return array
    if hasattr(array, "data_ptr"):  # a torch tensor; its __cuda_array_interface__ refuses requires_grad and bfloat16
        device = array.get_device()
        if device < 0:
            raise ValueError(f"{name}: expected an array on a CUDA device, got a tensor on {array.device}")
        dtype = _TORCH_DTYPES.get(array.dtype) or _TORCH_DTYPES.setdefault(array.dtype, str(array.dtype).split(".")[-1])
        try:
            return DeviceArray(array.data_ptr(), tuple(array.shape), dtype, array.stride(), device, array)
        except RuntimeError as error:  # a sparse, nested, fake or distributed one
            got = f"{kind.__name__}, {array.layout}"
            raise TypeError(f"{name}: expected a tensor with strides and memory of its own, got {got}") from error
    if kind is BFloat16Array:
        return view(array.bits)._replace(owner=array)
    library = kind.__module__.partition(".")[0]
    if library == "cupy":
        return _strided(array, array.data.ptr, array.device.id)
    if library == "numpy" and simulated():
        return _strided(_plain(array, name), array.ctypes.data, 0)
    if library == "numpy" and (machine := target.chosen()) is not None:
        seen = numpy_view(array, name)
        dtype = "bfloat16" if seen.dtype == "uint16" else seen.dtype
        return seen._replace(ptr=machine.address(array), dtype=dtype, device=target.device_of(machine))
    for protocol in ("__dlpack_device__", "__cuda_array_interface__"):  # JAX makes an error of the second for bf16
        if getattr(array, protocol, None) is not None:
            return _imported(array, name, protocol)
    raise TypeError(
        f"{name}: expected a device array (torch, CuPy, Numba, DLPack) or a NumPy array, got {kind.__qualname__}"
    )


def _imported(array: Any, name: str, protocol: str) -> DeviceArray:
    """By CuPy. ValueError for one that isn't on a CUDA device, TypeError for what CuPy can't import."""
    by_dlpack = protocol == "__dlpack_device__"
    try:
        device = int(array.__dlpack_device__()[0]) if by_dlpack else 2
        if device in (2, 13):  # kDLCUDA, kDLCUDAManaged
            cupy = optional.cupy()  # whose asarray waits for the stream that the interface names
            return view(cupy.from_dlpack(array) if by_dlpack else cupy.asarray(array), name)
    except ImportError:
        raise
    except Exception as error:  # whatever an array's own methods raise
        got = str(getattr(array, "dtype", type(array).__qualname__))
        expected = f"an array that CuPy imports by {protocol}{_BFLOAT16}"
        raise TypeError(f"{name}: expected {expected}, got {got}: {error}") from error
    raise ValueError(f"{name}: expected an array on a CUDA device, got DLPack device type {device}")


def _strided(array: Any, address: int, device: int) -> DeviceArray:
    """The view of a CuPy or NumPy array."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    dtype = "bfloat16" if array.dtype.name == "uint16" else array.dtype.name
    return DeviceArray(address, array.shape, dtype, strides, device, array)


def _plain(array: Any, name: str) -> Any:
    """``array``; TypeError unless it is a NumPy array whose operators and values mean what others' do."""
    import numpy

    if not isinstance(array, numpy.ndarray) or isinstance(array, numpy.matrix | numpy.ma.MaskedArray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(array).__qualname__}")
    return array


def numpy_view(array: Any, name: str = "array") -> DeviceArray:
    """A NumPy array as `view` shows a device array, so that `expect` checks the twins' arguments too. TypeError for others."""
    array = _plain(array, name)
    strides = tuple(stride // max(array.itemsize, 1) for stride in array.strides)
    dtype = array.dtype.name if array.dtype.isnative else str(array.dtype)
    return DeviceArray(array.ctypes.data, array.shape, dtype, strides, NO_DEVICE, array)


def numpy_output(
    name: str, array: Any, dtype: str | tuple[str, ...], shape: tuple[int | None, ...] | None
) -> DeviceArray:
    """The checked view of a NumPy array that a twin writes to. ValueError for one that is read-only, otherwise as `expect`."""
    return _writable(expect(name, numpy_view(array, name), dtype, shape, alignment=1), name)


def _writable(a: DeviceArray, name: str) -> DeviceArray:
    """The view of a NumPy array; ValueError where that is read-only."""
    checks.require(a.owner.flags.writeable, name, "an array to write to", "a read-only one")
    return a


def current_stream(array: Any = None) -> int:
    """The raw cudaStream_t that the caller works on: torch's current stream for a torch tensor, a target's 0, else CuPy's."""
    if type(array) is DeviceArray:
        if is_target(array.device):
            return 0
        array = array.owner
    if hasattr(array, "data_ptr") and "torch" in sys.modules:
        return sys.modules["torch"].cuda.current_stream(array.get_device()).cuda_stream
    return optional.cupy().cuda.get_current_stream().ptr


def current_device() -> int:
    """The CUDA ordinal of the GPU that this thread launches on; torch and CuPy have the same. A target has its own."""
    if (machine := target.chosen()) is not None:
        return target.device_of(machine)
    return int(optional.cupy().cuda.runtime.getDevice())


def empty(shape: tuple[int, ...], dtype: str, like: DeviceArray | None = None) -> Any:
    """Uninitialised memory for a caller that passes no output.

    If ``like`` is a view of a torch tensor, a tensor on its device. Else a CuPy array on CuPy's current device, with ``like``'s
    bfloat16, or a BFloat16Array if CuPy lacks the type. In the simulator a NumPy array, uint16 for bfloat16. On a target an
    array of the target's, with ``like``'s bfloat16.
    """
    if like is not None and hasattr(like.owner, "new_empty"):
        return like.owner.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    bits = "uint16" if dtype == "bfloat16" else dtype
    if simulated():
        import numpy

        return numpy.empty(shape, bits)
    owner: Any = None if like is None else like.owner
    library = type(owner).__module__.partition(".")[0]
    as_given = like is not None and dtype == like.dtype == "bfloat16" and library in ("cupy", "numpy")
    bits = owner.dtype if as_given else bits
    machine = target.chosen()
    if machine is not None and (like is None or is_target(like.device)):
        return machine.empty(shape, bits)
    made = optional.cupy().empty(shape, bits)
    return BFloat16Array(made) if dtype == "bfloat16" and not as_given else made


_BFLOAT16 = " (bfloat16: CuPy 14.1 or later, with ml_dtypes)"
_MENDED = "; if it holds the bits of bf16 numbers: {name} = ({name}.astype(np.uint32) << 16).view(np.float32)"


def expect(
    name: str,
    array: Any,
    dtype: str | tuple[str, ...],
    shape: tuple[int | str | None, ...] | None = None,
    *,
    device: int | None = None,
    alignment: int = 16,
) -> DeviceArray:
    """A checked view.

    dtype: the one that is taken, or those.  shape: with None, or a letter, for a dimension of any length; None: any shape.
    device: the CUDA ordinal that it must be on; None: any.  alignment: of its address, in bytes; 16 is what the loads of most
    kernels need. It must be contiguous.

    TypeError for a wrong dtype, ValueError for anything else, naming the argument, what was expected and what came.
    """
    a = view(array, name)
    allowed = (dtype,) if isinstance(dtype, str) else dtype
    if a.dtype not in allowed:
        hint = _MENDED.format(name=name) if a.dtype == "uint16" and "float32" in allowed else ""
        raise TypeError(f"{name}: expected dtype {' or '.join(allowed)}, got {a.dtype}{hint}")
    if shape is not None and a.shape != shape and not _fits(a.shape, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape ({wanted}), got {a.shape}")
    if not a.is_contiguous:
        raise ValueError(f"{name}: expected a contiguous array, got strides {a.strides} for shape {a.shape}")
    if a.ptr % alignment:
        raise ValueError(f"{name}: expected a {alignment}-byte aligned pointer, got {a.ptr:#x}")
    if device not in (None, a.device):
        raise ValueError(f"{name}: expected an array on cuda:{device}, got one on cuda:{a.device}")
    return a


def _fits(shape: tuple[int, ...], wanted: tuple[int | str | None, ...]) -> bool:
    pairs = zip(wanted, shape, strict=False)
    return len(shape) == len(wanted) and all(isinstance(want, str) or want in (None, got) for want, got in pairs)


def output(
    name: str, array: Any, dtype: str, shape: tuple[int, ...], like: DeviceArray | None = None, alignment: int = 16
) -> tuple[Any, DeviceArray]:
    """The caller's array, or a new one where it gave none; and the checked view of it.

    like: an input, on whose device it must be, and whose library makes a new one.
    """
    array = empty(shape, dtype, like) if array is None else array
    a = expect(name, array, dtype, shape, device=None if like is None else like.device, alignment=alignment)
    return array, _writable(a, name) if simulated() else a


def overlap(a: DeviceArray, b: DeviceArray) -> bool:
    """Whether two contiguous arrays share memory."""
    return a.ptr < b.ptr + b.nbytes and b.ptr < a.ptr + a.nbytes


def columns_within(columns: range | None, width: int, multiple: int = 8) -> range:
    """``columns`` of a matrix that is ``width`` wide, None for all of them. TypeError if they are no range, ValueError if the
    matrix hasn't got them or they don't begin and end at a ``multiple``: of bf16, 8 are 16 bytes."""
    checks.instance("columns", columns, range, optional=True)
    if columns is None:
        return range(width)
    inside = columns.step == 1 and 0 <= columns.start <= columns.stop <= width
    whole = columns.start % multiple == columns.stop % multiple == 0
    checks.require(inside and whole, "columns", f"a range in multiples of {multiple} within 0 to {width}", columns)
    return columns


class BFloat16Array:
    """A bfloat16 array for a library without bfloat16: the bit patterns as uint16.

    >>> torch.from_dlpack(array.bits).view(torch.bfloat16)
    """

    dtype = "bfloat16"

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def float(self) -> Any:
        """The values as float32: bfloat16 is float32's upper half."""
        return (self.bits.astype("uint32") << 16).view("float32")

    def __repr__(self) -> str:
        return f"BFloat16Array({self.float()!r})"
