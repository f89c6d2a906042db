"""Races: two accesses to a byte, one of them a write, that nothing waited for orders, whatever this run's order was.

Who acts is an *actor*: a warp, or something asynchronous, named by its issuer and by what it is waited for (a warp's copies, its
bulk groups, a warpgroup's products, an mbarrier's loads). Every actor counts its epochs. A *clock* says which epochs of every
actor are known to have ended; barriers, waits and arrivals hand clocks on (FastTrack: Flanagan, Freund 2009).

The async proxy sees what threads did only behind a fence. So a warp has two clocks: of what it knows, and of what the async
proxy may see, which a fence brings up to the first; an asynchronous access is judged by the second where threads acted.

CTAs run one cluster after another, and nothing orders them: what an earlier cluster did is known to nobody. Atomics are ordered
with each other alone. Lanes of a warp count as ordered. Scope is not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blazeproto.lab.machine.memory import Block

if TYPE_CHECKING:
    from blazeproto.lab.machine.asynchronous import Transaction
    from blazeproto.lab.machine.barriers import Mbarrier
    from blazeproto.lab.machine.warp import Compiled, Warp

Clocks = np.ndarray  # (2, actors): the epochs that ended, and those that the async proxy sees


class Race(NamedTuple):
    """Two accesses, the later one of this run last."""

    kind: str
    where: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"race in {self.where}: {self.kind}\n  {self.first}\n  {self.second}"


UNIT = 16  # bytes that a shadow begins with: the widest that one lane accesses


class Shadow:
    """For every ``unit`` bytes the last write's actor, epoch and instruction, whether it was an atomic, and the reads since, in
    as many rows as there are actors that read the same. Nobody accesses a part of a unit: it becomes smaller first."""

    def __init__(self, size: int) -> None:
        self.unit, count = UNIT, -(-size // UNIT)
        self.last = np.zeros((4, count), np.int32)  # actors, epochs, sites, atomics
        self.reads: list[np.ndarray] = []  # (3, count) each: actors, epochs, sites

    def places(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """The units of pieces of so many bytes."""
        low = int(np.bitwise_or.reduce(offsets)) | size | self.unit
        if (unit := low & -low) < self.unit:
            self.last = self.last.repeat(self.unit // unit, axis=1)
            self.reads = [row.repeat(self.unit // unit, axis=1) for row in self.reads]
            self.unit = unit
        begins = offsets // self.unit
        return begins if size == self.unit else (begins[:, None] + np.arange(size // self.unit)).reshape(-1)


class Order(NamedTuple):
    """What was known when a transaction was issued."""

    actor: int
    epoch: int
    clocks: Clocks


class Access(NamedTuple):
    """Who reads or writes, what is known to have ended, and which of what threads did the async proxy sees: None for a thread."""

    actor: int
    epoch: int
    site: int
    known: np.ndarray
    seen: np.ndarray | None


class Races:
    """What was found in a launch, by the pair of source lines, and the clocks of the cluster that runs."""

    def __init__(self) -> None:
        self.found: dict[Any, Race] = {}
        self.earlier = 0  # epochs up to this one are of other clusters
        self.epochs: dict[int, int] = {}  # by actor
        self.sites: dict[tuple[Compiled, str, str], int] = {}  # instruction, CTA and warp, in their order
        self.shadows: dict[Block, Shadow] = {}
        self.unwritten: dict[Block, list[Any]] = {}  # reads of global memory that this launch has not written yet
        self.size = 0  # of clocks

    def begin(self, warps: list[Warp]) -> None:
        """Another cluster runs from now on, of these warps."""
        self.earlier = max(self.epochs.values(), default=0)
        self.shadows = {block: shadow for block, shadow in self.shadows.items() if block.address >> 40}
        self.actors: dict[Any, int] = {"nobody": 0}
        self.size = max(self.size, 64 + 8 * len(warps))
        self.epochs = defaultdict(lambda: self.earlier)
        self.generic = np.zeros(self.size, np.bool_)  # actors that are threads, or act as threads do
        self.clocks: dict[Warp, Clocks] = {warp: np.zeros((2, self.size), np.int32) for warp in warps}
        for warp in warps:
            warp.actor = self._actor(warp, generic=True)
            self._tick(warp)

    def _actor(self, key: Any, generic: bool) -> int:
        if key not in self.actors:
            self.actors[key] = len(self.actors)
            if len(self.actors) > self.size:
                self.size *= 2
                self.generic = self._fit(self.generic)
                self.clocks = {warp: self._fit(clocks) for warp, clocks in self.clocks.items()}
            self.generic[self.actors[key]] = generic
        return self.actors[key]

    def _next(self, actor: int) -> int:
        self.epochs[actor] += 1
        return self.epochs[actor]

    def _tick(self, warp: Warp) -> None:
        """A new epoch of a warp: what it does from now on is not known to those who know what it did so far."""
        self.clocks[warp][0, warp.actor] = self._next(warp.actor)

    def _fit(self, clocks: np.ndarray) -> np.ndarray:
        """As long as there are actors by now."""
        more = self.size - clocks.shape[-1]
        return np.pad(clocks, [(0, 0)] * (clocks.ndim - 1) + [(0, more)]) if more else clocks

    def _joined(self, clocks: Clocks | None, mine: Clocks) -> Clocks:
        return self._fit(mine).copy() if clocks is None else np.maximum(self._fit(clocks), self._fit(mine))

    # --- What orders ---------------------------------------------------------------------------------------------------------

    def release(self, warp: Warp, to: Any) -> None:
        """To a barrier: it knows what the warp knows."""
        to.clocks = self._joined(to.clocks, self.clocks[warp])
        self._tick(warp)

    def acquire(self, warp: Warp, clocks: Clocks | None) -> None:
        """A warp has waited for those whose clocks these are."""
        self.clocks[warp] = self._joined(clocks, self.clocks[warp])

    def fence(self, warp: Warp) -> None:
        """The async proxy sees what the warp knows."""
        known, seen = self.clocks[warp]
        np.maximum(known, seen, out=seen)
        self._tick(warp)

    def issue(self, warp: Warp, key: Any, generic: bool = False) -> Order:
        """A transaction, an epoch of its own of the actor that its key names; who waits for it learns of that."""
        actor = self._actor(key, generic)
        return Order(actor, self._next(actor), self.clocks[warp].copy())

    def join(self, transaction: Transaction, warp: Warp) -> None:
        """Another warp issues it too."""
        order = transaction.orders[0]
        transaction.orders[0] = order._replace(clocks=self._joined(order.clocks, self.clocks[warp]))

    def finish(self, warp: Warp, order: Order) -> None:
        """The warp has waited for a transaction."""
        known = self.clocks[warp][0]
        known[order.actor] = max(known[order.actor], order.epoch)

    def release_transaction(self, transaction: Transaction, barrier: Mbarrier) -> None:
        """It completes a barrier's bytes or arrives there."""
        actor, epoch, clocks = transaction.orders[0]
        barrier.clocks = self._joined(barrier.clocks, clocks)
        barrier.clocks[0, actor] = max(barrier.clocks[0, actor], epoch)

    def initialise(self, warp: Warp, barrier: Mbarrier, step: Compiled) -> None:
        """Who uses a barrier has to know that it was initialised."""
        barrier.made = warp.actor, self.epochs[warp.actor], self._site(warp, step)

    def use(self, warp: Warp, barrier: Mbarrier, step: Compiled) -> None:
        actor, epoch, site = barrier.made
        if epoch > self.clocks[warp][0, actor] and actor != warp.actor:
            self._report(warp.cta.describe(barrier.address), site, self._site(warp, step), "a barrier made, then used")

    # --- Accesses ------------------------------------------------------------------------------------------------------------

    def read(self, block: Block, offsets: np.ndarray, size: int, by: Any, step: Compiled) -> None:
        """offsets: of pieces of ``size`` bytes.  by: a warp, or a transaction."""
        if block.read_only or not len(offsets):
            return
        shadow, who = self.shadows.get(block), self._who(by, step, None)
        if shadow is None:
            if block.address >> 40:
                self.unwritten.setdefault(block, []).append((offsets, size, who._replace(known=np.zeros(0, np.int32))))
                return
            shadow = self.shadows[block] = Shadow(block.size)
        index = shadow.places(offsets, size)
        self._judge(block, shadow, shadow.last, index, who, "a write, then a read")
        self._remember(shadow, index, who)

    def write(
        self,
        block: Block,
        offsets: np.ndarray,
        size: int,
        by: Any,
        step: Compiled,
        order: Order | None = None,
        atomic: bool = False,
    ) -> None:
        """As `read`.  order: of the part of a transaction that writes, where it is not its own."""
        if not len(offsets):
            return
        shadow, who = self.shadows.get(block), self._who(by, step, order)
        if shadow is None:
            shadow = self.shadows[block] = Shadow(block.size)
            for read, of_size, reader in self.unwritten.pop(block, ()):
                self._remember(shadow, shadow.places(read, of_size), reader)
        index = shadow.places(offsets, size)
        judged = index[shadow.last[3, index] == 0] if atomic else index
        self._judge(block, shadow, shadow.last, judged, who, "a write, then a write")
        for row in shadow.reads:
            self._judge(block, shadow, row, index, who, "a read, then a write")
            row[1, index] = 0
        shadow.last[:, index] = np.array([[who.actor], [who.epoch], [who.site], [atomic]])

    def _who(self, by: Any, step: Compiled, order: Order | None) -> Access:
        if by in self.clocks:
            return Access(by.actor, self.epochs[by.actor], self._site(by, step), self.clocks[by][0], None)
        order = order or by.orders[0]
        known, seen = self._fit(order.clocks)
        return Access(order.actor, order.epoch, self._site(by.warp, step), known, None if by.generic else seen)

    def _judge(self, block: Block, shadow: Shadow, row: np.ndarray, index: np.ndarray, by: Access, kind: str) -> None:
        """Reports where an actor does not know that these accesses have ended."""
        who, when = row[0, index], row[1, index]
        clash = when > by.known[who]
        if by.seen is not None:
            clash |= (when > by.seen[who]) & self.generic[who]
        clash &= who != by.actor
        if self.earlier:
            clash |= (when <= self.earlier) & (when > 0)
        if clash.any():
            place = int(index[clash][0])
            self._report(f"byte {place * shadow.unit} of {block.name}", int(row[2, place]), by.site, kind)

    def _remember(self, shadow: Shadow, index: np.ndarray, by: Access) -> None:
        """A read, in the first row where there is none, or one that ended before. The first keeps one of an earlier cluster."""
        known = self._fit(by.known)
        for number in count():
            if number == len(shadow.reads):
                shadow.reads.append(np.zeros((3, shadow.last.shape[1]), np.int32))
            row = shadow.reads[number]
            who, when = row[0, index], row[1, index]
            free = (when <= known[who]) | (who == by.actor)
            if self.earlier:
                of_earlier = (when > 0) & (when <= self.earlier)
                free = free | of_earlier if number else free & ~of_earlier
            row[:, index[free]] = np.array([[by.actor], [by.epoch], [by.site]])
            index = index[~free]
            if not len(index):
                return

    def _site(self, warp: Warp, step: Compiled) -> int:
        return self.sites.setdefault((step, warp.cta.name, warp.name), len(self.sites))

    def _report(self, where: str, first: int, second: int, kind: str) -> None:
        of = itemgetter(first, second)(list(self.sites))
        key = *(step.instruction.line.places or step.instruction.number for step, *_ in of), kind
        if key not in self.found:
            texts = (f"{step.instruction.line}: {step.instruction.opcode} of {cta}, {warp}" for step, cta, warp in of)
            self.found[key] = Race(kind, where, *texts)


class Unwatched:
    """In the place of `Races` where nobody asked for them: notes nothing."""

    found: Mapping[Any, Race] = {}

    def note(self, *_: Any, **__: Any) -> None:
        """What anybody does."""

    begin = release = acquire = fence = issue = join = finish = note
    release_transaction = initialise = use = read = write = note
