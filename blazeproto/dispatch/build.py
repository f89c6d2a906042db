"""From the router's choice to a `Dispatch`: checks, memory, and which kernels run in which order.

    topk_experts (T, K) --method--> expert_pair_indices, expert_token_offsets, token_index_map

On the caller's current stream, without waiting for the device; once its kernels are compiled (`prepare_dispatch`), a
call with ``out`` and ``workspace`` allocates nothing and can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, NamedTuple

from blazeproto import arrays
from blazeproto.dispatch import launch
from blazeproto.dispatch.reference import check_distinct
from blazeproto.dispatch.structures import Dispatch

Method = Literal["tiled", "dense", "sort"]
METHODS = ("tiled", "dense", "sort")
MAX_PAIRS = 2**31 - 2**16  # rows are int32, and the kernels count a step or two past the last one
OUTPUTS = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "token_expert_indices")


def build_dispatch(
    topk_experts: Any,
    num_experts: int,
    *,
    method: Method = "tiled",
    validate: bool = False,
    out: Mapping[str, Any] | tuple[Any, ...] | None = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Dispatch:
    """The dispatch of a fixed number of experts per token (MoEBlaze §4).

    topk_experts: (T, K) int32 or int64, contiguous, on a CUDA device: any array that `blazeproto.arrays.view` takes.
        Ids in a row are distinct; an id outside [0, E) means "not here" and takes no row.
    num_experts: E. It may be smaller than K: of K choices few may be here (expert parallelism).
    method: "tiled" (default), "dense" or "sort"; one result, three ways (tiled.py, dense.py, sort.py).
    validate: raise ValueError if a row names an expert twice; waits for the device. Without it such a row gives an
        unspecified dispatch whose indices are all in bounds.
    out: arrays to fill: (expert_pair_indices (T·K,), expert_token_offsets (E+1,), token_index_map (T·K,)) as a tuple
        or by name, int32; for int64 ids also token_expert_indices (T·K,).
    workspace: at least `workspace_bytes` bytes of any contiguous device array, 4-byte aligned.
    stream: a raw cudaStream_t; default: the caller's current one.

    Returns a Dispatch of torch tensors for a torch tensor, else of CuPy arrays. token_expert_indices is topk_experts
    itself, flat; of int64 ids an int32 copy, in which ids outside [0, E) are -1.
    """
    ids, num_experts = _check(topk_experts, num_experts, "topk_experts", 2, method)
    num_tokens, top_k = ids.shape
    if top_k < 1:
        raise ValueError(f"topk_experts: expected (T, K) with K >= 1, got {ids.shape}")
    if validate:
        check_distinct(topk_experts if launch.simulated() else _as_cupy(ids, ids.shape), num_experts)
    lists = _build(ids, num_tokens, top_k, num_experts, method, out, workspace, stream)
    return Dispatch(**lists, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)


def build_dispatch_varying(
    pair_experts: Any,
    pair_tokens: Any,
    token_offsets: Any,
    num_experts: int,
    *,
    method: Method = "tiled",
    validate: bool = False,
    out: Mapping[str, Any] | tuple[Any, ...] | None = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Dispatch:
    """The dispatch of a number of experts that varies from token to token (token rounding, expert choice, capacity).

    pair_experts: (P,) int32 or int64, by token; P is a static capacity, and pairs not used hold an id outside [0, E).
    pair_tokens: (P,) int32, the token of each pair.  token_offsets: (T+1,) int32, where each token's pairs begin.
    validate: raise ValueError unless token_offsets ascends from 0 to at most P; waits for the device.
    Everything else as in `build_dispatch`, each pair being a token with one expert: workspace_bytes(P, 1, num_experts).
    """
    ids, num_experts = _check(pair_experts, num_experts, "pair_experts", 1, method)
    num_pairs = ids.shape[0]
    tokens, offsets = _view(pair_tokens, "pair_tokens"), _view(token_offsets, "token_offsets")
    if tokens.shape != (num_pairs,) or tokens.dtype != "int32":
        raise ValueError(f"pair_tokens: expected int32 ({num_pairs},), got {tokens.dtype} {tokens.shape}")
    if len(offsets.shape) != 1 or offsets.shape[0] < 1 or offsets.dtype != "int32":
        raise ValueError(f"token_offsets: expected int32 (T + 1,), got {offsets.dtype} {offsets.shape}")
    if validate:
        values = token_offsets if launch.simulated() else _as_cupy(offsets, offsets.shape).get()
        if values[0] != 0 or values[-1] > num_pairs or (values[1:] < values[:-1]).any():
            raise ValueError(f"token_offsets: expected an ascent from 0 to at most {num_pairs}, got {values.tolist()}")
    lists = _build(ids, num_pairs, 1, num_experts, method, out, workspace, stream)
    return Dispatch(
        **lists,
        num_experts=num_experts,
        top_k=None,
        num_tokens=offsets.shape[0] - 1,
        token_offsets=token_offsets,
        pair_tokens=pair_tokens,
    )


def workspace_bytes(num_tokens: int, top_k: int, num_experts: int, method: Method = "tiled") -> int:
    """Bytes of ``workspace`` that a dispatch needs: for "tiled" a table of at most 5 % of the index lists' 8·T·K bytes
    (with at least two rows of E entries), for "dense" mostly the T·E map; "sort" takes its memory from CuPy."""
    if method == "tiled":
        return 4 * _tiled().plan(num_tokens, top_k, num_experts).workspace_ints(num_experts)
    if method == "dense":
        return _dense().workspace_bytes(num_tokens, top_k, num_experts)
    return 0


def prepare_dispatch(
    num_tokens: int, top_k: int, num_experts: int, *, dtype: str = "int32", method: Method = "tiled", device: int = 0
) -> None:
    """Compile and load what a dispatch of this shape launches, ahead of a CUDA-graph capture."""
    chosen: tuple[launch.Kernel, ...] = ()
    if method == "tiled":
        plan = _tiled().plan(num_tokens, top_k, num_experts)
        chosen = tuple(filter(None, _tiled().kernels(plan, top_k, num_experts, dtype)))
    elif method == "dense":
        chosen = tuple(_dense().kernels(top_k, dtype, _dense().plan(num_tokens, top_k).slot_type))
    for kernel in chosen:
        kernel.load(device)


def build_dispatch_unchecked(ids: Any, num_experts: int, out: tuple[Any, ...], stream: int) -> None:
    """`build_dispatch` of torch tensors on the current GPU, by tiles, for a caller that has checked and allocated them, which
    takes the host longer than the launches. ids: (T, K).  out: as there, a fourth for int64 ids."""
    num_tokens, top_k = ids.shape
    workspace = out[0].new_empty(_tiled().plan(num_tokens, top_k, num_experts).workspace_ints(num_experts))
    buffers = launch.Buffers.of(ids.data_ptr(), [array.data_ptr() for array in out], workspace.data_ptr())
    dtype = "int64" if len(out) == 4 else "int32"
    _tiled().run(buffers, num_tokens, top_k, num_experts, dtype, ids.get_device(), stream)


# --- Methods, imported when first used: with Numba ---------------------------------------------------------------------


@cache
def _tiled() -> Any:
    from blazeproto.dispatch import tiled

    return tiled


@cache
def _dense() -> Any:
    from blazeproto.dispatch import dense

    return dense


# --- Checks ----------------------------------------------------------------------------------------------------------


def _view(array: Any, name: str) -> arrays.DeviceArray:
    if launch.simulated() and not isinstance(array, arrays.DeviceArray):  # NumPy arrays stand for device arrays
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return arrays.DeviceArray(array.ctypes.data, array.shape, array.dtype.name, strides, 0, array)
    return arrays.view(array, name)


def _check(experts: Any, num_experts: int, name: str, dimensions: int, method: str) -> tuple[arrays.DeviceArray, int]:
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    if isinstance(num_experts, bool) or not hasattr(num_experts, "__index__"):
        raise TypeError(f"num_experts: expected an int, got {type(num_experts).__name__}")
    num_experts = num_experts.__index__()
    if num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1, got {num_experts}")
    ids = _view(experts, name)
    if ids.dtype not in ("int32", "int64"):
        raise TypeError(f"{name}: expected int32 or int64, got {ids.dtype}")
    if len(ids.shape) != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimension(s), got shape {ids.shape}")
    if not ids.is_contiguous:
        raise ValueError(f"{name}: expected a contiguous array, got strides {ids.strides} for shape {ids.shape}")
    if ids.size > MAX_PAIRS:
        raise ValueError(f"{name}: expected at most {MAX_PAIRS} pairs, for rows are int32, got {ids.size}")
    return ids, num_experts


def _check_buffer(array: Any, name: str, size: int, device: int) -> None:
    buffer = _view(array, name)
    if buffer.dtype != "int32" or buffer.shape != (size,) or not buffer.is_contiguous:
        raise ValueError(f"{name}: expected contiguous int32 ({size},), got {buffer.dtype} {buffer.shape}")
    if buffer.device != device:
        raise ValueError(f"{name}: expected an array on cuda:{device} as the ids are, got one on cuda:{buffer.device}")


# --- Memory ----------------------------------------------------------------------------------------------------------


def _empty(like: arrays.DeviceArray, size: int, dtype: str = "int32") -> Any:
    """Uninitialised memory of the kind and on the device of ``like``, on CuPy's or torch's current stream."""
    if hasattr(like.owner, "new_empty"):  # a torch tensor: its caching allocator owns all memory
        return like.owner.new_empty((size,), dtype=getattr(sys.modules["torch"], dtype))
    if launch.simulated():
        import numpy

        return numpy.empty(size, dtype)
    return arrays.empty((size,), dtype)


def _as_cupy(buffer: arrays.DeviceArray, shape: tuple[int, ...]) -> Any:
    import cupy

    memory = cupy.cuda.UnownedMemory(buffer.ptr, max(buffer.nbytes, 1), buffer.owner, buffer.device)
    return cupy.ndarray(shape, buffer.dtype, cupy.cuda.MemoryPointer(memory, 0))


class _RawStream(NamedTuple):
    """A cudaStream_t as the CUDA stream protocol has it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _on(device: int, stream: int) -> Any:
    """CuPy's current device and stream made these; nothing where they are already."""
    import cupy

    there = cupy.cuda.runtime.getDevice() == device and cupy.cuda.get_current_stream().ptr == stream
    return nullcontext() if there else _entered(device, stream)


