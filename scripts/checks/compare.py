"""Does this checkout compute what another one does, to the bit, and in which time? Each runs in processes of its own.

    git worktree add .base COMMIT
    python -m scripts.checks.compare --old .base                        # bits: all cases, in about three minutes
    python -m scripts.checks.compare --old .base --only "up_forward"    # of them those whose names have this
    python -m scripts.checks.compare --old .base --time                 # GPU time of MoE over module.json's 30 shapes
    python -m scripts.checks.compare --old .base --lora                 # and of the layer of scripts.bench.lora
    python -m scripts.checks.compare --old .base --router               # and of routers, from one token on

Bits: every product, dispatch and router operator, ``moe_mlp`` and ``MoE``; hashes of outputs and gradients are compared, and
refusals word for word. What adds in an order that varies (combine="fused", "fused_both") runs several times on each side; two
sides agree where their nearest outputs differ by no more than one side's differ from each other, or by less than a rounding of
fp32. A case that the old side does not have is told and fails nothing.

Time: a forward and a backward as a CUDA graph, replayed by the two sides in turn (A B B A), medians over the rounds.

--device cpu runs the cases of a few tokens on the twins and the torch backend, to try this script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import queue
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from blazeproto import gemm
from blazeproto.gemm import Sizes
from scripts.bench import lora
from scripts.bench.common import (
    MIB,
    MODULE_SHAPES,
    REPOSITORY,
    cfg_of,
    format_table,
    geometric_mean,
    now,
    parse_shapes,
    write_json,
)
from scripts.bench.timing import relative_difference
from scripts.checks.compare_cases import products_of
from scripts.command import argument_parser, need_hopper, positive, refuse

Record = dict[str, Any]
SIDES = ("old", "new")
ROUNDING = 2.0**-24  # of an fp32 number: sums that lie nearer than that are the same sums in another order
CPU_TOKENS = 300  # of a case, at most, on a CPU
MOST_MEAN, MOST_RATIO, MOST_LORA = 1.01, 1.03, 1.01  # of the new side's time over the old one's
MANY_TOKENS = [Sizes(32768, 2048, 8, 128, 8), Sizes(16384, 4096, 8, 512, 8)]  # routers; n does not matter
FEW_TOKENS = [shape._replace(T=tokens) for shape in MANY_TOKENS for tokens in (1, 64, 1024)]
ROUTERS = ((MANY_TOKENS, 1.05), (FEW_TOKENS, 1.2))  # and how much longer they may take


class Failed(Exception):
    """What a worker's request raised."""


class Worker:
    """A process with one checkout's package: see compare_worker.py."""

    def __init__(self, root: Path, device: str) -> None:
        command = [sys.executable, "-P", "-m", "scripts.checks.compare_worker", str(root), device]
        further = filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *further])}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def ask(self, name: str, *arguments: object) -> Any:
        """What the request returns. Failed: it raised, or the process has ended."""
        assert self.process.stdin and self.process.stdout
        try:
            pickle.dump((name, arguments), self.process.stdin)
            self.process.stdin.flush()
            how, value = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise Failed(f"the process has ended with code {self.process.wait()}") from error
        if how == "failed":
            raise Failed(value)
        return value

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def together(work: Callable[[Any], Any], given: Iterable[Any]) -> list[Any]:
    """What ``work`` returns of each that is given, one thread for each; raises what one of them raised."""
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(work, given))


def roots(options: argparse.Namespace) -> dict[str, Path]:
    return {"old": options.old, "new": REPOSITORY}


# --- Bits ----------------------------------------------------------------------------------------------------------------


def wanted(names: list[str], options: argparse.Namespace) -> list[str]:
    """The names that --only has in it, and on a CPU those of a few tokens."""
    chosen = [name for name in names if not options.only or any(text in name for text in options.only)]
    return chosen if options.device == "cuda" else [name for name in chosen if tokens_of(name) <= CPU_TOKENS]


def tokens_of(name: str) -> int:
    """The T of a case whose name has a shape; 0 where it has none."""
    words = [word for word in name.replace(",", " ").split() if word[0] == "T" and word[1:].isdecimal()]
    return int(words[0][1:]) if words else 0


