"""The compile cache: files by name in one folder, which processes share.

    $BLAZEPROTO_CACHE, or blazeproto in the user's cache folder (~/.cache/blazeproto); a ~ is the home folder in both

A name is a hash of all that decides a file's bytes, so a file never goes out of date. Files are compressed, and the checksum of
that tells a damaged one. A cache that cannot be read or written, also for want of a home folder, costs time and is no error.

The files are run as machine code. So nothing is read from a folder or a file that belongs to another user, or that group or
others may write: a RuntimeWarning says so once, and kernels are compiled instead.
"""

import contextlib
import os
import stat
import tempfile
import warnings
import zlib
from pathlib import Path

_REFUSED: set[Path] = set()  # folders that a warning was given for


def folder() -> Path:
    """The folder of the files. It is read at each use, so that the variable may change within a process.

    OSError if ``~`` is needed and this user has no home folder.
    """
    chosen = os.environ.get("BLAZEPROTO_CACHE")
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "blazeproto"
    try:
        return path.expanduser()
    except RuntimeError as error:  # neither HOME nor an entry in the user database
        raise FileNotFoundError(f"{path}: {error}") from error


def read(name: str, where: Path | None = None) -> bytes | None:
    """A file's bytes; None if it is missing, damaged, unreadable or not to be trusted.
    where: another folder than `folder`."""
    try:
        where = where or folder()
        if not _trusted(where, where.stat(), where):
            return None
        with (where / name).open("rb") as file:
            return zlib.decompress(file.read()) if _trusted(where / name, os.fstat(file.fileno()), where) else None
    except (OSError, zlib.error):
        return None


def write(name: str, data: bytes, where: Path | None = None) -> None:
    """Keep ``data`` as ``name``. Written beside, then renamed: another process reads the whole file or none."""
    beside = None
    try:
        where = where or folder()
        where.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _trusted(where, where.stat(), where):
            return
        handle, beside = tempfile.mkstemp(dir=where, suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.compress(data))
        os.replace(beside, where / name)
    except OSError:  # no such folder, no right to write, a full disk: which must not keep half a file
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)


def _trusted(path: Path, found: os.stat_result, where: Path) -> bool:
    """Whether this user alone may change ``path``, the folder ``where`` or a file in it; where not, a warning, one a folder.
    Without POSIX's owners and modes it is trusted."""
    if os.name != "posix":
        return True
    own = found.st_uid == os.geteuid()
    if own and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    if where not in _REFUSED:
        _REFUSED.add(where)
        mend = f"chmod go-w {path}" if own else "set BLAZEPROTO_CACHE to a folder of your own"
        got = f"one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        warnings.warn(
            f"{path}: expected a folder or file that user {os.geteuid()} alone may write, got {got}. Compiled kernels are not "
            f"read from it, but compiled again: {mend}",
            RuntimeWarning,
            stacklevel=2,
        )
    return False
