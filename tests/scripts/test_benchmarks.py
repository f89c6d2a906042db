"""What the benchmarks compute without a GPU: shapes, routings, and steps that are ended at their limit."""

import itertools
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from blazeproto.gemm import Sizes
from blazeproto.lab import times
from scripts.bench import common, peers, rounding, timing
from scripts.checks import gpu_check

FAILED = "[gw1] [ 54%] FAILED tests/a.py::test[b c] "


def test_the_shapes_of_both_papers() -> None:
    assert [len(shapes) for shapes in common.TABLES.values()] == [12, 6, 5] and len(set(common.SHAPES)) == 23
    assert common.parse_shapes("1-2,23", common.SHAPES) == [*common.SHAPES[:2], common.SHAPES[22]]


@pytest.mark.parametrize("queued", [True, False])
def test_what_is_timed_begins_when_all_is_queued(monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    log: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.name = "end" if log else "start"
            log.append("event")

        def record(self) -> None:
            log.append(self.name)

        def query(self) -> bool:  # the GPU is there too early, twice
            return log.count("start") < 3

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: "Event") -> float:
            return 6.0

    monkeypatch.setattr(times.torch.cuda, "Event", Event)
    monkeypatch.setattr(times.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(times.torch.cuda, "_sleep", log.append)
    assert times.elapsed_ms(lambda: log.append("call"), 2, queued=queued) == 3.0
    holds = [times.HOLD_CYCLES * factor for factor in (1, 2, 4)] if queued else [None]
    tries = [([hold] if hold else []) + ["start", "call", "call", "end"] for hold in holds]
    assert log == ["event", "event", *itertools.chain.from_iterable(tries)]


def test_a_replay_is_compared_scalars_included() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert timing.relative_difference(1.1 * a, a) == pytest.approx(0.1)
    assert timing.relative_difference(torch.tensor(2.5), torch.tensor(2.0)) == 0.25
    assert math.isnan(timing.relative_difference(torch.tensor(math.nan), torch.tensor(2.0)))


def test_the_sources_hash_is_of_every_file_that_is_compiled_or_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = shutil.copytree(common.REPOSITORY / "blazeproto" / "gemm", tmp_path / "blazeproto" / "gemm")
    monkeypatch.setattr(common, "REPOSITORY", tmp_path)
    seen = [common.source_hash()]
    for name in ("up.py", "cuda/up.cu", "cuda/mainloop.cuh", "notes.txt"):
        with (package / name).open("a") as file:
            file.write(" ")
        seen.append(common.source_hash())
    assert len({*seen}) == 4 and seen[-1] == seen[-2], "notes are no source"


@pytest.mark.parametrize("kind", ["uniform", "zipf", "half_on_one"])
def test_routings_are_distinct_and_skewed_as_they_say(kind: str) -> None:
    shape = Sizes(2000, 8, 8, 16, 4)
    experts = common.route(shape, kind, "cpu", torch.Generator().manual_seed(0))
    assert experts.shape == (shape.T, shape.K) and experts.dtype == torch.int32
    assert (experts.sort(dim=1).values.diff(dim=1) > 0).all()
    load = torch.bincount(experts.flatten(), minlength=shape.E)
    mean = shape.rows / shape.E
    as_said = {
        "uniform": (load - mean).abs().max() < 0.2 * mean,
        "zipf": load[0] > 3 * mean > 9 * load[-1],
        "half_on_one": load[0] == shape.T // 2,
    }
    assert as_said[kind]


def test_the_configurations_of_figure_7() -> None:
    for shapes in rounding.SUBFIGURES.values():
        assert [shape.rows // shape.E for shape in shapes] == [2048, 1024, 512, 256]
        assert len({(shape.T, shape.d, shape.n, shape.K) for shape in shapes}) == 1
    assert ("top-right", Sizes(16384, 1536, 1024, 128, 2)) in rounding.ENDS and len(rounding.ENDS) == 8


def test_rounding_leaves_no_row_of_a_tile_empty() -> None:
    shape = Sizes(600, 32, 16, 8, 2)
    inputs = peers.make_inputs(shape, device="cpu")
    layers = rounding.whole_layers(shape, inputs, tile=16)
    routed = rounding.routings(layers, inputs.x)
    plain, rounded = routed["top_k"].load, routed["rounded"].load
    assert int(plain.sum()) == 1200 < rounding.padded_rows(plain, 16)
    assert rounding.padded_rows(rounded, 16) == int(rounded.sum())
    assert (rounded - plain).abs().max() <= 8  # NR-f: to the nearest multiple
    row = rounding.measure(("small", shape), timing.Machine("cpu", rounds=1))
    assert row["row_counts"] == rounding.row_counts(routed)["row_counts"] == [1200, 1200 + 8 * 7, 1200 + 8 * 15]
    assert torch.equal(routed["rounded"].logits, routed["top_k"].logits)
    bounds = [int(layers[name](inputs.x)[1].load.sum()) for name in ("down", "up")]
    assert bounds[0] <= int(rounded.sum()) <= bounds[1] and bounds[0] < 1200 < bounds[1]
    # 6·R·n·d operations in 1 ms, 12·R·n·d in 2
    assert rounding.model_tflops(Sizes(600, 1000, 500, 8, 2), 1_000_000, 1.0, 3.0) == {
        "fwd_tflops": 3000.0,
        "bwd_tflops": 3000.0,
        "fwdbwd_tflops": 3000.0,
    }


def test_a_step_is_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        "hangs": gpu_check.Step(f"python -c 'print(\"{FAILED}\", flush=True); import time; time.sleep(60)'", minutes=1),
        "works": gpu_check.Step("python -c \"print('ERROR SUMMARY: 3 errors')\"", minutes=1),
        "sees": gpu_check.Step("python -c \"import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\"", minutes=1),
        "sees two": gpu_check.Step(
            "python -c \"import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\"", minutes=1, gpus=2
        ),
        "needs three": gpu_check.Step("python", minutes=1, gpus=3),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    hung = gpu_check.run("hangs", full=False, seconds_left=1.0, log=tmp_path / "log")
    worked = gpu_check.run("works", full=False, seconds_left=30.0, log=tmp_path / "log")
    assert hung["outcome"] == "failed: killed after 1 s" and hung["last_lines"] == [FAILED]
    assert worked["outcome"] == "ok" and worked["findings"] == 3 and hung["failed_tests"] == ["tests/a.py::test[b c]"]
    for name, seen in {"sees": "4", "sees two": "4,7"}.items():
        assert gpu_check.run(name, full=False, seconds_left=30.0, log=tmp_path / "log")["last_lines"] == [seen]
    assert gpu_check.run("needs three", full=False, seconds_left=30.0, log=tmp_path / "log") == {
        "outcome": "skipped: needs 3 GPUs, there are 2"
    }
