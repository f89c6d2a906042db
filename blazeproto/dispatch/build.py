"""From the router's choice to a `Dispatch`: checks, memory, and which kernels run in which order.

    topk_experts (T, K) --method--> expert_pair_indices, expert_token_offsets, token_index_map

On the caller's current stream, without waiting for the device; once its kernels are compiled (`prepare_dispatch`), a
call with ``out`` and ``workspace`` allocates nothing and can be captured in a CUDA graph.

A method is a module of its name, imported when first used, for it imports Numba. It has

    workspace_bytes(num_tokens, top_k, num_experts)
    kernels(num_tokens, top_k, num_experts, ids)      those that a dispatch of this shape launches; ids: their dtype
    run(ids, lists, workspace, num_tokens, top_k, num_experts, device, stream)     fills the lists of `Dispatch`

run takes kernel arguments (`memory.argument`). ``lists`` are expert_pair_indices, expert_token_offsets and token_index_map, and
for int64 ids a fourth: token_expert_indices, their int32 copy.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

from blazeproto.dispatch.reference import check_distinct
from blazeproto.dispatch.structures import Dispatch
from blazeproto.runtime import arrays, checks, memory

Method = Literal["tiled", "dense", "sort"]
METHODS: tuple[str, ...] = get_args(Method)
MAX_PAIRS = 2**31 - 2**16  # rows are int32, and the kernels count a step or two past the last one
Out = Mapping[str, Any] | tuple[Any, ...] | None


def build_dispatch(
    topk_experts: Any,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: Method = "tiled",
    validate: bool = False,
    out: Out = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Dispatch:
    """The dispatch of a fixed number of experts per token (MoEBlaze §4).

    topk_experts: (T, K) int32 or int64, contiguous, on a CUDA device: any array that `blazeproto.runtime.arrays.view` takes.
        Ids in a row are distinct; an id outside [0, E) means "not here" and takes no row.
    num_experts: E. It may be smaller than K: of K choices few may be here (expert parallelism).
    row_capacity: R, the most rows that there are; default: a row for every pair. Where more pairs have an expert, the rows from
        R on, the last in expert order, are not there: expert_pair_indices has min(R, T·K) entries, expert_token_offsets
        pass R nowhere, token_index_map is -1 for the pairs concerned, and ``overflow`` (1,) int32 counts them. Without a
        capacity overflow is None, and nothing more is launched.
    method: "tiled" (default), "dense" or "sort"; one result, three ways (tiled.py, dense.py, sort.py).
    validate: raise ValueError if a row names an expert twice; waits for the device. Without it such a row gives an
        unspecified dispatch whose indices are all in bounds.
    out: arrays to fill: (expert_pair_indices (T·K,), expert_token_offsets (E+1,), token_index_map (T·K,)) as a tuple
        or by name, int32; for int64 ids also token_expert_indices (T·K,), and last, with a row_capacity, overflow (1,).
    workspace: at least `workspace_bytes` bytes of any contiguous device array, 4-byte aligned.
    stream: a raw cudaStream_t; default: the caller's current one.

    Returns a Dispatch of torch tensors for a torch tensor, else of CuPy arrays. token_expert_indices is topk_experts
    itself, flat; of int64 ids an int32 copy, in which ids outside [0, E) are -1.

    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    ids, num_experts = _check(topk_experts, num_experts, "topk_experts", 2, method)
    num_tokens, top_k = ids.shape
    if top_k < 1:
        raise ValueError(f"topk_experts: expected (T, K) with K >= 1, got {ids.shape}")
    if validate:
        check_distinct(memory.as_cupy(ids), num_experts)
    lists = _build(ids, num_tokens, top_k, num_experts, row_capacity, method, out, workspace, stream)
    return Dispatch(**lists, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)


