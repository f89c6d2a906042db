"""State shared by launches that run at once: memory as each GPU sees it, stores under way, and the order of threads through
memory.

Each GPU has a copy of every array. A store is in its own GPU's copy at once and comes to the others' later, in any order, as the
schedule lets it happen; at the latest when a thread that knows of it releases at system scope, or its launch ends (PTX ISA §8.9,
"Causality order", of which release and acquire patterns are §8.8). Atomics and releases of system scope show at once.

races.py knows which threads know of a store. A store that releases keeps the clocks of its warp beside the word, and who
acquires what it stored gets them, where both scopes reach from one to the other.
"""

from typing import Any

import numpy as np

from ptxsim.memory import SYSTEM, Block, Memory, Semantics, bytes_at
from ptxsim.races import Order, Races, Unwatched
from ptxsim.warp import Compiled, Warp

Releases = dict[tuple[Warp, int], Any]  # clocks by warp and scope


class World:
    """gpus: whose launches run at once; 0 for a launch alone, whose CTAs run one after the other and see every store.

    changes: counts what others can see.  pending: transactions under way, and stores that other GPUs don't see yet.
    """

    def __init__(self, memory: Memory, races: Races | Unwatched, gpus: int = 0) -> None:
        self.memory, self.races, self.gpus, self.changes = memory, races, gpus, 0
        self.pending: list[Any] = []
        self.copies: dict[Block, list[Block]] = {}
        self.stores = 0
        self.releases: dict[tuple[int, int], Releases] = {}  # by the number of a store, and its place in its array

    def block(self, address: int, size: int, gpu: int) -> Block | None:
        """The owner of these bytes of global memory, as a GPU sees them; None for nobody's."""
        found = self.memory.block(address, size)
        if not self.gpus or found is None or found.read_only:
            return found
        if found not in self.copies:
            self.copies[found], found.numbers = [found.copy() for _ in range(self.gpus)], np.zeros(found.size, np.int64)
        return self.copies[found][gpu]

    def newest(self, block: Block, offsets: np.ndarray, size: int) -> None:
        """The bytes that an atomic of system scope works on."""
        index = bytes_at(offsets, size)
        block.bytes[index], block.numbers[index] = block.home.bytes[index], block.home.numbers[index]

    def loaded(self, warp: Warp, semantics: Semantics, block: Block, offsets: np.ndarray) -> None:
        """A strong load or an atomic has read words: what was released with them is ordered before what follows, or before what
        follows the next fence."""
        if not semantics.scope or block.home is block:
            return
        for offset in set(offsets.tolist()):
            for (other, scope), clocks in self._released(block, offset).items():
                needed = self.races.apart(other, warp)
                if min(scope, semantics.scope) < needed:
                    continue
                if semantics.acquire:
                    self.races.acquire(warp, clocks)
                else:
                    warp.observed[needed] = self.races.joined(warp.observed.get(needed), clocks)

    def stored(
        self, warp: Warp, step: Compiled, block: Block, offsets: np.ndarray, size: int, order: Order | None = None
    ) -> None:
        """A GPU's copy has changed. order: of the part of a transaction that stored, where it is not the warp."""
        if block.home is block:
            self.changes += 1
            return
        semantics, index = step.semantics, bytes_at(offsets, size)
        self.changes += bool((block.home.bytes[index] != block.bytes[index]).any())
        at_once = self.gpus == 1 or (semantics.scope == SYSTEM and (semantics.release or semantics.atomic))
        self.stores += 1
        if semantics.scope:
            made: Releases = {(warp, min(scope, semantics.scope)): known for scope, known in warp.released.items()}
            if semantics.release:
                made = {(warp, semantics.scope): self.release(warp, semantics.scope)}
            for offset in set(
                offsets.tolist()
            ):  # an atomic hands on what was released before it (§8.7, observation order)
                before = self._released(block, offset) if semantics.atomic else {}
                self.releases[self.stores, offset] = before | made
        block.home.bytes[index] = block.bytes[index]
        block.numbers[index] = block.home.numbers[index] = self.stores
        late = LateStore(warp, step, block, index, self.stores, *(order or self.races.now(warp))[:2])
        if at_once:
            late.perform()

    def _released(self, block: Block, offset: int) -> Releases:
        return self.releases.get((int(block.numbers[offset]), offset), {})

    def release(self, warp: Warp, scope: int) -> Any:
        """The warp's clocks, to be handed on; at system scope every GPU sees its stores from now on."""
        if scope == SYSTEM:
            for one in [one for one in self.pending if isinstance(one, LateStore)]:
                if self.races.knows(warp, one.actor, one.epoch):
                    one.perform()
        return self.races.snapshot(warp)

    def fence(self, warp: Warp, semantics: Semantics) -> None:
        """Between weaker accesses: it acquires what was observed before it, and what is stored behind it releases."""
        if semantics.acquire:
            for needed, clocks in warp.observed.items():
                if needed <= semantics.scope:
                    self.races.acquire(warp, clocks)
        if semantics.release:
            wider = {scope: clocks for scope, clocks in warp.released.items() if scope > semantics.scope}
            warp.released = wider | {semantics.scope: self.release(warp, semantics.scope)}

    def end(self, launch: Any) -> None:
        """All that a launch has left under way happens."""
        for one in [one for one in self.pending if one.warp.cta.launch is launch]:
            while one in self.pending:
                one.perform()


class LateStore:
    """A store that the other GPUs don't see yet; `Schedule` handles it as a transaction."""

    missing, orders, keys = 0, (), ()

    def __init__(
        self, warp: Warp, step: Compiled, block: Block, index: np.ndarray, number: int, actor: int, epoch: int
    ) -> None:
        self.warp, self.step, self.block, self.index, self.number = warp, step, block, index, number
        self.actor, self.epoch, self.data, self.queue, self.key = actor, epoch, block.bytes[index], self, block
        self.world: World = warp.cta.launch.world
        self.world.pending.append(self)

    def perform(self) -> None:
        self.world.pending.remove(self)
        for copy in self.world.copies[self.block.home]:
            older = copy.numbers[self.index] < self.number
            index, data = self.index[older], self.data[older]
            self.world.changes += bool((copy.bytes[index] != data).any())
            copy.bytes[index], copy.numbers[index] = data, self.number

    def __str__(self) -> str:
        instruction = self.step.instruction
        return f"{instruction.line}: {instruction.opcode} of {self.warp.cta.name}, {self.warp.name}, for other GPUs"
