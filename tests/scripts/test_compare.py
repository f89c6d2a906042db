"""The comparison of two checkouts: its cases, its two sides in processes of their own, and what it counts as a difference."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blazeproto
from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS
from scripts.checks import cases, compare
from scripts.checks.cases import Draw, Shape

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(20, 16, 8, 4, 2)
PRODUCTS = cases.products_of(gemm)
LAYERS = list(cases.layers(tuple(ACTIVATIONS)))


@pytest.fixture(scope="module")
def loaded() -> Iterator[list[str]]:
    """A side's cases, in this process."""
    path, environment = list(sys.path), pytest.MonkeyPatch()
    environment.setenv("PYTHONPATH", "")  # which the side sets
    compare.load(ROOT, "cpu", PRODUCTS)
    yield compare.names()
    sys.path[:] = path
    environment.undo()


# --- Cases ---------------------------------------------------------------------------------------------------------------


def test_every_public_function_of_a_dispatch_is_there() -> None:
    assert {product.function for product in PRODUCTS.values()} == {*gemm.PRODUCTS, "grouped_mm"}
    assert pickle.loads(pickle.dumps(PRODUCTS)) == PRODUCTS


def test_cases_have_every_activation_policy_routing_and_router(loaded: list[str]) -> None:
    for activation in ACTIVATIONS:
        for kind in ("product up_forward", "product down_backward_act", "layer"):
            assert any(name.startswith(kind) and f", {activation}" in name for name in loaded)
    drawn = {(layer.options["save"], layer.routing, layer.bias) for layer in LAYERS}
    assert drawn == {(s, r, b) for s in cases.POLICIES for r in cases.ROUTINGS for b in (True, False)}
    for router in blazeproto.router.ROUTERS:
        assert f"module: {router}" in loaded


@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_inputs_are_the_same_each_time_and_what_they_say(routing: str) -> None:
    shape = cases.SMALL
    first, second = (Draw("a name", "cpu").experts(shape, routing) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    assert not torch.equal(first["experts"], Draw("another", "cpu").experts(shape, routing)["experts"])
    outside = (first["experts"] < 0) | (first["experts"] >= shape.E)
    assert bool(outside.any()) == (routing in ("sentinels", "varying"))
    if routing == "varying":
        counts, used = first["token_offsets"].diff(), int(first["token_offsets"][-1])
        assert counts.min() >= 0 and counts.max() <= shape.K and len(counts) == shape.T
        assert outside[used:].all() and not outside[:used].any()
        assert torch.equal(first["pair_tokens"][:used], torch.arange(shape.T).repeat_interleave(counts).int())


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_s_options_are_taken(name: str) -> None:
    """None is refused, and an output depends on each."""
    made = cases.run_product(blazeproto, "cpu", "a title", PRODUCTS[name], TINY, "sentinels", "swiglu", crossed=True)
    assert all(isinstance(output, torch.Tensor) for output in made.values()), made
    product = PRODUCTS[name]
    assert len(made) >= sum(len(call.outputs) for call in product.calls.values())


def test_a_refusal_is_an_output(loaded: list[str]) -> None:
    refused = cases.Layer(TINY, activation="no such")
    compare.HERE.cases["refused"] = cases.Case("", lambda: cases.attempted(cases.run_layer, blazeproto, "cpu", refused))
    (text,) = compare.run("refused")["hashes"].values()
    assert text.startswith("ValueError: activation: expected ")


def test_outputs_that_are_not_finite_fail(loaded: list[str]) -> None:
    for finite in (True, False):
        case = cases.Case("nan", lambda: {"out": torch.tensor([1.0, float("nan")])}, finite=finite)
        compare.HERE.cases["nan"] = case
        if finite:
            assert compare.run("nan") == {"error": "ValueError: out: expected finite values"}
    assert compare.run("nan")["hashes"].keys() == {"out"}


def test_a_hash_tells_bytes_shapes_and_dtypes_apart() -> None:
    zero, digest = torch.zeros(2, 3), compare.digest
    others = [-zero, zero.reshape(3, 2), zero.int(), zero.bfloat16(), zero[:1], zero[:0]]
    assert len({digest(tensor) for tensor in (zero, *others)}) == 7
    assert digest(zero.T) == digest(zero.T.contiguous())


@pytest.mark.parametrize("kind", cases.STEPS)
def test_a_step_that_is_timed_runs_twice(kind: str) -> None:
    step = cases.STEPS[kind](blazeproto, "cpu", TINY)
    first, second = step(), step()
    assert all(torch.equal(a, b) and a.isfinite().all() and a.any() for a, b in zip(first[:2], second[:2], strict=True))


def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ImportError, match="expected blazeproto in"):
        compare.load(tmp_path, "cpu", PRODUCTS)


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
    few = [(number, layer) for number, layer in enumerate(LAYERS) if layer.shape == cases.SMALL and layer.needs]
    wrong = next(number for number, layer in few if layer.activation == "relu2" and layer.options.keys() == {"save"})
    right = next(number for number, layer in few if layer.activation == "relu" and layer.options.keys() == {"save"})
    only = [word for number in (wrong, right) for word in ("--only", f"layer {number}:")]
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


def record(runs: dict[str, Any] | None = None, **hashes: str) -> compare.Record:
    return {"hashes": hashes, "runs": runs or {}}


def test_what_differs_is_named() -> None:
    same, other = record(out="a", d_x="b"), record(out="a", d_x="c")
    assert compare.difference(same, same) == ""
    assert compare.difference(same, other) == "d_x"
    assert compare.difference(same, record(out="a")) == "d_x (old b, new None)"
    assert compare.difference(same, record(out="a", d_x="ValueError: no")) == "d_x (old b, new ValueError: no)"
    assert compare.difference(same, {"error": "it broke"}) == "new failed: it broke"


def test_outputs_that_vary_are_compared_with_how_much_they_vary() -> None:
    base = torch.tensor([1.0, -2.0, 4.0])
    up, far = base + 2**-5, base + torch.tensor([0.0, 0.5, 0.0])
    old = record({"out": [base, up, base]})
    assert compare.difference(old, record({"out": [up, base, up]})) == ""
    assert compare.difference(old, record({"out": [far] * 3})).startswith("out (0.10")
    assert compare.difference(record({"out": [base] * 3}), record({"out": [base] * 3})) == ""
    assert compare.difference(record({"out": [base] * 3}), record({"out": [up] * 3}))


def test_bounds_of_time_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    def row(ratio: float, peak: float = 10.0) -> compare.Record:
        times = {"old_ms": 1.0, "new_ms": ratio, "ratio": ratio, "old_peak_MiB": 10.0, "new_peak_MiB": peak}
        return {"layer": "module", "cfg": TINY._asdict()} | times

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
