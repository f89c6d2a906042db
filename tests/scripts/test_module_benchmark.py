"""Module against module and the router's accuracy, on a CPU: made-up measurements, and a stub in SonicMoE's place."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto.autograd import private
from blazeproto.gemm import Sizes
from scripts.bench import common, module, module_tables, peers, router, running, timing
from scripts.bench.common import cfg_of
from scripts.bench.peers import layers, modules
from scripts.bench.timing import KernelTime, Machine

SMALL = Sizes(64, 32, 16, 8, 2)
OF = {"gpu": "a GPU", "measured": "a day", "versions": "torch 2.11.0", "kernels": []}


def built(sets: int = 1) -> dict[str, list[Any]]:
    return module.build_programs(SMALL, [peers.make_inputs(SMALL, seed=seed, device="cpu") for seed in range(sets)])[0]


@pytest.mark.usefixtures("sonic_stub")
def test_both_modules_compute_the_same_layer() -> None:
    programs = built(sets=2)
    assert [*programs] == ["ours", "router", "sonic"] and [len(each) for each in programs.values()] == [2, 2, 2]
    ours, sonic = programs["ours"][1], programs["sonic"][1]
    found = modules.agreement(ours, sonic)
    assert found["median_out"] < 0.01 and found["other_experts"] < 0.1
    assert max(found[name] for name in ("router", "up", "down", "router_by_loss")) < 0.1
    # The auxiliary loss comes back, in both with its coefficient: of zeros as the output's gradient nothing else does.
    by_loss = [program.weight_gradients()["router_by_loss"] for program in (ours, sonic)]
    wanted = loss_gradient(ours, modules.AUX_LOSS)
    for gradient in by_loss:
        assert gradient.shape == (SMALL.E, SMALL.d) and timing.relative_difference(gradient, wanted) < 0.05


def loss_gradient(program: Any, coefficient: float) -> Tensor:
    """The gradient of the router's weight by coefficient E sum_e f_e p_e (Switch Transformer eq. 4), in float64."""
    weight = program.module.router.weight.detach().double().requires_grad_()
    logits = program.x.detach().double() @ weight.t()
    share = torch.bincount(logits.topk(SMALL.K).indices.flatten(), minlength=SMALL.E) / (SMALL.T * SMALL.K)
    (gradient,) = torch.autograd.grad(coefficient * SMALL.E * (share * logits.softmax(dim=1).mean(dim=0)).sum(), weight)
    return gradient


