"""Timelines of the warps of one CTA: clock reads that a macro compiles into the kernels (gemm/cuda/timeline.cuh), drawn.

>>> from blazeproto.lab.timeline import record
>>> picture = record(lambda: gemm.up_forward(x, up_proj, dispatch), tiles=3)
>>> picture                                    # a line a warp, time to the right
>>> picture.summary()["consumer 0"]            # shares of its time
>>> picture.save("up.svg")

Times are in cycles of the multiprocessor, which all warps of a CTA count alike. A clock read and its record take some tens of
cycles by estimate, so short waits look longer than they are; without the macro a kernel has no instruction of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from blazeproto.gemm import product
from blazeproto.gemm.compile import Kernel
from blazeproto.lab.marks import EDGES, ROLES, WHATS, marked
from blazeproto.lab.svg import Picture, blank
from blazeproto.lab.target import Machine
from blazeproto.runtime import checks, driver
from blazeproto.runtime.optional import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MACRO = "TIMELINE"
# timeline.cuh has the same.
WARPS, RECORDS, RECORD_BYTES = 16, 4096, 8
WARPGROUP_WARPS = 4
UNDER_MMA = ("hand-over", "store")  # what a consumer does while its wgmma run

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
Records = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Span:
    """One activity of a warp, from one clock to another, in cycles from the first record of all.

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
    complete: False where a warp's memory for records was full before its last tile.  sources: what `marked` says of the kernel.
    """

    kernel: str
    cta: int
    tiles: int
    spans: tuple[Span, ...]
    tile_begins: tuple[tuple[int, int, int], ...]
    complete: bool = True
    unit: str = "cycles"
    sources: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)

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
        pieces: list[tuple[str | None, int, int]] = []
        opened: list[Span] = []
        waiting = sorted(own, key=lambda span: (span.begin, span.depth))[::-1]
        for begin, end in pairwise(cuts):
            while waiting and waiting[-1].begin <= begin:
                opened.append(waiting.pop())
            opened = [span for span in opened if span.end > begin]
            deepest = max(opened, key=lambda span: span.depth, default=None)
            pieces.append((None if deepest is None else deepest.what if deepest.depth else OTHER, begin, end))
        alike = ((what, list(group)) for what, group in groupby(pieces, key=lambda piece: piece[0]))
        return [(what, group[0][1], group[-1][2]) for what, group in alike if what]

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

        for band, spans in self._bands().items():
            warp, depth = spans[0].warp, spans[0].depth
            height = max(HEIGHT - 2 * INSET * max(0, depth - 1), INSET)
            ax.broken_barh(
                [(span.begin, span.cycles) for span in spans],
                (rows[warp] - height / 2, height),
                facecolors=[LOOKS[span.what if depth else OTHER][1] for span in spans],
                edgecolors="face",  # so that no span vanishes
                linewidth=0.3,
                zorder=depth + 1,
                gid=band,
            )
        for warp, tile, clock in self.tile_begins:
            ax.vlines(clock, rows[warp] - 0.5, rows[warp] + 0.5, "black", zorder=10)
            if rows[warp] == 0:
                ax.text(clock, -0.6, f"tile {tile}", size=8)
        ax.set_yticks([*rows.values()], [*labels.values()])
        ax.set_xlabel(f"time in {self.unit}; a black line: the warp's next tile begins", size=8)
        ax.grid(axis="x", color="#d0d0d0")
        patches = [Patch(color=LOOKS[what][1], label=said) for what, said in legend.items()]
        made.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
        return made

    @property
    def titles(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Texts that hovering over a span shows: warp, activity, times, source lines, and the instruction that it is about."""
        return {
            band: [
                f"{span.role}, warp {span.warp}: {span.what}\n{span.cycles} {self.unit}, {span.begin} to {span.end}"
                f"{f', tile {span.tile}' * (span.tile >= 0)}\n"
                + self.sources.get((span.role.split()[0], span.what.removesuffix(" under mma")), "")
                for span in spans
            ]
            for band, spans in self._bands().items()
        }

    def _bands(self) -> dict[str, list[Span]]:
        """Spans by warp and depth, which are drawn together."""
        ordered = sorted(self.spans, key=lambda span: (span.warp, span.depth))
        return {
            name: [*spans] for name, spans in groupby(ordered, lambda span: f"warp {span.warp}, depth {span.depth}")
        }

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
        lines += ["", *(f"  {LOOKS[what][0]}  {said}" for what, said in self._legend().items() if what != OTHER), ""]
        for role, shares in self.summary().items():
            lines.append(f"{role}: " + ", ".join(f"{what} {share:.0%}" for what, share in shares.items()))
        return "\n".join(lines)

    def _labels(self) -> dict[int, str]:
        """By warp."""
        return {warp: f"{role}, warp {warp}" for warp, role in self.warps.items()}

    def _heading(self) -> str:
        cut = "" if self.complete else "; memory for records was full before that"
        tiles = len({tile for _, tile, _ in self.tile_begins})  # it may compute fewer than were asked for
        return f"{self.kernel}, CTA {self.cta}: {tiles} tiles, {self.cycles} {self.unit}{cut}"

    def _legend(self) -> dict[str, str]:
        seen = {what for warp in self.warps for what, _, _ in self.innermost(warp)}
        return {what: said for what, (_, _, said) in LOOKS.items() if what in seen}


