"""Markdown of results: tables, numbers, shapes, and where and when a record was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
}


NOT_MEASURED = "Not measured with these sources."


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(rows: Iterable[Record], columns: Sequence[Column]) -> str:
    """A line a row; a column is its name and what makes a cell of a row."""
    return markdown_table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def figure(*path: str, digits: int = 2, bold: bool = False) -> Callable[[Record], str]:
    """What makes a cell of the number that lies there in a row: a dash where there is none."""

    def cell(row: Record) -> str:
        found: Any = row
        for key in path:
            found = found.get(key) if found else None
        return f"**{number(found, digits)}**" if bold else number(found, digits)

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


def layer_shape(row: Record) -> str:
    """Marked where the row was measured with other sources than the rest."""
    return ", ".join(shape_of(row)) + (" †" if "other_sources" in row else "")


def measured_on(record: Record) -> str:
    return f"{record['gpu']}; {record['measured']}; sources `{record['sources_sha256'][:12]}`."


def dagger(marks: Iterable[Record]) -> str:
    """A note on what was measured with other sources than the rest, empty where nothing was."""
    marked = sorted({(mark["measured"], mark["sources_sha256"][:12]) for mark in marks})
    return " ".join(f"†: {measured}, sources `{sources}`." for measured, sources in marked)


def rows_measured_on(record: Record) -> str:
    """`measured_on` of a layer record, and a note on its marked rows."""
    marks = [row["other_sources"] for row in record["rows"] if "other_sources" in row]
    return f"{measured_on(record)} {dagger(marks)}".rstrip()
