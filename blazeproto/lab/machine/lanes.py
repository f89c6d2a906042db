"""Instructions by which the lanes of a warp exchange values: shfl, vote, redux, elect (PTX ISA §9.7.9.6 and §9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blazeproto.lab.machine.operands import fetch, registers_of, result
from blazeproto.lab.machine.ptx import WORDS, Nothing, Pair, Register, Statement
from blazeproto.lab.machine.warp import LANE, LANES, OTHER_LANES, Wait, Warp

U32, BOOL = np.dtype(np.uint32), np.dtype(np.bool_)
BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)


def word_of(lanes: np.ndarray) -> int:
    """Bools of lanes as a word, lane 0 its lowest bit."""
    return int(BITS[lanes].sum())


def lanes_of(word: int) -> np.ndarray:
    return (np.uint64(word) & BITS) != 0


def present(warp: Warp, running: np.ndarray | None, mask: np.ndarray, step: Any) -> np.ndarray | None:
    """Those that the membermask names, but those at their end: all must be here. None: these wait for the others to come."""
    here = warp.mask() if running is None else running
    named = lanes_of(int(mask[np.flatnonzero(here)[0]])) & warp.alive
    if (named & ~here).any():
        if running is warp.lanes and warp.hold():
            return None
        raise step.error(warp, "its mask names lanes that are elsewhere", named & ~here)
    return named


def shfl(instruction: Statement) -> Callable[[Any], Any]:
    """§9.7.9.6 shfl.sync: d|p, a, b, c, membermask."""
    mode = instruction.words[2]
    (register, _), first = result(instruction), instruction.operands[0]
    a, b, c, mask = (fetch(operand, U32) for operand in instruction.operands[1:])
    predicate = first.second if isinstance(first, Pair) and isinstance(first.second, Register) else None
    read = registers_of(instruction.operands[1])

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            values, by, clamp = a(warp), b(warp).astype(np.int64) & 31, c(warp).astype(np.int64)
            members = present(warp, running, mask(warp), step)
            if members is None:
                return OTHER_LANES
            segment, bound = (clamp >> 8) & 31, clamp & 31
            highest = (LANE & segment) | (bound & ~segment)
            lowest = LANE & segment
            if mode == "up":
                source = LANE - by
                inside = source >= highest
            elif mode == "down":
                source = LANE + by
                inside = source <= highest
            else:
                source = LANE ^ by if mode == "bfly" else lowest | (by & ~segment)
                inside = source <= highest
            source = np.where(inside, source, LANE)
            missing = warp.unwritten_among(read)
            if not members[source[members]].all():
                raise step.error(warp, "it reads a lane that takes no part", ~members[source] & members)
            warp.write(register, values[source], running, None if missing is None else missing[source])
            if predicate:
                warp.write(predicate.place, inside, running)
            return None

        return run

    return made


def vote(instruction: Statement) -> Callable[[Any], Any]:
    """§9.7.13.8 vote.sync: all, any, uni of predicates; ballot."""
    mode, (register, bits) = instruction.words[2], result(instruction)
    asked, mask = fetch(instruction.operands[1], BOOL), fetch(instruction.operands[2], U32)
    read = registers_of(instruction.operands[1])

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            members = present(warp, running, mask(warp), step)
            if members is None:
                return OTHER_LANES
            missing = warp.unwritten_among(read)
            if missing is not None and (missing & members).any():
                raise step.error(warp, "it votes with a predicate that nobody wrote", missing & members)
            yes = asked(warp) & members
            answer = {
                "all": lambda: not (members & ~yes).any(),
                "any": yes.any,
                "uni": lambda: not yes.any() or not (members & ~yes).any(),
                "ballot": lambda: word_of(yes),
            }[mode]()
            warp.write(register, np.full(LANES, answer, WORDS[bits]), running)
            return None

        return run

    return made


def redux(instruction: Statement) -> Callable[[Any], Any]:
    """§9.7.13.10 redux.sync over the member lanes."""
    (_, _, how, kind), (register, _) = instruction.words, result(instruction)
    dtype = np.dtype(np.int32) if kind == "s32" else U32
    value, mask = fetch(instruction.operands[1], dtype), fetch(instruction.operands[2], U32)
    reduce: dict[str, Callable[[np.ndarray], Any]] = {
        "max": np.max,
        "min": np.min,
        "add": np.sum,
        "or": np.bitwise_or.reduce,
        "and": np.bitwise_and.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    read = registers_of(instruction.operands[1])

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            members = present(warp, running, mask(warp), step)
            if members is None:
                return OTHER_LANES
            missing = warp.unwritten_among(read)
            found = np.full(LANES, reduce[how](value(warp)[members]), dtype).view(U32)
            partly = None if missing is None or not (missing & members).any() else members
            warp.write(register, found, running, partly)
            return None

        return run

    return made


def elect(instruction: Statement) -> Callable[[Any], Any]:
    """§9.7.13.15 elect.sync d|p: the lowest member lane."""
    first = instruction.operands[0]
    mask = fetch(instruction.operands[1], U32)

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            members = present(warp, running, mask(warp), step)
            if members is None:
                return OTHER_LANES
            leader = int(np.flatnonzero(members)[0])
            assert isinstance(first, Pair) and isinstance(first.second, Register)
            if not isinstance(first.first, Nothing):
                warp.write(result(instruction)[0], np.full(LANES, leader, np.uint32), running)
            elected: Any = leader == LANE
            warp.write(first.second.place, elected, running)
            return None

        return run

    return made


TABLE = {"shfl": shfl, "vote": vote, "redux": redux, "elect": elect}