@pytest.mark.usefixtures("sonic_stub")
@pytest.mark.parametrize("weight", ["router", "up", "down", "router_by_loss"])
def test_a_weight_s_gradient_that_differs_is_refused(weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of x agree all the while."""
    programs = built()
    ours, sonic = programs["ours"][0], programs["sonic"][0]
    gradients = modules.ModuleProgram.weight_gradients

    def wrong(program: modules.ModuleProgram) -> dict[str, Tensor]:
        found = gradients(program)
        return found | ({weight: 1.5 * found[weight]} if program is sonic else {})

    monkeypatch.setattr(modules.ModuleProgram, "weight_gradients", wrong)
    with pytest.raises(RuntimeError, match=f"compute different layers: {weight} of"):
        modules.agreement(ours, sonic)


@pytest.mark.usefixtures("sonic_stub")
def test_no_leaf_has_a_gradient_before_a_backward() -> None:
    for (program,) in built().values():
        first = program.forward_backward()[1].clone()
        assert torch.equal(program.forward_backward()[1], first), "gradients were added up"
        program.clear()
        assert all(leaf.grad is None for leaf in (program.x, *program.module.parameters()))


def gate_rows_then_up_rows(weight: Tensor) -> Tensor:
    """Not what SonicMoE reads."""
    return torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1)


@pytest.mark.usefixtures("sonic_stub")
@pytest.mark.parametrize(
    ("name", "other", "wrong"),
    [
        ("c_proj", lambda weight: 1.1 * weight, "median_out, median_x_grad"),
        ("c_fc", gate_rows_then_up_rows, "median_out"),
    ],
)
def test_another_layer_is_refused(name: str, other: Callable[[Tensor], Tensor], wrong: str) -> None:
    programs = built()
    with torch.no_grad():
        weight = getattr(programs["sonic"][0].module, name).weight
        weight.copy_(other(weight))
    with pytest.raises(RuntimeError, match=f"compute different layers: {wrong}"):
        modules.agreement(programs["ours"][0], programs["sonic"][0])


def test_gate_and_up_are_put_in_turn_and_back() -> None:
    weight = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    turned = layers.interleave_gate_up(weight)
    assert torch.equal(turned[:, ::2], weight[:, :3]) and torch.equal(turned[:, 1::2], weight[:, 3:])
    for lies in (turned, turned.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        assert torch.equal(layers.gate_then_up(lies), weight)


@pytest.mark.usefixtures("sonic_stub")
def test_a_row_has_the_times_of_all_three() -> None:
    (row,) = running.measured(module.measure, {"cfg": cfg_of(SMALL)}, SMALL, Machine("cpu", 2))
    parts = [f"{name}_{part}_ms" for name in ("ours", "sonic", "router") for part in ("fwd", "fwdbwd")]
    assert all(row[name] > 0 and len(row[name.replace("_ms", "_rounds_ms")]) == 1 for name in parts)
    assert row["ours_fwdbwd_gpu_ms"] > 0 and row["sonic_fwd_gpu_ms"] > 0 and row["gpu_fwdbwd_method"] == "clock"
    assert "router_fwd_gpu_ms" not in row and row["sonic_peak_fwdbwd_MiB"] > 0 and row["rounds"] == 2
    assert 0 <= row["floor_fwd_ms"] <= row["floor_fwdbwd_ms"] and row["difference"]["median_out"] < 0.01
    assert module_tables.bounds(row)["time"] is not None


def test_what_can_not_be_captured_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first kernel to its last, so that the gaps count; both sides of a ratio alike."""

    def captured(call: Any, pool: Any) -> Any:
        if call is refuses:
            raise RuntimeError("synchronises")
        return call

    def refuses() -> None: ...

    def interleaved_ms(calls: dict[str, Any], *given: object, queued: bool, **options: Any) -> dict[str, float]:
        assert queued
        return dict.fromkeys(calls, 4.0)

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(timing, "interleaved_ms", interleaved_ms)
    found = Machine("cuda", 5).times({"ours": dict, "theirs": refuses}, ["ours", "theirs"], gaps=True)
    assert found.ms == {"ours": 4.0, "theirs": 4.0} and found.method == {"ours": "events", "theirs": "events"}
    assert found.refused == {"theirs": "RuntimeError: synchronises"}
    found = Machine("cuda", 5).times({"ours": dict, "theirs": refuses}, ["ours"], gaps=True)
    assert found.method == {"ours": "graph", "theirs": "events"}


# ------------------------------------------------------------------------------------------------------------- bounds


def measured(shape: Sizes, ratio: float) -> dict[str, Any]:
    times = {f"{name}_{part}_ms": 1.0 for name in ("ours", "router") for part in ("fwd", "fwdbwd")}
    times |= {"sonic_fwd_ms": ratio, "sonic_fwdbwd_ms": ratio, "floor_fwd_ms": 0.5, "floor_fwdbwd_ms": 0.8}
    peaks = {"ours_peak_fwdbwd_MiB": 100.0, "sonic_peak_fwdbwd_MiB": 100.0}
    saves = dict.fromkeys(("router_saved_bytes", "router_may_save_bytes"), module.router_saves(shape))
    return {"cfg": cfg_of(shape), **times, **peaks, **saves, "of": OF}


@pytest.mark.parametrize(
    ("number", "ratio", "changes", "bounds"),
    [
        (0, 1.05, {}, {"time": True, "peak": True, "saved": True}),
        (0, 1.0499, {}, {"time": False, "peak": True, "saved": True}),
        (3, 1.03, {}, {"time": True, "peak": True, "saved": True}),  # a shape that may be close
        (0, 2.0, {"ours_peak_fwdbwd_MiB": 101.0}, {"time": True, "peak": False, "saved": True}),
        (0, 2.0, {"router_saved_bytes": 1 << 40}, {"time": True, "peak": True, "saved": False}),
        (0, 2.0, {"sonic_fwd_ms": None}, {"time": None, "peak": None, "saved": True}),
    ],
)
def test_the_bounds_of_a_shape(number: int, ratio: float, changes: dict[str, Any], bounds: dict[str, Any]) -> None:
    row = measured(common.SHAPES[number], ratio) | changes
    if None in changes.values():  # SonicMoE was not measured
        row = {name: value for name, value in row.items() if not name.startswith("sonic")}
    assert module_tables.bounds(row) == bounds


def test_what_a_router_may_save() -> None:
    shape = Sizes(32768, 2048, 256, 128, 8)
    assert 0 <= module.router_saves(shape) - 32768 * (2 * 2048 + 4 * 128 + 8 * 8) < 20_000


def test_the_mean_is_of_the_large_shapes_alone() -> None:
    rows = [measured(shape, 1.08) for shape in common.SHAPES[:18]] + [measured(common.SHAPES[20], 5.0)]
    assert module_tables.mean_of_large(rows) == (pytest.approx(1.08), 18)
    assert [holds for _, holds in module.bounds({"rows": rows})] == [True] * 4
    said, holds = module.bounds({"rows": rows[:17]})[-1]  # one of the 18 is missing
    assert not holds and said.startswith("geometric mean of SonicMoE's time over ours, 17 of 18")
    assert math.isnan(module_tables.mean_of_large([])[0])


def test_what_sonic_compiles_goes_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUACK_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    running.use_caches(tmp_path)
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "quack")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


# -------------------------------------------------------------------------------------------------------- kernel times


