"""The public edge: a function takes arrays of any library, and returns arrays of the same library.

    the first array is of      what runs      results
    torch, on a GPU            the kernels    torch tensors
    CuPy, Numba                the kernels    CuPy arrays
    JAX, on a GPU              the kernels    JAX arrays, by DLPack; the host waits for them
    NumPy                      the twin       NumPy arrays; inside `launches_on` the kernels, on the target
    torch or JAX, on a CPU     the twin       of that library

An array may be a named tuple of arrays (`blazeproto.gemm.e4m3.Quantized`).

A twin is a function of the same signature that a CPU runs. Given float32 and nothing wider, it rounds to bf16 wherever
the kernels store bf16 (``round_to="bf16"``), so that a laptop sees a GPU's numbers; float64 is not rounded. NumPy has no bf16
but by ml_dtypes: such arrays, and torch's and JAX's, go through float32 and come back as bf16.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from importlib import import_module
from typing import Any, TypeVar

from blazeproto.runtime import arrays, checks, memory, optional, target

F = TypeVar("F", bound=Callable[..., Any])
WRITTEN = ("out", "workspace")  # by every function that has such a parameter


def any_library(
    twin: str | Callable[..., Any],
    makes: Mapping[str, str],
    *,
    writes: Collection[str] = (),
    check: Callable[..., Any] | None = None,
    simulated: bool = False,
) -> Callable[[F], F]:
    """Decorates a function of device arrays, the first parameter being one, so that it takes arrays of any library.

    twin: of the function; or the name of the module that has it, under the function's name, imported at a call.
    makes: the results, by name, in order, and their dtypes in the kernels.
    writes: further arrays that it writes to.  check: what it refuses, from parameters of the same names; None where the twin
    refuses as much.  simulated: whether Numba's simulator runs its kernels, on NumPy arrays.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters))
        checked: dict[str, Callable[[str, Any], Any]] = {
            name: checks.boolean
            for name, parameter in signature.parameters.items()
            if parameter.annotation in (bool, bool | None)
        }
        checked["stream"] = partial(checks.integer, least=0)

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            for name in checked.keys() & options.keys():
                if options[name] is not None or signature.parameters[name].default is not None:
                    checked[name](name, options[name])
            array = args[0] if args else options.get(first)
            array = _first_of(array)
            library = library_of(array)
            if library in (None, "a GPU's"):
                arrays.view(array, first)  # Numba's are known by their protocol; what is no array ends here
            if library in (None, "a GPU's") or (library == "numpy" and simulated and arrays.simulated()):
                return function(*args, **options)
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            if library == "jax" and not _is_host(array):
                return _by_kernels(function, array, bound.arguments, {*makes, *writes, *WRITTEN})
            found = getattr(import_module(twin), function.__name__) if isinstance(twin, str) else twin
            return _by_twin(found, library, first, bound.arguments, makes, check)

        return run  # type: ignore[return-value]

    return decorate


def library_of(array: Any) -> str | None:
    """ "numpy", "torch" for a CPU tensor, "jax"; "a GPU's" for what kernels take as it is, NumPy's too on a
    target; None for what is no array."""
    kind = type(array)
    if hasattr(array, "data_ptr"):
        is_tensor = kind is not arrays.DeviceArray and hasattr(array, "get_device") and array.get_device() < 0
        return "torch" if is_tensor and str(array.device) == "cpu" else "a GPU's"
    if "numpy" in sys.modules and isinstance(array, sys.modules["numpy"].ndarray):
        return "numpy" if target.chosen() is None else "a GPU's"
    name = kind.__module__.partition(".")[0]
    if name in ("jax", "jaxlib"):
        return "jax"
    return "a GPU's" if name == "cupy" or kind is arrays.BFloat16Array else None


def in_host_memory(array: Any) -> bool:
    """Whether it is an array of which twins are computed."""
    library = library_of(array)
    return library in ("numpy", "torch") or (library == "jax" and _is_host(array))


def _is_host(array: Any) -> bool:
    return int(array.__dlpack_device__()[0]) == 1  # DLPack's kDLCPU


