"""A launch, its clusters and CTAs: what their threads share."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxsim.asynchronous import Copies, Groups
from ptxsim.barriers import Mbarrier, Named
from ptxsim.checks import expect
from ptxsim.instructions import compile_entry
from ptxsim.maps import TensorMap
from ptxsim.memory import IN_WINDOW, SHARED_BASE, WINDOW, Block, shared_block
from ptxsim.ptx import Entry, Program
from ptxsim.warp import LANES, Warp
from ptxsim.wgmma import Warpgroup
from ptxsim.world import World


class Launch:
    """A kernel with its grid and arguments.

    parameters: the bytes of all, as the entry takes them.  maps: tensor maps, by their offsets in these.
    shared_bytes: dynamic shared memory of a CTA.  cluster: CTAs of a cluster.
    variables: the program's global variables that lie in these arrays; the others begin as the program says.
    gpu: its number.  name: the begin of messages, with several GPUs.  known: the accesses that ended before, for races.py.
    """

    def __init__(
        self,
        world: World,
        program: Program,
        entry: str | None,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        parameters: bytes,
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        maps: Mapping[int, TensorMap] | None = None,
        variables: Mapping[str, np.ndarray] | None = None,
        gpu: int = 0,
        name: str = "",
    ) -> None:
        of = self.entry = program.entry(entry)
        expect(
            "parameters",
            len(parameters) >= of.parameter_bytes,
            f"{of.parameter_bytes} bytes for {of.name}",
            len(parameters),
        )
        self.world, self.program, self.shared_bytes, self.gpu, self.name = world, program, shared_bytes, gpu, name
        self.grid, self.block = (tuple([*size, 1, 1][:3]) for size in (grid, block))
        self.steps, self.cluster, self.count = compile_entry(of), cluster, int(np.prod(self.grid))
        self.known: Any = None
        expect("grid", self.count % cluster == 0, f"whole clusters of {cluster} CTAs", self.count)
        base = world.memory.add(np.frombuffer(bytearray(parameters), np.uint8), "the parameters", read_only=True)
        self.maps = {base + offset: tensor_map for offset, tensor_map in (maps or {}).items()}
        self.symbols = {parameter.name: base + parameter.offset for parameter in of.parameters}
        for variable in program.variables:
            if variable.space != "shared":
                data = (variables or {}).get(variable.name, np.frombuffer(bytearray(variable.data), np.uint8))
                read_only = variable.space == "const"
                self.symbols[variable.name] = world.memory.add(data, variable.name, read_only=read_only)


class Cluster:
    """CTAs that run at the same time, and reach each other's shared memory."""

    def __init__(self, launch: Launch, first: int) -> None:
        self.launch = launch
        self.mbarriers: dict[int, Mbarrier] = {}  # by address
        self.phases: dict[int, Named] = defaultdict(lambda: Named(0))  # of its barrier
        self.ctas: list[Cta] = [Cta(launch, self, first + rank, rank) for rank in range(launch.cluster)]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        launch.world.races.begin(self.warps, launch.known)


class Cta:
    """One CTA: shared memory, named barriers, warps. ended: how many of these are at their end."""

    def __init__(self, launch: Launch, cluster: Cluster, index: int, rank: int) -> None:
        self.launch, self.cluster, self.index, self.rank = launch, cluster, index, rank
        self.name, self.ended = f"{launch.name}CTA {index}", 0
        self.place = np.unravel_index(index, launch.grid[::-1])[::-1]
        self.threads = int(np.prod(launch.block))
        symbols, size = placed(launch.program, launch.entry, launch.shared_bytes, rank)
        self.symbols, self.shared = launch.symbols | symbols, shared_block(rank, size)
        self.named, self.at_barrier = dict[int, Named](), dict[int, Named]()  # by number; by warp, of those that wait
        self.races: Any = launch.world.races
        self.groups: dict[Any, Groups] = defaultdict(Groups)  # by warp and kind
        self.copies: dict[Warp, dict[bytes, Copies]] = defaultdict(dict)  # by the lanes that issued them
        self.warpgroups: dict[int, Warpgroup] = defaultdict(Warpgroup)
        left = enumerate(range(self.threads, 0, -LANES))  # threads of a warp and those behind it
        self.warps = [Warp(self, n, threads, launch.entry.widths) for n, threads in left]

    def threads_of(self, warp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tid.x, tid.y, tid.z of a warp's lanes."""
        thread, (x, y, _) = np.arange(LANES * warp, LANES * (warp + 1)), self.launch.block
        return thread % x, thread // x % y, thread // (x * y)

    def block(self, address: int, size: int) -> Block | None:
        """The owner of these bytes: an array of global memory, or the shared memory of a CTA in the cluster."""
        if address >> 40:
            return self.launch.world.block(address, size, self.launch.gpu)
        rank = address >> WINDOW
        if not 0 <= rank < len(self.cluster.ctas) or self.gone(address):
            return None
        shared = self.cluster.ctas[rank].shared
        return shared if shared.address <= address and address + size <= shared.end else None

    def describe(self, address: int) -> str:
        if address >> 40:
            return self.launch.world.memory.describe(address)
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
