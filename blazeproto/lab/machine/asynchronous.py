"""What goes on beside the threads: cp.async, TMA, and the groups by which they are waited for (PTX ISA §9.7.9.25 to §9.7.9.27).

An instruction issues a `Transaction`; when it happens is the schedule's choice, between its issue and what waits for it. Here the
async proxy sees shared memory as fences left it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from blazeproto.lab.machine import tensor_map
from blazeproto.lab.machine.barriers import mbarrier_at
from blazeproto.lab.machine.loads import bytes_at, located, written_by_threads
from blazeproto.lab.machine.memory import WINDOW, Block
from blazeproto.lab.machine.operands import address, fetch, registers_of
from blazeproto.lab.machine.ptx import Address, Operand, PtxError, Statement
from blazeproto.lab.machine.warp import Wait, Warp

Made = Callable[[Any], Any]
INT64 = np.dtype(np.int64)


class Transaction:
    """Something that happens later: ``parts``, one after the other.

    key: what it is waited for by, with others.  queue: those of one queue happen in its order.  generic: not by the async proxy.
    order: what races.py knows of the issue.
    """

    def __init__(
        self,
        warp: Warp,
        step: Any,
        parts: list[Callable[[], None]],
        key: Any,
        queue: list[Transaction] | None = None,
        generic: bool = False,
    ) -> None:
        self.warp, self.step, self.parts, self.queue, self.next, self.generic = warp, step, parts, queue, 0, generic
        self.key = key
        self.order = warp.cta.races.issue(warp, key, generic) if warp.cta.races else None
        if queue is not None:
            queue.append(self)
        warp.cta.launch.pending.append(self)

    @property
    def orders(self) -> list[Any]:
        """One for each part that a wait tells apart."""
        return [self.order]

    @property
    def done(self) -> bool:
        return self.next == len(self.parts)

    def ready(self) -> bool:
        return self.queue is None or next(one for one in self.queue if not one.done) is self

    def perform(self) -> None:
        self.parts[self.next]()
        self.next += 1
        launch = self.warp.cta.launch
        launch.changes += 1
        if self.done:
            launch.pending.remove(self)

    def __str__(self) -> str:
        return f"{self.step.instruction.line}: {self.step.instruction.opcode} of {self.warp.cta.name}, {self.warp.name}"


def seen_by_async(block: Block, index: np.ndarray) -> np.ndarray:
    """Bytes as the async proxy sees them."""
    found = block.bytes[index]
    if block.stale is not None and block.before is not None:
        stale = block.stale[index]
        if stale.any():
            found = np.where(stale, block.before[index], found)
    return found


def _one(warp: Warp, step: Any, operand: Operand, running: np.ndarray | None, get: Any, lane: int) -> int:
    missing = warp.unwritten_among(registers_of(operand))
    if missing is not None and missing[lane]:
        raise step.error(warp, "an operand that nobody wrote")
    return int(get(warp)[lane])


def cp(instruction: Statement) -> Made:
    """The family of cp.async."""
    words = instruction.words
    if "bulk" in words:
        if "commit_group" in words:
            return _commit("bulk")
        if words[3].startswith("wait_group"):
            return _wait("bulk", instruction, 1 if "read" in words else 2)
        return _tma(instruction)
    if "commit_group" in words:
        return _commit("copies")
    if words[2].startswith("wait_"):
        return _wait("copies", instruction, 1)
    return _arrive(instruction) if "mbarrier" in words else _copy(instruction)


# --- Groups ------------------------------------------------------------------------------------------------------------------


class Groups:
    """Transactions of a warp since its last commit, and those of each group."""

    def __init__(self) -> None:
        self.open: list[Transaction] = []
        self.closed: list[list[Transaction]] = []


def _commit(kind: str) -> Made:
    def run(warp: Warp, running: np.ndarray | None) -> None:
        groups = warp.cta.groups_of(warp, kind)
        groups.closed.append(groups.open)
        groups.open = []

    return lambda step: run


def _wait(kind: str, instruction: Statement, parts: int) -> Made:
    """Until all but the last so many groups have done so many of their parts."""
    number = int(instruction.operands[0].value) if instruction.operands else 0  # type: ignore[union-attr]

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            groups = warp.cta.groups_of(warp, kind)
            if "wait_all" in instruction.words and groups.open:
                groups.closed.append(groups.open)
                groups.open = []
            waited = [one for group in groups.closed[: len(groups.closed) - number] for one in group]

            def over() -> bool:
                return all(one.next >= min(parts, len(one.parts)) for one in waited)

            if not over():
                return Wait(over, f"{instruction.opcode} {number}")
            if warp.cta.races:
                for one in waited:
                    for order in one.orders[:parts]:
                        warp.cta.races.finish(warp, order)
            return None

        return run

    return made


# --- cp.async ----------------------------------------------------------------------------------------------------------------


def _copy(instruction: Statement) -> Made:
    """§9.7.9.25.3.1 cp.async: bytes of a lane from global to shared memory; what the source's size leaves out is zero."""
    to, source, *sizes = instruction.operands
    at, of = address(to), address(source)
    size = int(sizes[0].value)  # type: ignore[union-attr]
    given = fetch(sizes[1], np.dtype(np.uint32)) if len(sizes) > 1 else None
    read = registers_of(to) + registers_of(source) + (registers_of(sizes[1]) if len(sizes) > 1 else ())

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            lanes = np.flatnonzero(warp.mask() if running is None else running)
            missing = warp.unwritten_among(read)
            if missing is not None and missing[lanes].any():
                raise step.error(warp, "an operand that nobody wrote", missing)
            ((target, offsets, _),) = located(warp, step, at(warp)[lanes], lanes, size, store=True)
            sources = of(warp)[lanes]
            counts = np.full(len(lanes), size) if given is None else given(warp)[lanes].astype(np.int64)
            copied = np.flatnonzero(counts)
            for place, amount in zip(sources[copied].tolist(), counts[copied].tolist(), strict=True):
                if place % size or warp.cta.block(place, amount) is None:
                    raise step.error(warp, f"a copy of {amount} bytes from {warp.cta.describe(place)}")

            def happen() -> None:
                data, reads = np.zeros((len(lanes), size), np.uint8), dict[tuple[Block, int], list[int]]()
                for lane in copied.tolist():
                    block: Any = warp.cta.block(int(sources[lane]), 1)
                    begin, amount = int(sources[lane]) - block.address, int(counts[lane])
                    data[lane, :amount] = block.bytes[begin : begin + amount]
                    reads.setdefault((block, amount), []).append(begin)
                index = bytes_at(offsets, size)
                if warp.cta.races:
                    for (block, amount), begins in reads.items():
                        warp.cta.races.read(block, np.array(begins), amount, made, step)
                    warp.cta.races.write(target, offsets, size, made, step)
                written_by_threads(target, index)
                target.bytes[index] = data.reshape(-1)
                target.written[index] = True

            made = Transaction(warp, step, [happen], (warp, "copies"), warp.cta.copies_of(warp), generic=True)
            warp.cta.groups_of(warp, "copies").open.append(made)

        return run

    return made


