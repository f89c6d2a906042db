"""A target of the package's launches: inside ``launches_on(Machine())`` they run on NumPy arrays, from their PTX."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blazeproto.lab.machine.memory import Memory
from blazeproto.lab.machine.ptx import Program
from blazeproto.lab.machine.run import Report
from blazeproto.lab.machine.stepper import Stepper
from blazeproto.lab.machine.tensor_map import TensorMap
from blazeproto.lab.machine.together import run_together
from blazeproto.runtime.target import launches_on

Held = tuple[tuple[Any, ...], dict[str, Any]]  # a launch: arguments and options of `cta.Launch`, behind its world


class Machine:
    """Runs launches one after the other; `reports` has what each found.

    multiprocessors: CTAs of a persistent kernel, at most.  seed: of the schedule.  races: whether they are watched.
    progress: called with clusters done and in all, of every launch.  variables: arrays that kernels have as global variables,
    by name.
    """

    def __init__(
        self,
        multiprocessors: int = 2,
        seed: int = 0,
        races: bool = True,
        progress: Callable[[int, int], None] | None = None,
        variables: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.multiprocessors, self.seed, self.races, self.progress = multiprocessors, seed, races, progress
        self.variables = variables
        self.memory, self.reports = Memory(), list[Report]()
        self.arrays: dict[int, tuple[np.ndarray, int]] = {}  # by where the host has them
        self.programs: dict[str, Program] = {}
        self.held: list[Held] | None = None  # launches, where they wait

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array that nobody has written: kernels that read it are told so."""
        return self._added(np.empty(shape, dtype), written=False)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self._added(np.zeros(shape, dtype))

    def _added(self, array: np.ndarray, written: bool = True, name: str = "") -> np.ndarray:
        said = f"{name or f'array {len(self.arrays)}'}, {array.dtype.name}{list(array.shape)}"
        address = self.memory.add(array, said, written=written, read_only=not array.flags.writeable)
        self.arrays[_place(array)] = array, address
        return array

    def address(self, array: np.ndarray, name: str = "") -> int:
        """Where the first element lies, of an array or a part of one. name: what messages call it.

        ValueError where it shares a part of its memory with one that is here, and is no part of it.
        """
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        begin, end = _place(root), _place(root) + root.nbytes
        for start, (known, address) in self.arrays.items():
            if start <= begin and end <= start + known.nbytes:
                return address + _place(array) - start
            if start < end and begin < start + known.nbytes:
                raise ValueError(f"{name or 'array'}: expected memory of its own, got some that another array has too")
        self._added(root, name=name)
        return self.arrays[begin][1] + _place(array) - begin

    def clear(self, address: int, size: int) -> None:
        block = self.memory.block(address, size)
        assert block is not None
        begin = address - block.address
        block.bytes[begin : begin + size] = 0
        block.wrote(slice(begin, begin + size))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        block: int,
        shared_bytes: int,
        parameters: bytes,
        boxes: Mapping[int, tuple[Any, int]],
        cluster: int,
    ) -> None:
        """See `blazeproto.runtime.target.Target`. Raises what `run` raises; ValueError for a grid of no CTAs, as CUDA does."""
        if 0 in grid:
            raise ValueError(f"grid: expected at least one CTA, got {grid}")
        text = kernel.ptx(lineinfo=True) if callable(kernel.ptx) else kernel.ptx
        program = self.programs[text] = self.programs.get(text) or Program.read(text)
        entry = getattr(kernel, "entry", None)
        maps = {
            offset: TensorMap(address, box.shape, box.strides, box.box, box.element.bytes)
            for offset, (box, address) in boxes.items()
        }
        name = entry if entry in program.entries else None
        options = {"shared_bytes": shared_bytes, "cluster": cluster, "maps": maps, "variables": self.variables}
        launch = (program, name, grid, (block,), parameters), options
        if self.held is None:
            stepper = self._stepper(launch)
            self.reports.append(stepper.report)
            stepper.finish()
        else:
            self.held.append(launch)

    def _stepper(self, launch: "Held") -> Stepper:
        how = {"memory": self.memory, "seed": self.seed, "races": self.races, "progress": self.progress}
        return Stepper(*launch[0], **launch[1], **how)

    def _hold(self, call: Callable[[], Any]) -> tuple[list["Held"], Any]:
        """The launches that ``call`` makes, none of which has begun, and its result."""
        self.held = held = list[Held]()
        try:
            with launches_on(self):
                return held, call()
        finally:
            self.held = None

    def step(self, call: Callable[[], Any]) -> Stepper:
        """The launch that ``call`` makes, such as ``lambda: gemm.up_forward(x, up_proj, dispatch)``, not begun yet.

        ``result`` of what this returns is the call's, whose arrays fill as the launch goes on. ValueError where the call makes
        none or more than one.
        """
        held, result = self._hold(call)
        if len(held) != 1:
            got = f"a second, of {held[1][0][1]}" if held else "none"
            raise ValueError(f"call: expected one launch, got {got}")
        stepper = self._stepper(held[0])
        stepper.result = result
        return stepper

    def together(
        self, calls: Sequence[Callable[[], Any]], resident: float = float("inf"), most: float = float("inf")
    ) -> Report:
        """Runs the launches of several GPUs at once: those that each call makes are one GPU's, in order. One report of all.

        Calls return before anything has run. Each GPU reaches all arrays; what it sees of the others' stores, `world.py` says.
        ``multiprocessors`` are one GPU's, and races are watched.  resident, most: as in `run_together`.
        Raises what `launch` raises.
        """
        streams = [self._hold(call)[0] for call in calls]
        report = run_together(streams, self.memory, self.seed, resident, most)
        self.reports.append(report)
        return report


def _place(array: np.ndarray) -> int:
    """Where the host has its first element."""
    return int(array.__array_interface__["data"][0])
