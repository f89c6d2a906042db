"""Races: two accesses to a byte, one of them a write, that nothing waited for orders, whatever this run's order was.

Who acts is an *actor*: a warp, or something asynchronous, named by its issuer and by what it is waited for (a warp's copies, its
bulk groups, a warpgroup's products, an mbarrier's loads). Every actor counts its epochs. A *clock* says which epochs of every
actor are known to have ended; barriers, waits and arrivals hand clocks on (FastTrack: Flanagan, Freund 2009).

The async proxy sees what threads wrote only behind a fence. So a warp has two clocks: of what it knows, and of what the async
proxy may see, which a fence brings up to the first; an asynchronous access is judged by the second where threads wrote.

Lanes of a warp count as ordered. Scope is not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blazeproto.lab.machine.memory import Block

if TYPE_CHECKING:
    from blazeproto.lab.machine.cta import Cluster
    from blazeproto.lab.machine.warp import Warp

READS = 4  # reads of a byte that are remembered beside its last write


class Race(NamedTuple):
    """Two accesses, the later one of this run last."""

    kind: str
    where: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"race in {self.where}: {self.kind}\n  {self.first}\n  {self.second}"


class Shadow:
    """For every byte the last write's actor, epoch and instruction, whether a thread made it, and some reads."""

    def __init__(self, size: int) -> None:
        self.actor, self.epoch, self.site = (np.zeros(size, np.int32) for _ in range(3))
        self.threads = np.zeros(size, np.bool_)
        self.readers, self.read_epochs, self.read_sites = (np.zeros((READS, size), np.int32) for _ in range(3))


class Order(NamedTuple):
    """What was known when a transaction was issued: actor, epoch, clock of what ended, clock of what the async proxy sees."""

    actor: int
    epoch: int
    known: np.ndarray
    seen: np.ndarray


