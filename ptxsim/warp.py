"""A warp: 32 lanes with their registers, who of them goes on where, and the step that one instruction is.

Lanes that branch apart form groups, each with a program counter. The group that is furthest back runs until it meets another,
which it joins; so lanes come together again at the first place that all of them reach. (PTX ISA §3.1 leaves the order open.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ptxsim.memory import Refusal, Semantics
from ptxsim.ptx import WORDS, Statement

LANES = 32
ALL, NONE = np.ones(LANES, np.bool_), np.zeros(LANES, np.bool_)
LANE = np.arange(LANES)
POISON_OF = {bits: np.full(LANES, 0xFBFBFBFBFBFBFBFB >> (64 - bits), WORDS[bits]) for bits in (1, 16, 32, 64)}


class MachineError(RuntimeError):
    """A kernel did something forbidden; the message says kernel, source line, warp and lane, then the seed and the races before.

    report: of the run that it ended.
    """

    report: Any = None

    def __str__(self) -> str:
        return super().__str__() + (f"\n{self.report}" if self.report else "")


class Wait(NamedTuple):
    """Why a warp does not go on. what: its text, at any time, says for what it waits.

    spinning: it does go on, but may ask the same again, which has the same ``question``.
    """

    over: Callable[[], bool]
    what: object
    spinning: bool = False
    question: object = None


OTHER_LANES = Wait(lambda: True, "other lanes of its warp")


class Warp:
    """Its CTA, which cta.py makes, and what its lanes have.

    registers: by their place, (32,) unsigned words.  unwritten: by register, lanes that nobody wrote.
    clock: instructions of all warps of its cluster so far.  arrivals: at the cluster's barrier.
    """

    def __init__(self, cta: Any, number: int, threads: int, widths: list[int]) -> None:
        self.cta, self.number, self.name = cta, number, f"warp {number}"
        self.registers: list[np.ndarray] = [POISON_OF[width] for width in widths]
        self.unwritten: dict[int, np.ndarray] = dict.fromkeys(range(len(widths)), ALL)
        self.in_flight: dict[int, Any] = {}  # accumulators of wgmma that nobody has waited for, and that instruction
        self.fenced: list[np.ndarray] = []  # the registers at the last wgmma.fence
        self.alive = threads > LANE
        self.pc, self.clock, self.arrivals, self.done = 0, 0, 0, False
        self.lanes: np.ndarray | None = None if threads >= LANES else self.alive  # that run now; None for all 32
        self.others: list[tuple[int, np.ndarray]] = []  # groups that are further on, the furthest back last
        self.held: list[tuple[int, np.ndarray]] = []  # groups that wait for these to come too,
        self.kinds: dict[int, object] = {}  # at a barrier of this kind, by their pc
        self.wait: Wait | None = None
        self.actor: Any = None  # races.py
        self.released, self.observed = dict[int, Any](), dict[int, Any]()  # world.py: clocks by scope

    def mask(self, running: np.ndarray | None = None) -> np.ndarray:
        """The lanes that run: those that an instruction was given, or else all that are here."""
        chosen = self.lanes if running is None else running
        return ALL if chosen is None else chosen

    def active(self, running: np.ndarray | None) -> np.ndarray:
        """Their numbers."""
        return self.mask(running).nonzero()[0]

    # --- Control -------------------------------------------------------------------------------------------------------------

    def go(self, pc: int) -> None:
        """The running lanes go on at ``pc``, unless others are further back."""
        self.pc = pc
        if (self.others and pc >= self.others[-1][0]) or (self.held and any(pc == at for at, _ in self.held)):
            self.others.append((pc, self.mask()))
            self._next_group()

    def branch(self, taken: np.ndarray, target: int | None) -> None:
        """The running lanes that take a branch, None to their end, and the others."""
        rest = self.mask() & ~taken
        self.others += [(self.pc + 1, rest)] if rest.any() else []
        if target is not None:
            self.others.append((target, taken))
        else:
            self.alive = self.alive & ~taken
        if self.others or self.held:
            self._next_group()
        else:
            self.done = True
            self.cta.ended += 1

    def hold(self, kind: object = None) -> bool:
        """The running lanes wait where they are for the others of the warp: whether some can go on."""
        if not self.others:
            return False
        self.kinds[self.pc] = kind
        self.held.append((self.pc, self.mask()))
        self._next_group()
        return True

    def meet(self, kind: object) -> np.ndarray:
        """Lanes that were held at such a barrier elsewhere in the text; they go on behind it."""
        here = [(pc + 1, lanes) for pc, lanes in self.held if self.kinds[pc] == kind]
        self.held = [group for group in self.held if self.kinds[group[0]] != kind]
        self.others = sorted(self.others + here, key=lambda group: -group[0])
        return np.logical_or.reduce([lanes for _, lanes in here]) if here else NONE

    def _next_group(self) -> None:
        """The lanes that are furthest back, together with all that are at the same place. Lanes that are held go on last."""
        groups = self.others or self.held
        groups.sort(key=lambda group: -group[0])
        self.pc, lanes = groups.pop()
        for pc, more in (*self.others, *self.held):
            if pc == self.pc:
                lanes = lanes | more
        self.others = [group for group in self.others if group[0] != self.pc]
        self.held = [group for group in self.held if group[0] != self.pc]
        self.lanes = None if lanes.all() else lanes

    # --- Registers -----------------------------------------------------------------------------------------------------------

    def write(self, register: int, value: np.ndarray, lanes: np.ndarray | None, unwritten: np.ndarray = NONE) -> None:
        """value: (32,), of the register's width.  unwritten: the lanes in which nobody wrote what it was made of."""
        before = self.unwritten.pop(register, NONE)
        if lanes is not None:
            value = np.where(lanes, value, self.registers[register])
            if unwritten is not before:
                unwritten = np.where(lanes, unwritten, before)
        self.registers[register] = value
        if unwritten is not NONE and unwritten.any():
            self.unwritten[register] = unwritten

    def unwritten_among(self, registers: tuple[int, ...]) -> np.ndarray:
        """The lanes of which one of these registers holds what nobody wrote, or NONE.

        Raises Refusal for one that a wgmma under way is going to write.
        """
        found = NONE
        for register in registers:
            if register in self.unwritten:
                if register in self.in_flight:
                    line = self.in_flight[register].instruction.line
                    raise Refusal(f"an accumulator that nobody has waited for: the wgmma at {line} is under way")
                found = found | self.unwritten[register]
        return found