def build_dispatch_varying(
    pair_experts: Any,
    pair_tokens: Any,
    token_offsets: Any,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: Method = "tiled",
    validate: bool = False,
    out: Out = None,
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
    num_pairs = ids.size
    arrays.expect("pair_tokens", pair_tokens, "int32", (num_pairs,), device=ids.device, alignment=4)
    offsets = arrays.expect("token_offsets", token_offsets, "int32", (None,), device=ids.device, alignment=4)
    if not offsets.size:
        raise ValueError("token_offsets: expected (T + 1,), got (0,)")
    if validate:
        values = memory.as_cupy(offsets)
        if values[0] != 0 or values[-1] > num_pairs or (values[1:] < values[:-1]).any():
            raise ValueError(f"token_offsets: expected an ascent from 0 to at most {num_pairs}, got {values.tolist()}")
    lists = _build(ids, num_pairs, 1, num_experts, row_capacity, method, out, workspace, stream)
    return Dispatch(
        **lists,
        num_experts=num_experts,
        top_k=None,
        num_tokens=offsets.size - 1,
        token_offsets=token_offsets,
        pair_tokens=pair_tokens,
    )


def workspace_bytes(
    num_tokens: int, top_k: int, num_experts: int, method: Method = "tiled", *, row_capacity: int | None = None
) -> int:
    """Bytes of ``workspace`` that a dispatch needs: for "tiled" a table of at most 5 % of the index lists' 8·T·K bytes
    (with at least two rows of E entries), for "dense" mostly the T·E map; "sort" takes its memory from CuPy. A row_capacity,
    whatever it is, adds 4·T·K."""
    needed: int = _module(method).workspace_bytes(num_tokens, top_k, num_experts)
    return needed if row_capacity is None else needed + 4 * num_tokens * top_k


def prepare_dispatch(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    dtype: str = "int32",
    method: Method = "tiled",
    device: int = 0,
) -> None:
    """Compile and load what a dispatch of this shape launches, ahead of a CUDA-graph capture.

    row_capacity: whether there is one; any number will do.  dtype: of the ids.  device: a CUDA ordinal.
    """
    for kernel in _module(method).kernels(num_tokens, top_k, num_experts, dtype):
        kernel.load(device)
    if row_capacity is not None:
        from blazeproto.dispatch import limit

        limit.KERNEL.load(device)


def build_dispatch_unchecked(
    ids: Any, num_experts: int, out: tuple[Any, ...], stream: int, overflow: Any = None
) -> None:
    """`build_dispatch` of torch tensors on the current GPU, by tiles, for a caller that has checked and allocated them, which
    takes the host longer than the launches.

    ids: (T, K).  out: as there, a fourth for int64 ids.  overflow: (1,) int32 for a dispatch with a row_capacity, which is
    the length of out[0], at most T·K.
    """
    num_tokens, top_k = ids.shape
    tiled, device = _module("tiled"), ids.get_device()
    lists, capacity = [array.data_ptr() for array in out], None if overflow is None else len(out[0])
    needed = workspace_bytes(num_tokens, top_k, num_experts, row_capacity=capacity)
    workspace = out[0].new_empty(needed // 4)
    shape = (num_tokens, top_k, num_experts)
    if capacity is None:
        tiled.run(ids.data_ptr(), lists, workspace.data_ptr(), *shape, device, stream)
    else:
        from blazeproto.dispatch import limit

        lists.append(overflow.data_ptr())
        limit.run(tiled, ids.data_ptr(), lists, workspace.data_ptr(), *shape, device, stream, capacity)


@cache
def _module(method: str) -> Any:
    checks.one_of("method", method, METHODS)
    return import_module(f"blazeproto.dispatch.{method}")


def _check(experts: Any, num_experts: Any, name: str, dimensions: int, method: str) -> tuple[arrays.DeviceArray, int]:
    checks.one_of("method", method, METHODS)
    num_experts = checks.integer("num_experts", num_experts, least=1)
    ids = arrays.expect(name, experts, ("int32", "int64"), (None,) * dimensions, alignment=4)
    if ids.size > MAX_PAIRS:
        raise ValueError(f"{name}: expected at most {MAX_PAIRS} pairs, for rows are int32, got {ids.size}")
    return ids, num_experts


def _build(
    ids: arrays.DeviceArray,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    row_capacity: int | None,
    method: Method,
    out: Out,
    workspace: Any,
    stream: int | None,
) -> dict[str, Any]:
    """The lists of a Dispatch, by name, for flat or (T, K) ids."""
    sizes = {"expert_pair_indices": ids.size, "expert_token_offsets": num_experts + 1, "token_index_map": ids.size}
    if ids.dtype == "int64":
        sizes["token_expert_indices"] = ids.size
    if row_capacity is not None:
        row_capacity = min(checks.integer("row_capacity", row_capacity, least=0), ids.size)
        sizes |= {"expert_pair_indices": row_capacity, "overflow": 1}
    given = dict(out) if isinstance(out, Mapping) else dict(zip(sizes, out or (), strict=False))
    missing = [name for name in sizes if given.get(name) is None]
    if out is not None and missing:
        raise ValueError(f"out: expected {', '.join(sizes)} for {ids.dtype} ids, got no {', '.join(missing)}")
    needed = workspace_bytes(num_tokens, top_k, num_experts, method, row_capacity=row_capacity)
    with memory.on_stream(ids, stream) as stream:
        made = {name: arrays.output(name, given.get(name), "int32", (size,), ids, 4) for name, size in sizes.items()}
        given_room = arrays.empty((-(-needed // 4),), "int32", ids) if workspace is None else workspace
        room = arrays.view(given_room, "workspace")
        if room.nbytes < needed or not room.is_contiguous or room.ptr % 4 or room.device != ids.device:
            raise ValueError(f"workspace: expected {needed} contiguous bytes on cuda:{ids.device}, got {room!r}")
        arguments = (memory.argument(ids), [memory.argument(view) for _, view in made.values()], memory.argument(room))
        where = (num_tokens, top_k, num_experts, ids.device, stream)
        if row_capacity is None:
            _module(method).run(*arguments, *where)
        else:
            from blazeproto.dispatch import limit

            limit.run(_module(method), *arguments, *where, row_capacity)
    # The router's choice as one list, in the caller's kind of array where that has a reshape.
    choice: Any = ids.owner if hasattr(ids.owner, "reshape") else memory.as_cupy(ids)
    return {"token_expert_indices": choice.reshape(-1), **{name: array for name, (array, _) in made.items()}}
