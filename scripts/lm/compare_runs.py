"""Training runs of one model by several programs, routers and seeds, side by side: what trains as well, and in which time.

    python -m scripts.lm.compare_runs accuracy --time-budget 420    # -> results/h200/training.json on an H200
    python -m scripts.lm.compare_runs float64 capacity routers
    python -m scripts.lm.compare_runs all --seeds 0                 # of every question the first seed alone
    python -m scripts.lm.compare_runs accuracy --runs ours,dense
    python -m scripts.lm.compare_runs fp8 --gradients               # two precisions, 1000 steps; and one batch's gradients
    python -m scripts.lm.compare_runs all --cpu                     # a short form on a CPU: tables alone, or a file with --out

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
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts import train_lm
from scripts.bench import identity
from scripts.bench.common import (
    MIB,
    REPOSITORY,
    RESULTS,
    begun,
    folder_of,
    gpu_name,
    in_turn,
    of_kernels,
    read_json,
    sizes_of_run,
    write_json,
)
from scripts.bench.training_tables import TRAINING
from scripts.command import argument_parser, need_hopper, some_of
from scripts.lm.gradients import cosines
from scripts.lm.run_folder import CHECKPOINT, METRICS, SUMMARY
from scripts.lm.settings import PRESETS, Config
from scripts.lm.training_items import ITEMS, RUNS, config_of

Row = dict[str, Any]
KERNELS = "kernels.json"  # of a run's folder: those that its parts so far have launched


@dataclasses.dataclass(frozen=True)
class Training:
    """One run to be made. name: of the run in RUNS.  length: its item's."""

    name: str
    length: str
    config: Config

    @property
    def key(self) -> Row:
        """The fields by which its row is found. settings: those that differ from the CPU preset, to which a new one is added."""
        settings = {
            field.name: value
            for field in dataclasses.fields(Config)
            if (value := getattr(self.config, field.name)) != field.default and field.name != "seed"
        }
        return {"run": self.name, "length": self.length, "seed": self.config.seed, "settings": settings}

    def __str__(self) -> str:
        return f"{self.name}-{self.config.steps}-seed{self.config.seed}"


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raises KeyboardInterrupt after ``seconds``, as Ctrl-C would."""
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def options_of(config: Config) -> list[str]:
    """The settings that differ from the Hopper preset's, as options of train_lm."""
    words = []
    for name, value in dataclasses.asdict(config).items():
        flag = name.replace("_", "-")
        if value == getattr(PRESETS["hopper"], name):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != "":
            words.append(f"--{flag}={value}")
    return words


def train(training: Training, folder: Path, device: str, seconds: float) -> Row | None:
    """The row of a run, made or gone on with; None where it was stopped. RuntimeError where training fails."""
    place = folder / str(training)
    if place.exists() and not (place / CHECKPOINT).exists():  # it was killed before there was one
        shutil.rmtree(place)
    words = ["--out", str(folder), "--name", str(training), "--device", device]
    words += ["--resume"] if place.exists() else ["--preset", "hopper", *options_of(training.config)]
    with identity.launched() as kernels, stopped_after(seconds):
        code = train_lm.main(words)
    if (place / KERNELS).exists():
        kernels = json.loads((place / KERNELS).read_text()) | kernels
    if place.exists():
        (place / KERNELS).write_text(json.dumps(kernels))
    if not (place / SUMMARY).exists():
        if code in (0, 130):
            return None
        shutil.rmtree(place, ignore_errors=True)
        raise RuntimeError(f"training ended with exit code {code}; its error stands above")
    row = row_of(training, place) | {"of": of_kernels(kernels)}
    shutil.rmtree(place)
    return row


def row_of(training: Training, place: Path) -> Row:
    """The row of an ended run, from its folder. ms_a_step: None if all of its steps are among the first lines."""
    lines = [json.loads(line) for line in (place / METRICS).read_text().splitlines()]
    summary = json.loads((place / SUMMARY).read_text())
    config = training.config
    speeds = [line["tokens_per_s"] for line in lines[config.log_every :]]
    ms = 1e3 * config.batch * config.context / statistics.median(speeds) if speeds else None
    row = sizes_of_run(config, config.batch)
    row |= {"ms_a_step": ms, "saved_MiB": summary["saved_activation_bytes"] / MIB}
    row |= {"seconds": summary["seconds"], "parameters": summary["parameters"], "balance": lines[-1]["balance"]}
    row["validation"] = [[line["step"] + 1, line["val_loss"]] for line in lines if "val_loss" in line]
    return training.key | row | {"losses": [line["loss"] for line in lines]}


