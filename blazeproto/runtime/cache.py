"""The compile cache: files by name in one folder, which processes share.

    $BLAZEPROTO_CACHE, or blazeproto in the user's cache folder (~/.cache/blazeproto); a ~ is the home folder in both

A name is a hash of all that decides a file's bytes, so a file never goes out of date. A cache that cannot be read or written,
also for want of a home folder, costs time and is no error.
"""

import contextlib
import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """Where the files are: asked for at each use, so that the variable may change within a process.

    OSError where ``~`` is needed and this user has no home folder.
    """
    chosen = os.environ.get("BLAZEPROTO_CACHE")
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "blazeproto"
    try:
        return path.expanduser()
    except RuntimeError as error:  # neither HOME nor an entry in the user database
        raise FileNotFoundError(f"{path}: {error}") from error


def read(name: str, where: Path | None = None) -> bytes | None:
    """A file's bytes; None where there is none, or none that can be read. where: another folder than `folder`."""
    try:
        return ((where or folder()) / name).read_bytes()
    except OSError:
        return None


def write(name: str, data: bytes, where: Path | None = None) -> None:
    """Keep ``data`` as ``name``. Written beside, then renamed: another process reads the whole file or none."""
    beside = None
    try:
        where = where or folder()
        where.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=where, suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, where / name)
    except OSError:  # no such folder, no right to write, a full disk: which must not keep half a file
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)
