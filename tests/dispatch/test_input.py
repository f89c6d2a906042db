"""What is refused before anything is launched, by a function and its twin in the same words. None of it needs a GPU."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blazeproto.dispatch import (
    build,
    build_dispatch,
    build_dispatch_varying,
    prepare_dispatch,
    reference,
    workspace_bytes,
)
from blazeproto.dispatch.build import MAX_PAIRS, fill_dispatch
from blazeproto.runtime import arrays, memory


def on_device(shape, dtype="int32", strides=None, device=0):
    """What `arrays.view` would make of a device array; nothing may be read from it."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return arrays.DeviceArray(256, shape, dtype, strides, device, None)


def ints(*values, dtype="int32"):
    return np.array(values, dtype)


IDS = np.zeros((4, 2), np.int32)
OUT = {"expert_pair_indices": ints(*[0] * 8), "expert_token_offsets": ints(*[0] * 9), "token_index_map": ints(*[0] * 8)}
READ_ONLY = ints(*[0] * 8)
READ_ONLY.flags.writeable = False

FIXED = [  # topk_experts, num_experts, options
    (IDS, 0, {}, ValueError, "num_experts: expected at least 1, got 0"),
    (IDS, -3, {}, ValueError, "num_experts: expected at least 1, got -3"),
    (IDS, 2.5, {}, TypeError, "num_experts: expected an int, got float"),
    (IDS, True, {}, TypeError, "num_experts: expected an int, got bool"),
    (IDS, None, {}, TypeError, "num_experts: expected an int, got NoneType"),
    (IDS, 2**40, {}, ValueError, "num_experts: expected at most 2147418112, for offsets are int32, got 1099511627776"),
    (IDS, 8, {"method": "hash"}, ValueError, "method: expected one of .*, got 'hash'"),
    (IDS, 8, {"method": "tild"}, ValueError, "method: expected one of .*, got 'tild'; did you mean 'tiled'"),
    (IDS, 8, {"method": None}, ValueError, "method: expected one of .*, got None"),
    (IDS.reshape(-1), 8, {}, ValueError, r"topk_experts: expected shape \(T, K\), got \(8,\)"),
    (IDS[:, :0], 8, {}, ValueError, r"topk_experts: expected \(T, K\) with K >= 1, got \(4, 0\)"),
    *(
        (IDS.astype(dtype), 8, {}, TypeError, f"topk_experts: expected dtype int32 or int64, got {dtype}")
        for dtype in ("float32", "float64", "bool", "uint8", "uint32", "uint64", "int16")
    ),
    (np.full((4, 2), np.nan), 8, {}, TypeError, "topk_experts: expected dtype int32 or int64, got float64"),
    (np.asfortranarray(IDS), 8, {}, ValueError, "topk_experts: expected a contiguous array, got strides"),
    (IDS[::2], 8, {}, ValueError, "topk_experts: expected a contiguous array, got strides"),
    ([[0, 1]], 8, {}, TypeError, "topk_experts: expected a .* array.*, got list"),
    (None, 8, {}, TypeError, "topk_experts: expected a .* array.*, got NoneType"),
    (IDS, 8, {"row_capacity": -1}, ValueError, "row_capacity: expected at least 0, got -1"),
    (IDS, 8, {"row_capacity": 2.0}, TypeError, "row_capacity: expected an int, got float"),
    (IDS, 8, {"row_capacity": True}, TypeError, "row_capacity: expected an int, got bool"),
    (IDS, 8, {"stream": "0"}, TypeError, "stream: expected an int, got str"),
    (IDS, 8, {"stream": -1}, ValueError, "stream: expected at least 0, got -1"),
    (IDS, 8, {"out": IDS}, TypeError, "out: expected a tuple, or a mapping by name, of arrays, got ndarray"),
    (
        IDS,
        8,
        {"out": ()},
        ValueError,
        "out: expected .* for int32 ids, got no expert_pair_indices, expert_token_offsets",
    ),
    (IDS, 8, {"out": {**OUT, "overflow": IDS}}, ValueError, "out: expected only .* for int32 ids, got 'overflow'"),
    (IDS, 8, {"out": (*OUT.values(), IDS)}, ValueError, "out: expected only .* for int32 ids, got 4 arrays"),
    (IDS.astype("int64"), 8, {"out": OUT}, ValueError, "out: expected .* for int64 ids, got no token_expert_indices"),
    (
        IDS,
        8,
        {"out": OUT | {"token_index_map": ints(0)}},
        ValueError,
        r"token_index_map: expected shape \(8\), got \(1,\)",
    ),
    (IDS, 8, {"out": OUT | {"token_index_map": READ_ONLY}}, ValueError, "token_index_map: .* got a read-only one"),
    (
        IDS,
        8,
        {"out": OUT | {"token_index_map": OUT["expert_pair_indices"]}},
        ValueError,
        "token_index_map: expected memory of its own, got some of expert_pair_indices",
    ),
    (ints([0, 1], [2, 2]), 8, {"validate": True}, ValueError, r"topk_experts: .* got \[2, 2\] for token 1"),
]
PAIRS = (ints(0, 1, 2, -1), ints(0, 0, 2, 0), ints(0, 2, 2, 3))  # three tokens with 2, 0 and 1 pairs, then a spare one
VARYING = [  # the arrays in PAIRS' place, options
    ({0: PAIRS[0].reshape(2, 2)}, {}, ValueError, r"pair_experts: expected shape \(P\), got \(2, 2\)"),
    ({0: PAIRS[0] > 0}, {}, TypeError, "pair_experts: expected dtype int32 or int64, got bool"),
    ({1: ints(0, 0, 2)}, {}, ValueError, r"pair_tokens: expected shape \(4\), got \(3,\)"),
    ({1: ints(0, 0, 2, 0, dtype="int64")}, {}, TypeError, "pair_tokens: expected dtype int32, got int64"),
    ({1: None}, {}, TypeError, "pair_tokens: expected a .* array"),
    ({2: ints(0, 2, 2, 3, dtype="int64")}, {}, TypeError, "token_offsets: expected dtype int32, got int64"),
    ({2: ints()}, {}, ValueError, r"token_offsets: expected \(T \+ 1,\), got \(0,\)"),
    ({2: ints([0, 3])}, {}, ValueError, r"token_offsets: expected shape \(T \+ 1\), got \(1, 2\)"),
    ({}, {"row_capacity": -3}, ValueError, "row_capacity: expected at least 0, got -3"),
    ({}, {"method": "sorted"}, ValueError, "method: .* did you mean 'sort'"),
    *(
        (
            {2: ints(*offsets)},
            {"validate": True},
            ValueError,
            "token_offsets: expected an ascent from 0 to at most 4, got",
        )
        for offsets in ([0, 5, 1, 3], [0, 2, 1, 3], [1, 2, 2, 3], [0, 2, 2, 5], [-1, 2, 2, 3])
    ),
    *(
        ({1: ints(*tokens)}, {"validate": True}, ValueError, f"pair_tokens: .*, got {tokens[2]} for pair 2")
        for tokens in ([0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 3, 0], [0, 0, -1, 0])
    ),
    *(
        ({0: ints(0, 1, 2, expert)}, {"validate": True}, ValueError, "pair_tokens: .*, got 0 for pair 3")
        for expert in (3, 0)
    ),
]


