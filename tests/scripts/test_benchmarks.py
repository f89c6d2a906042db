"""What the benchmarks compute without a GPU: floors, bytes, routings, and steps that are ended at their limit."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import bench_common
import bench_layer
import bench_rounding
import gpu_check
import pytest
import timing
import torch
from bench_common import LayerShape


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        (LayerShape(40960, 768, 256, 128, 8), 0.6323, 1.1788),
        (LayerShape(65536, 1024, 4096, 16, 4), 8.5624, 16.9661),
        (LayerShape(8192, 256, 256, 128, 4), 0.0376, 0.0752),
    ],
)
def test_layer_floor(shape: LayerShape, forward: float, backward: float) -> None:
    """The figures that the published comparison of the peers gives for these shapes."""
    assert bench_common.layer_floor_ms(shape) == pytest.approx((forward, backward), abs=5.1e-5)


def test_the_shapes_of_both_papers() -> None:
    assert [len(shapes) for shapes in bench_common.TABLES.values()] == [12, 6, 5]
    assert len(set(bench_common.SHAPES)) == 23
    assert set(bench_common.QUICK_SHAPES) <= set(bench_common.SHAPES)
    assert bench_layer.parse_shapes("1-2,23") == [*bench_common.SHAPES[:2], bench_common.SHAPES[22]]
    assert bench_layer.parse_shapes("moeblaze-1") == list(bench_common.SHAPES[12:18])


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

        def elapsed_time(self, end: Event) -> float:
            return 6.0

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", log.append)
    assert timing.elapsed_ms(lambda: log.append("call"), 2, queued=queued) == 3.0
    holds = [timing.HOLD_CYCLES * factor for factor in (1, 2, 4)] if queued else [None]
    tries = [([hold] if hold else []) + ["start", "call", "call", "end"] for hold in holds]
    assert log == ["event", "event", *itertools.chain.from_iterable(tries)]


def test_what_is_resumed_of_other_sources_is_marked() -> None:
    rows = [{"cfg": 1}, {"cfg": 2, "other_sources": {"measured": "first", "sources_sha256": "a"}}]
    earlier = {"measured": "then", "sources_sha256": "b", "rows": rows, "skew": [3]}
    assert bench_layer.resumed({"measured": "now", "sources_sha256": "b", "rows": []}, earlier) is earlier
    record = bench_layer.resumed({"measured": "now", "sources_sha256": "c", "rows": []}, earlier)
    then = {"measured": "then", "sources_sha256": "b"}
    assert record["rows"] == [{"cfg": 1, "other_sources": then}, rows[1]]
    assert (record["measured"], record["skew"], record["extras_of_other_sources"]) == ("now", [3], {"skew": then})
    again = bench_layer.resumed({"measured": "later", "sources_sha256": "d", "rows": []}, record)
    assert again["extras_of_other_sources"] == {"skew": then}


def test_saved_bytes_are_the_package_s_own_count() -> None:
    from blazeproto.autograd import saved_bytes

    shape = LayerShape(96, 64, 40, 5, 3)
    for policy in ("minimal", "paper", "recompute"):
        theirs = saved_bytes(
            policy, num_tokens=shape.T, d_model=shape.d, d_expert=shape.n, num_experts=shape.E, top_k=shape.K
        )
        assert bench_common.saved_bytes(shape, policy) == theirs


@pytest.mark.parametrize("kind", ["uniform", "zipf", "half_on_one"])
def test_routings_are_distinct_and_skewed_as_they_say(kind: str) -> None:
    shape = LayerShape(2000, 8, 8, 16, 4)
    experts = bench_common.route(shape, kind, "cpu", torch.Generator().manual_seed(0))
    assert experts.shape == (shape.T, shape.K)
    assert experts.dtype == torch.int32
    assert (experts.sort(dim=1).values.diff(dim=1) > 0).all()
    load = torch.bincount(experts.flatten(), minlength=shape.E)
    mean = shape.rows / shape.E
    if kind == "uniform":
        assert (load - mean).abs().max() < 0.2 * mean
    elif kind == "zipf":
        assert load[0] > 3 * mean > 9 * load[-1]
    else:
        assert load[0] == shape.T // 2


def test_the_configurations_of_figure_7() -> None:
    experts = {name: [shape.E for shape in shapes] for name, shapes in bench_rounding.SUBFIGURES.items()}
    assert experts["top-left"] == experts["bottom-left"] == [64, 128, 256, 512]
    assert experts["top-right"] == [16, 32, 64, 128]
    assert experts["bottom-right"] == [32, 64, 128, 256]
    for shapes in bench_rounding.SUBFIGURES.values():
        assert [shape.rows // shape.E for shape in shapes] == [2048, 1024, 512, 256]
        assert len({(shape.T, shape.d, shape.n, shape.K) for shape in shapes}) == 1
    assert len(bench_rounding.arguments([]).configs) == 16
    quick = bench_rounding.arguments(["--quick", "--subfigures", "top-right"])
    assert quick.configs == [("top-right", LayerShape(16384, 1536, 1024, E, 2)) for E in (16, 128)]
    with pytest.raises(SystemExit):
        bench_rounding.arguments(["--subfigures", "middle"])


def test_rounding_leaves_no_row_of_a_tile_empty() -> None:
    logits = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    routed = bench_rounding.routings(logits, 2, tile=32)
    plain, rounded = routed["top_k"].load, routed["rounded"].load
    assert int(plain.sum()) == 1200 < bench_rounding.padded_rows(plain, 32)
    assert bench_rounding.padded_rows(rounded, 32) == int(rounded.sum())
    assert (rounded - plain).abs().max() <= 16  # NR-f: to the nearest multiple
    assert routed["rounded"].pair_tokens is not None
    # 6·R·n·d operations in 1 ms, 12·R·n·d in 2
    shape = LayerShape(600, 1000, 500, 8, 2)
    assert bench_rounding.model_tflops(shape, 1_000_000, 1.0, 3.0) == {
        "fwd_tflops": 3000.0,
        "bwd_tflops": 3000.0,
        "fwdbwd_tflops": 3000.0,
    }


def test_a_step_is_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        "hangs": gpu_check.Step('python -c "print(1, flush=True); import time; time.sleep(60)"', minutes=1),
        "works": gpu_check.Step("python -c \"print('ERROR SUMMARY: 3 errors')\"", minutes=1),
    }
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    hung = gpu_check.run("hangs", full=False, seconds_left=1.0, log=tmp_path / "log")
    assert hung["outcome"] == "killed after 1 s"
    assert hung["last_lines"] == ["1"]
    worked = gpu_check.run("works", full=False, seconds_left=30.0, log=tmp_path / "log")
    assert worked["outcome"] == "ok"
    assert worked["findings"] == 3
