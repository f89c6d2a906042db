"""From the router's choice to a `Dispatch`: checks, memory, and which kernels run in which order.

    topk_experts (T, K) --method--> expert_pair_indices, expert_token_offsets, token_index_map

On the caller's current stream, without waiting for the device; once its kernels are compiled (`prepare_dispatch`), a
call with ``out`` and ``workspace`` allocates nothing and can be captured in a CUDA graph.

A method is a module of its name, imported when first used, for it imports Numba; with a row_capacity `limit.Limited`. It has

    workspace_bytes(num_tokens, top_k, num_experts)
    kernels(num_tokens, top_k, num_experts, ids)      those that a dispatch of this shape launches; ids: their dtype
    run(ids, lists, workspace, num_tokens, top_k, num_experts, device, stream)     fills the lists of `Dispatch`

run takes kernel arguments (`memory.argument`). ``lists`` are expert_pair_indices, expert_token_offsets and token_index_map, and
for int64 ids a fourth: token_expert_indices, their int32 copy; with a row_capacity overflow is the last.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from blazeproto.dispatch.arguments import MAX_PAIRS, METHODS, Method, Out, Request, check_apart, fixed, varying
from blazeproto.dispatch.structures import Dispatch
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library

__all__ = [
    "MAX_PAIRS",
    "Method",
    "build_dispatch",
    "build_dispatch_varying",
    "fill_dispatch",
    "prepare_dispatch",
    "workspace_bytes",
]


@any_library("blazeproto.dispatch.reference", {}, simulated=True)
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

    topk_experts: (T, K) int32 or int64, contiguous: torch, CuPy, Numba, JAX; of NumPy arrays, and of others in host memory, the
        twin is computed. Ids in a row are distinct; an id outside [0, E) means "not here" and takes no row.
    num_experts: E. It may be smaller than K: of K choices few may be here (expert parallelism).
    row_capacity: R, the largest number of rows; default: a row for every pair. If more pairs have an expert, the rows from
        R on, the last in expert order, are left out: expert_pair_indices has min(R, T·K) entries, expert_token_offsets none
        above R, token_index_map is -1 for the pairs concerned, and ``overflow`` (1,) int32 counts them. Without a
        capacity overflow is None, and nothing more is launched.
    method: "tiled" (default), "dense" or "sort"; one result, three ways (tiled.py, dense.py, sort.py).
    validate: raise ValueError if a row names an expert twice; waits for the device. Without it such a row gives an
        unspecified dispatch whose indices are all in bounds.
    out: arrays to fill: (expert_pair_indices (T·K,), expert_token_offsets (E+1,), token_index_map (T·K,)) as a tuple
        or by name, int32; for int64 ids also token_expert_indices (T·K,), and last, with a row_capacity, overflow (1,).
    workspace: (any,) dtype and shape, contiguous, 4-byte aligned, of at least `workspace_bytes` bytes.
    stream: a raw cudaStream_t; default: the caller's current one.

    Returns a Dispatch of the kind of array that came: torch, CuPy (for Numba's too), JAX, NumPy. token_expert_indices is
    topk_experts itself, flat; of int64 ids an int32 copy, in which ids outside [0, E) are -1.

    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    return fixed(arrays.view, memory.as_cupy, _build, locals())


@any_library("blazeproto.dispatch.reference", {}, simulated=True)
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
    """The dispatch of a number of experts that varies from token to token: token rounding (SonicMoE §5), capacity.

    pair_experts: (P,) int32 or int64, by token; P is a static capacity, and pairs not used hold an id outside [0, E).
    pair_tokens: (P,) int32, the token of each pair.  token_offsets: (T+1,) int32, where each token's pairs begin.
    validate: raise ValueError unless token_offsets ascends from 0 to at most P, and pair_tokens names for each pair with an
        expert the token whose offsets enclose it; waits for the device.
    num_experts, row_capacity, method, out, stream: as in `build_dispatch`, each pair being a token with one expert.
    workspace: (any,) dtype and shape, of workspace_bytes(P, 1, num_experts) bytes.
    TypeError or ValueError names the argument, what was expected and what came.
    """
    return varying(arrays.view, memory.as_cupy, _build, locals())


def workspace_bytes(
    num_tokens: int, top_k: int, num_experts: int, method: Method = "tiled", *, row_capacity: int | None = None
) -> int:
    """Bytes of ``workspace`` that a dispatch of T tokens, K and E needs.

    num_tokens, top_k, num_experts: T, K, E.  method: "tiled" needs a table of at most 5 % of the index lists' 8·T·K bytes
    (with at least two rows of E entries), "dense" mostly the T·E map; "sort" takes its memory from CuPy.
    row_capacity: whatever it is, adds 4·T·K; None: there is none. TypeError or ValueError for what cannot be a shape.
    """
    shape = _checked_shape(num_tokens, top_k, num_experts, row_capacity, method)
    needed: int = _method(method, row_capacity).workspace_bytes(*shape)
    return needed


def _checked_shape(
    num_tokens: int, top_k: int, num_experts: int, row_capacity: int | None, method: str
) -> tuple[int, int, int]:
    checks.one_of("method", method, METHODS)
    if row_capacity is not None:
        checks.integer("row_capacity", row_capacity, least=0)
    return (
        checks.integer("num_tokens", num_tokens, least=0),
        checks.integer("top_k", top_k, least=1),
        checks.integer("num_experts", num_experts, least=1),
    )


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

    num_tokens, top_k, num_experts: T, K, E.  method: as in `build_dispatch`.
    row_capacity: None or any number, for a capacity.  dtype: of the ids.  device: a CUDA ordinal.
    TypeError or ValueError for what cannot be a shape, or for another method or dtype.
    """
    shape = _checked_shape(num_tokens, top_k, num_experts, row_capacity, method)
    checks.one_of("dtype", dtype, ("int32", "int64"))
    checks.integer("device", device, least=0)
    for kernel in _method(method, row_capacity).kernels(*shape, dtype):
        kernel.load(device)


