"""One description of what is shown, a `View` of facts and tables, which rich draws: in terminals, as text, as HTML for notebooks.

View("Dispatch", {"tokens": "5"}, [Table(["expert", "load", ""], [["0", "3", Bar(3, 5)]])])
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blazeproto.runtime.optional import need

need("rich")

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable

BAR_WIDTH = 32  # characters of a full bar
TEXT_WIDTH = 110  # columns of a view as plain text
GAP = 3  # at most, of them between two of a table
HTML = '<pre style="white-space:pre;overflow:auto;max-height:48em;line-height:normal">{code}</pre>'


class Drawn:
    """What rich draws, in other places than its terminals too. width: in columns, of text and HTML."""

    width = TEXT_WIDTH

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def _printed(self, width: int) -> Console:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_jupyter=False, record=True)
        console.print(self)
        return console

    def text(self, width: int | None = None) -> str:
        """Without colours, in ``width`` columns, for a repr or a file."""
        return "\n".join(line.rstrip() for line in self._printed(width or self.width).export_text().splitlines())

    def _repr_html_(self) -> str:
        return self._printed(self.width).export_html(inline_styles=True, code_format=HTML)


@dataclass(frozen=True)
class Bar:
    """``value`` as a part of ``full``, drawn; ``mark`` is where a line crosses it (the mean), None for none."""

    value: float
    full: float
    mark: float | None = None

    def text(self, width: int = BAR_WIDTH) -> str:
        """In characters, a half one to the nearest."""
        if self.full <= 0:
            return ""
        halves = round(2 * width * min(1.0, max(0.0, self.value / self.full)))
        cells = ["█"] * (halves // 2) + ["▌"] * (halves % 2)
        if self.mark is not None:
            cells += [" "] * (width - len(cells))
            at = min(width - 1, int(width * self.mark / self.full))
            cells[at] = "┊" if cells[at] == " " else "┃"
        return "".join(cells).rstrip()


Cell = str | Bar


@dataclass(frozen=True)
class Table:
    """Rows of cells under their columns' names. left: columns of words, which stand left; the others are numbers.

    last: how many rows at the end are sums, set apart by a line.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    left: Sequence[str] = ()
    last: int = 0

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows: expected {len(self.columns)} cells in each, got {len(row)}")


@dataclass(frozen=True)
class View(Drawn):
    """A title, facts by name, tables; and a note at the end."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    note: str = ""

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        parts: list[RenderableType] = [Text(self.title, style="bold")]
        if self.facts:
            facts = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0))
            for name, value in self.facts.items():
                facts.add_row(Text(name, style="dim"), Text(value))
            parts.append(facts)
        parts += [Fitted(table) for table in self.tables]
        return Group(*parts, *([Text(self.note, style="dim")] if self.note else []))


@dataclass(frozen=True)
class Fitted:
    """What rich draws of a table, with no name split: as rows, or where that is too wide with a line for each cell."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        least = [_least_width(self.table, place) for place in range(len(self.table.columns))]
        fits = sum(least) + GAP * len(least) <= options.max_width
        yield _rich(self.table, least) if fits else _stacked(self.table)


def _wraps(table: Table, place: int) -> bool:
    """Whether a cell of this column may have several lines, of whole words."""
    return place > 0 and table.columns[place] in table.left and all(isinstance(row[place], str) for row in table.rows)


def _least_width(table: Table, place: int) -> int:
    texts = [table.columns[place], *(_text(row[place]) for row in table.rows)]
    parts = [word for text in texts for word in text.split()] if _wraps(table, place) else texts
    return max(map(len, parts), default=0)


def _text(cell: Cell) -> str:
    return cell.text() if isinstance(cell, Bar) else cell


def _stacked(table: Table) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0), caption=table.caption or None)
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            made.add_row(Text(column, style="dim"), Text(_text(cell)))
        made.add_row()
    return made


def _rich(table: Table, least: Sequence[int]) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE_HEAD, caption=table.caption or None, caption_justify="left", pad_edge=False)
    for place, column in enumerate(table.columns):
        left = column in table.left or any(isinstance(row[place], Bar) for row in table.rows)
        wraps = _wraps(table, place)
        made.add_column(column, justify="left" if left else "right", no_wrap=not wraps, min_width=least[place])
    for number, row in enumerate(table.rows, start=1):
        ends = number == len(table.rows) - table.last
        made.add_row(*(Text(_text(cell)) for cell in row), end_section=ends)
    return made


# --- Numbers as words ------------------------------------------------------------------------------------------------------


def in_bytes(count: float | None) -> str:
    """``"3.1 MiB"``; an en dash for None."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def in_operations(count: float | None) -> str:
    """``"2.1 G"``, a multiplication and an addition being two; an en dash for None or 0."""
    if not count:
        return "–"
    for unit in ("", "K", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}".strip()
        count /= 1000
    return f"{count:.4g} T"


def in_ms(ms: float | None) -> str:
    """Milliseconds to four digits behind the point; an en dash for None."""
    return "–" if ms is None else f"{ms:.4f}"
