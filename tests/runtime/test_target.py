"""Launches on a target that only records: the package's host code as it is, without a GPU, CuPy or a driver."""

import ctypes
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from blazeproto import dispatch, gemm, router
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch import reference as dispatch_twin
from blazeproto.gemm import launch, tickets
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Box, Params
from blazeproto.gemm.rows import ROWS_PARAMS
from blazeproto.gemm.tiles import CHOSEN, PLAIN, TILES
from blazeproto.gemm.weight import WEIGHT_PARAMS
from blazeproto.runtime import arrays, driver, memory, numba_kernel, optional, target
from blazeproto.runtime.arch import HOPPER
from blazeproto.runtime.numba_kernel import NumbaKernel
from blazeproto.runtime.target import launches_on
from tests.refusals import refuses
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
        """The parameters of a kernel that takes words."""
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
    for product in CHOSEN:
        monkeypatch.setitem(TILES, product, replace(PLAIN[product], tickets=True))
    recorder = Recorder()
    with launches_on(recorder):
        yield recorder


def bits(*shape: int) -> np.ndarray:
    """bf16, as NumPy arrays have it."""
    return np.zeros(shape, np.uint16)


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


# --- Products --------------------------------------------------------------------------------------------------------------

T, D, N, E, K = 400, 1024, 128, 2, 2  # 400 rows an expert
R = T * K
DISPATCH = dispatch_twin.build_dispatch(np.tile(np.arange(K, dtype=np.int32), (T, 1)), E)
X, UP, H, ACT, DOWN, SCORES = bits(T, D), bits(E, 2 * N, D), bits(R, 2 * N), bits(R, N), bits(E, D, N), f32(R)
OUT_F32, D_SCORES, DW, BIAS = f32(T, D), f32(R), f32(E, D, N), bits(E, D)
OF_32 = dispatch_twin.build_dispatch(np.arange(64, dtype=np.int32).reshape(-1, 1) % 32, 32)
BY_ROWS = {"offsets": "expert_token_offsets", "pairs.pair_indices": "expert_pair_indices"}
TILED = (384, HOPPER.smem_limit)  # threads, shared memory
WITH_EPILOGUE = (512, HOPPER.smem_limit)
NONE: Mapping[str, Any] = MappingProxyType({})