@contextmanager
def _entered(device: int, stream: int) -> Iterator[None]:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        external = cupy.cuda.Stream.from_external(_RawStream(stream))  # entered on the device that is current then
    else:  # before CuPy 14
        external = cupy.cuda.ExternalStream(stream, device)
    with cupy.cuda.Device(device), external:
        yield


def _argument(array: Any) -> Any:
    """An array that has been checked, or made here, as a kernel argument."""
    if launch.simulated():
        owner: Any = array.owner if isinstance(array, arrays.DeviceArray) else array
        return owner.reshape(-1)
    return array.data_ptr() if hasattr(array, "data_ptr") else arrays.view(array).ptr


# --- Building --------------------------------------------------------------------------------------------------------


def _build(
    ids: arrays.DeviceArray,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    method: Method,
    out: Mapping[str, Any] | tuple[Any, ...] | None,
    workspace: Any,
    stream: int | None,
) -> dict[str, Any]:
    """The four lists of a Dispatch, by name, for flat or (T, K) ids."""
    if stream is None:
        stream = 0 if launch.simulated() else arrays.current_stream(ids)
    with nullcontext() if launch.simulated() else _on(ids.device, stream):
        lists = _outputs(ids, num_tokens * top_k, num_experts, out)
        scratch = _workspace(ids, workspace_bytes(num_tokens, top_k, num_experts, method), workspace)
        if method == "sort":
            _run_sort(ids, [_view(array, name) for name, array in lists.items()], num_experts)
        else:
            buffers = launch.Buffers.of(_argument(ids), map(_argument, lists.values()), _argument(scratch))
            run = _tiled().run if method == "tiled" else _dense().run
            run(buffers, num_tokens, top_k, num_experts, ids.dtype, ids.device, stream)
    return {"token_expert_indices": _flat(ids), **lists}


