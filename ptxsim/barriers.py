"""Barriers, votes over a CTA, fences, and what else makes warps wait for each other (PTX ISA §9.7.13 and §9.7.14).

An mbarrier is 8 bytes of shared memory that only these instructions read: how many arrivals and bytes its phase still expects.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ptxsim.memory import SCOPES, Semantics
from ptxsim.operands import BOOL, UINT32, address, fetch, known, result
from ptxsim.ptx import WORDS, Immediate, Nothing, Statement, require
from ptxsim.warp import LANES, OTHER_LANES, Compiled, Run, Wait, Warp, plain

LARGEST = (1 << 20) - 1  # arrivals, and bytes of transactions, that an mbarrier counts


@dataclass(repr=False)
class Mbarrier:
    """PTX ISA §9.7.13.15: phase, arrivals that it still expects, arrivals of every phase, bytes under way.

    place: where it is, and the line that initialised it.  stored: (1,), zero while nobody writes its bytes.
    made, clocks, released: what races.py knows of who initialised it, of who has arrived, and of who had when the last phase
    ended.
    """

    address: int
    expected: int
    pending: int
    place: str
    stored: np.ndarray
    bytes: int = 0
    phase: int = 0
    made: Any = None
    clocks: Any = None
    released: Any = None

    def arrive(self, arrivals: int, bytes: int = 0) -> None:
        """Counts arrivals, and bytes that have come."""
        self.pending -= arrivals
        self.bytes -= bytes
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.released = self.phase + 1, self.expected, self.clocks

    def __repr__(self) -> str:
        missing = f"{self.pending} of {self.expected} arrivals and {self.bytes} bytes missing"
        return f"mbarrier at {self.place}; its phase {self.phase} has {missing}"


class Phase(NamedTuple):
    """The phase that try_wait and test_wait ask for."""

    barrier: Mbarrier
    parity: int

    @property
    def over(self) -> bool:
        """A parity can name the current phase and the one before."""
        return self.barrier.phase % 2 != self.parity

    def __str__(self) -> str:
        return f"the phase of parity {self.parity} of the {self.barrier}"


@dataclass
class Named:
    """A barrier of `bar`: threads that have arrived, how many it is for, and what bar.red combines."""

    number: int
    arrived: int = 0
    expected: int = 0
    generation: int = 0
    votes: list[bool] = field(default_factory=list)
    waiting: list[Warp] = field(default_factory=list)
    outcome: int = 0
    clocks: Any = None

    def __str__(self) -> str:
        return f"barrier {self.number}: {self.arrived} of {self.expected} threads have arrived"


# --- mbarrier ------------------------------------------------------------------------------------------------------------------


def mbarrier_at(warp: Warp, step: Compiled, place: int) -> Mbarrier:
    found = warp.cta.cluster.mbarriers.get(place)
    if found is None or warp.cta.gone(place):
        raise step.error(warp, f"no mbarrier is there: {warp.cta.describe(place)}")
    if found.stored[0]:
        raise step.error(warp, f"its bytes were written as memory: {found}")
    warp.cta.races.use(warp, found, step)
    return found


def _initialise(warp: Warp, step: Compiled, place: int, count: int) -> None:
    """§9.7.13.15 mbarrier.init"""
    block, where = warp.cta.block(place, 8), f"{warp.cta.describe(place)}, made at {step.instruction.line}"
    if block is None or block.stale is None or place & 7 or not 1 <= count <= LARGEST:
        raise step.error(warp, f"an mbarrier at {where} for {count} arrivals")
    if place in warp.cta.cluster.mbarriers:
        raise step.error(warp, f"expected mbarrier.inval first of the {warp.cta.cluster.mbarriers[place]}")
    stored = block.written[place - block.address :][:8].view(np.uint64)
    stored[0] = 0
    made = warp.cta.cluster.mbarriers[place] = Mbarrier(place, count, count, where, stored)
    warp.cta.races.initialise(warp, made, step)


def _invalidate(warp: Warp, step: Compiled, place: int, count: int) -> None:
    """§9.7.13.15 mbarrier.inval"""
    del warp.cta.cluster.mbarriers[mbarrier_at(warp, step, place).address]


def _expect(warp: Warp, step: Compiled, place: int, count: int) -> None:
    """§9.7.13.15 mbarrier.expect_tx"""
    barrier = mbarrier_at(warp, step, place)
    barrier.bytes += count
    if barrier.bytes > LARGEST:
        raise step.error(warp, f"more than {LARGEST} bytes at the {barrier}")


def _arrive(warp: Warp, step: Compiled, place: int, count: int) -> None:
    """§9.7.13.15 mbarrier.arrive"""
    barrier = mbarrier_at(warp, step, place)
    warp.cta.races.release(warp, barrier, SCOPES["cta"] if "relaxed" in step.instruction.words else 0)
    if count > barrier.pending:
        raise step.error(warp, f"{count} arrivals more than expected at {barrier}")
    barrier.arrive(count)


def _expect_and_arrive(warp: Warp, step: Compiled, place: int, count: int) -> None:
    """§9.7.13.15 mbarrier.arrive.expect_tx: one arrival"""
    _expect(warp, step, place, count)
    _arrive(warp, step, place, 1)


def _by_lanes(act: Callable[[Warp, Compiled, int, int], None], instruction: Statement, step: Compiled) -> Run:
    """What one of these does, by each lane."""
    operands = list(instruction.operands)
    require(instruction.words[1] != "arrive" or isinstance(operands.pop(0), Nothing), "expected _ for the state")
    at, number = address(step, operands[0]), known(step, [*operands, Immediate(1)][1], UINT32)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes = warp.active(running)
        for place, count in zip(at(warp, lanes).tolist(), number(warp, lanes).tolist(), strict=True):
            act(warp, step, place, count)
        warp.cta.launch.world.changes += 1

    return run


def mbarrier_wait(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.15 mbarrier.test_wait and try_wait, of a parity."""
    _, place, wanted = instruction.operands[:3]
    spinning, (register, _) = instruction.words[1] == "test_wait", result(instruction)
    at, parity = address(step, place), known(step, wanted, UINT32)
    relaxed, scope = "relaxed" in instruction.words, SCOPES["cta"]

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        lanes = warp.active(running)
        asked = list(zip(at(warp, lanes).tolist(), parity(warp, lanes).tolist(), strict=True))
        phases = {one: Phase(mbarrier_at(warp, step, one[0]), one[1]) for one in dict.fromkeys(asked)}
        step.refuse(warp, max(parity for _, parity in phases) > 1, "expected a parity of 0 or 1")
        missing = [phase for phase in phases.values() if not phase.over]
        waits = Wait(lambda: all(phase.over for phase in missing), missing[0], spinning) if missing else None
        if missing and not spinning:
            return waits
        answers = np.full(LANES, not missing)
        if len(phases) > 1:
            answers[lanes] = [phases[one].over for one in asked]
        warp.write(register, answers, running)
        races = warp.cta.races
        for phase in phases.values():
            if phase.over and relaxed:
                warp.observed[scope] = races.joined(warp.observed.get(scope), phase.barrier.released)
            elif phase.over:
                races.acquire(warp, phase.barrier.released)
        return waits

    return run