@pytest.fixture(params=["function", "twin"])
def builders(request, monkeypatch):
    """Both functions, or their twins. NumPy arrays take the place of device arrays, as in the simulator."""
    if request.param == "twin":
        return reference.build_dispatch, reference.build_dispatch_varying
    with contextlib.suppress(ImportError):  # where there is no Numba
        importlib.import_module("blazeproto.runtime.warp")  # which asks once, when it is imported
    for module in (arrays, memory):
        monkeypatch.setattr(module, "simulated", lambda: True)
    return build_dispatch, build_dispatch_varying


@pytest.mark.parametrize(("ids", "num_experts", "options", "error", "message"), FIXED)
def test_bad_input_is_named(request, builders, ids, num_experts, options, error, message):
    if "read-only" in message and builders[0] is build_dispatch:
        pytest.skip("a CUDA array knows no such thing")
    if "out" in options and "memory" in message and builders[0] is build_dispatch:
        pytest.importorskip("numba.cuda", reason="outputs are looked at once the method is there")
    with pytest.raises(error, match=message):
        builders[0](ids, num_experts, **options)


@pytest.mark.parametrize(("changes", "options", "error", "message"), VARYING)
def test_bad_input_of_a_varying_number_is_named(builders, changes, options, error, message):
    pairs = [changes.get(place, array) for place, array in enumerate(PAIRS)]
    with pytest.raises(error, match=message):
        builders[1](*pairs, 4, **options)


