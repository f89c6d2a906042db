"""Markdown of results: tables, numbers, shapes, and where and when a record was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]

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


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}".replace(",", " ")


def shape_of(row: Record) -> list[str]:
    return [str(row["cfg"][key]) for key in ("T", "d", "n", "E", "K") if key in row["cfg"]]


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
