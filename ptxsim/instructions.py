"""Instructions as functions of a warp: `compile_entry` makes a `Compiled` of each, once for a program.

Lane-by-lane arithmetic is in arithmetic.py; this file has branches and asks the tables of the other files for the rest. A
table has an opcode's first words, and the function that makes of an instruction and its step what the step runs.
"""

from collections.abc import Callable
from functools import cache

from ptxsim import asynchronous, barriers, lanes, loads, mma, wgmma
from ptxsim.arithmetic import operation
from ptxsim.opcodes import OPCODES
from ptxsim.operands import lane_wise, vector_move
from ptxsim.ptx import Entry, Line, PtxError, Statement, Vector, require
from ptxsim.warp import Compiled, Run

FAMILIES: dict[str, Callable[[Statement, Compiled], Run]] = {
    **loads.TABLE,
    **lanes.TABLE,
    **barriers.TABLE,
    **asynchronous.TABLE,
    **mma.TABLE,
    **wgmma.TABLE,
}


def compile_entry(entry: Entry) -> list[Compiled]:
    """PtxError for an instruction that the machine does not know, with its line and text."""
    steps = []
    for instruction in entry.instructions:
        try:
            steps.append(_compile(instruction))
        except (ValueError, LookupError, AttributeError, AssertionError, StopIteration) as error:
            said = f": {error}" if isinstance(error, PtxError) else ""
            raise PtxError(f"line {instruction.number}: unknown instruction: {instruction.text[:200]}{said}") from error
    line = steps[-1].instruction.line if steps else Line(())
    return [*steps, Compiled(Statement("ret", (), None, line, "the end", 0))]


def _compile(instruction: Statement) -> Compiled:
    """§9.7.12.3 bra, §9.7.12.6 ret and §9.7.12.7 exit; what a table has; what computes lane by lane."""
    words = instruction.words
    if words[0] in ("bra", "ret", "exit"):
        targets = [one.scopes[one.name].target for one in instruction.operands]  # type: ignore[union-attr]
        return Compiled(instruction, targets[0] if targets else None)
    make = _family(words)
    step = Compiled(instruction, visible=make is not None)
    if words[0] == "mov" and any(isinstance(one, Vector) for one in instruction.operands):
        step.run = vector_move(instruction)
        return step
    step.run = make(instruction, step) if make else lane_wise(instruction, operation(words))
    return step


@cache
def _family(words: tuple[str, ...]) -> Callable[[Statement, Compiled], Run] | None:
    prefixes = (".".join(words[:length]) for length in range(len(words), 0, -1))
    make = next((FAMILIES[prefix] for prefix in prefixes if prefix in FAMILIES), None)
    require(not make or OPCODES.fullmatch(".".join(words)), "no such modifiers")
    return make
