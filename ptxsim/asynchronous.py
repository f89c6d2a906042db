"""Work that goes on beside the threads: cp.async, TMA, and the groups by which they are waited for (PTX ISA §9.7.9.25 to
§9.7.9.27).

An instruction issues a `Transaction`; when it happens is the schedule's choice, between its issue and what waits for it. Here the
async proxy sees shared memory as fences left it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ptxsim import maps
from ptxsim.barriers import mbarrier_at
from ptxsim.loads import located, write_by_threads
from ptxsim.memory import IN_WINDOW, WINDOW, Block, bytes_at
from ptxsim.operands import INT32, UINT16, UINT32, address, known
from ptxsim.ptx import Address, Immediate, PtxError, Statement
from ptxsim.warp import LANE, LANES, Compiled, Run, Wait, Warp


class Transaction:
    """Something that happens later: ``parts``, one after the other.

    keys: the waits that each part belongs to, with others.  queue: its transactions happen in their order; None: at any time.
    generic: not by the async proxy.  orders: what races.py knows of the issue, for each key.  next: parts that have happened.
    missing: warps that have to issue it too, before it may happen.
    """

    def __init__(
        self,
        warp: Warp,
        step: Compiled,
        parts: list[Callable[[], None]],
        keys: tuple[Any, ...],
        queue: Any = None,
        generic: bool = False,
        missing: int = 0,
    ) -> None:
        self.warp, self.step, self.parts, self.next, self.generic = warp, step, parts, 0, generic
        self.queue, self.missing = queue or self, missing
        self.key, self.keys, self.orders = keys[0], keys, [warp.cta.races.issue(warp, key, generic) for key in keys]
        warp.cta.launch.world.pending.append(self)

    def perform(self) -> None:
        world = self.warp.cta.launch.world
        self.parts[self.next]()
        self.next += 1
        world.changes += 1
        if self.next == len(self.parts):
            world.pending.remove(self)

    def __str__(self) -> str:
        return f"{self.step.instruction.line}: {self.step.instruction.opcode} of {self.warp.cta.name}, {self.warp.name}"


# --- Groups, which are a thread's own (PTX ISA §9.7.9.25.2.1) --------------------------------------------------------------

OVER = -1


class Groups:
    """One kind's transactions of a warp. committed: groups of each lane.

    issued: each transaction with the group that it is in, by part and lane; OVER where the lane did not issue it, or has waited.
    """

    def __init__(self) -> None:
        self.committed = np.zeros(LANES, np.int64)
        self.issued: list[tuple[Transaction, np.ndarray]] = []

    def add(self, made: Transaction, lanes: np.ndarray) -> None:
        self.issued.append((made, np.tile(np.where(lanes, self.committed, OVER), (len(made.parts), 1))))


def _commit(kind: str, instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.25.3 cp.async.commit_group and §9.7.9.27 cp.async.bulk.commit_group"""

    def run(warp: Warp, running: np.ndarray | None) -> None:
        warp.cta.groups[warp, kind].committed += warp.mask(running)

    return run


