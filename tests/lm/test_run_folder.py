"""A run's folder: nobody else's, locked, whole whenever the program ends, and no part of the text."""

import json
import os
import re
import resource
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lm import run_folder
from scripts.lm.model import load_data
from tests.lm.conftest import AtStep, Run, interrupt

pytestmark = pytest.mark.usefixtures("without_sample_and_picture")


def test_two_runs_that_begin_together_have_a_folder_each(
    script: Any, tiny: list[str], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one begins while the first one reads its text."""
    read, codes = script.load_data, []

    def read_later(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(script, "load_data", read)
        codes.append(script.main([*tiny, "--steps", "2", "--out", str(tmp_path)]))
        return read(*arguments, **options)

    monkeypatch.setattr(script, "load_data", read_later)
    codes.append(run(*tiny, "--steps", 1, "--out", tmp_path)[0])
    assert codes == [0, 0]
    lines = {folder.name: len((folder / "metrics.jsonl").read_text().splitlines()) for folder in tmp_path.iterdir()}
    assert lines == {"cpu": 1, "cpu-2": 2}


def test_a_run_in_use_cannot_be_resumed(tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path, capfd: Any) -> None:
    printed = []
    at_step(3, lambda: printed.append(run("--resume", "--out", tmp_path, "--device", "cpu")))
    assert run(*tiny, "--steps", 5, "--checkpoint-every", 1, "--log-every", 1, "--out", tmp_path)[0] == 0
    assert printed[0][0] == 2
    assert re.search("^error: name: expected a run that nobody uses, but .*cpu is in use$", printed[0][1], re.MULTILINE)


def test_what_is_stopped_before_its_first_step_leaves_no_folder(
    script: Any, tiny: list[str], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "load_data", lambda *arguments, **options: interrupt())
    assert run(*tiny, "--out", tmp_path / "a" / "runs") == (130, "error: interrupted\n")
    assert not (tmp_path / "a" / "runs").exists()


@pytest.mark.parametrize("out", ["text/runs", "text"])
def test_a_run_inside_its_text_can_be_resumed(
    out: str, text: Path, tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path
) -> None:
    """And what it writes, or another run, changes nothing."""
    (tmp_path / "text").mkdir()
    for file in text.iterdir():
        (tmp_path / "text" / file.name).write_bytes(file.read_bytes())
    before = load_data(str(text), 32)
    options = ["--data", tmp_path / "text", "--out", tmp_path / out, "--steps", 6, "--log-every", 1]
    assert run(*tiny, *options, "--name", "other")[0] == 0
    at_step(3, interrupt)
    assert run(*tiny, *options, "--name", "cut")[0] == 0
    code, printed = run("--resume", "--out", tmp_path / out, "--name", "cut", "--device", "cpu")
    assert code == 0, printed
    after = load_data(str(tmp_path / "text"), 32, runs=tmp_path / out)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_folder_that_cannot_be_listed_is_not_an_empty_text(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(place: object) -> Any:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(
        ValueError, match=r"data: expected a file or a folder that can be read, got .*Permission denied"
    ):
        load_data(str(text), 32)


def test_the_command_to_go_on_can_be_pasted(
    text: Path, tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder too, with spaces, quotes and letters of any kind, of a run that is not the newest."""
    monkeypatch.chdir(text.parent)
    options = ["--data", text.name, "--out", os.path.relpath(tmp_path / "it's my runs"), "--steps", 5]
    at_step(2, interrupt)
    code, printed = run(*tiny, *options, "--name", "ü $HOME 'x'")
    assert code == 0
    at_step(2, interrupt)
    assert run(*tiny, *options)[0] == 0
    words = shlex.split(printed[printed.index("to go on: ") + len("to go on: ") :])
    assert words[1:3] == ["-m", "scripts.train_lm"]
    monkeypatch.chdir("/")
    code, printed = run(*words[3:])
    assert code == 0, printed
    runs = tmp_path / "it's my runs"
    assert (runs / "ü $HOME 'x'" / "summary.json").exists() and not (runs / "cpu" / "summary.json").exists()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A disk with room for so many bytes a file: libraries write to it as to a full one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("parallel", ["none", "fsdp"])
def test_a_full_disk_leaves_the_checkpoint_before(
    parallel: str, tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path
) -> None:
    """And no part of the new one, which would take the space; one line says how to go on."""
    with ExitStack() as full:
        at_step(5, lambda: full.enter_context(files_up_to(30_000)))
        code, printed = run(*tiny, "--parallel", parallel, "--checkpoint-every", 4, "--out", tmp_path)
    file = "checkpoint.pt" if parallel == "none" else "shards-8"
    line = (
        rf"error: .*cpu/{file} cannot be written \(.*File too large.*\); free space there, or see to its permissions; "
    )
    assert code == 1 and re.fullmatch(line + "to go on from the last checkpoint: (.*)", printed.splitlines()[-1]), (
        printed
    )
    assert "Traceback" not in printed
    kept = {path.name for path in (tmp_path / "cpu").iterdir() if path.suffix in (".tmp", ".pt") or path.is_dir()}
    assert kept == ({"checkpoint.pt"} if parallel == "none" else {"checkpoint.pt", "shards-4"})
    assert torch.load(tmp_path / "cpu" / "checkpoint.pt", weights_only=True)["step"] == 4
    assert run(*shlex.split(printed.splitlines()[-1].partition("scripts.train_lm ")[2]))[0] == 0


def test_a_full_disk_before_the_first_checkpoint(tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path) -> None:
    with ExitStack() as full:
        at_step(5, lambda: full.enter_context(files_up_to(30_000)))
        code, printed = run(*tiny, "--out", tmp_path)
    assert code == 1 and printed.endswith(f"it has no checkpoint yet: to start it again remove {tmp_path / 'cpu'}\n")


def test_what_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Picture, summary, settings; whatever a library raises. Of metrics the last line may be torn, which is read over."""
    lines = [{"step": step, "loss": 5.0 - step} for step in range(3)]
    monkeypatch.undo()  # the picture is drawn
    writers: dict[str, Callable[[Path], None]] = {
        "loss.png": lambda path: run_folder.plot(path, lines),
        "summary.json": lambda path: run_folder.write_lines(path, 1000 * lines),
        "config.json": lambda path: run_folder.write_config(path, {"data": 5000 * "a"}),
        "metrics.jsonl": lambda path: run_folder.append_lines(path, 1000 * lines),
    }
    for name, write in writers.items():
        path = tmp_path / name
        path.write_text(before := json.dumps(lines[0]) + "\n")
        with files_up_to(4096), pytest.raises(run_folder.SaveError, match=rf"^{path} cannot be written \(.*too large"):
            write(path)
        assert (path.read_text() == before) == (name != "metrics.jsonl") and not [*tmp_path.glob("*.tmp")]
    assert {line["step"] for line in run_folder.read_metrics(path, 2)} == {0, 1}
    with pytest.raises(run_folder.SaveError, match=r"checkpoint.pt cannot be written \(Can't (get|pickle) "):
        run_folder.save_checkpoint(tmp_path / "checkpoint.pt", {"model": lambda: None})


def test_a_loss_that_is_no_number_is_said(tiny: list[str], run: Run, tmp_path: Path) -> None:
    code, printed = run(*tiny, "--lr", 1e30, "--out", tmp_path)
    assert code == 1
    assert re.search(
        "^error: loss: expected a finite number, got nan at step .*; try a lower --lr$", printed, re.MULTILINE
    )