class Races:
    """The clocks of a cluster, and what was found; ``found`` by the pair of instructions."""

    def __init__(self, cluster: Cluster, found: dict[tuple[int, int], Race]) -> None:
        self.found = found
        self.sites: dict[int, tuple[str, Any]] = {0: ("the start", None)}
        self.of_step: dict[tuple[int, str], int] = {}
        self.actors: dict[Any, int] = {"nobody": 0}
        self.size = 64 + 8 * len(cluster.warps)
        self.clocks: dict[Warp, np.ndarray] = {}
        self.seen: dict[Warp, np.ndarray] = {}
        self.epochs = np.zeros(self.size, np.int32)
        for warp in cluster.warps:
            self.clocks[warp], self.seen[warp] = np.zeros(self.size, np.int32), np.zeros(self.size, np.int32)
            warp.actor = self._actor(warp)
            self._tick(warp)

    def _actor(self, key: Any) -> int:
        if key not in self.actors:
            self.actors[key] = len(self.actors)
            if len(self.actors) > self.size:
                self._grow()
        return self.actors[key]

    def _grow(self) -> None:
        more = np.zeros(self.size, np.int32)
        self.epochs = np.concatenate([self.epochs, more])
        for clocks in (self.clocks, self.seen):
            for warp, clock in clocks.items():
                clocks[warp] = np.concatenate([clock, more])
        self.size *= 2

    def _tick(self, warp: Warp) -> None:
        """A new epoch of a warp: what it does from now on is not known to those who know what it did so far."""
        self.epochs[warp.actor] += 1
        self.clocks[warp][warp.actor] = self.epochs[warp.actor]

    def _fit(self, clock: np.ndarray | None) -> np.ndarray:
        if clock is None:
            return np.zeros(self.size, np.int32)
        return clock if len(clock) == self.size else np.concatenate([clock, np.zeros(self.size - len(clock), np.int32)])

    # --- What orders ---------------------------------------------------------------------------------------------------------

    def release(self, warp: Warp, to: Any) -> None:
        """To a barrier, or a cluster's: it knows what the warp knows."""
        known, seen = to.clocks or (None, None)
        to.clocks = np.maximum(self._fit(known), self.clocks[warp]), np.maximum(self._fit(seen), self.seen[warp])
        self._tick(warp)

    def acquire(self, warp: Warp, of: Any) -> None:
        if of.clocks:
            known, seen = map(self._fit, of.clocks)
            self.clocks[warp], self.seen[warp] = np.maximum(self.clocks[warp], known), np.maximum(self.seen[warp], seen)

    def fence(self, warp: Warp) -> None:
        """The async proxy sees what the warp knows."""
        self.seen[warp] = np.maximum(self.seen[warp], self.clocks[warp])

    def arrive_named(self, warp: Warp, named: Any) -> None:
        self.release(warp, named)

    def open_named(self, named: Any) -> None:
        named.released, named.clocks = named.clocks, None

    def leave_named(self, warp: Warp, named: Any) -> None:
        known, seen = map(self._fit, named.released)
        self.clocks[warp], self.seen[warp] = np.maximum(self.clocks[warp], known), np.maximum(self.seen[warp], seen)

    def issue(self, warp: Warp, key: Any) -> Order:
        """A transaction, an epoch of its own of the actor that its key names; who waits for it learns of that."""
        actor = self._actor(key)
        self.epochs[actor] += 1
        return Order(actor, int(self.epochs[actor]), self.clocks[warp].copy(), self.seen[warp].copy())

    def join(self, transaction: Any, warp: Warp) -> None:
        """Another warp issues it too."""
        order = transaction.order
        known, seen = map(self._fit, (order.known, order.seen))
        transaction.order = order._replace(
            known=np.maximum(known, self.clocks[warp]), seen=np.maximum(seen, self.seen[warp])
        )

    def finish(self, warp: Warp, transaction: Any) -> None:
        """The warp has waited for it."""
        order, clock = transaction.order, self.clocks[warp]
        clock[order.actor] = max(clock[order.actor], order.epoch)

    def release_transaction(self, transaction: Any, barrier: Any) -> None:
        """It completes a barrier's bytes or arrives there."""
        order = transaction.order
        known, seen = barrier.clocks or (None, None)
        known = np.maximum(self._fit(known), self._fit(order.known))
        known[order.actor] = max(known[order.actor], order.epoch)
        barrier.clocks = known, np.maximum(self._fit(seen), self._fit(order.seen))

    # --- Accesses ------------------------------------------------------------------------------------------------------------

    def read(self, block: Block, index: np.ndarray, by: Any, step: Any) -> None:
        self._access(block, index, by, step, "reads")

    def write(self, block: Block, index: np.ndarray, by: Any, step: Any) -> None:
        self._access(block, index, by, step, "writes")

    def atomic(self, block: Block, index: np.ndarray, by: Any, step: Any) -> None:
        """Ordered with other atomics: not judged among them."""

    def _access(self, block: Block, index: np.ndarray, by: Any, step: Any, how: str) -> None:
        if block.shadow is None:
            if how == "reads" and block.written is None:
                return  # of global memory that nobody has written in this launch
            block.shadow = Shadow(block.size)
        shadow: Shadow = block.shadow
        thread = warp_acts = hasattr(by, "lanes")
        if warp_acts:
            actor, epoch, known, seen = by.actor, int(self.clocks[by][by.actor]), self.clocks[by], None
        else:
            actor, epoch, known = by.order.actor, by.order.epoch, self._fit(by.order.known)
            seen = None if by.generic else self._fit(by.order.seen)
            thread = by.generic
        site = self._site(by if warp_acts else by.warp, step)
        last, last_epoch = shadow.actor[index], shadow.epoch[index]
        clash = last_epoch > known[last]
        if seen is not None:
            clash |= (last_epoch > seen[last]) & shadow.threads[index]
        clash &= last != actor
        if clash.any():
            self._report(
                block, int(index[clash][0]), int(shadow.site[index[clash][0]]), site, f"a write, then {how[:-1]}"
            )
        if how == "writes":
            for reader in range(READS):
                who, when = shadow.readers[reader, index], shadow.read_epochs[reader, index]
                clash = (when > known[who]) & (who != actor)
                if clash.any():
                    place = int(index[clash][0])
                    self._report(block, place, int(shadow.read_sites[reader, place]), site, "a read, then a write")
            shadow.actor[index], shadow.epoch[index], shadow.site[index], shadow.threads[index] = (
                actor,
                epoch,
                site,
                thread,
            )
            shadow.read_epochs[:, index] = 0
            return
        for reader in range(READS):  # the first place that is free, or whose read is known to have ended
            who, when = shadow.readers[reader, index], shadow.read_epochs[reader, index]
            free = (when <= known[who]) | (who == actor)
            at = index[free]
            shadow.readers[reader, at], shadow.read_epochs[reader, at], shadow.read_sites[reader, at] = (
                actor,
                epoch,
                site,
            )
            index = index[~free]
            if not len(index):
                break

    def _site(self, warp: Warp, step: Any) -> int:
        key = id(step), f"{warp.cta.name}, {warp.name}"
        if key not in self.of_step:
            self.of_step[key] = len(self.sites)
            self.sites[len(self.sites)] = (f"{step.instruction.line}: {step.instruction.opcode} of {key[1]}", step)
        return self.of_step[key]

    def _report(self, block: Block, place: int, first: int, second: int, kind: str) -> None:
        one, two = self.sites[first], self.sites[second]
        key = (id(one[1]), id(two[1]))
        if key not in self.found:
            self.found[key] = Race(kind, f"byte {place} of {block.name}", one[0], two[0])