def _wait(kind: str, instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.25.3 cp.async.wait_group, wait_all and §9.7.9.27 cp.async.bulk.wait_group: all but the last N groups of each
    lane have done their parts, wait_all: the open one too; with .read the first. What lanes issued together has ended for the
    warp when each of them has waited."""
    parts = 1 if "read" in instruction.words else 2
    left = int(instruction.operands[0].value) if instruction.operands else -1  # type: ignore[union-attr]

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        groups, lanes = warp.cta.groups[warp, kind], warp.mask(running)
        ended = np.where(lanes, groups.committed - left, 0)
        waited = [(one, of[:parts]) for one, of in groups.issued if (of[:parts] < ended).any(where=of[:parts] != OVER)]

        def over() -> bool:
            return all(one.next >= len(of) for one, of in waited)

        if not over():
            return Wait(over, instruction.text)
        for one, of in waited:
            of[of < ended] = OVER
            for order, part in zip(one.orders, of, strict=False):
                if (part == OVER).all():
                    warp.cta.races.finish(warp, order)
        groups.issued = [(one, of) for one, of in groups.issued if (of != OVER).any()]
        return None

    return run


# --- cp.async ----------------------------------------------------------------------------------------------------------------


def _copy(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.25.3.1 cp.async: bytes of a lane from global to shared memory; what the source's size leaves out is zero."""
    to, source, whole, *given = instruction.operands
    if not isinstance(whole, Immediate) or whole.value not in ((16,) if "cg" in instruction.words else (4, 8, 16)):
        raise PtxError("expected a size of 4, 8 or 16 bytes, of .cg 16")
    at, of, amounts = address(step, to), address(step, source), known(step, [*given, whole][0], UINT32)
    size = whole.value

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes = warp.active(running)
        ((target, offsets, _),) = located(warp, step, at(warp, lanes), lanes, size, "shared", store=True)
        places, taken = of(warp, lanes), amounts(warp, lanes)
        if taken.max() > size:
            raise step.error(warp, f"a copy of {taken.max()} bytes, of {size} at most", lanes[taken.argmax()])
        pieces = [
            (amount, *piece)
            for amount in sorted(set(taken.tolist()) - {0})
            for piece in located(
                warp, step, places[taken == amount], lanes[taken == amount], amount, "global", unit=size
            )
        ]

        def happen() -> None:
            data, written = np.zeros((LANES, size), np.uint8), np.ones((LANES, size), np.bool_)
            for amount, block, begins, rows in pieces:
                warp.cta.races.read(block, begins, amount, made, step)
                data[rows, :amount], written[rows, :amount] = block.known(begins, amount)
            index = write_by_threads(warp, step, target, offsets, size, made)
            target.bytes[index], target.written[index] = data[lanes].reshape(-1), written[lanes].reshape(-1)

        mask = warp.mask(running)
        name = mask.tobytes()
        made = _issue_generic(warp, step, happen, ("copies", name))
        warp.cta.groups[warp, "copies"].add(made, mask)
        warp.cta.copies[warp][name] = Copies(made.orders[0], mask)

    return run


@dataclass
class Copies:
    """The last copies that a warp's lanes issued together. left: the lanes whose copies no arrival at an mbarrier tracks."""

    order: Any
    left: np.ndarray


def _arrive(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.15.17 cp.async.mbarrier.arrive.noinc: each lane arrives when its own copies so far are done."""
    at = address(step, instruction.operands[0])

    def run(warp: Warp, running: np.ndarray | None) -> None:
        barriers = [mbarrier_at(warp, step, place) for place in at(warp, warp.active(running)).tolist()]
        for one in warp.cta.copies[warp].values():
            one.left = one.left & ~warp.mask(running)
        tracked = [one.order for one in warp.cta.copies[warp].values() if not one.left.any()]

        def happen() -> None:
            for barrier in barriers:
                warp.cta.races.complete(barrier, tracked)
                barrier.arrive(1)

        _issue_generic(warp, step, happen, "arrivals")

    return run


def _issue_generic(warp: Warp, step: Compiled, happen: Callable[[], None], kind: Any) -> Transaction:
    return Transaction(warp, step, [happen], ((warp, kind),), warp, generic=True)


# --- TMA ---------------------------------------------------------------------------------------------------------------------


def _tma(instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.27.1.2 cp.async.bulk.tensor, between global memory and shared memory, tiled, with multicast; by one lane."""
    words, operands = instruction.words, instruction.operands
    load, multicast = words[5].startswith("shared"), "multicast::cluster" in words
    shared, tensor = operands[:2] if load else operands[1::-1]
    assert isinstance(tensor, Address)
    given = [
        *(address(step, operand) for operand in (shared, tensor, operands[2] if load else shared)),
        known(step, operands[3] if multicast else Immediate(0), UINT16),
        *(known(step, part, INT32) for part in tensor.coordinates),
    ]

    def run(warp: Warp, running: np.ndarray | None) -> None:
        lanes, there = warp.active(running), len(warp.cta.cluster.ctas)
        words = zip(lanes.tolist(), *(get(warp, lanes).tolist() for get in given), strict=True)
        for lane, start, place, signalled, mask, *corner in words:
            box = warp.cta.launch.maps.get(place)
            if box is None:
                raise step.error(warp, f"no tensor map there: {warp.cta.describe(place)}")
            moved = maps.transfer(box, corner, start)
            ranks = [rank for rank in range(16) if mask >> rank & 1] if multicast else [start >> WINDOW]
            outside = not ranks or ranks[-1] >= there
            step.refuse(warp, outside, f"expected ranks of the cluster's {there} CTAs, got {ranks}")
            if load:
                _issue_load(warp, step, box, moved, ranks, signalled)
            else:
                _issue_store(warp, lane, step, box, moved)

    return run


def _within(
    warp: Warp, step: Compiled, box: Any, block: Block | None, addresses: np.ndarray, size: int
) -> tuple[Block, np.ndarray, np.ndarray]:
    """The block of global memory where none is given, and the offsets in it of pieces and of all their bytes."""
    if not len(addresses):
        return block or warp.cta.shared, addresses, addresses
    low, high = int(addresses.min()), int(addresses.max())
    found = block or warp.cta.block(low, size)
    if found is None or low < found.address or high + size > found.end:
        reached = f"from {warp.cta.describe(low)} to {warp.cta.describe(high)}"
        raise step.error(warp, f"a box of {box.bytes} bytes beyond its array or the shared memory, {reached}")
    return found, addresses - found.address, bytes_at(addresses - found.address, size)


def _issue_load(warp: Warp, step: Compiled, box: Any, moved: Any, ranks: list[int], barrier: int) -> None:
    sources, places, inside = moved
    size, races = box.bytes // len(inside), warp.cta.races
    barriers = [mbarrier_at(warp, step, (rank << WINDOW) + (barrier & IN_WINDOW)) for rank in ranks]
    data, written = np.zeros((len(places), size), np.uint8), np.ones((len(places), size), np.bool_)

    def read() -> None:
        block, offsets, _ = _within(warp, step, box, None, sources[inside], size)
        for order in made.orders:
            races.read(block, offsets, size, made, step, order)
        data[inside], written[inside] = block.known(offsets, size)

    def write(number: int) -> None:
        rank, one, order = ranks[number], barriers[number], made.orders[number]
        step.refuse(warp, warp.cta.gone(rank << WINDOW), f"a load for rank {rank} of the cluster, which has ended")
        there = (places & IN_WINDOW) + (rank << WINDOW)
        target, offsets, index = _within(warp, step, box, warp.cta.cluster.ctas[rank].shared, there, size)
        races.write(target, offsets, size, made, step, order)
        target.bytes[index], target.written[index], target.stale[index] = data.reshape(-1), written.reshape(-1), False
        races.complete(one, [order])
        one.arrive(0, box.bytes)

    under_way = {
        key for one in warp.cta.launch.world.pending for key in one.keys
    }  # loads of one barrier end in any order
    keys = (tuple((one.address, n) for one in barriers) for n in count())
    free = next(those for those in keys if under_way.isdisjoint(those))
    made = Transaction(warp, step, [read, *(partial(write, number) for number in range(len(ranks)))], free)


def _issue_store(warp: Warp, lane: int, step: Compiled, box: Any, moved: Any) -> None:
    """Who waits for its reads does not know that it has written."""
    targets, places, inside = moved
    size, races, kept = box.bytes // len(inside), warp.cta.races, list[np.ndarray]()

    def read() -> None:
        shared, offsets, index = _within(warp, step, box, warp.cta.shared, places[inside], size)
        races.read(shared, offsets, size, made, step)
        step.refuse(warp, not shared.written[index].all(), "a TMA store of what nobody wrote")
        kept.append(shared.seen_by_async(index))

    def write() -> None:
        block, offsets, index = _within(warp, step, box, None, targets[inside], size)
        races.write(block, offsets, size, made, step, made.orders[1])
        block.bytes[index] = kept[0]
        block.wrote(index)
        warp.cta.launch.world.stored(warp, step, block, offsets, size, made.orders[1])

    made = Transaction(warp, step, [read, write], ((warp, lane, "bulk reads"), (warp, lane, "bulk writes")))
    warp.cta.groups[warp, "bulk"].add(made, lane == LANE)


TABLE: dict[str, Callable[[Statement, Compiled], Run]] = {
    "cp.async": _copy,
    "cp.async.mbarrier.arrive": _arrive,
    "cp.async.commit_group": partial(_commit, "copies"),
    "cp.async.wait_group": partial(_wait, "copies"),
    "cp.async.wait_all": partial(_wait, "copies"),
    "cp.async.bulk.tensor": _tma,
    "cp.async.bulk.commit_group": partial(_commit, "bulk"),
    "cp.async.bulk.wait_group": partial(_wait, "bulk"),
}
