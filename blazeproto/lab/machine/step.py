"""Instructions as functions of a warp: `compile_entry` makes a `Compiled` of each, once for a program.

What computes lane by lane is in arithmetic.py; this file has operands, guards and branches, and asks the tables of the other
files for the rest (loads.py, lanes.py, barriers.py, asynchronous.py, wgmma.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blazeproto.lab.machine import asynchronous, barriers, lanes, loads, wgmma
from blazeproto.lab.machine.arithmetic import operation
from blazeproto.lab.machine.operands import fetch, registers_of, result
from blazeproto.lab.machine.ptx import WORDS, Entry, PtxError, Statement
from blazeproto.lab.machine.warp import InFlight, MachineError, Wait, Warp

Run = Callable[[Warp, "np.ndarray | None"], "Wait | None"]
FAMILIES = (loads.TABLE, lanes.TABLE, barriers.TABLE, asynchronous.TABLE, wgmma.TABLE)


class Compiled:
    """One instruction: runs for the lanes of a warp, and moves its program counter.

    visible: whether other warps may see what it does, so that another may go first.
    """

    def __init__(self, instruction: Statement, target: int | None, run: Run | None, visible: bool) -> None:
        self.instruction, self.target, self.run, self.visible = instruction, target, run, visible
        self.guard = instruction.guard

    def __call__(self, warp: Warp) -> Wait | None:
        running = warp.lanes
        if self.guard is not None:
            index, negated = self.guard
            taken = warp.registers[index]
            if negated:
                taken = ~taken
            if running is not None:
                taken = taken & running
            if index in warp.unwritten and (warp.unwritten[index] & warp.mask()).any():
                raise self.error(warp, "a predicate that nobody wrote decides", warp.unwritten[index] & warp.mask())
            if self.target is not None:
                warp.branch(taken, self.target)
                return None
            if not taken.any():
                warp.go(warp.pc + 1)
                return None
            running = None if taken.all() else taken
        if self.target is not None:
            warp.go(self.target)
            return None
        if self.run is None:
            warp.leave(warp.mask() if running is None else running)
            return None
        try:
            wait = self.run(warp, running)
        except InFlight as error:
            raise self.error(warp, f"an accumulator that nobody has waited for: {error}") from None
        if wait is None or wait.spinning:
            warp.go(warp.pc + 1)
        return wait

    def error(self, warp: Warp, what: str, lanes: np.ndarray | None = None) -> MachineError:
        where = "" if lanes is None else f", lane {int(np.flatnonzero(lanes)[0])}"
        text = f"{self.instruction.line}: {what} ({warp.cta.name}, {warp.name}{where}; {self.instruction.text})"
        return MachineError(f"{warp.cta.launch.entry.name}: {text}")


def compile_entry(entry: Entry) -> list[Compiled]:
    """PtxError for an instruction that the machine does not know, with its line and text."""
    steps = []
    for instruction in entry.instructions:
        try:
            steps.append(_compile(instruction, entry))
        except (PtxError, KeyError, IndexError, AttributeError, AssertionError) as error:
            said = f": {error}" if isinstance(error, PtxError) else ""
            raise PtxError(f"line {instruction.number}: unknown instruction: {instruction.text[:200]}{said}") from error
    end = Statement("ret", (), None, steps[-1].instruction.line, "the end", 0)
    return [*steps, Compiled(end, None, None, False)]


def _compile(instruction: Statement, entry: Entry) -> Compiled:
    name = instruction.words[0]
    if name == "bra":
        return Compiled(instruction, entry.labels[instruction.operands[0].name], None, False)  # type: ignore[union-attr]
    if name in ("ret", "exit"):
        return Compiled(instruction, None, None, False)
    for table in FAMILIES:
        if name in table:
            made: Any = table[name](instruction)
            step = Compiled(instruction, None, None, True)
            step.run = made(step)
            return step
    return Compiled(instruction, None, _arithmetic(instruction), False)


def _arithmetic(instruction: Statement) -> Run:
    known = operation(instruction.words)
    if known is None:
        raise PtxError("no such opcode")
    (register, bits), sources = result(instruction), instruction.operands[1:]
    if len(sources) != len(known.sources):
        raise PtxError(f"expected {len(known.sources)} operands behind the result, got {len(sources)}")
    fetches = [fetch(source, dtype) for source, dtype in zip(sources, known.sources, strict=True)]
    read, function, word = registers_of_all(instruction), known.function, WORDS[bits]
    same = known.result.itemsize == word.itemsize  # else widened, as a signed number where it is one

    taken = [registers_of(source) for source in sources] if instruction.words[0] == "selp" else None

    def run(warp: Warp, running: np.ndarray | None) -> None:
        value = function(*[get(warp) for get in fetches])
        value = value.view(word) if same else value.astype(word)
        missing = warp.unwritten_among(read)
        if missing is not None and taken:  # of two values only the one that is taken counts
            first, second, chosen = (warp.unwritten_among(registers) for registers in taken)
            missing = np.where(fetches[2](warp), first is not None and first, second is not None and second)
            missing = missing if chosen is None else missing | chosen
        warp.write(register, value, running, missing)

    return run


def registers_of_all(instruction: Statement) -> tuple[int, ...]:
    """The registers of all operands but the first."""
    return tuple(index for operand in instruction.operands[1:] for index in registers_of(operand))