def wanted(options: argparse.Namespace) -> list[Training]:
    """The runs of the questions that are asked, the first seed of all before the second, each once."""
    found: dict[str, Training] = {}
    for item in options.names:
        for seed in ITEMS[item].seeds:
            for run in ITEMS[item].runs:
                if seed in options.seeds and run in options.runs:
                    training = Training(run, ITEMS[item].length, config_of(item, run, seed, short=options.cpu))
                    found.setdefault(str(training), training)
    return list(found.values())


def is_there(training: Training, rows: list[Row]) -> bool:
    """Whether a row is of this run, of the kernels that are here."""
    return any(is_of(training, row) and not identity.earlier(row) for row in rows)


def is_of(training: Training, row: Row) -> bool:
    return all(row[name] == value for name, value in training.key.items())


def make(options: argparse.Namespace) -> bool:
    """Make the runs that the file lacks, and write each; show the tables. Returns whether none was stopped."""
    begin = time.monotonic()
    record = begun("compare_runs", __doc__)
    kept = read_json(options.out) if options.out and options.out.exists() else {}
    record |= {name: kept.get(name, []) for name in ("rows", "gradients")}
    if options.gradients:
        with identity.launched() as launched:
            found = cosines(config_of("fp8", "ours", 0, short=options.cpu), "cpu" if options.cpu else "cuda")
        record["gradients"] = [row | {"of": of_kernels(launched)} for row in found]
        if options.out:
            write_json(options.out, record)
    left = [each for each in wanted(options) if options.again or not is_there(each, record["rows"])]
    failed: dict[str, str] = {}
    whole = True
    for place, training in enumerate(in_turn(left, options.time_budget), 1):
        print(f"{place} of {len(left)}: {training}, {RUNS[training.name].label}", flush=True)
        seconds = options.time_budget - (time.monotonic() - begin)
        try:
            row = train(training, options.folder, "cpu" if options.cpu else "cuda", seconds)
        except RuntimeError as error:  # the others are made
            failed[str(training)] = str(error)[:200]
            print(f"  failed: {failed[str(training)]}", flush=True)
            continue
        if row is None:
            print(f"{training} was stopped; the same command goes on", flush=True)
            whole = time.monotonic() - begin >= options.time_budget  # not by Ctrl-C
            break
        record["rows"] = [other for other in record["rows"] if not is_of(training, other)] + [row]
        if options.out:
            write_json(options.out, record | ({"failed": failed} if failed else {}))
    for name, (_, make_table) in TRAINING.items():
        if name.removeprefix("training_") in options.names or (name == "fp8_gradients" and options.gradients):
            print(f"\n{make_table(record)}")
    print(f"wrote {options.out}" if options.out and record["rows"] else "wrote nothing")
    return whole


def main(words: list[str] | None = None) -> int:
    parser = argument_parser("scripts.lm.compare_runs", __doc__)
    parser.add_argument(
        "names", nargs="+", choices=[*ITEMS, "all"], metavar="NAME", help=f"of {', '.join(ITEMS)}; or all"
    )
    parser.add_argument("--runs", type=some_of(RUNS), default=list(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--seeds", type=some_of("01"), default=["0", "1"], help="of 0, 1")
    parser.add_argument("--out", type=Path, help="file of results [default results/GPU/training.json]")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "compared", help="of runs that have not ended"
    )
    what = "cosines of the experts' weight gradients of one batch with float64's, too"
    parser.add_argument("--gradients", action="store_true", help=what)
    parser.add_argument("--again", action="store_true", help="make what the file has too")
    what = "stop what still runs then"
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS", help=what)
    parser.add_argument("--cpu", action="store_true", help="the short form, on a CPU")
    options = parser.parse_args(words)
    options.names = [*ITEMS] if "all" in options.names else list(dict.fromkeys(options.names))
    options.seeds = [int(seed) for seed in options.seeds]
    if not options.cpu:
        need_hopper()
        options.out = options.out or RESULTS.parent / folder_of(gpu_name()) / "training.json"
    try:
        return 0 if make(options) else 130
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
        return 130


if __name__ == "__main__":
    sys.exit(main())