def _outputs(
    ids: arrays.DeviceArray, num_pairs: int, num_experts: int, out: Mapping[str, Any] | tuple[Any, ...] | None
) -> dict[str, Any]:
    """What is filled, by name: new arrays, or the caller's, checked."""
    names = OUTPUTS[: 4 if ids.dtype == "int64" else 3]
    sizes = dict(zip(names, (num_pairs, num_experts + 1, num_pairs, num_pairs), strict=False))
    if out is None:
        return {name: _empty(ids, size) for name, size in sizes.items()}
    given = dict(out) if isinstance(out, Mapping) else dict(zip(OUTPUTS, out, strict=False))
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise ValueError(f"out: expected {', '.join(names)} for {ids.dtype} ids, got no {', '.join(missing)}")
    for name, size in sizes.items():
        _check_buffer(given[name], name, size, ids.device)
    return {name: given[name] for name in names}


def _workspace(ids: arrays.DeviceArray, needed: int, given: Any) -> Any:
    """``needed`` bytes: new ones, or the caller's, checked."""
    if given is None:
        return _empty(ids, -(-needed // 4))
    scratch = _view(given, "workspace")
    if scratch.nbytes < needed or not scratch.is_contiguous or scratch.ptr % 4 or scratch.device != ids.device:
        raise ValueError(f"workspace: expected {needed} contiguous bytes on cuda:{ids.device}, got {scratch!r}")
    return scratch


def _flat(ids: arrays.DeviceArray) -> Any:
    """The router's choice as one list, in the caller's kind of array where that has a reshape."""
    owner: Any = ids.owner
    return owner.reshape(-1) if hasattr(owner, "reshape") else _as_cupy(ids, (ids.size,))


def _run_sort(ids: arrays.DeviceArray, outputs: list[arrays.DeviceArray], num_experts: int) -> None:
    from blazeproto.dispatch import sort

    flat = _as_cupy(ids, (ids.size,))
    lists = [_as_cupy(buffer, buffer.shape) for buffer in outputs]
    sort.build(flat, num_experts, *lists[:3])
    if len(lists) == 4:
        lists[3][...] = _where_valid(flat, num_experts)


def _where_valid(ids: Any, num_experts: int) -> Any:
    import cupy

    return cupy.where((ids >= 0) & (ids < num_experts), ids, -1)
