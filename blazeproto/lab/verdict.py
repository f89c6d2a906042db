"""Outputs of several runs against their reference, element by element, and what `Workbench.check` says of them: right or not,
which experts and tiles, the first mismatches; as text and in colours.

`Comparison.add` takes the outputs of a run, on any device, and waits for nothing; `verdict` waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from blazeproto.lab.accuracy import Reference
from blazeproto.lab.calls import Case, Output
from blazeproto.lab.tables import Drawn  # before rich, for it says how to install that

# isort: split
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 150  # characters of the plain text
MOST_EXPERTS, MOST_ROW_TILES, MOST_COLUMN_TILES = 8, 16, 64  # of a map that is drawn
NEARLY_ALL = 0.9
SHOWN = 10  # mismatches
BESIDE = 2  # neighbours shown on either side
STYLES = {".": "dim", "x": "yellow", "#": "bold red", "~": "magenta"}
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Places:
    """The experts, tokens and tiles to which the elements of an output (lines, columns) belong.

    expert, inside: of a line (lines,): its expert, and which of that expert's lines it is; expert -1: of none.
    token: of a line, or None.  row_tile (lines,), column_tile (columns,): of the expert, and of the columns.
    """

    shape: tuple[int, int]
    expert: Tensor
    inside: Tensor
    token: Tensor | None
    row_tile: Tensor
    column_tile: Tensor


def places_of(output: Output, case: Case) -> Places:
    """The places of an output of a product (`lab.calls`), with the rows in use only."""
    device, (height, width) = case.x.device, output.tile
    columns = 1 if output.index == "pair" else output.shape[-1]
    of_half = max(1, columns // output.halves)
    column_tile = torch.arange(columns, device=device) % of_half // width
    starts = case.dispatch.expert_token_offsets[:-1].long()
    inside_rows = torch.arange(len(case.row_expert), device=device) - starts[case.row_expert]
    token: Tensor | None = None
    if output.index == "row":
        expert, inside, token = case.row_expert, inside_rows, case.row_token
    elif output.index == "pair":
        none = torch.full_like(case.scores, -1, dtype=torch.long)
        expert = none.index_copy(0, case.row_pair, case.row_expert)
        inside = none.index_copy(0, case.row_pair, inside_rows)
        token = torch.arange(len(none), device=device) // max(1, len(none) // max(1, len(case.x)))
    elif output.index == "token":
        inside = token = torch.arange(output.shape[0], device=device)
        expert = torch.full_like(inside, -1)
    else:
        height_of_expert = prod(output.shape[1:-1])
        lines = torch.arange(output.shape[0] * height_of_expert, device=device)
        expert, inside = lines // height_of_expert, lines % height_of_expert
    return Places((len(expert), columns), expert, inside, token, inside // height, column_tile)


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
    beside: two on either side, itself between them; then those above and below.
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


class Compared:
    """One output, seen as (lines, columns), in all runs so far.

    first: values of the first run.  wrong: whether a run was out of bounds.  got: its value, or the first run's.
    differs: whether a run differed from the first one in a bit.  other: its value.
    """

    def __init__(self, name: str, out: Tensor, places: Places, reference: Reference) -> None:
        self.name, self.places = name, places
        self.exact, self.bound = (values.reshape(places.shape) for values in reference)
        self.first, self.got, self.other = (out.clone() for _ in range(3))
        self.wrong = self.differs = torch.zeros_like(out, dtype=torch.bool)

    def add(self, out: Tensor, fixed_order: bool) -> None:
        wrong = ~((out.double() - self.exact).abs() <= self.bound)  # so that NaN is wrong
        self.got = torch.where(wrong & ~self.wrong, out, self.got)
        self.wrong = self.wrong | wrong
        if fixed_order:
            bits = _BITS[out.element_size()]
            unlike = out.view(bits) != self.first.view(bits)
            self.other = torch.where(unlike & ~self.differs, out, self.other)
            self.differs = self.differs | unlike

    def tiles(self) -> tuple[Tile, ...]:
        """All, right ones too: by expert, row tile and column tile, in that order."""
        places = self.places
        height, columns = int(places.row_tile.max()) + 1, int(places.column_tile.max()) + 1
        keys, group = torch.unique(places.expert * height + places.row_tile.clamp(min=0), return_inverse=True)

        def counts(mask: Tensor) -> list[list[int]]:
            by_group = torch.zeros(len(keys), mask.shape[1], dtype=torch.int32, device=mask.device)
            by_group.index_add_(0, group, mask.int())
            by_tile = torch.zeros(len(keys), columns, dtype=torch.int32, device=mask.device)
            return by_tile.index_add_(1, places.column_tile, by_group).tolist()  # type: ignore[no-any-return]

        found = (counts(mask) for mask in (self.wrong, self.differs, torch.ones_like(self.wrong)))
        return tuple(
            Tile(self.name, key // height, key % height, column, *numbers)
            for key, *lines in zip(keys.tolist(), *found, strict=True)
            for column, numbers in enumerate(zip(*lines, strict=True))
        )

    def mismatches(self, count: int) -> list[Mismatch]:
        """The first ``count`` elements that are wrong or differ, by line, then by column."""
        bad = self.wrong | self.differs
        lines = bad.any(dim=1).nonzero()[:count, 0]
        where = bad[lines].nonzero()[:count].tolist()
        return [self._mismatch(int(lines[index]), column, bad) for index, column in where]

    def _mismatch(self, line: int, column: int, bad: Tensor) -> Mismatch:
        places, got, expected = self.places, self.got, self.exact
        near = range(max(0, column - BESIDE), min(places.shape[1], column + BESIDE + 1))
        above_and_below = (r for r in (line - 1, line + 1) if 0 <= r < places.shape[0])
        around = [*((line, c) for c in near), *((r, column) for r in above_and_below)]
        value, *others = (float(values[line, column]) for values in (got, self.other, self.first))
        return Mismatch(
            output=self.name,
            index=(line, column),
            expert=int(places.expert[line]),
            row_in_expert=int(places.inside[line]),
            row_tile=int(places.row_tile[line]),
            column_tile=int(places.column_tile[column]),
            token=None if places.token is None else int(places.token[line]),
            got=value,
            expected=float(expected[line, column]),
            bound=float(self.bound[line, column]),
            wrong=bool(self.wrong[line, column]),
            other_run=next((o for o in others if o != value), value) if self.differs[line, column] else None,
            beside=tuple(Neighbour(r, c, float(got[r, c]), float(expected[r, c]), bool(bad[r, c])) for r, c in around),
        )


class Comparison:
    """The outputs of runs beside what they should be.

    fixed_order: whether every run must give the same bits.
    """

    def __init__(
        self, references: Mapping[str, Reference], places: Mapping[str, Places], *, fixed_order: bool = True
    ) -> None:
        self.references, self.places, self.fixed_order = references, places, fixed_order
        self.found: dict[str, Compared] = {}
        self.runs = 0

    def add(self, outputs: Mapping[str, Tensor]) -> None:
        """The outputs of one run, with the rows in use only. They may be written again afterwards."""
        self.runs += 1
        for name, reference in self.references.items():
            out = outputs[name].reshape(self.places[name].shape)
            if name not in self.found:
                self.found[name] = Compared(name, out, self.places[name], reference)
            self.found[name].add(out, self.fixed_order)

    def verdict(self, product: str, stray: Sequence[str] = (), part: str = "expert") -> Verdict:
        """stray: lines about what was written outside of the outputs.  part: what `Places.expert` counts."""
        bad = [found for found in self.found.values() if (found.wrong | found.differs).any()]
        mismatches = [mismatch for found in bad for mismatch in found.mismatches(SHOWN)][:SHOWN]
        maps = {found.name: found.tiles() for found in bad}
        return Verdict(product, self.runs, tuple(mismatches), maps, tuple(stray), part=part)


@dataclass(frozen=True, repr=False)
class Verdict(Drawn):
    """Whether a kernel is right: ``bool(verdict)``. Its repr draws where it is not.

    mismatches: the first ten.  maps: all tiles of outputs with mismatches, by name.
    stray: lines about what was written where nothing belongs.
    on_machine: whether it ran on the machine (`ptxsim`), run i with seed i. races, errors: what that found,
    each with its source lines; a run that ends with an error has no part in the maps.
    part: what stands in the experts' place: of block-sparse products a block, or a row or column of blocks.
    """

    width = WIDTH
    product: str
    runs: int
    mismatches: tuple[Mismatch, ...]
    maps: Mapping[str, tuple[Tile, ...]]
    stray: tuple[str, ...]
    races: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    on_machine: bool = False
    part: str = "expert"

    def __bool__(self) -> bool:
        return not (self.maps or self.stray or self.races or self.errors)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Those with mismatches."""
        return tuple(tile for tiles in self.maps.values() for tile in tiles if not tile.right)

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
        parts = [f"{output}: {_summary(tiles, self.part)}" for output, tiles in self.maps.items()]
        found = {"race": self.races, "machine error": self.errors}
        parts += [_counted(len(lines), name) for name, lines in found.items() if lines]
        return f"{self.product}: WRONG ({runs}). " + "; ".join([*parts, *self.stray])

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.summary, style="green" if self else "bold red")]
        parts += [Text(f"\n{line}") for line in (*self.errors, *self.races)]
        parts += [_drawn(output, tiles, self.part) for output, tiles in self.maps.items()]
        return Group(*parts, *([_table(self.mismatches, self.part)] if self.mismatches else []))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _summary(tiles: tuple[Tile, ...], part: str) -> str:
    bad = [tile for tile in tiles if not tile.right]
    wrong, differing, elements = (sum(getattr(t, what) for t in tiles) for what in ("wrong", "differing", "elements"))
    said = [f"{wrong} of {elements} elements out of bounds"] if wrong else []
    said += [f"{differing} differ from run to run"] if differing else []
    experts = sorted({tile.expert for tile in bad} - {-1})
    where = f" of {part}{'s' if len(experts) > 1 else ''} {_some(experts)}" if experts else ""
    return f"{', '.join(said)}, in {len(bad)} of {len(tiles)} tiles{where}"


