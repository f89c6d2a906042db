"""Instructions as functions of a warp: `compile_entry` makes a `Compiled` of each, once for a program.

What computes lane by lane is in arithmetic.py; this file has branches and asks the tables of the other files for the rest. A
table has an opcode's first words, and the function that makes of an instruction and its step what the step runs.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from blazeproto.lab.machine import asynchronous, barriers, lanes, loads, wgmma
from blazeproto.lab.machine.arithmetic import operation
from blazeproto.lab.machine.opcodes import OPCODES
from blazeproto.lab.machine.operands import fetch, registers_of, result
from blazeproto.lab.machine.ptx import WORDS, Entry, Line, Pair, PtxError, Register, Statement, Vector
from blazeproto.lab.machine.warp import Compiled, Run, Warp

FAMILIES: dict[str, Callable[[Statement, Compiled], Run]] = {
    **loads.TABLE,
    **lanes.TABLE,
    **barriers.TABLE,
    **asynchronous.TABLE,
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
    if words[0] == "bra":
        (label,) = instruction.operands
        return Compiled(instruction, label.place)  # type: ignore[union-attr]
    if words[0] in ("ret", "exit"):
        return Compiled(instruction)
    make = _family(words)
    step = Compiled(instruction, visible=make is not None)
    step.run = make(instruction, step) if make else _arithmetic(instruction)
    return step


@cache
def _family(words: tuple[str, ...]) -> Callable[[Statement, Compiled], Run] | None:
    prefixes = (".".join(words[:length]) for length in range(len(words), 0, -1))
    make = next((FAMILIES[prefix] for prefix in prefixes if prefix in FAMILIES), None)
    if make and not OPCODES.fullmatch(".".join(words)):
        raise PtxError("no such modifiers")
    return make


def _arithmetic(instruction: Statement) -> Run:
    known = operation(instruction.words)
    if known is None:
        raise PtxError("no such opcode")
    (register, bits), sources = result(instruction), instruction.operands[1:]
    if len(sources) != len(known.sources) or isinstance(instruction.operands[0], Pair):
        raise PtxError(f"expected one result and {len(known.sources)} operands, got {len(instruction.operands)}")
    kinds = zip(instruction.operands, (known.result, *known.sources), strict=True)
    if any(isinstance(one, Register) and WORDS[one.bits].itemsize < kind.itemsize for one, kind in kinds):
        raise PtxError("expected registers of the type's size")  # §9.4
    fetches = [fetch(source, dtype) for source, dtype in zip(sources, known.sources, strict=True)]
    read, function, word = registers_of(Vector(sources)), known.function, WORDS[bits]
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
