"""The compile cache: files by name in one folder, which processes share.

    $BLAZEPROTO_CACHE, or blazeproto in the user's cache folder (~/.cache/blazeproto)

A name is a hash of all that decides a file's bytes, so a file never goes out of date. A cache that cannot be read or written
costs time and is no error.
"""

import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """Where the files are: asked for at each use, so that the variable may change within a process."""
    chosen = os.environ.get("BLAZEPROTO_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "blazeproto"


def read(name: str) -> bytes | None:
    """A file's bytes; None where there is none, or none that can be read."""
    try:
        return (folder() / name).read_bytes()
    except OSError:
        return None


def write(name: str, data: bytes) -> None:
    """Keep ``data`` as ``name``. Written beside, then renamed: another process reads the whole file or none."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=folder(), suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, folder() / name)
    except OSError:
        pass
