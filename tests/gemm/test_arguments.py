"""What a product refuses, and what it says then; and its twin. Addresses stand in for device arrays: no GPU is needed."""

import inspect
import itertools
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from blazeproto import gemm
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.reference import build_dispatch
from blazeproto.gemm import arguments, weight
from blazeproto.gemm.linear import GROUPED_MM, may_lie_over
from blazeproto.gemm.specification import Specification
from blazeproto.runtime import arch, driver
from blazeproto.runtime.arrays import DeviceArray
from tests.refusals import refuses

T, K, D, N, E = 64, 2, 128, 64, 4
R = T * K
PLACES = itertools.count(1 << 20, 1 << 20)  # arrays that don't overlap


def on_gpu_0(dtype: str, *shape: int) -> DeviceArray:
    strides = [1]
    for length in shape[:0:-1]:
        strides.insert(0, strides[0] * length)
    return DeviceArray(next(PLACES), shape, dtype, tuple(strides), 0, None)


bf16, f32 = partial(on_gpu_0, "bfloat16"), partial(on_gpu_0, "float32")
DISPATCH = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", E + 1), on_gpu_0("int32", R), None, E, K, T)
UP = {"x": bf16(T, D), "up_proj": bf16(E, 2 * N, D), "h": bf16(R, 2 * N), "act": bf16(R, N)}
WEIGHT = {"d_out": bf16(T, D), "a_scaled": bf16(R, N), "dw": bf16(E, D, N), "workspace": f32(0)}
MANY = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", 601), on_gpu_0("int32", R), None, 600, K, T)

GATHERED = {"x": bf16(2**28, 128), "dispatch": replace(DISPATCH, num_tokens=2**28)}
BAD = [  # of a product alone: function, changed, argument, error
    (
        "grouped_mm",
        {"a": bf16(R, 0), "weights": bf16(E, 64, 0), "low": (bf16(R, 8), bf16(E, 64, 8))},
        "a",
        ValueError,
    ),
    ("up_forward", UP | {"x": f32(T, D)}, "x", TypeError),
    ("up_forward", UP | {"up_proj": bf16(E, 2 * N, 12)}, "up_proj", ValueError),
    ("up_forward", UP | {"up_proj": bf16(E, 24, D)}, "up_proj", ValueError),
    ("up_forward", UP | {"up_proj": bf16(600, 2 * N, D), "dispatch": MANY}, "up_proj", ValueError),
    ("down_backward_weight", WEIGHT | {"dw": bf16(600, D, N), "dispatch": MANY}, "dw", ValueError),
    ("up_forward", UP | GATHERED, "x", ValueError),
    ("up_forward", UP | {"config": gemm.TileConfig(cluster=2, tickets=True)}, "config", ValueError),
    ("down_backward_weight", WEIGHT | {"accumulate": True}, "accumulate", ValueError),
]


@pytest.fixture(autouse=True)
def _gpu_0_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 0)
    monkeypatch.setattr(arguments, "current_stream", lambda array: 0)
    monkeypatch.setattr(weight, "current_device", lambda: 0)
    monkeypatch.setattr(weight, "workspace_elements", lambda *_: 0)
    monkeypatch.setattr(arch, "capability_of", lambda _: (9, 0))
    arch._arch_of_gpu.cache_clear()
    monkeypatch.setattr(driver, "launch", lambda *_: pytest.fail("something was launched"))


@pytest.mark.parametrize(("function", "arguments", "argument", "error"), BAD)
def test_bad_input_is_named(function: str, arguments: dict, argument: str, error: type[Exception]) -> None:
    refuses(lambda: RUNS[function](**{"dispatch": DISPATCH} | arguments), argument, error)


