"""The files that scripts/train_lm.py leaves on disk: runs/NAME/ with a checkpoint, metrics and a picture.

Each run has a folder of its own. Making the folder is what takes its name, so two processes cannot take the same one. While a
run is used, its process holds a lock on a file there; the kernel ends the lock with the process, however that ends.
"""

from __future__ import annotations

import fcntl  # Linux and macOS: a lock that no killed process leaves behind
import itertools
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

CHECKPOINT, METRICS, CONFIG = "checkpoint.pt", "metrics.jsonl", "config.json"
SUMMARY, PICTURE, LOCK = "summary.json", "loss.png", "train_lm.lock"
CHECKSUM, CHECKSUMS = "checksum", "checksums"  # in config.json; in checkpoint.pt, by file
FOLDER, PART = 0x10, 1 << 24  # of a record's attributes in a zip file; bytes of a file that are read at once
UNREADABLE = (  # a damaged file raises
    OSError, RuntimeError, ValueError, LookupError, AttributeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile,
    zlib.error, struct.error,
)  # fmt: skip
FIELDS = {
    "step": int, "model": dict, "best": dict, "optimizer": dict, "random": dict, "seconds": float, "saved_bytes": int,
    "config": dict, "data": str,
}  # fmt: skip


class CheckpointError(Exception):
    """A checkpoint cannot be read, or belongs to something else, or its run is in use."""


class SaveError(Exception):
    """A file of a run cannot be written. The file is as it was before, and nothing is half-written."""


# ---- folders -----------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """ValueError unless ``name`` can name a folder, and can be typed."""
    if name in ("", ".", "..") or name.startswith("-") or "/" in name or not name.isprintable():
        raise ValueError(f"name: expected a folder's name, printable, without / and with no - in front, got {name!r}")


@contextmanager
def new_run(runs: Path, name: str | None, preset: str) -> Iterator[Path]:
    """A new folder in ``runs``, locked: ``name``, or the first of preset, preset-2, preset-3, … that is free.

    It is removed if the run raises before it has written a line of metrics or a checkpoint.

    Raises:
        ValueError: ``name`` exists already, or no folder can be made.
    """
    names = [name] if name else (preset if count == 1 else f"{preset}-{count}" for count in itertools.count(1))
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for folder in (runs / each for each in names):
            with suppress(FileExistsError):
                folder.mkdir()
                break
        else:
            raise ValueError(f"name: expected a new run, but {runs / str(name)} exists; --resume goes on with it")
    except OSError as error:
        raise ValueError(f"out: expected a folder that runs can be made in, got {runs} ({error})") from error
    try:
        with locked(folder):
            yield folder
    except BaseException:
        if not any(file.stat().st_size for file in (folder / METRICS, folder / CHECKPOINT) if file.exists()):
            shutil.rmtree(folder)
            with suppress(OSError):  # another run lies there
                runs.rmdir()
        raise


@contextmanager
def old_run(runs: Path, name: str | None, *, ended: bool = False) -> Iterator[Path]:
    """The folder of the run of this name, or else of the newest one, locked. ended: also one that has ended.

    Raises:
        CheckpointError: there is no such run, it has ended, or another process uses it.
    """
    by_age = sorted(runs.glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime)
    folders = [runs / name] if name else [path.parent for path in by_age]
    wanted = [each for each in folders if ended or not (each / SUMMARY).exists()]
    if not wanted:
        kind, hint = ("run", "") if ended else ("unfinished run", "; --steps MORE makes a finished one longer")
        at = runs / name if name else runs
        raise CheckpointError(f"checkpoint: {at} has no {kind} with a {CHECKPOINT}; --name chooses a run{hint}")
    folder = wanted[-1]
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"checkpoint: {folder / CONFIG} cannot be read, it does not exist")
    with locked(folder):
        for file in folder.glob("*.tmp"):  # of a process that was killed while it wrote
            file.unlink()
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone uses the run. CheckpointError where another one does."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"name: expected a run that nobody uses, but {folder} is in use") from None
        yield


