"""Barriers, votes over a CTA, fences, and what else makes warps wait for each other (PTX ISA §9.7.13 and §9.7.14).

An mbarrier is 8 bytes of shared memory that only these instructions read: how many arrivals and bytes its phase still expects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blazeproto.lab.machine.lanes import present
from blazeproto.lab.machine.operands import address, fetch, registers_of, result
from blazeproto.lab.machine.ptx import WORDS, Immediate, Nothing, PtxError, Statement
from blazeproto.lab.machine.warp import LANES, OTHER_LANES, Wait, Warp

Made = Callable[[Any], Any]
UINT32, BOOL = np.dtype(np.uint32), np.dtype(np.bool_)
LARGEST = (1 << 20) - 1  # arrivals, and bytes of transactions, that an mbarrier counts


@dataclass
class Mbarrier:
    """PTX ISA §9.7.13.15: phase, arrivals that it still expects, those of every phase, bytes under way.

    place: where it is, and the line that initialised it.
    """

    address: int
    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    place: str = ""
    made: Any = field(default=None, repr=False)  # races.py: who initialised it,
    clocks: Any = field(default=None, repr=False)  # of who has arrived,
    released: Any = field(default=None, repr=False)  # and of who had when the last phase ended

    def arrive(self, count: int) -> None:
        self.pending -= count
        self._complete()

    def expect(self, count: int) -> None:
        self.bytes += count

    def complete_bytes(self, count: int) -> None:
        self.bytes -= count
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending, self.released = self.expected, self.clocks

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over: the one before the current one is what a parity can name."""
        return self.phase % 2 != parity

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.expected} arrivals and {self.bytes} bytes missing"
        return f"mbarrier at {self.place}; its phase {self.phase} has {missing}"


class Phase(NamedTuple):
    """What try_wait and test_wait ask for."""

    barrier: Mbarrier
    parity: int

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
    outcome: list[bool] = field(default_factory=list)
    clocks: Any = field(default=None, repr=False)
    released: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"barrier {self.number}: {self.arrived} of {self.expected} threads have arrived"


def _single(warp: Warp, step: Any, values: np.ndarray, running: np.ndarray | None, what: str) -> int:
    """The value that all lanes that run have."""
    chosen = values if running is None and warp.lanes is None else values[warp.mask() if running is None else running]
    if (chosen != chosen[0]).any():
        raise step.error(warp, f"lanes of one warp give different values for {what}")
    return int(chosen[0])


def mbarrier_at(warp: Warp, step: Any, place: int) -> Mbarrier:
    found = warp.cta.cluster.mbarriers.get(place)
    if found is None or warp.cta.gone(place):
        raise step.error(warp, f"no mbarrier is there: {warp.cta.describe(place)}")
    if warp.cta.races:
        warp.cta.races.use(warp, found, step)
    return found


def mbarrier(instruction: Statement) -> Made:
    """§9.7.13.15: init, inval, arrive, arrive.expect_tx, expect_tx, test_wait.parity, try_wait.parity."""
    kind = instruction.words[1]
    operands: list[Any] = list(instruction.operands)
    goal: Any = operands.pop(0) if kind in ("arrive", "test_wait", "try_wait") else None
    if kind in ("test_wait", "try_wait") and "parity" not in instruction.words:
        raise PtxError("expected .parity")
    if kind == "arrive" and not isinstance(goal, Nothing):
        raise PtxError("expected _ for the state")
    at, read = address(operands[0]), registers_of(operands[0])
    number = fetch(operands[1] if len(operands) > 1 else Immediate(1), UINT32)
    expecting = "expect_tx" in instruction.words

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            lanes = np.flatnonzero(warp.mask() if running is None else running)
            missing = warp.unwritten_among(read + registers_of(operands[-1]))
            if missing is not None and missing[lanes].any():
                raise step.error(warp, "an mbarrier's address or count that nobody wrote", missing)
            places, counts, cluster = at(warp)[lanes].tolist(), number(warp)[lanes].tolist(), warp.cta.cluster
            races, launch = warp.cta.races, warp.cta.launch
            if kind in ("test_wait", "try_wait"):
                asked = [
                    Phase(mbarrier_at(warp, step, place), parity)
                    for place, parity in set(zip(places, counts, strict=True))
                ]
                over = all(barrier.passed(parity) for barrier, parity in asked)
                if over or kind == "test_wait":
                    if over and races:
                        for barrier, _ in asked:
                            races.acquire(warp, barrier.released)
                    warp.write(goal.place, np.full(LANES, over), running)
                if over:
                    return None
                return Wait(
                    lambda: all(one.passed(wanted) for one, wanted in asked),
                    next(phase for phase in asked if not phase.barrier.passed(phase.parity)),
                    kind == "test_wait",
                )
            for place, count in zip(places, counts, strict=True):
                if kind == "init":
                    if place & 7 or not 1 <= count <= LARGEST:
                        raise step.error(warp, f"an mbarrier at {place:#x} for {count} arrivals")
                    where = f"{warp.cta.describe(place)}, made at {step.instruction.line}"
                    cluster.mbarriers[place] = Mbarrier(place, count, count, place=where)
                    if races:
                        races.initialise(warp, cluster.mbarriers[place], step)
                    continue
                barrier = mbarrier_at(warp, step, place)
                if races and kind == "arrive":
                    races.release(warp, barrier)
                if expecting:
                    barrier.expect(count)
                if kind == "arrive":
                    arrivals = 1 if expecting else count
                    if arrivals > barrier.pending:
                        raise step.error(warp, f"{arrivals} arrivals more than expected at {barrier}")
                    barrier.arrive(arrivals)
                elif kind == "inval":
                    del cluster.mbarriers[place]
            launch.changes += 1
            return None

        return run

    return made


