"""The papers' tables and figures, measured here beside what they print.

    python -m scripts.bench.paper moeblaze-figures        # -> results/h100/paper/moeblaze-figures.json on an H100
    python -m scripts.bench.paper moeblaze-scale sonicmoe-layers --time-budget 120
    python -m scripts.bench.paper all                     # one after the other
    python -m scripts.bench.paper combine --rounds 20 --again
    python -m scripts.bench.paper all --cpu               # a short form on a CPU: tables alone, or files with --out FOLDER

Rows that a file has of the same kernels and benchmark are kept, so that a run that ended early, at --time-budget or by Ctrl-C,
goes on with the same command. A peer that does not run is a reason in the row. SonicMoE compiles for minutes at first: --caches
keeps what it made.

Layers in bf16, random data, uniform routing, dispatch included, routers not. Times are medians of rounds in which all programs
run in turn: GPU time by CUDA-graph replay, or the sum of kernel durations where one of those that are compared can't be captured;
eager: host time included. saved: what autograd keeps for backward, weights excluded; peak: the most that is allocated in forward
and backward over what was there before, gradients included. Floors are of this GPU's own rates, measured at the beginning.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.bench.common import (
    RESULTS,
    begun,
    gpu_name,
    in_turn,
    read_json,
    stamped,
    write_json,
)
from scripts.bench.identity import earlier
from scripts.bench.module import use_caches
from scripts.bench.paper.items import ALL_PEERS, ITEMS, Item
from scripts.bench.paper.layers import Case, Row
from scripts.bench.paper.machine import Machine, Rates, measure_rates
from scripts.bench.paper.tables import SHOWN, notes, terminal
from scripts.command import argument_parser, need_hopper, positive, some_of


def folder_of(gpu: str) -> str:
    """The folder of a GPU's results: "h100" of "NVIDIA H100 80GB HBM3, driver ..."."""
    found = re.search(r"\b[A-Z]+\d+", gpu.upper().replace("NVIDIA", ""))
    return found[0].lower() if found else "other"


def row_of(case: Case, record: Row, peers: tuple[str, ...]) -> Row | None:
    """The record's row of a case with these peers, of the kernels and the benchmark that are here."""
    for row in record["rows"]:
        if (
            all(row[name] == value for name, value in case.key.items())
            and set(peers) <= set(row["peers"])
            and not earlier(row)
        ):
            return dict(row)
    return None


def with_row(rows: list[Row], row: Row, cases: tuple[Case, ...]) -> list[Row]:
    """The rows with one more, in the place of its case's last; in the order of the cases."""
    keys = [case.key for case in cases]

    def key(one: Row) -> Row:
        return {name: one[name] for name in keys[0]}

    rows = [other for other in rows if key(other) != key(row)] + [row]
    return sorted(rows, key=lambda one: keys.index(key(one)) if key(one) in keys else len(keys))


def run(name: str, options: argparse.Namespace, seconds: float, console: Console) -> None:
    """Measure an item's rows that are not there and can begin in ``seconds``, write each, and show the tables."""
    item: Item = ITEMS[name]
    device = "cpu" if options.cpu else "cuda"
    cases = item.short if options.cpu else item.cases
    peers = tuple(peer for peer in options.peers if peer in item.peers)
    rounds = options.rounds or (1 if options.cpu else item.rounds)
    out = options.out / f"{name}.json" if options.out else None
    record = begun(name, __doc__)
    kept = read_json(out) if out and out.exists() else {}
    record |= {"rows": kept.get("rows", [])}
    known = kept.get("rates")
    fresh = known and not options.again and not earlier(known) and known["of"]["gpu"] == gpu_name()
    record["rates"] = known if fresh else stamped(measure_rates, device, rounds)
    machine = Machine(device, rounds, Rates(record["rates"]["operations"], record["rates"]["bytes"]), peers)
    left = [case for case in cases if options.again or row_of(case, record, peers) is None]
    failed: dict[str, str] = {}
    for place, case in enumerate(in_turn(left, seconds), 1):
        console.print(f"{name}, {place} of {len(left)}: {case}", highlight=False)
        try:
            row = stamped(item.measure, case, machine) | {"peers": list(peers)}
        except Exception as error:  # noqa: BLE001  out of memory, say: the other rows are measured
            failed[str(case)] = f"{type(error).__name__}: {str(error)[:200]}"
            console.print(f"  failed: {failed[str(case)]}", highlight=False)
            continue
        record["rows"] = with_row(record["rows"], row, cases)
        if out:
            write_json(out, record)
    if failed and out:
        write_json(out, record | {"failed": failed})
    tables = [shown for shown in SHOWN.values() if shown.item == name and shown.rows(record["rows"])]
    for shown in tables:
        console.print(terminal(shown, record))
    if tables:
        console.print(notes(tables[-1], record), highlight=False)
    console.print(f"wrote {out}" if out and record["rows"] else "wrote nothing", highlight=False)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.bench.paper", __doc__)
    names = f"of {', '.join(ITEMS)}; or all"
    parser.add_argument("names", nargs="+", choices=[*ITEMS, "all"], metavar="NAME", help=names)
    parser.add_argument("--rounds", type=positive, help="default: 5 to 15, by item")
    parser.add_argument("--peers", type=some_of(ALL_PEERS), default=list(ALL_PEERS), help=f"of {', '.join(ALL_PEERS)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: results/GPU/paper")
    parser.add_argument("--again", action="store_true", help="measure what the files have too")
    what = "skip what would start later"
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS", help=what)
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="for what SonicMoE compiles and tunes")
    parser.add_argument("--cpu", action="store_true", help="the short form, on a CPU")
    options = parser.parse_args(words)
    options.names = [*ITEMS] if "all" in options.names else list(dict.fromkeys(options.names))
    return options


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if not options.cpu:
        need_hopper()
        options.out = options.out or RESULTS.parent / folder_of(gpu_name()) / "paper"
    if options.caches is not None:
        use_caches(options.caches)
    console: Any = Console(width=None if sys.stdout.isatty() else 240)
    begin = time.monotonic()
    try:
        for name in options.names:
            run(name, options, options.time_budget - (time.monotonic() - begin), console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on")
        sys.exit(130)


if __name__ == "__main__":
    main()
