"""Markdown of results. Tables and sentences are data: `Table` makes Markdown of a results file's record, `Sentence` a measured
sentence. Both say where, when and with which kernels rows were measured."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.common import geometric_mean
from scripts.bench.identity import earlier

Record = dict[str, Any]
Rows = list[Record]
Column = tuple[str, Callable[[Record], str]]
Source = str | Callable[[Record], Any]  # of a value: its place in a row, as for `look_up`, or what makes it of the row
Entry = tuple[str, Source] | tuple[str, Source, int | None]  # head, source and digits of a column
RowsOf = str | Callable[..., Rows]  # of a record: their key, or what makes them of the records

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


EARLIER = {"kernels": "earlier kernels", "benchmark": "an earlier form of the benchmark"}
SIGNS = {"kernels": " †", "benchmark": " ‡"}
NAMES = {
    "torch": "torch",
    "sonic-moe": "SonicMoE",
    "quack-kernels": "QuACK",
    "transformers": "transformers",
    "peft": "peft",
    "megablocks": "MegaBlocks",
    "scattermoe": "ScatterMoE",
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


SHAPE: Entry = ("T, d, n, E, K", plain_shape)


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


def condition(rows: Sequence[Record]) -> str:
    """GPU and shape: "on one NVIDIA H200 at (T, d, n, E, K) = (8192, 512, 256, 64, 4)"; of more than two shapes the number."""
    shapes = [*dict.fromkeys(map(plain_shape, rows))]
    letters = ", ".join(letter for letter in "TdnEK" if letter in rows[0]["cfg"])
    listed = f"({letters}) = ({') and ('.join(shapes)})"
    return f"on one {gpus_of(rows).replace(', ', ' or ')} at {listed if len(shapes) < 3 else f'{len(shapes)} shapes'}"


def versions_of(rows: Sequence[Record], names: Sequence[str]) -> str:
    """The versions of packages with which rows were measured: "torch 2.11.0, SonicMoE 0.1.2"."""
    pairs = {tuple(each.split(" ", 1)) for row in rows for each in row["of"]["versions"].split(", ")}
    return ", ".join(f"{NAMES[name]} {version}" for name in names for found, version in sorted(pairs) if found == name)


def caveat(rows: Sequence[Record]) -> str:
    """The rows that earlier kernels made: "of earlier kernels", or "3 of the 27 runs used earlier kernels"; empty for none."""
    reasons = [earlier(row) for row in rows]
    counts = {said: reasons.count(reason) for reason, said in EARLIER.items() if reason in reasons}
    return ", ".join(
        f"of {said}" if count == len(rows) else f"{count} of the {len(rows)} runs used {said}"
        for said, count in counts.items()
    )


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
        f" {SIGNS[reason].strip()}: of {said}." if marked else f" **Of {said}.**"
        for reason, said in EARLIER.items()
        if reason in reasons
    ]
    return f"{where}.{''.join(notes)}"


# -------------------------------------------------------------------------------------------------------- the renderer


def column(head: str, source: Source, digits: int | None = 2) -> Column:
    """A column of a source. digits: of its numbers; None writes what is found as it is."""

    def cell(row: Record) -> str:
        found = value_of(row, source)
        return str(found) if digits is None or isinstance(found, str) else number(found, digits)

    return head, cell


def columns(entries: Iterable[Entry]) -> list[Column]:
    return [column(*entry) for entry in entries]


def with_figures(rows: Rows, columns: Sequence[Column]) -> list[Column]:
    """The columns without those in which nothing was measured, but for one that names a group ("saved MiB: ours")."""
    return [each for each in columns if ": " in each[0] or {each[1](row) for row in rows} != {number(None)}]


def each_of(names: dict[str, str], path: str, digits: int = 2) -> list[Entry]:
    """A column for each name. path: with {} for it."""
    return [(head, path.format(name), digits) for name, head in names.items()]


def rows_of(source: RowsOf, *records: Record) -> Rows:
    """The rows, or the row, of records."""
    found = records[0].get(source, []) if isinstance(source, str) else source(*records)
    return [found] if isinstance(found, dict) else found


def having(*paths: str, rows: RowsOf = "rows") -> Callable[[Record], Rows]:
    """The rows of a record that have something at each path."""
    return lambda record: [row for row in rows_of(rows, record) if None not in [look_up(row, path) for path in paths]]


def split(rows: Rows, test: Callable[[Record], bool]) -> tuple[Rows, Rows]:
    """The rows that hold a test, and the others."""
    return [row for row in rows if test(row)], [row for row in rows if not test(row)]


def made(what: Any, *given: Any) -> Any:
    """A field of a table, or what it makes if it is a function."""
    return what(*given) if callable(what) else what


@dataclass(frozen=True)
class Table:
    """A table of results files. Called with the files' records, it is Markdown with the rows' origin below."""

    file: str  # in results/GPU, without .json; several with spaces between
    entries: Sequence[Entry] | Callable[[Rows], Sequence[Entry]]  # or what makes them of the rows
    note: str | Callable[[Rows], str] = ""  # before the origin
    rows: RowsOf = "rows"
    packages: Sequence[str] | Callable[[Record], Sequence[str]] = ("torch",)  # whose versions the origin has
    after: str | Callable[[Record, Rows], str] = ""  # the origin
    picture: str = ""  # above, as Markdown
    only_measured: bool = False  # no column in which nothing was measured

    def __call__(self, *records: Record) -> str:
        rows = rows_of(self.rows, *records)
        after = made(self.after, records[0], rows)
        if not rows:
            return f"{NOT_MEASURED} {after}".rstrip()
        where = origin(rows, *made(self.packages, records[0]))
        said = " ".join(filter(None, [made(self.note, rows), where, after]))
        shown = columns(made(self.entries, rows))
        parts = [self.picture, table(rows, with_figures(rows, shown) if self.only_measured else shown), said]
        return "\n\n".join(filter(None, parts))


def plainly(said: str, _: Rows) -> str:
    """Without a note of the rows that earlier kernels made."""
    return said


@dataclass(frozen=True)
class Sentence:
    """A sentence of results files, or a part of one. Called with the files' records, it has a note of earlier kernels."""

    file: str
    make: Callable[[Any], str]  # of the rows; nothing where they say nothing
    rows: RowsOf = "rows"
    note: Callable[[str, Rows], str] = noted

    def __call__(self, *records: Record) -> str:
        rows = rows_of(self.rows, *records)
        said = self.make(rows) if rows else ""
        return self.note(said, rows) if said else NOT_MEASURED