def bar(instruction: Statement) -> Made:
    """§9.7.13.1 bar and barrier: sync, arrive, red; §9.7.13.2 bar.warp.sync; §9.7.13.4 barrier.cluster.

    A warp counts with all its lanes, those that are at their end too.
    """
    words = instruction.words
    if words[1] == "warp":
        return _of_lanes(fetch(instruction.operands[0], UINT32))
    if words[1] == "cluster":
        return _cluster(words[2])
    how, operands = words[1], list(instruction.operands)
    target = result(instruction) if how == "red" else None
    predicate = operands.pop() if how == "red" else None
    vote = fetch(predicate, BOOL) if predicate is not None else None
    if target:
        operands.pop(0)
    which = fetch(operands[0], UINT32)
    count = fetch(operands[1], UINT32) if len(operands) > 1 else None

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            cta, place = warp.cta, _single(warp, step, which(warp), running, "a barrier's number")
            named = cta.named.setdefault(place, Named(place))
            begun = cta.at_barrier.pop(warp.number, None)
            if begun is not None:  # it has arrived, and was waiting
                if target and begun.outcome:
                    warp.write(target[0], np.full(LANES, begun.outcome[-1], WORDS[target[1]]), running)
                return None
            if how != "arrive" and running is warp.lanes and warp.hold():
                return OTHER_LANES
            expected = (
                cta.threads if count is None else _single(warp, step, count(warp), running, "a barrier's threads")
            )
            if named.arrived and named.expected != expected:
                raise step.error(
                    warp, f"barrier {place}: expected {named.expected} threads as others do, got {expected}"
                )
            named.expected = expected
            lanes = warp.mask() if running is None else running
            whole = not (warp.alive & ~lanes).any()
            named.arrived += LANES if whole else int(lanes.sum())
            if vote is not None:
                named.votes += vote(warp)[lanes].tolist()
            if cta.races:
                cta.races.release(warp, named)
            cta.launch.changes += 1
            now = named.generation
            full = -(-expected // LANES) * LANES
            if named.arrived > full:
                raise step.error(
                    warp, f"barrier {place}: {named.arrived} threads have arrived, {expected} were expected"
                )
            if named.arrived == full:
                if how == "red":
                    combine = {"or": any, "and": all}[words[2]]
                    named.outcome.append(combine(named.votes))
                named.arrived, named.votes, named.generation = 0, [], now + 1
                named.released, named.clocks = named.clocks, None
            if how == "arrive":
                return None
            cta.at_barrier[warp.number] = named

            def over() -> bool:
                if named.generation > now and cta.races:
                    cta.races.acquire(warp, named.released)
                return named.generation > now

            return Wait(over, named)

        return run

    return made


def _of_lanes(mask: Any) -> Made:
    """Lanes of a warp count as ordered; but those that the mask names come together."""

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            return OTHER_LANES if present(warp, running, mask(warp), step) is None else None

        return run

    return made


def _cluster(how: str) -> Made:
    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            cluster, races = warp.cta.cluster, warp.cta.races
            if how == "arrive":
                number = cluster.arrivals[warp] = cluster.arrivals.get(warp, 0) + 1
                if races:
                    races.release(warp, cluster.phases.setdefault(number, Named(number)))
                warp.cta.launch.changes += 1
                return None
            mine = cluster.arrivals.get(warp, 0)
            if not mine:
                raise step.error(warp, "expected an arrival at the cluster's barrier before the wait")

            def over() -> bool:
                return all(cluster.arrivals.get(w, 0) >= mine or w.done for cta in cluster.ctas for w in cta.warps)

            if not over():
                return Wait(over, f"the cluster's barrier, for the {mine}. time")
            if races:
                races.acquire(warp, cluster.phases[mine].clocks)
            return None

        return run

    return made


def fence(instruction: Statement) -> Made:
    """§9.7.13.3 membar and fence. fence.proxy.async shows the async proxy what threads wrote to shared memory."""
    proxy = "proxy" in instruction.words

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            if proxy:
                warp.cta.shared.stale[:] = False
                if warp.cta.races:
                    warp.cta.races.fence(warp)

        return run

    return made


def nothing(instruction: Statement) -> Made:
    """§9.7.17.5 setmaxnreg, §9.7.17.3 nanosleep, and griddepcontrol: they change no value."""
    return lambda step: lambda warp, running: None


def trap(instruction: Statement) -> Made:
    """§9.7.17.4 trap."""

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            raise step.error(warp, "trap", warp.mask() if running is None else running)

        return run

    return made


TABLE = {"mbarrier": mbarrier, "bar": bar, "barrier": bar, "fence": fence, "membar": fence, "trap": trap}
TABLE |= {"setmaxnreg": nothing, "nanosleep": nothing, "griddepcontrol": nothing}
