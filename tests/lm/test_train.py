"""scripts/train_lm.py: a run ends, is interrupted, goes on to the bit, and says what is wrong."""

import json
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blazeproto.runtime.arch import ARCHES
from tests.lm.conftest import TINY, AtStep, Metrics, Run, interrupt, keeping_handlers, wait_for_step

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def short_samples(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take most of the time of a short run."""
    monkeypatch.setattr(script, "SAMPLE_BYTES", 40)


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
    assert lines[-1]["val_loss"] < 5 and all(line["balance"] >= 1 for line in lines)
    assert json.loads((finished / "config.json").read_text())["d_model"] == 32
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["saved_activation_bytes"] > 0 and len(summary["sample"]) > 100
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
    assert "stopped after step" in printed and 8 <= len(metrics(tmp_path / "cut")) < 20
    assert not (tmp_path / "cut" / "summary.json").exists()
    process = start("--resume", "--out", tmp_path, "--device", "cpu")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert metrics(tmp_path / "cut") == metrics(finished) and same_weights(tmp_path / "cut", finished)


@pytest.mark.parametrize(
    "options",
    [
        "--router aux_free",
        "--router expert_choice",
        "--router hash",
        *(pytest.param(f"--device cuda --bf16 --backend {b}", marks=pytest.mark.gpu) for b in (*ARCHES, "torch")),
    ],
)
def test_resume_from_the_middle(
    options: str, tiny: list[str], run: Run, metrics: Metrics, tmp_path: Path, at_step: AtStep
) -> None:
    """Ten steps and ten steps are twenty, where a router has a state of its own too."""
    assert run(*tiny, *options.split(), "--out", tmp_path, "--name", "whole")[0] == 0
    at_step(9, interrupt)
    code, printed = run(*tiny, *options.split(), "--out", tmp_path, "--name", "cut")
    assert code == 0 and "stopped after step 10 of 20" in printed
    torch.manual_seed(123)  # whatever state the process is in
    device = ["--device", "cuda"] if "cuda" in options else ["--device", "cpu"]
    assert run("--resume", "--out", tmp_path, *device)[0] == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


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
    refused(run, finished, "checkpoint: .* has no unfinished run")
    refused(run, finished, "checkpoint: .* has no unfinished run", "--name", finished.name)
    code, printed = run(*tiny, "--out", finished.parent, "--name", finished.name)
    assert code == 2 and "name: expected a new run" in printed
    assert run(*tiny, "--steps", 1, "--out", finished.parent)[0] == 0
    assert (finished.parent / "cpu-2" / "metrics.jsonl").exists()


def test_a_finished_run_is_made_longer(tiny: list[str], run: Run, metrics: Metrics, tmp_path: Path) -> None:
    """With one learning rate it is then the run that was so long from the beginning, to the bit."""
    options = [*tiny, "--final-lr", 1, "--out", tmp_path]
    assert run(*options, "--steps", 10, "--name", "longer")[0] == 0
    assert run("--resume", "--out", tmp_path, "--device", "cpu")[0] == 2
    assert run("--resume", "--steps", 20, "--out", tmp_path, "--device", "cpu")[0] == 0
    assert run(*options, "--name", "whole")[0] == 0 and metrics(tmp_path / "longer") == metrics(tmp_path / "whole")
    assert same_weights(tmp_path / "longer", tmp_path / "whole")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("longer", "whole")]
    assert configs[0] == configs[1] and json.loads((tmp_path / "longer" / "summary.json").read_text())["steps"] == 20


def test_a_run_that_is_made_longer_is_unfinished_until_it_ends(
    finished: Path, run: Run, at_step: AtStep, metrics: Metrics
) -> None:
    """Its learning rates are from there on those of its new length."""
    at_step(22, interrupt)
    code, printed = run("--resume", "--steps", 40, "--out", finished.parent, "--device", "cpu")
    assert code == 0 and "stopped after step 23 of 40" in printed and not (finished / "summary.json").exists()
    assert run("--resume", "--out", finished.parent, "--device", "cpu")[0] == 0
    rates = [line["lr"] for line in metrics(finished)]
    assert len(rates) == 40 and rates[19] < rates[20] > rates[39]


@pytest.mark.parametrize(("steps", "ended"), [(19, False), (20, True)])
def test_a_run_is_not_made_shorter(steps: int, ended: bool, finished: Path, run: Run) -> None:
    if not ended:
        cut_short(finished)
    least = 20 + ended
    refused(run, finished, f"steps: expected at least {least}, as .*cpu .* with 20, got {steps}", "--steps", steps)
    assert (finished / "summary.json").exists() == ended


def test_a_checkpoint_writes_text(finished: Path, run: Run) -> None:
    prompted = ["--sample", finished, "--prompt", "3 times", "--device", "cpu"]
    given = (["--sample", finished / "checkpoint.pt"], ["--sample", finished], prompted, [*prompted, "--seed", 5])
    codes, said = zip(*(run(*options) for options in given), strict=True)
    assert set(codes) == {0}
    assert said[0] == said[1] and said[0][:20] == json.loads((finished / "summary.json").read_text())["sample"][:20]
    assert all(text.startswith("3 times") for text in said[2:]) and said[2] != said[3]


def test_a_checkpoint_before_the_first_validation_writes_text(
    tiny: list[str], run: Run, at_step: AtStep, tmp_path: Path
) -> None:
    at_step(2, interrupt)
    assert run(*tiny, "--out", tmp_path)[0] == 0
    code, printed = run("--sample", tmp_path / "cpu", "--device", "cpu")
    assert code == 0 and len(printed) > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "{tmp}/none"], "sample: expected a checkpoint, or the folder of a run with one, got .*none"),
        (["--sample", "{tmp}"], "sample: expected a checkpoint, or the folder of a run with one, got "),
        (["--sample", "{run}", "--resume"], "resume: expected none with --sample, got True"),
        (["--sample", "{run}", "--steps", "3"], "steps: expected none with --sample, got 3"),
        (["--sample", "{run}", "--out", "runs"], "out: expected none with --sample, got .*runs"),
        (["--sample", "{run}", "--timeout", "3"], "timeout: expected none with --sample, got 3"),
        (["--sample", "{run}/config.json"], "checkpoint: .*config.json cannot be read, it seems damaged"),
        (["--prompt", "abc"], "prompt: expected none without --sample"),
    ],
)
def test_bad_options_of_a_sample_are_said(
    options: list[str], message: str, finished: Path, run: Run, tmp_path: Path
) -> None:
    code, printed = run(*(option.format(tmp=tmp_path, run=finished) for option in options))
    assert code == 2
    assert re.fullmatch(f"error: {message}.*\n", printed), printed


def test_checkpoints_come_as_often_as_they_were_asked_for(
    script: Any, tiny: list[str], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where no line of numbers and no validation falls on the same step."""
    save, saved = script.Trainer.save, []
    monkeypatch.setattr(script.Trainer, "save", lambda trainer: (saved.append(trainer.step), save(trainer)))
    often = ["--checkpoint-every", 7, "--log-every", 100, "--val-every", 100]
    assert run(*tiny, *often, "--out", tmp_path)[0] == 0 and saved == [7, 14, 20]


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
        (["--attention-tiles", "3"], "attention_tiles: expected a divisor of batch=4, got 3"),
        (["--parallel", "hsdp"], "group_size: expected a divisor of the 1 ranks, got 2"),
        (["--group-size", "2"], r"group_size: expected none with parallel none, as hsdp, ep\+fsdp take it"),
        (
            ["--parallel", "fsdp", "--group-size", "4"],
            r"group_size: expected none with parallel fsdp, as hsdp, ep\+fsdp take it",
        ),
        (["--timeout", "9"], "timeout: expected none on one rank, which waits for no other, got 9"),
        (
            ["--parallel", "ep", "--formulation", "dropping"],
            "parallel: expected none, fsdp or hsdp with formulation dropping",
        ),
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


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", print])
def test_a_damaged_checkpoint_is_said(content: Any, finished: Path, run: Run) -> None:
    """Half of one too, and code, which is not loaded."""
    path = cut_short(finished)
    whole = path.read_bytes()
    torch.save(content, path)
    if not callable(content):
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    refused(run, finished, "checkpoint: .*checkpoint.pt cannot be read, it seems damaged")


@pytest.mark.parametrize("name", ["data.pkl", "/data/", ""])
def test_a_flipped_bit_is_said(name: str, finished: Path, run: Run) -> None:
    """In the record of a tensor, which any number is right for, and in the directory: of a folder torch.load reads nothing."""
    path = cut_short(finished)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record = max((each for each in archive.infolist() if name in each.filename), key=lambda each: each.file_size)
        place = content.index(archive.read(record)[:64]) + record.file_size // 2
        attributes = archive.start_dir + 38  # of the first record
    content[place if name else attributes] ^= 4 if name else 0x10
    path.write_bytes(content)
    refused(
        run,
        finished,
        "checkpoint: .*checkpoint.pt cannot be read, it seems damaged .the record .* is not as it was written",
    )


@pytest.fixture(scope="module")
def sharded_once(script: Any, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded")
    with keeping_handlers():
        options = [*TINY.split(), "--parallel", "fsdp", "--steps", "6", "--data", str(text), "--out", str(out)]
        assert script.main([*options, "--name", "cpu"]) == 0
    return out / "cpu"


@pytest.fixture
def sharded(sharded_once: Path, tmp_path: Path) -> Path:
    """The folder of a run with --parallel, cut short; a copy for each test."""
    shutil.copytree(sharded_once, tmp_path / "sharded" / "cpu")
    cut_short(tmp_path / "sharded" / "cpu")
    return tmp_path / "sharded" / "cpu"


@pytest.mark.parametrize("kind", [".metadata", "*.distcp"])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_flipped_bit_of_shards_is_said(kind: str, place: float, sharded: Path, run: Run) -> None:
    """By --resume and by --sample: any number is right for a tensor."""
    (path,) = sharded.glob(f"shards-6/{kind}")
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    message = f"checkpoint: .*{re.escape(path.name)} cannot be read, it seems damaged .its checksum does not match"
    refused(run, sharded, message)
    code, printed = run("--sample", sharded, "--device", "cpu")
    assert code == 2 and re.fullmatch(f"error: {message}.*\n", printed), printed
    path.unlink()
    refused(run, sharded, f"checkpoint: .*{re.escape(path.name)} cannot be read .*No such file")


def test_shards_of_a_version_without_checksums(sharded: Path, run: Run) -> None:
    state = torch.load(sharded / "checkpoint.pt", weights_only=True)
    del state["checksums"]
    torch.save(state, sharded / "checkpoint.pt")
    for options in (["--sample", sharded], ["--resume", "--out", sharded.parent]):
        code, printed = run(*options, "--device", "cpu")
        assert code == 0 and re.search("^warning: checkpoint: .* of an earlier version", printed, re.MULTILINE), printed


def test_shards_that_a_killed_process_has_left_go(sharded: Path, run: Run, at_step: AtStep) -> None:
    """Before there are new ones: they may be what fills the disk."""
    (sharded / "shards-9").mkdir()
    at_step(6, lambda: names.extend(path.name for path in sharded.glob("shards-*")))
    names: list[str] = []
    assert run("--resume", "--steps", 7, "--out", sharded.parent, "--device", "cpu")[0] == 0 and names == ["shards-6"]


def test_settings_or_metrics_that_changed_on_disk_are_said(finished: Path, run: Run) -> None:
    """Each is restored before the next."""
    cut_short(finished)
    config, metrics = finished / "config.json", finished / "metrics.jsonl"
    settings, lines = config.read_text(), metrics.read_text()
    for changed in (settings.replace('"steps": 20', '"steps": 28'), re.sub(r',\s*"checksum": \d+', "", settings)):
        assert changed != settings
        config.write_text(changed)
        refused(run, finished, r"checkpoint: .*config.json cannot be read .its checksum does not match")
    config.write_text(settings)
    first = json.dumps(json.loads(lines.splitlines()[0]) | {"loss": 5.0})
    for line in (first, "3", "[1]", "torn", '{"step": "0"}'):
        metrics.write_text(line + lines[lines.index("\n") :])
        refused(run, finished, "checkpoint: .*metrics.jsonl seems damaged, the checksum of its first 20 steps does not")
    metrics.unlink()
    assert run("--resume", "--steps", 22, "--out", finished.parent, "--device", "cpu")[0] == 0
    assert len(metrics.read_text().splitlines()) == 2


def test_the_same_bytes_divided_otherwise_are_another_text(
    script: Any, finished: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(finished)
    load = script.load_data

    def divided_otherwise(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        train, held_out = load(*arguments, **options)
        return torch.cat([train, held_out[:32]]), held_out[32:]

    monkeypatch.setattr(script, "load_data", divided_otherwise)
    refused(run, finished, "checkpoint: .* was trained on another text")


def test_a_checkpoint_of_something_else_is_said(finished: Path, run: Run, text: Path) -> None:
    path = cut_short(finished)
    state = torch.load(path, weights_only=True)
    cut = {name: value[:1] for name, value in state["model"].items()}
    other, lacks = "holds another model", "is not one of this script"
    for saved, message in (
        ({"weights": torch.zeros(3)}, f"{lacks}, it lacks .*optimizer"),
        ([1, 2], lacks),
        (state | {"data": "another"}, "was trained on another text"),
        (state | {"config": state["config"] | {"layers": 3}}, "and config.json differ in layers"),
        (state | {"model": cut}, other),
        (state | {"step": "3"}, lacks),
        (state | {"best": None}, lacks),
        (state | {"random": {}}, other),
        (state | {"seconds": "1"}, lacks),
    ):
        torch.save(saved, path)
        refused(run, finished, f"checkpoint: .* {message}")
    torch.save(state, path)
    refused(run, finished, "d_model: expected 32 as .* began, got 64", "--d-model", 64)