# ---- files -------------------------------------------------------------------------------------------------------


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to. It takes that place when all is written, and goes if writing fails.

    SaveError, which names ``path``: the disk is full, or the like. Then the file is as it was before.
    """
    beside = path.with_suffix(".tmp")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, Exception):
            raise not_written(path, error) from error
        raise


def not_written(path: Path, error: BaseException) -> SaveError:
    """The error that says so in one line. A library may raise another class over the system's OSError, whose words are wanted."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = str(cause or error).splitlines() or [type(error).__name__]
    return SaveError(f"{path} cannot be written ({reason[0]}); free space there, or see to its permissions")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; whenever the program ends, one whole checkpoint exists. SaveError if no new one could be written."""
    # In a file that Python opened a full disk is an OSError, if under torch's RuntimeError.
    with written_whole(path) as beside, beside.open("wb") as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state, on the CPU.

    Raises:
        CheckpointError: there is none, it is damaged, or it is no checkpoint of the training script.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            folders = [each.filename for each in archive.infolist() if each.external_attr & FOLDER]
            # torch.load compares no checksum, and reads nothing of a folder.
            if damaged := next(filter(None, [archive.testzip(), *folders]), None):
                raise ValueError(f"the record {damaged} is not as it was written")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        start = f"the run ended before its first one; remove {path.parent} to start it again"
        raise CheckpointError(f"checkpoint: {path} does not exist: {start}") from None
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"checkpoint: {path} cannot be read, it seems damaged ({reason})") from error
    values = state if isinstance(state, dict) else {}
    if missing := sorted(name for name, kind in FIELDS.items() if not isinstance(values.get(name), kind)):
        raise CheckpointError(f"checkpoint: {path} is not one of this script, it lacks {', '.join(missing)}")
    return state


def checksum_of_file(path: Path) -> int:
    """CRC-32 of its bytes, as each record of checkpoint.pt has one."""
    with path.open("rb") as file:  # a shard may be larger than the host's free memory
        return reduce(lambda checksum, part: zlib.crc32(part, checksum), iter(partial(file.read, PART), b""), 0)


def checksum_of(value: Any) -> int:
    """CRC-32 of a value as JSON, by which it comes through a file unchanged."""
    return zlib.crc32(json.dumps(value).encode())


def write_config(path: Path, settings: dict[str, Any]) -> None:
    """config.json, with the checksum of its settings. SaveError if it cannot be written."""
    write_lines(path, [settings | {CHECKSUM: checksum_of(settings)}], indent=2)


def read_config(path: Path, *, checked: bool = False) -> dict[str, Any]:
    """The settings of config.json. checked: it must have a checksum, as earlier versions wrote none.

    Raises:
        CheckpointError: it cannot be read, or is not as it was written.
    """
    try:
        settings: dict[str, Any] = dict(json.loads(path.read_text()))
        checksum = settings.pop(CHECKSUM, None)
        if (checked or checksum is not None) and checksum != checksum_of(settings):
            raise ValueError("its checksum does not match, it seems damaged or edited")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read ({error})") from error
    return settings


def warn_of_no_checksums(path: Path) -> None:
    """On standard error."""
    told = f"{path} is of an earlier version, without checksums of the other files: damage to them is not noticed"
    print(f"warning: checkpoint: {told}", file=sys.stderr)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, or the like."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(path: Path, steps: int, checksum: int | None = None) -> list[dict[str, Any]]:
    """The lines of the steps before ``steps``. Later ones came after the checkpoint, and are made again.

    checksum: of these lines, which the checkpoint has; None in one of an earlier version.

    Raises:
        CheckpointError: the checksum is another. Without the file there are no lines.
    """
    metrics = []
    with suppress(OSError, ValueError, LookupError, TypeError):  # no file, a torn last line, or damage before it
        for text in path.read_text().splitlines():
            line = json.loads(text)
            metrics += [line] if line["step"] < steps else []
    if path.exists() and checksum not in (None, checksum_of(metrics)):
        raise CheckpointError(
            f"checkpoint: {path} seems damaged, the checksum of its first {steps} steps does not match; "
            "without this file the run goes on"
        )
    return metrics


def append_lines(path: Path, values: Sequence[Any]) -> None:
    """Each value as a line of JSON behind what is there. SaveError if that fails: then the last line may be torn."""
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)
    except OSError as error:
        raise not_written(path, error) from error


def write_lines(path: Path, values: Sequence[Any], indent: int | None = None) -> None:
    """Each value as JSON, whole or not at all. SaveError if that fails."""
    with written_whole(path) as beside:
        beside.write_text("".join(json.dumps(value, indent=indent) + "\n" for value in values))


def plot(path: Path, metrics: list[dict[str, Any]]) -> None:
    """Training and validation loss over steps. SaveError if the picture cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = {"loss": ("training", "#8fb3d9", "", 1.0), "val_loss": ("validation", "#c0392b", "o", 1.5)}
    for field, (label, color, marker, width) in styles.items():
        points = [(line["step"], line[field]) for line in metrics if field in line]
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=3, lw=width, label=label)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    with written_whole(path) as beside:
        figure.savefig(beside, dpi=150, format="png")