def run_side(root: Path, options: argparse.Namespace, made: Record) -> None:
    """Fills ``made`` with a record a case, or an "error"; several workers share the cases."""
    left: queue.Queue[str] = queue.Queue()

    def work(worker: Worker) -> None:
        while True:
            try:
                name = left.get_nowait()
            except queue.Empty:
                return
            try:
                made[name] = worker.ask("run", name)
            except Failed as error:
                made[name] = {"error": str(error)}
                if worker.process.poll() is not None:
                    return  # the other workers go on

    workers = [Worker(root, options.device) for _ in range(options.jobs)]
    try:
        names, *_ = [worker.ask("names", products_of(gemm)) for worker in workers]
        for name in wanted(names, options):
            left.put(name)
            made[name] = {"error": "not run: all processes have ended"}
        together(work, workers)
    finally:
        for worker in workers:
            worker.close()


def too_far(old: list[Any], new: list[Any]) -> str:
    """For outputs that vary: "" if the nearest of two sides are as near as the farthest of one, or nearer than a rounding."""
    own = max(relative_difference(*pair) for runs in (old, new) for pair in itertools.combinations(runs, 2))
    nearest = min(relative_difference(*pair) for pair in itertools.product(old, new))
    return "" if nearest <= max(own, ROUNDING) else f" ({nearest:.3g} apart, {own:.3g} from run to run)"


def difference(old: Record, new: Record) -> str:
    """What differs between two records of a case; "" if nothing does."""
    both = zip(SIDES, (old, new), strict=True)
    if errors := [f"{side} failed: {made['error']}" for side, made in both if "error" in made]:
        return "; ".join(errors)
    names = dict.fromkeys((*old["hashes"], *new["hashes"]))
    wrong = []
    for name in names:
        before, after = old["hashes"].get(name), new["hashes"].get(name)
        if before != after:
            refused = [text for text in (before, after) if text is None or ":" in text]
            wrong.append(f"{name}{f' (old {before}, new {after})' if refused else ''}")
    wrong += [
        name + far if name in old["runs"] else f"{name} (varies on the new side alone)"
        for name, runs in new["runs"].items()
        if name not in old["runs"] or (far := too_far(old["runs"][name], runs))
    ]
    return ", ".join(wrong)


def compare_bits(options: argparse.Namespace) -> Record:
    """The record of a comparison; prints it."""
    begin, made = time.monotonic(), {side: Record() for side in SIDES}
    together(lambda side: run_side(roots(options)[side], options, made[side]), SIDES)
    old, new = made["old"], made["new"]
    common = [name for name in old if name in new]
    texts = together(lambda name: difference(old[name], new[name]), common)
    differing = {name: text for name, text in zip(common, texts, strict=True) if text}
    differing |= {name: "the new side does not have it" for name in old if name not in new}
    groups = Counter(name.split(" ", 1)[0].rstrip(":") for name in old)
    lines = []
    for group, cases in groups.items():
        of_group = {name: record for name, record in new.items() if name.startswith(group) and name in old}
        hashes = [value for record in of_group.values() for value in record.get("hashes", {}).values()]
        varying = sum(len(record.get("runs", ())) for record in of_group.values())
        wrong = sum(name.startswith(group) for name in differing)
        refused = sum(":" in value for value in hashes)
        lines.append([group, *map(str, (cases, len(hashes) - refused, refused, varying, wrong))])
    for name, text in differing.items():
        print(f"{name}: {text}")
    if alone := [name for name in new if name not in old]:
        print(f"{len(alone)} cases on the new side alone, the first of them {alone[0]!r}")
    print(format_table(["", "cases", "outputs", "refusals", "varying", "cases that differ"], lines))
    seconds = time.monotonic() - begin
    print(f"{len(old)} cases, {len(differing) or 'none'} of which differ{'s' * (len(differing) == 1)}; {seconds:.0f} s")
    return {"cases": len(old), "differing": differing, "holds": bool(old) and not differing}


# --- Time ----------------------------------------------------------------------------------------------------------------


def warm(options: argparse.Namespace, kind: str, shapes: list[Sizes]) -> None:
    """Compile what the shapes need, on all cores: the cache is the processes' common one."""
    begin = time.monotonic()

    def work(root: Path, part: list[Sizes]) -> None:
        worker = Worker(root, options.device)
        for shape in part:
            worker.ask("warm", kind, shape[:5])
        worker.close()

    parts = [shapes[index :: options.jobs] for index in range(options.jobs)]
    together(lambda given: work(*given), itertools.product(roots(options).values(), parts))
    print(f"compiled for {len(shapes)} layers in {time.monotonic() - begin:.0f} s", flush=True)


