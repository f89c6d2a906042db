"""Operands: how an instruction gets the values of its lanes, and what nobody wrote is followed through arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from blazeproto.lab.machine.ptx import (
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
)
from blazeproto.lab.machine.warp import LANE, LANES, Compiled, Warp

Fetch = Callable[[Warp], np.ndarray]
Known = Callable[[Warp, np.ndarray], np.ndarray]  # of lanes, by their numbers
INT32, INT64, UINT16, UINT32, UINT64, BOOL = map(np.dtype, ("i4", "i8", "u2", "u4", "u8", "?"))
SPECIAL: dict[str, Callable[[Warp], Any]] = {  # PTX ISA §10, "Special registers"
    "tid.x": lambda warp: warp.cta.threads_of(warp.number)[0],
    "tid.y": lambda warp: warp.cta.threads_of(warp.number)[1],
    "tid.z": lambda warp: warp.cta.threads_of(warp.number)[2],
    "laneid": lambda warp: LANE,
    "warpid": lambda warp: warp.number,
    "clock": lambda warp: warp.clock,
    "clock64": lambda warp: warp.clock,
    "globaltimer": lambda warp: warp.clock,
    "smid": lambda warp: warp.cta.index % 4,
    "cluster_ctarank": lambda warp: warp.cta.rank,
    "cluster_nctarank": lambda warp: len(warp.cta.cluster.ctas),
    "lanemask_lt": lambda warp: (1 << LANE) - 1,
    "dynamic_smem_size": lambda warp: warp.cta.launch.shared_bytes,
}
for _axis, _letter in enumerate("xyz"):
    SPECIAL[f"ntid.{_letter}"] = partial(lambda axis, warp: warp.cta.launch.block[axis], _axis)
    SPECIAL[f"ctaid.{_letter}"] = partial(lambda axis, warp: warp.cta.place[axis], _axis)
    SPECIAL[f"nctaid.{_letter}"] = partial(lambda axis, warp: warp.cta.launch.grid[axis], _axis)


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
        if operand.bits == 1 or width == 1:
            raise PtxError(f"operand: expected {dtype}, got a register of {operand.bits} bits")
        return lambda warp: warp.registers[index].astype(unsigned).view(dtype)
    if isinstance(operand, Immediate):
        constant = np.full(LANES, operand.value % (1 << width) if width > 1 else operand.value, unsigned).view(dtype)
        return lambda warp: constant
    if isinstance(operand, Special):
        if operand.name not in SPECIAL:
            raise PtxError(f"operand: unknown special register %{operand.name}")
        special = SPECIAL[operand.name]
        return lambda warp: np.broadcast_to(np.asarray(special(warp)), (LANES,)).astype(dtype)
    if isinstance(operand, Symbol):
        return lambda warp: np.full(LANES, warp.cta.address_of(operand.name), dtype)
    raise PtxError(f"operand: expected a value, got {operand}")


def _place(operand: Operand) -> Fetch:
    """How to get the (32,) int64 addresses of [base + offset]. Shared addresses of 32 bits are not negative."""
    assert isinstance(operand, Address)
    at, offset = fetch(operand.base, INT64), operand.offset
    return (lambda warp: at(warp) + offset) if offset else at


def _known(step: Compiled, get: Fetch, read: tuple[int, ...], what: str) -> Known:
    def known(warp: Warp, lanes: np.ndarray) -> np.ndarray:
        missing = warp.unwritten_among(read) if warp.unwritten else None
        if missing is not None and missing[lanes].any():
            raise step.error(warp, f"{what} that nobody wrote", lanes[missing[lanes]][0])
        return get(warp)[lanes]

    return known


def known(step: Compiled, operand: Operand, dtype: np.dtype) -> Known:
    """How to get an operand's values where somebody must have written them: MachineError where nobody did."""
    return _known(step, fetch(operand, dtype), registers_of(operand), "an operand")


def address(step: Compiled, operand: Operand) -> Known:
    """How to get the int64 addresses of [base + offset], of which the same holds."""
    return _known(step, _place(operand), registers_of(operand), "an address")


def result(instruction: Statement, place: int = 0) -> tuple[int, int]:
    """The register that an instruction writes, and its bits; of a pair the first."""
    operand: Any = instruction.operands[place]
    operand = operand.first if isinstance(operand, Pair) else operand
    if not isinstance(operand, Register):
        raise PtxError(f"line {instruction.number}: expected a register as the result: {instruction.text}")
    return operand.place, operand.bits
