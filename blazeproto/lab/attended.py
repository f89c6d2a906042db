"""Runs on the machine (`ptxsim`) that a person waits for: how long they take, how far they are, what they found.

Written to stderr: a line beforehand, and where that is a terminal a bar. Ctrl-C ends a run; the next one begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.lab.target import Machine, MachineError
from blazeproto.lab.verdict import Verdict  # before rich, for it says how to install that

# isort: split
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

TILES_A_CTA = 4  # so that a CTA goes from tile to tile, as on a GPU, and the bar moves
MOST_CTAS = 132  # multiprocessors of an H200
# Measured on one core of a server, races watched: seconds and warp instructions, within a factor of two.
SECONDS_A_STEP = 2e-5
STEPS_AN_OUTPUT, STEPS_AN_OPERATION, STEPS_A_BYTE = 0.25, 0.33e-3, 1 / 16


def seconds_of(product: str, sizes: Sizes, outputs: int) -> float:
    """About what one run takes. outputs: elements that it writes."""
    entry = PRODUCTS[product]
    if entry.kernel is None:  # it moves bytes
        return SECONDS_A_STEP * STEPS_A_BYTE * entry.least_bytes(sizes)
    return seconds_of_tiles(entry.operations(sizes), outputs)


def seconds_of_tiles(operations: float, outputs: int) -> float:
    """The same of any product that is made of tiles."""
    return SECONDS_A_STEP * (STEPS_AN_OUTPUT * outputs + STEPS_AN_OPERATION * operations)


class Attended:
    """Runs of one product, each with the schedule of its own seed.

    tiles: of the outputs.  seconds: what a run will take.  races, errors: lines of what was found, the same ones once.
    """

    def __init__(self, product: str, runs: int, tiles: int, seconds: float) -> None:
        self.product, self.runs = product, runs
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