def compare_times(options: argparse.Namespace, kind: str, shapes: list[Sizes]) -> list[Record]:
    """A row a shape: milliseconds and peaks of both sides."""
    warm(options, kind, shapes)
    begin, rows = time.monotonic(), []
    workers = {side: Worker(root, options.device) for side, root in roots(options).items()}
    for shape in shapes:
        if time.monotonic() - begin > options.time_budget:
            print(f"{shape} and what follows: left out, the time is over")
            break
        peaks = together(lambda side: workers[side].ask("load", kind, shape[:5]), SIDES)  # noqa: B023
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for index in range(options.rounds + 1):  # the first is thrown away
            for side in SIDES if index % 2 else reversed(SIDES):
                times[side].append(workers[side].ask("time"))
        together(lambda side: workers[side].ask("unload"), SIDES)
        row: Record = {"layer": kind, "cfg": cfg_of(shape)}
        row |= {f"{side}_ms": round(statistics.median(times[side][1:]), 5) for side in SIDES}
        row |= {f"{side}_peak_MiB": round(peak / MIB, 2) for side, peak in zip(SIDES, peaks, strict=True)}
        rows.append(row | {"ratio": round(row["new_ms"] / row["old_ms"], 5)})
        print("  ".join(cells(rows[-1])), flush=True)
    for worker in workers.values():
        worker.close()
    return rows


def cells(row: Record) -> list[str]:
    times = [f"{row['old_ms']:.4f}", f"{row['new_ms']:.4f}", f"{row['ratio']:.4f}"]
    return [row["layer"], *map(str, row["cfg"].values()), *times, *(f"{row[f'{side}_peak_MiB']:.1f}" for side in SIDES)]


def judge_times(rows: list[Record], mean_bound: float, bound: float, *, peaks: bool = True) -> bool:
    """Prints a table and whether the bounds hold.  peaks: whether one that is higher counts."""
    ratios = [row["ratio"] for row in rows]
    higher = [row["cfg"] for row in rows if row["new_peak_MiB"] > row["old_peak_MiB"]]
    mean, worst = geometric_mean(ratios), max(ratios, default=float("nan"))
    header = ["layer", *"TdnEK", "old ms", "new ms", "new/old", "old MiB", "new MiB"]
    print(format_table(header, [cells(row) for row in rows]))
    print(f"new / old: geometric mean {mean:.4f}, at most {mean_bound}; most {worst:.4f}, at most {bound}")
    print(f"peaks that are higher: {higher or 'none'}")
    return mean <= mean_bound and worst <= bound and not (peaks and higher)


# --- Command line --------------------------------------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.checks.compare", __doc__)
    parser.add_argument("--old", type=lambda word: Path(word).resolve(), required=True, help="the other checkout")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--time", action="store_true", help="time MoE")
    parser.add_argument("--lora", action="store_true", help="time experts with low-rank factors")
    parser.add_argument("--router", action="store_true", help="time routers")
    parser.add_argument(
        "--shapes",
        type=partial(parse_shapes, shapes=MODULE_SHAPES),
        default=list(MODULE_SHAPES),
        help="of --time: numbers such as 1-3,27",
    )
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--jobs", type=positive, default=7, help="processes a side that compile, and that compute bits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file of results to write")
    options = parser.parse_args(words)
    if not (options.old / "blazeproto" / "__init__.py").is_file():
        parser.error(f"--old: expected a folder that blazeproto/ is in, got {options.old}")
    return options


def main() -> int:
    options = arguments()
    if options.device == "cuda":
        need_hopper()
    elif options.time or options.lora or options.router:
        refuse("--time, --lora and --router need a GPU; nothing was run")
    record: Record = {"benchmark": "compare", "measured": now(), "old": options.old.name}
    holds = []
    if options.time:
        record["rows"] = compare_times(options, "module", options.shapes)
        holds.append(judge_times(record["rows"], MOST_MEAN, MOST_RATIO))
    if options.lora:
        record["lora_rows"] = compare_times(options, "lora", [lora.SHAPE])
        holds.append(judge_times(record["lora_rows"], MOST_LORA, MOST_LORA))
    if options.router:
        record["router_rows"] = compare_times(options, "router", [shape for shapes, _ in ROUTERS for shape in shapes])
        for shapes, bound in ROUTERS:
            of_these = [row for row in record["router_rows"] if row["cfg"] in map(cfg_of, shapes)]
            holds.append(judge_times(of_these, bound, bound, peaks=False))
    if not holds:
        record["bits"] = compare_bits(options)
        holds.append(record["bits"]["holds"])
    if options.out:
        write_json(options.out, record)
    print("holds" if all(holds) else "FAILS")
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
