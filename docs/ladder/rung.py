"""A rung of the ladder: a small kernel of one dense product, checked, timed, and seen at work.

>>> from rung import Rung
>>> rung = Rung("1-threads.cu", "threads", tile=(16, 16), threads=256, sizes=(32, 32, 32))
>>> rung.check()     # on a GPU, else on the machine (`ptxsim`), which reports races
>>> rung.time()      # on a GPU, else as results/h200/ladder.json has it

The product is C = A Bᵀ: A (m, k), B (n, k) and C (m, n) in bf16, row-major, sums in fp32. A kernel takes one struct by value:
a tensor map for each operand of ``boxes``, addresses of the other operands in the order a, b, c, then the ints m, n and k.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto import cost
from blazeproto.gemm.compile import CUDA_SOURCES, Kernel, compile_in_subprocess
from blazeproto.gemm.launch import Params, Plan, dense_box, num_sms
from blazeproto.lab.accuracy import ROUNDING, STEP, Reference
from blazeproto.lab.target import Machine, MachineError, hosted
from blazeproto.lab.timeline import Span, Timeline
from blazeproto.lab.times import ROUNDS, interleaved_ms
from blazeproto.lab.verdict import Comparison, Places, Verdict
from blazeproto.runtime import driver
from blazeproto.runtime.arch import AMPERE, Arch
from blazeproto.runtime.target import device_of

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parents[1] / "results" / "h200" / "ladder.json"
NEAR = 12  # turns between two instructions that a picture joins
KINDS = (
    ("bar.", "wait full"),
    ("wait", "wait full"),
    ("cp.async.bulk.tensor", "TMA"),
    ("cp.async", "copy"),
    ("ld.global", "copy"),
    ("st.shared", "hand-over"),
    ("st.global", "store"),
    ("mma", "mma"),
    ("fma", "mma"),
)
"""The colours of a picture, by a part of an instruction's name: the first that fits."""
WORDS = {
    "mma": "multiplies",
    "wait full": "waits",
    "copy": "copies from global memory",
    "TMA": "copies by TMA",
    "hand-over": "writes shared memory",
    "store": "stores to global memory",
    "other": "anything else",
}


class Turns(Timeline):
    """A picture of a rung, in turns."""

    def _legend(self) -> dict[str, str]:
        return {what: WORDS[what] for what in super()._legend()}