def _arrive(instruction: Statement) -> Made:
    """§9.7.13.15.17 cp.async.mbarrier.arrive.noinc: each lane arrives when its copies so far are done."""
    at = address(instruction.operands[0])
    if "noinc" not in instruction.words:
        raise PtxError("expected .noinc")

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            lanes = np.flatnonzero(warp.mask() if running is None else running)
            barriers = [mbarrier_at(warp, step, place) for place in at(warp)[lanes].tolist()]

            def happen() -> None:
                for barrier in barriers:
                    if warp.cta.races:
                        warp.cta.races.release_transaction(made, barrier)
                    barrier.arrive(1)

            made = Transaction(warp, step, [happen], (warp, "copies"), warp.cta.copies_of(warp), generic=True)

        return run

    return made


# --- TMA ---------------------------------------------------------------------------------------------------------------------


def _tma(instruction: Statement) -> Made:
    """§9.7.9.27.1.2 cp.async.bulk.tensor, between global memory and shared memory, tiled, with multicast; by one lane."""
    words, operands = instruction.words, instruction.operands
    load = words.index("global") > next(i for i, word in enumerate(words) if word.startswith("shared"))
    tensor: Any = operands[1] if load else operands[0]
    if "tensor" not in words or not isinstance(tensor, Address):
        raise PtxError("expected a tensor's copy")
    at_shared = address(operands[0] if load else operands[1])
    at_map, at_barrier = address(tensor), address(operands[2]) if load else None
    coordinates = [fetch(part, np.dtype(np.int32)) for part in tensor.coordinates]
    multicast = fetch(operands[3], np.dtype(np.uint16)) if "multicast::cluster" in words else None
    read = tuple(index for operand in operands for index in registers_of(operand))

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            cta, launch = warp.cta, warp.cta.launch
            for lane in np.flatnonzero(warp.mask() if running is None else running).tolist():
                missing = warp.unwritten_among(read)
                if missing is not None and missing[lane]:
                    raise step.error(warp, "an operand that nobody wrote", missing)
                place, shared = int(at_map(warp)[lane]), int(at_shared(warp)[lane])
                box = launch.maps.get(place)
                if box is None:
                    raise step.error(warp, f"no tensor map there: {cta.describe(place)}")
                at = tuple(int(part(warp)[lane]) for part in coordinates)
                ranks = [shared >> WINDOW]
                if multicast is not None:
                    mask = int(multicast(warp)[lane])
                    ranks = [rank for rank in range(len(cta.cluster.ctas)) if mask >> rank & 1]
                try:
                    moved = tensor_map.transfer(box, at, shared)
                except ValueError as error:
                    raise step.error(warp, str(error)) from error
                if load:
                    barrier = int(at_barrier(warp)[lane])  # type: ignore[misc]
                    _issue_load(warp, step, box, moved, ranks, barrier)
                else:
                    _issue_store(warp, step, box, moved)

        return run

    return made


