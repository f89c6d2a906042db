"""Markdown of results: tables, numbers, shapes, and where, when and with which kernels rows were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scripts.bench.identity import earlier

Record = dict[str, Any]
Column = tuple[str, Callable[[Record], str]]

OURS = "blazeproto"
LABELS = {
    OURS: "blazeproto",
    "sonic": "SonicMoE",
    "bmm_ub": "bmm bound",
    "torch_grouped": "torch grouped_mm",
    "scattermoe": "ScatterMoE",
    "mb_sparse": "MegaBlocks",
    "grouped_mm": "transformers grouped_mm",
    "liger": "Liger",
    "quack": "QuACK",
    "dmoe": "dMoE",
    "sequential": "in sequence",
}


NOT_MEASURED = "Not measured."


EARLIER = {"kernels": "of earlier kernels", "benchmark": "by an earlier form of the benchmark"}
SIGNS = {"kernels": " †", "benchmark": " ‡"}
NAMES = {
    "torch": "torch",
    "sonic-moe": "SonicMoE",
    "quack-kernels": "QuACK",
    "transformers": "transformers",
    "peft": "peft",
    "megablocks": "MegaBlocks",
    "stanford-stk": "stk",
    "triton": "Triton",
    "torchao": "torchao",
    "sgl-deep-gemm": "DeepGEMM",
    "liger-kernel": "Liger",
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def signs_of(rows: Sequence[Record]) -> list[str]:
    """The mark of each row that earlier kernels made; none if `origin` says the same of all."""
    reasons = [earlier(row) for row in rows]
    return [SIGNS.get(reason, "") if len(set(reasons)) > 1 else "" for reason in reasons]


def table(rows: Iterable[Record], columns: Sequence[Column]) -> str:
    """A line a row; a column is its name and what makes a cell of a row. The first cell has a row's mark."""
    rows = list(rows)
    lines = [[cell(row) for _, cell in columns] for row in rows]
    for line, sign in zip(lines, signs_of(rows), strict=True):
        line[0] += sign
    return markdown_table([name for name, _ in columns], lines)


def with_figures(rows: Iterable[Record], columns: Sequence[Column]) -> list[Column]:
    """The columns without those in which nothing was measured, but for one that names a group ("saved MiB: ours")."""
    rows = list(rows)
    return [each for each in columns if ": " in each[0] or {each[1](row) for row in rows} != {number(None)}]


def versions_of(rows: Sequence[Record], names: Sequence[str]) -> str:
    """The versions of packages with which rows were measured: "torch 2.11.0, SonicMoE 0.1.2"."""
    pairs = {tuple(each.split(" ", 1)) for row in rows for each in row["of"]["versions"].split(", ")}
    return ", ".join(f"{NAMES[name]} {version}" for name in names for found, version in sorted(pairs) if found == name)


def caveat(rows: Sequence[Record]) -> str:
    """Tells the rows that earlier kernels made: "of earlier kernels", or "3 of 27 of earlier kernels"; empty for none."""
    reasons = [earlier(row) for row in rows]
    counts = {said: reasons.count(reason) for reason, said in EARLIER.items() if reason in reasons}
    return ", ".join(said if count == len(rows) else f"{count} of {len(rows)} {said}" for said, count in counts.items())


def origin(rows: Iterable[Record], *packages: str) -> str:
    """The GPU, dates and ``packages`` of rows and all of their runs, and the rows that earlier kernels made."""
    rows = [run for row in rows for run in row.get("runs", [row])]
    if not rows:
        return ""
    gpus, dates = sorted({row["of"]["gpu"] for row in rows}), sorted({row["of"]["measured"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0].removesuffix(' UTC')} to {dates[-1]}"
    where = "; ".join(filter(None, [*gpus, versions_of(rows, packages), when]))
    reasons = {reason: sign.strip() for reason, sign in SIGNS.items() if reason in map(earlier, rows)}
    if not any(signs_of(rows)):
        notes = [f" **{said[0].upper()}{said[1:]}.**" for reason, said in EARLIER.items() if reason in reasons]
    else:
        notes = [f" {sign}: {EARLIER[reason]}." for reason, sign in reasons.items()]
    return f"{where}.{''.join(notes)}"


def figure(*path: str, digits: int = 2) -> Callable[[Record], str]:
    """Makes a cell of a number in a row; a dash if the row lacks it."""

    def cell(row: Record) -> str:
        found: Any = row
        for key in path:
            found = found.get(key) if found else None
        return number(found, digits)

    return cell


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}".replace(",", " ")


def shape_of(row: Record) -> list[str]:
    return [str(row["cfg"][key]) for key in ("T", "d", "n", "E", "K") if key in row["cfg"]]


def plain_shape(row: Record) -> str:
    return ", ".join(shape_of(row))


def words(fields: Iterable[str]) -> list[Column]:
    """Columns of what stands in a row as it is."""

    def column(field: str) -> Column:
        return field, lambda row: str(row[field])

    return [column(field) for field in fields]
