"""A tiny text and tiny runs of scripts/train_lm.py."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.threads import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
TINY = """--device cpu --steps 20 --layers 2 --d-model 32 --heads 2 --context 32 --d-expert 16 --num-experts 4
    --batch 4 --dropout 0.1 --val-every 5 --val-bytes 512 --log-every 4 --warmup 4"""

Run = Callable[..., tuple[int, str]]
Metrics = Callable[[Path], list[dict[str, Any]]]
AtStep = Callable[[int, Callable[[], object]], None]


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """scripts/train_lm.py as a module."""
    return importlib.import_module("scripts.train_lm")


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Put back what the script sets for the whole process. Ctrl-C is heard, which a shell's background job ignores."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def run(script: ModuleType, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the script in this process: options -> exit code, what it printed."""

    def call(*options: object) -> tuple[int, str]:
        code = script.main([str(option) for option in options])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    with keeping_handlers():
        yield call


@pytest.fixture
def at_step(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Call something before the update of one step, once."""

    def call(step: int, happens: Callable[[], object]) -> None:
        train_step = script.Trainer.train_step

        def with_event(trainer: Any) -> Any:
            if trainer.step == step:
                monkeypatch.setattr(script.Trainer, "train_step", train_step)
                happens()
            return train_step(trainer)

        monkeypatch.setattr(script.Trainer, "train_step", with_event)

    return call


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def without_sample_and_picture(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is made: they take most of the time of a short run."""
    monkeypatch.setattr(script.GPT, "generate", lambda *arguments, **options: b"\0")
    monkeypatch.setattr(script.run_folder, "plot", lambda *arguments: None)


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Run the script as a process of its own."""

    def call(*options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.train_lm", *map(str, options)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return call


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].split("/")[0]) >= step:
            return
    raise AssertionError(process.communicate())


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(f"{j} times {i} is {i * j}.\n" for j in range(40)))
    return folder


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, without the speeds, which no two runs share."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


@pytest.fixture
def metrics() -> Metrics:
    return read_metrics


@pytest.fixture
def tiny(text: Path) -> list[str]:
    """Options of a run of 20 steps that takes a second."""
    return [*TINY.split(), "--data", str(text)]


@pytest.fixture(scope="session")
def trained(script: ModuleType, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with keeping_handlers():
        assert script.main([*TINY.split(), "--data", str(text), "--out", str(out)]) == 0
    torch.set_num_threads(threads)
    return out / "cpu"


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """The folder of a run that nothing interrupted; a copy for each test."""
    shutil.copytree(trained, tmp_path / "whole" / "cpu")
    return tmp_path / "whole" / "cpu"
