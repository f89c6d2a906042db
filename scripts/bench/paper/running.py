"""How items are run: their rows one after the other, those that a file has left out, each written as soon as it is there.

`scripts.bench.paper` and `scripts.bench.models` are two lists of items that are run so.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.bench import identity
from scripts.bench.common import begun, in_turn, read_json, stamped, write_json
from scripts.bench.module import use_caches
from scripts.bench.paper.items import Item
from scripts.bench.paper.layers import Case, Row
from scripts.bench.paper.machine import Machine
from scripts.bench.paper.tables import Shown, notes, terminal
from scripts.command import argument_parser, positive, some_of


def row_of(case: Case, record: Row, peers: tuple[str, ...]) -> Row | None:
    """The record's row of a case with these peers, of the kernels and the benchmark that are here."""
    for row in record["rows"]:
        if (
            all(row[name] == value for name, value in case.key.items())
            and set(peers) <= set(row["peers"])
            and not identity.earlier(row)
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


def measured(item: Item, case: Case, machine: Machine) -> Row:
    """A case's row, stamped; with the kernels that other processes launched, which it has under "launched" until then."""
    row: Row = stamped(item.measure, case, machine)
    elsewhere = row.pop("launched", {})
    identity.KERNELS.update(elsewhere)
    row["of"]["kernels"] = sorted({*row["of"]["kernels"], *elsewhere})
    return row


def run(
    name: str,
    item: Item,
    tables: Collection[Shown],
    doc: str | None,
    options: argparse.Namespace,
    seconds: float,
    console: Console,
) -> None:
    """Measure an item's rows that are not there and can begin in ``seconds``, write each, and show the tables."""
    device = "cpu" if options.cpu else "cuda"
    cases = item.short if options.cpu else item.cases
    peers = tuple(peer for peer in options.peers if peer in item.peers)
    rounds = options.rounds or (1 if options.cpu else item.rounds)
    out = options.out / f"{name}.json" if options.out else None
    record = begun(name, doc)
    kept = read_json(out) if out and out.exists() else {}
    record |= {"rows": kept.get("rows", [])}
    machine = Machine(device, rounds, peers)
    left = [case for case in cases if options.again or row_of(case, record, peers) is None]
    failed: dict[str, str] = {}
    for place, case in enumerate(in_turn(left, seconds), 1):
        console.print(f"{name}, {place} of {len(left)}: {case}", highlight=False)
        begin = time.monotonic()
        try:
            row = measured(item, case, machine) | {"peers": list(peers)}
        except Exception as error:  # noqa: BLE001  out of memory, say: the other rows are measured
            failed[str(case)] = f"{type(error).__name__}: {str(error)[:200]}"
            console.print(f"  failed: {failed[str(case)]}", highlight=False)
            continue
        console.print(f"  {time.monotonic() - begin:.1f} s", highlight=False)
        record["rows"] = with_row(record["rows"], row, cases)
        if out:
            write_json(out, record)
    if failed and out:
        write_json(out, record | {"failed": failed})
    shown = [each for each in tables if each.item == name and each.rows(record["rows"])]
    for each in shown:
        console.print(terminal(each, record))
    if shown:
        console.print(notes(shown[-1], record), highlight=False)
    console.print(f"wrote {out}" if out and record["rows"] else "wrote nothing", highlight=False)


def options_parser(
    module: str, doc: str | None, items: Mapping[str, Item], peers: tuple[str, ...]
) -> argparse.ArgumentParser:
    parser = argument_parser(f"scripts.bench.{module}", doc)
    names = f"of {', '.join(items)}; or all"
    parser.add_argument("names", nargs="+", choices=[*items, "all"], metavar="NAME", help=names)
    parser.add_argument("--rounds", type=positive, help="default: 5 to 15, by item")
    parser.add_argument("--peers", type=some_of(peers), default=list(peers), help=f"of {', '.join(peers)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: results/GPU/{module}")
    parser.add_argument("--again", action="store_true", help="measure what the files have too")
    what = "skip what would start later"
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS", help=what)
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="for what SonicMoE compiles and tunes")
    parser.add_argument("--cpu", action="store_true", help="the short form, on a CPU")
    return parser


def run_all(
    items: Mapping[str, Item], tables: Mapping[str, Shown], doc: str | None, options: argparse.Namespace
) -> None:
    """Those that are named, in the order of ``items``; each leaves those after it the seconds that they are expected to take."""
    if options.caches is not None:
        use_caches(options.caches)
    console: Any = Console(width=None if sys.stdout.isatty() else 240)
    begin = time.monotonic()
    names = [name for name in items if "all" in options.names or name in options.names]
    try:
        for place, name in enumerate(names):
            kept = sum(items[later].seconds for later in names[place + 1 :])
            left = options.time_budget - (time.monotonic() - begin) - kept
            run(name, items[name], tables.values(), doc, options, left, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on")
        sys.exit(130)
