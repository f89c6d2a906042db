"""Loads and stores by threads: ld, st, atom, red, ldmatrix, stmatrix, and addresses (PTX ISA §9.7.9, §9.7.13, §9.7.15).

Every access is checked: whose bytes, alignment, whether somebody wrote them, races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blazeproto.lab.machine import matrices
from blazeproto.lab.machine.memory import WINDOW, Block
from blazeproto.lab.machine.operands import address, fetch, registers_of, result
from blazeproto.lab.machine.ptx import BITS, WORDS, PtxError, Register, Statement, Vector
from blazeproto.lab.machine.warp import LANES, Warp

Made = Callable[[Any], Any]
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const")
INT64, UINT32 = np.dtype(np.int64), np.dtype(np.uint32)


def located(
    warp: Warp, step: Any, addresses: np.ndarray, lanes: np.ndarray, size: int, *, store: bool = False
) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
    """Blocks, the offsets in each, and their lanes. addresses: of ``lanes``, their numbers.

    MachineError for an address that is nobody's, misaligned, or of what may only be read.
    """
    if (addresses & (size - 1)).any():
        bad = int(np.flatnonzero(addresses & (size - 1))[0])
        said = f"not a multiple of {size} bytes: {warp.cta.describe(int(addresses[bad]))}"
        raise step.error(warp, said, np.arange(LANES) == lanes[bad])
    low, high = int(addresses.min()), int(addresses.max())
    block = warp.cta.block(low, size)
    if block is not None and high + size <= block.end:
        groups = [(block, addresses - block.address, lanes)]
    else:
        groups = []
        for place, lane in zip(addresses.tolist(), lanes, strict=True):
            block = warp.cta.block(place, size)
            if block is None:
                raise step.error(warp, f"out of bounds: {warp.cta.describe(place)}", np.arange(LANES) == lane)
            groups.append((block, np.array([place - block.address]), np.array([lane])))
    for block, offsets, of in groups:
        if store and block.read_only:
            raise step.error(warp, f"a store to {block.name}, which is only read", np.isin(np.arange(LANES), of))
        yield block, offsets, of


def bytes_at(offsets: np.ndarray, size: int) -> np.ndarray:
    """The offsets of all bytes, flat."""
    return (offsets[:, None] + np.arange(size)).reshape(-1)


def _shape(instruction: Statement) -> tuple[str, int, str, int]:
    """Space, elements, type, and bytes of one."""
    space = next(word for word in instruction.words if word in SPACES)
    count = next((int(word[1:]) for word in instruction.words if word in ("v2", "v4", "v8")), 1)
    kind = instruction.words[-1]
    return space, count, kind, BITS[kind] // 8


def _active(warp: Warp, running: np.ndarray | None) -> np.ndarray:
    return np.flatnonzero(warp.mask() if running is None else running)


def _addresses(warp: Warp, step: Any, at: Any, read: tuple[int, ...], lanes: np.ndarray) -> np.ndarray:
    missing = warp.unwritten_among(read) if warp.unwritten else None
    if missing is not None and missing[lanes].any():
        raise step.error(warp, "an address that nobody wrote", missing)
    return at(warp)[lanes]


def ld(instruction: Statement) -> Made:
    """§9.7.9.8 ld. A narrower signed number is extended by its sign."""
    _, count, kind, width = _shape(instruction)
    targets: Any = instruction.operands[0]
    parts = targets.parts if isinstance(targets, Vector) else (targets,)
    if len(parts) != count or not all(isinstance(part, Register) for part in parts):
        raise PtxError(f"expected {count} registers")
    at, read = address(instruction.operands[1]), registers_of(instruction.operands[1])
    size, signed, element = count * width, np.dtype(f"i{width}"), WORDS[8 * width]
    unit = np.arange(count)[:, None]

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            lanes = _active(warp, running)
            values, missing = np.zeros((count, LANES), element), None
            for block, offsets, of in located(warp, step, _addresses(warp, step, at, read, lanes), lanes, size):
                values[:, of] = block.words[width][offsets // width + unit]
                if block.written is not None:
                    seen = block.written[offsets[:, None] + np.arange(size)]
                    if not seen.all():
                        missing = np.zeros((count, LANES), np.bool_) if missing is None else missing
                        missing[:, of] = ~seen.reshape(-1, count, width).all(axis=2).T
                if warp.cta.races:
                    warp.cta.races.read(block, offsets, size, warp, step)
            for i, part in enumerate(parts):
                word = WORDS[part.bits]
                value = values[i] if word == element else values[i].view(signed).astype(f"i{word.itemsize}").view(word)
                if word != element and kind[0] != "s":
                    value = values[i].astype(word)
                warp.write(part.place, value, running, None if missing is None else missing[i])

        return run

    return made


def st(instruction: Statement) -> Made:
    """§9.7.9.11 st. What nobody wrote may be stored to shared memory, where it stays that; to global memory it is an error."""
    space, count, _, width = _shape(instruction)
    source: Any = instruction.operands[1]
    parts = source.parts if isinstance(source, Vector) else (source,)
    at, read = address(instruction.operands[0]), registers_of(instruction.operands[0])
    element, size, unit = WORDS[8 * width], count * width, np.arange(count)[:, None]
    fetches, of_parts = [fetch(part, element) for part in parts], [registers_of(part) for part in parts]

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            lanes = _active(warp, running)
            values = np.array([get(warp) for get in fetches])
            missing = [warp.unwritten_among(registers) for registers in of_parts]
            if space == "global":
                for lost in missing:
                    if lost is not None and lost[lanes].any():
                        raise step.error(warp, "it stores what nobody wrote", lost & np.isin(np.arange(LANES), lanes))
            for block, offsets, of in located(
                warp, step, _addresses(warp, step, at, read, lanes), lanes, size, store=True
            ):
                index = bytes_at(offsets, size)
                if warp.cta.races:
                    warp.cta.races.write(block, offsets, size, warp, step)
                written_by_threads(block, index)
                block.words[width][offsets // width + unit] = values[:, of]
                if block.written is not None:
                    block.written[index] = True
                    for i, lost in enumerate(missing):
                        if lost is not None and lost[of].any():
                            block.written[bytes_at(offsets[lost[of]] + i * width, width)] = False
            warp.cta.launch.changes += 1

        return run

    return made


def written_by_threads(block: Block, index: np.ndarray) -> None:
    """Until a fence the async proxy sees what was there before (PTX ISA §8.6, "Proxies")."""
    if block.stale is not None and block.before is not None:
        fresh = index[~block.stale[index]]
        block.before[fresh] = block.bytes[fresh]
        block.stale[index] = True


COMBINE: dict[str, Callable[[int, int, int], int]] = {
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


def atom(instruction: Statement) -> Made:
    """§9.7.13.5 atom and §9.7.13.7 red, lane after lane; a vector's elements are atomic each."""
    words, returns = instruction.words, instruction.words[0] == "atom"
    how, kind = next((word for word in words[1:] if word in COMBINE), ""), words[-1]
    dtype = np.dtype({"s": "i", "f": "f"}.get(kind[0], "u") + str(BITS[kind] // 8))
    operands: Any = instruction.operands if returns else (None, *instruction.operands)
    target, place, *given = operands
    at, read = address(place), registers_of(place)
    vectors = [operand.parts if isinstance(operand, Vector) else (operand,) for operand in given]
    fetches = [[fetch(part, dtype) for part in parts] for parts in vectors]  # by operand, then by element
    sources = registers_of(Vector(tuple(given)))
    count, width, combine = len(vectors[0]), dtype.itemsize, COMBINE[how]
    if returns and count > 1:
        raise PtxError("expected no vector")

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            lanes = _active(warp, running)
            missing = warp.unwritten_among(sources)
            if missing is not None and missing[lanes].any():
                raise step.error(warp, "an atomic of what nobody wrote", missing)
            values = np.array([[get(warp) for get in parts] for parts in fetches])  # (operands, elements, lanes)
            old, places = np.zeros(LANES, dtype), _addresses(warp, step, at, read, lanes)
            for block, offsets, of in located(warp, step, places, lanes, count * width, store=True):
                index = bytes_at(offsets, count * width)
                if warp.cta.races:
                    warp.cta.races.write(block, offsets, count * width, warp, step, atomic=True)
                written_by_threads(block, index)
                if block.written is not None and not block.written[index].all():
                    raise step.error(warp, f"an atomic on bytes of {block.name} that nobody wrote")
                memory = block.words[width].view(dtype)
                for begin, lane in zip((offsets // width).tolist(), of.tolist(), strict=True):
                    old[lane] = memory[begin]
                    for i in range(count):
                        new = values[:, i, lane]
                        if dtype.kind == "f":
                            memory[begin + i] = combine(memory[begin + i], new[0], 0)
                        else:
                            made = combine(int(memory[begin + i]), int(new[0]), int(new[-1]))
                            memory[begin + i] = np.array(made & (1 << 8 * width) - 1, f"u{width}").view(dtype)
            if isinstance(target, Register):
                warp.write(target.place, old.view(WORDS[target.bits]), running)
            warp.cta.launch.changes += 1

        return run

    return made


def matrix(instruction: Statement) -> Made:
    """§9.7.15.5.15 ldmatrix and §9.7.15.5.16 stmatrix: 8 x 8 matrices of 16 bits, a row's address from each lane."""
    store, words = instruction.words[0] == "stmatrix", instruction.words
    count = next(int(word[1:]) for word in words if word in ("x1", "x2", "x4"))
    operands: Any = instruction.operands[::-1] if store else instruction.operands
    registers = registers_of(operands[0])
    at, read, transposed = address(operands[1]), registers_of(operands[1]), "trans" in words

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            if running is not None:
                raise step.error(warp, "expected all 32 lanes", ~running)
            lanes = np.arange(8 * count)
            rows = _addresses(warp, step, at, read, lanes)
            ((block, offsets, _),) = located(warp, step, rows, lanes, 16, store=store)
            full = np.zeros(LANES, np.int64)
            full[: 8 * count] = offsets
            places = matrices.matrix_addresses(full, count, transposed)  # (count, lanes, halves)
            index, halves = bytes_at(offsets, 16), block.words[2]
            if not store:
                if warp.cta.races:
                    warp.cta.races.read(block, offsets, 16, warp, step)
                values = halves[places // 2].astype(np.uint32)
                seen = None if block.written is None else block.written[places].all(axis=2)
                for i, register in enumerate(registers):
                    lost = None if seen is None or seen[i].all() else ~seen[i]
                    warp.write(register, values[i, :, 0] | values[i, :, 1] << np.uint32(16), None, lost)
                return
            if warp.cta.races:
                warp.cta.races.write(block, offsets, 16, warp, step)
            written_by_threads(block, index)
            if block.written is not None:
                block.written[index] = True
            for i, register in enumerate(registers):
                value, lost = warp.registers[register], warp.unwritten_among((register,))
                halves[places[i, :, 0] // 2] = value & np.uint32(0xFFFF)
                halves[places[i, :, 1] // 2] = value >> np.uint32(16)
                if lost is not None and block.written is not None:
                    block.written[bytes_at(places[i, lost].reshape(-1), 2)] = False
            warp.cta.launch.changes += 1

        return run

    return made


def cvta(instruction: Statement) -> Made:
    """§9.7.9.20 cvta: an address is the same in its space and outside."""
    (register, bits), source = result(instruction), instruction.operands[1]
    value, read = fetch(source, WORDS[bits]), registers_of(source)
    return lambda step: lambda warp, running: warp.write(register, value(warp), running, warp.unwritten_among(read))


def mapa(instruction: Statement) -> Made:
    """§9.7.9.23 mapa.shared::cluster: the same place in the shared memory of another CTA of the cluster."""
    register, _ = result(instruction)
    at, rank = (fetch(operand, UINT32) for operand in instruction.operands[1:])
    read = tuple(index for operand in instruction.operands[1:] for index in registers_of(operand))

    def run(warp: Warp, running: np.ndarray | None) -> None:
        moved = at(warp) & np.uint32((1 << WINDOW) - 1) | rank(warp) << np.uint32(WINDOW)
        warp.write(register, moved, running, warp.unwritten_among(read))

    return lambda step: run


TABLE = {
    "ld": ld,
    "st": st,
    "atom": atom,
    "red": atom,
    "ldmatrix": matrix,
    "stmatrix": matrix,
    "cvta": cvta,
    "mapa": mapa,
}
