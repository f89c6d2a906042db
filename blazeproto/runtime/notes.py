"""Notes about a user's GPU: JSON files in the cache folder, of a kind, a GPU's name and this package's version.

`python -m blazeproto doctor --check` writes a failure ("check"), `python -m blazeproto tune` the fastest tiles ("tiles").
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from blazeproto import __version__
from blazeproto.runtime.cache import folder


def note_path(kind: str, gpu: str) -> Path:
    """The file of a note. kind: "check" or "tiles".  gpu: the GPU's name. OSError as for `folder`."""
    return folder() / f"{kind}-{''.join(c if c.isalnum() else '-' for c in gpu)}-{__version__}.json"


def noted(kind: str, gpu: str) -> dict[str, Any]:
    """A note's fields; {} without a file that has some."""
    try:
        return dict(json.loads(note_path(kind, gpu).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def note(kind: str, gpu: str, **fields: Any) -> Path:
    """Write a note, over the one before. Returns its file. OSError if it cannot be written."""
    path = note_path(kind, gpu)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(fields, indent=2))
    os.replace(beside, path)
    return path
