"""Operands: how an instruction gets the values of its lanes, and what nobody wrote is followed through arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ptxsim.arithmetic import Operation
from ptxsim.ptx import (
    WORDS,
    Address,
    Immediate,
    Operand,
    Pair,
    PtxError,
    Register,
    Special,
    Statement,
    Symbol,
    Vector,
    require,
)
from ptxsim.warp import LANE, LANES, NONE, Compiled, Run, Warp

Fetch = Callable[[Warp], np.ndarray]
Known = Callable[[Warp, np.ndarray], np.ndarray]  # of lanes, by their numbers
INT32, INT64, UINT8, UINT16, UINT32, UINT64, BOOL = map(np.dtype, ("i4", "i8", "u1", "u2", "u4", "u8", "?"))
AXES: dict[str, Callable[[Warp], Any]] = {  # PTX ISA §10, "Special registers": those with .x, .y, .z,
    "tid": lambda warp: warp.cta.threads_of(warp.number),
    "ntid": lambda warp: warp.cta.launch.block,
    "ctaid": lambda warp: warp.cta.place,
    "nctaid": lambda warp: warp.cta.launch.grid,
}
SPECIAL: dict[str, Callable[[Warp], Any]] = {  # and the others
    "laneid": lambda warp: LANE,
    "warpid": lambda warp: warp.number,
    "clock": lambda warp: warp.clock,
    "clock64": lambda warp: warp.clock,
    "globaltimer": lambda warp: warp.clock,
    "smid": lambda warp: warp.cta.index % 4,
    "cluster_ctarank": lambda warp: warp.cta.rank,
    "cluster_nctarank": lambda warp: len(warp.cta.cluster.ctas),
    "lanemask_eq": lambda warp: 1 << LANE,
    "lanemask_lt": lambda warp: (1 << LANE) - 1,
    "lanemask_le": lambda warp: (2 << LANE) - 1,
    "lanemask_gt": lambda warp: -(2 << LANE),
    "lanemask_ge": lambda warp: -(1 << LANE),
    "dynamic_smem_size": lambda warp: warp.cta.launch.shared_bytes,
}
SPECIAL |= {
    f"{name}.{letter}": partial(lambda of, axis, warp: of(warp)[axis], of, axis)
    for name, of in AXES.items()
    for axis, letter in enumerate("xyz")
}


def registers_of(operand: Operand) -> tuple[int, ...]:
    """All that are read for it."""
    if isinstance(operand, Register):
        return (operand.place,)
    if isinstance(operand, Vector):
        return tuple(index for part in operand.parts for index in registers_of(part))
    if isinstance(operand, Address):
        return registers_of(operand.base) + registers_of(Vector(operand.coordinates))
    return ()


def fetch(operand: Operand, dtype: np.dtype) -> Fetch:
    """How to get an operand's (32,) values, viewed as this dtype. A register of more bits gives its lowest."""
    unsigned, width = (BOOL, 1) if dtype == BOOL else (np.dtype(f"u{dtype.itemsize}"), 8 * dtype.itemsize)
    if isinstance(operand, Register):
        index = operand.place
        if width == operand.bits:
            if dtype == unsigned:
                return lambda warp: warp.registers[index]
            return lambda warp: warp.registers[index].view(dtype)
        require(1 not in (operand.bits, width), f"operand: expected {dtype}, got a register of {operand.bits} bits")
        return lambda warp: warp.registers[index].astype(unsigned).view(dtype)
    if isinstance(operand, Immediate):
        constant = np.full(LANES, operand.value % (1 << width) if width > 1 else operand.value, unsigned).view(dtype)
        return lambda warp: constant
    if isinstance(operand, Special):
        require(operand.name in SPECIAL, f"operand: unknown special register %{operand.name}")
        special = SPECIAL[operand.name]
        return lambda warp: np.broadcast_to(np.asarray(special(warp)), (LANES,)).astype(dtype)
    if isinstance(operand, Symbol):
        return lambda warp: np.full(LANES, warp.cta.symbols[operand.name], dtype)
    raise PtxError(f"operand: expected a value, got {operand}")


