"""The target of launches that interprets their PTX with ptxsim: inside ``launches_on(Machine())`` kernels run on NumPy arrays.

machine = Machine(seed=1)
launch(machine, gemm.combine, y=y, dispatch=dispatch, out=out)     # torch tensors of a CPU; ``out`` holds what the kernel made
machine.reports[-1]                                                # races, steps

`Attended` says how long runs take, how far they are and what they found. It writes to stderr: a line beforehand, and where that
is a terminal a bar, in Jupyter a percentage. Ctrl-C ends a run; the next one begins anew.

The lab imports ptxsim only through this module, whose ImportError says how to install it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blazeproto.blocksparse.topology import Topology
from blazeproto.dispatch import Dispatch
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.lab.verdict import Verdict  # before rich, for it says how to install that
from blazeproto.runtime.target import launches_on

# isort: split
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

try:
    from ptxsim import Arrays, MachineError, Program, PtxError, Report, Stepper, TensorMap
    from ptxsim.together import run_together
except ImportError as error:
    raise ImportError(
        f"ptxsim: expected the package, which interprets kernels' PTX, got {str(error)!r}: "
        "pip install ./ptxsim in a clone of blazeproto"
    ) from error

__all__ = ["Attended", "Machine", "MachineError", "Program", "PtxError", "Stepper", "launch"]

TILES_A_CTA = 4  # so that a CTA goes from tile to tile, as on a GPU, and the bar moves
SLOW = 20  # seconds of a run, from which a smaller one is offered, and Jupyter shows how far it is
MOST_CTAS = 132  # multiprocessors of an H200
# Measured on one core of a server, races watched, six products on sizes from (T, d, n, E, K) = (100, 64, 64, 4, 2) to
# (300, 256, 256, 8, 2) and (200, 2048, 128, 4, 2): warp instructions within a factor of 2.3. A tile costs the same however few
# of its rows are an expert's.
SECONDS_A_STEP = 2.6e-5
STEPS_A_TILE, STEPS_AN_OUTPUT, STEPS_AN_OPERATION, STEPS_A_BYTE = 3000, 0.2, 0.4e-3, 1 / 16

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
        self.kernel: Any = None  # of the last launch

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
        self.kernel, text = kernel, kernel.ptx(lineinfo=True) if callable(kernel.ptx) else kernel.ptx
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

        ``result`` of what this returns is the call's, whose arrays fill as the launch goes on; ``kernel`` is the launch's.
        ValueError where the call makes none or more than one.
        """
        held, result = self._hold(call)
        if len(held) != 1:
            got = f"a second, of {held[1][0][1]}" if held else "none"
            raise ValueError(f"call: expected one launch, got {got}")
        stepper = self._stepper(held[0])
        stepper.result, stepper.kernel = result, self.kernel
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


# --- Runs that a person waits for -----------------------------------------------------------------------------------------


def launch(machine: Machine, function: Callable[..., Any], **arguments: Any) -> None:
    """``function(**arguments)`` of dispatch, gemm or router, of tensors of a CPU, which it reads and writes where they lie.

    An output or workspace that is not given, the machine makes, as memory that nobody wrote. Raises what `ptxsim.run` raises.
    """
    with launches_on(machine):
        function(**{name: hosted(value) for name, value in arguments.items()})


def hosted(value: Any) -> Any:
    """A tensor of a CPU as the NumPy array of its memory, bf16 as uint16; those in a record or a tuple too. Else itself."""
    if isinstance(value, Tensor):
        bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
        return value.view(bits).numpy()
    if isinstance(value, Quantized):
        return Quantized(*map(hosted, value))
    if isinstance(value, tuple):
        return tuple(map(hosted, value))
    if isinstance(value, Dispatch | Topology):
        return replace(value, **{name: hosted(part) for name, part in vars(value).items() if isinstance(part, Tensor)})
    return value


class Attended:
    """Runs of one product, each with the schedule of its own seed.

    tiles: of the outputs.  steps: that a run will take.  races, errors: lines of what was found, the same ones once.
    """

    def __init__(self, product: str, runs: int, tiles: int, steps: float) -> None:
        self.product, self.runs, self.steps = product, runs, steps
        self.multiprocessors = min(MOST_CTAS, max(2, tiles // TILES_A_CTA))
        self.console = Console(stderr=True)
        self.races, self.errors = dict[str, None](), list[str]()
        seconds = SECONDS_A_STEP * steps
        took = f"{max(1, seconds):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        took += " a run" if runs == 1 else f" a run, {runs} runs"
        self.slow = seconds > SLOW
        smaller = "; T=100, d=256, n=256, E=4 take seconds" if self.slow else ""
        self.console.print(f"{product} on the machine: about {took}{smaller}; Ctrl-C ends it", highlight=False)

    def run(self, seed: int, launch: Callable[[Machine], None]) -> bool:
        """Whether it came to its end. Raises PtxError for an instruction that the machine does not know, KeyboardInterrupt on
        Ctrl-C, with the share that was done."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        named = f"{self.product}, seed {seed}"

        def progress(done: int, count: int) -> None:
            bar.update(task, completed=done, total=count)
            if self.slow and self.console.is_jupyter:  # whose output is no terminal, but goes back to a line's begin
                print(f"\r{named}: {done / count:.0%}", end="", file=sys.stderr, flush=True)

        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(f"{named}: CTAs")
            machine = Machine(self.multiprocessors, seed, progress=progress)
            try:
                launch(machine)
            except KeyboardInterrupt:  # without the frames of the interpreter
                raise KeyboardInterrupt(f"{named}: stopped at {bar.tasks[task].percentage:.0f} %") from None
            except MachineError as error:
                self.errors.append(f"seed {seed}: {error.args[0]}")
                return False
            finally:
                self.races |= {str(race): None for report in machine.reports for race in report.races}
        return True

    def verdict(self, of_outputs: Verdict) -> Verdict:
        """With what the machine found."""
        return replace(of_outputs, runs=self.runs, races=tuple(self.races), errors=tuple(self.errors), on_machine=True)
