"""The headline: layers of models beside SonicMoE's module and two grouped_mm programs, the median of several runs of each.

    python -m scripts.bench.headline --caches FOLDER               # -> results/GPU/headline.json; once more adds what is missing
    python -m scripts.bench.headline --models "Kimi K2" --runs 5
    python -m scripts.bench.headline --merge A.json B.json         # two files of runs on equal GPUs as one

A run of a model is a process of its own, and the models take turns, so that minutes lie between two runs of one model. In the
first run SonicMoE is tuned anew; --caches keeps what it compiles, and what it has tuned for the others. Kimi K2's programs do not
fit beside each other: each has a process of its own in every run. Within a run programs take turns (A B A B), five rounds, and
times are medians of the sums of kernel durations, as `scripts.bench.models` has them. results/README.md has the rule by which
sentences and tables are made of the runs.
"""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.bench.common import REPOSITORY, RESULTS, begun, folder_of, gpu_name, in_turn, read_json, write_json
from scripts.bench.headline_tables import HEADLINE, MODELS_OF, PEERS, RUNS, together
from scripts.bench.identity import earlier
from scripts.bench.markdown import OURS
from scripts.bench.models.apart import measure_apart
from scripts.bench.models.layers import beside
from scripts.bench.models.shapes import BY_NAME
from scripts.bench.paper.layers import Case
from scripts.bench.running import measured, use_caches
from scripts.bench.timing import Machine, Row
from scripts.command import argument_parser, need_hopper, positive, some_of

ROUNDS = 5
SECONDS = 540  # that a run may take: SonicMoE's first one compiles for minutes
APART = ("Kimi K2",)
TUNE_ANEW = {"QUACK_FORCE_CACHE_UPDATE": "1"}  # compiled kernels are kept, what was tuned is not read


def run_of(case: Case, machine: Machine) -> Row:
    """A run of a model: all programs in this process, in turn, or each in its own."""
    names = [OURS, *machine.peers]
    if case.label in APART:
        return measure_apart(names, case.shape, machine, passes=1)
    return beside(case.shape, names, machine)


def in_process(label: str, anew: bool) -> Row:
    """A run in a process of its own. RuntimeError where it failed."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        command = [sys.executable, "-m", "scripts.bench.headline", "--child", label, "--out", str(out)]
        environment = os.environ | (TUNE_ANEW if anew else {})
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=SECONDS, check=False)
        if done.returncode or not out.exists():
            raise RuntimeError(f"the run of {label} ended with exit code {done.returncode}")
        (row,) = read_json(out)["rows"]
        return row | {"tuned_anew": anew}


def with_runs(rows: list[Row], label: str, runs: list[Row]) -> list[Row]:
    """The rows with one more, in the place of its model's last, in the order of the headline."""
    order = {name: place for place, name in enumerate(BY_NAME)}
    return sorted(
        [row for row in rows if row["label"] != label] + [together(runs)], key=lambda row: order[row["label"]]
    )


def merged(records: list[Row]) -> Row:
    """The first record with all runs of all. ValueError where two rows of a model are of other GPUs, kernels or benchmarks."""
    made, rows = dict(records[0]), list[Row]()
    for label in {row["label"] for record in records for row in record["rows"]}:
        runs = [run for record in records for row in record["rows"] if row["label"] == label for run in row["runs"]]
        rows = with_runs(rows, label, sorted(runs, key=lambda run: str(run["of"]["measured"])))
    return made | {"rows": rows}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.bench.headline", __doc__)
    parser.add_argument("--models", type=some_of(tuple(BY_NAME)), help=f"default: {', '.join(HEADLINE)}")
    parser.add_argument("--runs", type=positive, default=RUNS, help=f"of each model, default {RUNS}")
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="for what SonicMoE compiles and tunes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: results/GPU/headline.json")
    parser.add_argument(
        "--time-budget", type=float, default=math.inf, metavar="SECONDS", help="skip what would start later"
    )
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="only merge files, into --out")
    parser.add_argument("--child", choices=[*BY_NAME], help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.merge and options.out is None:
        parser.error("--merge: expected --out FILE, got none")
    return options


def main() -> None:
    options = arguments()
    if options.merge:
        write_json(options.out, merged([read_json(path) for path in options.merge]))
        return
    need_hopper()
    if options.child:  # one run, in this process
        case = Case(BY_NAME[options.child].sizes, label=options.child)
        write_json(options.out, {"rows": measured(run_of, case.key, case, Machine("cuda", ROUNDS, PEERS))})
        return
    if options.caches is not None:
        use_caches(options.caches)
    gpu = folder_of(gpu_name())
    out = options.out or RESULTS.parent / gpu / "headline.json"
    record = begun("headline", __doc__) | {"rows": read_json(out)["rows"] if out.exists() else []}
    models = options.models or MODELS_OF.get(gpu, HEADLINE)
    known: dict[str, list[Row]] = {label: [] for label in models}
    known |= {row["label"]: row["runs"] for row in record["rows"] if not earlier(row)}
    missing = [(number, label) for number in range(options.runs) for label in models if number >= len(known[label])]
    for number, label in in_turn(missing, options.time_budget):
        try:
            run = in_process(label, anew=number == 0)
        except (RuntimeError, subprocess.SubprocessError) as error:  # the other models are measured
            print(error, flush=True)
            continue
        known[label].append(run)
        record["rows"] = with_runs(record["rows"], label, known[label])
        write_json(out, record)
        times = {name: each["fwdbwd_ms"] for name, each in run["programs"].items()}
        print(f"{label}, run {number + 1}: {times}", flush=True)


if __name__ == "__main__":
    main()
