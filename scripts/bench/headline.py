"""The headline: layers of models beside SonicMoE's module and two grouped_mm programs, the median of several runs of each.

    python -m scripts.bench.headline --caches FOLDER               # -> results/GPU/headline.json; once more adds what is missing
    python -m scripts.bench.headline --models "Kimi K2" --runs 5

A run of a model is a process of its own, and the models take turns, so that minutes lie between two runs of one model. In the
first run SonicMoE is tuned anew; --caches keeps what it compiles, and what it has tuned for the others. Kimi K2's programs do not
fit beside each other: each has a process of its own in every run. Within a run programs take turns (A B A B), five rounds, and
times are medians of the sums of kernel durations, as `scripts.bench.models` has them. results/README.md has the rule by which
sentences and tables are made of the runs.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.bench.common import REPOSITORY, folder_of, gpu_name, read_json
from scripts.bench.headline_tables import HEADLINE, MODELS_OF, PEERS, together
from scripts.bench.markdown import OURS
from scripts.bench.models.apart import measure_apart
from scripts.bench.models.layers import beside
from scripts.bench.models.shapes import BY_NAME
from scripts.bench.paper.layers import Case
from scripts.bench.running import Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row
from scripts.command import some_of

SECONDS = 540  # that a run may take: SonicMoE's first one compiles for minutes
APART = ("Kimi K2",)
TUNE_ANEW = {"QUACK_FORCE_CACHE_UPDATE": "1"}  # compiled kernels are kept, what was tuned is not read
HERE = "BENCH_HEADLINE_HERE"  # in the environment of a run's process, which measures
RUNS, MOST_RUNS = 3, 9  # of each model: by default, and at most


class Run(NamedTuple):
    """A case: one run of a model."""

    number: int
    label: str

    @property
    def key(self) -> Row:
        return Case(BY_NAME[self.label], label=self.label).key


def run_of(case: Run, machine: Machine) -> Row:
    """A run of a model in a process of its own; there all programs in turn, or each in its own."""
    if HERE in os.environ:
        shape, names = BY_NAME[case.label], [OURS, *PEERS]
        return measure_apart(names, shape, machine, passes=1) if case.label in APART else beside(shape, names, machine)
    first = case.number == 0
    words = ["--models", case.label, "--runs", "1", "--rounds", str(machine.rounds), "--out"]
    environment = os.environ | {HERE: "1"} | (TUNE_ANEW if first else {})
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.bench.headline", *words, folder]
        subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=SECONDS, check=True)
        record = read_json(Path(folder, "headline.json"))
    return record["rows"][0]["runs"][0] | {"launched": record.get("kernels", {}), "tuned_anew": first}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(resume=True)
    parser.add_argument("--models", type=some_of(BY_NAME), help=f"default: {', '.join(HEADLINE)}")
    what = f"of each model, default {RUNS}"
    parser.add_argument("--runs", type=int, choices=range(1, MOST_RUNS + 1), default=RUNS, metavar="N", help=what)


CASES = [Run(number, label) for number in range(MOST_RUNS) for label in BY_NAME]
BENCH = Bench(
    "headline",
    __doc__,
    {"runs": Item(run_of, CASES, key=of_case, rounds=5, together=together)},
    options=add_options,
    asked=lambda options, case: (
        case.number < options.runs and case.label in (options.models or MODELS_OF.get(folder_of(gpu_name()), HEADLINE))
    ),
)

if __name__ == "__main__":
    run(BENCH)
