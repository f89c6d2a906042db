"""The checks and the result that `build_dispatch` and `build_dispatch_varying` share with their twins.

The twins look at NumPy arrays, the functions at device arrays: that difference is ``look``, `arrays.numpy_view` or `arrays.view`.
Whatever needs the values of an array is checked with ``validate=True`` alone.
"""

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args

from blazeproto.dispatch.structures import Dispatch
from blazeproto.runtime import arrays, checks
from blazeproto.runtime.arrays import DeviceArray

Method = Literal["tiled", "dense", "sort"]
METHODS: tuple[str, ...] = get_args(Method)
MAX_PAIRS = 2**31 - 2**16  # rows are int32, and the kernels count a step or two past the last one
Out = Mapping[str, Any] | tuple[Any, ...] | None
Look = Callable[[Any, str], DeviceArray]


class Request(NamedTuple):
    """A dispatch that can be made."""

    ids: DeviceArray
    num_experts: int
    row_capacity: int | None  # at most a row for every pair
    sizes: dict[str, int]  # entries of each list that is to be made, by name
    given: dict[str, Any]  # those of them that the caller has memory for: all or none


def fixed(
    look: Look, values: Callable[[DeviceArray], Any], make: Callable[..., dict[str, Any]], call: Mapping[str, Any]
) -> Dispatch:
    """`build_dispatch`, by NumPy or by the kernels.

    look: an array's view.  values: the array of a view, as checks of its values take it.
    make: ``make(request, num_tokens, top_k, call)`` gives the lists, by name.  call: the public function's parameters by name.
    """
    request = _checked(look, "topk_experts", 2, call)
    num_tokens, top_k = request.ids.shape
    if call["validate"]:
        check_distinct(values(request.ids), request.num_experts)
    lists = make(request, num_tokens, top_k, call)
    return Dispatch(**lists, num_experts=request.num_experts, top_k=top_k, num_tokens=num_tokens)


def varying(
    look: Look, values: Callable[[DeviceArray], Any], make: Callable[..., dict[str, Any]], call: Mapping[str, Any]
) -> Dispatch:
    """`build_dispatch_varying`, as `fixed`."""
    request = _checked(look, "pair_experts", 1, call)
    tokens, offsets = _varying_pairs(look, request.ids, call["pair_tokens"], call["token_offsets"])
    if call["validate"]:
        check_pairs(values(request.ids), values(tokens), values(offsets), request.num_experts)
    return Dispatch(
        **make(request, request.ids.size, 1, call),
        num_experts=request.num_experts,
        top_k=None,
        num_tokens=offsets.size - 1,
        token_offsets=call["token_offsets"],
        pair_tokens=call["pair_tokens"],
    )


def _checked(look: Look, name: str, dimensions: int, call: Mapping[str, Any]) -> Request:
    """The arguments that the two functions share. name: of the ids.  dimensions: of the ids."""
    experts, row_capacity, stream = call[name], call["row_capacity"], call["stream"]
    checks.one_of("method", call["method"], METHODS)
    num_experts = checks.integer("num_experts", call["num_experts"], least=1)
    checks.require(num_experts <= MAX_PAIRS, "num_experts", f"at most {MAX_PAIRS}, for offsets are int32", num_experts)
    if stream is not None:
        checks.integer("stream", stream, least=0)
    ids = arrays.expect(
        name, look(experts, name), ("int32", "int64"), ("T", "K") if dimensions == 2 else ("P",), alignment=4
    )
    checks.require(dimensions == 1 or ids.shape[1] >= 1, name, "(T, K) with K >= 1", ids.shape)
    checks.require(ids.size <= MAX_PAIRS, name, f"at most {MAX_PAIRS} pairs, for rows are int32", ids.size)
    sizes = {"expert_pair_indices": ids.size, "expert_token_offsets": num_experts + 1, "token_index_map": ids.size}
    if ids.dtype == "int64":
        sizes["token_expert_indices"] = ids.size
    if row_capacity is not None:
        row_capacity = min(checks.integer("row_capacity", row_capacity, least=0), ids.size)
        sizes |= {"expert_pair_indices": row_capacity, "overflow": 1}
    return Request(ids, num_experts, row_capacity, sizes, _given(call["out"], sizes, ids.dtype))


def _given(out: Out, sizes: Mapping[str, int], ids: str) -> dict[str, Any]:
    if out is None:
        return {}
    if not isinstance(out, Mapping | tuple):
        raise TypeError(f"out: expected a tuple, or a mapping by name, of arrays, got {type(out).__name__}")
    given = dict(out) if isinstance(out, Mapping) else dict(zip(sizes, out, strict=False))
    missing = [name for name in sizes if given.get(name) is None]
    expected = f"{', '.join(sizes)} for {ids} ids"
    checks.require(not missing, "out", expected, f"no {', '.join(missing)}")
    if len(out) > len(sizes):
        extra = ", ".join(map(repr, given.keys() - sizes)) if isinstance(out, Mapping) else f"{len(out)} arrays"
        raise ValueError(f"out: expected only {expected}, got {extra}")
    return given


def _varying_pairs(
    look: Look, ids: DeviceArray, pair_tokens: Any, token_offsets: Any
) -> tuple[DeviceArray, DeviceArray]:
    """Views of the two arrays that only a varying number of experts per token needs."""
    tokens = arrays.expect(
        "pair_tokens", look(pair_tokens, "pair_tokens"), "int32", (ids.size,), device=ids.device, alignment=4
    )
    offsets = arrays.expect(
        "token_offsets", look(token_offsets, "token_offsets"), "int32", ("T + 1",), device=ids.device, alignment=4
    )
    checks.require(offsets.size > 0, "token_offsets", "(T + 1,)", offsets.shape)
    return tokens, offsets


def check_apart(views: Mapping[str, DeviceArray]) -> None:
    """ValueError where two arrays share memory; all of them are written to but the ids."""
    for (name, a), (other, b) in combinations(views.items(), 2):
        if arrays.overlap(a, b):
            raise ValueError(f"{other}: expected memory of its own, got some of {name}")


# --- With validate=True: NumPy or CuPy arrays; waits for the device ---------------------------------------------------


def check_distinct(topk_experts: Any, num_experts: int) -> None:
    """ValueError if a row of topk_experts (T, K) names an expert twice."""
    rows = topk_experts.copy()
    rows.sort(axis=1)
    twice = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0) & (rows[:, 1:] < num_experts)
    if bool(twice.any()):
        token = int(twice.any(axis=1).argmax())
        row = topk_experts[token].tolist()
        raise ValueError(f"topk_experts: expected distinct experts in a token's row, got {row} for token {token}")


def check_pairs(experts: Any, tokens: Any, offsets: Any, num_experts: int) -> None:
    """ValueError unless offsets (T+1,) ascend from 0 to at most P, and each pair with an expert lies between the offsets of
    its token."""
    num_pairs, num_tokens = len(experts), len(offsets) - 1
    if offsets[0] != 0 or offsets[-1] > num_pairs or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"token_offsets: expected an ascent from 0 to at most {num_pairs}, got {offsets.tolist()}")
    pairs = ((experts >= 0) & (experts < num_experts)).nonzero()[0]
    owners = tokens[pairs]
    outside = (owners < 0) | (owners >= num_tokens)
    if not bool(outside.any()):
        outside = (pairs < offsets[owners]) | (pairs >= offsets[owners + 1])
    if bool(outside.any()):
        pair = int(pairs[int(outside.argmax())])
        raise ValueError(
            f"pair_tokens: expected the token whose offsets enclose the pair, got {int(tokens[pair])} for pair {pair}"
        )