def _is_record(value: Any) -> bool:
    """Whether it is a named tuple of arrays, as quantized numbers and their scales are; a view of one array is none."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and type(value) is not arrays.DeviceArray


def _first_of(value: Any) -> Any:
    """The first array of a record; an array itself."""
    return value[0] if _is_record(value) else value


def _mapped(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """``value`` with every array in it, however deep, changed; name: what errors call it."""
    if library_of(value) is not None:
        return change(name, value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
        held = {key: array for key, array in inside.items() if library_of(array) is not None}
        return replace(value, **{key: change(f"{name}.{key}", array) for key, array in held.items()})
    if isinstance(value, Mapping):
        return {key: _mapped(inner, str(key), change) for key, inner in value.items()}
    if _is_record(value):
        return type(value)(*(_mapped(inner, f"{name}.{field}", change) for field, inner in value._asdict().items()))
    if type(value) in (tuple, list):
        return tuple(_mapped(inner, f"{name}[{index}]", change) for index, inner in enumerate(value))
    return value


# --- In host memory: by the twin ---------------------------------------------------------------------------------------------


class _HostCall:
    """The arrays of one call of a twin."""

    def __init__(self, library: str, first: str, array: Any) -> None:
        self.library, self.first = library, first
        # The caller's array, NumPy's for the twin, and whether the two have the same memory.
        self.taken: dict[int, tuple[Any, Any, bool]] = {}
        self.float_dtypes: set[str] = set()
        array = _first_of(array)
        self.bfloat16 = array.dtype if _dtype_name(array) in ("bfloat16", "float8_e4m3fn") else None

    def take(self, name: str, array: Any) -> Any:
        """As a NumPy array. ValueError for one on a GPU."""
        if not in_host_memory(array):
            raise ValueError(f"{name}: expected an array in host memory, as {self.first} is, got one on a GPU")
        if id(array) not in self.taken:
            self.taken[id(array)] = (array, *_to_numpy(array, name))
        values = self.taken[id(array)][1]
        if values.dtype.kind == "f":
            self.float_dtypes.add(values.dtype.name)
        return values

    def give(self, values: Any, dtype: str) -> Any:
        """A result in the caller's library; the caller's own array, filled, where it gave one for it."""
        for given, its_values, shared in self.taken.values():
            if its_values is values and (shared or library_of(given) != "jax"):
                if not shared:
                    _fill(given, values)
                return given
        import numpy

        values, bits = numpy.asarray(values), False
        if values.dtype == numpy.uint16:  # a twin's way to write bf16
            from blazeproto.runtime.rounding import from_bfloat16_bits

            values, bits = from_bfloat16_bits(values), True
        rounded = dtype == "bfloat16" and (bits or self.bfloat16 is not None)
        if self.library == "torch":
            torch = sys.modules["torch"]
            tensor = torch.from_numpy(values)
            tensor = tensor.view(torch.float8_e4m3fn) if values.dtype == numpy.uint8 else tensor
            return tensor.to(torch.bfloat16) if rounded else tensor
        if self.library == "jax":
            from jax import numpy as jax_numpy

            return jax_numpy.asarray(values, jax_numpy.bfloat16 if rounded else None)
        return values.astype(self.bfloat16) if rounded and self.bfloat16 is not None else values


def _by_twin(
    twin: Callable[..., Any],
    library: str,
    first: str,
    arguments: Mapping[str, Any],
    makes: Mapping[str, str],
    check: Callable[..., Any] | None,
) -> Any:
    call = _HostCall(library, first, arguments[first])
    taken = {name: _mapped(value, name, call.take) for name, value in arguments.items()}
    if check is not None:
        check(**{name: _mapped(taken[name], name, _for_check) for name in inspect.signature(check).parameters})
    if "round_to" in inspect.signature(twin).parameters and call.float_dtypes == {"float32"}:
        taken["round_to"] = "bf16"
    result = twin(**taken)
    if is_dataclass(result):
        return _mapped(result, "", lambda _, values: call.give(values, "int32"))
    results = result if type(result) is tuple else (result,)
    outputs = given if isinstance(given := taken.get("out"), tuple) else (given,) * len(results)
    checks.require(len(outputs) == len(results), "out", f"{len(results)} arrays", len(outputs))
    made = []
    for values, out, (name, dtype) in zip(results, outputs, makes.items(), strict=True):
        if _is_record(values):
            made.append(_mapped(values, name, lambda _, part: call.give(part, "float32")))
        else:
            made.append(call.give(_in_out(values, out, f"out ({name})"), dtype))
    return tuple(made) if type(result) is tuple else made[0]


def _in_out(values: Any, out: Any, name: str) -> Any:
    """A result in the array that was given for it, where a twin has not put it there."""
    if out is None or out is values:
        return values
    arrays.numpy_output(name, out, values.dtype.name, values.shape)
    out[...] = values
    return out


def _for_check(name: str, array: Any) -> arrays.DeviceArray:
    """What a check of device arrays may look at; float64 stands for the float32 that kernels take."""
    seen = arrays.numpy_view(array, name)
    return seen._replace(dtype="float32") if seen.dtype == "float64" else seen


def _dtype_name(array: Any) -> str:
    """An array's dtype by name, a torch dtype too."""
    return getattr(array.dtype, "name", str(array.dtype).rpartition(".")[2])


