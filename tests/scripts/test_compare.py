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
from blazeproto.autograd.chunks import chunk_tokens_for, num_chunks
from scripts.checks import compare, compare_cases, compare_layers, compare_worker
from scripts.checks.compare_cases import Draw, Shape

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(20, 16, 8, 4, 2)
PRODUCTS = compare_cases.products_of(gemm)
LAYERS = list(compare_layers.layers(tuple(ACTIVATIONS)))


@pytest.fixture(scope="module")
def side() -> Iterator[compare_worker.Side]:
    path, environment = list(sys.path), pytest.MonkeyPatch()
    environment.setenv("PYTHONPATH", "")  # which the side sets
    yield compare_worker.Side(ROOT, "cpu")
    sys.path[:] = path
    environment.undo()


# --- Cases ---------------------------------------------------------------------------------------------------------------


def test_every_public_function_of_a_dispatch_is_there() -> None:
    assert {product.function for product in PRODUCTS.values()} == {*gemm.PRODUCTS, "grouped_mm"}
    assert pickle.loads(pickle.dumps(PRODUCTS)) == PRODUCTS


def test_cases_have_names_of_their_own_and_every_activation_policy_and_routing(side: compare_worker.Side) -> None:
    names = side.names(PRODUCTS)
    assert len(names) == len(set(names))
    for activation in ACTIVATIONS:
        for kind in ("product up_forward", "product down_backward_act", "layer"):
            assert any(name.startswith(kind) and f", {activation}" in name for name in names)
    drawn = {(layer.options.get("save"), layer.routing, layer.bias) for layer in LAYERS}
    assert drawn >= {
        (s, r, b) for s in compare_cases.POLICIES for r in compare_cases.ROUTINGS[:3] for b in (True, False)
    }
    for router in blazeproto.router.ROUTERS:
        assert f"module: {router}" in names


def test_chunked_layers_have_several_chunks() -> None:
    for layer in LAYERS:
        tokens, d, n, _, top_k = layer.shape
        if bound := layer.options.get("workspace_bytes"):
            combine = layer.options.get("combine", "gather")
            length = chunk_tokens_for(bound, tokens, top_k, d, n, layer.activation, 2, combine=combine)
            assert num_chunks(tokens, length) >= 3, layer.name


@pytest.mark.parametrize("routing", compare_cases.ROUTINGS)
def test_inputs_are_the_same_each_time_and_what_they_say(routing: str) -> None:
    shape = compare_cases.SMALL
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
    made = compare_cases.run_product(
        blazeproto, "cpu", "a title", PRODUCTS[name], TINY, "sentinels", "swiglu", crossed=True
    )
    assert all(isinstance(output, torch.Tensor) for output in made.values()), made
    product = PRODUCTS[name]
    assert len(made) >= sum(len(call.outputs) for call in product.calls.values())


def test_a_refusal_is_an_output(side: compare_worker.Side) -> None:
    side.cases["refused"] = compare_cases.Case("refused", lambda: {"low": "ValueError: low: no"})
    assert side.run("refused")["hashes"] == {"low": "ValueError: low: no"}


def test_outputs_that_are_not_finite_fail(side: compare_worker.Side) -> None:
    for finite in (True, False):
        case = compare_cases.Case("nan", lambda: {"out": torch.tensor([1.0, float("nan")])}, finite=finite)
        side.cases["nan"] = case
        if finite:
            with pytest.raises(ValueError, match="out: expected finite"):
                side.run("nan")
    assert side.run("nan")["hashes"].keys() == {"out"}


def test_a_hash_tells_bytes_shapes_and_dtypes_apart() -> None:
    zero, digest = torch.zeros(2, 3), compare_worker.digest
    others = [-zero, zero.reshape(3, 2), zero.int(), zero.bfloat16(), zero[:1], zero[:0]]
    assert len({digest(tensor) for tensor in (zero, *others)}) == 7
    assert digest(zero.T) == digest(zero.T.contiguous())


@pytest.mark.parametrize("kind", ["module", "lora", "router"])
def test_a_step_that_is_timed_runs_twice(kind: str, side: compare_worker.Side) -> None:
    side.load(kind, TINY)
    first, second = side.step(), side.step()
    assert all(torch.equal(a, b) and a.isfinite().all() and a.any() for a, b in zip(first, second, strict=True))
    side.unload()


def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ImportError, match="expected blazeproto in"):
        compare_worker.package_of(tmp_path)


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
    layer = "layer: T300 d136 n72 E7 K3"
    only = [word for name in ("relu2", "relu") for word in ("--only", f"{layer}, {name}, fixed, bias, save")]
    found = compared(old, *only, "--only", "router hash: E7", "--out", str(out))
    assert found.returncode == 1 and found.stdout.endswith("FAILS\n"), found.stdout + found.stderr
    record = json.loads(out.read_text())["bits"]
    assert record["cases"] == 3 + 3 + 1
    assert len(record["differing"]) == 3 and all(", relu2," in name for name in record["differing"])
    assert all("out" in text for text in record["differing"].values())
    assert "7 cases, 3 of which differ" in found.stdout


@pytest.mark.full
def test_nothing_compared_is_nothing_shown() -> None:
    found = compared(ROOT, "--only", "no such case")
    assert found.returncode == 1 and found.stdout.endswith("FAILS\n")


def test_a_process_that_ends_is_told() -> None:
    worker = compare.Worker(ROOT / "docs", "cpu")  # which has no package
    with pytest.raises(compare.Failed, match="the process has ended with code 1"):
        worker.ask("names", PRODUCTS)
    worker.close()


def test_a_request_that_raises_is_told_and_the_next_is_answered() -> None:
    worker = compare.Worker(ROOT, "cpu")
    with pytest.raises(compare.Failed, match="KeyError: 'no such case'"):
        worker.ask("run", "no such case")
    assert "module: top_k" in worker.ask("names", PRODUCTS)
    worker.close()


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