class Expected(NamedTuple):
    """A launch: kernel, (threads, shared bytes), grid, macros that it is compiled with; and which array, by name, is where.

    words: those of the struct that are addresses; or, of a kernel that takes words, all, with its numbers.  maps: of the struct.
    """

    name: str
    block: tuple[int, int]
    grid: tuple[int, int]
    words: Any
    maps: Mapping[str, str] = NONE
    macros: Mapping[str, int] = NONE
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
        (Expected("combine", (128, 0), (100, 1), ("y", "scores", "token_index_map", 0, "out", T, D, D)),),
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
                    "source": "d_out",
                    **BY_ROWS,
                    "out0_rows": "dh",
                    "out1_rows": "a_scaled",
                    "scores": "scores",
                    "reduction_out": "made[3]",
                    "tickets": "counter",
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
        "up_backward_act_fused",
        {"dh": H, "up_proj": UP, "dx_f32": OUT_F32},
        ("dx_f32",),
        (
            Expected(
                "linear",
                TILED,
                (4, 1),
                {**BY_ROWS, "reduction_out": "dx_f32"},
                {"a": "dh", "b": "up_proj"},
                {"B_MN": 1, "FUSED_COMBINE": 2},
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
    named["counter"] = machine.made[-1] if machine.made else None
    where = {name: machine.address(array) for name, array in named.items() if isinstance(array, np.ndarray)}
    where |= {"partials": where.get("made[1]", 0) + 16}
    assert machine.names == [expected.name for expected in case.launches]
    for made, expected in zip(machine.launches, case.launches, strict=True):
        assert (made.grid, (made.block, made.shared_bytes)) == (expected.grid, expected.block)
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
    assert {name: address for name, (box, address) in boxes.items()} == {m: where[n] for m, n in expected.maps.items()}
    numbers = struct.unpack_from(f"{len(params.numbers)}i", made.parameters, params.numbers_offset)
    assert numbers[params.numbers.index("experts")] == (32 if params is WEIGHT_PARAMS else E)


def test_every_product_is_here() -> None:
    assert {case.name for case in CASES} == {*gemm.PRODUCTS, "grouped_mm"}


def test_tensor_maps_come_as_boxes(machine: Recorder) -> None:
    """Gate and up are two halves. As TMA counts: innermost first, strides in bytes."""
    gemm.up_forward(X, UP, DISPATCH, low=(bits(R, 8), bits(E, 2 * N, 8)))
    (made,) = machine.launches
    columns, edge = 2 * N * 2, launch.ROW_EDGE  # columns: bytes of a row of H
    boxes = {ROWS_PARAMS.maps[offset // launch.MAP_BYTES]: box for offset, (box, _) in made.boxes.items()}

    def rows_of(shape: tuple[int, ...], row: int, *strides: int) -> Box:
        return Box(shape, (row, row, 2**34 - row, *strides), (64, 64, *[1] * (len(shape) - 2)), ragged=True)

    assert boxes == {
        "b": Box((D, N, 2, E), (2 * D, 2 * D * N, 4 * D * N), (64, 128, 2, 1)),
        "out0": rows_of((N, edge, R + 1, edge + 1, 2), columns, columns // 2),
        "out1": rows_of((N, edge, R + 1, edge + 1), columns // 2),
        "low_rows": Box((8, R), (16,), (64, 128)),
        "low_weights": Box((8, N, 2, E), (16, 16 * N, 32 * N), (64, 128, 2, 1)),
    }
    numbers = struct.unpack_from(f"{len(ROWS_PARAMS.numbers)}i", made.parameters, ROWS_PARAMS.numbers_offset)
    assert numbers == (R, E, D, N, 2 * N, 8)


def test_a_part_of_an_array_lies_within_it(machine: Recorder) -> None:
    """Some columns of the output: the weights' map begins where theirs do, as does the bias."""
    y = gemm.down_forward(ACT, DOWN, DISPATCH, bias=BIAS, columns=range(256, 512))
    (made,) = machine.launches
    words = struct.unpack_from(f"{len(ROWS_PARAMS.words)}q", made.parameters, ROWS_PARAMS.words_offset)
    assert y.shape == (R, 256) and made.boxes[128][1] == machine.address(DOWN[0, 256:])
    assert words[ROWS_PARAMS.words.index("bias")] == machine.address(BIAS[0, 256:])
    assert gemm.weight_workspace("down_backward_weight", np.empty((32, 256, 256), np.float32), OF_32) > 0


def test_ml_dtypes(machine: Recorder) -> None:
    """What comes as bfloat16 goes back as that, and bits as bits; fp32 outputs are fp32."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    h, act = gemm.up_forward(X.view(bfloat16), UP.view(bfloat16), DISPATCH)
    assert h.dtype == act.dtype == bfloat16
    dh, a_scaled, d_scores = gemm.down_backward_act(X, DOWN, H, SCORES, DISPATCH)
    assert (dh.dtype, a_scaled.dtype, d_scores.dtype) == (np.uint16, np.uint16, np.float32)


# --- Dispatch --------------------------------------------------------------------------------------------------------------

IDS = np.argsort(np.random.default_rng(0).random((300, 8)), axis=1)[:, :2].astype(np.int32)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_dispatch_by_tiles(machine: Recorder, dtype: type) -> None:
    ids = IDS.astype(dtype)
    made = dispatch.build_dispatch(ids, 8, validate=True)
    *lists, room = machine.made
    table = machine.address(room)
    narrow = made.token_expert_indices
    assert np.shares_memory(narrow, ids if dtype is np.int32 else lists[3])
    arguments = [made.expert_pair_indices, made.token_index_map, made.expert_token_offsets]
    assert all(any(array is one for one in lists) for array in arguments)
    count, place = machine.launches
    assert [count.name, place.name] == ["count_pairs", "place_pairs"]
    assert count.words == (machine.address(ids), table, machine.address(narrow), 600, 8, 512)
    totals = table + 4 * 8 * 2  # behind the table, of two chunks
    assert place.words == (machine.address(narrow), table, totals, *map(machine.address, arguments), 600, 512)
    assert (count.grid, count.block, count.shared_bytes, count.cluster) == ((2, 1), 256, 36, 1)
    assert (place.grid, place.block) == ((2, 1), 256) and place.shared_bytes > 0 and not count.boxes


def test_the_other_dispatches(machine: Recorder) -> None:
    dispatch.build_dispatch(IDS, 8, method="dense")
    assert machine.names == ["dense_token_map", "expert_lengths", "scan_chunks", "expert_offsets", "route_indices"]
    token_map = machine.launches[0].words[1]
    assert machine.cleared == [(token_map, 300 * 8)]
    machine.launches.clear()
    limited = dispatch.build_dispatch(IDS, 8, row_capacity=100)
    assert machine.names == ["count_pairs", "place_pairs", "limit_rows"]
    assert machine.launches[-1].words[4] == machine.address(limited.overflow)
    machine.launches.clear()
    tokens, offsets = np.repeat(np.arange(300, dtype=np.int32), 2), np.arange(0, 601, 2, dtype=np.int32)
    dispatch.build_dispatch_varying(IDS.reshape(-1), tokens, offsets, 8, validate=True)
    assert machine.names == ["count_pairs", "place_pairs"]
    machine.launches.clear()
    refuses(lambda: dispatch.build_dispatch(IDS, 8, method="sort"), "method")
    refuses(lambda: dispatch.build_dispatch(np.zeros((3, 2), np.int32), 8, validate=True), "topk_experts")
    assert not machine.launches


# --- Router ----------------------------------------------------------------------------------------------------------------

ROUTER = {  # function: kernels
    "topk_route": ["topk_route"],
    "topk_route_backward": ["topk_route_backward"],
    "choose_pairs": ["key_columns", "count_pairs", "select_tokens", "count_tokens", "list_pairs"],
    "score_pairs": ["score_pairs"],
    "score_pairs_backward": ["score_pairs_backward"],
    "hash_route": ["hash_route"],
    "routing_losses": ["routing_partials", "routing_sums"],
    "routing_losses_backward": ["routing_losses_backward"],
    "logits_product": ["logits"],
    "finish_logits": ["finish_logits"],
    "split_gradient": ["split_gradient"],
}


def narrowed(name: str, value: Any) -> Any:
    """An argument of a twin's call as the kernels take it."""
    if not (isinstance(value, np.ndarray) and value.dtype == np.float64):
        return value
    return np.zeros(value.shape, np.uint16) if name == "logits_product" else value.astype(np.float32)


@pytest.mark.parametrize("name", CALLS["router"])
def test_a_function_of_the_router_launches_its_kernels(name: str, machine: Recorder) -> None:
    """With every array that it takes and gives."""
    given = {key: narrowed(name, value) for key, value in CALLS["router"][name].items()}
    results = getattr(router, name)(**given)
    assert machine.names == ROUTER[name]
    taken = {word for made in machine.launches if not made.boxes for word in made.words}
    for made in machine.launches:
        taken |= {address for _, address in made.boxes.values()}
        taken |= {*struct.unpack_from(f"{len(made.parameters) // 8}q", made.parameters)} if made.boxes else set()
    arrays_of_call = [*given.values(), *(results if isinstance(results, tuple) else (results,))]
    assert {machine.address(array) for array in arrays_of_call if isinstance(array, np.ndarray)} <= taken
    assert all(made.block % 32 == 0 and made.grid[0] > 0 for made in machine.launches)


# --- One target, another, none -----------------------------------------------------------------------------------------------


def test_plans_are_kept_by_the_number_of_multiprocessors() -> None:
    """And so is no target, which would hold all arrays that it has seen."""
    first, second, larger = Recorder(4), Recorder(4), Recorder(6)
    for recorder in (first, second, larger):
        with launches_on(recorder):
            gemm.down_forward(ACT, DOWN, DISPATCH)
            assert arrays.current_device() == 1000 + recorder.multiprocessors
    assert [recorder.launches[0].grid for recorder in (first, second, larger)] == [(4, 1), (4, 1), (6, 1)]
    assert [len(recorder.launches) for recorder in (first, second, larger)] == [1, 1, 1]
    assert sys.getrefcount(first) <= 3  # this name, the loop's, the call's


def test_outside_all_is_as_before() -> None:
    """The inner context's end brings back the outer target, the outer's the twins, whatever ended it."""
    outer, inner = Recorder(), Recorder()
    logits = f32(5, 8)

    def stop() -> None:
        with launches_on(outer):
            with launches_on(inner):
                router.topk_route(logits, 2)
            router.topk_route(logits, 2)
            raise KeyError

    with pytest.raises(KeyError):
        stop()
    assert len(inner.launches) == len(outer.launches) == 1 and target.chosen() is None
    assert router.topk_route(logits, 2)[1].tolist() == [[0, 1]] * 5
    assert gemm.down_forward(f32(R, N), f32(E, D, N), DISPATCH).dtype == np.float32
    assert dispatch.build_dispatch(IDS, 8).expert_token_offsets[8] == IDS.size
    assert gemm.weight_workspace("down_backward_weight", np.empty((32, 256, 256), np.float32), OF_32) == 0
    refuses(lambda: arrays.view(X, "x"), "x")
    assert len(inner.launches) == len(outer.launches) == 1


def test_a_thread_has_its_own(machine: Recorder) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(target.chosen()))
    thread.start()
    thread.join()
    assert seen == [None] and target.chosen() is machine


def test_a_launch_that_has_no_target_is_refused() -> None:
    kernel = Kernel("combine.cu", "combine")
    with pytest.raises(RuntimeError, match=r"expected launches_on\(...\) around a launch on a target, got none"):
        driver.launch(kernel.handle(target.FIRST_DEVICE + 1), (1, 1), 32, 0, 0, (1,))
    with pytest.raises(RuntimeError, match="expected launches_on"):
        tickets.counters(target.FIRST_DEVICE + 1).take(0)


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (True, TypeError), (2.0, TypeError)])
def test_what_a_target_may_not_be(wrong: Any, error: type[Exception]) -> None:
    refuses(launches_on(Recorder(wrong)).__enter__, "multiprocessors", error)


def test_a_target_takes_launches_in_the_simulator_s_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA C++ needs no Numba; what does is told how to get it."""
    monkeypatch.setattr(target, "in_simulator", lambda: True)
    monkeypatch.setattr(numba_kernel, "in_simulator", lambda: True)
    assert target.simulated()
    with launches_on(Recorder()):
        assert not target.simulated()
    with pytest.raises(RuntimeError, match="expected Numba's compiler, got its simulator; start without"):
        NumbaKernel(lambda threads: none_here, "int32*", threads=32)._compile((9, 0), False)


def test_what_lies_on_a_gpu_stays_there(machine: Recorder) -> None:
    """Its memory, its stream and its launches are asked of CuPy and the driver, also inside."""
    there = arrays.DeviceArray(1 << 20, (4,), "int32", (1,), 0, None)
    for ask in (
        lambda: arrays.empty((4,), "int32", there),
        lambda: arrays.current_stream(there),
        lambda: memory.as_cupy(there),
        lambda: memory.on_stream(there, 0),
        lambda: memory.clear(there.ptr, 16, there.device, 0),
        lambda: driver.launch(5, (1, 1), 32, 0, 0, (1,)),
    ):
        with pytest.raises(AssertionError, match="a driver or CuPy was asked for"):
            ask()
    assert not machine.launches and not machine.made and not machine.cleared


def test_no_cupy_and_no_driver() -> None:
    """In a process of its own: neither is imported or loaded."""
    probe = (
        "import sys; from tests.runtime.test_target import *; import blazeproto.dispatch.tiled, blazeproto.router.topk_kernels\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == 'ctypes.dlopen' else None)\n"
        "with launches_on(Recorder()):\n"
        "    dispatch.build_dispatch(IDS, 8); gemm.up_forward(X, UP, DISPATCH); router.topk_route(f32(5, 8), 2)\n"
        "assert 'cupy' not in sys.modules and not [name for name in opened if 'libcuda' in name], opened\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
