"""What measures nothing, or only a part, says so and leaves committed results, tables and pictures as they are."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from scripts.bench import common, running
from scripts.checks import gpu_check
from scripts.lm import compare_routers
from tests.scripts.conftest import main_of

NEED_A_GPU = {
    "scripts.bench.attention_tiles": [],
    "scripts.bench.clock": [],
    "scripts.bench.dispatch": [],
    "scripts.bench.distributed": [],
    "scripts.bench.integrations": [],
    "scripts.bench.layer": [],
    "scripts.bench.lora": [],
    "scripts.bench.models.__main__": ["layers"],
    "scripts.bench.module": [],
    "scripts.bench.paper.__main__": ["combine"],
    "scripts.bench.products": [],
    "scripts.bench.rounding": [],
    "scripts.bench.router": [],
    "scripts.checks.fuzz": [],
    "scripts.checks.gpu_check": ["--steps", "fuzz"],
    "scripts.checks.compare": ["--old", "."],
    "scripts.checks.sanitize_target": [],
    "scripts.timelines": [],
    "scripts.lm.compare_runs": ["accuracy", "--out", "{tmp}/training.json"],
    "scripts.lm.compare_backends": ["--train", "--results", "{tmp}/curves.json"],
}


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_there_is_one_line_and_no_file(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = importlib.import_module(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for each in (module, running):
        monkeypatch.setattr(each, "RESULTS", tmp_path / "h200", raising=False)
    monkeypatch.setattr("sys.argv", [name, *(word.format(tmp=tmp_path) for word in NEED_A_GPU[name])])
    with pytest.raises(SystemExit) as end:
        main_of(module)()
    assert end.value.code == 2
    expected = "error: needs a GPU of compute capability 9.0; there is none; nothing was run\n"
    assert "".join(capfd.readouterr()) == expected and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("scripts.bench.layer", ["--configs", "31"], "argument --configs: expected numbers from 1 to 30"),
        (
            "scripts.bench.integrations",
            ["--parts", "steps,gpt"],
            "argument --parts: expected some of steps, gpt_oss, got gpt",
        ),
        ("scripts.bench.products", ["--products", "up"], "argument --products: expected some of"),
        ("scripts.bench.rounding", ["--rounds", "0"], "argument --rounds: expected an int of at least 1, got '0'"),
        ("scripts.bench.paper.__main__", ["figure"], "argument NAME: invalid choice: 'figure' (choose from"),
        ("scripts.bench.paper.__main__", ["all", "--peers", "sonik"], "argument --peers: expected some of sonic"),
        ("scripts.bench.attention_tiles", ["--cpu", "--quick"], "--quick: expected none with --cpu, which is short"),
        ("scripts.bench.cpu", ["--tokens", "-1"], "argument --tokens: expected"),
        (
            "scripts.bench.tuning",
            ["--check", "--results", "{tmp}/none"],
            "argument --results: expected the tuner's results",
        ),
        ("scripts.bench.plot_results", ["--results", "{tmp}"], "--results: expected a folder of results"),
        (
            "scripts.checks.sanitize_target",
            ["--parts", "layer"],
            "argument --parts: expected some of layers, ampere, stored, blocks",
        ),
        ("scripts.checks.transformers_suite", ["{tmp}"], "folder: expected one with src/transformers, got"),
        ("scripts.lm.compare_runs", ["all", "--runs", "our"], "argument --runs: expected some of float64, torch_fp32"),
        ("scripts.lm.compare_backends", ["--results", "{tmp}/none"], "--results: expected the losses of two runs"),
        ("scripts.lm.compare_routers", ["--runs", "{tmp}"], "--runs: expected runs router-NAME that have ended"),
    ],
)
def test_odd_options_are_said_in_one_line(
    name: str,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sys.argv", [name, *(word.format(tmp=tmp_path) for word in words)])
    before = compare_routers.PAGE.read_bytes()
    with pytest.raises(SystemExit) as end:
        main_of(importlib.import_module(name))()
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1
    assert compare_routers.PAGE.read_bytes() == before


def test_checks_that_are_not_run_again_stay_and_one_that_failed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fuzz = {"outcome": "ok", "seconds": 1.0, "sources_sha256": "a"}
    kept_in = tmp_path / "h100" / "check.json"
    kept_in.parent.mkdir()
    kept_in.write_text(json.dumps({"steps": {"fuzz": fuzz, "tests": fuzz}}))
    bounds = "print('holds  one'); print('FAILS  two: 3')"
    codes = {"tests": "print('3 failed, 4 passed in 1.5s'); raise SystemExit(1)", "module": bounds}
    steps = {name: gpu_check.Step(f'python -c "{code}"', 1) for name, code in codes.items()}
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "h200")
    monkeypatch.setattr(gpu_check, "folder_of", lambda gpu: "h100")
    monkeypatch.setattr(gpu_check, "has_no_gpu", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("sys.argv", ["gpu_check", "--steps", "tests,module"])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 1
    kept = json.loads(kept_in.read_text())["steps"]
    assert kept["fuzz"] == fuzz
    assert kept["tests"]["outcome"] == "failed: exit code 1" and kept["tests"]["tests"] == "3 failed, 4 passed in 1.5s"
    assert kept["module"]["outcome"] == "ok" and kept["module"]["bounds_that_fail"] == ["two: 3"]
    assert {"measured", "gpu", "versions", "sources_sha256"} <= kept["tests"].keys()


def test_no_step_of_the_committed_checks_failed() -> None:
    steps = json.loads((common.RESULTS / "check.json").read_text())["steps"]
    assert {step["outcome"] for step in steps.values()} == {"ok"}
