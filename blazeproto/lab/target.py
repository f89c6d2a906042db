"""The target of launches that interprets their PTX with ptxsim: inside ``launches_on(Machine())`` kernels run on NumPy arrays.

What the lab uses of ptxsim, it imports from here: an ImportError of this module says how to install it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blazeproto.runtime.target import launches_on

try:
    from ptxsim import Arrays, MachineError, Program, PtxError, Report, Stepper, TensorMap
    from ptxsim.together import run_together
except ImportError as error:
    raise ImportError(
        f"ptxsim: expected the package, which interprets kernels' PTX, got {str(error)!r}: "
        "pip install ./ptxsim in a clone of blazeproto"
    ) from error

__all__ = ["Machine", "MachineError", "PtxError"]

Held = tuple[
    tuple[Any, ...], dict[str, Any]
]  # a launch: arguments and options of `ptxsim.cta.Launch`, behind its world


class Machine(Arrays):
    """Runs launches one after the other; `reports` has what each found. A `blazeproto.runtime.target.Target`.

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
        super().__init__()
        self.multiprocessors, self.seed, self.races, self.progress = multiprocessors, seed, races, progress
        self.variables, self.reports = variables, list[Report]()
        self.programs: dict[str, Program] = {}
        self.held: list[Held] | None = None  # launches, where they wait

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.add(np.zeros(shape, dtype))

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
        """See `blazeproto.runtime.target.Target`. Raises what `ptxsim.run` raises; ValueError for a grid of no CTAs, as CUDA
        does."""
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

    def _stepper(self, launch: Held) -> Stepper:
        how = {"memory": self.memory, "seed": self.seed, "races": self.races, "progress": self.progress}
        return Stepper(*launch[0], **launch[1], **how)

    def _hold(self, call: Callable[[], Any]) -> tuple[list[Held], Any]:
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

        Calls return before anything has run. Each GPU reaches all arrays, and may see the others' stores late.
        ``multiprocessors`` are one GPU's, and races are watched.  resident, most: as in `ptxsim.run_together`.
        Raises what `launch` raises.
        """
        streams = [self._hold(call)[0] for call in calls]
        report = run_together(streams, self.memory, self.seed, resident, most)
        self.reports.append(report)
        return report
