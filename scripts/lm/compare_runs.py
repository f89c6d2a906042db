"""Training runs of one model by several programs, routers and seeds, side by side: what trains as well, and in which time.

    python -m scripts.lm.compare_runs accuracy --time-budget 420    # -> results/h200/training.json on an H200
    python -m scripts.lm.compare_runs float64 capacity routers
    python -m scripts.lm.compare_runs all --seeds 0                 # of every question the first seed alone
    python -m scripts.lm.compare_runs accuracy --runs ours,dense
    python -m scripts.lm.compare_runs fp8 --gradients               # two precisions, 1000 steps; and one batch's gradients
    python -m scripts.lm.compare_runs all --cpu                     # a short form on a CPU: tables alone, or files with --out

Every run is one of scripts/train_lm.py, in a folder of its own below --folder. When it has ended its losses go into the file, and
the folder goes. A run that the file has, with the same settings and kernels, is not made again. One that --time-budget or Ctrl-C
stopped goes on with the same command, if its folder is still there. A run belongs to several questions and is made once.

The Hopper preset without dropout, whose masks would differ with the dtype: 500 steps of 64 sequences of 1024 bytes of Python's
standard library, learning rate 1e-3. A seed decides weights and batches. Beside float64: the first 20 steps, of 8 sequences each.
ms a step: median over the steps, validation apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from scripts import train_lm
from scripts.bench import identity
from scripts.bench.common import MIB, REPOSITORY, sizes_of_run
from scripts.bench.running import Bench, Item, Job, of_case, run
from scripts.bench.timing import Machine, Row
from scripts.command import some_of
from scripts.lm.gradients import cosines
from scripts.lm.ranks import Ranks
from scripts.lm.run_folder import CHECKPOINT, METRICS, SUMMARY, read_lines
from scripts.lm.settings import PRESETS, Config
from scripts.lm.training_items import ITEMS, RUNS, config_of

KERNELS = "kernels.json"  # of a run's folder: those that its parts so far have launched
OPTIONS = argparse.Namespace()  # the command line's; a measurement is told of its case alone
GRADIENTS = "gradients"


@dataclasses.dataclass(frozen=True)
class Training:
    """A run that answers a question. item: of ITEMS.  run: of RUNS.  short: its form on a CPU."""

    item: str
    run: str
    seed: int
    short: bool = False

    @property
    def config(self) -> Config:
        return config_of(self.item, self.run, self.seed, short=self.short)

    @property
    def key(self) -> Row:
        """The fields by which its row is found. settings: those that differ from the CPU preset, to which a new one is added."""
        settings = dataclasses.asdict(self.config).items()
        changed = {name: value for name, value in settings if value != getattr(Config, name) and name != "seed"}
        return {"run": self.run, "length": ITEMS[self.item].length, "seed": self.seed, "settings": changed}

    def __str__(self) -> str:
        return f"{self.run}-{self.config.steps}-seed{self.seed}"


def options_of(config: Config) -> list[str]:
    """The settings that differ from the Hopper preset's, as options of train_lm."""
    preset, settings = (dataclasses.asdict(each) for each in (PRESETS["hopper"], config))
    changed = {name.replace("_", "-"): value for name, value in settings.items() if value not in (preset[name], "")}
    return [
        f"--{flag if value else f'no-{flag}'}" if isinstance(value, bool) else f"--{flag}={value}"
        for flag, value in changed.items()
    ]


