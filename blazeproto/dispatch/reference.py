"""The specification: what a dispatch is, in NumPy. Same names and signatures as in this package.

A twin refuses what its function refuses, in the same words, but for what only a GPU asks for. It fills ``out`` where that is
given. ``method``, ``workspace`` and ``stream`` change nothing: the result is unique.
"""

from operator import attrgetter
from typing import Any

import numpy as np

from blazeproto.dispatch.arguments import Method, Out, Request, check_apart, fixed, varying
from blazeproto.dispatch.structures import Dispatch
from blazeproto.runtime.arrays import numpy_output, numpy_view


def build_dispatch(
    topk_experts: np.ndarray,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: Method = "tiled",
    validate: bool = False,
    out: Out = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Dispatch:
    """MoEBlaze §4.1's structures from topk_experts (T, K); see `blazeproto.dispatch.build_dispatch`.

    ValueError with ``validate`` when a row names an expert twice.
    """
    return fixed(numpy_view, attrgetter("owner"), _lists, locals())


def build_dispatch_varying(
    pair_experts: np.ndarray,
    pair_tokens: np.ndarray,
    token_offsets: np.ndarray,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    method: Method = "tiled",
    validate: bool = False,
    out: Out = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Dispatch:
    """The same for a number of experts that varies; see `blazeproto.dispatch.build_dispatch_varying`.

    ValueError with ``validate`` where the offsets do not ascend, or a pair with an expert lies outside its token's.
    """
    return varying(numpy_view, attrgetter("owner"), _lists, locals())


def _lists(request: Request, *_: Any) -> dict[str, Any]:
    """The lists, by name, in the caller's arrays where there are any."""
    out = {name: numpy_output(name, array, "int32", (request.sizes[name],)) for name, array in request.given.items()}
    check_apart({"the ids": request.ids, **out})
    experts, num_experts = request.ids.owner.reshape(-1), request.num_experts
    valid = (experts >= 0) & (experts < num_experts)
    keys = np.where(valid, experts, num_experts).astype(np.uint16 if num_experts < 2**16 else np.int64)
    lengths = np.bincount(keys, minlength=num_experts + 1)[:num_experts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    order = np.argsort(keys, kind="stable").astype(np.int32)  # by expert, ascending pairs inside one
    order[offsets[-1] :] = -1  # pairs without an expert have no row
    index_map = np.full(experts.size, -1, np.int32)
    index_map[order[: offsets[-1]]] = np.arange(offsets[-1], dtype=np.int32)
    ids = experts if experts.dtype == np.int32 else np.where(valid, experts, -1).astype(np.int32)
    overflow = None
    if request.row_capacity is not None:
        capacity = np.int32(request.row_capacity)
        overflow = np.maximum(offsets[-1:] - capacity, 0)
        order, offsets = order[:capacity], np.minimum(offsets, capacity)
        index_map[index_map >= capacity] = -1
    lists = {
        "expert_pair_indices": order,
        "expert_token_offsets": offsets,
        "token_index_map": index_map,
        "token_expert_indices": ids,
        "overflow": overflow,
    }
    for name, array in request.given.items():
        array[...] = lists[name]
    return lists | request.given
