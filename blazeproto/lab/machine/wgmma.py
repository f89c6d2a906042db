"""wgmma: four warps multiply tiles of shared memory, beside what they do otherwise (PTX ISA §9.7.15.5).

A warpgroup's instructions happen in their order, each when all four warps have issued it, and then read shared memory.
Until a wait, the accumulators are nobody's: reading or writing them is an error, and so is a product whose accumulators other
instructions wrote since the last wgmma.fence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blazeproto.lab.machine import matrices
from blazeproto.lab.machine.asynchronous import Transaction, seen_by_async
from blazeproto.lab.machine.operands import fetch, registers_of
from blazeproto.lab.machine.ptx import Immediate, PtxError, Statement, Vector
from blazeproto.lab.machine.warp import ALL, Wait, Warp

WARPS = 4
Made = Callable[[Any], Any]


class Multiplication(Transaction):
    """One wgmma of a warpgroup. issued: of each warp its accumulators' first values, or None where D = A B."""

    def __init__(self, warp: Warp, step: Any, group: Warpgroup, run: Callable[[Multiplication], None]) -> None:
        self.issued: dict[int, np.ndarray | None] = {}
        super().__init__(warp, step, [lambda: run(self)], group, group.queue)

    def ready(self) -> bool:
        return len(self.issued) == WARPS and super().ready()


