"""Runs a program: CTAs one cluster after another, their warps in an order that a seed decides.

At every instruction that others can see the schedule may let another warp go first, or let something happen that is under way.
A transaction that nobody waits for may happen late; the seed decides how late, and whether all warps and all that is under way
have the same chance, or some are put off for long. The same seed gives the same run.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxsim.asynchronous import Transaction
from ptxsim.cta import Cluster, Launch
from ptxsim.memory import Memory
from ptxsim.races import Race, Races, Unwatched
from ptxsim.warp import Compiled, MachineError, Wait, Warp
from ptxsim.world import World

SWITCH = (0.02, 0.2, 0.6)  # how readily another warp goes first, one of these
HAPPEN = (0.0, 0.05, 0.3, 1.0)  # how soon what is under way happens: 0, when nobody can go on without it
FAIR = (True, False)  # whether all warps have the same chance; else they go on by priorities, which change now and then
CHANGE = 0.02  # how often a priority does
# What is under way happens by priorities too, of one of these: of all alike, an opcode, what is waited for, a transaction.
PRIORITIES: tuple[Callable[[Any], Any], ...] = (
    lambda one: None,
    lambda one: one.step.instruction.opcode,
    lambda one: one.key,
    lambda one: one,
)
NEVER: tuple[int, dict[Any, tuple[Compiled, Wait, int]], bool] = (-1, {}, False)  # has a warp asked in vain
PATIENCE = 30  # times that a warp reads a word again before it counts as one that waits for it


class Deadlock(MachineError):
    """Nobody can go on."""


@dataclass(repr=False)
class Report:
    """The findings of a run: races as pairs of source lines, steps of all warps, and the seed that gives the same run again.

    ended: whether it came to its end, as one that an error cut short did not.
    """

    entry: str
    seed: int
    steps: int = 0
    races: list[Race] = field(default_factory=list)
    ended: bool = False

    def __repr__(self) -> str:
        found = "\n".join(map(str, self.races)) or ("no race" if self.ended else "no race so far")
        not_yet = "" if self.ended else ", not at its end"
        return f"{self.entry}, seed {self.seed}: {self.steps} warp instructions{not_yet}; {found}"


def start(
    *arguments: Any,
    memory: Memory,
    seed: int = 0,
    races: bool = True,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[Report, "Iterator[Schedule]"]:
    """A launch that has not begun: its report, which fills, and the schedule of each cluster in turn.

    arguments, options: of `ptxsim.cta.Launch`, behind its world.
    progress: called with clusters done and in all.
    """
    world = World(memory, Races() if races else Unwatched())
    launch = Launch(world, *arguments, **options)
    report, draw = Report(launch.entry.name, seed), random.Random(seed)

    def schedules() -> "Iterator[Schedule]":
        for first in range(0, launch.count, launch.cluster):
            schedule = Schedule(world, [Cluster(launch, first)], draw, report)
            yield schedule
            schedule.tell()
            if progress:
                progress(first // launch.cluster + 1, launch.count // launch.cluster)
        report.ended = True

    return report, schedules()


def run(*arguments: Any, most: float = float("inf"), **options: Any) -> Report:
    """Run one launch to its end; arguments and options as for `start`. Arrays in ``memory`` have the results.

    most: warp instructions.
    Raises PtxError for what the machine does not know, MachineError for what a kernel may not do, and where it takes more than
    ``most`` instructions, Deadlock where nobody goes on.
    """
    report, schedules = start(*arguments, **options)
    for schedule in schedules:
        schedule.finish(most)
    return report


class Schedule:
    """The warps of clusters that run at once, and who goes on. until: the count of instructions at which a turn ends."""

    def __init__(self, world: World, clusters: list[Cluster], draw: random.Random, report: Report) -> None:
        self.world, self.clusters, self.draw, self.report = world, clusters, draw, report
        self.switch, self.happen = draw.choice(SWITCH), draw.choice(HAPPEN)
        self.fair, self.kind = draw.choice(FAIR), draw.choice(PRIORITIES)
        self.priorities: dict[Any, float] = defaultdict(draw.random)
        # Who asked in vain: the world's changes then, what and how often, and whether it was the same again although nothing
        # had changed.
        self.spun: dict[Warp, tuple[int, dict[Any, tuple[Compiled, Wait, int]], bool]] = {}
        self.count, self.until = 0, float("inf")
        self.warps = [warp for cluster in clusters for warp in cluster.warps if warp.alive.any()]
        self.turn: Warp | None = None  # whose turn was cut off

    def finish(self, most: float) -> None:
        """To the end. MachineError where the report then has more than ``most`` instructions."""
        self.until = most + 1 - self.report.steps
        while self.advance():
            if self.count >= self.until:
                self.tell()
                error = MachineError(self.who_is_where(f"more than {most} instructions"))
                error.report = self.report
                raise error

    def advance(self, chosen: Warp | None = None) -> bool:
        """One warp's turn, or one thing that was under way; False where all is done, or where the ``chosen`` warp can't go on."""
        try:
            with np.errstate(all="ignore"):
                self.warps = [warp for warp in self.warps if not warp.done]
                self._begin()
                able = [warp for warp in self.warps if chosen in (None, warp) and self.able(warp)]
                if not self.warps:
                    self._ended()
                if able:
                    self._go(self.turn if self.turn in able else self._next(able))
                elif chosen or not (self._let_happen() or self._ask_again()):
                    if not chosen and (self.warps or self.world.pending):
                        raise Deadlock(self.who_is_where("nobody can go on"))
                    return False
        except MachineError as error:
            self.tell()
            error.report = self.report
            raise
        return True

    def _begin(self) -> None:
        """Where it is time for more clusters."""

    def _ask_again(self) -> bool:
        """A repeated read is not always a spin: lets a warp go on that has not repeated one for long. Whether there was one."""
        for warp, (since, asked, again) in self.spun.items():
            if again and not warp.done and max(times for *_, times in asked.values()) < PATIENCE:
                self.spun[warp] = since, asked, False
                return True
        return False

    def _ended(self, launch: Launch | None = None) -> None:
        """Threads, of a launch, are at their end: what they have issued may still write to global memory, and no more."""
        for one in self.world.pending:
            if launch not in (None, one.warp.cta.launch):
                continue
            if len(one.orders) > 1 and one.next == 0:  # a TMA store, whose reads and writes are waited for apart
                raise one.step.error(one.warp, "its CTA ended before TMA had read the shared memory")

    def _next(self, able: list[Warp]) -> Warp:
        random_number = self.draw.random
        if self.fair:
            return able[int(random_number() * len(able))]
        chosen = max(able, key=self.priorities.__getitem__)
        if random_number() < CHANGE:
            self.priorities[chosen] = random_number()
        return chosen

    def tell(self) -> None:
        """The report, of what the cluster did."""
        self.report.steps += self.count
        self.report.races = list(self.world.races.found.values())

    def able(self, warp: Warp) -> bool:
        if warp.wait is not None:
            if not warp.wait.over():
                return False
            warp.wait = None
        since, _, again = self.spun.get(warp, NEVER)
        return not again or since != self.world.changes

    def _go(self, warp: Warp) -> None:
        """Until the schedule has another go on, or this one waits."""
        steps, random_number, switch, happen = warp.cta.launch.steps, self.draw.random, self.switch, self.happen
        pending, self.turn = self.world.pending, None
        while not warp.done and self.count < self.until:
            step = steps[warp.pc]
            self.last = warp, step  # what ran last
            wait = step(warp)
            self.count += 1
            warp.clock = self.count
            if wait is not None:
                if not wait.spinning:
                    warp.wait = wait
                    return
                since, asked, _ = self.spun.get(warp, NEVER)
                before, key = asked if since == self.world.changes else {}, (step, wait.question)
                times = before[key][2] + 1 if key in before else 0
                self.spun[warp] = self.world.changes, before | {key: (step, wait, times)}, times > 0
                if times:
                    return
            if step.visible:
                if pending and happen and random_number() < happen:
                    self._let_happen()
                if random_number() < switch:
                    return
        self.turn = warp

    def _let_happen(self) -> bool:
        """One of the transactions that can: whether there was one."""
        heads: dict[Any, Transaction] = {}
        for one in self.world.pending:
            heads.setdefault(one.queue, one)
        ready = [one for one in heads.values() if not one.missing]
        if not ready:
            return False
        first = max(self.priorities[self.kind(one)] for one in ready)
        ready = [one for one in ready if self.priorities[self.kind(one)] == first]
        ready[int(self.draw.random() * len(ready))].perform()
        return True

    def who_is_where(self, what: str) -> str:
        """In the order of warps, those together that wait for the same at the same line."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for warp in self.warps:
            spun = self.spun.get(warp, NEVER)[1].values()
            asked = [f"{step.instruction.line}: {wait.what}" for step, wait, times in spun if times]
            line = warp.cta.launch.steps[warp.pc].instruction.line
            again = f"asking again at {'; at '.join(asked)}" if asked else f"at {line}"
            why = f"at {line}: {warp.wait.what}" if warp.wait else again
            reasons.setdefault((warp.cta.name, why), []).append(str(warp.number))
        lines = [f"{self.report.entry}: {what}"]
        for (cta, why), numbers in reasons.items():
            lines.append(f"  {cta}, warp{'s' * (len(numbers) > 1)} {', '.join(numbers)} {why}")
        ended = [f"{warp.cta.name}, {warp.name}" for one in self.clusters for warp in one.warps if warp.done]
        lines += [f"  at their end: {'; '.join(ended)}"] if ended else []
        return "\n".join([*lines, *(f"  under way: {one}" for one in self.world.pending)])
