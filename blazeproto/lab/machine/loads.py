"""Loads and stores by threads: ld, st, atom, red, ldmatrix, stmatrix, and addresses (PTX ISA §9.7.9, §9.7.13, §9.7.15).

Every access is checked: whose bytes, alignment, whether somebody wrote them, races.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blazeproto.lab.machine import matrices
from blazeproto.lab.machine.floats import flushed
from blazeproto.lab.machine.memory import IN_WINDOW, WINDOW, Block, bytes_at
from blazeproto.lab.machine.operands import UINT32, address, fetch, known, registers_of, result
from blazeproto.lab.machine.ptx import BITS, WORDS, Nothing, Operand, PtxError, Register, Statement, Vector
from blazeproto.lab.machine.warp import LANES, Compiled, Run, Warp

GLOBAL, SHARED = ("global", "param", "const"), ("shared", "shared::cta", "shared::cluster")


def located(
    warp: Warp, step: Compiled, addresses: np.ndarray, lanes: np.ndarray, size: int, space: str, *, store: bool = False
) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
    """Blocks, the offsets in each, and their lanes. addresses: of ``lanes``, their numbers.

    space: of the instruction, "" where it is generic.
    MachineError for an address that is nobody's or of another space, misaligned, or of what may only be read.
    """
    misaligned = (addresses & (size - 1)).astype(np.bool_)
    if misaligned.any():
        said = f"not a multiple of {size} bytes: {warp.cta.describe(int(addresses[misaligned][0]))}"
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


def _shape(instruction: Statement) -> tuple[str, int, str, int]:
    """Space (none: generic, §6.4.1.1), elements, type, and bytes of one."""
    space = next((word for word in instruction.words if word in GLOBAL + SHARED), "")
    count = next((int(word[1:]) for word in instruction.words if word in ("v2", "v4")), 1)
    kind = instruction.words[-1]
    return space, count, kind, BITS[kind] // 8


def parts_of(operand: Any) -> tuple[Any, ...]:
    """A vector's elements, or the one that there is."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def ld(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.8 ld. A narrower signed number is extended by its sign."""
    (space, count, kind, width), parts = _shape(instruction), parts_of(instruction.operands[0])
    if len(parts) != count or not all(isinstance(part, Register) for part in parts):
        raise PtxError(f"expected {count} registers")
    at, size, element = address(step, instruction.operands[1]), count * width, WORDS[8 * width]
    number = np.dtype(f"i{width}") if kind[0] == "s" else element
    unit = np.arange(count)[:, None]

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes = warp.active(running)
        values, missing = np.zeros((count, LANES), element), None
        for block, offsets, of in located(warp, step, at(warp, lanes), lanes, size, space):
            values[:, of] = block.words[width][offsets // width + unit]
            if block.written is not None:
                seen = block.written[offsets[:, None] + np.arange(size)]
                if not seen.all():
                    missing = np.zeros((count, LANES), np.bool_) if missing is None else missing
                    missing[:, of] = ~seen.reshape(-1, count, width).all(axis=2).T
            warp.cta.races.read(block, offsets, size, warp, step)
        for i, part in enumerate(parts):
            word = WORDS[part.bits]
            value = values[i] if word == element else values[i].view(number).astype(word)
            warp.write(part.place, value, running, None if missing is None else missing[i])

    return run


def st(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.11 st. What nobody wrote may be stored to shared memory, where it stays that; to global memory it is an error."""
    (space, count, _, width), parts = _shape(instruction), parts_of(instruction.operands[1])
    at, size, element = address(step, instruction.operands[0]), count * width, WORDS[8 * width]
    fetches, of_parts = [fetch(part, element) for part in parts], [registers_of(part) for part in parts]
    unit = np.arange(count)[:, None]

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes = warp.active(running)
        values = np.array([get(warp) for get in fetches])
        missing = [warp.unwritten_among(registers) for registers in of_parts]
        for block, offsets, of in located(warp, step, at(warp, lanes), lanes, size, space, store=True):
            for lost in missing if block.stale is None else ():
                if lost is not None and lost[of].any():
                    raise step.error(warp, "it stores what nobody wrote", of[lost[of]][0])
            write_by_threads(warp, step, block, offsets, size)
            block.words[width][offsets // width + unit] = values[:, of]
            for i, lost in enumerate(missing):
                if lost is not None and lost[of].any():
                    block.wrote(bytes_at(offsets[lost[of]] + i * width, width), False)
        warp.cta.launch.changes += 1

    return run


def write_by_threads(
    warp: Warp, step: Compiled, block: Block, offsets: np.ndarray, size: int, by: Any = None
) -> np.ndarray:
    """What comes before the bytes change, which are returned. by: a transaction, where it is not the warp."""
    index = bytes_at(offsets, size)
    warp.cta.races.write(block, offsets, size, by or warp, step)
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
    how, (space, _, kind, width) = next(word for word in words[1:] if word in COMBINE), _shape(instruction)
    dtype = np.dtype({"s": "i", "f": "f"}.get(kind[0], "u") + str(width))
    target, place, *given = instruction.operands if returns else (Nothing(), *instruction.operands)
    at = address(step, place)
    elements = [[known(step, part, dtype) for part in parts_of(operand)] for operand in given]
    count = len(elements[0])

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes = warp.active(running)
        values = np.zeros((len(given), count, LANES), dtype)
        values[:, :, lanes] = [[get(warp, lanes) for get in parts] for parts in elements]
        old = np.zeros(LANES, dtype)
        for block, offsets, of in located(warp, step, at(warp, lanes), lanes, count * width, space, store=True):
            index = bytes_at(offsets, count * width)
            warp.cta.races.write(block, offsets, count * width, warp, step, atomic=True)
            if block.written is not None and not block.written[index].all():
                raise step.error(warp, f"an atomic on bytes of {block.name} that nobody wrote")
            block.shows_late(index)
            memory, combine = block.words[width].view(dtype), COMBINE[how]
            if words[-1] == "f32" and block.stale is None:  # §9.7.13.5: in global memory subnormals are zeros
                combine = _add_flushed
            for begin, lane in zip((offsets // width).tolist(), of.tolist(), strict=True):
                old[lane] = memory[begin]
                for i in range(count):  # sums of integers wrap
                    memory[begin + i] = combine(memory[begin + i], values[0, i, lane], values[-1, i, lane])
        if isinstance(target, Register):
            warp.write(target.place, old.view(WORDS[target.bits]), running)
        warp.cta.launch.changes += 1

    return run


def _rows(instruction: Statement, step: Compiled, place: Operand, store: bool) -> Callable[..., tuple[Any, ...]]:
    """8 x 8 matrices of 16 bits, a row's address from each lane: the block, offsets of rows, and bytes of each lane's halves."""
    count = next(int(word[1:]) for word in instruction.words if word in ("x1", "x2", "x4"))
    if count != len(parts_of(instruction.operands[store])):
        raise PtxError(f"expected {count} registers")
    at, lanes, transposed = address(step, place), np.arange(8 * count), "trans" in instruction.words

    def rows(warp: Warp, running: np.ndarray | None) -> tuple[Any, ...]:
        if running is not None:
            raise step.error(warp, "expected all 32 lanes", running.argmin())
        ((block, offsets, _),) = located(warp, step, at(warp, lanes), lanes, 16, "shared", store=store)
        full = np.zeros(LANES, np.int64)
        full[: 8 * count] = offsets
        return block, offsets, matrices.matrix_addresses(full, count, transposed)  # (count, lanes, halves)

    return rows


def ldmatrix(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.5.15 ldmatrix."""
    to, place = instruction.operands
    registers, rows = registers_of(to), _rows(instruction, step, place, False)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        block, offsets, places = rows(warp, running)
        warp.cta.races.read(block, offsets, 16, warp, step)
        values = block.words[2][places // 2].astype(np.uint32)
        seen = None if block.written is None else block.written[places].all(axis=2)
        for i, register in enumerate(registers):
            lost = None if seen is None or seen[i].all() else ~seen[i]
            warp.write(register, values[i, :, 0] | values[i, :, 1] << np.uint32(16), running, lost)

    return run


def stmatrix(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.5.16 stmatrix."""
    place, source = instruction.operands
    registers, rows = registers_of(source), _rows(instruction, step, place, True)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        block, offsets, places = rows(warp, running)
        write_by_threads(warp, step, block, offsets, 16)
        for i, register in enumerate(registers):
            value, lost = warp.registers[register], warp.unwritten_among((register,))
            block.words[2][places[i] // 2] = value.view(np.uint16).reshape(LANES, 2)
            if lost is not None:
                block.wrote(bytes_at(places[i, lost].reshape(-1), 2), False)
        warp.cta.launch.changes += 1

    return run


def cvta(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.20 cvta: an address is the same in its space and outside."""
    (register, bits), source = result(instruction), instruction.operands[1]
    value, read = fetch(source, WORDS[bits]), registers_of(source)
    return lambda warp, running: warp.write(register, value(warp), running, warp.unwritten_among(read))


def mapa(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.23 mapa.shared::cluster: the same place in the shared memory of another CTA of the cluster."""
    (register, _), (_, place, of) = result(instruction), instruction.operands
    at, rank, read = fetch(place, UINT32), fetch(of, UINT32), registers_of(Vector((place, of)))

    def run(warp: Warp, running: np.ndarray | None) -> None:
        moved = at(warp) & np.uint32(IN_WINDOW) | rank(warp) << np.uint32(WINDOW)
        warp.write(register, moved, running, warp.unwritten_among(read))

    return run


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