# --- From records to spans ---------------------------------------------------------------------------------------------------


def parse(records: Records, *, tiles: int = 3, kernel: str = "", cta: int = 0, **fields: Any) -> Timeline:
    """Spans of the first ``tiles`` tiles.  fields: others of the timeline.

    records: (clock, what) of each warp, in order: 32-bit clocks, which may wrap, and edges and kinds as in timeline.cuh. A zero
    ends a warp's. A span that is open at a warp's last record, or when tile number ``tiles`` begins, ends there.

    ValueError without records, for a kind that timeline.cuh lacks, and for a span that ends without having begun.
    """
    spans: list[Span] = []
    begins: list[tuple[int, int, int]] = []
    complete, origin = True, None
    for warp, given in enumerate(records):
        own = list(takewhile(lambda record: record[1], given))
        if not own:
            continue
        origin = own[0][0] if origin is None else origin
        clocks = _unwrapped([clock for clock, _ in own], origin)
        found, tile_begins = _spans(warp, clocks, [what for _, what in own], tiles)
        if len(found) == 1 and not tile_begins:
            continue  # an idle warp
        spans += found
        begins += tile_begins
        complete &= len(tile_begins) > tiles or found[-1].finished  # the last to be closed is all that the warp did
    if origin is None:
        raise ValueError("records: expected at least one warp's, got none")
    first = min((span.begin for span in spans), default=0)
    moved = [
        replace(s, begin=s.begin - first, end=s.end - first)
        for s in sorted(spans, key=lambda span: (span.warp, span.begin, span.depth))
    ]
    shown = tuple((warp, tile, clock - first) for warp, tile, clock in begins if tile < tiles)
    return Timeline(kernel, cta, tiles, tuple(moved), shown, complete, **fields)


def _unwrapped(clocks: Sequence[int], origin: int) -> list[int]:
    """Clocks modulo 2^32 as whole numbers, the first of them less than 2^31 from ``origin``."""
    first = origin + (clocks[0] - origin + 2**31) % 2**32 - 2**31
    return list(accumulate(clocks[1:], lambda before, clock: before + (clock - before) % 2**32, initial=first))


def _spans(
    warp: int, clocks: Sequence[int], codes: Sequence[int], tiles: int
) -> tuple[list[Span], list[tuple[int, int, int]]]:
    """A warp's spans, and (warp, tile, cycle) of its tiles, one more than ``tiles`` where there is one."""
    done: list[Span] = []
    opened: list[tuple[str, int, int]] = []  # what, begin, tile
    begins: list[tuple[int, int, int]] = []
    role = ""

    def close(end: int, *, finished: bool) -> None:
        what, begin, tile = opened.pop()
        done.append(Span(warp, role, what, begin, end, len(opened), tile, finished))

    for clock, code in zip(clocks, codes, strict=True):
        edge, kind = EDGES.get(code >> 8), code & 0xFF
        if edge is None or not 0 < kind < len(WHATS):
            raise ValueError(f"records: expected a kind of timeline.cuh, got {code:#x} of warp {warp}")
        what = WHATS[kind]
        if edge == "at":
            begins.append((warp, len(begins), clock))
            if len(begins) > tiles:
                break
        elif edge == "begin":
            if what in ROLES:
                role = f"consumer {warp // WARPGROUP_WARPS - 1}" if what == "consumer" else what
            if what in UNDER_MMA and any(outer == "mma" for outer, _, _ in opened):
                what += " under mma"
            opened.append((what, clock, len(begins) - 1))
        else:
            if not opened or opened[-1][0].removesuffix(" under mma") != what:
                raise ValueError(f"records: warp {warp} ends {what!r} within {[name for name, _, _ in opened]}")
            close(clock, finished=True)
    while opened:
        close(clock, finished=False)
    return done, begins


