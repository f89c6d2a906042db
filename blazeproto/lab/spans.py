"""What warps did and when, as spans of clock cycles; as text, for a terminal, and as a drawing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from blazeproto.lab.svg import Picture, blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What: letter, colour, words of the legend. Order of the legend.
LOOKS = {
    "mma": ("M", "#4c9f50", "mma: wgmma are under way"),
    "hand-over under mma": ("h", "#b6d957", "hand-over while wgmma run"),
    "hand-over": ("H", "#d9b500", "hand-over: accumulators to registers, slabs, epilogue warps"),
    "wait full": (".", "#d9534f", "wait for full: a stage's data, or slabs"),
    "wait empty": ("-", "#f2b8a0", "wait for empty: a stage, or slabs, to be free"),
    "copy": ("C", "#3b7dd8", "copy: issue of the gather"),
    "TMA": ("T", "#12356b", "copy: issue of TMA loads"),
    "schedule": ("F", "#8e6bbf", "find the next tiles"),
    "store": ("S", "#1fa3a3", "store to global memory"),
    "store under mma": ("s", "#8fd6d0", "store while wgmma run"),
    "other": (" ", "#e4e4e4", "anything else"),
}
COLUMNS = 100  # of the text
WIDTH, ROW = 1100, 24  # of the drawing and of a warp's row, SVG units
HEIGHT, INSET = 0.75, 0.15  # of a warp's spans, of its row, and by which a nested one is lower at either edge
OTHER = "other"


@dataclass(frozen=True)
class Span:
    """What a warp did from one clock to another, in cycles from the first record of all.

    what: "mma", "wait full", ...; "hand-over under mma" where that ran during the tile's wgmma; a role for all that the warp did.
    depth: how many spans it lies in.  tile: the warp's, from 0; -1 before its first.
    finished: False where the record breaks off within it.
    """

    warp: int
    role: str
    what: str
    begin: int
    end: int
    depth: int
    tile: int
    finished: bool = True

    @property
    def cycles(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, repr=False)
class Timeline(Picture):
    """The spans of one CTA's warps: in the order in which they began, each warp's one after the other.

    kernel: its name.  unit: of time, "cycles" of a GPU or "steps" of the machine.  tile_begins: (warp, tile, cycle).
    complete: False where a warp's memory for records was full before its last tile.
    """

    kernel: str
    cta: int
    tiles: int
    spans: tuple[Span, ...]
    tile_begins: tuple[tuple[int, int, int], ...]
    complete: bool = True
    unit: str = "cycles"

    @property
    def warps(self) -> dict[int, str]:
        """The role of each warp that did something."""
        return {span.warp: span.role for span in self.spans}

    @property
    def cycles(self) -> int:
        """From the first record to the last."""
        return max((span.end for span in self.spans), default=0)

    def innermost(self, warp: int) -> list[tuple[str, int, int]]:
        """A warp's time without gaps and overlaps: (what, begin, end); what lies in no span is "other"."""
        own = [span for span in self.spans if span.warp == warp]
        cuts = sorted({clock for span in own for clock in (span.begin, span.end)})
        pieces: list[tuple[str, int, int]] = []
        opened: list[Span] = []
        waiting = sorted(own, key=lambda span: (span.begin, span.depth))[::-1]
        for begin, end in pairwise(cuts):
            while waiting and waiting[-1].begin <= begin:
                opened.append(waiting.pop())
            opened = [span for span in opened if span.end > begin]
            if not opened:
                continue
            deepest = max(opened, key=lambda span: span.depth)
            what = OTHER if deepest.depth == 0 else deepest.what
            if pieces and pieces[-1][0] == what and pieces[-1][2] == begin:
                pieces[-1] = (what, pieces[-1][1], end)
            else:
                pieces.append((what, begin, end))
        return pieces

    def summary(self) -> dict[str, dict[str, float]]:
        """Shares of time by role, largest first: the mean over a role's warps. Time in nested spans is the inner one's, so
        a role's shares add up to 1."""
        times: dict[str, Counter[str]] = {}
        for warp, role in self.warps.items():
            of_role = times.setdefault(role, Counter())
            for what, begin, end in self.innermost(warp):
                of_role[what] += end - begin
        return {
            role: {what: time / of_role.total() for what, time in of_role.most_common()}
            for role, of_role in times.items()
            if of_role.total()
        }

    def figure(self) -> Figure:
        """A row a warp; nested spans lie over those that they are within, and are lower."""
        labels, legend = self._labels(), self._legend()
        rows = {warp: row for row, warp in enumerate(labels)}
        made, ax = blank(WIDTH, ROW * (len(rows) + len(legend) / 2 + 5), self._heading())
        from matplotlib.patches import Patch

        for warp, depth in sorted({(span.warp, span.depth) for span in self.spans}):
            spans = [span for span in self.spans if (span.warp, span.depth) == (warp, depth)]
            height = max(HEIGHT - 2 * INSET * max(0, depth - 1), INSET)
            ax.broken_barh(
                [(span.begin, span.cycles) for span in spans],
                (rows[warp] - height / 2, height),
                facecolors=[LOOKS[span.what if depth else OTHER][1] for span in spans],
                edgecolors="face",  # so that no span vanishes
                linewidth=0.3,
                zorder=depth + 1,
                gid=f"warp {warp}, depth {depth}",
            )
        for warp, tile, clock in self.tile_begins:
            ax.vlines(clock, rows[warp] - 0.5, rows[warp] + 0.5, "black", zorder=10)
            if rows[warp] == 0:
                ax.text(clock, -0.6, f"tile {tile}", size=8)
        ax.set_yticks([*rows.values()], [*labels.values()])
        ax.set_xlabel(f"time in {self.unit}; a black line: the warp's next tile begins", size=8)
        ax.grid(axis="x", color="#d0d0d0")
        patches = [Patch(color=LOOKS[what][1], label=LOOKS[what][2]) for what in legend]
        made.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
        return made

    def __repr__(self) -> str:
        """A line a warp, a letter for what it did most of the time; | where it goes on to the next tile."""
        labels = self._labels()
        width = max(map(len, labels.values()), default=0)
        per_column = max(1, -(-self.cycles // COLUMNS))
        lines = [self._heading(), f"{'':{width}}  a letter is {per_column} {self.unit}; | a tile begins"]
        begins = {(warp, clock // per_column) for warp, _, clock in self.tile_begins}
        for warp, label in labels.items():
            cells = [Counter[str]() for _ in range(-(-self.cycles // per_column))]
            for what, begin, end in self.innermost(warp):
                for column in range(begin // per_column, min(len(cells), -(-end // per_column))):
                    at = column * per_column
                    cells[column][what] += min(end, at + per_column) - max(begin, at)
            letters = [LOOKS[cell.most_common(1)[0][0]][0] if cell else " " for cell in cells]
            row = ["|" if (warp, column) in begins else letter for column, letter in enumerate(letters)]
            lines.append(f"{label:{width}}  {''.join(row).rstrip()}")
        lines += ["", *(f"  {LOOKS[what][0]}  {LOOKS[what][2]}" for what in self._legend() if what != OTHER), ""]
        for role, shares in self.summary().items():
            lines.append(f"{role}: " + ", ".join(f"{what} {share:.0%}" for what, share in shares.items()))
        return "\n".join(lines)

    # --- Parts of pictures ------------------------------------------------------------------------------------

    def _labels(self) -> dict[int, str]:
        """By warp."""
        return {warp: f"{role}, warp {warp}" for warp, role in self.warps.items()}

    def _heading(self) -> str:
        cut = "" if self.complete else "; memory for records was full before that"
        tiles = len({tile for _, tile, _ in self.tile_begins})  # it may compute fewer than were asked for
        return f"{self.kernel}, CTA {self.cta}: {tiles} tiles, {self.cycles} {self.unit}{cut}"

    def _legend(self) -> list[str]:
        seen = {what for warp in self.warps for what, _, _ in self.innermost(warp)}
        return [what for what in LOOKS if what in seen]
