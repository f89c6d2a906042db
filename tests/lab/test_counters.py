"""Hardware counters: how ncu is found and called, and what it prints. Needs no GPU and no ncu."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from blazeproto.gemm import TileConfig
from blazeproto.lab import counters as module
from blazeproto.lab.counters import (
    METRICS,
    CountersRefused,
    HardwareCounters,
    choose_metrics,
    counters,
    find_ncu,
    parse,
)
from tests.refusals import refuses

KNOWN = {metrics[0].partition(".")[0] for metrics in METRICS.values()} | {
    "smsp__average_warps_issue_stalled_wait_per_issue_active",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active",
    "smsp__average_warps_issue_stalled_gmma_not_issued_per_issue_active",
    "smsp__inst_executed",
}
SAMPLE = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "up_forward" - 0: 0%....50%....100% - 9 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"""
VALUES = {
    "dram__bytes_read.sum": ("byte", "201,326,592"),
    "dram__bytes_write.sum": ("byte", "1048576"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "51.25"),
    "gpu__time_duration.sum": ("ns", "428,832"),
    "lts__t_bytes.sum": ("byte", "2,097,152"),
    "lts__t_sector_hit_rate.pct": ("%", "72.1"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("%", "n/a"),
    **{
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": ("inst", value)
        for reason, value in (
            ("barrier", "0.5"), ("gmma", "9.25"), ("long_scoreboard", "3"), ("selected", "50"), ("wait", "1.5"),
            ("math_pipe_throttle", "0.01"), ("sleeping", "0"),
        )
    },
}  # fmt: skip


def sample() -> str:
    """A launch as ncu prints it in CSV, between lines of its own and of the program's."""
    start = '"0","4242","python3.11","127.0.0.1","up_forward","1","7","(512, 1, 1)","(132, 1, 1)","0","9.0"'
    rows = [f'{start},"Command line profiler metrics","{n}","{unit}","{value}"' for n, (unit, value) in VALUES.items()]
    return SAMPLE + "\n".join(rows) + "\n==PROF== Disconnected from process 4242\n"


def test_what_ncu_prints_becomes_numbers() -> None:
    chosen, _ = choose_metrics(KNOWN)
    found = parse(sample(), chosen, "up_forward")
    assert found.milliseconds == pytest.approx(0.428832)
    assert (found.dram_read, found.dram_written, found.l2_bytes) == (201326592, 1048576, 2097152)
    assert (found.dram_busy, found.l2_hit_rate) == pytest.approx((0.5125, 0.721))
    assert math.isnan(found.tensor_pipe)  # n/a
    assert found.stalls == {
        "gmma": 9.25,
        "long_scoreboard": 3.0,
        "wait": 1.5,
        "barrier": 0.5,
        "math_pipe_throttle": 0.01,
    }
    assert next(iter(found.stalls)) == "gmma" and repr(found).startswith("up_forward: 0.4288 ms")


def test_no_launch_is_an_error_with_what_ncu_said() -> None:
    with pytest.raises(RuntimeError, match=r"no launch of up_forward; it said:\n==WARNING== No kernels were profiled"):
        parse("==WARNING== No kernels were profiled.\n", {}, "up_forward")


def test_metrics_are_those_that_ncu_knows() -> None:
    chosen, stalls = choose_metrics(KNOWN)
    assert chosen == {field: metrics[0] for field, metrics in METRICS.items()}
    assert stalls == [
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in ("gmma", "wait")
    ]
    older = (KNOWN - {"sm__pipe_tensor_cycles_active"}) | {"sm__pipe_tensor_op_hmma_cycles_active"}
    assert choose_metrics(older)[0]["tensor_pipe"] == METRICS["tensor_pipe"][1]
    assert "tensor_pipe" not in choose_metrics(KNOWN - {"sm__pipe_tensor_cycles_active"})[0]


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ncu on PATH that answers as ``answer`` beside it says, and writes down how it was called."""
    path = tmp_path / "ncu"
    (tmp_path / "answer").write_text(sample())
    (tmp_path / "metrics").write_text("Device NVIDIA H200 (GH100)\n" + "".join(f"{name}  Counter\n" for name in KNOWN))
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "if '--query-metrics' in sys.argv: print((here / 'metrics').read_text()); sys.exit()\n"
        "(here / 'call').write_text(json.dumps(sys.argv[1:]))\n"
        "print((here / 'answer').read_text())\n"
        "sys.exit('failed' in (here / 'answer').read_text())\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_call(ncu: Path) -> None:
    found = counters("up_forward", 256, 64, 64, 4, 2, config=TileConfig(deferred=False), seed=3)
    assert isinstance(found, HardwareCounters) and found.kernel == "up_forward"
    call = json.loads((ncu / "call").read_text())
    assert (
        call[call.index("--kernel-name") + 1] == "up_forward"
        and "gpu__time_duration.sum" in call[call.index("--metrics") + 1]
    )
    assert call[call.index("--profile-from-start") + 1] == "off" and call[call.index("--clock-control") + 1] == "none"
    program = call[call.index("-m") :]
    assert program[:2] == ["-m", "blazeproto.lab.watched"]
    options = json.loads(program[2])
    assert [options[name] for name in ("product", *"TdnEK")] == ["up_forward", 256, 64, 64, 4, 2]
    assert TileConfig(**options["config"]) == TileConfig(deferred=False) and options["seed"] == 3


@pytest.mark.parametrize(
    ("product", "options", "kernel"),
    [
        ("up_backward_weight", {"sources": Path("/edited/sources")}, "weight_gradient"),
        ("down_backward_weight", {"precision": "fp8"}, "weight_gradient_fp8"),
    ],
)
def test_options_are_told_to_the_program(ncu: Path, product: str, options: dict[str, Any], kernel: str) -> None:
    counters(product, 256, 128, 128, 4, 2, **options)
    call = json.loads((ncu / "call").read_text())
    assert {name: json.loads(call[-1])[name] for name in options} == {
        name: str(value) for name, value in options.items()
    }
    assert call[call.index("--kernel-name") + 1] == kernel


def test_refusals_say_what_mends_them(ncu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ncu / "answer").write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    with pytest.raises(CountersRefused, match=r"run as root.*NVreg_RestrictProfilingToAdminUsers=0"):
        counters("up_forward", 256, 64, 64, 4, 2)
    (ncu / "answer").write_text("the program failed: out of memory\n")
    with pytest.raises(RuntimeError, match=r"(?s)ncu ended with 1:.*out of memory"):
        counters("up_forward", 256, 64, 64, 4, 2)
    (ncu / "metrics").write_text("nothing\n")
    with pytest.raises(RuntimeError, match="ncu lists none of the metrics"):
        counters("up_forward", 256, 64, 64, 4, 2)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module, "ROOTS", (ncu / "a", ncu / "b"))
    with pytest.raises(FileNotFoundError, match="apt-get install cuda-nsight-compute"):
        counters("up_forward", 256, 64, 64, 4, 2)


def test_the_newest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = (tmp_path / "nsight-compute", tmp_path / "local")
    for path in (roots[0] / "2024.3.2/ncu", roots[0] / "2025.10.1/ncu", roots[0] / "2025.9.0/ncu"):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module, "ROOTS", roots)
    assert find_ncu() == str(roots[0] / "2025.10.1/ncu")


@pytest.mark.parametrize(
    ("words", "argument", "error"),
    [
        (("up_forwrd", 1, 8, 8, 1, 1), "product", ValueError),
        (("combine", 1, 8, 8, 1, 1), "product", ValueError),
        (("up_forward", 0, 8, 8, 1, 1), "T", ValueError),
        (("up_forward", 1, 8, 8.0, 1, 1), "n", TypeError),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words: Any, argument: str, error: type[Exception]) -> None:
    refuses(lambda: counters(*words), argument, error)