def known(step: Compiled, operand: Operand, dtype: np.dtype, what: str = "an operand") -> Known:
    """How to get an operand's values where somebody must have written them: MachineError where nobody did."""
    get, read = fetch(operand, dtype), registers_of(operand)

    def values(warp: Warp, lanes: np.ndarray) -> np.ndarray:
        missing = warp.unwritten_among(read)
        if missing is not NONE and missing[lanes].any():
            raise step.error(warp, f"{what} that nobody wrote", lanes[missing[lanes]][0])
        return get(warp)[lanes]

    return values


def address(step: Compiled, operand: Operand) -> Known:
    """How to get the int64 addresses of [base + offset], of which the same holds. Shared ones of 32 bits are not negative."""
    assert isinstance(operand, Address)
    at, offset = known(step, operand.base, INT64, "an address"), operand.offset
    return lambda warp, lanes: at(warp, lanes) + offset


def result(instruction: Statement) -> tuple[int, int]:
    """The register that an instruction writes, and its bits; of a pair the first."""
    operand: Any = instruction.operands[0]
    operand = operand.first if isinstance(operand, Pair) else operand
    if not isinstance(operand, Register):
        raise PtxError("expected a register as the result")
    return operand.place, operand.bits


def lane_wise(instruction: Statement, known: Operation | None) -> Run:
    """A step that computes lane by lane: ``known`` of the sources, for the first operand."""
    if known is None:
        raise PtxError("no such opcode")
    (register, bits), sources = result(instruction), instruction.operands[1:]
    count, right = len(known.sources), not isinstance(instruction.operands[0], Pair)
    require(
        right and len(sources) == count, f"expected one result and {count} operands, got {len(instruction.operands)}"
    )
    kinds = zip(instruction.operands, (known.result, *known.sources), strict=True)
    small = (one for one, kind in kinds if isinstance(one, Register) and WORDS[one.bits].itemsize < kind.itemsize)
    require(not any(small), "expected registers of the type's size")  # §9.4
    fetches = [fetch(source, dtype) for source, dtype in zip(sources, known.sources, strict=True)]
    read, function, word = registers_of(Vector(sources)), known.function, WORDS[bits]
    same = known.result.itemsize == word.itemsize  # else widened, as a signed number where it is one
    taken = [registers_of(source) for source in sources] if instruction.words[0] == "selp" else None

    def run(warp: Warp, running: np.ndarray | None) -> None:
        value = function(*[get(warp) for get in fetches])
        value = value.view(word) if same else value.astype(word)
        missing = warp.unwritten_among(read)
        if missing is not NONE and taken:  # of two values only the one that is taken counts
            first, second, chosen = (warp.unwritten_among(registers) for registers in taken)
            missing = np.where(fetches[2](warp), first, second) | chosen
        warp.write(register, value, running, missing)

    return run


def vector_move(instruction: Statement) -> Run:
    """§9.7.9.4 mov: a vector's registers, the first one lowest, into one of as many bits, or out of it."""
    to, of = instruction.operands
    vector, word = (of, to) if isinstance(of, Vector) else (to, of)
    assert isinstance(vector, Vector) and isinstance(word, Register)
    width = word.bits // len(vector.parts)
    whole, piece, places = WORDS[word.bits], WORDS[width], range(0, word.bits, width)
    pieces, read, get = [fetch(part, piece) for part in vector.parts], registers_of(of), fetch(word, whole)

    def pack(warp: Warp, running: np.ndarray | None) -> None:
        value = sum(one(warp).astype(whole) << whole.type(place) for one, place in zip(pieces, places, strict=True))
        warp.write(word.place, np.asarray(value), running, warp.unwritten_among(read))

    def unpack(warp: Warp, running: np.ndarray | None) -> None:
        missing, value = warp.unwritten_among(read), get(warp)
        for register, place in zip(registers_of(to), places, strict=True):
            warp.write(register, (value >> whole.type(place)).astype(piece), running, missing)

    return pack if vector is of else unpack
