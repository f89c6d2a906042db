"""What `Workbench.check` says: right or not, which experts and tiles, the first mismatches; as text and in colours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from blazeproto.lab.tables import Drawn  # first, for it says how to install rich

# isort: split
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 150  # characters of the plain text
MOST_EXPERTS, MOST_ROW_TILES, MOST_COLUMN_TILES = 8, 16, 64  # of a map that is drawn
NEARLY_ALL = 0.9


class Neighbour(NamedTuple):
    """An element beside a mismatch: its line and column, got and expected, and whether it is one itself."""

    line: int
    column: int
    got: float
    expected: float
    wrong: bool


@dataclass(frozen=True)
class Mismatch:
    """One element of an output. index: (line, column) of the output, whose leading dimensions are one.

    expert: -1 where it is of none.  row_in_expert: the line's number inside its expert (of a weight gradient, the row of the
    matrix).  token: None for what belongs to none.  bound: how far ``got`` may be from ``expected``.
    wrong: whether it is farther; else only another run gave other bits.  other_run: what that run gave.
    """

    output: str
    index: tuple[int, int]
    expert: int
    row_in_expert: int
    row_tile: int
    column_tile: int
    token: int | None
    got: float
    expected: float
    bound: float
    wrong: bool
    other_run: float | None
    beside: tuple[Neighbour, ...]
    above_and_below: tuple[Neighbour, ...]


class Tile(NamedTuple):
    """wrong, differing: elements that are out of bounds, or differ from run to run, of ``elements``."""

    output: str
    expert: int
    row_tile: int
    column_tile: int
    wrong: int
    differing: int
    elements: int

    @property
    def right(self) -> bool:
        return not (self.wrong or self.differing)

    @property
    def sign(self) -> str:
        if self.wrong >= NEARLY_ALL * self.elements > 0:
            return "#"
        return "x" if self.wrong else "~" if self.differing else "."


class TileMap(NamedTuple):
    """The tiles of one output, right ones too: by expert, row tile and column tile, in that order."""

    output: str
    columns: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, repr=False)
class Verdict(Drawn):
    """Whether a kernel is right: ``bool(verdict)``. Its repr draws where it is not.

    mismatches: the first ten.  maps: of outputs with mismatches.  stray: lines about what was written where nothing belongs.
    on_machine: whether it ran on the machine (`ptxsim`), run i with seed i. races, errors: what that found,
    each with its source lines; a run that ends with an error has no part in the maps.
    part: what stands in the experts' place: of block-sparse products a block, or a row or column of blocks.
    """

    width = WIDTH
    product: str
    runs: int
    mismatches: tuple[Mismatch, ...]
    maps: tuple[TileMap, ...]
    stray: tuple[str, ...]
    races: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    on_machine: bool = False
    part: str = "expert"

    def __bool__(self) -> bool:
        return not (self.maps or self.stray or self.races or self.errors)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Those with mismatches."""
        return tuple(tile for each in self.maps for tile in each.tiles if not tile.right)

    @property
    def experts(self) -> list[int]:
        """Those with mismatches; without -1, which stands for no expert."""
        return sorted({tile.expert for tile in self.tiles} - {-1})

    @property
    def summary(self) -> str:
        runs = f"{_counted(self.runs, 'run')} on poisoned outputs"
        if self.on_machine:
            runs += f", on the machine, seed{'s 0 to' if self.runs > 1 else ''} {self.runs - 1}, races watched"
        if self:
            return f"{self.product}: right, in {runs}"
        parts = [_summary(each, self.part) for each in self.maps]
        found = {"race": self.races, "machine error": self.errors}
        parts += [_counted(len(lines), name) for name, lines in found.items() if lines]
        return f"{self.product}: WRONG ({runs}). " + "; ".join([*parts, *self.stray])

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.summary, style="green" if self else "bold red")]
        parts += [Text(f"\n{line}") for line in (*self.errors, *self.races)]
        parts += [_drawn(each, self.part) for each in self.maps]
        if self.mismatches:
            parts.append(_table(self.mismatches, self.part))
        return Group(*parts)

    def __repr__(self) -> str:
        return self.text()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _summary(each: TileMap, part: str) -> str:
    bad = [tile for tile in each.tiles if not tile.right]
    wrong, differing = (sum(getattr(tile, what) for tile in bad) for what in ("wrong", "differing"))
    elements = sum(tile.elements for tile in each.tiles)
    said = [f"{wrong} of {elements} elements out of bounds"] if wrong else []
    said += [f"{differing} differ from run to run"] if differing else []
    experts = sorted({tile.expert for tile in bad} - {-1})
    where = f" of {part}{'s' if len(experts) > 1 else ''} {_some(experts)}" if experts else ""
    return f"{each.output}: {', '.join(said)}, in {len(bad)} of {len(each.tiles)} tiles{where}"


