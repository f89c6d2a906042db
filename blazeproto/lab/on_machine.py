"""Calls of products on a `blazeproto.lab.target.Machine`: with torch tensors of a CPU, and with a person who waits for them.

machine = Machine(seed=1)
launch(machine, gemm.combine, y=y, dispatch=dispatch, out=out)     # ``out`` holds what the kernel made of it
machine.reports[-1]                                                # races, steps

`Attended` says how long runs take, how far they are and what they found. It writes to stderr: a line beforehand, and where that
is a terminal a bar. Ctrl-C ends a run; the next one begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blazeproto.blocksparse.topology import Topology
from blazeproto.dispatch import Dispatch
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.lab.target import Machine, MachineError
from blazeproto.lab.verdict import Verdict  # before rich, for it says how to install that
from blazeproto.runtime.target import launches_on

# isort: split
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

TILES_A_CTA = 4  # so that a CTA goes from tile to tile, as on a GPU, and the bar moves
MOST_CTAS = 132  # multiprocessors of an H200
# Measured on one core of a server, races watched: seconds and warp instructions, within a factor of two.
SECONDS_A_STEP = 2e-5
STEPS_AN_OUTPUT, STEPS_AN_OPERATION, STEPS_A_BYTE = 0.25, 0.33e-3, 1 / 16


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


def seconds_of_tiles(operations: float, outputs: int) -> float:
    """About what one run takes of a product that is made of tiles. outputs: elements that it writes."""
    return SECONDS_A_STEP * (STEPS_AN_OUTPUT * outputs + STEPS_AN_OPERATION * operations)


def seconds_of_bytes(moved: float) -> float:
    """About what one run takes of a product that moves so many bytes."""
    return SECONDS_A_STEP * STEPS_A_BYTE * moved


class Attended:
    """Runs of one product, each with the schedule of its own seed.

    tiles: of the outputs.  seconds: what a run will take.  races, errors: lines of what was found, the same ones once.
    """

    def __init__(self, product: str, runs: int, tiles: int, seconds: float) -> None:
        self.product, self.runs, self.seconds = product, runs, seconds
        self.multiprocessors = min(MOST_CTAS, max(2, tiles // TILES_A_CTA))
        self.console = Console(stderr=True)
        self.races, self.errors = dict[str, None](), list[str]()
        every = f", {runs} runs" if runs > 1 else ""
        took = f"{max(1, seconds):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        self.console.print(f"{product} on the machine: about {took} a run{every}; Ctrl-C ends it", highlight=False)

    def run(self, seed: int, launch: Callable[[Machine], None]) -> bool:
        """Whether it came to its end. Raises PtxError for what the machine does not know, KeyboardInterrupt on Ctrl-C."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        shown = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task(f"{self.product}, seed {seed}: CTAs")
            machine = Machine(
                self.multiprocessors, seed, progress=lambda done, count: bar.update(task, completed=done, total=count)
            )
            try:
                launch(machine)
            except MachineError as error:
                self.errors.append(f"seed {seed}: {error.args[0]}")
                return False
            finally:
                self.races |= {str(race): None for report in machine.reports for race in report.races}
        return True

    def verdict(self, of_outputs: Verdict) -> Verdict:
        """With what the machine found."""
        return replace(of_outputs, runs=self.runs, races=tuple(self.races), errors=tuple(self.errors), on_machine=True)