# --- Recording ---------------------------------------------------------------------------------------------------------------


@contextmanager
def compiled_in() -> Iterator[None]:
    """Products that are launched meanwhile are compiled with the clock reads. Not for several threads at a time."""
    before = product.DEBUG
    product.DEBUG = (*before, MACRO)
    try:
        yield
    finally:
        product.DEBUG = before


def record(launch: Callable[[], object], *, tiles: int = 3, cta: int = 0) -> Timeline:
    """Records the warps of one CTA in the first ``tiles`` tiles that it computes.

    launch: calls one product, such as ``lambda: gemm.up_forward(x, up_proj, dispatch)``. It is called twice, to warm up and to be
    recorded, and computes the same as ever.  cta: its number in the grid.

    TypeError or ValueError for arguments that are none of these; ValueError where a call launches several kernels made of
    tiles; RuntimeError where nothing was recorded: it launches none, or the grid has no such CTA."""
    if not callable(launch):
        raise TypeError(f"launch: expected a callable, got {type(launch).__name__}")
    checks.integer("tiles", tiles, 1)
    checks.integer("cta", cta, 0)
    need("cupy")
    from cupy.cuda import runtime

    with compiled_in():
        launch()
        device = runtime.getDevice()
        loaded = [kernel for kernel in driver.LOADED if isinstance(kernel, Kernel) and device in kernel._functions]
        loaded = [kernel for kernel in loaded if f"-D{MACRO}" in kernel.options]
        variables = [_variables(kernel, device) for kernel in loaded]
        runtime.deviceSynchronize()
        for records, chosen in variables:
            runtime.memset(records.data.ptr, 0, records.nbytes)
            chosen.set(np.array([cta], "int32"))
        runtime.deviceSynchronize()
        try:
            launch()
            runtime.deviceSynchronize()
        finally:
            for _, chosen in variables:
                chosen.set(np.array([-1], "int32"))  # from now on, none
            runtime.deviceSynchronize()
    read = [(kernel, _marks(memory.get())) for kernel, (memory, _) in zip(loaded, variables, strict=True)]
    found = [(kernel, records) for kernel, records in read if any(warp[0][1] for warp in records)]
    if len(found) > 1:
        names = ", ".join(kernel.entry for kernel, _ in found)
        raise ValueError(f"launch: expected one kernel made of tiles, got {names}")
    if not found:
        raise RuntimeError(f"CTA {cta} recorded nothing: the grid has none of that number, or the call has no tiles")
    (kernel, records), *_ = found
    return parse(records, kernel=kernel.entry, cta=cta, tiles=tiles, sources=marked(kernel.ptx, kernel.entry))


def record_steps(launch: Callable[[Machine], object], *, tiles: int = 3, cta: int = 0) -> Timeline:
    """The same of a product on the machine, in steps: instructions of all warps of the cluster, one after another.

    launch: calls one product, compiled with the clock reads, on the machine that it is given. The schedule decides which warp
    goes on: the picture shows an order, no time.

    TypeError or ValueError for tiles or a CTA that are none; RuntimeError where nothing was recorded."""
    checks.integer("tiles", tiles, 1)
    checks.integer("cta", cta, 0)
    records = np.zeros((WARPS, RECORDS, 2), np.uint32)
    machine = Machine(variables={"timeline_records": records, "timeline_cta": np.array([cta], np.int32)})
    launch(machine)
    if not records.any():
        raise RuntimeError(f"CTA {cta} recorded nothing: the grid has none of that number")
    name = machine.reports[0].entry
    sources = next(marked(text, name) for text, program in machine.programs.items() if name in program.entries)
    return parse(_marks(records), kernel=name, cta=cta, tiles=tiles, unit="steps", sources=sources)


def _variables(kernel: Kernel, device: int) -> tuple[Any, Any]:
    """What timeline.cuh has in a loaded kernel, as CuPy's arrays: the records, and the CTA that leaves them."""
    import cupy

    module = kernel.function(device).module

    def array(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        memory = cupy.cuda.UnownedMemory(int(module.get_global_var(name)), 4 * math.prod(shape), module)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    return array("timeline_records", (WARPS, RECORDS, 2), "uint32"), array("timeline_cta", (1,), "int32")


def _marks(records: np.ndarray) -> Records:
    """Those of each warp; the first place of its memory holds none."""
    return [[(clock, what) for clock, what in warp] for warp in records[:, 1:].tolist()]
