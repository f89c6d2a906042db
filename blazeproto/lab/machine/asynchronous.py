"""What goes on beside the threads: cp.async, TMA, and the groups by which they are waited for (PTX ISA §9.7.9.25 to §9.7.9.27).

An instruction issues a `Transaction`; when it happens is the schedule's choice, between its issue and what waits for it. Here the
async proxy sees shared memory as fences left it.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from blazeproto.lab.machine import tensor_map
from blazeproto.lab.machine.barriers import mbarrier_at
from blazeproto.lab.machine.loads import located, write_by_threads
from blazeproto.lab.machine.memory import IN_WINDOW, WINDOW, Block, bytes_at
from blazeproto.lab.machine.operands import INT32, UINT16, UINT32, address, known
from blazeproto.lab.machine.ptx import Address, Immediate, PtxError, Statement
from blazeproto.lab.machine.warp import LANES, Compiled, Run, Wait, Warp


class Transaction:
    """Something that happens later: ``parts``, one after the other.

    keys: what each part is waited for by, with others.  queue: those of one happen in their order; None: at any time.
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
        self.key, self.orders = keys[0], [warp.cta.races.issue(warp, key, generic) for key in keys]
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


# --- Groups: each kind's transactions of a warp, the last of them open ---------------------------------------------------------


def _commit(kind: str, instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.25.3 cp.async.commit_group and §9.7.9.27 cp.async.bulk.commit_group"""
    return lambda warp, running: warp.cta.groups[warp, kind].append([])


def _wait(kind: str, instruction: Statement, step: Compiled) -> Run:
    """§9.7.9.25.3 cp.async.wait_group, wait_all and §9.7.9.27 cp.async.bulk.wait_group: all but the last so many groups
    have done their parts, wait_all: the open one too; with .read the first."""
    parts = 1 if "read" in instruction.words else 2
    left = int(instruction.operands[0].value) if instruction.operands else -1  # type: ignore[union-attr]

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        groups = warp.cta.groups[warp, kind]
        waited = [one for group in groups[: max(len(groups) - 1 - left, 0)] for one in group]

        def over() -> bool:
            return all(one.next >= min(parts, len(one.parts)) for one in waited)

        if not over():
            return Wait(over, instruction.text)
        for one in waited:
            for order in one.orders[:parts]:
                warp.cta.races.finish(warp, order)
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

        made = _issue_generic(warp, step, happen)
        warp.cta.groups[warp, "copies"][-1].append(made)

    return run


def _arrive(instruction: Statement, step: Compiled) -> Run:
    """§9.7.13.15.17 cp.async.mbarrier.arrive.noinc: each lane arrives when its copies so far are done."""
    at = address(step, instruction.operands[0])

    def run(warp: Warp, running: np.ndarray | None) -> None:
        barriers = [mbarrier_at(warp, step, place) for place in at(warp, warp.active(running)).tolist()]

        def happen() -> None:
            for barrier in barriers:
                warp.cta.races.release_transaction(made, barrier)
                barrier.arrive(1)

        made = _issue_generic(warp, step, happen)

    return run


def _issue_generic(warp: Warp, step: Compiled, happen: Callable[[], None]) -> Transaction:
    return Transaction(warp, step, [happen], ((warp, "copies"),), warp, generic=True)


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
        for start, place, signalled, mask, *corner in zip(*(get(warp, lanes).tolist() for get in given), strict=True):
            box = warp.cta.launch.maps.get(place)
            if box is None:
                raise step.error(warp, f"no tensor map there: {warp.cta.describe(place)}")
            moved = tensor_map.transfer(box, corner, start)
            ranks = [rank for rank in range(16) if mask >> rank & 1] if multicast else [start >> WINDOW]
            if not ranks or ranks[-1] >= there:
                raise step.error(warp, f"expected ranks of the cluster's {there} CTAs, got {ranks}")
            if load:
                _issue_load(warp, step, box, moved, ranks, signalled)
            else:
                _issue_store(warp, step, box, moved)

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
        races.read(block, offsets, size, made, step)
        data[inside], written[inside] = block.known(offsets, size)

    def write(rank: int, one: Any) -> None:
        if warp.cta.gone(rank << WINDOW):
            raise step.error(warp, f"a load for rank {rank} of the cluster, which has ended")
        there = (places & IN_WINDOW) + (rank << WINDOW)
        target, offsets, index = _within(warp, step, box, warp.cta.cluster.ctas[rank].shared, there, size)
        races.write(target, offsets, size, made, step)
        target.bytes[index], target.written[index], target.stale[index] = data.reshape(-1), written.reshape(-1), False
        races.release_transaction(made, one)
        one.arrive(0, box.bytes)

    under_way = [one.key for one in warp.cta.launch.world.pending]  # loads of one barrier end in any order
    key = next(key for key in ((barriers[0].address, n) for n in count()) if key not in under_way)
    writes = [partial(write, rank, one) for rank, one in zip(ranks, barriers, strict=True)]
    made = Transaction(warp, step, [read, *writes], (key,))


def _issue_store(warp: Warp, step: Compiled, box: Any, moved: Any) -> None:
    """Who waits for its reads does not know that it has written."""
    targets, places, inside = moved
    size, races, kept = box.bytes // len(inside), warp.cta.races, list[np.ndarray]()

    def read() -> None:
        shared, offsets, index = _within(warp, step, box, warp.cta.shared, places[inside], size)
        races.read(shared, offsets, size, made, step)
        if not shared.written[index].all():
            raise step.error(warp, "a TMA store of what nobody wrote")
        kept.append(shared.seen_by_async(index))

    def write() -> None:
        block, offsets, index = _within(warp, step, box, None, targets[inside], size)
        races.write(block, offsets, size, made, step, made.orders[1])
        block.bytes[index] = kept[0]
        block.wrote(index)
        warp.cta.launch.world.stored(warp, step, block, offsets, size, made.orders[1])

    made = Transaction(warp, step, [read, write], ((warp, "bulk reads"), (warp, "bulk writes")))
    warp.cta.groups[warp, "bulk"][-1].append(made)


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
