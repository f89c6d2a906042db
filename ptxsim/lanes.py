"""Instructions by which the lanes of a warp exchange values: shfl, vote, redux, elect (PTX ISA §9.7.9.6 and §9.7.13)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.operands import BOOL, INT32, INT64, UINT32, fetch, registers_of, result
from ptxsim.ptx import WORDS, Nothing, Operand, Pair, Register, Statement
from ptxsim.warp import LANE, LANES, OTHER_LANES, Compiled, Run, Wait, Warp

BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)  # of a word, lane 0 its lowest


def together(
    step: Compiled, membermask: Operand, act: Callable[[Warp, np.ndarray | None, np.ndarray], None], kind: str = ""
) -> Run:
    """``act`` with the lanes that a mask names, but those at their end, when all are here; till then these wait for them.

    Lanes with different masks, as of cooperative groups' tiles, act by themselves.  kind: of what lanes may do together at
    different places of the text.
    """
    mask = fetch(membermask, UINT32)

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        here, masks = warp.mask(running), mask(warp)
        groups = [
            (here & (masks == one), ((one & BITS) != 0) & warp.alive) for one in sorted(set(masks[here].tolist()))
        ]
        for lanes, members in groups:
            step.refuse(warp, lanes & ~members, "its mask leaves itself out")
            if (members & ~here).any() and running is warp.lanes and warp.hold(kind):
                return OTHER_LANES
            elsewhere = members & ~lanes
            if elsewhere.any() and kind:
                elsewhere = elsewhere & ~warp.meet(kind)
            step.refuse(warp, elsewhere, "its mask names lanes that are elsewhere")
        for lanes, members in groups:
            act(warp, running if len(groups) == 1 else lanes, members)
        return None

    return run


def warp_sync(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.2 bar.warp.sync. Lanes of a warp count as ordered; but those that the mask names come together."""
    return together(step, instruction.operands[0], lambda warp, running, members: None, "bar.warp")


def shfl(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.6 shfl.sync: d|p, a, b, c, membermask."""
    mode, (first, given, *_, mask) = instruction.words[2], instruction.operands
    predicate = first.second if isinstance(first, Pair) and isinstance(first.second, Register) else None
    register, read = result(instruction)[0], registers_of(given)
    a, (b, c) = fetch(given, UINT32), (fetch(operand, INT64) for operand in instruction.operands[2:4])

    def act(warp: Warp, running: np.ndarray | None, members: np.ndarray) -> None:
        by, clamp, segment = b(warp) & 31, c(warp) & 31, c(warp) >> 8 & 31
        lowest = LANE & segment
        bound = lowest | clamp & ~segment
        source = {"up": LANE - by, "down": LANE + by, "bfly": LANE ^ by, "idx": lowest | by & ~segment}[mode]
        inside = source >= bound if mode == "up" else source <= bound
        source = np.where(inside, source, LANE)
        lost = warp.unwritten_among(read) | ~members  # of lanes outside it gets anything
        warp.write(register, a(warp)[source], running, lost[source])
        if predicate:
            warp.write(predicate.place, inside, running)

    return together(step, mask, act)


VOTES: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {  # of the members, and those of them that say yes
    "all": lambda members, yes: not (members & ~yes).any(),
    "any": lambda members, yes: yes.any(),
    "uni": lambda members, yes: not yes.any() or not (members & ~yes).any(),
    "ballot": lambda members, yes: int(BITS[yes].sum()),
}


def vote(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.8 vote.sync: all, any, uni of predicates; ballot."""
    answer, (register, bits) = VOTES[instruction.words[2]], result(instruction)
    _, predicate, mask = instruction.operands
    asked, read = fetch(predicate, BOOL), registers_of(predicate)

    def act(warp: Warp, running: np.ndarray | None, members: np.ndarray) -> None:
        step.refuse(warp, warp.unwritten_among(read) & members, "it votes with a predicate that nobody wrote")
        warp.write(register, np.full(LANES, answer(members, asked(warp) & members), WORDS[bits]), running)

    return together(step, mask, act)


REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "max": np.max,
    "min": np.min,
    "add": np.sum,
    "or": np.bitwise_or.reduce,
    "and": np.bitwise_and.reduce,
    "xor": np.bitwise_xor.reduce,
}


def redux(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.10 redux.sync over the member lanes."""
    (_, _, how, kind), (register, _) = instruction.words, result(instruction)
    _, given, mask = instruction.operands
    dtype, reduce = INT32 if kind == "s32" else UINT32, REDUCTIONS[how]
    value, read = fetch(given, dtype), registers_of(given)

    def act(warp: Warp, running: np.ndarray | None, members: np.ndarray) -> None:
        made = np.full(LANES, reduce(value(warp)[members]), dtype).view(UINT32)
        warp.write(register, made, running, members & (warp.unwritten_among(read) & members).any())

    return together(step, mask, act)


def elect(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.15 elect.sync d|p: the lowest member lane."""
    pair, mask = instruction.operands
    assert isinstance(pair, Pair) and isinstance(pair.second, Register)
    place, chosen = pair.second.place, None if isinstance(pair.first, Nothing) else result(instruction)[0]

    def act(warp: Warp, running: np.ndarray | None, members: np.ndarray) -> None:
        leader = members.argmax()
        if chosen is not None:
            warp.write(chosen, np.full(LANES, leader, UINT32), running)
        warp.write(place, leader == LANE, running)

    return together(step, mask, act)


TABLE = {"bar.warp": warp_sync, "shfl": shfl, "vote": vote, "redux": redux, "elect": elect}
