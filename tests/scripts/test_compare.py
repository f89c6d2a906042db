"""The comparison of two checkouts: its cases, its two sides in processes of their own, and what it counts as a difference."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blazeproto
from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm import Sizes
from scripts.bench.timing import tensors_in
from scripts.checks import cases, compare
from scripts.checks.layers import Layer, draw_experts, draw_products

ROOT = Path(__file__).resolve().parents[2]
TINY = Sizes(20, 16, 8, 4, 2)
LAYERS = [draw_experts(seed) for seed in range(cases.DRAWN[draw_experts])]


@pytest.fixture(scope="module")
def loaded() -> Iterator[list[str]]:
    """A side's cases, in this process."""
    path, environment = list(sys.path), pytest.MonkeyPatch()
    environment.setenv("PYTHONPATH", "")  # which the side sets
    compare.load(ROOT, "cpu")
    yield compare.names()
    sys.path[:] = path
    environment.undo()


# --- Cases ---------------------------------------------------------------------------------------------------------------


def test_cases_have_every_activation_policy_and_router(loaded: list[str]) -> None:
    for draw in (draw_products, draw_experts):
        drawn = [draw(seed) for seed in range(cases.DRAWN[draw])]
        assert {*ACTIVATIONS} <= {layer.inputs["activation"] for layer in drawn}
    assert len({(layer.options["save"], layer.inputs["varying"], layer.inputs["biases"]) for layer in LAYERS}) == 12
    assert {f"module: {router}" for router in blazeproto.router.ROUTERS} <= {*loaded}
    for name in (name for name in loaded if name.startswith(("dispatch: T9", "module: top_k", "router: E7"))):
        assert "error" not in compare.run(name), name


def test_a_product_s_outputs_have_the_rows_in_use_and_one_order() -> None:
    layer = Layer(TINY, {"biases": True, "sentinels": 0.5})
    made, again = (cases.run_products(layer, 3, "cpu") for _ in range(2))
    assert all(value.isfinite().all() and torch.equal(value, again[name]) for name, value in made.items())
    assert {"h", "y", "dx", "d_up", "d_up_f32", "d_scores"} < made.keys() and "fused" not in made


@pytest.mark.parametrize(
    ("made", "finite", "error"),
    [
        ([1.0, float("nan")], True, "out: expected finite values"),
        ([1.0, float("nan")], False, None),
        (None, True, "AttributeError: 'NoneType' object has no attribute 'is_floating_point'"),
    ],
)
def test_a_case_that_fails_or_is_not_finite_is_an_error(
    made: list[float] | None, finite: bool, error: str | None, loaded: list[str]
) -> None:
    out: Any = None if made is None else torch.tensor(made)
    compare.HERE.cases["a case"] = cases.Case("a case", lambda: {"out": out}, finite=finite)
    assert compare.run("a case").get("error") == error


def test_a_hash_tells_bytes_shapes_and_dtypes_apart() -> None:
    zero, digest = torch.zeros(2, 3), compare.digest
    others = [-zero, zero.reshape(3, 2), zero.int(), zero.bfloat16(), zero[:1], zero[:0]]
    assert len({digest(tensor) for tensor in (zero, *others)}) == 7
    assert digest(zero.T) == digest(zero.T.contiguous())


@pytest.mark.parametrize("kind", ["module", "zipf", "router", "lora"])
def test_a_step_that_is_timed_runs_twice(kind: str) -> None:
    step = cases.step_of(kind, TINY, "cpu")
    first, second = (tensors_in(step()) for _ in range(2))
    assert all(torch.equal(a, b) and a.isfinite().all() and a.any() for a, b in zip(first, second, strict=True))
    assert kind != "module" or step.args[0].x.grad is None, "a peak counts the gradients that a step makes"


def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ImportError, match="expected blazeproto in"):
        compare.load(tmp_path, "cpu")


# --- Two sides -----------------------------------------------------------------------------------------------------------


PLANTED = """
_right = activate


def activate(h, activation):
    return _right(h, activation) * (1.5 if activation == "relu2" else 1)
"""


def compared(old: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.checks.compare", "--old", str(old), "--device", "cpu", "--jobs", "1"]
    return subprocess.run([*command, *words], cwd=ROOT, check=False, capture_output=True, text=True)


def test_a_planted_difference_is_found_and_nothing_else(tmp_path: Path) -> None:
    old, out = tmp_path / "old", tmp_path / "record.json"
    shutil.copytree(ROOT / "blazeproto", old / "blazeproto", ignore=shutil.ignore_patterns("__pycache__"))
    with (old / "blazeproto" / "activations.py").open("a") as file:
        file.write(PLANTED)
    few = {
        layer.inputs["activation"]: number
        for number, layer in enumerate(LAYERS)
        if 1 < layer.sizes.T <= compare.CPU_TOKENS
        and layer.inputs["row_capacity"] is None
        and layer.options["combine"] == "gather"
    }
    wrong = few["relu2"]
    only = [word for number in (wrong, few["relu"]) for word in ("--only", f"layer {number}:")]
    found = compared(old, *only, "--only", "dispatch: T9 d16 n24 E64 K2, fixed, tiled", "--out", str(out))
    assert found.returncode == 1 and found.stdout.endswith("FAILS\n"), found.stdout + found.stderr
    record = json.loads(out.read_text())["bits"]
    assert record["cases"] == 3
    ((name, text),) = record["differing"].items()
    assert name.startswith(f"layer {wrong}:") and "out" in text
    assert "3 cases, 1 of which differs" in found.stdout


@pytest.mark.full
def test_nothing_compared_is_nothing_shown() -> None:
    found = compared(ROOT, "--only", "no such case")
    assert found.returncode == 1 and found.stdout.endswith("FAILS\n")


# --- What differs --------------------------------------------------------------------------------------------------------


def test_what_differs_is_named() -> None:
    same, other = {"out": "a", "d_x": "b"}, {"out": "a", "d_x": "c"}
    assert compare.difference(same, same) == ""
    assert compare.difference(same, other) == compare.difference(same, {"out": "a"}) == "d_x"
    assert compare.difference(same, {"error": "it broke"}) == "new failed: it broke"


def test_bounds_of_time_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    def row(ratio: float, peak: float = 10.0) -> compare.Record:
        times = {"old_ms": 1.0, "new_ms": ratio, "ratio": ratio, "old_peak_MiB": 10.0, "new_peak_MiB": peak}
        return {"layer": "module", "cfg": dict(zip("TdnEK", TINY, strict=False))} | times

    assert compare.judge_times([row(1.0), row(1.02)], 1.01, 1.03)
    assert not compare.judge_times([row(1.0), row(1.04)], 1.03, 1.03)
    assert not compare.judge_times([row(1.02), row(1.02)], 1.01, 1.03)
    assert not compare.judge_times([row(1.0, peak=10.1)], 1.01, 1.03)
    assert not compare.judge_times([], 1.01, 1.03)
    assert "peaks that are higher: [{'T': 20" in capsys.readouterr().out


def test_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        compare.arguments(["--old", str(tmp_path)])
    assert "--old: expected a folder that blazeproto/ is in" in capsys.readouterr().err