class Warpgroup:
    """The products under way of four warps, and by registers the accumulators that these make."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.made = [0] * WARPS  # issued by each warp
        self.groups: list[list[int]] = [
            [] for _ in range(WARPS)
        ]  # of each warp: how many had been issued at each commit
        self.sums: dict[tuple[int, ...], np.ndarray] = {}
        self.last: list[dict[tuple[int, ...], int]] = [
            {} for _ in range(WARPS)
        ]  # of each warp: its last of these registers

    def completed(self) -> int:
        return next((i for i, one in enumerate(self.queue) if not one.done), len(self.queue))


def wgmma(instruction: Statement) -> Made:
    """§9.7.15.5.2 wgmma.mma_async of bf16, both operands in shared memory; fence, commit_group, wait_group (§9.7.15.7)."""
    kind = instruction.words[1]
    if kind == "fence":
        return lambda step: _fence
    if kind == "commit_group":
        return lambda step: _commit
    return _wait(instruction) if kind == "wait_group" else _multiply(instruction)


def _fence(warp: Warp, running: np.ndarray | None) -> None:
    warp.fenced = list(warp.registers)  # an instruction that writes one puts another array there


def _commit(warp: Warp, running: np.ndarray | None) -> None:
    group, mine = warp.cta.warpgroup(warp), warp.number % WARPS
    group.groups[mine].append(group.made[mine])


def _wait(instruction: Statement) -> Made:
    left = int(instruction.operands[0].value)  # type: ignore[union-attr]

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
            group, mine = warp.cta.warpgroup(warp), warp.number % WARPS
            marks = group.groups[mine]
            until = marks[len(marks) - 1 - left] if len(marks) > left else 0
            if group.completed() < until:
                return Wait(lambda: group.completed() >= until, f"wgmma.wait_group {left}")
            if warp.cta.races:
                for one in group.queue[:until][-1:]:  # they end in their order
                    warp.cta.races.finish(warp, one.order)
            for registers, last in group.last[mine].items():
                if last < until and registers[0] in warp.in_flight:
                    rows = matrices.matrix_to_fragment(group.sums[registers])[mine].view(np.uint32)
                    for register, row in zip(registers, rows, strict=True):
                        made = warp.in_flight.pop(register)
                        if warp.unwritten.pop(register, None) is not ALL:
                            line = made.instruction.line
                            raise step.error(
                                warp, f"an accumulator was written while the wgmma at {line} was under way"
                            )
                        warp.registers[register] = warp.fenced[register] = row
            return None

        return run

    return made


def _multiply(instruction: Statement) -> Made:
    words = instruction.words
    shape = words[4]
    columns, depth = (int(number) for number in shape[1:].replace("n", " ").replace("k", " ").split()[1:])
    if words[5:] != ("f32", "bf16", "bf16") or not shape.startswith("m64n") or depth != 16:
        raise PtxError("expected bf16 operands in shared memory and sums in fp32")
    d, a, b, scale_d, *immediates = instruction.operands
    if not isinstance(d, Vector) or not all(isinstance(one, Immediate) for one in immediates):
        raise PtxError("expected accumulators, two descriptors, scale-d and four constants")
    scale_a, scale_b, transpose_a, transpose_b = (one.value for one in immediates)  # type: ignore[union-attr]
    if (scale_a, scale_b) != (1, 1):
        raise PtxError("expected no negated operand")
    registers = registers_of(d)
    descriptors = [fetch(operand, np.dtype(np.uint64)) for operand in (a, b)]
    accumulate = fetch(scale_d, np.dtype(np.bool_))
    read = registers_of(Vector((a, b, scale_d)))

    def operand(warp: Warp, step: Any, word: int, rows: int, transposed: bool, product: Multiplication) -> np.ndarray:
        try:
            described = matrices.Descriptor.decode(word)
        except ValueError as error:
            raise step.error(warp, str(error)) from error
        shared = warp.cta.shared
        rank = shared.address >> 24 << 24  # a descriptor's address is that inside its CTA
        places = matrices.operand_addresses(described, rows, depth, transposed) + rank - shared.address
        if places.min() < 0 or places.max() + 2 > shared.size:
            raise step.error(warp, f"a matrix at {described.address:#x} beyond shared memory of {shared.size} bytes")
        pairs = (places[..., None] + np.arange(2)).reshape(-1)
        if warp.cta.races:
            chunks = places[::8] if transposed else places[:, ::8]  # of 16 bytes, in every layout
            warp.cta.races.read(shared, chunks.reshape(-1), 16, product, step)
        # Rows that nobody wrote are multiplied too: true kernels do, and store nothing of them.
        return seen_by_async(shared, pairs).view(np.uint16).reshape(rows, depth)

    def made(step: Any) -> Any:
        def run(warp: Warp, running: np.ndarray | None) -> None:
            if running is not None:
                raise step.error(warp, "expected all 32 lanes", ~running)
            group, mine = warp.cta.warpgroup(warp), warp.number % WARPS
            missing = warp.unwritten_among(read)
            if missing is not None:
                raise step.error(warp, "a descriptor or scale-d that nobody wrote", missing)
            number = group.made[mine]
            if number == len(group.queue):
                given = [int(get(warp)[0]) for get in descriptors]
                Multiplication(warp, step, group, lambda product: happen(warp, product, given))
            product = group.queue[number]
            if product.step is not step:
                raise step.error(
                    warp, f"another wgmma than other warps of its warpgroup issue ({product.step.instruction.line})"
                )
            group.made[mine] += 1
            first = None
            if registers[0] not in warp.in_flight and not (
                warp.fenced and all(warp.registers[register] is warp.fenced[register] for register in registers)
            ):
                raise step.error(warp, "accumulators that were written behind the last wgmma.fence")
            if bool(accumulate(warp)[0]) and registers[0] not in warp.in_flight:
                missing = warp.unwritten_among(registers)
                if missing is not None:
                    raise step.error(warp, "accumulators that nobody wrote", missing)
                first = np.array([warp.registers[register] for register in registers]).view(np.float32)
            elif not accumulate(warp)[0]:
                first = np.zeros((len(registers), 32), np.float32)
            product.issued[mine] = first
            if warp.cta.races and product.order is not None:
                warp.cta.races.join(product, warp)
            for register in registers:
                warp.in_flight[register] = step
                warp.unwritten[register] = ALL
            group.last[mine][registers] = number

        def happen(warp: Warp, product: Multiplication, given: list[int]) -> None:
            group = warp.cta.warpgroup(warp)
            first = [product.issued[i] for i in range(WARPS)]
            if all(one is not None for one in first):
                sums = matrices.fragment_to_matrix(np.array(first))
            else:
                sums = group.sums[registers]
            tiles = [
                operand(warp, step, word, rows, bool(transposed), product)
                for word, rows, transposed in zip(given, (64, columns), (transpose_a, transpose_b), strict=True)
            ]
            group.sums[registers] = matrices.multiply(tiles[0], tiles[1], sums)

        return run

    return made


TABLE: dict[str, Any] = {"wgmma": wgmma}
