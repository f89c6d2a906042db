"""scripts/train_lm.py: a run ends, is interrupted, goes on to the bit, and says what is wrong."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., tuple[int, str]]
Metrics = Callable[[Path], list[dict[str, Any]]]
Start = Callable[..., subprocess.Popen[str]]
AtStep = Callable[[int, Callable[[], object]], None]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].split("/")[0]) >= step:
            return
    raise AssertionError(process.communicate())


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (a, b))
    return all(
        torch.equal(ours["model"][name], theirs["model"][name])
        and torch.equal(ours["best"]["model"][name], theirs["best"]["model"][name])
        for name in theirs["model"]
    )


def test_a_run_leaves_its_folder(finished: Path, metrics: Metrics) -> None:
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(20))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 9, 14, 19]
    assert lines[0]["loss"] == pytest.approx(5.545, abs=1e-3)  # ln 256: it begins by knowing nothing
    assert lines[-1]["val_loss"] < 5
    assert all(line["balance"] >= 1 for line in lines)
    assert json.loads((finished / "config.json").read_text())["d_model"] == 32
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["saved_activation_bytes"] > 0
    assert len(summary["sample"]) > 100
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_saves_and_resume_goes_on_to_the_bit(
    finished: Path, tiny: list[str], start: Start, metrics: Metrics, tmp_path: Path
) -> None:
    """Losses, balances, learning rates and weights are the uninterrupted run's."""
    process = start(*tiny, "--out", tmp_path, "--name", "cut")
    wait_for_step(process, 8)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "stopped after step" in printed
    assert 8 <= len(metrics(tmp_path / "cut")) < 20
    assert not (tmp_path / "cut" / "summary.json").exists()
    process = start("--resume", "--out", tmp_path, "--device", "cpu")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert metrics(tmp_path / "cut") == metrics(finished)
    assert same_weights(tmp_path / "cut", finished)


@pytest.mark.parametrize(
    "options",
    [
        "--router aux_free",
        "--router expert_choice",
        "--router hash",
        pytest.param("--device cuda --bf16 --backend hopper", marks=pytest.mark.gpu),
        pytest.param("--device cuda --bf16 --backend torch", marks=pytest.mark.gpu),
    ],
)
def test_resume_from_the_middle(
    options: str, tiny: list[str], run: Run, metrics: Metrics, tmp_path: Path, at_step: AtStep
) -> None:
    """Ten steps and ten steps are twenty, where a router has a state of its own too."""
    assert run(*tiny, *options.split(), "--out", tmp_path, "--name", "whole")[0] == 0
    at_step(9, interrupt)
    code, printed = run(*tiny, *options.split(), "--out", tmp_path, "--name", "cut")
    assert code == 0
    assert "stopped after step 10 of 20" in printed
    torch.manual_seed(123)  # whatever state the process is in
    device = ["--device", "cuda"] if "cuda" in options else ["--device", "cpu"]
    assert run("--resume", "--out", tmp_path, *device)[0] == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.gpu
