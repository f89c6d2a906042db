"""Launches on a target that only records: the package's host code as it is, without a GPU, CuPy or a driver."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from blazeproto import dispatch, gemm, router
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch import reference as dispatch_twin
from blazeproto.gemm import launch, tickets, weight
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Box, Params
from blazeproto.gemm.rows import ROWS_PARAMS
from blazeproto.gemm.tiles import SMEM_LIMIT, TileConfig
from blazeproto.gemm.weight import WEIGHT_PARAMS
from blazeproto.runtime import arrays, driver, optional, target
from blazeproto.runtime.target import launches_on
from tests.runtime.calls import CALLS

HIGH = 1 << 48  # no host address is as high


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, int]
    block: int
    shared_bytes: int
    parameters: bytes
    boxes: dict[int, tuple[Box, int]]
    cluster: int

    @property
    def name(self) -> str:
        return getattr(self.kernel, "entry", None) or self.kernel.name

    @property
    def words(self) -> tuple[int, ...]:
        """Of a kernel that takes words."""
        return struct.unpack(f"{len(self.parameters) // 8}q", self.parameters)


class Recorder:
    """Notes launches. Its addresses are the host's, moved, so that it need keep no list of them."""

    def __init__(self, multiprocessors: int = 4) -> None:
        self.multiprocessors = multiprocessors
        self.launches: list[Launch] = []
        self.made: list[np.ndarray] = []
        self.cleared: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.made.append(np.empty(shape, dtype))
        return self.made[-1]

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.made.append(np.zeros(shape, dtype))
        return self.made[-1]

    def address(self, array: np.ndarray) -> int:
        return HIGH + array.ctypes.data

    def clear(self, address: int, size: int) -> None:
        self.cleared.append((address, size))

    def launch(self, *given: Any) -> None:
        self.launches.append(Launch(*given))

    @property
    def names(self) -> list[str]:
        return [made.name for made in self.launches]


def none_here(*_: Any, **__: Any) -> Any:
    raise AssertionError("a driver or CuPy was asked for")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder that launches go to, where nothing of CUDA can be had."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(optional, "cupy", none_here)
    monkeypatch.setattr(driver, "_driver", none_here)
    monkeypatch.setattr(launch, "_tensor_maps", none_here)
    monkeypatch.setattr(ctypes, "PyDLL", none_here)
    recorder = Recorder()
    with launches_on(recorder):
        yield recorder


def bits(*shape: int) -> np.ndarray:
    """bf16, as NumPy arrays have it."""
    return np.zeros(shape, np.uint16)


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


# --- Products --------------------------------------------------------------------------------------------------------------

T, D, N, E, K = 400, 1024, 128, 2, 2  # 400 rows an expert and a long reduction: the table gives tickets
R = T * K
DISPATCH = dispatch_twin.build_dispatch(np.tile(np.arange(K, dtype=np.int32), (T, 1)), E)
X, UP, H, ACT, DOWN, SCORES = bits(T, D), bits(E, 2 * N, D), bits(R, 2 * N), bits(R, N), bits(E, D, N), f32(R)
OUT_F32, D_SCORES, DW, BIAS = f32(T, D), f32(R), f32(E, D, N), bits(E, D)
OF_32 = dispatch_twin.build_dispatch(np.arange(64, dtype=np.int32).reshape(-1, 1) % 32, 32)
BY_ROWS = {"offsets": "expert_token_offsets", "pairs.pair_indices": "expert_pair_indices"}
TILED = (384, SMEM_LIMIT)  # threads, shared memory
WITH_EPILOGUE = (512, SMEM_LIMIT)


class Expected(NamedTuple):
    """A launch: kernel, (threads, shared bytes), grid, macros that it is compiled with; and which array, by name, is where.

    words: those of the struct that are addresses; or, of a kernel that takes words, all, with its numbers.  maps: of the struct.
    """

    name: str
    block: tuple[int, int]
    grid: tuple[int, int]
    words: Any
    maps: dict[str, str] = {}
    macros: dict[str, int] = {}
    params: Params = ROWS_PARAMS