Run = Callable[[Warp, "np.ndarray | None"], "Wait | None"]  # a warp, and its lanes that run: None for all that are here


class Compiled:
    """One instruction: runs for the lanes of a warp, and moves its program counter.

    run: what it does to registers and memory; a branch and a ``ret`` do nothing.  target: of a branch.
    visible: whether other warps may see what it does, so that another may go first.
    """

    def __init__(self, instruction: Statement, target: int | None = None, visible: bool = False) -> None:
        self.instruction, self.guard, self.target, self.visible = instruction, instruction.guard, target, visible
        self.run: Run | None = None
        self.semantics = Semantics()

    def __call__(self, warp: Warp) -> Wait | None:
        running = warp.lanes
        if self.guard is not None:
            index, negated = self.guard
            if index in warp.unwritten:
                self.refuse(warp, warp.unwritten[index] & warp.mask(), "a predicate that nobody wrote decides")
            taken = warp.mask() & (~warp.registers[index] if negated else warp.registers[index])
            if not taken.any():
                warp.go(warp.pc + 1)
                return None
            running = None if taken.all() else taken
        if self.run is None:
            warp.branch(warp.mask(running), self.target)
            return None
        try:
            wait = self.run(warp, running)
        except Refusal as error:
            raise self.error(warp, str(error)) from error
        if wait is None or wait.spinning:
            warp.go(warp.pc + 1)
        return wait

    def refuse(self, warp: Warp, wrong: np.ndarray | bool, what: str) -> None:
        """Raises where something is wrong: True, or lanes, of which it names the first."""
        if wrong is not False and np.any(wrong):
            raise self.error(warp, what, wrong.argmax() if isinstance(wrong, np.ndarray) else None)

    def error(self, warp: Warp, what: str, lane: Any = None) -> MachineError:
        where = "" if lane is None else f", lane {lane}"
        text = f"{self.instruction.line}: {what} ({warp.cta.name}, {warp.name}{where}; {self.instruction.text})"
        return MachineError(f"{warp.cta.launch.entry.name}: {text}")


def plain(act: Callable[[Compiled, Warp, "np.ndarray | None"], "Wait | None"]) -> Callable[[Statement, Compiled], Run]:
    """Makes the step of an instruction without operands."""
    return lambda instruction, step: partial(act, step)
