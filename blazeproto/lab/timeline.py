"""What each warp of one CTA did and when: clock reads that a macro compiles into the kernels (gemm/cuda/timeline.cuh), drawn.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from blazeproto.gemm import product
from blazeproto.gemm.compile import Kernel
from blazeproto.lab.spans import Span, Timeline
from blazeproto.lab.target import Machine
from blazeproto.runtime import checks, driver
from blazeproto.runtime.optional import need

MACRO = "TIMELINE"
# timeline.cuh has the same.
WARPS, RECORDS, RECORD_BYTES = 16, 4096, 8
EDGES = {1: "begin", 2: "end", 3: "at"}
TILE = "tile"
WHATS = (
    "",  # no record
    TILE,
    "producer",
    "consumer",
    "epilogue",
    "schedule",
    "wait full",
    "wait empty",
    "TMA",
    "copy",
    "mma",
    "hand-over",
    "store",
)
ROLES = ("producer", "consumer", "epilogue")
WARPGROUP_WARPS = 4
UNDER_MMA = ("hand-over", "store")  # what a consumer does while its wgmma run

Records = Sequence[Sequence[tuple[int, int]]]


# --- From records to spans ---------------------------------------------------------------------------------------------------


def parse(records: Records, *, kernel: str = "", cta: int = 0, tiles: int = 3) -> Timeline:
    """Spans of the first ``tiles`` tiles.

    records: (clock, what) of each warp, in order: 32-bit clocks, which may wrap, and edges and kinds as in timeline.cuh. A zero
    for what ends a warp's. What is open at a warp's last record, or where tile number ``tiles`` begins, ends there.

    ValueError where there are none, for a kind that timeline.cuh has not, and for a span that ends without having begun.
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
        raise ValueError("records: expected those of at least one warp, got none")
    first = min((span.begin for span in spans), default=0)
    moved = [
        replace(s, begin=s.begin - first, end=s.end - first)
        for s in sorted(spans, key=lambda span: (span.warp, span.begin, span.depth))
    ]
    shown = tuple((warp, tile, clock - first) for warp, tile, clock in begins if tile < tiles)
    return Timeline(kernel, cta, tiles, tuple(moved), shown, complete)


def _unwrapped(clocks: Sequence[int], origin: int) -> list[int]:
    """Clocks modulo 2^32 as whole numbers, the first of them less than 2^31 from ``origin``."""
    first = origin + (clocks[0] - origin + 2**31) % 2**32 - 2**31
    return list(accumulate(clocks[1:], lambda before, clock: before + (clock - before) % 2**32, initial=first))


def _role(warp: int, what: str) -> str:
    return f"consumer {warp // WARPGROUP_WARPS - 1}" if what == "consumer" else what


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
                role = _role(warp, what)
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
    """What the warps of one CTA do in the first ``tiles`` tiles that it computes.

    launch: calls one product, such as ``lambda: gemm.up_forward(x, up_proj, dispatch)``. It is called twice, to warm up and to be
    recorded, and what it computes is what it always does.  cta: its number in the grid.

    TypeError or ValueError for arguments that are none of these; ValueError where a call launches several kernels made of
    tiles; RuntimeError where nothing was recorded: it launches none, or the grid has no such CTA.
    """
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
        memories = [_Memory(kernel, device) for kernel in loaded]
        runtime.deviceSynchronize()
        for memory in memories:
            memory.record(cta)
        try:
            launch()
            runtime.deviceSynchronize()
        finally:
            for memory in memories:
                memory.record(-1)
    read = [(memory.kernel.entry, memory.read()) for memory in memories]
    found = [(name, records) for name, records in read if any(warp[0][1] for warp in records)]
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ValueError(f"launch: expected one kernel made of tiles, got {names}")
    if not found:
        raise RuntimeError(
            f"CTA {cta} recorded nothing: the grid has none of that number, or the call runs no kernel made of tiles"
        )
    return parse(found[0][1], kernel=found[0][0], cta=cta, tiles=tiles)


def record_steps(launch: Callable[[Machine], object], *, tiles: int = 3, cta: int = 0) -> Timeline:
    """The same of a product on the machine, in steps: instructions of all warps of the cluster, one after another.

    launch: calls one product, compiled with the clock reads, on the machine that it is given. Which warp goes on when is the
    schedule's choice: the picture has the order of things, no time.

    TypeError or ValueError for tiles or a CTA that are none; RuntimeError where nothing was recorded.
    """
    checks.integer("tiles", tiles, 1)
    checks.integer("cta", cta, 0)
    records = np.zeros((WARPS, RECORDS, 2), np.uint32)
    machine = Machine(variables={"timeline_records": records, "timeline_cta": np.array([cta], np.int32)})
    launch(machine)
    if not records.any():
        raise RuntimeError(f"CTA {cta} recorded nothing: the grid has none of that number")
    read = [[(clock, what) for clock, what in warp] for warp in records[:, 1:].tolist()]
    return replace(parse(read, kernel=machine.reports[0].entry, cta=cta, tiles=tiles), unit="steps")


class _Memory:
    """Where a loaded kernel leaves its records."""

    def __init__(self, kernel: Kernel, device: int) -> None:
        self.kernel = kernel
        self._module = kernel.function(device).module
        self._records = self._array("timeline_records", (WARPS, RECORDS, 2), "uint32")
        self._cta = self._array("timeline_cta", (1,), "int32")

    def _array(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        import cupy

        memory = cupy.cuda.UnownedMemory(int(self._module.get_global_var(name)), 4 * math.prod(shape), self._module)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def record(self, cta: int) -> None:
        """From the next launch on, of this CTA; -1: of none. Waits for the GPU."""
        from cupy.cuda import runtime

        if cta >= 0:
            runtime.memset(self._records.data.ptr, 0, self._records.nbytes)
        self._cta.set(np.array([cta], "int32"))
        runtime.deviceSynchronize()

    def read(self) -> Records:
        """The marks of each warp; the first place of its memory holds none."""
        return [[(clock, what) for clock, what in warp] for warp in self._records.get()[:, 1:].tolist()]