def test_sound_pairs_are_taken():
    assert reference.build_dispatch_varying(*PAIRS, 4, validate=True).token_index_map.tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (on_device((2**28, 8)), ValueError, r"topk_experts: expected at most 2147418112 pairs"),
        (on_device((4, 2), strides=(1, 4)), ValueError, "topk_experts: expected a contiguous array"),
        ([[1, 2]], TypeError, r"topk_experts: expected a device array \(.*\) or a NumPy array, got list"),
        (
            torch.zeros(4, 2, dtype=torch.int32, device="meta"),
            ValueError,
            "topk_experts: .* on a CUDA device, got .* meta",
        ),
    ],
)
def test_bad_device_arrays_are_named(ids, error, message):
    with pytest.raises(error, match=message):
        build_dispatch(ids, 8)


@pytest.mark.parametrize("ids", [torch.zeros(4, 2, dtype=torch.int32), on_device((4, 2)), IDS.astype(">i4")])
def test_a_twin_takes_numpy_arrays_alone(ids):
    with pytest.raises(TypeError, match="topk_experts: expected"):
        reference.build_dispatch(ids, 8)


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((-1, 2, 8), {}, ValueError, "num_tokens: expected at least 0, got -1"),
        ((4, 0, 8), {}, ValueError, "top_k: expected at least 1, got 0"),
        ((4, 2, 8.0), {}, TypeError, "num_experts: expected an int, got float"),
        ((4, 2, 8), {"method": "tild"}, ValueError, "method: .* did you mean 'tiled'"),
        ((4, 2, 8), {"row_capacity": -1}, ValueError, "row_capacity: expected at least 0, got -1"),
        ((4, 2**16, 8), {"method": "dense"}, ValueError, "top_k: expected at most 65535 with method='dense'"),
    ],
)
def test_bad_shapes_are_named(shape, options, error, message):
    pytest.importorskip("numba.cuda")
    for function in (workspace_bytes, prepare_dispatch):
        with pytest.raises(error, match=message):
            function(*shape, **options)


def test_a_bad_dtype_of_ids_to_prepare_for_is_named():
    with pytest.raises(ValueError, match=r"dtype: expected one of .*, got 'int16'"):
        prepare_dispatch(4, 2, 8, dtype="int16")


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [
        (torch.zeros(1, dtype=torch.int32).expand(MAX_PAIRS + 1), 4),
        (torch.zeros(5, 0, dtype=torch.int32), 4),
        (torch.zeros(5, 2, dtype=torch.int16), 4),
        (torch.zeros(5, 2, dtype=torch.int32), 0),
    ],
)
def test_a_layers_ids(ids, num_experts):
    with pytest.raises(ValueError, match=r"topk_experts: expected int32 or int64 \(T, K\) or \(P,\), K >= 1, at most"):
        fill_dispatch(ids, num_experts, ())


def test_a_layers_lists(monkeypatch):
    """int64 ids get a place for their copy, and fewer rows than pairs one for the overflow."""
    calls = []

    def method(name, capacity):
        run = lambda ids, lists, workspace, *rest: calls.append((len(lists), capacity, rest[:3]))  # noqa: E731
        return SimpleNamespace(workspace_bytes=lambda *shape: 4, run=run)

    monkeypatch.setattr(build, "_method", method)
    monkeypatch.setattr(arrays, "current_stream", lambda array: 7)
    for ids, rows in ((torch.zeros(4, 2).int(), 8), (torch.zeros(4, 2).long(), 8), (torch.zeros(8).long(), 5)):
        fill_dispatch(ids, 3, tuple(torch.zeros(size, dtype=torch.int32) for size in (rows, 4, 8)))
    assert calls == [(3, None, (4, 2, 3)), (4, None, (4, 2, 3)), (5, 5, (8, 1, 3))]
