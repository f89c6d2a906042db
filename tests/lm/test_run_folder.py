"""A run's folder: nobody else's, locked, whole whenever the program ends, and no part of the text."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lm.model import load_data

Run = Callable[..., tuple[int, str]]
AtStep = Callable[[int, Callable[[], object]], None]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def without_sample_and_picture(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take most of the time of a short run."""
    monkeypatch.setattr(script.GPT, "generate", lambda *arguments, **options: b"\0")
    monkeypatch.setattr(script.run_folder, "plot", lambda *arguments: None)


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
    assert not (tmp_path / "a").exists()


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


def test_a_file_whose_name_or_content_is_not_utf8(text: Path, tmp_path: Path) -> None:
    """The name is no matter, the content is left out."""
    before = load_data(str(text), 32)[0]
    for file in text.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / os.fsdecode(b"odd\xff.txt")).write_bytes(b"odd but text")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe no text")
    content = b"".join(bytes(part.tolist()) for part in load_data(str(tmp_path), 32))
    assert b"odd but text" in content and b"no text" not in content
    assert len(load_data(str(tmp_path), 32)[0]) >= len(before)


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


def test_a_full_disk_leaves_the_checkpoint_before(
    tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def half(state: object, file: Any) -> None:
        where = file if hasattr(file, "write") else Path(file).open("wb")  # noqa: SIM115
        where.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    at_step(5, lambda: monkeypatch.setattr(torch, "save", half))
    code, printed = run(*tiny, "--checkpoint-every", 4, "--out", tmp_path)
    assert code == 1
    last = printed.splitlines()[-1]
    assert last.startswith("error: [Errno 28] No space left on device") and "cpu/checkpoint.pt" in last
    assert not [*tmp_path.rglob("*.tmp")]
    monkeypatch.setattr(torch, "save", save)
    assert torch.load(tmp_path / "cpu" / "checkpoint.pt", weights_only=True)["step"] == 4
    assert run("--resume", "--out", tmp_path, "--device", "cpu")[0] == 0


def test_a_loss_that_is_no_number_is_said(tiny: list[str], run: Run, tmp_path: Path) -> None:
    code, printed = run(*tiny, "--lr", 1e30, "--out", tmp_path)
    assert code == 1
    assert re.search(
        "^error: loss: expected a finite number, got nan at step .*; try a lower --lr$", printed, re.MULTILINE
    )