@pytest.mark.parametrize(
    ("name", "width", "offset"), [("hopper", 512, 0), ("hopper", 256, 16), ("ampere", 512, 0), ("ampere", 256, 0)]
)
def test_an_output_may_lie_over_the_rows_only_where_a_tile_has_them_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int, offset: int
) -> None:
    """Another tile may not have read yet what this one overwrites. A user's entry has Ampere's tiles 128 wide."""
    monkeypatch.setitem(arch.AMPERE.tiles, "down_forward", gemm.TileConfig(tile_n=128, stages=2, deferred=False))
    act, down_proj = bf16(R, width), bf16(E, width, width)
    over = act._replace(ptr=act.ptr + offset)
    with arch.kernels_of(name):
        assert refuses(lambda: gemm.down_forward(act, down_proj, DISPATCH, y=over), "y").got == "some of act"
        assert not may_lie_over(None, False, (2 * width, 64), 64, arch.ARCHES[name])  # a slice of the columns


# --- The same refusal by a product and by its twin ------------------------------------------------------------------------


class Spec(NamedTuple):
    """An array by shape and kind: bf16 or fp32 for a product, float64 for a twin."""

    shape: tuple[int, ...]
    kind: str = "bfloat16"

    def for_a_product(self) -> object:
        return on_gpu_0(self.kind, *self.shape)

    def for_a_twin(self) -> np.ndarray:
        dtype = np.float64 if self.kind in ("bfloat16", "float32") else self.kind
        return np.zeros(self.shape, dtype)


def scores(count: int = R) -> Spec:
    return Spec((count,), "float32")


LISTS = {
    "expert_pair_indices": Spec((R,), "int32"),
    "expert_token_offsets": Spec((E + 1,), "int32"),
    "token_index_map": Spec((R,), "int32"),
    "token_expert_indices": None,
    "num_experts": E,
    "top_k": K,
    "num_tokens": T,
}
VARYING = {"top_k": None, "pair_tokens": Spec((R,), "int32"), "token_offsets": Spec((T + 1,), "int32")}
X, H, ACT, Y, UP_PROJ, DOWN_PROJ = (
    Spec(shape) for shape in ((T, D), (R, 2 * N), (R, N), (R, D), (E, 2 * N, D), (E, D, N))
)
SPECIFICATIONS = {name: product.spec for name, product in gemm.PRODUCTS.items()} | {"grouped_mm": GROUPED_MM}
RUNS = {name: product.run for name, product in gemm.PRODUCTS.items()} | {"grouped_mm": gemm.grouped_mm}
LENGTHS = gemm.Sizes(T, D, N, E, K).letters | {"width": D, "reduction": N}


def sound(spec: Specification) -> dict[str, Spec]:
    """Arrays that a call may have, all but its low-rank factors."""
    arrays = [array for array in (*spec.inputs, *spec.outputs) if not array.name.startswith("low ")]
    shapes = {array.name: tuple(LENGTHS[letter] for letter in array.shape.split()) for array in arrays}
    return {array.name: Spec(shapes[array.name], array.dtype) for array in arrays}


