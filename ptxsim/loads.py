"""Loads and stores by threads: ld, st, atom, red, ldmatrix, stmatrix, and addresses (PTX ISA §9.7.9, §9.7.13, §9.7.15).

Every access is checked: whose bytes, alignment, whether somebody wrote them, races.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ptxsim import matrices
from ptxsim.arithmetic import Operation
from ptxsim.floats import flushed
from ptxsim.memory import IN_WINDOW, SYSTEM, WINDOW, Block, Semantics, bytes_at
from ptxsim.operands import BOOL, UINT16, UINT32, Known, address, fetch, known, lane_wise, registers_of
from ptxsim.ptx import BITS, WORDS, Nothing, Operand, Register, Statement, Vector, require
from ptxsim.warp import LANE, LANES, NONE, Compiled, Run, Wait, Warp

GLOBAL, SHARED = ("global", "param", "const"), ("shared", "shared::cta", "shared::cluster")


def located(
    warp: Warp,
    step: Compiled,
    addresses: np.ndarray,
    lanes: np.ndarray,
    size: int,
    space: str,
    *,
    store: bool = False,
    unit: int = 0,
) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
    """Blocks, the offsets in each, and their lanes. addresses: of ``lanes``, their numbers.

    space: of the instruction, "" where it is generic.  unit: what an address is a multiple of, where it is not ``size``.
    MachineError for an address that is nobody's or of another space, misaligned, or of what may only be read.
    """
    misaligned = (addresses & ((unit or size) - 1)).astype(np.bool_)
    if misaligned.any():
        said = f"not a multiple of {unit or size} bytes: {warp.cta.describe(int(addresses[misaligned][0]))}"
        raise step.error(warp, said, lanes[misaligned][0])
    block = warp.cta.block(int(addresses.min()), size)
    groups = [(block, addresses, lanes)]
    if block is None or int(addresses.max()) + size > block.end:  # of more than one block: lane by lane
        places = enumerate(addresses.tolist())
        groups = [(warp.cta.block(place, size), addresses[i : i + 1], lanes[i : i + 1]) for i, place in places]
    for block, within, of in groups:
        if block is None or space in (GLOBAL if block.stale is not None else SHARED):
            raise step.error(warp, f"out of bounds: {warp.cta.describe(int(within[0]))}", of[0])
        if store and block.read_only:
            raise step.error(warp, f"a store to {block.name}, which is only read", of[0])
        yield block, within - block.address, of


def _shape(instruction: Statement, operand: Operand) -> tuple[str, str, int, tuple[Any, ...]]:
    """Space (none: generic, §6.4.1.1), type, bytes of an element; and the operand's elements, as many as .v2 or .x4 says."""
    space = next((word for word in instruction.words if word in GLOBAL + SHARED), "")
    count = next((int(word[1:]) for word in instruction.words if re.fullmatch("[vx][124]", word)), 1)
    kind, parts = instruction.words[-1], operand.parts if isinstance(operand, Vector) else (operand,)
    require(len(parts) == count, f"expected {count} elements")
    return space, kind, BITS[kind] // 8, parts