def train(training: Training, machine: Machine) -> list[Row]:
    """The row of a run, made or gone on with; no row where the time was over. RuntimeError where training fails."""
    place, seconds = OPTIONS.folder / str(training), OPTIONS.ends - time.monotonic()
    if seconds <= 0:
        return []
    if place.exists() and not (place / CHECKPOINT).exists():  # it was killed before there was one
        shutil.rmtree(place)
    words = ["--out", str(place.parent), "--name", place.name, "--device", machine.device]
    words += ["--resume"] if place.exists() else ["--preset", "hopper", *options_of(training.config)]
    before = json.loads((place / KERNELS).read_text()) if (place / KERNELS).exists() else {}
    # As Ctrl-C would end it.
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGINT))
    with identity.launched() as kernels, ExitStack() as ends:
        ends.callback(timer.cancel)
        timer.start()
        code = train_lm.main(words)
    if (place / SUMMARY).exists():
        row = row_of(training, place) | {"launched": before}
        shutil.rmtree(place)
        return [row]
    if code not in (0, 130):
        shutil.rmtree(place, ignore_errors=True)
        raise RuntimeError(f"training ended with exit code {code}; its error stands above")
    if place.exists():
        (place / KERNELS).write_text(json.dumps(before | kernels))
    if time.monotonic() < OPTIONS.ends:
        raise KeyboardInterrupt
    return []


def row_of(training: Training, place: Path) -> Row:
    """The row of an ended run, from its folder. ms_a_step: None if all of its steps are among the first lines."""
    lines, config = read_lines(place / METRICS), training.config
    summary = json.loads((place / SUMMARY).read_text())
    speeds = [line["tokens_per_s"] for line in lines[config.log_every :]]
    return sizes_of_run(config, config.batch) | {
        "ms_a_step": 1e3 * config.batch * config.context / statistics.median(speeds) if speeds else None,
        "saved_MiB": summary["saved_activation_bytes"] / MIB,
        "seconds": summary["seconds"],
        "parameters": summary["parameters"],
        "balance": lines[-1]["balance"],
        "validation": [[line["step"] + 1, line["val_loss"]] for line in lines if "val_loss" in line],
        "losses": [line["loss"] for line in lines],
    }


def gradients(case: str, machine: Machine) -> list[Row]:
    """Cosines of the experts' weight gradients with float64's."""
    return cosines(config_of("fp8", "ours", 0, short=not machine.on_gpu), machine.device)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.prog = "python -m scripts.lm.compare_runs"
    parser.add_argument("--runs", type=some_of(RUNS), default=[*RUNS], help=f"of {', '.join(RUNS)}")
    parser.add_argument("--seeds", type=some_of("01"), default=["0", "1"], help="of 0, 1")
    unended = REPOSITORY / "runs" / "compared"
    parser.add_argument("--folder", type=Path, default=unended, help="of runs that have not ended")
    parser.add_argument("--gradients", action="store_true", help=f"as the name {GRADIENTS}, beside others")


def asked(options: argparse.Namespace, case: Training | str) -> bool:
    """Whether a case is wanted. A run that answers several questions is the first one's."""
    if isinstance(case, str):
        return True
    others = [item for item in ITEMS if {item, "all"} & {*options.parts} and case.run in ITEMS[item].runs]
    first = next(item for item in others if ITEMS[item].length == ITEMS[case.item].length)
    return first == case.item and case.run in options.runs and str(case.seed) in options.seeds


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    vars(OPTIONS).update(folder=options.folder, ends=time.monotonic() + options.time_budget)
    if options.gradients and not any(job.name == GRADIENTS for job in options.jobs):
        options.jobs.insert(0, Job(GRADIENTS, BENCH.items[GRADIENTS], GRADIENTS))


def item_of(name: str) -> Item:
    """The runs of a question, the first seed of all before the second."""
    runs = [(name, run, seed) for seed in ITEMS[name].seeds for run in ITEMS[name].runs]
    short = [Training(*each, short=True) for each in runs]
    return Item(train, [Training(*each) for each in runs], short, key=of_case, file="training")


ALONE = Item(gradients, [GRADIENTS], [GRADIENTS], key=lambda _: {}, file="training", part=GRADIENTS)
BENCH = Bench(
    "compare_runs",
    __doc__,
    {GRADIENTS: ALONE} | {name: item_of(name) for name in ITEMS},
    goes_on=True,
    options=add_options,
    asked=asked,
    prepare=prepare,
)
main = partial(run, BENCH)

if __name__ == "__main__":
    main()
