"""Run the notebooks of tutorial and ladder from top to bottom, each in a process of its own, and store what they print.

    python -m scripts.checks.notebooks

Without a Hopper GPU the outputs are written into the notebooks. On one the notebooks stay as they are, and what their cells
for a GPU print (tag "gpu") goes to results/h200/tutorial.json, by the cells' ids, dated; a notebook shows it without
a GPU. A cell that fails ends the run, and nothing of its notebook is written. Needs nbclient, nbformat and ipykernel.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.common import REPOSITORY, RESULTS, provenance, write_json
from scripts.command import argument_parser, has_hopper

TUTORIAL, LADDER = (REPOSITORY / "docs" / name for name in ("tutorial", "ladder"))
STORED = "tutorial.json"
SECONDS = 120  # a cell may take


def notebooks(folder: Path = TUTORIAL) -> list[Path]:
    """Those of a folder, in order."""
    return sorted(folder.glob("*.ipynb"))


def run(path: Path) -> Any:
    """The notebook with the outputs of a fresh run, by this interpreter; `nbclient.exceptions.CellExecutionError` if a cell
    fails."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place: dict[str, Any] = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        # Without folders of installed kernels, the kernel is ipykernel's own: this interpreter.
        manager = AsyncKernelManager(**place, kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "IPYTHONDIR": folder}
        environment.pop("NUMBA_ENABLE_CUDASIM", None)  # a notebook that needs it sets it
        options: dict[str, Any] = {"timeout": SECONDS, "coalesce_streams": True, "record_timing": False}
        options |= {"resources": {"metadata": {"path": str(path.parent)}}}
        NotebookClient(notebook, km=manager, **options).execute(env=environment)
    for part in [*notebook.cells, *(output for cell in notebook.cells for output in cell.get("outputs", []))]:
        if "execution_count" in part:  # which differs from run to run
            part.execution_count = None
    return notebook


def printed(cell: Any) -> str:
    """The text of a cell's outputs."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
    return "\n".join(text.rstrip() for text in texts)


def printed_on_the_gpu(notebook: Any) -> dict[str, Any]:
    """The output of each cell for a GPU, by the cell's id, and where, when and with which sources it was made."""
    return {
        cell.id: {"text": printed(cell), **provenance()}
        for cell in notebook.cells
        if "gpu" in cell.metadata.get("tags", [])
    }


def main() -> None:
    argument_parser("scripts.checks.notebooks", __doc__).parse_args()
    import nbformat

    stored = RESULTS / STORED
    cells: dict[str, Any] = json.loads(stored.read_text())["cells"] if stored.exists() else {}
    for path in [*notebooks(), *notebooks(LADDER)]:
        notebook = run(path)
        print(f"ran {path.name}")
        if has_hopper():
            cells |= printed_on_the_gpu(notebook)
            write_json(stored, {"cells": cells})
        else:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
