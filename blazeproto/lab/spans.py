"""What warps did and when, as spans of clock cycles; as text, for a terminal, and as a drawing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from blazeproto.lab.svg import Picture, Svg

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
LABEL_WIDTH, PLOT_WIDTH, ROW, GAP, TOP = 150, 1000, 18, 6, 64  # of the drawing, pixels
INSET = 3.5  # by which a nested span is lower at either edge


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

    kernel: its name.  tile_begins: (warp, tile, cycle).  complete: False where a warp's memory for records was full before its
    last tile.
    """

    kernel: str
    cta: int
    tiles: int
    spans: tuple[Span, ...]
    tile_begins: tuple[tuple[int, int, int], ...]
    complete: bool = True

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
        times: dict[str, dict[str, int]] = {}
        for warp, role in self.warps.items():
            of_role = times.setdefault(role, {})
            for what, begin, end in self.innermost(warp):
                of_role[what] = of_role.get(what, 0) + end - begin
        return {
            role: {what: time / total for what, time in sorted(of_role.items(), key=lambda item: -item[1])}
            for role, of_role in times.items()
            if (total := sum(of_role.values()))
        }

    def svg(self) -> str:
        """A row a warp, a colour for each kind of span, inner spans over outer ones; no script."""
        return drawing(self)

    def __repr__(self) -> str:
        return text(self)


# --- Pictures -------------------------------------------------------------------------------------------------------------


def _label(timeline: Timeline, warp: int) -> str:
    return f"{timeline.warps[warp]}, warp {warp}"


def _heading(timeline: Timeline) -> str:
    cut = "" if timeline.complete else "; memory for records was full before that"
    tiles = len({tile for _, tile, _ in timeline.tile_begins})  # it may compute fewer than were asked for
    return f"{timeline.kernel}, CTA {timeline.cta}: {tiles} tiles, {timeline.cycles} cycles{cut}"


def _legend(timeline: Timeline) -> list[str]:
    seen = {what for warp in timeline.warps for what, _, _ in timeline.innermost(warp)}
    return [what for what in LOOKS if what in seen]


def text(timeline: Timeline) -> str:
    """A line a warp, a letter for what it did most of the time; | where it goes on to the next tile."""
    width = max((len(_label(timeline, warp)) for warp in timeline.warps), default=0)
    per_column = max(1, -(-timeline.cycles // COLUMNS))
    lines = [_heading(timeline), f"{'':{width}}  a letter is {per_column} cycles; | a tile begins"]
    begins = {(warp, clock // per_column) for warp, _, clock in timeline.tile_begins}
    for warp in timeline.warps:
        cells = [Counter[str]() for _ in range(-(-timeline.cycles // per_column))]
        for what, begin, end in timeline.innermost(warp):
            for column in range(begin // per_column, min(len(cells), -(-end // per_column))):
                at = column * per_column
                cells[column][what] += min(end, at + per_column) - max(begin, at)
        letters = [LOOKS[cell.most_common(1)[0][0]][0] if cell else " " for cell in cells]
        row = ["|" if (warp, column) in begins else letter for column, letter in enumerate(letters)]
        lines.append(f"{_label(timeline, warp):{width}}  {''.join(row).rstrip()}")
    lines += ["", *(f"  {LOOKS[what][0]}  {LOOKS[what][2]}" for what in _legend(timeline) if what != "other"), ""]
    for role, shares in timeline.summary().items():
        lines.append(f"{role}: " + ", ".join(f"{what} {share:.0%}" for what, share in shares.items()))
    return "\n".join(lines)


def drawing(timeline: Timeline) -> str:
    """A row a warp; nested spans lie over those that they are within, and are lower."""
    legend = _legend(timeline)
    rows = {warp: TOP + index * (ROW + GAP) for index, warp in enumerate(timeline.warps)}
    bottom = TOP + len(rows) * (ROW + GAP)
    picture = Svg(LABEL_WIDTH + PLOT_WIDTH + 20, bottom + 36 + 16 * ((len(legend) + 1) // 2), _heading(timeline))
    scale = PLOT_WIDTH / max(1, timeline.cycles)
    picture.text(8, 18, _heading(timeline))

    step = _round_step(timeline.cycles / 8)
    for clock in range(0, timeline.cycles + 1, step):
        x = LABEL_WIDTH + clock * scale
        picture.line(x, TOP - 6, x, bottom, "#d0d0d0")
        picture.text(x, TOP - 10, clock, anchor="middle", colour="#666666")

    for depth in range(max((span.depth for span in timeline.spans), default=0) + 1):
        boxes: dict[str, list[tuple[float, float, float, float]]] = {}
        for span in timeline.spans:
            if span.depth == depth:
                what, inset = ("other", 0.0) if depth == 0 else (span.what, INSET * (depth - 1))
                place = (span.begin * scale + LABEL_WIDTH, rows[span.warp] + inset)
                size = (max(0.1, span.cycles * scale), max(4.0, ROW - 2 * inset))  # no span vanishes
                boxes.setdefault(what, []).append((*place, *size))
        for what, of_what in boxes.items():
            picture.rectangles(of_what, LOOKS[what][1], what)
    for warp, y in rows.items():
        picture.text(LABEL_WIDTH - 8, y + ROW - 5, _label(timeline, warp), anchor="end")
    for warp, tile, clock in timeline.tile_begins:
        x = LABEL_WIDTH + clock * scale
        picture.line(x, rows[warp] - 3, x, rows[warp] + ROW + 3, "#000000")
        if warp == next(iter(rows)):
            picture.text(x + 2, TOP - 24, f"tile {tile}", colour="#000000")
    for index, what in enumerate(legend):
        x, y = 8 + index % 2 * 560, bottom + 14 + index // 2 * 16
        picture.rectangles([(x, y, 12, 10)], LOOKS[what][1])
        picture.text(x + 18, y + 9, LOOKS[what][2])
    picture.text(
        8, bottom + 30 + 16 * ((len(legend) + 1) // 2), "time in cycles; a black line: the warp's next tile begins"
    )
    return str(picture)


def _round_step(step: float) -> int:
    """1, 2 or 5 times a power of ten, at least ``step``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10