class Speed(NamedTuple):
    """A time of `Rung.time`; ms is None where nobody has measured. where: on which GPU, and when."""

    entry: str
    ms: float | None = None
    tflops: float | None = None
    where: str = ""

    def __repr__(self) -> str:
        said = "not measured yet" if self.ms is None else f"{self.ms:.3f} ms, {self.tflops:.1f} TFLOP/s ({self.where})"
        return f"{self.entry}: {said}"


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder, and how it is launched.

    file, entry: the .cu in docs/ladder, or any path, and its kernel.  tile: rows and columns of C that a CTA makes.
    threads, smem: of a CTA; dynamic shared memory in bytes.  sizes: m, n and k of a check.
    boxes: the shape of the box of each operand that the kernel reaches by a tensor map; its rows have 64 elements.
    cluster: CTAs of a cluster, which the source states as ``__cluster_dims__``.
    persistent: whether the grid has at most one CTA for each multiprocessor.
    arch: the least that runs it.
    """

    file: str
    entry: str
    tile: tuple[int, int]
    threads: int
    sizes: tuple[int, ...]
    smem: int = 0
    boxes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cluster: int = 1
    persistent: bool = False
    arch: Arch = AMPERE

    # --- The problem: a rung with another one overrides these --------------------------------------------------------------

    numbers = ("m", "n", "k")
    """The struct's ints, whose values are the sizes."""
    timed = (4096, 4096, 4096)
    """Sizes of `time`."""
    part = "matrix"
    """The word of a verdict for what `Places.expert` counts."""

    def operands(self, sizes: tuple[int, ...], device: str) -> dict[str, Tensor]:
        """All arrays of the kernel, in order."""
        m, n, k = sizes
        generator = torch.Generator(device).manual_seed(0)
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        a, b = (torch.randn(rows, k, generator=generator, **how) for rows in (m, n))
        return {"a": a, "b": b, "c": torch.empty(m, n, **how)}

    def exact(self, operands: dict[str, Tensor]) -> dict[str, Reference]:
        """The float64 result of each output, and the bounds of its error."""
        a, b = operands["a"].double(), operands["b"].double()
        result, terms = a @ b.T, a.shape[1] / 16 + 16
        return {"c": Reference(result, ROUNDING * result.abs() + terms * STEP * (a.abs() @ b.abs().T))}

    def places(self, operands: dict[str, Tensor], name: str) -> Places:
        """The tiles of an output."""
        output = operands[name]
        rows, columns = (torch.arange(size, device=output.device) for size in output.shape)
        zeros = torch.zeros_like(rows)
        return Places((len(rows), len(columns)), zeros, rows, None, rows // self.tile[0], columns // self.tile[1])

    def work(self, sizes: tuple[int, ...]) -> tuple[float, float]:
        """Operations, and the least bytes."""
        m, n, k = sizes
        return 2 * m * n * k, 2 * (m * k + n * k + m * n)

    def tiles(self, sizes: tuple[int, ...]) -> int:
        """Tiles of the output."""
        return -(-sizes[0] // self.tile[0]) * -(-sizes[1] // self.tile[1])

    # --- Its source --------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The .cu file."""
        return FOLDER / self.file  # an absolute `file` stays itself

    @property
    def source(self) -> str:
        return self.path.read_text()

    def edited(self, replacements: Mapping[str, str]) -> "Rung":
        """The same rung with a changed source, which `check` runs on the machine. ValueError for a text that does not stand in
        the source exactly once."""
        text = self.source
        for old, new in replacements.items():
            if text.count(old) != 1:
                raise ValueError(f"replacements: expected a text that {self.path.name} has once, got {old!r}")
            text = text.replace(old, new)
        folder = Path(_copies().name) / hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        (folder / self.path.name).write_text(text)
        return replace(self, file=str(folder / self.path.name))

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled. CompileError where the source does not compile."""
        file = os.path.relpath(self.path, CUDA_SOURCES) if FOLDER in self.path.parents else str(self.path)
        defines = {"CLUSTER": self.cluster} if self.cluster > 1 else {}
        return compile_in_subprocess(Kernel(file, self.entry, defines, self.smem, self.threads))

    # --- Running it --------------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU that is here runs the kernel."""
        return torch.cuda.is_available() and self.arch.runs_on(torch.cuda.get_device_capability())

    def check(self, *sizes: int, runs: int = 1, device: str | None = None) -> Verdict:
        """Runs the kernel on poisoned outputs and compares each element with float64.

        sizes: default ``sizes``.  runs: on the machine, run i with the schedule of seed i.
        device: "cuda", or "cpu" for the machine, which is the default without a GPU and for edited sources.
        """
        numbers, edited = sizes or self.sizes, FOLDER not in self.path.parents
        on_machine = device == "cpu" if device else edited or not self.on_gpu
        operands = self.operands(numbers, "cpu" if on_machine else "cuda")
        references, races, errors = self.exact(operands), dict[str, None](), list[str]()
        comparison = Comparison(references, {name: self.places(operands, name) for name in references})
        for seed in range(runs):
            machine = Machine(seed=seed)
            for name in references:
                operands[name].fill_(math.nan)
            try:
                self._on(machine, operands, numbers) if on_machine else self._launch(operands, numbers)
                comparison.add(operands)
            except MachineError as error:
                errors.append(f"seed {seed}: {error.args[0]}")
            races |= {str(race): None for report in machine.reports for race in report.races}
        found: dict[str, Any] = {"runs": runs, "races": tuple(races), "errors": tuple(errors), "on_machine": on_machine}
        return replace(comparison.verdict(self.entry, part=self.part), **found)

    def time(self, rounds: int = ROUNDS) -> Speed:
        """The time on the GPU that is here, a median over ``rounds`` rounds; without one, as results/h200 has it."""
        if self.on_gpu:
            operands = self.operands(self.timed, "cuda")
            ms = interleaved_ms({"": lambda: self._launch(operands, self.timed)}, rounds, queued=True)[""]
            return Speed(self.entry, ms, self.work(self.timed)[0] / ms / 1e9, torch.cuda.get_device_name())
        stored = RESULTS.exists() and FOLDER in self.path.parents
        for row in json.loads(RESULTS.read_text())["rows"] if stored else []:
            if row["entry"] == self.entry:
                return Speed(self.entry, row["ms"], row["tflops"], f"{row['of']['gpu']}; {row['of']['measured']}")
        return Speed(self.entry)

    def floor(self) -> float:
        """The least milliseconds of `time` on an H200, by its measured rates (`blazeproto.cost`)."""
        return cost.floor_ms(*self.work(self.timed))

    def picture(self, *sizes: int, roles: tuple[str, ...] = ()) -> Turns:
        """The instructions of one CTA's warps on the machine. In a turn every warp makes one, unless it waits: an order, no time.

        sizes: default one tile, and the k of ``sizes``.  roles: names of the warps' parts, one a warp.
        """
        numbers, count = sizes or (*self.tile, *self.sizes[2:]), -(-self.threads // 32)
        machine, spans, going, turn = Machine(1), [list[Span]() for _ in range(count)], [*range(count)], 0
        stepper = machine.step(lambda: self._on(machine, self.operands(numbers, "cpu"), numbers))
        while going:
            moved = False
            for warp in [*going]:
                before, own = stepper.next(warp), spans[warp]
                stays = stepper.step(warp=warp).next(warp) is before
                moved |= not stays
                if stays and before.opcode in ("ret", "exit"):
                    going.remove(warp)
                    moved = True
                    continue
                what = "wait full" if stays else next((kind for begin, kind in KINDS if begin in before.opcode), "")
                if what and own and own[-1].what == what and turn - own[-1].end < NEAR:
                    own[-1] = replace(own[-1], end=turn + 1)
                elif what:
                    role = roles[warp] if roles else self.entry
                    own.append(Span(warp, role, what, turn, turn + 1, 1, 0))
            if not moved:
                stepper.step()  # something that is under way happens
            turn += 1
        begins = tuple((warp, 0, 0) for warp in range(count))
        return Turns(self.entry, 0, 1, tuple(span for own in spans for span in own), begins, unit="turns")

    def _launch(self, operands: dict[str, Tensor], numbers: tuple[int, ...]) -> None:
        given = {name: (x, x.data_ptr()) for name, x in operands.items()}
        function, grid, threads, smem = self._filled(given, numbers, torch.cuda.current_device())
        driver.launch(function, grid, threads, smem, torch.cuda.current_stream().cuda_stream)

    def _on(self, machine: Machine, operands: dict[str, Tensor], numbers: tuple[int, ...]) -> None:
        arrays = {name: hosted(x) for name, x in operands.items()}
        given = {name: (x, machine.address(x, name)) for name, x in arrays.items()}
        handle, grid, threads, smem = self._filled(given, numbers, device_of(machine))
        machine.launch(handle.kernel, grid, threads, smem, handle.parameters, handle.boxes, self.cluster)

    def _filled(self, given: dict[str, tuple[Any, int]], numbers: tuple[int, ...], device: int) -> tuple[Any, ...]:
        """The arguments of `driver.launch` but the stream. given: arrays and their addresses."""
        boxes = [dense_box(given[name][0].shape[::-1], box[::-1]) for name, box in self.boxes.items()]
        words = [name for name in given if name not in self.boxes]
        params = Params("", "", tuple(self.boxes), tuple(words), self.numbers)
        grid = self.tiles(numbers) * self.cluster
        grid = min(grid, num_sms(device) // self.cluster * self.cluster) if self.persistent else grid
        plan = Plan(self.kernel, params, boxes, numbers, grid=grid, device=device)
        return plan.fill([given[name][1] for name in self.boxes], [given[name][1] for name in words])


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """The folder of edited sources, for as long as the process lives."""
    return tempfile.TemporaryDirectory(prefix="ladder")
