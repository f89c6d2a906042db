"""A launch that a person runs instruction by instruction, and what its warps, barriers and shared memory hold meanwhile.

stepper = Machine().step(lambda: gemm.up_forward(x, up_proj, dispatch))
stepper.until("wgmma.mma_async")       # or a source line: until("mainloop.cuh:120")
stepper.step(10)                       # of the warps that the schedule chooses
stepper.step(10, warp=4)               # of this one, as far as it can go
stepper.registers(warp=4, lane=31)
stepper.reads(warpgroup=1)             # the bytes of shared memory that its last wgmma reads
stepper.back(10)                       # ten instructions back
"""

from typing import Any, NamedTuple

import numpy as np

from ptxsim import matrices
from ptxsim.barriers import Mbarrier
from ptxsim.checks import expect, integer
from ptxsim.memory import IN_WINDOW, SHARED_BASE, WINDOW, Block
from ptxsim.operands import registers_of
from ptxsim.ptx import Statement
from ptxsim.schedule import Report, start
from ptxsim.warp import LANES, Warp
from ptxsim.wgmma import BYTES, WARPS

SHOWN = 8  # registers of an instruction
FLOATS = {32: np.float32, 64: np.float64}


class Stepper:
    """One launch; arguments and options as for `ptxsim.schedule.start`. cta: below, of the cluster that runs.

    report: of what has run.  result, kernel: of the call that made the launch, and its kernel, by `Machine.step`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._launch = arguments, options
        self.result: Any = None
        self.kernel: Any = None
        self._asked: list[
            tuple[tuple[int, int] | None, bool]
        ] = []  # of each step: the warp and its CTA, whether it ran
        self._before: list[tuple[Block, Any, Any]] = []  # the arrays as they were before the first of them
        self._begin()

    def _begin(self) -> None:
        arguments, options = self._launch
        self.report, self._schedules = start(*arguments, **options)
        self._schedule, self.done = next(self._schedules), False
        self._last: dict[Warp, Statement] = {}

    # --- Going on ----------------------------------------------------------------------------------------------------------

    def step(self, count: int = 1, warp: int | None = None, cta: int = 0) -> "Stepper":
        """So many instructions, by the schedule, which may let things happen between; or of one warp, as far as it can go.

        ValueError for a warp that does not exist. Raises what `run` raises.
        """
        if warp is not None:
            self._warp(warp, cta)
        for _ in range(integer("count", count, least=1)):
            if not self._noted(None if warp is None else (warp, cta)):
                break
        return self

    def back(self, count: int = 1) -> "Stepper":
        """So many of the instructions back that `step` and `until` ran; what `finish` ran counts as none.

        The launch begins anew, with the arrays as they were, and runs the others again. ValueError for more than have run.
        """
        ran = [place for place, (_, ran) in enumerate(self._asked) if ran]
        expect("count", integer("count", count, least=1) <= len(ran), f"at most {len(ran)}, as many as have run", count)
        again, self._asked = self._asked[: ran[-count]], []
        for block, held, written in self._before:
            block.bytes[:] = held
            if written is not None:
                block.written[:] = written
        self._begin()
        for chosen, _ in again:
            self._noted(chosen)
        return self

    def until(self, text: str, most: int = 10**7) -> "Stepper":
        """Up to the first instruction, and with it, whose PTX or source line (``up.cu:120``) has this text.

        RuntimeError where the launch ends, or ``most`` instructions have run, without one. Raises what `run` raises.
        """
        for _ in range(integer("most", most, least=1)):
            last = self._noted(None)
            if last is None:
                break
            if text in last.text or text in str(last.line):
                return self
        raise RuntimeError(f"text: expected an instruction that still runs, got {text!r}")

    def finish(self) -> Report:
        """To the end. Raises what `run` raises."""
        while self._one(None, float("inf")):
            pass
        return self.report

    def _noted(self, chosen: tuple[int, int] | None) -> Statement | None:
        """One instruction, of a warp and its CTA, that `back` can take back."""
        if not self._before:
            blocks = [block for block in self._launch[1]["memory"].blocks if not block.read_only]
            self._before = [(b, b.bytes.copy(), None if b.written is None else b.written.copy()) for b in blocks]
        made = self._one(self._warp(*chosen) if chosen else None)
        self._asked.append((chosen, made is not None))
        return made

    def _one(self, chosen: Warp | None, count: float = 1) -> Statement | None:
        """The instruction that has run last, of this many."""
        while not self.done:
            schedule = self._schedule
            before = schedule.count
            schedule.until = before + count
            while schedule.advance(chosen):
                if schedule.count > before:
                    warp, step = schedule.last
                    self._last[warp] = step.instruction
                    return step.instruction
            if chosen:
                return None
            following = next(self._schedules, None)
            self._schedule, self.done = following or schedule, following is None
        return None

    # --- Looking -----------------------------------------------------------------------------------------------------------

    def _warp(self, number: int, cta: int) -> Warp:
        ctas = self._schedule.clusters[0].ctas
        warps = ctas[_index("cta", cta, len(ctas), ", of the cluster that runs")].warps
        return warps[_index("warp", number, len(warps))]

    def warps(self, cta: int = 0) -> int:
        """How many a CTA has. ValueError for a CTA that does not exist."""
        return len(self._warp(0, cta).cta.warps)

    def next(self, warp: int = 0, cta: int = 0) -> Statement:
        """The instruction that a warp has before it. ValueError for a warp that does not exist."""
        of = self._warp(warp, cta)
        return of.cta.launch.steps[of.pc].instruction

    def registers(self, warp: int = 0, lane: int = 0, cta: int = 0) -> "LaneRegisters":
        """Those of one lane, as they are now. ValueError for a warp or a lane that does not exist."""
        of, lane = self._warp(warp, cta), _index("lane", lane, LANES)
        near = [statement for statement in (self._last.get(of), self.next(warp, cta)) if statement]
        return LaneRegisters(of, lane, near)

    def barriers(self, cta: int = 0) -> dict[int, Mbarrier]:
        """A CTA's mbarriers, by their place in its shared memory. ValueError for a CTA that does not exist."""
        rank, known = self._warp(0, cta).cta.rank, self._schedule.clusters[0].mbarriers
        return {(at & IN_WINDOW) - SHARED_BASE: known[at] for at in sorted(known) if at >> WINDOW == rank}

    def shared(self, begin: int, size: int, cta: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of a CTA's shared memory, uint8 (size,), and which of them somebody wrote, bool. ValueError beyond its end."""
        block = self._warp(0, cta).cta.shared
        expect(
            "begin, size",
            0 <= begin <= begin + size <= block.size,
            f"bytes below {block.size}",
            f"{begin} to {begin + size}",
        )
        return block.bytes[begin : begin + size].copy(), block.written[begin : begin + size].copy()

    def stage(self, layout: Any, begin: int = 0, cta: int = 0) -> Any:
        """A stage read by a layout. layout: has start, bytes, holding(data, written).  begin: of the stage."""
        return layout.holding(*self.shared(begin + layout.start, layout.bytes, cta))

    def reads(self, warpgroup: int = 0, cta: int = 0) -> dict[str, "Operand"]:
        """The operands of the last wgmma that a warpgroup has issued, as they lie in shared memory; {} before the first.

        ValueError for a warpgroup that does not exist.
        """
        issued = self._warp(WARPS * warpgroup, cta).cta.warpgroups[warpgroup].products[-1:]
        return {name: Operand(name, places) for one in issued for name, places in zip("AB", one.places(), strict=True)}

    def accumulators(self, warpgroup: int = 0, cta: int = 0) -> dict[str, np.ndarray]:
        """The sums of a warpgroup's wgmma so far, fp32 (64, N), by the name of the first register that it goes to.

        Those that are under way count where the schedule has let them happen. ValueError for a warpgroup that does not exist.
        """
        first = self._warp(WARPS * warpgroup, cta)
        names, sums = first.cta.launch.entry.names, first.cta.warpgroups[warpgroup].sums
        return {names[registers[0]]: values.copy() for registers, values in sums.items()}

    def matrix(self, registers: list[str], warpgroup: int = 0, cta: int = 0) -> np.ndarray:
        """Registers of a warpgroup's threads as the matrix fp32 (64, N) that wgmma's D is, N / 2 names in D's order.

        KeyError for a name that does not exist, ValueError for a warpgroup that does not exist.
        """
        first = self._warp(WARPS * warpgroup, cta)
        names, of = first.cta.launch.entry.names, first.cta.warps[first.number : first.number + WARPS]
        places = [dict(zip(names, range(len(names)), strict=True))[name] for name in registers]
        return matrices.fragment_to_matrix(
            np.array([[warp.registers[place] for place in places] for warp in of]).view(np.float32)
        )

    def __repr__(self) -> str:
        schedule, state = self._schedule, "at its end" if self.done else "running"
        steps = self.report.steps + (0 if self.done else schedule.count)
        lines = [f"{self.report.entry}, seed {self.report.seed}: {state}, {steps} instructions"]
        for warp in schedule.clusters[0].warps:
            instruction = warp.cta.launch.steps[warp.pc].instruction
            lanes = f"{int(warp.mask().sum())} of {LANES} lanes: " if warp.others else ""
            does = f"waits ({warp.wait.what})" if warp.wait and not schedule.able(warp) else "goes on"
            said = "is done" if warp.done else f"{does} at {instruction.line}: {lanes}{instruction.text}"
            lines.append(f"  {warp.cta.name}, {warp.name:8} {said}"[:150])
        lines += [f"  under way: {one}" for one in schedule.world.pending]
        return "\n".join(lines)


def _index(name: str, value: int, count: int, of: str = "") -> int:
    """``value``, of an argument of this name, where it is one of this many."""
    expect(name, 0 <= integer(name, value) < count, f"0 to {count - 1}{of}", value)
    return value


class Operand(NamedTuple):
    """wgmma's A (64, K) or B (N, K). places: in shared memory, of each element's first byte, int64 (rows, K)."""

    name: str
    places: np.ndarray

    @property
    def first(self) -> int:
        """The first byte."""
        return int(self.places.min())

    @property
    def last(self) -> int:
        """The last byte."""
        return int(self.places.max()) + BYTES // self.places.shape[1] - 1

    def __repr__(self) -> str:
        rows, depth = self.places.shape
        return f"{self.name}: {rows} x {depth}, {rows * BYTES} of the bytes {self.first} to {self.last}"


class Value(NamedTuple):
    """A register's bits as an unsigned and a signed number, and as a float with 32 or 64 bits. written: by anybody."""

    bits: int
    signed: int
    number: float | None
    written: bool

    def __repr__(self) -> str:
        if not self.written:
            return "nobody wrote it"
        return f"{self.bits:#x} = {self.signed}" + ("" if self.number is None else f" = {self.number:.7g}")


def _value(warp: Warp, place: int, lane: int) -> Value:
    word, width = warp.registers[place][lane], warp.cta.launch.entry.widths[place]
    bits, missing = int(word), warp.unwritten.get(place)
    signed = bits - (1 << width) if width > 1 and bits >> (width - 1) else bits
    number = float(word.view(FLOATS[width])) if width in FLOATS else None
    return Value(bits, signed, number, missing is None or not missing[lane])


class LaneRegisters(dict[str, Value]):
    """A lane's registers by name. Its repr has the first of the warp's last instruction and of its next one."""

    def __init__(self, warp: Warp, lane: int, near: list[Statement]) -> None:
        self.warp, self.lane, self.near, self.names = warp, lane, near, warp.cta.launch.entry.names
        super().__init__({name: _value(warp, place, lane) for place, name in enumerate(self.names)})

    def __repr__(self) -> str:
        names, lines = self.names, [f"{self.warp.cta.name}, {self.warp.name}, lane {self.lane}"]
        for when, statement in zip(("last", "next")[-len(self.near) :], self.near, strict=True):
            lines.append(f"  {when}: {statement.text}   ({statement.line})"[:150])
            read = dict.fromkeys(place for operand in statement.operands for place in registers_of(operand))
            guard = (statement.guard[0],) if statement.guard else ()
            lines += [f"    {names[place]:8} {self[names[place]]}" for place in (*guard, *read)][:SHOWN]
        return "\n".join(lines)
