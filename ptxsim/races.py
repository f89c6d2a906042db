"""Races: two accesses to a byte, one of them a write, that nothing waited for orders, whatever this run's order was.

An *actor* is a warp, or something asynchronous, named by its issuer and by what it is waited for (a warp's copies, its
bulk groups, a warpgroup's products, an mbarrier's loads). Every actor counts its epochs. A *clock* says which epochs of every
actor are known to have ended; barriers, waits and arrivals hand clocks on (FastTrack: Flanagan, Freund 2009).

The async proxy sees what threads did only behind a fence. So a warp has three clocks: of what it knows, and of what the async
proxy may see of it in shared and in global memory, which a fence brings up to the first; an asynchronous access is judged by
these where threads acted.

Asynchronous accesses are not in the order of the program (PTX ISA §8.9.1.1): two of one thread race unless the first was waited
for, and waiting for one tells nothing else of the thread that issued it. A wgmma reads for four warps. Each of them must know of
the writes that it reads, and it has ended for an actor that knows that each of them has waited for it.

CTAs of one launch run one cluster after another, and nothing orders them: no actor knows of an earlier cluster's accesses.
Atomics are ordered with each other alone. Among launches that run at once (world.py) acquire and release order threads of all
CTAs and GPUs, strong accesses do not race where their scopes reach from one to the other (PTX ISA §8.6, "Morally strong
operations"), and a launch knows what the one before it on its GPU did. Lanes of a warp count as ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptxsim.memory import SYSTEM, Block

if TYPE_CHECKING:
    from ptxsim.asynchronous import Transaction
    from ptxsim.barriers import Mbarrier
    from ptxsim.warp import Compiled, Warp

SPACES = 2  # shared and global memory
Clocks = np.ndarray  # (1 + SPACES, actors): the epochs that ended, and those that the async proxy sees in each space


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
    """For every ``unit`` bytes the last write's actor, epoch, instruction and scope, 0 where it was weak, and the reads since,
    with a row for each actor that read the same. Nobody accesses a part of a unit: it becomes smaller first."""

    def __init__(self, size: int) -> None:
        self.unit, count = UNIT, -(-size // UNIT)
        self.last = np.zeros((4, count), np.int32)  # actors, epochs, sites, scopes
        self.reads: list[np.ndarray] = []  # the same of each

    def places(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """The units of pieces of this many bytes."""
        low = int(np.bitwise_or.reduce(offsets)) | size | self.unit
        if (unit := low & -low) < self.unit:
            self.last = self.last.repeat(self.unit // unit, axis=1)
            self.reads = [row.repeat(self.unit // unit, axis=1) for row in self.reads]
            self.unit = unit
        begins = offsets // self.unit
        return begins if size == self.unit else (begins[:, None] + np.arange(size // self.unit)).reshape(-1)


class Order(NamedTuple):
    """The clocks at a transaction's issue."""

    actor: int
    epoch: int
    clocks: Clocks


class Access(NamedTuple):
    """An access: its actor, the epochs known to have ended, and those epochs of threads that the async proxy sees (None: a
    thread).

    scope: 0 where it is weak.
    """

    actor: int
    epoch: int
    site: int
    known: np.ndarray
    seen: np.ndarray | None
    scope: int