def test_an_overlap_is_counted_once() -> None:
    spans = [("a", 10.0, 40.0), ("b", 30.0, 60.0), ("c", 35.0, 50.0), ("void spin_kernel()", 70.0, 71.0)]
    spans += [("d", 2000.0, 3000.0), ("early", 1.0, 2.0)]
    assert timing.split_by_marker(spans) == [KernelTime(0.051, 0.076), KernelTime(1.0, 1.0)]


Log = list[tuple[str, float]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A stream's kernels and their microseconds, one after the other, as the profiler tells of those after its start."""
    kernels: Log = []
    real = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU])

    def event(kernel: tuple[str, float], end: float) -> Any:
        span = SimpleNamespace(start=end - kernel[1], end=end)
        return SimpleNamespace(name=kernel[0], device_type=torch.autograd.DeviceType.CUDA, time_range=span)

    @contextmanager
    def profile(activities: object) -> Iterator[Any]:
        kernels.clear()
        with real():
            yield SimpleNamespace(events=lambda: map(event, kernels, itertools.accumulate(us for _, us in kernels)))

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: kernels.append((timing.MARKER, 1.0)))
    return kernels


@pytest.mark.parametrize("queued", [True, False])
def test_kernels_are_summed_by_call(log: Log, monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    """Call A takes 1 ms, call B 2 ms and in every other call 4."""
    durations = {"A": iter([1000.0] * 99), "B": iter([2000.0, 4000.0] * 99)}
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=bool))
    calls = {name: lambda name=name: log.append((name, next(durations[name]))) for name in "AB"}
    found = timing.kernel_times(calls, 3, burst={"B": 2}, queued=queued)
    assert found == {"A": KernelTime(1.0, 1.0, (1.0,) * 3), "B": KernelTime(3.0, 3.0, (3.0,) * 3)}


def test_a_layer_is_timed_on_the_way_that_its_peak_is_of(log: Log) -> None:
    """A layer that is told of a profiler does not write dH over H; here a real profiler runs."""
    seen: list[bool] = []
    with torch.profiler.profile(activities=[]):
        assert not private.unobserved(())
    timing.kernel_times({"A": lambda: log.append(("kernel", 1.0)) or seen.append(private.unobserved(()))}, 1)
    assert seen == [True]


# -------------------------------------------------------------------------------------------------------------- router


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_router_s_accuracy(dtype: torch.dtype, autocast: bool) -> None:
    found = router.accuracy(*router.make_case(SMALL._replace(T=300), dtype, "cpu"), autocast)
    assert found["logits"] < 1e-6 and found["aux"] < 1e-6 and found["z"] < 1e-6
    assert ("dW_of_rounding" in found) == (dtype == torch.bfloat16)
    assert all(found.get(name, 0.0) <= most for name, most in router.LARGEST.items() if name != "dW")
    assert found["dW"] < (1e-5 if dtype == torch.float32 else 1e-2)
    assert found["wrong_tokens"] == 0 and found["load_exact"] and found["bit_identical"]


def test_what_may_be_chosen_otherwise() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 2.0 - 1e-5], [3.0, 1.0, 2.0]], dtype=torch.float64)
    experts = torch.tensor([[1, 0], [0, 2], [0, 1]])
    found = router.choices(experts, logits)
    assert found == {"close_tokens": 1, "other_tokens": 2, "wrong_tokens": 1, "tokens": 3}
    assert router.choices(torch.tensor([[2, 1, 0]] * 3), logits)["wrong_tokens"] == 0  # all of them


def test_the_router_s_bounds() -> None:
    found = {"logits": 1e-6, "dX": 2e-3, "dW": 1e-5, "dX_of_rounding": 1.01, "load_exact": True, "bit_identical": True}
    found |= {"close_tokens": 5, "other_tokens": 2, "wrong_tokens": 0, "tokens": 1000}
    shape, (forward, both) = next(iter(router.BOUNDS_MS.items()))
    cfg = {key: value for key, value in cfg_of(shape).items() if key != "n"}
    row = {"cfg": cfg, "weight": "fp32", "fwd_ms": 2 * forward, "fwdbwd_ms": 2 * both, "fwd_method": "graph"}
    row |= {"fwdbwd_method": "graph", "accuracy": {"plain": found, "autocast": found}}
    row |= {"floor_fwd_ms": 0.04, "floor_fwdbwd_ms": 0.1}
    assert router.failures(row) == []
    assert router.failures(row | {"weight": "bf16"}) == [f"{p} at most {ms} ms by graph" for p, ms in
                                                         (("fwd", forward), ("fwdbwd", both))]  # fmt: skip
    assert len(router.failures(row | {"fwd_method": "kernels"})) == 1
    for worse in (
        {"logits": math.nan},
        {"dW": 3e-5},
        {"wrong_tokens": 1},
        {"close_tokens": 6},
        {"bit_identical": False},
    ):
        assert len(router.failures(row | {"accuracy": {"plain": found | worse, "autocast": found}})) == 1, worse
    rounded = found | {"dW": 2e-3, "dW_of_rounding": 1.0}
    assert router.failures(row | {"accuracy": {"plain": rounded}}) == []
    assert router.bounds({"rows": [row]}) == [(f"{cfg} fp32: all bounds", True)]
