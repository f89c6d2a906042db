"""The ladder's notebooks are short, have all that a rung has, and print what is stored in them."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from scripts.checks import notebooks  # noqa: E402  once it is known that this file runs

NOTEBOOKS = notebooks.notebooks(notebooks.LADDER)
PARTS = ("The idea", ".check(", "predicted", ".time()", ".floor()", "faulty(", "fill(")


def cells_of(path: Path) -> list[Any]:
    return nbformat.read(path, as_version=4).cells


def test_each_kernel_has_a_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in sorted(notebooks.LADDER.glob("*.cu"))]
    ids = [cell.id for path in NOTEBOOKS for cell in cells_of(path)]
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_parts_of_a_rung(path: Path) -> None:
    cells = cells_of(path)
    assert len(cells) <= 25
    text = "\n".join(cell.source for cell in cells)
    assert not [part for part in PARTS if part not in text] and f"({path.stem}.cu)" in text
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("<svg" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_tells_of_no_machine(path: Path) -> None:
    for cell in cells_of(path):
        if cell.cell_type == "code":
            assert cell.execution_count is None
            places = ("/tmp", "/home", "/root", "/usr", str(Path.home()), str(notebooks.REPOSITORY))
            assert not [place for place in places if place in notebooks.printed(cell)], cell.id


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_stored(path: Path) -> None:
    for before, cell in zip(cells_of(path), notebooks.run(path).cells, strict=True):
        text = notebooks.printed(cell)
        assert "fault" not in cell.id or "WRONG" in text or "answer" in cell.id or cell.cell_type == "markdown"
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", []):
            assert text == notebooks.printed(before), f"{cell.id}: python -m scripts.checks.notebooks stores it"
