"""How benchmarks run: a program's items, of each item the cases in turn, each case's rows written as soon as they are there.

A benchmark declares a `Bench` of `Item`s, and is started by `run`. All have the same options, and one place for results:
results/GPU/FILE.json, FILE-quick.json with --quick, and with --cpu only what --out names. In a file a case's rows take the place
of its earlier ones; other rows stay. Its earlier rows stay too if a program in them is absent now (not installed, for example).
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.bench import identity
from scripts.bench.common import (
    RESULTS,
    begun,
    cfg_of,
    folder_of,
    gpu_name,
    in_turn,
    parse_shapes,
    read_json,
    stamped,
    write_json,
)
from scripts.bench.timing import Machine, Row
from scripts.command import argument_parser, need_kernels, positive, some_of
from scripts.lm.ranks import Ranks, joined

TIMEOUT = 600  # seconds that a rank waits for another


def of_shape(shape: Any) -> Row:
    return {"cfg": cfg_of(shape)}


def of_case(case: Any) -> Any:
    return case.key


@dataclass(frozen=True)
class Item:
    """A function that makes rows, its cases, and the place of the rows in a file.

    measure: makes a case's row, or its rows, without the fields of ``key``.  cases: in full; quick: by --quick; short: on a CPU.
    key: the fields of a row by which it is known to be a case's.
    file: of results; the program's by default.  part: of the file, with "/" between nested names.  single: the part is one row.
    peers: programs beside ours that it has.  rounds: of which times are medians.
    seconds: that items before it leave to it.
    together: makes one row of a case's runs, which have a ``number`` from 0, and keeps them under "runs".
    """

    measure: Callable[[Any, Machine], Row | list[Row]]
    cases: Sequence[Any]
    short: Sequence[Any] = ()
    quick: Sequence[Any] = ()
    key: Callable[[Any], Row] = of_shape
    file: str = ""
    part: str = "rows"
    single: bool = False
    peers: tuple[str, ...] = ()
    rounds: int = 20
    seconds: float = 0.0
    together: Callable[[list[Row]], Row] | None = None


@dataclass(frozen=True)
class Bench:
    """A program that measures.

    name: of its module and, if an item has none, of the results file.  default: the items of which it is, all if none are named.
    head: fields of a file's head.  paragraphs: the last ones of ``doc``, which say how it is measured.
    bounds: what is asked of a file's record, in words, and whether it holds.
    peers: that --peers takes; a row then has those it was measured with.  goes_on: rows that are there need --again.
    ranks: whether the processes of torchrun measure together; a row then has their number, "gpus".
    options: adds further ones to a parser; ``asked``: whether with these a case is asked for.  prepare: runs before all.
    """

    name: str
    doc: str | None
    items: Mapping[str, Item]
    default: tuple[str, ...] = ()
    head: Row = field(default_factory=dict)
    paragraphs: int = 1
    bounds: Callable[[Row], Iterable[tuple[str, bool]]] = lambda record: ()
    peers: tuple[str, ...] = ()
    goes_on: bool = False
    ranks: bool = False
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    asked: Callable[[argparse.Namespace, Any], bool] = lambda options, case: True
    prepare: Callable[[argparse.Namespace, Ranks], object] = lambda options, ranks: None


class Job(NamedTuple):
    """One case of an item."""

    name: str
    item: Item
    case: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.case}"


# -------------------------------------------------------------------------------------------------------------- options


def options_of(bench: Bench, words: list[str] | None = None) -> argparse.Namespace:
    """The command line's options; ``jobs``: the cases."""
    parser, items = argument_parser(f"scripts.bench.{bench.name}", bench.doc), bench.items
    parser.set_defaults(peers=[], quick=False, cpu=False)
    if bench.goes_on:
        parser.add_argument(
            "parts", nargs="+", choices=[*items, "all"], metavar="NAME", help=f"of {', '.join(items)}; or all"
        )
        parser.add_argument("--again", dest="resume", action="store_false", help="measure what the files have too")
    else:
        parser.add_argument(
            "--parts", type=some_of(items), default=[*(bench.default or items)], help=f"of {', '.join(items)}"
        )
        parser.add_argument(
            "--resume", action="store_true", help="leave out what the file has of the same kernels and benchmark"
        )
    parser.add_argument("--rounds", type=positive, help="of which times are medians")
    parser.add_argument("--configs", help="numbers such as 1-3,23: of the cases in their order")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of results (default results/GPU)")
    parser.add_argument(
        "--time-budget", type=float, default=math.inf, metavar="SECONDS", help="skip what would start later"
    )
    if bench.peers:
        parser.add_argument(
            "--peers", type=some_of(bench.peers), default=[*bench.peers], help=f"of {', '.join(bench.peers)}"
        )
    if any(item.quick for item in items.values()):
        parser.add_argument("--quick", action="store_true", help="few cases, a third of the rounds -> NAME-quick.json")
    if any(item.short for item in items.values()):
        parser.add_argument("--cpu", action="store_true", help="the short form, on a CPU")
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="for what SonicMoE compiles and tunes")
    bench.options(parser)
    options = parser.parse_args(words)
    if options.cpu and options.quick:
        parser.error("--quick: expected none with --cpu, which is short")
    form = "short" if options.cpu else "quick" if options.quick else "cases"
    options.jobs = [
        Job(name, item, case)
        for name, item in items.items()
        if {name, "all"} & {*options.parts}
        for case in getattr(item, form)
        if bench.asked(options, case)
    ]
    if options.configs:
        try:
            options.jobs = parse_shapes(options.configs, options.jobs)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --configs: {error}")
    return options


