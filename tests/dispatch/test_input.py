"""What is refused before anything is launched, by a function and its twin in the same words. None of it needs a GPU."""

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
from tests.refusals import refuses


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


def with_map(array):
    return {"out": OUT | {"token_index_map": array}}


FIXED = [  # argument, topk_experts, num_experts, options; beside the wrong types of tests/test_wrong_arguments.py
    ("num_experts", IDS, 0, {}, ValueError),
    ("num_experts", IDS, 2**40, {}, ValueError),
    ("topk_experts", IDS.reshape(-1), 8, {}, ValueError),
    ("topk_experts", IDS[:, :0], 8, {}, ValueError),
    ("topk_experts", IDS.astype("uint32"), 8, {}, TypeError),
    ("topk_experts", IDS.astype("int16"), 8, {}, TypeError),
    ("topk_experts", np.asfortranarray(IDS), 8, {}, ValueError),
    ("topk_experts", IDS[::2], 8, {}, ValueError),
    ("out", IDS, 8, {"out": IDS}, TypeError),
    ("out", IDS, 8, {"out": ()}, ValueError),
    ("out", IDS, 8, {"out": {**OUT, "overflow": IDS}}, ValueError),
    ("out", IDS, 8, {"out": (*OUT.values(), IDS)}, ValueError),
    ("out", IDS.astype("int64"), 8, {"out": OUT}, ValueError),
    ("token_index_map", IDS, 8, with_map(ints(0)), ValueError),
    ("token_index_map", IDS, 8, with_map(READ_ONLY), ValueError),
    ("token_index_map", IDS, 8, with_map(OUT["expert_pair_indices"]), ValueError),
    ("topk_experts", ints([0, 1], [2, 2]), 8, {"validate": True}, ValueError),
]
PAIRS = (ints(0, 1, 2, -1), ints(0, 0, 2, 0), ints(0, 2, 2, 3))  # three tokens with 2, 0 and 1 pairs, then a spare one
VARYING = [  # argument, the arrays in PAIRS' place, options
    ("pair_experts", {0: PAIRS[0].reshape(2, 2)}, {}, ValueError),
    ("pair_tokens", {1: ints(0, 0, 2)}, {}, ValueError),
    ("pair_tokens", {1: ints(0, 0, 2, 0, dtype="int64")}, {}, TypeError),
    ("token_offsets", {2: ints(0, 2, 2, 3, dtype="int64")}, {}, TypeError),
    ("token_offsets", {2: ints()}, {}, ValueError),
    ("token_offsets", {2: ints([0, 3])}, {}, ValueError),
    *(
        ("token_offsets", {2: ints(*offsets)}, {"validate": True}, ValueError)
        for offsets in ([0, 5, 1, 3], [0, 2, 1, 3], [1, 2, 2, 3], [0, 2, 2, 5], [-1, 2, 2, 3])
    ),
    *(
        ("pair_tokens", {1: ints(*tokens)}, {"validate": True}, ValueError)
        for tokens in ([0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 3, 0], [0, 0, -1, 0])
    ),
    *(("pair_tokens", {0: ints(0, 1, 2, expert)}, {"validate": True}, ValueError) for expert in (3, 0)),
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


@pytest.mark.parametrize(("argument", "ids", "num_experts", "options", "error"), FIXED)
def test_bad_input_is_named(builders, argument, ids, num_experts, options, error):
    if argument == "token_index_map" and builders[0] is build_dispatch:
        if options["out"][argument] is READ_ONLY:
            pytest.skip("a CUDA array knows no such thing")
        pytest.importorskip("numba.cuda", reason="outputs are looked at once the method is there")
    refuses(lambda: builders[0](ids, num_experts, **options), argument, error)


@pytest.mark.parametrize(("argument", "changes", "options", "error"), VARYING)
def test_bad_input_of_a_varying_number_is_named(builders, argument, changes, options, error):
    pairs = [changes.get(place, array) for place, array in enumerate(PAIRS)]
    refuses(lambda: builders[1](*pairs, 4, **options), argument, error)


def test_sound_pairs_are_taken():
    assert reference.build_dispatch_varying(*PAIRS, 4, validate=True).token_index_map.tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("ids", [on_device((2**28, 8)), on_device((4, 2), strides=(1, 4))])
def test_bad_device_arrays_are_named(ids):
    refuses(lambda: build_dispatch(ids, 8), "topk_experts")


@pytest.mark.parametrize("ids", [torch.zeros(4, 2, dtype=torch.int32), on_device((4, 2)), IDS.astype(">i4")])
def test_a_twin_takes_numpy_arrays_alone(ids):
    refuses(lambda: reference.build_dispatch(ids, 8), "topk_experts", TypeError)


@pytest.mark.parametrize(
    ("argument", "shape", "options"),
    [
        ("num_tokens", (-1, 2, 8), {}),
        ("top_k", (4, 0, 8), {}),
        ("method", (4, 2, 8), {"method": "tild"}),
        ("row_capacity", (4, 2, 8), {"row_capacity": -1}),
        ("top_k", (4, 2**16, 8), {"method": "dense"}),
    ],
)
@pytest.mark.parametrize("function", [workspace_bytes, prepare_dispatch])
def test_bad_shapes_are_named(argument, shape, options, function):
    pytest.importorskip("numba.cuda")
    refuses(lambda: function(*shape, **options), argument)


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