def test_backends_learn_alike(tiny: list[str], run: Run, metrics: Metrics, tmp_path: Path) -> None:
    """From one seed, on the GPU."""
    for backend in ("hopper", "torch"):
        options = ["--device", "cuda", "--bf16", "--backend", backend, "--out", tmp_path, "--name", backend]
        code, printed = run(*tiny, *options)
        assert code == 0, printed
    hopper, torch_ = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("hopper", "torch"))
    assert hopper == pytest.approx(torch_, rel=0.02)


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    finished: Path, tiny: list[str], start: Start, run: Run, metrics: Metrics, tmp_path: Path
) -> None:
    """Metrics that came after the checkpoint, the last line torn, are made again."""
    process = start(*tiny, "--out", tmp_path, "--checkpoint-every", 4)
    wait_for_step(process, 8)
    process.kill()
    process.wait(timeout=60)
    with (tmp_path / "cpu" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 15, "loss": 1.0}\n{"step": 16, "lo')
    code, printed = run("--resume", "--out", tmp_path, "--device", "cpu")
    assert code == 0, printed
    assert metrics(tmp_path / "cpu") == metrics(finished)


def test_a_finished_run_is_left_alone(finished: Path, tiny: list[str], run: Run) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    code, printed = run("--resume", "--out", finished.parent)
    assert code == 2
    assert "no unfinished run" in printed
    code, printed = run(*tiny, "--out", finished.parent, "--name", finished.name)
    assert code == 2
    assert "name: expected a new run" in printed
    assert (finished / "metrics.jsonl").read_bytes() == before
    code, _ = run(*tiny, "--steps", 1, "--out", finished.parent)
    assert code == 0
    assert (finished.parent / "cpu-2" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "{tmp}/nowhere"], "data: expected a file or a folder that can be read, got .*nowhere"),
        (["--data", "{tmp}/empty"], "data: expected text of over .* bytes, got 0"),
        (["--data", "{tmp}/empty/nothing.txt"], "data: expected text of over .* bytes, got 1"),
        (["--data", "{tmp}/binary"], "data: expected text of over .* bytes, got 0"),
        (["--backend", "hopper"], 'backend: expected one that can run here, got "hopper"'),
        (["--top-k", "9"], "top_k: expected at most num_experts=4, got 9"),
        (["--heads", "3"], r"d_model: expected a multiple of 2 \* heads = 6, got 32"),
        (["--steps", "0"], "steps: expected at least 1, got 0"),
        (["--clip", "0"], "clip: expected a number above 0, got 0.0"),
        (["--seed", str(2**64)], r"seed: expected an int in \[0, 4294967296\), got"),
        (["--router", "aux-free"], "router: expected one of .*, got 'aux-free'; did you mean 'aux_free'?"),
        (["--device", "foo"], "device: expected one of cpu.* on this machine, got 'foo'"),
        (["--device", "cuda:99"], "device: expected one of cpu.* on this machine, got 'cuda:99'"),
        (["--name", "a/b"], "name: expected a folder's name, .*, got 'a/b'"),
        (["--out", "{tmp}/empty/nothing.txt"], "out: expected a folder that runs can be made in, got .*nothing.txt"),
        (["--data", "/dev/null"], "data: expected a file or a folder that can be read, got /dev/null"),
        (["--data", ""], "data: expected a file or a folder, got ''"),
        (["--resume"], "checkpoint: .* has no unfinished run"),
        (["--resume", "--preset", "hopper"], "preset: expected none with --resume, .*, got 'hopper'"),
        (["--resume", "--name", "missing"], "checkpoint: .*missing.* cannot be read"),
    ],
)
def test_bad_options_are_said(options: list[str], message: str, tiny: list[str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(bytes(range(256)) * 100)
    filled = [option.format(tmp=tmp_path) for option in options]
    base = [] if "--resume" in options else tiny
    code, printed = run(*base, "--out", tmp_path / "runs", *filled)
    assert code == 2
    assert re.fullmatch(f"error: {message}.*\n", printed), printed
    assert not (tmp_path / "runs").exists()


def cut_short(finished: Path) -> Path:
    """Make a finished run look like an interrupted one."""
    (finished / "summary.json").unlink()
    return finished / "checkpoint.pt"


def refused(run: Run, finished: Path, message: str, *options: object) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    code, printed = run("--resume", "--out", finished.parent, *options)
    assert code == 2
    assert re.search(f"^error: {message}", printed), printed
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", ["half", b"", b"no checkpoint", "pickle"])
def test_a_damaged_checkpoint_is_said(content: bytes | str, finished: Path, run: Run) -> None:
    path = cut_short(finished)
    if content == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif content == "pickle":
        torch.save(print, path)  # code, which is not loaded
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
    refused(run, finished, "checkpoint: .*checkpoint.pt cannot be read, it seems damaged")


def test_a_checkpoint_of_something_else_is_said(finished: Path, run: Run, text: Path) -> None:
    path = cut_short(finished)
    state = torch.load(path, weights_only=True)

    torch.save({"weights": torch.zeros(3)}, path)
    refused(run, finished, "checkpoint: .* is not one of this script, it lacks .*optimizer")
    torch.save([1, 2], path)
    refused(run, finished, "checkpoint: .* is not one of this script")

    torch.save(state | {"data": "another"}, path)
    refused(run, finished, "checkpoint: .* was trained on another text")

    torch.save(state | {"config": state["config"] | {"layers": 3}}, path)
    refused(run, finished, "checkpoint: .* and config.json differ in layers")

    torch.save(state | {"model": {name: value[:1] for name, value in state["model"].items()}}, path)
    refused(run, finished, "checkpoint: .* holds another model")

    torch.save(state, path)
    refused(run, finished, "d_model: expected 32 as .* began, got 64", "--d-model", 64)


def test_display_on_a_terminal(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar shows the latest numbers and goes; each validation leaves a line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    display = script.Display(10)
    assert display.console.is_terminal
    line = {"step": 4, "loss": 2.5, "aux_loss": 0.0, "balance": 1.25, "tokens_per_s": 12345.0}
    with display.progress:
        display.update(line, 0)
        display.update(line | {"step": 5, "val_loss": 2.25}, 0)
    printed = capsys.readouterr().out
    assert "validation loss 2.2500 nats/byte" in printed
    assert "12.3k tokens/s" in printed