def use_caches(folder: Path) -> None:
    """Before SonicMoE is imported: its QuACK products, their tuning, and its Triton kernels are kept under ``folder``."""
    os.environ |= {f"{owner}_CACHE_DIR": str(folder.resolve() / owner.lower()) for owner in ("QUACK", "TRITON")}


# -------------------------------------------------------------------------------------------------------------- records


def place_of(record: Row, item: Item) -> tuple[Row, str]:
    """The record that holds an item's part, and its name there."""
    *outer, name = item.part.split("/")
    for each in outer:
        record = record.setdefault(each, {})
    return record, name


def rows_at(record: Row, item: Item) -> list[Row]:
    """The rows of an item's part."""
    holder, name = place_of(record, item)
    found = holder.get(name, [])
    return found if isinstance(found, list) else [found]


def is_of(row: Row, key: Row) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def todays(record: Row, item: Item, key: Row, peers: Iterable[str] = ()) -> list[Row]:
    """A case's rows with these peers, of the kernels and the benchmark that are here; none if one is of others."""
    rows = [row for row in rows_at(record, item) if is_of(row, key)]
    return [] if any(identity.earlier(row) or {*peers} - {*row.get("peers", peers)} for row in rows) else rows


def put(record: Row, item: Item, key: Row, rows: list[Row], order: Sequence[Row]) -> None:
    """A case's rows into the record, in the place of its last. order: the keys of all cases, by which rows are sorted."""

    def place(row: Row) -> tuple[int, int]:
        return next((number for number, each in enumerate(order) if is_of(row, each)), len(order)), row.get("gpus", 0)

    holder, name = place_of(record, item)
    others = [row for row in rows_at(record, item) if not is_of(row, key)]
    holder[name] = rows[0] if item.single else sorted([*others, *rows], key=place)


def measured(measure: Callable[[Any, Machine], Row | list[Row]], key: Row, case: Any, machine: Machine) -> list[Row]:
    """A case's rows, stamped, with the kernels that other processes launched, which a row has under "launched" until then."""
    made = stamped(measure, case, machine)
    rows = [key | row for row in (made if isinstance(made, list) else [made])]
    for row in rows:
        elsewhere = row.pop("launched", {})
        identity.KERNELS.update(elsewhere)
        row["of"]["kernels"] = sorted({*row["of"]["kernels"], *elsewhere})
    return rows


def lost_programs(before: list[Row], rows: list[Row]) -> str:
    """The programs that are absent in rows and that a row before has, and why; "" if none.

    A row names its programs, or its peers, or those alone that are absent.
    """
    return "; ".join(
        f"{name} is absent now ({why}); the row that has it stays, --out FOLDER writes elsewhere"
        for name, why in dict.fromkeys(each for row in rows for each in row.get("absent", {}).items())
        if any(
            name in {*(row.get("programs") or row.get("peers", [name]))} - {*row.get("absent", {})} for row in before
        )
    )


# ------------------------------------------------------------------------------------------------------------------ run


