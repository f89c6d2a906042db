"""One description of what is shown, a `View` of facts and tables, which rich draws: in terminals, as text, as HTML for notebooks.

View("Dispatch", {"tokens": "5"}, [Table(["expert", "load", ""], [["0", "3", Bar(3, 5)]])])
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from blazeproto.runtime.optional import need

try:
    from rich import box
    from rich.console import Console, ConsoleOptions, Group, RenderableType
    from rich.table import Table as RichTable
    from rich.text import Text
except ImportError:
    need("rich")  # says how to install it
    raise

BAR_WIDTH = 32  # characters of a full bar
TEXT_WIDTH = 110  # columns of a view as plain text
GAP = 3  # at most, of them between two of a table
HTML = '<pre style="white-space:pre;overflow:auto;max-height:48em;line-height:normal">{code}</pre>'


class Drawn:
    """An object that rich draws, also outside of its terminals. width: in columns, of text and HTML."""

    width = TEXT_WIDTH

    def _printed(self, width: int) -> Console:
        console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_jupyter=False, record=True)
        console.print(self)
        return console

    def text(self, width: int | None = None) -> str:
        """Without colours, in ``width`` columns, for a repr or a file."""
        return "\n".join(line.rstrip() for line in self._printed(width or self.width).export_text().splitlines())

    def _repr_html_(self) -> str:
        return self._printed(self.width).export_html(inline_styles=True, code_format=HTML)

    def __repr__(self) -> str:
        return self.text()


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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """No name is split: as rows, or where that is too wide with a line for each cell."""
        least = [self._least_width(place) for place in range(len(self.columns))]
        if sum(least) + GAP * len(least) <= options.max_width:
            yield self._in_rows(least)
            return
        lines = ([*zip(self.columns, map(_text, row), strict=True), ()] for row in self.rows)
        yield _named(chain.from_iterable(lines), self.caption)

    def _wraps(self, place: int) -> bool:
        """Whether a cell of this column may have several lines, of whole words."""
        return (
            place > 0 and self.columns[place] in self.left and not any(isinstance(row[place], Bar) for row in self.rows)
        )

    def _least_width(self, place: int) -> int:
        texts = [self.columns[place], *(_text(row[place]) for row in self.rows)]
        parts = [word for text in texts for word in text.split()] if self._wraps(place) else texts
        return max(map(len, parts), default=0)

    def _in_rows(self, least: Sequence[int]) -> RichTable:
        made = RichTable(box=box.SIMPLE_HEAD, caption=self.caption or None, caption_justify="left", pad_edge=False)
        for place, column in enumerate(self.columns):
            left = column in self.left or any(isinstance(row[place], Bar) for row in self.rows)
            wraps = self._wraps(place)
            made.add_column(column, justify="left" if left else "right", no_wrap=not wraps, min_width=least[place])
        for number, row in enumerate(self.rows, start=1):
            made.add_row(*(Text(_text(cell)) for cell in row), end_section=number == len(self.rows) - self.last)
        return made


def _text(cell: Cell) -> str:
    return cell.text() if isinstance(cell, Bar) else cell


def _named(lines: Iterable[Sequence[str]], caption: str = "") -> RichTable:
    """A line for each name and what it has, an empty one for nothing."""
    made = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0), caption=caption or None)
    for line in lines:
        made.add_row(*map(Text, line, ("dim", "")))
    return made


@dataclass(frozen=True, repr=False)
class View(Drawn):
    """A title, facts by name, tables; and a note at the end."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    note: str = ""

    def __rich__(self) -> Group:
        facts = [_named(self.facts.items())] if self.facts else []
        note = [Text(self.note, style="dim")] if self.note else []
        return Group(Text(self.title, style="bold"), *facts, *self.tables, *note)


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
