"""The tutorial's notebooks run from top to bottom, and print what is stored in them."""

import json
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("numba.cuda", reason="needs numba-cuda")

from exercises import EXERCISES, has_hopper  # noqa: E402  once it is known that this file runs

from scripts.checks import notebooks  # noqa: E402

NOTEBOOKS = notebooks.notebooks()
# What a reader must see, by cell; of cells whose output is the same everywhere the stored one says it too.
MUST_PRINT = {
    "dispatch-route-code": "expert_pair_indices  [2, 4, 8, 3, 6, 0, 7, 1, 5, 9]",
    "product-twin-code": "H is right: True",
    "product-kernel-code": "HGMMA",
    "product-edit-code": "another kernel than before: True",
    "memory-train-code": "loss: ",
    "memory-saved-code": "the same gradients under each policy: True",
    "memory-swiglu-code": "as torch: True True",
    "epilogue-change-code": "tanh instructions left: 0",
    "reglu-check": "up_forward: WRONG",
    "machine-stage-code": "the stage is x[::2, :64]: True",
    "machine-registers-code": "columns",
    "machine-second-code": "H is right: True",
    "machine-bug-code": "race in byte",
    "machine-mend": "mended: True",
    **{f"exercise-{name.replace('_', '-')}": f"{name}: " for name in EXERCISES if "_" in name},
    "exercise-numba": "stable_rank: wrong",
}
for name in ("expert_histogram", "stable_rank"):  # both in one cell
    del MUST_PRINT[f"exercise-{name.replace('_', '-')}"]


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def test_there_are_five_short_ones() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["1-", "2-", "3-", "4-", "5-"]
    ids = [cell.id for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    assert len(set(ids)) == len(ids), "results are stored by the cells' ids"
    assert set(MUST_PRINT) <= set(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_tells_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 15
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count is None
            text = notebooks.printed(cell)
            places = ("/tmp", "/home", "/root", "/usr", str(Path.home()), str(notebooks.REPOSITORY))
            assert not [place for place in places if place in text], cell.id


def test_results_of_a_gpu_are_stored_for_all_its_cells() -> None:
    stored = notebooks.RESULTS / notebooks.STORED
    if not stored.exists():
        pytest.skip("results/h200/tutorial.json: python -m scripts.checks.notebooks, on an H200")
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    assert json.loads(stored.read_text())["cells"].keys() >= {cell.id for cell in cells if "gpu" in tags(cell)}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_prints_what_is_stored(path: Path) -> None:
    check(path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_cells_for_a_gpu_run(path: Path) -> None:
    check(path)


def check(path: Path) -> None:
    stored, fresh = nbformat.read(path, as_version=4), notebooks.run(path)
    for before, cell in zip(stored.cells, fresh.cells, strict=True):
        text = notebooks.printed(cell)
        assert MUST_PRINT.get(cell.id, "") in text, f"{cell.id} printed {text!r}"
        if "gpu" in tags(cell):
            shows_stored = text.startswith(("Stored result", "No result"))
            assert text and shows_stored != has_hopper(), f"{cell.id} printed {text!r}"
        elif "varies" not in tags(cell) and not has_hopper():
            assert text == notebooks.printed(before), (
                f"{cell.id}: python -m scripts.checks.notebooks stores what it prints"
            )


def test_a_cell_that_fails_fails_the_run(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.run(path)