# --- bar and barrier -----------------------------------------------------------------------------------------------------------


def bar(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.1 bar and barrier: sync, arrive, red. A warp counts with all its lanes, those that are at their end too.

    Without a count it is for all warps that have not ended (§9.7.12.7).
    """
    words, operands = instruction.words, list(instruction.operands)
    how = next(word for word in words if word in ("sync", "arrive", "red"))
    combine = next((COMBINE[word] for word in words if word in COMBINE), None)
    target, vote = (result(instruction), fetch(operands[-1], BOOL)) if combine else (None, None)
    operands = operands[1:-1] if combine else operands
    for operand, unit, most in zip(operands, (1, LANES), (15, LARGEST), strict=False):
        require(
            not isinstance(operand, Immediate) or operand.value in range(0, most + 1, unit),
            "expected a barrier of 0 to 15, and a multiple of 32 threads",
        )
    which, *counts = (fetch(operand, UINT32) for operand in operands)

    def single(warp: Warp, values: np.ndarray, lanes: np.ndarray, what: str) -> int:
        """The value that all lanes that run have."""
        chosen = values[lanes]
        step.refuse(warp, len({*chosen}) > 1, f"lanes of one warp give different values for a barrier's {what}")
        return int(chosen[0])

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        cta, lanes = warp.cta, warp.mask(running)
        place = single(warp, which(warp), lanes, "number")
        named = cta.named.setdefault(place, Named(place))
        if cta.at_barrier.pop(warp.number, None):  # it has arrived, and was waiting
            if target:
                warp.write(target[0], np.full(LANES, named.outcome, WORDS[target[1]]), running)
            return None
        kind = "red" if vote else place
        if how != "arrive" and running is warp.lanes and warp.hold(kind):
            return OTHER_LANES
        together = lanes if vote or how == "arrive" else lanes | warp.meet(kind)
        expected = single(warp, counts[0](warp), lanes, "threads") if counts else cta.threads
        agreed = named.expected if named.arrived else expected
        step.refuse(
            warp, expected != agreed, f"barrier {place}: expected {agreed} threads as others do, got {expected}"
        )
        whole, full = not (warp.alive & ~together).any(), -(-expected // LANES) * LANES
        named.expected, now = expected, named.generation
        named.arrived += LANES if whole else int(together.sum())
        if vote:
            named.votes += vote(warp)[lanes].tolist()
        cta.races.release(warp, named)
        cta.launch.world.changes += 1
        told = f"barrier {place}: {named.arrived} threads have arrived, {expected} were expected"
        step.refuse(warp, named.arrived > full, told)

        def over() -> bool:
            ended = 0 if counts else LANES * cta.ended
            if named.generation == now and named.arrived + ended >= full:
                named.outcome = combine(named.votes) if combine else 0
                for one in named.waiting:
                    cta.races.acquire(one, named.clocks)
                named.arrived, named.votes, named.generation = 0, [], now + 1
                named.waiting, named.clocks = [], None
            return named.generation > now

        if how == "arrive":
            over()
            return None
        named.waiting.append(warp)
        cta.at_barrier[warp.number] = named
        return Wait(over, named)

    return run


COMBINE: dict[str, Callable[[list[bool]], int]] = {"or": any, "and": all, "popc": sum}


def cluster_arrive(step: Compiled, warp: Warp, running: np.ndarray | None) -> None:
    """§9.7.13.4 barrier.cluster.arrive; .relaxed hands on what fences have released."""
    warp.arrivals += 1
    relaxed = SCOPES["cluster"] if "relaxed" in step.instruction.words else 0
    warp.cta.races.release(warp, warp.cta.cluster.phases[warp.arrivals], relaxed)
    warp.cta.launch.world.changes += 1


def cluster_wait(step: Compiled, warp: Warp, running: np.ndarray | None) -> Wait | None:
    """§9.7.13.4 barrier.cluster.wait"""
    cluster, mine = warp.cta.cluster, warp.arrivals
    step.refuse(warp, not mine, "expected an arrival at the cluster's barrier before the wait")

    def over() -> bool:
        return all(other.arrivals >= mine or other.done for other in cluster.warps)

    if not over():
        return Wait(over, f"the cluster's barrier, for the {mine}. time")
    warp.cta.races.acquire(warp, cluster.phases[mine].clocks)
    return None


# --- Fences, and what changes no value -----------------------------------------------------------------------------------------


def proxy_fence(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.3 fence.proxy.async shows the async proxy what threads wrote to shared memory, to global memory, or to both."""
    of_shared, of_global = "global" not in instruction.words, not any("shared" in word for word in instruction.words)
    spaces = (0,) * of_shared + (1,) * of_global

    def run(warp: Warp, running: np.ndarray | None) -> None:
        if of_shared:
            warp.cta.shared.stale[:] = False
        warp.cta.races.fence(warp, spaces)

    return run


def fence(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.3 membar and fence of the generic proxy."""
    semantics = Semantics.of(instruction.words)
    if "mbarrier_init" not in instruction.words:
        return lambda warp, running: warp.cta.launch.world.fence(warp, semantics)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        races, scope = warp.cta.races, semantics.scope
        warp.released[scope] = races.joined(warp.released.get(scope), races.initialised(warp))

    return run


def nothing(step: Compiled, warp: Warp, running: np.ndarray | None) -> None:
    """§9.7.17.5 setmaxnreg, §9.7.17.3 nanosleep, griddepcontrol, prefetch."""


def trap(step: Compiled, warp: Warp, running: np.ndarray | None) -> None:
    """§9.7.17.4 trap"""
    raise step.error(warp, "trap", warp.active(running)[0])


TABLE: dict[str, Callable[[Statement, Compiled], Run]] = {
    "mbarrier.init": partial(_by_lanes, _initialise),
    "mbarrier.inval": partial(_by_lanes, _invalidate),
    "mbarrier.expect_tx": partial(_by_lanes, _expect),
    "mbarrier.arrive": partial(_by_lanes, _arrive),
    "mbarrier.arrive.expect_tx": partial(_by_lanes, _expect_and_arrive),
    "mbarrier.test_wait": mbarrier_wait,
    "mbarrier.try_wait": mbarrier_wait,
    "bar": bar,
    "barrier": bar,
    "barrier.cluster.arrive": plain(cluster_arrive),
    "barrier.cluster.wait": plain(cluster_wait),
    "fence.proxy": proxy_fence,
    "trap": plain(trap),
    "fence": fence,
    "membar": fence,
    **dict.fromkeys(("setmaxnreg", "nanosleep", "griddepcontrol", "prefetch"), plain(nothing)),
}
