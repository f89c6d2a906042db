"""One description of what is shown, a `View` of facts and tables, and its two forms: rich for terminals, HTML for notebooks.

View("Dispatch", {"tokens": "5"}, [Table(["expert", "load", ""], [["0", "3", Bar(3, 5)]])])
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

BAR_WIDTH = 32  # characters of a full bar
TEXT_WIDTH = 110  # columns of a view as plain text


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

    def html(self) -> str:
        """In percent of the cell."""
        if self.full <= 0:
            return ""
        share = 100 * min(1.0, max(0.0, self.value / self.full))
        line = ""
        if self.mark is not None:
            line = f'<div style="{_LINE};left:{100 * self.mark / self.full:.1f}%"></div>'
        return f'<div style="{_TRACK}"><div style="{_FILL};width:{share:.1f}%"></div>{line}</div>'


_TRACK = "position:relative;width:16em;height:0.9em"
_FILL = "background:#4c78a8;height:100%"
_LINE = "position:absolute;top:-0.1em;height:1.1em;border-left:2px dotted #e45756"

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
class View:
    """A title, facts by name, tables; and a note at the end."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    note: str = ""

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        parts: list[Text | RichTable] = [Text(self.title, style="bold")]
        if self.facts:
            facts = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0))
            for name, value in self.facts.items():
                facts.add_row(Text(name, style="dim"), Text(value))
            parts.append(facts)
        parts += [_rich(table) for table in self.tables]
        return Group(*parts, *([Text(self.note, style="dim")] if self.note else []))

    def _repr_html_(self) -> str:
        facts = "".join(
            f'<tr><td style="text-align:left;opacity:0.7">{escape(name)}</td>'
            f'<td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in self.facts.items()
        )
        parts = [f"<b>{escape(self.title)}</b>", f"<table>{facts}</table>" if facts else "", *map(_html, self.tables)]
        return "<div>" + "".join(parts) + (f"<p><small>{escape(self.note)}</small></p>" if self.note else "") + "</div>"

    def text(self, width: int = TEXT_WIDTH) -> str:
        """As plain text, for a repr or a file."""
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=width, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _rich(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE_HEAD, caption=table.caption or None, caption_justify="left", pad_edge=False)
    for place, column in enumerate(table.columns):
        bars = any(isinstance(row[place], Bar) for row in table.rows)
        words = bars or column in table.left
        made.add_column(
            column, justify="left" if words else "right", no_wrap=not words or bars or place == 0, overflow="fold"
        )
    for number, row in enumerate(table.rows, start=1):
        ends = number == len(table.rows) - table.last
        made.add_row(*(Text(cell.text() if isinstance(cell, Bar) else cell) for cell in row), end_section=ends)
    return made


def _html(table: Table) -> str:
    align = ["left" if column in table.left else "right" for column in table.columns]

    def cells(tag: str, row: Sequence[Cell], style: str = "") -> str:
        inner = (
            f'<{tag} style="text-align:{side}{style}">{cell.html() if isinstance(cell, Bar) else escape(cell)}</{tag}>'
            for side, cell in zip(align, row, strict=True)
        )
        return "<tr>" + "".join(inner) + "</tr>"

    sums = len(table.rows) - table.last
    rows = [
        cells("td", row, ";border-top:1px solid" if table.last and number == sums else "")
        for number, row in enumerate(table.rows)
    ]
    caption = f'<caption style="caption-side:bottom;text-align:left">{escape(table.caption)}</caption>'
    return f"<table>{caption if table.caption else ''}{cells('th', table.columns)}{''.join(rows)}</table>"


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
