"""A whole layer by each backend, beside transformers' Qwen3-MoE block with its grouped_mm.

    python -m scripts.bench.ampere                     # six layers -> results/h200/ampere.json on an H200
    python -m scripts.bench.ampere --configs 1,4
    python -m scripts.bench.ampere --cpu               # a small layer on the torch backend, which writes no file

All in bf16, router weights too, training mode; the same weights and random tokens, x requires a gradient. All run in one process,
in turn (A B A B), five rounds. Times are the durations of the kernels of a forward and backward, by the profiler; peaks are of
the same step. The backend "ampere" runs here from PTX of compute_80. transformers' block has no auxiliary loss, ours has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.bench.common import MIB
from scripts.bench.layer import SMALL, inputs_of
from scripts.bench.models.programs import BUILDS
from scripts.bench.peers import LayerInputs, modules
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, rotations

LAYERS = (
    Sizes(16384, 2048, 768, 128, 8),
    Sizes(16384, 2048, 1024, 64, 8),
    Sizes(16384, 2880, 2880, 32, 4),
    Sizes(16384, 4096, 14336, 8, 2),
    Sizes(4096, 2048, 768, 128, 8),
    Sizes(8192, 1024, 512, 64, 4),
)
LEAST_OF_HOPPER = 0.55  # of its speed
LEAST_OF_GROUPED = (1.5, 1.4, 1.0, 0.72)  # of the block's, by layer, the first four
MOST_PEAK = 1.05  # over Hopper's
OF_TORCH = (LAYERS[0], *LAYERS[4:])  # layers whose time on the torch backend has a bound
MOST_OF_BLOCK = 1.05  # times the block's time


@dataclass(frozen=True)
class Step:
    """A forward and backward of a program."""

    forward: Callable[[], Tensor]
    x: Tensor
    d_out: Tensor
    clear: Callable[[], None]

    def forward_backward(self) -> Tensor:
        self.clear()
        out = self.forward()
        out.backward(self.d_out)
        return out


def of_backend(shape: Sizes, inputs: LayerInputs, backend: str) -> modules.ModuleProgram:
    """Our layer on a backend."""
    layer = modules.moe(shape, inputs, "topk_softmax", aux_loss=modules.AUX_LOSS)
    layer.options = replace(layer.options, backend=backend)
    return modules.program_of(layer, inputs.x, inputs.grad_output)


def of_transformers(shape: Sizes, inputs: LayerInputs) -> Step:
    """The block of Qwen3-MoE, as its models call it."""
    program = BUILDS["grouped_mm"](shape, inputs)

    def forward() -> Tensor:
        made = program.module(inputs.x[None])
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out.view(inputs.x.shape)

    return Step(forward, inputs.x, inputs.grad_output, program.clear)


def measure(shape: Sizes, machine: Machine) -> Row:
    """One row of the results."""
    inputs = inputs_of(shape, machine)[:1]
    backends = ("ampere", "hopper", "torch") if machine.on_gpu else ("torch",)
    programs: dict[str, list[Any]] = {name: [of_backend(shape, one, name) for one in inputs] for name in backends}
    programs["grouped_mm"] = [of_transformers(shape, one) for one in inputs]
    row: Row = {}
    for name, (program,) in programs.items():
        program.forward_backward()
        row[f"{name}_peak_MiB"] = round(machine.peak_bytes(program.forward_backward) / MIB, 1)
        program.clear()
    found = machine.times(rotations(programs, "forward_backward"), graphs=False)
    return row | {f"{name}_ms": round(ms, 4) for name, ms in found.ms.items()}


def bounds(record: Row) -> list[tuple[str, bool]]:
    """The bounds of the results, in words, and whether they hold."""
    found = []
    for row in record["rows"]:
        shape = Sizes(*row["cfg"])
        if "hopper_ms" not in row or shape not in LAYERS:
            continue
        if shape in OF_TORCH:
            times = row["torch_ms"] / row["grouped_mm_ms"]
            said = f"{shape}: torch takes {times:.3f} of the block's time, at most {MOST_OF_BLOCK}"
            found.append((said, times <= MOST_OF_BLOCK))
        if shape not in LAYERS[: len(LEAST_OF_GROUPED)]:
            continue
        of_hopper, grouped = row["hopper_ms"] / row["ampere_ms"], row["grouped_mm_ms"] / row["ampere_ms"]
        least, peak = LEAST_OF_GROUPED[LAYERS.index(shape)], row["ampere_peak_MiB"] / row["hopper_peak_MiB"]
        found += [
            (f"{shape}: {of_hopper:.3f} of hopper's speed, at least {LEAST_OF_HOPPER}", of_hopper >= LEAST_OF_HOPPER),
            (f"{shape}: {grouped:.2f} of grouped_mm's speed, at least {least}", grouped >= least),
            (f"{shape}: peak {peak:.3f} of hopper's, at most {MOST_PEAK}", peak <= MOST_PEAK),
        ]
    return found


BENCH = Bench("ampere", __doc__, {"layers": Item(measure, LAYERS, (SMALL,), rounds=5)}, bounds=bounds)


if __name__ == "__main__":
    run(BENCH)