def _some(numbers: list[int], most: int = 12) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def _drawn(output: str, tiles: tuple[Tile, ...], part: str) -> Text:
    """The experts with mismatches: a line for each row tile, a sign for each column tile."""
    text = Text(
        f"\n{output}: {part} x row tile x column tile   . right   x some wrong   # nearly all   ~ runs differ\n"
    )
    bad = {tile.expert: list[tuple[int, list[Tile]]]() for tile in tiles if not tile.right}
    for (expert, row), found in groupby(tiles, key=lambda tile: (tile.expert, tile.row_tile)):
        if expert in bad:
            bad[expert].append((row, list(found)))
    for expert, rows in list(bad.items())[:MOST_EXPERTS]:
        first = next(index for index, (_, line) in enumerate(rows) if not all(tile.right for tile in line))
        shown = rows[min(first, max(0, len(rows) - MOST_ROW_TILES)) :][
            :MOST_ROW_TILES
        ]  # from the first that is wrong on
        name = f"{part} {expert}" if expert >= 0 else f"all {part}s"
        for row, line in shown:
            text.append(f"  {name:12} row tile {row:<4} ")
            for tile in line[:MOST_COLUMN_TILES]:
                text.append(tile.sign, style=STYLES[tile.sign])
            text.append(" …\n" if len(line) > MOST_COLUMN_TILES else "\n")
            name = ""
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
        beside = [
            f"[{n.column if n.line == m.index[0] else f'row {n.line}'}] "
            f"{'!' if n.wrong else ''}{n.got:.4g}/{n.expected:.4g}"
            for n in m.beside
            if (n.line, n.column) != m.index
        ]
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
