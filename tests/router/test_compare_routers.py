"""The table of docs/routers.md, from runs written by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.lm import compare_routers
from scripts.lm.settings import PRESETS


def write_run(runs: Path, name: str, rows: list[dict[str, float]], ended: bool = True, **settings: Any) -> None:
    folder = runs / f"router-{name}"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        (folder / "summary.json").write_text("{}")
    config = dataclasses.replace(PRESETS["cpu"], router=name, **settings)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


def test_table_takes_the_last_validation_of_the_runs_that_ended(tmp_path: Path) -> None:
    rows = [{"step": 0, "val_loss": 5.5, "balance": 2.0}, {"step": 1}, {"step": 9, "val_loss": 2.0, "balance": 1.5}]
    write_run(tmp_path, "top_k", rows)
    write_run(tmp_path, "hash", [{"step": 9, "val_loss": 2.125, "balance": 1.25}])
    write_run(tmp_path, "capacity", [{"step": 4, "val_loss": 5.0, "balance": 1.0}], ended=False)
    lines = compare_routers.table(tmp_path, ["top_k", "capacity", "hash", "aux_free"]).splitlines()
    assert lines[2:] == ["| `top_k` | 2.000 | +0.000 | 1.50 | 10 |", "| `hash` | 2.125 | +0.125 | 1.25 | 10 |"]


def test_routers_without_a_run_keep_their_rows(tmp_path: Path) -> None:
    write_run(tmp_path, "hash", [{"step": 9, "val_loss": 2.125, "balance": 1.25}])
    kept = "| `top_k` | 2.000 | +0.000 | 1.50 | 10 |"
    earlier = f"| router | … |\n| --- | --- |\n{kept}\n| `hash` | 3.000 | +1.000 | 1.00 | 10 |\n"
    lines = compare_routers.table(tmp_path, ["top_k", "hash", "capacity"], earlier).splitlines()
    assert lines[2:] == [kept, "| `hash` | 2.125 | +0.125 | 1.25 | 10 |"]


@pytest.mark.parametrize(("settings", "kept"), [({}, False), ({"steps": 12}, True), ({"data": "notes"}, True)])
def test_runs_of_other_settings_stay_out_of_the_page(
    settings: dict[str, Any],
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row of 12 steps says nothing beside rows of 560."""
    page = tmp_path / "routers.md"
    page.write_text(before := compare_routers.PAGE.read_text())
    monkeypatch.setattr(compare_routers, "PAGE", page)
    write_run(tmp_path / "runs", "hash", [{"step": 11, "val_loss": 3.25, "balance": 1.25}], **settings)
    monkeypatch.setattr("sys.argv", ["compare_routers", "--runs", str(tmp_path / "runs")])
    assert compare_routers.main() == 0
    printed = capsys.readouterr().out
    assert "| `hash` | 3.250 |" in printed
    assert (page.read_text() == before) == ("routers.md stays as it is" in printed) == kept
    assert ("| `hash` | 3.250 |" in page.read_text()) != kept
