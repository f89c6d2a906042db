"""scripts/train_lm.py on several gloo ranks: losses of one process, resumes to the bit and on other numbers of ranks, ends."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from lm_ranks import Run, run_rank

from scripts.lm.compare_backends import largest_difference
from tests.lm.conftest import AtStep, Metrics, wait_for_step
from tests.lm.conftest import Run as Main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def named(tiny: list[str], out: Path, name: str, *options: str) -> list[str]:
    return [*tiny, "--out", str(out), "--name", name, *options]


def resumed(out: Path, name: str, *options: str) -> Run:
    return Run(["--resume", "--device", "cpu", "--out", str(out), "--name", name, *options])


def start(ranks: int, folder: Path, runs: list[Run], bench: Path | None = None) -> None:
    store = tempfile.mkdtemp(dir=folder)  # of this start alone
    mp.start_processes(run_rank, args=(ranks, f"{store}/store", runs, bench), nprocs=ranks, start_method="spawn")


def losses(metrics: Metrics, folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


@pytest.fixture(scope="module")
def plain(text: Path, script: Any, out: Path) -> list[str]:
    """Options of a short run without random numbers; the run of one process is there, as ``one``."""
    from tests.lm.conftest import TINY, keeping_handlers

    options = [*TINY.split(), "--dropout", "0", "--data", str(text)]
    with keeping_handlers():
        assert script.main(named(options, out, "one")) == 0
    return options


def test_two_ranks(plain: list[str], out: Path, metrics: Metrics, run: Main) -> None:
    """fsdp and ep learn what one process learns; a run that is cut goes on to the bit on two ranks, and in one process."""
    drop = ["--dropout", "0.1", "--attention-tiles", "2", "--parallel", "fsdp", "--router", "aux_free"]
    ep = ["--parallel", "ep"]
    peers = [*ep, "--dispatcher", "symmetric"]
    runs = [
        Run(named(plain, out, "fsdp", "--parallel", "fsdp", "--aux-over", "global")),
        Run(named(plain, out, "ep", *ep)),
        Run(named(plain, out, "drop", *drop)),
        Run(named(plain, out, "cut", *drop), stop=9),
        resumed(out, "cut"),
        Run(named(plain, out, "roomy", *peers, "--row-capacity", "2", "--accumulate", "2")),
        Run(named(plain, out, "full", *peers, "--row-capacity", "0.9"), code=1),
        Run(named(plain, out, "none", *ep, "--row-capacity", "2"), code=2),
        Run(named(plain, out, "two", "--parallel", "fsdp"), stop=10),
        Run(named(plain, out, "disk", *ep, "--checkpoint-every", "4"), full=7, code=1),
        resumed(out, "disk", "--steps", "21")._replace(damaged=out / "disk" / "shards-4" / "__1_0.distcp", code=2),
    ]
    start(2, out, runs)
    one = losses(metrics, out / "one")
    assert [path.name for path in (out / "disk").glob("shards-*")] == ["shards-4"]  # no part of those of step 8
    assert not (out / "disk" / "summary.json").exists()
    assert (
        json.loads((out / "disk" / "config.json").read_text())["steps"] == 20
    )  # those of the run that a refused one would go on
    assert largest_difference(losses(metrics, out / "fsdp"), one)[0] < 0.01
    assert largest_difference(losses(metrics, out / "ep"), one)[0] < 0.01
    assert largest_difference(losses(metrics, out / "roomy"), one)[0] < 0.01
    assert not (out / "full" / "metrics.jsonl").exists()  # too few rows: it ended before the first step
    balancing = {name: [line["aux_loss"] for line in metrics(out / name)][:3] for name in ("one", "fsdp", "ep")}
    assert balancing["fsdp"] == pytest.approx(balancing["one"], rel=1e-4)  # that of the global batch
    assert balancing["ep"][0] != pytest.approx(balancing["one"][0], rel=1e-4)  # the mean of the ranks'
    vals = [[line["val_loss"] for line in metrics(out / name) if "val_loss" in line] for name in ("ep", "one")]
    assert vals[0] == pytest.approx(vals[1], rel=0.01)
    assert metrics(out / "cut") == metrics(out / "drop") and len(metrics(out / "cut")) == 20
    goes_on_in_one_process("two", one, out, metrics, run)
    summary = json.loads((out / "fsdp" / "summary.json").read_text())
    code, printed = run("--sample", out / "fsdp", "--device", "cpu")
    assert code == 0 and printed[:5] == summary["sample"][:5]


def goes_on_in_one_process(name: str, one: list[float], out: Path, metrics: Metrics, run: Main) -> None:
    assert len(metrics(out / name)) == 10
    code, printed = run(*resumed(out, name).options)
    assert code == 0, printed
    assert largest_difference(losses(metrics, out / name), one)[0] < 0.01
    assert [folder.name for folder in (out / name).glob("shards-*")] == ["shards-20"]


@pytest.mark.full
def test_two_ranks_with_other_options(plain: list[str], out: Path, metrics: Metrics, run: Main) -> None:
    """Weights that stay gathered, and attention in tiles, change nothing; a run of parts of steps that two ranks exchange
    through each other's memory goes on in one process; the benchmark's short form."""
    fsdp, ep = ["--parallel", "fsdp", "--aux-over", "global"], ["--parallel", "ep"]
    roomy = ["--dispatcher", "symmetric", "--row-capacity", "2"]  # rows for all that two ranks have in a part of a step
    runs = [
        Run(named(plain, out, "again", *fsdp)),
        Run(named(plain, out, "kept", *fsdp, "--no-reshard")),
        Run(named(plain, out, "untiled", *ep)),
        Run(named(plain, out, "tiled", *ep, "--attention-tiles", "2")),
        Run(named(plain, out, "two-ep", *ep, "--accumulate", "2", *roomy), stop=10),
    ]
    start(2, out, runs, bench=out / "distributed.json")
    assert metrics(out / "kept") == metrics(out / "again")
    assert losses(metrics, out / "tiled") == pytest.approx(losses(metrics, out / "untiled"), rel=1e-3)
    goes_on_in_one_process("two-ep", losses(metrics, out / "one"), out, metrics, run)
    bench = json.loads((out / "distributed.json").read_text())
    assert [(row["mode"], row["gpus"]) for row in bench["weak_scaling"] + bench["losses"]] == [("fsdp", 2)] * 2
    assert bench["weak_scaling"][0]["efficiency"] > 0 and bench["losses"][0]["largest_difference"] < 0.01
    assert bench["losses"][0]["of"]["protocol"] == "scripts.bench.distributed.losses"


@pytest.mark.full
def test_four_ranks(plain: list[str], out: Path, metrics: Metrics) -> None:
    """hsdp and ep+fsdp learn what one process learns, bf16 too, and so do runs of two ranks that go on on four, and one of four
    on two; ep+fsdp goes on to the bit."""
    begun = {mode: f"of-two-{mode}" for mode in ("fsdp", "ep")}
    start(2, out, [Run(named(plain, out, name, "--parallel", mode), stop=10) for mode, name in begun.items()])
    assert [len(metrics(out / name)) for name in begun.values()] == [10, 10]
    grouped = ["--parallel", "ep+fsdp", "--aux-over", "global", "--dropout", "0.1"]
    runs = [
        Run(named(plain, out, "hsdp", "--parallel", "hsdp")),
        Run(named(plain, out, "ep+fsdp", "--parallel", "ep+fsdp")),
        Run(named(plain, out, "bf16", "--parallel", "ep+fsdp", "--bf16")),
        Run(named(plain, out, "whole", *grouped)),
        Run(named(plain, out, "cut4", *grouped), stop=9),
        resumed(out, "cut4"),
        Run(named(plain, out, "of-four", "--parallel", "ep+fsdp"), stop=10),
        *(resumed(out, name) for name in begun.values()),
    ]
    start(4, out, runs)
    start(2, out, [resumed(out, "of-four")])
    one = losses(metrics, out / "one")
    for name in ("hsdp", "ep+fsdp", "bf16", "of-four", *begun.values()):
        assert largest_difference(losses(metrics, out / name), one)[0] < 0.01, name
    assert metrics(out / "cut4") == metrics(out / "whole") and len(metrics(out / "cut4")) == 20


@pytest.mark.full
def test_eight_ranks(plain: list[str], out: Path, metrics: Metrics, run: Main) -> None:
    """An expert and a sequence a rank; groups of four; both dispatchers."""
    options = [*plain, "--num-experts", "8", "--batch", "8"]
    assert run(*named(options, out, "eighth"))[0] == 0
    groups, symmetric = ["--group-size", "4"], ["--dispatcher", "symmetric"]
    modes: dict[str, list[str]] = {
        "fsdp": [],
        "hsdp": groups,
        "ep": ["--dispatcher", "all_to_all"],
        "ep symmetric": symmetric,
        "ep+fsdp": [*groups, "--dispatcher", "all_to_all"],
        "ep+fsdp symmetric": [*groups, *symmetric],
    }
    runs = [named(options, out, f"eight {mode}", "--parallel", mode.split()[0], *more) for mode, more in modes.items()]
    start(8, out, [*map(Run, runs)])
    one = losses(metrics, out / "eighth")
    for mode in modes:
        assert largest_difference(losses(metrics, out / f"eight {mode}"), one)[0] < 0.01, mode


def torchrun(*options: str, ranks: int = 2) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*launcher, "-m", "scripts.train_lm", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pid_of_rank(launcher: int, rank: int) -> int:
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_killed_rank_ends_the_others_which_name_it(
    tiny: list[str], tmp_path: Path, run: Main, at_step: AtStep, metrics: Metrics
) -> None:
    options = named(tiny, tmp_path, "killed", "--parallel", "fsdp", "--steps", "2000", "--checkpoint-every", "4")
    process = torchrun(*options)
    wait_for_step(process, 8)
    os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search("^error: rank 0 ends: rank 1 is gone", errors, flags=re.MULTILINE), errors
    went_on: list[int] = []
    step = 4 + max(line["step"] for line in metrics(tmp_path / "killed"))
    at_step(step, lambda: (went_on.append(step), signal.raise_signal(signal.SIGINT)))
    code, printed = run("--resume", "--out", tmp_path, "--device", "cpu")
    assert code == 0 and went_on, printed


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_torchrun_saves(number: int, tiny: list[str], tmp_path: Path, metrics: Metrics) -> None:
    process = torchrun(*named(tiny, tmp_path, "asked", "--parallel", "ep", "--steps", "2000"))
    wait_for_step(process, 8)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    stopped = re.search(
        r"stopped after step (\d+) of 2000; to go on: .*torch.distributed.run --nproc-per-node 2", printed
    )
    assert stopped, printed + errors
    assert len(metrics(tmp_path / "asked")) == int(stopped[1])
    assert (tmp_path / "asked" / f"shards-{stopped[1]}" / ".metadata").exists()


@pytest.mark.full
def test_what_is_refused_is_said_once(tiny: list[str], tmp_path: Path) -> None:
    process = torchrun(*named(tiny, tmp_path, "refused", "--parallel", "hsdp", "--group-size", "3"))
    _, errors = process.communicate(timeout=60)
    assert errors.count("error: group_size: expected a divisor of the 2 ranks, got 3") == 1, errors
    assert not (tmp_path / "refused").exists()


@pytest.mark.gpu
@pytest.mark.timeout(300)  # four starts of torchrun
@pytest.mark.parametrize("mode", ["fsdp", "ep"])
def test_gpus(mode: str, plain: list[str], out: Path, metrics: Metrics, run: Main) -> None:
    """Over NCCL, on two GPUs where there are two: what one process learns; cut, it goes on to the bit."""
    ranks, options = min(2, torch.cuda.device_count()), [*plain, "--device", "cuda", "--bf16"]
    if not (out / "gpu").exists():
        assert run(*named(options, out, "gpu"))[0] == 0
    whole = ["--final-lr", "1", "--parallel", mode]
    place = ["--device", "cuda", "--out", str(out), "--name", f"gpu-{mode}"]
    for words in (
        [*named(options, out, f"gpu-{mode}", "--steps", "10"), *whole],
        ["--resume", "--steps", "20", *place],
        [*named(options, out, f"gpu-{mode}-whole"), *whole],
        named(options, out, f"gpu-{mode}-same", "--parallel", mode),
    ):
        process = torchrun(*words, ranks=ranks)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert metrics(out / f"gpu-{mode}") == metrics(out / f"gpu-{mode}-whole")
    assert largest_difference(losses(metrics, out / f"gpu-{mode}-same"), losses(metrics, out / "gpu"))[0] < 0.01
