"""Markdown of results: tables, numbers, shapes, and where, when and with which kernels rows were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scripts.bench.common import geometric_mean
from scripts.bench.identity import earlier

Record = dict[str, Any]
Rows = list[Record]
Column = tuple[str, Callable[[Record], str]]
Source = (
    str | Callable[[Record], Any]
)  # of a value: its place in a row, as `look_up` takes it, or what makes it of the row

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


# -------------------------------------------------------------------------------------------------------------- values


def look_up(row: Record, path: str) -> Any:
    """The value in a row at "key.key", None if it is missing; "path / path" is the quotient of two numbers."""
    above, quotient, below = path.partition(" / ")
    if quotient:
        dividend, divisor = look_up(row, above), look_up(row, below)
        return dividend / divisor if dividend is not None and divisor else None
    found: Any = row
    for key in path.split("."):
        found = found.get(key) if found else None
    return found


def value_of(row: Record, source: Source) -> Any:
    return look_up(row, source) if isinstance(source, str) else source(row)


def values(rows: Iterable[Record], source: Source) -> list[Any]:
    """The values of the rows that have one there."""
    return [found for row in rows if (found := value_of(row, source)) is not None]


def figure(*path: str, digits: int = 2) -> Callable[[Record], str]:
    """Makes a cell of a number in a row; a dash if the row lacks it."""
    return lambda row: number(look_up(row, ".".join(path)), digits)


# --------------------------------------------------------------------------------------------------------------- words


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}".replace(",", " ")


def least_to_most(values: Sequence[float], digits: int = 2) -> str:
    """ "1.03 to 1.20"; a dash for none."""
    return f"{number(min(values), digits)} to {number(max(values), digits)}" if values else number(None)


def span(values: Sequence[float]) -> str:
    return f"({least_to_most(values)})"


def mean_and_span(values: Sequence[float], unit: str = "") -> str:
    return f"{number(geometric_mean(values))}{unit} in the geometric mean {span(values)}"


def shape_of(row: Record) -> list[str]:
    return [str(row["cfg"][key]) for key in ("T", "d", "n", "E", "K") if key in row["cfg"]]


def plain_shape(row: Record) -> str:
    return ", ".join(shape_of(row))


# -------------------------------------------------------------------------------------------------------------- tables


def signs_of(rows: Sequence[Record]) -> list[str]:
    """The mark of each row that earlier kernels made; none if `origin` says the same of all."""
    reasons = [earlier(row) for row in rows]
    return [SIGNS.get(reason, "") if len(set(reasons)) > 1 else "" for reason in reasons]


def table(rows: Sequence[Record], columns: Sequence[Column]) -> str:
    """A line a row; a column is its name and what makes a cell of a row. The first cell has a row's mark."""
    if not rows:
        return NOT_MEASURED
    lines = [[name for name, _ in columns], ["---"] + ["---:"] * (len(columns) - 1)]
    for row, sign in zip(rows, signs_of(rows), strict=True):
        first, *others = (cell(row) for _, cell in columns)
        lines.append([first + sign, *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------------------------------- where, when, with which kernels


def gpus_of(rows: Sequence[Record]) -> str:
    return ", ".join(sorted({row["of"]["gpu"].split(",")[0] for row in rows}))


def versions_of(rows: Sequence[Record], names: Sequence[str]) -> str:
    """The versions of packages with which rows were measured: "torch 2.11.0, SonicMoE 0.1.2"."""
    pairs = {tuple(each.split(" ", 1)) for row in rows for each in row["of"]["versions"].split(", ")}
    return ", ".join(f"{NAMES[name]} {version}" for name in names for found, version in sorted(pairs) if found == name)


def caveat(rows: Sequence[Record]) -> str:
    """Tells the rows that earlier kernels made: "of earlier kernels", or "3 of 27 of earlier kernels"; empty for none."""
    reasons = [earlier(row) for row in rows]
    counts = {said: reasons.count(reason) for reason, said in EARLIER.items() if reason in reasons}
    return ", ".join(said if count == len(rows) else f"{count} of {len(rows)} {said}" for said, count in counts.items())


def noted(said: str, rows: Sequence[Record]) -> str:
    """A sentence, with the ``rows`` that earlier kernels made; before its full stop, if it has one."""
    end = "." if said.endswith(".") else ""
    return f"{said.removesuffix('.')} ({note}){end}" if (note := caveat(rows)) else said


def warned(said: str, rows: Sequence[Record]) -> str:
    """The same as a sentence of its own, in bold."""
    return f"{said} **({note.capitalize()}.)**" if (note := caveat(rows)) else said


def origin(rows: Iterable[Record], *packages: str) -> str:
    """The GPU, dates and ``packages`` of rows and all of their runs, and the rows that earlier kernels made."""
    rows = [run for row in rows for run in row.get("runs", [row])]
    if not rows:
        return ""
    gpus, dates = sorted({row["of"]["gpu"] for row in rows}), sorted({row["of"]["measured"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0].removesuffix(' UTC')} to {dates[-1]}"
    where = "; ".join(filter(None, [*gpus, versions_of(rows, packages), when]))
    marked, reasons = any(signs_of(rows)), {earlier(row) for row in rows}
    notes = [
        f" {SIGNS[reason].strip()}: {said}." if marked else f" **{said.capitalize()}.**"
        for reason, said in EARLIER.items()
        if reason in reasons
    ]
    return f"{where}.{''.join(notes)}"
