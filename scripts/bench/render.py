"""Tables and sentences of results files as data: `Table` makes Markdown of a file's record, `Sentence` a measured sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.markdown import (
    NOT_MEASURED,
    Column,
    Record,
    Rows,
    Source,
    look_up,
    noted,
    number,
    origin,
    table,
    value_of,
)

Entry = tuple[str, Source] | tuple[str, Source, int | None]  # head, source and digits of a column
RowsOf = str | Callable[..., Rows]  # of a record: their key, or what makes them of the records


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


def having(path: str) -> Callable[[Record], Rows]:
    """The rows of a record that have something at ``path``."""
    return lambda record: [row for row in record["rows"] if look_up(row, path) is not None]


def rows_of(source: RowsOf, *records: Record) -> Rows:
    return records[0].get(source, []) if isinstance(source, str) else source(*records)


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
