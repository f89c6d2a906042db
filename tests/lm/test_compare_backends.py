"""scripts/lm/compare_backends.py on curves that are made up."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from scripts.lm import compare_backends


def curve(length: int = 500) -> list[float]:
    return [1.5 + 4 * math.exp(-step / 80) for step in range(length)]


def test_smoothed() -> None:
    assert compare_backends.smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    step = compare_backends.smoothed([0.0] * 200 + [1.0] * compare_backends.HALF_LIFE)
    assert step[-1] == pytest.approx(0.5, abs=0.01)


def test_largest_difference() -> None:
    losses = curve()
    assert compare_backends.largest_difference(losses, losses)[0] == 0
    apart = [loss * (1.02 if step >= 300 else 1) for step, loss in enumerate(losses)]
    difference, step = compare_backends.largest_difference(apart, losses)
    assert difference == pytest.approx(0.02, rel=0.05) and step > 300
    assert compare_backends.largest_difference([*losses[:-1], math.nan], losses)[0] == math.inf


@pytest.mark.parametrize(("factor", "code"), [(1.005, 0), (1.03, 1)])
def test_verdict_and_picture(factor: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"hopper": [loss * factor for loss in curve()], "torch": curve()}
    (tmp_path / "curves.json").write_text(json.dumps({"losses": losses}))
    picture = tmp_path / "curves.png"
    arguments = ["compare_backends.py", "--results", str(tmp_path / "curves.json"), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", arguments)
    assert compare_backends.main() == code and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ends", [True, False])
def test_the_record_names_the_kernels_of_both_runs(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped leaves no record."""
    kernels: dict[str, dict[str, str]] = {}

    def train(options: list[str]) -> int:
        words = dict(zip(options[:6:2], options[1:6:2], strict=True))
        folder = Path(words["--out"]) / words["--name"]
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(f'{{"loss": {loss}}}\n' for loss in curve(9)))
        if ends:
            (folder / "summary.json").write_text("{}")
        kernels[words["--backend"]] = {"file": "up.cu"}
        return 0

    monkeypatch.setattr(compare_backends.train_lm, "main", train)
    monkeypatch.setattr(compare_backends, "launched", lambda: nullcontext(kernels))
    monkeypatch.setattr(compare_backends, "need_kernels", lambda: None)
    out = tmp_path / "curves.json"
    monkeypatch.setattr("sys.argv", ["", "--train", "--results", str(out), "--picture", str(tmp_path / "curves.png")])
    with nullcontext() if ends else pytest.raises(SystemExit):
        assert compare_backends.main() == 0
    record = json.loads(out.read_text()) if out.exists() else None
    assert (record is not None) == ends
    if record:
        assert record["of"]["kernels"] == [*record["kernels"]] == ["hopper", "torch"]
        assert record["largest_difference"] == 0
