"""What a product refuses, and what it says then; and its twin. Addresses stand in for device arrays: no GPU is needed."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from blazeproto import gemm
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.reference import build_dispatch
from blazeproto.gemm import arguments, weight
from blazeproto.gemm.linear import GROUPED_MM
from blazeproto.gemm.specification import Specification
from blazeproto.runtime import driver
from tests.gemm.test_current_gpu import bf16, f32, on_gpu_0

T, K, D, N, E = 64, 2, 128, 64, 4
R = T * K
DISPATCH = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", E + 1), on_gpu_0("int32", R), None, E, K, T)
UP = {"x": bf16(T, D), "up_proj": bf16(E, 2 * N, D), "h": bf16(R, 2 * N), "act": bf16(R, N)}
SUM = {"y": bf16(R, D), "out": bf16(T, D)}
WEIGHT = {"d_out": bf16(T, D), "a_scaled": bf16(R, N), "dw": bf16(E, D, N), "workspace": f32(0)}
MANY = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", 601), on_gpu_0("int32", R), None, 600, K, T)

BAD = [
    (
        "up_forward",
        UP | {"x": None},
        TypeError,
        "x: expected a device array (torch, CuPy, Numba, DLPack) or a NumPy array, got NoneType",
    ),
    ("up_forward", UP | {"x": f32(T, D)}, TypeError, "x: expected dtype bfloat16, got float32"),
    ("up_forward", UP | {"x": bf16(T, D + 8)}, ValueError, "x: expected shape (64, 128), got (64, 136)"),
    ("up_forward", UP | {"h": bf16(R, N)}, ValueError, "h: expected shape (128, 128), got (128, 64)"),
    ("up_forward", UP | {"up_proj": bf16(E + 1, 2 * N, D)}, ValueError, "up_proj: expected shape (4, any, any), got"),
    (
        "up_forward",
        UP | {"up_proj": bf16(E, 2 * N, 12)},
        ValueError,
        "up_proj: expected widths that are multiples of 8, got shape (4, 128, 12)",
    ),
    (
        "up_forward",
        UP | {"up_proj": bf16(E, 24, D)},
        ValueError,
        "up_proj: expected 2 times a multiple of 8 rows an expert, got 24",
    ),
    (
        "up_forward",
        UP | {"up_proj": bf16(600, 2 * N, D), "dispatch": MANY},
        ValueError,
        "up_proj: expected 1 to 512 experts, got shape (600, 128, 128)",
    ),
    (
        "down_backward_weight",
        WEIGHT | {"dw": bf16(600, D, N), "dispatch": MANY},
        ValueError,
        "dw: expected 1 to 512 experts, got shape (600, 128, 64)",
    ),
    (
        "up_forward",
        UP | {"x": bf16(2**28, 128), "dispatch": replace(DISPATCH, num_tokens=2**28)},
        ValueError,
        "x: expected fewer than 34359738368 elements to gather from, got shape (268435456, 128)",
    ),
    (
        "up_forward",
        UP | {"config": gemm.TileConfig(cluster=2, tickets=True)},
        ValueError,
        "config: expected tickets=False beside cluster=2, got TileConfig(",
    ),
    (
        "up_forward",
        UP | {"dispatch": replace(DISPATCH, token_index_map=on_gpu_0("int32", R + 2))},
        ValueError,
        "dispatch.token_index_map: expected shape (128), got (130,)",
    ),
    (
        "up_forward",
        UP | {"dispatch": replace(DISPATCH, top_k=None)},
        TypeError,
        "dispatch.pair_tokens: expected a device array",
    ),
    (
        "combine",
        SUM | {"scores": f32(R + 8)},
        ValueError,
        "scores: expected 128 elements, one a pair, got shape (136,)",
    ),
    ("combine", SUM | {"columns": range(64)}, ValueError, "columns: expected as many as y has, 128, got range(0, 64)"),
    ("combine", SUM | {"columns": range(D), "out": None}, TypeError, "out: expected a device array"),
    ("down_backward_weight", WEIGHT | {"accumulate": True}, ValueError, "accumulate: expected an fp32 dw to add to"),
    (
        "expert_row_sum",
        {"values": bf16(R, D), "accumulate": True},
        ValueError,
        "out: expected an array to accumulate into, got None",
    ),
]


@pytest.fixture(autouse=True)
def _gpu_0_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 0)
    monkeypatch.setattr(arguments, "current_stream", lambda array: 0)
    monkeypatch.setattr(weight, "current_device", lambda: 0)
    monkeypatch.setattr(weight, "workspace_elements", lambda *_: 0)
    monkeypatch.setattr(driver, "launch", lambda *_: pytest.fail("something was launched"))


@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD)
def test_bad_input_is_named(function: str, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        RUNS[function](**{"dispatch": DISPATCH} | arguments)


@pytest.mark.parametrize(("width", "offset"), [(512, 0), (256, 16)])
def test_an_output_may_lie_over_the_rows_only_where_a_tile_has_them_whole(width: int, offset: int) -> None:
    """Another tile may not have read yet what this one overwrites."""
    act, down_proj = bf16(R, width), bf16(E, width, width)
    with pytest.raises(ValueError, match=r"y: expected memory of its own( or all of act)?, got some of act"):
        gemm.down_forward(act, down_proj, DISPATCH, y=act._replace(ptr=act.ptr + offset))


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
REFUSED = [  # function, arguments, fields of the dispatch, error, message
    ("up_forward", {"activation": "swigul"}, {}, ValueError, "activation: expected one of .* did you mean 'swiglu'"),
    ("up_forward", {"config": {"tile_n": 256}}, {}, TypeError, "config: expected a TileConfig or None, got dict"),
    ("up_forward", {"stream": 1.5}, {}, TypeError, "stream: expected an int, got float"),
    ("up_forward", {"bias": Spec((E, N))}, {}, ValueError, r"bias: expected shape \(4, 128\), got \(4, 64\)"),
    ("up_forward", {"act": X}, {}, ValueError, r"act: expected shape \(128, 64\), got \(64, 128\)"),
    ("grouped_mm", {"columns": slice(8)}, {}, TypeError, "columns: expected a range or None, got slice"),
    (
        "grouped_mm",
        {"columns": range(256), "out": None},
        {},
        ValueError,
        "columns: expected a range in multiples of",
    ),
    ("grouped_mm", {"gather": True}, {}, ValueError, r"a: expected shape \(64, 64\), got \(128, 64\)"),
    ("down_forward", {"act": Spec((R, N + 8))}, {}, ValueError, r"act: expected shape \(128, 64\), got \(128, 72\)"),
    ("down_forward", {"y": X}, {}, ValueError, r"y: expected shape \(128, 128\), got \(64, 128\)"),
    ("up_backward_act", {"up_proj": DOWN_PROJ}, {}, ValueError, r"dh: expected shape \(128, 128\)|dx_rows: expected"),
    ("combine", {"columns": range(64)}, {}, ValueError, "columns: expected as many as y has, 128, got range"),
    ("combine", {"columns": range(D), "out": None}, {}, TypeError, "out: expected a .* array"),
    ("combine", {"scores": scores(R + 8)}, {}, ValueError, "scores: expected 128 elements, one a pair"),
    ("combine", {"scores": Spec((R,), "int64")}, {}, TypeError, "scores: expected dtype .*, got int64"),
    (
        "down_backward_weight",
        {"dw": None, "accumulate": True},
        {},
        ValueError,
        "dw: expected an array to accumulate into",
    ),
    ("expert_row_sum", {"out": None, "accumulate": True}, {}, ValueError, "out: expected an array to accumulate into"),
    ("down_backward_weight", {"gather": False}, {}, ValueError, r"d_out: expected shape \(128, any\), got \(64, 128\)"),
    ("combine", {}, {"num_tokens": 64.0}, TypeError, "dispatch.num_tokens: expected an int, got float"),
    ("combine", {}, {"num_tokens": -1}, ValueError, "dispatch.num_tokens: expected at least 0, got -1"),
    ("combine", {}, {"top_k": 2.0}, TypeError, "dispatch.top_k: expected an int, got float"),
    ("combine", {}, {"top_k": 0}, ValueError, "dispatch.top_k: expected at least 1, got 0"),
    ("combine", {"scores": None}, {"top_k": 3}, ValueError, r"dispatch.token_index_map: expected shape \(192\)"),
    ("combine", {}, {"num_experts": True}, TypeError, "dispatch.num_experts: expected an int, got bool"),
    ("combine", {}, {"num_experts": 5}, ValueError, r"dispatch.expert_token_offsets: expected shape \(6\), got \(5,\)"),
    ("combine", {}, {"token_index_map": [0] * R}, TypeError, "dispatch.token_index_map: expected a .* array"),
    ("combine", {}, {"expert_pair_indices": None}, TypeError, "dispatch.expert_pair_indices: expected a .* array"),
    (
        "combine",
        {},
        {"expert_pair_indices": Spec((R, 1), "int32")},
        ValueError,
        "dispatch.expert_pair_indices: expected",
    ),
    (
        "combine",
        {"y": Spec((R + 1, D))},
        {"expert_pair_indices": Spec((R + 1,), "int32")},
        ValueError,
        "at most 128 rows",
    ),
    ("combine", {}, {"token_index_map": Spec((R,), "int64")}, TypeError, "dispatch.token_index_map: .* got int64"),
    (
        "combine",
        {},
        {"pair_tokens": Spec((R,), "int32")},
        ValueError,
        "dispatch.pair_tokens: expected None beside top_k=2",
    ),
    ("combine", {}, VARYING | {"pair_tokens": None}, TypeError, "dispatch.pair_tokens: expected a .* array"),
    (
        "combine",
        {},
        VARYING | {"token_offsets": Spec((T,), "int32")},
        ValueError,
        "dispatch.token_offsets: expected shape",
    ),
    *(
        (function, {name: None}, {}, TypeError, f"{name}: expected a .* array")
        for function, names in REQUIRED.items()
        for name in names
    ),
    *(
        (function, {"dispatch": None}, {}, TypeError, "dispatch: expected a Dispatch, got NoneType")
        for function in SOUND
    ),
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
@pytest.mark.parametrize(("function", "changes", "fields", "error", "message"), REFUSED)
def test_products_and_twins_refuse_the_same(
    by_twin: bool, function: str, changes: dict, fields: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(by_twin, function, changes, fields)


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
            with pytest.raises(ValueError, match=r"expected memory of its own.*, got some of"):
                call(True, function, shared)
            shared = {name: spec.for_a_product()._replace(ptr=1 << 40) for name, spec in specs.items()}
            with pytest.raises(ValueError, match=r"expected memory of its own.*, got some of"):
                call(False, function, shared)


def test_a_twin_does_not_write_to_a_read_only_array() -> None:
    out = np.zeros((T, D))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: expected an array to write to, got a read-only one"):
        call(True, "combine", {"out": out})


@pytest.mark.parametrize("x", [np.asfortranarray(np.zeros((T, D))), np.zeros((2 * T, D))[::2], np.zeros((T, D), int)])
def test_a_twin_refuses_arrays_of_another_layout_or_no_floats(x: np.ndarray) -> None:
    with pytest.raises((ValueError, TypeError), match=r"x: expected (a contiguous array|dtype float)"):
        call(True, "up_forward", {"x": x})


@pytest.mark.parametrize("function", SOUND)
def test_twins_fill_the_outputs_that_are_given(function: str) -> None:
    """And hand them back, with what they would have made themselves."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    dispatch = build_dispatch(ids, E)
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