SOUND = {name: sound(spec) for name, spec in SPECIFICATIONS.items()}
REQUIRED = {  # arrays that are not given, and not made either
    name: [
        array.name
        for array in (*spec.inputs, *spec.outputs)
        if not array.optional and (array in spec.inputs or array.added)
    ]
    for name, spec in SPECIFICATIONS.items()
}
WRITTEN = {name: [array.name for array in spec.outputs] for name, spec in SPECIFICATIONS.items()}
WRONG = {  # what no wrong value of tests/test_wrong_arguments.py is: (function, argument), arguments, fields of the dispatch
    ("up_forward", "bias"): ({"bias": Spec((E, N))}, {}),
    ("up_forward", "act"): ({"act": X}, {}),
    ("grouped_mm", "columns"): ({"columns": range(256), "out": None}, {}),
    ("grouped_mm", "a"): ({"gather": True}, {}),
    ("down_forward", "act"): ({"act": Spec((R, N + 8))}, {}),
    ("down_forward", "y"): ({"y": X}, {}),
    ("combine", "columns"): ({"columns": range(64)}, {}),
    ("combine", "scores"): ({"scores": scores(R + 8)}, {}),
    ("down_backward_weight", "dw"): ({"dw": None, "accumulate": True}, {}),
    ("down_backward_weight", "d_out"): ({"gather": False}, {}),
    ("expert_row_sum", "out"): ({"out": None, "accumulate": True}, {}),
    ("combine", "dispatch.num_tokens"): ({}, {"num_tokens": -1}),
    ("combine", "dispatch.top_k"): ({}, {"top_k": 0}),
    ("combine", "dispatch.token_index_map"): ({"scores": None}, {"top_k": 3}),
    ("combine", "dispatch.expert_token_offsets"): ({}, {"num_experts": 5}),
    ("combine", "dispatch.expert_pair_indices"): (
        {"y": Spec((R + 1, D))},
        {"expert_pair_indices": Spec((R + 1,), "int32")},
    ),
    ("combine", "dispatch.pair_tokens"): ({}, {"pair_tokens": Spec((R,), "int32")}),
    ("combine", "dispatch.token_offsets"): ({}, VARYING | {"token_offsets": Spec((T,), "int32")}),
}
REFUSED = [
    *((*where, *what, ValueError) for where, what in WRONG.items()),
    ("combine", "out", {"columns": range(D), "out": None}, {}, TypeError),
    ("combine", "dispatch.pair_tokens", {}, VARYING | {"pair_tokens": None}, TypeError),
    *((function, name, {name: None}, {}, TypeError) for function, names in REQUIRED.items() for name in names),
    *((function, "dispatch", {"dispatch": None}, {}, TypeError) for function in SOUND),
]


def call(by_twin: bool, function: str, changes: dict, fields: dict | None = None) -> object:
    def made(value: object) -> object:
        if isinstance(value, Spec):
            return value.for_a_twin() if by_twin else value.for_a_product()
        return value

    lists = {name: made(value) for name, value in (LISTS | (fields or {})).items()}
    given = {name: made(value) for name, value in (SOUND[function] | changes).items()}
    run = (gemm.TWINS if by_twin else RUNS)[function]
    return run(**{"dispatch": Dispatch(**lists)} | given)


@pytest.mark.parametrize("by_twin", [False, True], ids=["product", "twin"])
@pytest.mark.parametrize(("function", "argument", "changes", "fields", "error"), REFUSED)
def test_products_and_twins_refuse_the_same(
    by_twin: bool, function: str, argument: str, changes: dict, fields: dict, error: type[Exception]
) -> None:
    refuses(lambda: call(by_twin, function, changes, fields), argument, error)


WORKSPACES = {
    "down_backward_act": Spec((gemm.score_partials(N), R), "float32"),
    "down_backward_weight": Spec((0,), "float32"),
    "up_backward_weight": Spec((0,), "float32"),
    "expert_row_sum": Spec((6, D), "float32"),
}


@pytest.mark.parametrize("function", SOUND)
def test_an_array_on_another_gpu_is_named(function: str) -> None:
    workspace = {"workspace": WORKSPACES[function]} if function in WORKSPACES else {}
    arrays = {name: spec.for_a_product() for name, spec in (SOUND[function] | workspace).items()}
    lists = {name: spec.for_a_product() for name, spec in (LISTS | VARYING).items() if isinstance(spec, Spec)}
    for name in (*arrays, *lists):
        placed = {key: array._replace(device=int(key == name)) for key, array in (arrays | lists).items()}
        dispatch = Dispatch(**LISTS | VARYING | {key: placed.pop(key) for key in lists})
        refused = refuses(
            partial(RUNS[function], **placed, dispatch=dispatch), f"dispatch.{name}" if name in lists else name
        )
        assert refused.got == "one on cuda:1"


