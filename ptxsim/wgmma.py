"""wgmma: four warps multiply tiles of shared memory, beside what they do otherwise (PTX ISA §9.7.15.5).

A warpgroup's instructions happen in their order, each when all four warps have issued it, and then read shared memory.
Until a wait, the accumulators are nobody's: reading or writing them is an error, and so is a product whose accumulators other
instructions wrote since the last wgmma.fence.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ptxsim import matrices
from ptxsim.asynchronous import Transaction
from ptxsim.memory import SHARED_BASE, bytes_at
from ptxsim.operands import BOOL, UINT8, UINT16, UINT64, known, registers_of
from ptxsim.ptx import PtxError, Statement, Vector, require
from ptxsim.warp import ALL, LANE, LANES, Compiled, Run, Wait, Warp, plain

WARPS = 4
BYTES = 32  # of a row of an operand, which is K of one wgmma


class Multiplication(Transaction):
    """One wgmma of a warpgroup. given: its descriptors and scale-d.  reads: A and B, as `matrices.operand_addresses` takes them.

    issued: of each warp its accumulators' first values, or None where D = A B + D goes on.
    """

    def __init__(
        self,
        warp: Warp,
        step: Compiled,
        group: "Warpgroup",
        run: "Callable[[Multiplication], None]",
        given: tuple[int, ...],
        reads: list[tuple[matrices.Descriptor, int, int, bool, int]],
    ) -> None:
        self.issued, self.given, self.reads = dict[int, np.ndarray | None](), given, reads
        super().__init__(warp, step, [lambda: run(self)], (group,), group, missing=WARPS)

    def places(self) -> Iterator[np.ndarray]:
        """The places in shared memory of A's elements and of B's, int64 (rows, K): of the first byte of each."""
        return (matrices.operand_addresses(*operand) - SHARED_BASE for operand in self.reads)


class Warpgroup:
    """The products under way of four warps, and by registers the accumulators that these make.

    For each warp: the number issued at each commit, and now; and its last product of these registers.
    """

    def __init__(self) -> None:
        self.products: list[Multiplication] = []
        self.sums: dict[tuple[int, ...], np.ndarray] = {}
        self.groups: list[list[int]] = [[0] for _ in range(WARPS)]
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(WARPS)]


def _of(warp: Warp) -> tuple[Warpgroup, int]:
    """A warp's group, and its number there."""
    return warp.cta.warpgroups[warp.number // WARPS], warp.number % WARPS


def _fence(step: Compiled, warp: Warp, running: np.ndarray | None) -> None:
    """§9.7.15.7 wgmma.fence"""
    warp.fenced = list(warp.registers)  # an instruction that writes one puts another array there


def _commit(step: Compiled, warp: Warp, running: np.ndarray | None) -> None:
    """§9.7.15.7 wgmma.commit_group"""
    group, mine = _of(warp)
    group.groups[mine].append(group.groups[mine][-1])


def _wait(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.7 wgmma.wait_group"""
    left = int(instruction.operands[0].value)  # type: ignore[union-attr]

    def run(warp: Warp, running: np.ndarray | None) -> Wait | None:
        group, mine = _of(warp)
        marks = group.groups[mine]
        until = marks[-2 - left] if len(marks) > left + 1 else 0
        awaited = group.products[:until][-1:]  # the last of them: they happen in their order
        if any(not one.next for one in awaited):
            return Wait(lambda: awaited[0].next > 0, f"wgmma.wait_group {left}")
        for one in awaited:
            warp.cta.races.finish_part(warp, one.orders[0], mine, WARPS)
        for registers, last in group.last[mine].items():
            if last < until and registers[0] in warp.in_flight:
                rows = matrices.matrix_to_fragment(group.sums[registers])[mine].view(np.uint32)
                for register, row in zip(registers, rows, strict=True):
                    line = warp.in_flight.pop(register).instruction.line
                    if warp.unwritten.pop(register, None) is not ALL:
                        raise step.error(warp, f"an accumulator was written while the wgmma at {line} was under way")
                    warp.registers[register] = warp.fenced[register] = row
        return None

    return run


def _multiply(instruction: Statement, step: Compiled) -> Run:
    """§9.7.15.5.2 wgmma.mma_async of bf16 or e4m3, which lies K-major, both operands in shared memory"""
    d, a, b, scale_d, *immediates = instruction.operands
    word, multiplied = (
        (UINT8, matrices.multiply_e4m3) if instruction.words[-1] == "e4m3" else (UINT16, matrices.multiply)
    )
    depth = BYTES // word.itemsize
    scale_a, scale_b, *transposed = (one.value for one in immediates)  # type: ignore[union-attr]
    require((scale_a, scale_b) == (1, 1), "expected no negated operand")
    registers, n = registers_of(d), int(instruction.words[4].removeprefix("m64n").removesuffix(f"k{depth}"))
    sized = len(registers) == n // 2 and len(transposed) == (2 if depth == 16 else 0)
    if n % 8 or not 8 <= n <= 256 or not isinstance(d, Vector) or not sized:
        raise PtxError("expected n a multiple of 8 up to 256, n / 2 accumulators, and four constants, or two for e4m3")
    transposed = transposed or [0, 0]
    uniform = [known(step, a, UINT64), known(step, b, UINT64), known(step, scale_d, BOOL)]

    def operand(warp: Warp, places: np.ndarray, transposed: int, product: Multiplication) -> np.ndarray:
        shared = warp.cta.shared  # a descriptor's address is that inside its CTA
        if places.min() < 0 or places.max() + word.itemsize > shared.size:
            start = int(places[0, 0]) + SHARED_BASE
            raise step.error(warp, f"a matrix at {start:#x} beyond shared memory of {shared.size} bytes")
        chunks = places[::8] if transposed else places[:, :: depth // 2]  # of 16 bytes, in every layout
        warp.cta.races.read(shared, chunks.reshape(-1), 16, product, step)
        # Rows that nobody wrote are multiplied too: true kernels do, and store nothing of them.
        return shared.seen_by_async(bytes_at(places.reshape(-1), word.itemsize)).view(word).reshape(places.shape)

    def happen(warp: Warp, product: Multiplication) -> None:
        group, _ = _of(warp)
        first = [product.issued[i] for i in range(WARPS)]
        going_on = any(one is None for one in first)
        sums = group.sums[registers] if going_on else matrices.fragment_to_matrix(np.array(first))
        left, right = (operand(warp, *one, product) for one in zip(product.places(), transposed, strict=True))
        group.sums[registers] = multiplied(left, right, sums)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        step.refuse(warp, ~warp.mask(running), "expected all 32 lanes")
        group, mine = _of(warp)
        lanes = [get(warp, LANE) for get in uniform]
        *given, adds = (int(values[0]) for values in lanes)
        number, going_on = group.groups[mine][-1], registers[0] in warp.in_flight
        if number == len(group.products):
            how = zip(map(matrices.Descriptor.decode, given), (64, n), transposed, strict=True)
            reads = [(one, rows, depth, bool(across), word.itemsize) for one, rows, across in how]
            group.products.append(Multiplication(warp, step, group, partial(happen, warp), (*given, adds), reads))
        product = group.products[number]
        differ = product.given != (*given, adds) or any((values != values[0]).any() for values in lanes)
        step.refuse(warp, differ, "descriptors or a scale-d that differ between threads of a warpgroup")
        if product.step is not step:
            line = product.step.instruction.line
            raise step.error(warp, f"another wgmma than other warps of its warpgroup issue ({line})")
        fenced = warp.fenced and all(warp.registers[register] is warp.fenced[register] for register in registers)
        step.refuse(warp, not (going_on or fenced), "accumulators that were written behind the last wgmma.fence")
        product.issued[mine] = None if adds else np.zeros((len(registers), LANES), np.float32)
        if adds and not going_on:
            step.refuse(warp, warp.unwritten_among(registers), "accumulators that nobody wrote")
            product.issued[mine] = np.array([warp.registers[register] for register in registers]).view(np.float32)
        product.missing -= 1
        warp.cta.races.join(product, warp)
        warp.in_flight |= dict.fromkeys(registers, step)
        warp.unwritten |= dict.fromkeys(registers, ALL)
        group.groups[mine][-1], group.last[mine][registers] = number + 1, number

    return run


TABLE = {
    "wgmma.fence": plain(_fence),
    "wgmma.commit_group": plain(_commit),
    "wgmma.wait_group": _wait,
    "wgmma.mma_async": _multiply,
}