def fill_dispatch(topk_experts: Any, num_experts: int, lists: tuple[Any, ...]) -> None:
    """`build_dispatch` of a layer: of torch tensors on the current GPU, by tiles, into ``lists``. Its other checks would take the
    host longer than the launches.

    topk_experts: (T, K) or (P,), pairs that are tokens with one expert each; int32 or int64.
    lists: expert_pair_indices (R,), expert_token_offsets (E+1,) and token_index_map (P,), int32. Rows from R on are left out.
    ValueError for other ids, and for no expert.
    """
    ids = topk_experts if topk_experts.dim() == 2 else topk_experts[:, None]
    dtype, (num_tokens, top_k), num_pairs = str(ids.dtype), ids.shape, ids.numel()
    if dtype not in ("torch.int32", "torch.int64") or not top_k or num_pairs > MAX_PAIRS or num_experts < 1:
        raise ValueError(
            f"topk_experts: expected int32 or int64 (T, K) or (P,), K >= 1, at most {MAX_PAIRS} pairs, and at least 1 expert; "
            f"got {dtype} {tuple(topk_experts.shape)} and {num_experts}"
        )
    ids, shape, capacity = ids.contiguous(), (num_tokens, top_k, num_experts), len(lists[0])
    limited, copied = capacity < num_pairs, dtype == "torch.int64"
    # The int32 copy that the kernels make of other ids, and the overflow.
    extra = [lists[0].new_empty(size) for size, wanted in ((num_pairs, copied), (1, limited)) if wanted]
    method = _method("tiled", capacity if limited else None)
    workspace = lists[0].new_empty(method.workspace_bytes(*shape) // 4)
    filled, stream = [array.data_ptr() for array in (*lists, *extra)], arrays.current_stream(ids)
    method.run(ids.data_ptr(), filled, workspace.data_ptr(), *shape, ids.get_device(), stream)


def _method(name: str, row_capacity: int | None) -> Any:
    """The method of a name, for a dispatch with this row_capacity."""
    module = _module(name)
    return module if row_capacity is None else _module("limit").Limited(module, row_capacity)


@cache
def _module(name: str) -> Any:
    return import_module(f"blazeproto.dispatch.{name}")


def _build(request: Request, num_tokens: int, top_k: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a Dispatch, by name, for flat or (T, K) ids."""
    ids, workspace = request.ids, call["workspace"]
    method, shape = _method(call["method"], request.row_capacity), (num_tokens, top_k, request.num_experts)
    needed = method.workspace_bytes(*shape)
    with memory.on_stream(ids, call["stream"]) as stream:
        made = {
            name: arrays.output(name, request.given.get(name), "int32", (size,), ids, 4)
            for name, size in request.sizes.items()
        }
        given_room = arrays.empty((-(-needed // 4),), "int32", ids) if workspace is None else workspace
        room = arrays.expect("workspace", given_room, tuple(arrays.ITEM_BYTES), device=ids.device, alignment=4)
        checks.require(room.nbytes >= needed, "workspace", f"at least {needed} bytes", room.nbytes)
        check_apart({"the ids": ids, "workspace": room, **{name: view for name, (_, view) in made.items()}})
        arguments = (memory.argument(ids), [memory.argument(view) for _, view in made.values()], memory.argument(room))
        method.run(*arguments, *shape, ids.device, stream)
    # The router's choice as one list, in the caller's kind of array where that has a reshape.
    choice: Any = ids.owner if hasattr(ids.owner, "reshape") else memory.as_cupy(ids)
    return {"token_expert_indices": choice.reshape(-1), **{name: array for name, (array, _) in made.items()}}
