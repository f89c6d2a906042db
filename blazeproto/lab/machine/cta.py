"""A launch, its clusters and CTAs: what their threads share."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from blazeproto.lab.machine.asynchronous import Transaction
from blazeproto.lab.machine.barriers import Mbarrier, Named
from blazeproto.lab.machine.memory import IN_WINDOW, SHARED_BASE, WINDOW, Block, Memory, shared_block
from blazeproto.lab.machine.ptx import Entry, Program
from blazeproto.lab.machine.races import Races, Unwatched
from blazeproto.lab.machine.tensor_map import TensorMap
from blazeproto.lab.machine.warp import LANES, Warp
from blazeproto.lab.machine.wgmma import Warpgroup


class Launch:
    """A kernel with its grid and arguments, while it runs.

    maps: tensor maps by their addresses.  changes: counts what others can see.  pending: transactions under way.
    """

    def __init__(
        self,
        program: Program,
        entry: Entry,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        memory: Memory,
        parameters: bytes,
        maps: Mapping[int, TensorMap],
        variables: Mapping[str, np.ndarray],
        races: Races | Unwatched,
    ) -> None:
        self.program, self.entry, self.grid, self.block = program, entry, grid, block
        self.shared_bytes, self.memory, self.races, self.changes = shared_bytes, memory, races, 0
        self.pending: list[Any] = []
        base = memory.add(np.frombuffer(bytearray(parameters), np.uint8), "the parameters", read_only=True)
        self.maps = {base + offset: tensor_map for offset, tensor_map in maps.items()}
        self.symbols = {parameter.name: base + parameter.offset for parameter in entry.parameters}
        for variable in program.variables:
            if variable.space != "shared":
                data = variables.get(variable.name, np.frombuffer(bytearray(variable.data), np.uint8))
                self.symbols[variable.name] = memory.add(data, variable.name, read_only=variable.space == "const")


class Cluster:
    """CTAs that run at the same time, and reach each other's shared memory."""

    def __init__(self, launch: Launch, first: int, size: int) -> None:
        self.mbarriers: dict[int, Mbarrier] = {}  # by address
        self.phases: dict[int, Named] = defaultdict(lambda: Named(0))  # of its barrier
        self.ctas: list[Cta] = [Cta(launch, self, first + rank, rank) for rank in range(size)]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        launch.races.begin(self.warps)


class Cta:
    """One CTA: shared memory, named barriers, warps. ended: how many of these are at their end."""

    def __init__(self, launch: Launch, cluster: Cluster, index: int, rank: int) -> None:
        self.launch, self.cluster, self.index, self.rank, self.name = launch, cluster, index, rank, f"CTA {index}"
        self.ended = 0
        self.place = np.unravel_index(index, launch.grid[::-1])[::-1]
        self.threads = int(np.prod(launch.block))
        symbols, size = placed(launch.program, launch.entry, launch.shared_bytes, rank)
        self.symbols = launch.symbols | symbols
        self.shared = shared_block(rank, size)
        self.named, self.at_barrier = dict[int, Named](), dict[int, Named]()  # by number; by warp, of those that wait
        self.races: Any = launch.races
        self.groups: dict[Any, list[list[Transaction]]] = defaultdict(
            lambda: [[]]
        )  # by warp and kind, the last one open
        self.warpgroups: dict[int, Warpgroup] = defaultdict(Warpgroup)
        left = enumerate(range(self.threads, 0, -LANES))  # threads of a warp and those behind it
        self.warps = [Warp(self, n, threads, launch.entry.widths) for n, threads in left]

    def threads_of(self, warp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tid.x, tid.y, tid.z of a warp's lanes."""
        thread, (x, y, _) = np.arange(LANES * warp, LANES * (warp + 1)), self.launch.block
        return thread % x, thread // x % y, thread // (x * y)

    def block(self, address: int, size: int) -> Block | None:
        """Whose bytes these are: of global memory, or of the shared memory of a CTA in the cluster."""
        if address >> 40:
            return self.launch.memory.block(address, size)
        rank = address >> WINDOW
        if not 0 <= rank < len(self.cluster.ctas) or self.gone(address):
            return None
        shared = self.cluster.ctas[rank].shared
        return shared if shared.address <= address and address + size <= shared.end else None

    def describe(self, address: int) -> str:
        if address >> 40:
            return self.launch.memory.describe(address)
        offset = (address & IN_WINDOW) - SHARED_BASE
        ended = ", which has ended" if self.gone(address) else ""
        return f"byte {offset} of the shared memory of rank {address >> WINDOW}{ended} ({self.shared.size} bytes)"

    def gone(self, address: int) -> bool:
        """Whether it is in the shared memory of another CTA, all of whose warps are at their end."""
        rank = address >> WINDOW
        return rank != self.rank and all(warp.done for cta in self.cluster.ctas[rank : rank + 1] for warp in cta.warps)


def placed(program: Program, entry: Entry, shared_bytes: int, rank: int = 0) -> tuple[dict[str, int], int]:
    """Addresses of shared variables, and the bytes of all: static ones first, dynamic ones behind."""
    end, symbols = 0, {}
    shared = [v for v in (*program.variables, *entry.variables) if v.space == "shared"]
    for variable in sorted(shared, key=lambda v: v.external):
        end = -(-end // variable.alignment) * variable.alignment
        symbols[variable.name] = (rank << WINDOW) + SHARED_BASE + end
        end += 0 if variable.external else variable.size
    return symbols, end + shared_bytes
