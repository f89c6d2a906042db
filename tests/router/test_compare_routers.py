"""The table of docs/routers.md, from runs written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.lm import compare_routers


def write_run(runs: Path, name: str, rows: list[dict[str, float]], ended: bool = True) -> None:
    folder = runs / f"router-{name}"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        (folder / "summary.json").write_text("{}")


def test_table_takes_the_last_validation_of_the_runs_that_ended(tmp_path: Path) -> None:
    rows = [{"step": 0, "val_loss": 5.5, "balance": 2.0}, {"step": 1}, {"step": 9, "val_loss": 2.0, "balance": 1.5}]
    write_run(tmp_path, "top_k", rows)
    write_run(tmp_path, "hash", [{"step": 9, "val_loss": 2.125, "balance": 1.25}])
    write_run(tmp_path, "capacity", [{"step": 4, "val_loss": 5.0, "balance": 1.0}], ended=False)
    lines = compare_routers.table(tmp_path, ["top_k", "capacity", "hash", "aux_free"]).splitlines()
    assert lines[2:] == ["| `top_k` | 2.000 | +0.000 | 1.50 | 10 |", "| `hash` | 2.125 | +0.125 | 1.25 | 10 |"]


def test_the_page_has_a_place_for_the_table() -> None:
    page = compare_routers.PAGE.read_text()
    assert page.count(compare_routers.BEGIN) == 1 and page.count(compare_routers.END) == 1


def test_routers_without_a_run_keep_their_rows(tmp_path: Path) -> None:
    write_run(tmp_path, "hash", [{"step": 9, "val_loss": 2.125, "balance": 1.25}])
    kept = "| `top_k` | 2.000 | +0.000 | 1.50 | 10 |"
    earlier = f"| router | … |\n| --- | --- |\n{kept}\n| `hash` | 3.000 | +1.000 | 1.00 | 10 |\n"
    lines = compare_routers.table(tmp_path, ["top_k", "hash", "capacity"], earlier).splitlines()
    assert lines[2:] == [kept, "| `hash` | 2.125 | +0.125 | 1.25 | 10 |"]