def ld(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.8 ld. A narrower signed number is extended by its sign. A strong load that reads the same value again may be a
    wait."""
    semantics = step.semantics = Semantics.of(instruction.words)
    space, kind, width, parts = _shape(instruction, instruction.operands[0])
    registers = [(part.place, WORDS[part.bits]) for part in parts]
    at, word = address(step, instruction.operands[1]), WORDS[8 * width]
    number = np.dtype(f"i{width}") if kind[0] == "s" else word

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        lanes = warp.active(running)
        addresses = at(warp, lanes)
        values, missing = _loaded(warp, step, addresses, lanes, len(registers), width, space)
        for (register, into), value, lost in zip(registers, values, missing, strict=True):
            warp.write(register, value.view(number).astype(into), running, lost)
        return asked(warp, addresses, values[0, lanes]) if semantics.scope else None

    return run


def asked(warp: Warp, addresses: np.ndarray, values: np.ndarray) -> Wait:
    """The words that a loop waits for, if it reads these words, of this many lanes, again and again."""
    what = f"{warp.cta.describe(int(addresses[0]))}, which is {values[0]}"
    return Wait(lambda: True, what, True, (addresses.tobytes(), values.tobytes()))


def _loaded(
    warp: Warp, step: Compiled, addresses: np.ndarray, lanes: np.ndarray, count: int, width: int, space: str
) -> tuple[np.ndarray, np.ndarray]:
    """So many elements of ``width`` bytes that lie one behind the other, and where nobody wrote them: (count, 32) each."""
    values, missing = np.zeros((count, LANES), WORDS[8 * width]), np.zeros((count, LANES), np.bool_)
    for block, offsets, of in located(warp, step, addresses, lanes, count * width, space):
        values[:, of] = block.words[width][offsets // width + np.arange(count)[:, None]]
        if block.written is not None:
            missing[:, of] = ~block.written[bytes_at(offsets, count * width)].reshape(-1, count, width).all(axis=2).T
        warp.cta.races.read(block, offsets, count * width, warp, step)
        warp.cta.launch.world.loaded(warp, step.semantics, block, offsets)
    return values, missing


def st(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.11 st. An unwritten value may be stored to shared memory, where it stays unwritten; in global memory it is an
    error."""
    step.semantics = Semantics.of(instruction.words)
    space, _, width, parts = _shape(instruction, instruction.operands[1])
    at, fetches = address(step, instruction.operands[0]), [fetch(part, WORDS[8 * width]) for part in parts]
    of_parts = [registers_of(part) for part in parts]

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes, values = warp.active(running), np.array([get(warp) for get in fetches])
        missing = [warp.unwritten_among(registers) for registers in of_parts]
        _store(warp, step, at(warp, lanes), lanes, values, missing, space)

    return run


def _store(
    warp: Warp,
    step: Compiled,
    addresses: np.ndarray,
    lanes: np.ndarray,
    values: np.ndarray,
    missing: Iterable[np.ndarray],
    space: str,
) -> None:
    """Elements, (count, 32), to where `_loaded` has them from. missing: where nobody wrote them."""
    (count, _), width = values.shape, values.itemsize
    for block, offsets, of in located(warp, step, addresses, lanes, count * width, space, store=True):
        nobodys = [(i, lost[of]) for i, lost in enumerate(missing) if lost is not NONE and lost[of].any()]
        if nobodys and block.stale is None:
            raise step.error(warp, "it stores what nobody wrote", of[nobodys[0][1]][0])
        write_by_threads(warp, step, block, offsets, count * width)
        block.words[width][offsets // width + np.arange(count)[:, None]] = values[:, of]
        for i, lost in nobodys:
            block.wrote(bytes_at(offsets[lost] + i * width, width), False)
        warp.cta.launch.world.stored(warp, step, block, offsets, count * width)


def write_by_threads(
    warp: Warp, step: Compiled, block: Block, offsets: np.ndarray, size: int, by: Any = None
) -> np.ndarray:
    """Checks and records a write before the bytes change; returns the bytes. by: a transaction, if not the warp."""
    index = bytes_at(offsets, size)
    warp.cta.races.write(block, offsets, size, by or warp, step)
    if step.semantics.atomic and block.written is not None and not block.written[index].all():
        raise step.error(warp, f"an atomic on bytes of {block.name} that nobody wrote")
    block.shows_late(index)
    block.wrote(index)
    return index


COMBINE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda old, new, _: old + new,
    "max": lambda old, new, _: max(old, new),
    "min": lambda old, new, _: min(old, new),
    "exch": lambda old, new, _: new,
    "and": lambda old, new, _: old & new,
    "or": lambda old, new, _: old | new,
    "xor": lambda old, new, _: old ^ new,
    "cas": lambda old, new, other: other if old == new else old,
    "inc": lambda old, new, _: 0 if old >= new else old + 1,
    "dec": lambda old, new, _: new if old == 0 or old > new else old - 1,
}


def _add_flushed(old: Any, new: Any, _: Any) -> Any:
    return flushed(flushed(old) + flushed(new))


def atom(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.5 atom and §9.7.13.7 red, lane after lane; a vector's elements are atomic each."""
    words, returns = instruction.words, instruction.words[0] == "atom"
    semantics = step.semantics = Semantics.of(words)
    how = next(word for word in words[1:] if word in COMBINE)
    target, place, *given = instruction.operands if returns else (Nothing(), *instruction.operands)
    space, kind, width, first = _shape(instruction, given[0])
    dtype = np.dtype({"s": "i", "f": "f"}.get(kind[0], "u") + str(width))
    at = address(step, place)
    elements = [[known(step, part, dtype) for part in _shape(instruction, operand)[-1]] for operand in given]
    count = len(first)

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        lanes, world = warp.active(running), warp.cta.launch.world
        addresses, changes = at(warp, lanes), world.changes
        values = np.zeros((len(given), count, LANES), dtype)
        values[:, :, lanes] = [[get(warp, lanes) for get in parts] for parts in elements]
        old = np.zeros(LANES, dtype)
        for block, offsets, of in located(warp, step, addresses, lanes, count * width, space, store=True):
            write_by_threads(warp, step, block, offsets, count * width)
            if semantics.scope == SYSTEM and block.home is not block:
                world.newest(block, offsets, count * width)
            world.loaded(warp, semantics, block, offsets)
            memory, combine = block.words[width].view(dtype), COMBINE[how]
            if words[-1] == "f32" and block.stale is None:  # §9.7.13.5: in global memory subnormals are zeros
                combine = _add_flushed
            for begin, lane in zip((offsets // width).tolist(), of.tolist(), strict=True):
                old[lane] = memory[begin]
                for i in range(count):  # sums of integers wrap
                    memory[begin + i] = combine(memory[begin + i], values[0, i, lane], values[-1, i, lane])
            world.stored(warp, step, block, offsets, count * width)
        if isinstance(target, Register):
            warp.write(target.place, old.view(WORDS[target.bits]), running)
        return asked(warp, addresses, old[lanes]) if world.changes == changes else None

    return run


def _matrices(
    instruction: Statement, step: Compiled, place: Operand, of: Operand
) -> tuple[Known, np.ndarray, list[int], np.ndarray]:
    """8 x 8 matrices of 16 bits: how to get addresses of rows, the lanes that have one, the register of each matrix, and where
    each lane's halves of that lie in the rows, (count, 32 lanes, 2), counted in halves."""
    registers = [part.place for part in _shape(instruction, of)[-1]]
    places = matrices.matrix_addresses(16 * LANE, len(registers), "trans" in instruction.words) // 2
    return address(step, place), LANE[: 8 * len(registers)], registers, places


def ldmatrix(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.5.15 ldmatrix."""
    at, rows, registers, places = _matrices(instruction, step, *instruction.operands[::-1])

    def run(warp: Warp, running: np.ndarray | None) -> None:
        step.refuse(warp, ~warp.mask(running), "expected all 32 lanes")
        values, missing = _loaded(warp, step, at(warp, rows), rows, 8, 2, "shared")
        words, lost = values.T.take(places).view(UINT32)[:, :, 0], np.any(missing.T.take(places), axis=2)
        for i, register in enumerate(registers):
            warp.write(register, words[i], running, lost[i])

    return run


def stmatrix(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.5.16 stmatrix."""
    at, rows, registers, places = _matrices(instruction, step, *instruction.operands)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        step.refuse(warp, ~warp.mask(running), "expected all 32 lanes")
        values, missing = np.zeros((LANES, 8), UINT16), np.zeros((LANES, 8), BOOL)
        for register, place in zip(registers, places, strict=True):
            values.put(place, warp.registers[register].view(UINT16))
            missing.put(place, warp.unwritten_among((register,)).repeat(2))
        _store(warp, step, at(warp, rows), rows, values.T, missing.T, "shared")

    return run


def cvta(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.20 cvta: an address is the same in its space and outside."""
    word = WORDS[BITS[instruction.words[-1]]]
    return lane_wise(instruction, Operation((word,), word, np.positive))


def mapa(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.23 mapa.shared::cluster: the same place in the shared memory of another CTA of the cluster."""
    return lane_wise(instruction, Operation((UINT32, UINT32), UINT32, lambda at, rank: at & IN_WINDOW | rank << WINDOW))


TABLE = {
    "ld": ld,
    "st": st,
    "atom": atom,
    "red": atom,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "cvta": cvta,
    "mapa": mapa,
}