def test_arrays_in_different_places_are_named() -> None:
    on_gpu, on_cpu = bf16(R, D), torch.zeros(R, D, dtype=torch.bfloat16)
    refuses(lambda: gemm.combine(on_cpu, DISPATCH), "dispatch.expert_pair_indices")
    refuses(lambda: gemm.combine(on_gpu, DISPATCH, scores=on_cpu), "scores")


@pytest.mark.parametrize("function", SOUND)
def test_the_arguments_above_are_sound(function: str) -> None:
    """So that each refusal is of what a case changed; and every array is a parameter of the function."""
    call(True, function, {})
    assert SOUND[function].keys() <= inspect.signature(gemm.TWINS[function]).parameters.keys()


BY_TORCH_ALONE = {"act", "needs"}  # of down_backward_act's formula: what a backend has kept, and what it wants


@pytest.mark.parametrize("function", SOUND)
def test_a_formula_takes_what_the_function_takes(function: str) -> None:
    """A parameter of another name would never be handed to it."""
    (m, *parameters), public = (
        inspect.signature(thing).parameters for thing in (SPECIFICATIONS[function].formula, RUNS[function])
    )
    assert m == "m" and {*parameters} - BY_TORCH_ALONE <= public.keys()


MAY_BE_ONE = {  # an output and the input that it may lie over, where the two are of one shape
    (name, array.name, array.over)
    for name, spec in SPECIFICATIONS.items()
    for array in spec.outputs
    if array.over and SOUND[name][array.name] == SOUND[name][array.over]
}


@pytest.mark.parametrize("function", SOUND)
def test_outputs_share_no_memory_with_other_arrays(function: str) -> None:
    memory = np.zeros(2**17)
    for output in WRITTEN[function]:
        for other in SOUND[function].keys() - {output}:
            if (function, output, other) in MAY_BE_ONE:
                continue
            specs = {name: SOUND[function][name] for name in (output, other)}
            shared = {name: memory[: np.prod(spec.shape)].reshape(spec.shape) for name, spec in specs.items()}
            on_gpu = {name: spec.for_a_product()._replace(ptr=1 << 40) for name, spec in specs.items()}
            for by_twin, given in ((True, shared), (False, on_gpu)):
                with pytest.raises(ValueError, match=r"expected memory of its own.*, got some of"):
                    call(by_twin, function, given)


def test_a_twin_does_not_write_to_a_read_only_array() -> None:
    out = np.zeros((T, D))
    out.flags.writeable = False
    assert refuses(lambda: call(True, "combine", {"out": out}), "out").got == "a read-only one"


@pytest.mark.parametrize("x", [np.asfortranarray(np.zeros((T, D))), np.zeros((2 * T, D))[::2], np.zeros((T, D), int)])
def test_a_twin_refuses_arrays_of_another_layout_or_no_floats(x: np.ndarray) -> None:
    refuses(lambda: call(True, "up_forward", {"x": x}), "x", TypeError if x.dtype == int else ValueError)


@pytest.mark.parametrize("function", SOUND)
def test_twins_fill_the_outputs_that_are_given(function: str) -> None:
    """And hand them back, with what they would have made themselves."""
    rng = np.random.default_rng(0)
    dispatch = build_dispatch(np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32), E)
    outputs = {*WRITTEN[function]} - {*REQUIRED[function]}
    inputs = {name: rng.normal(size=spec.shape) for name, spec in SOUND[function].items() if name not in outputs}
    run = gemm.TWINS[function]
    made = run(**{name: array.copy() for name, array in inputs.items()}, dispatch=dispatch)
    given = {name: np.full(SOUND[function][name].shape, np.nan) for name in outputs}
    filled = run(**inputs, **given, dispatch=dispatch)
    for mine, right in zip(*(r if isinstance(r, tuple) else (r,) for r in (filled, made)), strict=True):
        np.testing.assert_array_equal(mine, right)
        assert np.isfinite(mine).all()
    results = filled if isinstance(filled, tuple) else (filled,)
    assert all(any(array is result for result in results) for array in given.values())