def _global_block(warp: Warp, step: Any, box: Any, addresses: np.ndarray, size: int) -> tuple[Block, np.ndarray]:
    block = warp.cta.block(int(addresses.min()), size)
    if block is None or int(addresses.max()) + size > block.end:
        place = int(addresses.max() if block is not None else addresses.min())
        raise step.error(warp, f"a tensor map reaches beyond its array: {warp.cta.describe(place)}")
    return block, addresses - block.address


def _issue_load(warp: Warp, step: Any, box: Any, moved: Any, ranks: list[int], barrier: int) -> None:
    sources, places, inside = moved
    size, cluster = box.bytes // len(inside), warp.cta.cluster
    window = (1 << WINDOW) - 1
    barriers = [mbarrier_at(warp, step, (rank << WINDOW) + (barrier & window)) for rank in ranks]

    races, data = warp.cta.races, np.zeros((len(places), size), np.uint8)

    def read() -> None:
        if inside.any():
            block, offsets = _global_block(warp, step, box, sources[inside], size)
            index = bytes_at(offsets, size)
            if races:
                races.read(block, offsets, size, made, step)
            data[inside] = block.bytes[index].reshape(-1, size)

    def write(rank: int, one: Any) -> None:
        if warp.cta.gone(rank << WINDOW):
            raise step.error(warp, f"a load for rank {rank} of the cluster, which has ended")
        target = cluster.ctas[rank].shared
        offsets = (places & window) + (rank << WINDOW) - target.address
        index = bytes_at(offsets, size)
        if index.min() < 0 or index.max() >= target.size:
            raise step.error(warp, f"a box of {box.bytes} bytes beyond shared memory of {target.size} bytes")
        if races:
            races.write(target, offsets, size, made, step)
        target.bytes[index], target.written[index], target.stale[index] = data.reshape(-1), True, False
        if races:
            races.release_transaction(made, one)
        one.complete_bytes(box.bytes)

    under_way = [one.key for one in warp.cta.launch.pending]  # loads of one barrier end in any order
    key = next(key for key in ((barriers[0].address, n) for n in count()) if key not in under_way)
    parts = [partial(write, rank, one) for rank, one in zip(ranks, barriers, strict=True)]
    made = Transaction(warp, step, [read, *parts], key)


class Store(Transaction):
    """By TMA: who waits for its reads does not know that it has written."""

    def __init__(self, warp: Warp, step: Any, parts: list[Callable[[], None]]) -> None:
        super().__init__(warp, step, parts, (warp, "bulk reads"))
        self.writes = warp.cta.races.issue(warp, (warp, "bulk writes")) if warp.cta.races else None

    @property
    def orders(self) -> list[Any]:
        return [self.order, self.writes]


def _issue_store(warp: Warp, step: Any, box: Any, moved: Any) -> None:
    targets, places, inside = moved
    size, shared = box.bytes // len(inside), warp.cta.shared
    kept: list[np.ndarray] = []

    def read() -> None:
        index = bytes_at(places[inside] - shared.address, size)
        if len(index) and (index.min() < 0 or index.max() >= shared.size):
            raise step.error(warp, f"a box of {box.bytes} bytes beyond shared memory of {shared.size} bytes")
        if warp.cta.races:
            warp.cta.races.read(shared, places[inside] - shared.address, size, made, step)
        if not shared.written[index].all():
            raise step.error(warp, "a TMA store of what nobody wrote")
        kept.append(seen_by_async(shared, index))

    def write() -> None:
        if not inside.any():
            return
        block, offsets = _global_block(warp, step, box, targets[inside], size)
        index = bytes_at(offsets, size)
        if warp.cta.races:
            warp.cta.races.write(block, offsets, size, made, step, made.writes)
        block.bytes[index] = kept[0]
        if block.written is not None:
            block.written[index] = True

    made = Store(warp, step, [read, write])
    warp.cta.groups_of(warp, "bulk").open.append(made)


TABLE: dict[str, Any] = {"cp": cp}
