"""Outputs of several runs against their reference, element by element, and a map of where they are wrong.

Pure functions of tensors, on any device. `Comparison.add` takes the outputs of a run and waits for nothing; `verdict` waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from blazeproto.lab.bounds import Reference
from blazeproto.lab.calls import Case, Output
from blazeproto.lab.verdict import Mismatch, Neighbour, Tile, TileMap, Verdict

SHOWN = 10  # mismatches
BESIDE = 2  # neighbours shown on either side

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Places:
    """Where the elements of an output belong, which is seen as (lines, columns).

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


class Found(NamedTuple):
    """What was found in one output so far, (lines, columns) each."""

    first: Tensor  # values of the first run
    wrong: Tensor  # whether a run was out of bounds,
    got: Tensor  # and its value, or the first run's
    differs: Tensor  # whether a run differed from the first one in a bit,
    other: Tensor  # and its value


class Comparison:
    """The outputs of runs beside what they should be.

    fixed_order: whether every run must give the same bits.
    """

    def __init__(
        self, references: Mapping[str, Reference], places: Mapping[str, Places], *, fixed_order: bool = True
    ) -> None:
        self.references, self.places, self.fixed_order = references, places, fixed_order
        self.found: dict[str, Found] = {}
        self.runs = 0

    def add(self, outputs: Mapping[str, Tensor]) -> None:
        """The outputs of one run, with the rows in use only. They may be written again afterwards."""
        self.runs += 1
        for name, (exact, bound) in self.references.items():
            shape = self.places[name].shape
            out = outputs[name].reshape(shape)
            wrong = ~((out.double() - exact.reshape(shape)).abs() <= bound.reshape(shape))  # so that NaN is wrong
            if name not in self.found:
                first = out.clone()
                self.found[name] = Found(first, wrong, first.clone(), torch.zeros_like(wrong), first.clone())
                continue
            before = self.found[name]
            got = torch.where(wrong & ~before.wrong, out, before.got)
            differs, other = before.differs, before.other
            if self.fixed_order:
                bits = _BITS[out.element_size()]
                unlike = out.view(bits) != before.first.view(bits)
                other = torch.where(unlike & ~differs, out, other)
                differs = differs | unlike
            self.found[name] = Found(before.first, before.wrong | wrong, got, differs, other)

    def verdict(self, product: str, stray: Sequence[str] = (), part: str = "expert") -> Verdict:
        """stray: lines about what was written outside of the outputs.  part: what `Places.expert` counts."""
        maps: list[TileMap] = []
        mismatches: list[Mismatch] = []
        for name, found in self.found.items():
            bad = found.wrong | found.differs
            if not bad.any():
                continue
            maps.append(_map(name, found, self.places[name]))
            mismatches += _first(name, found, bad, self.places[name], self.references[name], SHOWN - len(mismatches))
        return Verdict(product, self.runs, tuple(mismatches), tuple(maps), tuple(stray), part=part)


def _map(name: str, found: Found, places: Places) -> TileMap:
    """Counts by (expert, row tile) and column tile."""
    height = int(places.row_tile.max()) + 1
    keys, group = torch.unique(places.expert * height + places.row_tile.clamp(min=0), return_inverse=True)
    columns = int(places.column_tile.max()) + 1

    def counts(mask: Tensor) -> Tensor:
        by_group = torch.zeros(len(keys), mask.shape[1], dtype=torch.int32, device=mask.device)
        by_group.index_add_(0, group, mask.int())
        by_tile = torch.zeros(len(keys), columns, dtype=torch.int32, device=mask.device)
        return by_tile.index_add_(1, places.column_tile, by_group)

    wrong, differs = counts(found.wrong).tolist(), counts(found.differs).tolist()
    size = counts(torch.ones_like(found.wrong)).tolist()
    tiles = [
        Tile(name, key // height, key % height, column, w, v, s)
        for key, *lines in zip(keys.tolist(), wrong, differs, size, strict=True)
        for column, (w, v, s) in enumerate(zip(*lines, strict=True))
    ]
    return TileMap(name, columns, tuple(tiles))


def _other_run(found: Found, line: int, column: int) -> float | None:
    """What a run gave that is not ``got``; None where all gave the same."""
    if not found.differs[line, column]:
        return None
    got, *others = (float(values[line, column]) for values in (found.got, found.other, found.first))
    return next((other for other in others if other != got), got)


def _first(name: str, found: Found, bad: Tensor, places: Places, reference: Reference, count: int) -> list[Mismatch]:
    """The first ``count`` elements that are wrong or differ, by line, then by column."""
    if count <= 0:
        return []
    lines = bad.any(dim=1).nonzero()[:count, 0]
    where = bad[lines].nonzero()[:count]
    exact, bound = (values.reshape(places.shape) for values in reference)
    found_here = []
    for index, column in where.tolist():
        line = int(lines[index])
        near = range(max(0, column - BESIDE), min(places.shape[1], column + BESIDE + 1))
        above = range(max(0, line - 1), min(places.shape[0], line + 2))
        beside, over = (
            tuple(Neighbour(r, c, float(found.got[r, c]), float(exact[r, c]), bool(bad[r, c])) for r, c in elements)
            for elements in ([(line, c) for c in near], [(r, column) for r in above if r != line])
        )
        found_here.append(
            Mismatch(
                output=name,
                index=(line, column),
                expert=int(places.expert[line]),
                row_in_expert=int(places.inside[line]),
                row_tile=int(places.row_tile[line]),
                column_tile=int(places.column_tile[column]),
                token=None if places.token is None else int(places.token[line]),
                got=float(found.got[line, column]),
                expected=float(exact[line, column]),
                bound=float(bound[line, column]),
                wrong=bool(found.wrong[line, column]),
                other_run=_other_run(found, line, column),
                beside=beside,
                above_and_below=over,
            )
        )
    return found_here