def _some(numbers: list[int], most: int = 12) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


STYLES = {".": "dim", "x": "yellow", "#": "bold red", "~": "magenta"}


def _drawn(each: TileMap, part: str) -> Text:
    """The experts with mismatches: a line for each row tile, a sign for each column tile."""
    text = Text(
        f"\n{each.output}: {part} x row tile x column tile   . right   x some wrong   # nearly all   ~ runs differ\n"
    )
    experts: dict[int, dict[int, list[Tile]]] = {}
    for tile in each.tiles:
        experts.setdefault(tile.expert, {}).setdefault(tile.row_tile, []).append(tile)
    bad = {e: rows for e, rows in experts.items() if not all(tile.right for row in rows.values() for tile in row)}
    for expert in list(bad)[:MOST_EXPERTS]:
        rows = bad[expert]
        shown = sorted(rows)
        if len(shown) > MOST_ROW_TILES:  # from the first that is wrong on
            first = next(index for index, r in enumerate(shown) if not all(tile.right for tile in rows[r]))
            shown = shown[min(first, len(shown) - MOST_ROW_TILES) :][:MOST_ROW_TILES]
        for index, row in enumerate(shown):
            name = f"{part} {expert}" if expert >= 0 else f"all {part}s"
            text.append(f"  {name if index == 0 else '':12} row tile {row:<4} ")
            for tile in rows[row][:MOST_COLUMN_TILES]:
                text.append(tile.sign, style=STYLES[tile.sign])
            text.append(" …\n" if each.columns > MOST_COLUMN_TILES else "\n")
        if len(rows) > len(shown):
            text.append(f"  {'':12} … {len(rows)} row tiles\n", style="dim")
    if len(bad) > MOST_EXPERTS:
        text.append(f"  … {len(bad)} {part}s\n", style="dim")
    return text


def _table(mismatches: tuple[Mismatch, ...], part: str) -> Table:
    table = Table(title=f"the first {len(mismatches)} mismatches", title_justify="left", box=None, pad_edge=False)
    for name in ("index", part, f"row in {part}", "token", "tile", "got", "expected", "beside it: got/expected"):
        table.add_column(name, overflow="fold", justify="left" if name.startswith(("index", "beside")) else "right")
    for m in mismatches:
        got = f"{m.got:.5g}" + ("" if m.other_run is None else f" or {m.other_run:.5g}")
        beside = [f"[{n.column}] {_pair(n)}" for n in m.beside if (n.line, n.column) != m.index]
        beside += [f"[row {n.line}] {_pair(n)}" for n in m.above_and_below]
        table.add_row(
            f"{m.output}[{m.index[0]}, {m.index[1]}]",
            "-" if m.expert < 0 else str(m.expert),
            str(m.row_in_expert),
            "-" if m.token is None else str(m.token),
            f"{m.row_tile}, {m.column_tile}",
            got,
            f"{m.expected:.5g}",
            Text("  ".join(beside)),
        )
    return table


def _pair(n: Neighbour) -> str:
    return f"{'!' if n.wrong else ''}{n.got:.4g}/{n.expected:.4g}"
