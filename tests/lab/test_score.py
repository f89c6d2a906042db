"""The score of a kernel: what it needs, what is stored, and on a GPU (stood in for) where it is checked and timed."""

import json
from pathlib import Path

import pytest

from blazeproto.lab import BlockWorkbench, Workbench, workbench
from blazeproto.lab.times import MODELS, STORED, Times
from blazeproto.lab.verdict import Verdict
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"T": 20, "d": 64, "n": 64, "E": 2, "K": 1}


def test_what_is_stored_is_in_the_results() -> None:
    record = json.loads((ROOT / "results/h200/tune.json").read_text())
    assert "H200" in record["gpu"] and record["measured"].startswith("2026-11-24") and STORED.keys() == MODELS.keys()
    for model, sizes in MODELS.items():
        rows = [row for row in record["rows"] if tuple(row["cfg"].values()) == sizes]
        shares = {row["product"]: f"{100 * row['floor_ms'] / min(row['ms'].values()):.0f} %" for row in rows}
        assert STORED[model] == {name: shares[name] for name in STORED[model]} and len(STORED[model]) == 4


def test_models_have_the_sizes_of_the_tables() -> None:
    rows = json.loads((ROOT / "results/h200/headline.json").read_text())["rows"]
    listed = {row["label"]: tuple(row["cfg"].values())[:5] for row in rows}
    assert {"Qwen3-30B-A3B", "Mixtral 8x7B"} <= {name for name, sizes in MODELS.items() if listed.get(name) == sizes}


@pytest.mark.parametrize(("product", "stored"), [("up_forward", True), ("combine", False)])
def test_without_a_gpu_it_says_what_is_needed_and_what_is_stored(product: str, stored: bool) -> None:
    with pytest.raises(RuntimeError) as error:
        Workbench(product, **SMALL, device="cpu").score()
    assert str(error.value).startswith("score: expected a GPU of compute capability 9.0")
    assert "a GPU of a GPU" not in str(error.value)
    share = "90 %" if stored else "no share"
    assert f"not measured here: the package's kernel, {share} of the floor's speed on an H200, 24 Nov" in str(
        error.value
    )


@pytest.mark.parametrize("right", [True, False])
def test_on_a_gpu_it_is_checked_and_timed_on_the_models_layer(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "_lacking", lambda device: "")
    asked: list[Workbench] = []

    def check(self: Workbench) -> Verdict:
        asked.append(self)
        return Verdict("up_forward", 1, (), {}, (), errors=() if right else ("late",))

    def time(self: Workbench) -> Times:
        asked.append(self)
        return Times("up_forward", 2.0, 1.5, 2.2)

    monkeypatch.setattr(Workbench, "check", check)
    monkeypatch.setattr(Workbench, "time", time)
    bench = Workbench("up_forward", **SMALL, seed=3, activation="gelu")
    bench.edited = edited = object()  # type: ignore[assignment]
    if right:
        score = bench.score("Mixtral 8x7B")
        assert score.share == 0.75 and repr(score).startswith("up_forward, Mixtral 8x7B: 2.0000 ms, 75% of")
    else:
        with pytest.raises(ValueError, match=r"score: expected a kernel that is right, got up_forward: WRONG"):
            bench.score("Mixtral 8x7B")
    assert len(asked) == 1 + right and all(one.sizes[:5] == MODELS["Mixtral 8x7B"] for one in asked)
    assert all((one.seed, one.activation, one.edited) == (3, "gelu", edited) for one in asked)


def test_what_has_no_score() -> None:
    refuses(lambda: Workbench("combine", **SMALL).score("Qwen4"), "model")
    refuses(lambda: BlockWorkbench("SDD", k=64).score(), "product")
