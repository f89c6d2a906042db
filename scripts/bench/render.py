"""One renderer of results tables: columns, rows and note are data, and `Table` makes Markdown of a results file's record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.markdown import NOT_MEASURED, Column, Record, number, origin, table

Source = str | Callable[[Record], Any]
Entry = tuple[str, Source] | tuple[str, Source, int | None]


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


def column(head: str, source: Source, digits: int | None = 2) -> Column:
    """A column of a path or of a function of the row. digits: of its numbers; None writes what is found as it is."""

    def cell(row: Record) -> str:
        found = look_up(row, source) if isinstance(source, str) else source(row)
        return str(found) if digits is None or isinstance(found, str) else number(found, digits)

    return head, cell


def columns(entries: Iterable[Entry]) -> list[Column]:
    return [column(*entry) for entry in entries]


def fixed(*entries: Entry) -> Callable[[list[Record]], list[Column]]:
    """The same columns whatever the rows are."""
    made = columns(entries)
    return lambda rows: made


@dataclass(frozen=True)
class Table:
    """A table of a results file. Called with the file's record, it is Markdown with the rows' origin below."""

    file: str  # in results/GPU, without .json
    entries: Sequence[Entry] | Callable[[list[Record]], Sequence[Entry]]  # or what makes them of the rows
    note: str | Callable[[list[Record]], str] = ""  # before the origin
    rows: str | Callable[[Record], list[Record]] = "rows"  # of the record: their key, or what makes them
    packages: Sequence[str] = ("torch",)  # whose versions the origin has

    def __call__(self, record: Record) -> str:
        rows = record.get(self.rows, []) if isinstance(self.rows, str) else self.rows(record)
        if not rows:
            return NOT_MEASURED
        entries = self.entries(rows) if callable(self.entries) else self.entries
        note = self.note if isinstance(self.note, str) else self.note(rows)
        said = " ".join(filter(None, [note, origin(rows, *self.packages)]))
        return f"{table(rows, columns(entries))}\n\n{said}"
