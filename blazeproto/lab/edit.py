"""A copy of the CUDA sources that somebody changes: what it holds now, what is changed, and what the compiler says of it."""

import atexit
import difflib
import hashlib
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Self

from blazeproto.gemm.compile import CUDA_SOURCES, CompileError, Kernel, compile_many

_ERROR = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<said>(?:catastrophic )?error.*)$", re.MULTILINE)


@cache
def _snapshots(process: int) -> Path:
    """A process's folder of sources as they were when they were compiled, and of what was made of them."""
    folder = Path(tempfile.mkdtemp(prefix="blazeproto-lab-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    """At the end of ``process``, not of a child that it has forked."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _files_in(folder: Path) -> dict[str, bytes]:
    """Every file by its path in the folder, but for hidden ones and an editor's backups."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if not name.endswith("~") and not any(part.startswith(".") for part in name.split("/"))
    }


def _write(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _resolved(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder: expected a path, got {type(folder).__name__}")
    return Path(folder).expanduser().resolve()


class EditedSources:
    """CUDA sources in a folder of one's own. TypeError for what is no path, ValueError for one that is no folder with a .cu."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = _resolved(folder)
        if not any(self.folder.glob("*.cu")):
            raise ValueError(f"folder: expected a folder with CUDA sources, as edit() makes it, got {self.folder}")

    @classmethod
    def copied(cls, folder: str | Path) -> Self:
        """Those of ``blazeproto/gemm/cuda``, copied. folder: absent, or empty; ValueError for one that holds something."""
        path = _resolved(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            held = "a file" if not path.is_dir() else f"one with {len(list(path.iterdir()))} entries"
            raise ValueError(
                f"folder: expected one that is absent or empty, got {held}, {path}; reopen() goes on with an edited folder"
            )
        _write(_files_in(CUDA_SOURCES), path)
        return cls(path)

    def snapshot(self) -> Path:
        """A folder with the files as they are now, which nothing changes: the same one for the same contents."""
        files = _files_in(self.folder)
        digest = hashlib.sha256()
        for name, data in files.items():
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        snapshots = _snapshots(os.getpid())
        made = snapshots / digest.hexdigest()[:16]
        if not made.exists():
            beside = Path(tempfile.mkdtemp(dir=snapshots))
            _write(files, beside)
            try:
                os.rename(beside, made)
            except OSError:  # another thread was first
                shutil.rmtree(beside, ignore_errors=True)
        return made

    def diff(self) -> str:
        """The changes, as a unified diff against the package's sources; empty without changes."""
        before, after = _files_in(CUDA_SOURCES), _files_in(self.folder)
        lines: list[str] = []
        for name in sorted(before.keys() | after.keys()):
            old, new = (
                files.get(name, b"").decode(errors="replace").splitlines(keepends=True) for files in (before, after)
            )
            a, b = (f"{side}/{name}" if name in files else "/dev/null" for side, files in (("a", before), ("b", after)))
            lines += (
                line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                for line in difflib.unified_diff(old, new, a, b)
            )
        return "".join(lines)

    def compile(self, kernels: list[Kernel]) -> None:
        """All of them at a time, in processes of their own: a malformed wgmma can crash the compiler.

        CompileError where the compiler refuses one: each error's file, line and the line itself, then all that it said.
        FileNotFoundError for a .cu that is no longer there.
        """
        sources = next(kernel.sources for kernel in kernels if kernel.sources)
        for kernel in kernels:
            if not kernel.path.is_file():
                raise FileNotFoundError(
                    f"{self.folder / kernel.file}: expected the source of kernel {kernel.entry}, got no file; "
                    f"copy it again from {CUDA_SOURCES}"
                )
        try:
            compile_many(kernels)
        except CompileError as error:
            raise CompileError(readable(str(error), sources, self.folder)) from None


def line_of(path: Path, number: int) -> str:
    """A line of a file, from 1, without its indentation; empty if the file has no such line."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def refuse_changed(kernel: Kernel) -> None:
    """ValueError for a kernel whose files have changed since it was compiled: its code is not theirs."""
    if kernel.is_changed:
        raise ValueError(
            f"kernel: expected one of {kernel.path.name} and its headers as they are now, got one of earlier ones, "
            f"{kernel!r}; Workbench(...).kernel compiles them again"
        )


def readable(log: str, sources: Path, folder: Path) -> str:
    """A compiler's log of files in ``sources``, told of the same files in ``folder``; before it each error with its line."""
    found = []
    for error in _ERROR.finditer(log):
        number = int(error["line"])
        line = line_of(Path(error["file"]), number)
        found.append(f"{error['file']}:{number}: {error['said']}\n    {number} | {line}")
    return "\n".join([*dict.fromkeys(found), *([""] if found else []), log]).replace(str(sources), str(folder))