class Case(NamedTuple):
    name: str
    inputs: dict[str, Any]
    outputs: tuple[str, ...]
    launches: tuple[Expected, ...]
    given: Dispatch = DISPATCH


CASES = (
    Case(
        "up_forward",
        {"x": X, "up_proj": UP},
        ("h", "act"),
        (
            Expected(
                "up_forward",
                WITH_EPILOGUE,
                (4, 1),
                {"source": "x", **BY_ROWS, "out0_rows": "h", "out1_rows": "act", "tickets": "counter"},
                {"b": "up_proj", "out0": "h", "out1": "act"},
                {"TICKETS": True, "CLUSTER": 1},
            ),
        ),
    ),
    Case(
        "grouped_mm",
        {"a": X, "weights": UP, "gather": True},
        ("out",),
        (
            Expected(
                "linear",
                WITH_EPILOGUE,
                (4, 1),
                {"source": "a", **BY_ROWS, "out0_rows": "out"},
                {"b": "weights", "out0": "out"},
                {"GATHER": 1},
            ),
        ),
    ),
    Case(
        "down_forward",
        {"act": ACT, "down_proj": DOWN, "bias": BIAS},
        ("y",),
        (
            Expected(
                "linear",
                TILED,
                (4, 1),
                {**BY_ROWS, "out0_rows": "y", "bias": "bias"},
                {"a": "act", "b": "down_proj", "out0": "y"},
                {"HAS_BIAS": 1, "TICKETS": False},
            ),
        ),
    ),
    Case(
        "down_forward_fused",
        {"act": ACT, "down_proj": DOWN, "scores": SCORES, "out_f32": OUT_F32},
        ("out_f32",),
        (
            Expected(
                "linear",
                TILED,
                (4, 1),
                {**BY_ROWS, "scores": "scores", "reduction_out": "out_f32"},
                {"a": "act", "b": "down_proj"},
                {"FUSED_COMBINE": 1},
            ),
        ),
    ),
    Case(
        "combine",
        {"y": bits(R, D), "scores": SCORES},
        ("out",),
        (Expected("combine", (128, 0), (400, 1), ("y", "scores", "token_index_map", 0, "out", T, D, D)),),
    ),
    Case(
        "down_backward_act",
        {"d_out": X, "down_proj": DOWN, "h": H, "scores": SCORES},
        ("dh", "a_scaled", "d_scores"),
        (
            Expected(
                "down_backward",
                TILED,
                (4, 1),
                {
                    **{"source": "d_out", "out0_rows": "dh", "out1_rows": "a_scaled", "tickets": "counter"},
                    **{**BY_ROWS, "scores": "scores", "reduction_out": "made[3]"},
                },
                {"b": "down_proj", "h": "h", "out0": "dh", "out1": "a_scaled"},
                {"TICKETS": True},
            ),
            Expected("reduce_scores_grad", (256, 0), (4, 1), ("made[3]", "token_index_map", "d_scores", 1, R, R)),
        ),
    ),
    Case(
        "bias_score_grad",
        {"d_out": X, "down_bias": BIAS, "d_scores": D_SCORES},
        ("d_scores",),
        (
            Expected(
                "bias_score_grad",
                (256, 0),
                (50, 1),
                ("d_out", "down_bias", "token_index_map", "expert_token_offsets", 0, "d_scores", T, E, D),
            ),
        ),
    ),
    Case(
        "up_backward_act",
        {"dh": H, "up_proj": UP},
        ("dx_rows",),
        (
            Expected(
                "linear",
                TILED,
                (4, 1),
                {**BY_ROWS, "out0_rows": "dx_rows"},
                {"a": "dh", "b": "up_proj", "out0": "dx_rows"},
                {"B_MN": 1},
            ),
        ),
    ),
    Case(
        "expert_row_sum",
        {"values": H},
        ("out",),
        (
            Expected(
                "expert_row_sum",
                (256, 0),
                (1, 13),
                ("values", "expert_pair_indices", "expert_token_offsets", 0, 0, "made[1]", E, 2 * N, 64, 0),
            ),
            Expected(
                "expert_row_sum_finish",
                (256, 0),
                (1, E),
                ("made[1]", "expert_token_offsets", "out", 0, 2 * N, 64, 0),
            ),
        ),
    ),
    # 32 experts with a tile or two each, in clusters of two: one stream-K slice pays, and its partials are summed.
    Case(
        "down_backward_weight",
        {"d_out": bits(64, 256), "a_scaled": bits(64, 256)},
        ("dw",),
        (
            Expected(
                "weight_gradient",
                TILED,
                (4, 1),
                {"gathered_rows": "d_out", "ordered_rows": "a_scaled", **BY_ROWS, "unfinished": "made[1]"},
                {"ordered": "a_scaled", "out": "dw"},
                {"CLUSTER": 2, "TRANSPOSED": 0},
                WEIGHT_PARAMS,
            ),
            Expected("weight_sum", (256, 0), (4, 1), ("made[1]", "partials", "dw", 1, 2, 256, 256, 0, 0, 0)),
        ),
        OF_32,
    ),
    Case(
        "up_backward_weight",
        {"dh": bits(64, 256), "x": bits(64, 256)},
        ("dw",),
        (
            Expected(
                "weight_gradient",
                TILED,
                (4, 1),
                {"gathered_rows": "x", "ordered_rows": "dh", **BY_ROWS, "unfinished": "made[1]"},
                {"ordered": "dh", "out": "dw"},
                {"CLUSTER": 2, "TRANSPOSED": 1},
                WEIGHT_PARAMS,
            ),
            Expected("weight_sum", (256, 0), (4, 1), ("made[1]", "partials", "dw", 1, 2, 256, 256, 1, 0, 0)),
        ),
        OF_32,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_product_launches_its_kernels(case: Case, machine: Recorder) -> None:
    """By grid, block, shared bytes; the words and tensor maps are those arrays' addresses, and there are no others."""
    results = getattr(gemm, case.name)(**case.inputs, dispatch=case.given)
    named = dict(zip(case.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    named |= case.inputs | case.given.arrays | {f"made[{index}]": array for index, array in enumerate(machine.made)}
    named["counter"] = machine.made[-1]
    where = {name: machine.address(array) for name, array in named.items() if isinstance(array, np.ndarray)}
    where |= {"partials": where.get("made[1]", 0) + 16}
    assert machine.names == [expected.name for expected in case.launches]
    for made, expected in zip(machine.launches, case.launches, strict=True):
        assert (made.grid, (made.block, made.shared_bytes)) == (expected.grid, expected.block)
        assert "binary" not in made.kernel.__dict__  # not compiled
        macros = {"CLUSTER": 1, **expected.macros}
        assert made.cluster == macros["CLUSTER"] and macros.items() <= {"CLUSTER": 1, **made.kernel.defines}.items()
        if isinstance(expected.words, tuple):
            assert not made.boxes
            assert made.words == tuple(where[word] if isinstance(word, str) else word for word in expected.words)
        else:
            check_struct(made, expected, where)


def check_struct(made: Launch, expected: Expected, where: dict[str, int]) -> None:
    params = expected.params
    assert len(made.parameters) == params.size and not any(made.parameters[: params.words_offset])
    words = struct.unpack_from(f"{len(params.words)}q", made.parameters, params.words_offset)
    addresses = {name: word for name, word in zip(params.words, words, strict=True) if word >= HIGH}
    addresses.pop("partials", None)  # which is looked at in the launch that sums them
    assert addresses == {word: where[name] for word, name in expected.words.items()}
    boxes = {params.maps[offset // launch.MAP_BYTES]: box for offset, box in made.boxes.items()}
    assert {name: address for name, (_, address) in boxes.items()} == {m: where[n] for m, n in expected.maps.items()}
    numbers = struct.unpack_from(f"{len(params.numbers)}i", made.parameters, params.numbers_offset)
    assert numbers[params.numbers.index("experts")] == (32 if params is WEIGHT_PARAMS else E)


def test_every_product_is_here() -> None:
    assert {case.name for case in CASES} == {*gemm.PRODUCTS, "grouped_mm"}
