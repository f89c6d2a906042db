"""The score of a kernel: what it needs, what is stored, and on a GPU (stood in for) where it is checked and timed."""

import json
from pathlib import Path

import pytest

from blazeproto import cost
from blazeproto.lab import BlockWorkbench, Workbench, workbench
from blazeproto.lab.score import MODELS, STORED, STORED_MS, STORED_PRODUCTS
from blazeproto.lab.times import Times
from blazeproto.lab.verdict import Verdict
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"T": 20, "d": 64, "n": 64, "E": 2, "K": 1}
RIGHT, WRONG = (Verdict("up_forward", 1, (), {}, (), errors=errors) for errors in ((), ("late",)))


def test_stored_times_are_those_of_the_results() -> None:
    record = json.loads((ROOT / "results/h200/tune.json").read_text())
    assert (
        STORED == "H200, 24 November 2026" and record["measured"].startswith("2026-11-24") and "H200" in record["gpu"]
    )
    for model, sizes in MODELS.items():
        cfg = {name: size for name, size in sizes._asdict().items() if name != "halves"}
        rows = {row["product"]: min(row["ms"].values()) for row in record["rows"] if row["cfg"] == cfg}
        assert STORED_MS[model] == tuple(rows[name] for name in STORED_PRODUCTS)


def test_models_have_the_sizes_of_the_tables() -> None:
    rows = json.loads((ROOT / "results/h200/headline.json").read_text())["rows"]
    listed = {row["label"]: row["cfg"] for row in rows}
    assert all(listed[name] == sizes._asdict() for name, sizes in MODELS.items() if name in listed)
    assert "Qwen3-30B-A3B" in listed


def test_without_a_gpu_it_checks_and_says_what_is_needed() -> None:
    score = Workbench("up_forward", **SMALL, device="cpu").score()
    assert score and score.share is None and score.times is None and score.stored
    assert score.stored.floor_ms == cost.product_floor_ms("up_forward", MODELS["Qwen3-30B-A3B"])
    said = repr(score)
    assert "Qwen3-30B-A3B: no share" in said and "a time needs a GPU of compute capability 9.0" in said
    assert "stored and not measured here (H200, 24 November 2026): up_forward: 1.1710 ms, 90% of" in said


def test_other_settings_have_no_stored_time() -> None:
    assert Workbench("up_forward", **SMALL, activation="gelu", device="cpu").score().stored is None
    assert "to beat" not in repr(Workbench("combine", **SMALL, device="cpu").score())


@pytest.mark.parametrize("right", [True, False])
def test_on_a_gpu_it_is_checked_and_timed_on_the_models_layer(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "_lacking", lambda device: "")
    asked = []
    monkeypatch.setattr(Workbench, "check", lambda self: asked.append(self) or (RIGHT if right else WRONG))
    monkeypatch.setattr(Workbench, "time", lambda self: asked.append(self) or Times("up_forward", 2.0, 1.5, 2.2))
    bench = Workbench("up_forward", **SMALL, seed=3, activation="gelu")
    bench.edited = edited = object()  # type: ignore[assignment]
    score = bench.score("Mixtral 8x7B")
    assert len(asked) == 1 + right and all(one.sizes[:5] == MODELS["Mixtral 8x7B"][:5] for one in asked)
    assert all((one.seed, one.activation, one.edited) == (3, "gelu", edited) for one in asked)
    assert bool(score) == right and score.share == (0.75 if right else None)
    assert ("75.0% of the floor's speed" if right else "a wrong kernel is not timed") in repr(score)


def test_what_has_no_score() -> None:
    refuses(lambda: Workbench("combine", **SMALL).score("Qwen4"), "model")
    with pytest.raises(NotImplementedError, match="score: expected a product of"):
        BlockWorkbench("SDD", k=64).score()