def _to_numpy(array: Any, name: str) -> tuple[Any, bool]:
    """The NumPy array, and whether it has the same memory. bf16 becomes float32. TypeError for one whose memory NumPy can't read:
    a sparse, quantized, nested, fake or distributed tensor."""
    import numpy

    library = library_of(array)
    if library == "torch":
        half = _dtype_name(array) == "bfloat16"
        if _dtype_name(array) == "float8_e4m3fn":  # NumPy has bits
            array = array.view(sys.modules["torch"].uint8)
        try:
            return (array.detach().float() if half else array.detach()).numpy(), not half
        except (RuntimeError, TypeError) as error:
            got = f"{type(array).__name__} of {array.dtype}, {array.layout}"
            raise TypeError(f"{name}: expected a tensor whose memory NumPy reads as it lies, got {got}") from error
    values = numpy.array(array) if library == "jax" else array  # a JAX array may not be written to
    half = values.dtype.name == "bfloat16"
    return values.astype("float32") if half else values, not half and values is array


def _fill(given: Any, values: Any) -> None:
    if hasattr(given, "data_ptr"):
        given.detach().copy_(sys.modules["torch"].from_numpy(values))
    else:
        given[...] = values


# --- JAX on a GPU: by the kernels --------------------------------------------------------------------------------------------


def _by_kernels(function: Callable[..., Any], first: Any, arguments: Mapping[str, Any], written: set[str]) -> Any:
    """The kernels on JAX arrays, which may not be written to: a copy of an output that was given is, and is returned.

    JAX knows nothing of what runs on other streams, and gives an input's memory away once its last name is gone: so the host
    waits for the kernels.
    """
    taken: dict[int, Any] = {}

    def take(_: str, array: Any, copy: bool) -> Any:
        if library_of(array) != "jax":
            return array
        if id(array) not in taken or copy:
            taken[id(array)] = _to_cupy(array, copy)
        return taken[id(array)]

    with memory.on_stream(arrays.view(first), arguments.get("stream")) as stream:
        inputs = {name: _mapped(value, name, partial(take, copy=name in written)) for name, value in arguments.items()}
        made = function(**inputs)
        result = _mapped(made, "", lambda _, array: _to_jax(array))
        _wait(stream)
    return result


def _to_cupy(array: Any, copy: bool) -> Any:
    """By JAX's own DLPack. TypeError for a dtype that CuPy has not got."""
    made: Any = arrays.view(array).owner
    return made.copy() if copy else made


def _to_jax(array: Any) -> Any:
    """By DLPack; what the kernels made in bf16 where no bf16 came, as CuPy stores it."""
    from jax import dlpack
    from jax import numpy as jax_numpy

    if type(array) is arrays.BFloat16Array:
        array = array.bits.view(jax_numpy.bfloat16.dtype)
    return array if library_of(array) == "jax" else dlpack.from_dlpack(array)


def _wait(stream: int) -> None:
    optional.cupy().cuda.runtime.streamSynchronize(stream)
