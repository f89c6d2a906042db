"""What a notebook shows where there is no Hopper GPU: a result that was stored on one, with its date."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"
TUTORIAL = RESULTS / "tutorial.json"


def provenance(record: dict) -> str:
    """Which GPU, when, and with which sources of the package."""
    where = f"{record['gpu']}; {record['measured']}; sources {record['sources_sha256'][:12]}"
    return f"{where}. Whether the kernels have changed since, docs/results.md says"


def show_stored(name: str) -> None:
    """Print what the cell of this id printed on the GPU, after a line that says which and when."""
    cells = json.loads(TUTORIAL.read_text())["cells"] if TUTORIAL.exists() else {}
    if name in cells:
        print(f"Stored result. {provenance(cells[name])}.\n\n{cells[name]['text']}")
    else:
        print(f"No result of {name!r} is stored yet: python -m scripts.checks.notebooks stores it, on a Hopper GPU.")