class Races:
    """The races found, by pair of source lines, and the clocks of the cluster that runs, or ``together`` of all."""

    def __init__(self, together: bool = False) -> None:
        self.together = together
        self.found: dict[Any, Race] = {}
        self.earlier = 0  # epochs up to this one are of other clusters
        self.sites: dict[tuple[Compiled, str, str], int] = {}  # instruction, CTA and warp, in their order
        self.shadows: dict[Block, Shadow] = {}
        self.unwritten: dict[Block, list[Any]] = {}  # reads of global memory that this launch has not written yet
        self._forget(64)

    def begin(self, warps: list[Warp], known: Clocks | None = None) -> None:
        """Another cluster runs from now on, of these warps. known: what its launch knows from the start."""
        if not self.together:
            self.earlier = max(self.epochs.values(), default=0)
            self.shadows = {block: shadow for block, shadow in self.shadows.items() if block.address >> 40}
            self._forget(max(self.size, 64 + 8 * len(warps)))
        for warp in warps:
            warp.actor = self._actor(warp, generic=True)
            cta = warp.cta
            self.homes[:, warp.actor] = cta.launch.gpu, warps[0].actor, cta.warps[0].actor
            self.clocks[warp] = self.joined(known, self._nothing())
            self._tick(warp)

    def end(self, warps: list[Warp]) -> Clocks:
        """A launch of these warps has ended. The next launch on its GPU knows all accesses of its GPU, and all that these warps
        know."""
        known = np.maximum.reduce([self._fit(self.clocks.pop(warp)) for warp in warps])
        for actor, epoch in self.epochs.items():
            if self.homes[0, actor] == warps[0].cta.launch.gpu:
                known[:, actor] = epoch
        return known

    def _forget(self, size: int) -> None:
        """All actors. size: of clocks."""
        self.actors: dict[Any, int] = {"nobody": 0}
        self.size = size
        self.epochs: dict[int, int] = defaultdict(lambda: self.earlier)  # by actor
        self.generic = np.zeros(size, np.bool_)  # actors that are threads, or act as threads do
        self.homes = np.zeros((3, size), np.int32)  # their GPUs, clusters and CTAs, these by their first warps
        self.clocks: dict[Warp, Clocks] = {}
        self.wholes, self.parts = list[int](), list[list[int]]()  # actors of which warps wait for parts, and these

    def _nothing(self) -> Clocks:
        return np.zeros((1 + SPACES, self.size), np.int32)

    def _actor(self, key: Any, generic: bool) -> int:
        if key not in self.actors:
            self.actors[key] = len(self.actors)
            if len(self.actors) > self.size:
                self.size *= 2
                self.generic, self.homes = self._fit(self.generic), self._fit(self.homes)
                self.clocks = {warp: self._fit(clocks) for warp, clocks in self.clocks.items()}
            self.generic[self.actors[key]] = generic
        return self.actors[key]

    def _next(self, actor: int) -> int:
        self.epochs[actor] += 1
        return self.epochs[actor]

    def _tick(self, warp: Warp) -> None:
        """A new epoch of a warp: earlier synchronisation does not order its accesses from here on."""
        self.clocks[warp][0, warp.actor] = self._next(warp.actor)

    def _fit(self, clocks: np.ndarray) -> np.ndarray:
        """As long as there are actors by now."""
        more = self.size - clocks.shape[-1]
        return np.pad(clocks, [(0, 0)] * (clocks.ndim - 1) + [(0, more)]) if more else clocks

    def joined(self, clocks: Clocks | None, mine: Clocks) -> Clocks:
        return self._fit(mine).copy() if clocks is None else np.maximum(self._fit(clocks), self._fit(mine))

    # --- What orders ---------------------------------------------------------------------------------------------------------

    def release(self, warp: Warp, to: Any, relaxed: int = 0) -> None:
        """To a barrier: it knows what the warp knows. relaxed: what its fences of at least this scope released, and no more."""
        fenced = [clocks for scope, clocks in warp.released.items() if scope >= relaxed]
        for clocks in fenced if relaxed else [self.snapshot(warp)]:
            to.clocks = self.joined(to.clocks, clocks)

    def snapshot(self, warp: Warp) -> Clocks:
        """The warp's clocks so far."""
        known = self.clocks[warp].copy()
        self._tick(warp)
        return known

    def now(self, warp: Warp) -> tuple[int, int]:
        """The actor that a warp is, and its epoch."""
        return warp.actor, self.epochs[warp.actor]

    def knows(self, warp: Warp, actor: int, epoch: int) -> bool:
        return bool(epoch <= self._fit(self.clocks[warp])[0, actor])

    def apart(self, first: Warp, second: Warp) -> int:
        """The scope that two warps have in common, of `memory.SCOPES`."""
        return int(self._apart(first.actor, second.actor))

    def _apart(self, actors: Any, actor: int) -> np.ndarray:
        gpu, cluster, cta = (home[actors] == home[actor] for home in self.homes)
        return np.select([cta, cluster, gpu], [1, 2, 3], 4)

    def acquire(self, warp: Warp, clocks: Clocks | None) -> None:
        """A warp has waited for those whose clocks these are."""
        self.clocks[warp] = self.joined(clocks, self.clocks[warp])
        self._join_parts(warp)

    def fence(self, warp: Warp, spaces: tuple[int, ...]) -> None:
        """The async proxy sees what the warp knows: 0, in shared memory; 1, in global memory."""
        known, *seen = self.clocks[warp]
        for space in spaces:
            np.maximum(known, seen[space], out=seen[space])
        self._tick(warp)

    def issue(self, warp: Warp, key: Any, generic: bool = False) -> Order:
        """A transaction, an epoch of its own of the actor that its key names; who waits for it learns of that."""
        actor = self._actor(key, generic)
        self.homes[:, actor] = self.homes[:, warp.actor]
        return Order(actor, self._next(actor), self.snapshot(warp))

    def join(self, transaction: Transaction, warp: Warp) -> None:
        """Another warp issues it too, and accesses memory by it: what each of them knows counts."""
        order = transaction.orders[0]
        transaction.orders[0] = order._replace(clocks=np.minimum(self._fit(order.clocks), self.snapshot(warp)))

    def finish(self, warp: Warp, order: Order) -> None:
        """The warp has waited for a transaction."""
        known = self.clocks[warp][0]
        known[order.actor] = max(known[order.actor], order.epoch)

    def finish_part(self, warp: Warp, order: Order, part: int, parts: int) -> None:
        """The warp has waited for its part of a transaction of several warps; who knows of all parts knows that it has ended."""
        if order.actor not in self.wholes:
            self.parts.append([self._actor(("part", order.actor, number), generic=False) for number in range(parts)])
            self.wholes.append(order.actor)
        mine = self.parts[self.wholes.index(order.actor)][part]
        self.clocks[warp][0, mine] = order.epoch
        self._join_parts(warp)

    def _join_parts(self, warp: Warp) -> None:
        if self.wholes:
            known = self.clocks[warp][0]
            known[self.wholes] = np.maximum(known[self.wholes], known[self.parts].min(axis=1))

    def complete(self, barrier: Mbarrier, orders: Iterable[Order]) -> None:
        """Transactions complete a barrier's bytes, or arrive there: it knows of them, and of nothing else (§8.9.1.1)."""
        barrier.clocks = self.joined(barrier.clocks, self._nothing())
        for actor, epoch, _ in orders:
            barrier.clocks[0, actor] = max(barrier.clocks[0, actor], epoch)

    def initialise(self, warp: Warp, barrier: Mbarrier, step: Compiled) -> None:
        """An actor that uses a barrier must know that it was initialised."""
        actor = self._actor((warp, "mbarriers"), generic=True)
        epoch = self.clocks[warp][0, actor] = self._next(actor)
        barrier.made = actor, epoch, self._site(warp, step)

    def initialised(self, warp: Warp) -> Clocks:
        """Writes that fence.mbarrier_init releases."""
        known, actor = self._nothing(), self._actor((warp, "mbarriers"), generic=True)
        known[0, actor] = self.clocks[warp][0, actor]
        return known

    def use(self, warp: Warp, barrier: Mbarrier, step: Compiled) -> None:
        actor, epoch, site = barrier.made
        if epoch > self.clocks[warp][0, actor]:
            self._report(warp.cta.describe(barrier.address), site, self._site(warp, step), "a barrier made, then used")

    # --- Accesses ------------------------------------------------------------------------------------------------------------

    def read(
        self, block: Block, offsets: np.ndarray, size: int, by: Any, step: Compiled, order: Order | None = None
    ) -> None:
        """offsets: of pieces of ``size`` bytes.  by: a warp, or a transaction.  order: of the part of a transaction that reads,
        where it is not its first."""
        if block.read_only or not len(offsets):
            return
        block, nc = block.home, self.together and step.semantics.nc
        shadow, who = self.shadows.get(block), self._who(by, step, order, block)
        if shadow is None:
            if block.address >> 40:
                self.unwritten.setdefault(block, []).append((offsets, size, who._replace(known=np.zeros(0, np.int32))))
                return
            shadow = self.shadows[block] = Shadow(block.size)
        index = shadow.places(offsets, size)
        self._judge(block, shadow, shadow.last, index, who, f"a write, then a {'non-coherent ' * nc}read")
        self._remember(shadow, index, who)

    def write(
        self,
        block: Block,
        offsets: np.ndarray,
        size: int,
        by: Any,
        step: Compiled,
        order: Order | None = None,
    ) -> None:
        """As `read`."""
        if not len(offsets):
            return
        block = block.home
        shadow, who = self.shadows.get(block), self._who(by, step, order, block)
        if shadow is None:
            shadow = self.shadows[block] = Shadow(block.size)
            for read, of_size, reader in self.unwritten.pop(block, ()):
                self._remember(shadow, shadow.places(read, of_size), reader)
        index = shadow.places(offsets, size)
        self._judge(block, shadow, shadow.last, index, who, "a write, then a write")
        for row in shadow.reads:
            self._judge(block, shadow, row, index, who, "a read, then a write")
            row[1, index] = 0
        shadow.last[:, index] = np.array([[who.actor], [who.epoch], [who.site], [who.scope]])

    def _who(self, by: Any, step: Compiled, order: Order | None, block: Block) -> Access:
        semantics = step.semantics
        if by in self.clocks:
            scope = semantics.scope if self.together else SYSTEM * semantics.atomic
            known = self.clocks[by]
            if self.together and semantics.nc:  # §9.7.9.9: nobody writes it while the launch runs
                known = self.joined(by.cta.launch.known, self._nothing())
                known[0, by.actor] = self.epochs[by.actor]
            return Access(*self.now(by), self._site(by, step), known[0], None, scope)
        order = order or by.orders[0]
        known, *seen = self._fit(order.clocks)
        visible = None if by.generic else seen[block.address >> 40 > 0]
        return Access(order.actor, order.epoch, self._site(by.warp, step), known, visible, 0)

    def _judge(self, block: Block, shadow: Shadow, row: np.ndarray, index: np.ndarray, by: Access, kind: str) -> None:
        """Reports where an actor does not know that these accesses have ended."""
        who, when = row[0, index], row[1, index]
        clash = when > by.known[who]
        if by.seen is not None:
            clash |= (when > by.seen[who]) & self.generic[who]
        clash &= (who != by.actor) | (when != by.epoch)
        if self.earlier:
            clash |= (when <= self.earlier) & (when > 0)
        if by.scope and clash.any():
            clash &= np.minimum(row[3, index], by.scope) < self._apart(who, by.actor)
        if clash.any():
            place = int(index[clash][0])
            self._report(f"byte {place * shadow.unit} of {block.name}", int(row[2, place]), by.site, kind)

    def _remember(self, shadow: Shadow, index: np.ndarray, by: Access) -> None:
        """A read, in the first row where there is none, or one that ended before. The first keeps one of an earlier cluster."""
        known = self._fit(by.known)
        for number in count():
            if number == len(shadow.reads):
                shadow.reads.append(np.zeros((4, shadow.last.shape[1]), np.int32))
            row = shadow.reads[number]
            who, when = row[0, index], row[1, index]
            free = (when <= known[who]) | (who == by.actor)
            if self.earlier:
                of_earlier = (when > 0) & (when <= self.earlier)
                free = free | of_earlier if number else free & ~of_earlier
            row[:, index[free]] = np.array([[by.actor], [by.epoch], [by.site], [by.scope]])
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

    def note(self, *_: Any, **__: Any) -> Any:
        """Records an access of any actor."""

    begin = release = acquire = fence = issue = join = finish = finish_part = joined = note
    snapshot = now = knows = apart = note
    complete = initialise = initialised = use = read = write = note