def run(bench: Bench, words: list[str] | None = None) -> None:
    """Measure what is asked for, write each row, and show the tables of the files and what holds of the bounds.

    Exit status 1 where a case failed, 130 after Ctrl-C: the same command with --resume goes on.
    """
    options = options_of(bench, words)
    if not options.cpu:
        need_kernels()
    if options.caches is not None:
        use_caches(options.caches)
    with joined("cpu" if options.cpu else "cuda", TIMEOUT) as ranks:
        bench.prepare(options, ranks)
        try:
            failed = _run(bench, options, ranks)
        except KeyboardInterrupt:
            print("stopped")
            sys.exit(130)
    if failed:
        sys.exit(1)


def _run(bench: Bench, options: argparse.Namespace, ranks: Ranks) -> bool:
    """Whether a case failed."""
    folder = options.out or (None if options.cpu else RESULTS.parent / folder_of(gpu_name()))
    files = {name: item.file or bench.name for name, item in bench.items.items()}
    asked = dict.fromkeys(files[job.name] for job in options.jobs)
    paths = {file: folder and folder / f"{file}{'-quick' if options.quick else ''}.json" for file in asked}
    records = ranks.told({file: kept_in(path) for file, path in paths.items()})
    for name, item in bench.items.items():
        if files[name] in records and not item.single:
            holder, part = place_of(records[files[name]], item)
            holder.setdefault(part, [])
    gpus = {"gpus": ranks.size} if bench.ranks else {}
    peers = {name: [peer for peer in options.peers if peer in item.peers] for name, item in bench.items.items()}

    def kept(job: Job) -> list[Row]:
        """The rows that are there, or the runs."""
        rows = todays(records[files[job.name]], job.item, job.item.key(job.case) | gpus, peers[job.name])
        return [run for row in rows for run in row["runs"]] if job.item.together else rows

    def is_there(job: Job) -> bool:
        return len(kept(job)) > (job.case.number if job.item.together else 0)

    left = [job for job in options.jobs if not (options.resume and ranks.told(is_there(job)))]
    for file, record in records.items():
        record |= begun(file.rpartition("/")[2], bench.doc, bench.paragraphs, **bench.head)
    names = [*dict.fromkeys(job.name for job in left)]

    def later(job: Job) -> float:
        return sum(bench.items[name].seconds for name in names[names.index(job.name) + 1 :])

    turns = in_turn(left, options.time_budget, later=later, agreed=ranks.told)
    for place, job in enumerate(turns, 1):
        item, record, path = job.item, records[files[job.name]], paths[files[job.name]]
        rounds = options.rounds or (1 if options.cpu else max(2, item.rounds // 3) if options.quick else item.rounds)
        machine = Machine(ranks.device.type, rounds, tuple(peers[job.name]), ranks)
        key, begin = item.key(job.case) | gpus, time.monotonic()
        torch.manual_seed(0)
        try:
            rows = measured(item.measure, key, job.case, machine)
            replaced = [] if item.together and kept(job) else [row for row in rows_at(record, item) if is_of(row, key)]
            failure = lost_programs(replaced, rows)
        except Exception as error:
            if ranks.size > 1:  # the others wait for this one
                raise
            failure = f"{type(error).__name__}: {str(error)[:200]}"  # out of memory, say: the other rows are measured
        if failure:
            rows, record["failed"] = [], record.get("failed", {}) | {str(job): failure}
        if ranks.first:
            ended = f"{time.monotonic() - begin:.1f} s{'; failed: ' * bool(failure)}{failure}"
            print(f"{place} of {len(left)}, {job}: {ended}", flush=True)
            rows = [row | ({"peers": peers[job.name]} if bench.peers else {}) for row in rows]
            alike = [each for each in bench.items.values() if each.part == item.part and each.file == item.file]
            if rows:
                rows = [item.together([*kept(job), *rows])] if item.together else rows
                put(record, item, key, rows, [each.key(case) for each in alike for case in (*each.cases, *each.short)])
            if path:
                write_json(path, record)
    if ranks.first:
        from scripts.bench.result_tables import TABLES

        for file, record in records.items():
            tables = [make(record) for of, make in TABLES.values() if of == file]
            verdicts = [f"{'holds' if holds else 'FAILS'}  {what}" for what, holds in bench.bounds(record)]
            print(*tables, *verdicts, sep="\n\n")
            print(f"wrote {paths[file]}" if left and paths[file] else f"nothing to add to {paths[file] or 'a file'}")
    return any("failed" in record for record in records.values())


def kept_in(path: Path | None) -> Row:
    """The record of an earlier run, without what failed in it."""
    record = read_json(path) if path and path.exists() else {}
    return {name: each for name, each in record.items() if name != "failed"}
