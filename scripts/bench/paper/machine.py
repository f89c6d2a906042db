"""What measures: a Hopper GPU, or in the short form a CPU. Its rates, and times and bytes of calls on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.lab.times import Call, interleaved_ms
from scripts.bench import cpu
from scripts.bench.attention_tiles import host_peak_bytes
from scripts.bench.timing import GpuTimes, gpu_ms, kernel_times, peak_bytes

SIDE = {"cuda": 8192, "cpu": 512}  # of the square matrices whose product gives the rate of operations
COPIED = {"cuda": 1 << 30, "cpu": 1 << 23}  # bf16 numbers whose copy gives the rate of bytes


class Rates(NamedTuple):
    """Operations and bytes a second, of which floors are made: a multiplication and an addition are two operations, read and
    written bytes count together."""

    operations: float
    bytes: float

    def floor_ms(self, operations: float, least_bytes: float) -> float:
        """Milliseconds that a kernel needs at the least: for its operations or for its bytes, whichever takes longer."""
        return 1e3 * max(operations / self.operations, least_bytes / self.bytes)

    def layer_floor_ms(self, shape: Sizes) -> tuple[float, float]:
        """(forward, backward) milliseconds: the sum over a layer's kernels, combine without index lists as in `cost`."""

        def products(names: Sequence[str]) -> float:
            return sum(
                self.floor_ms(PRODUCTS[name].operations(shape), PRODUCTS[name].least_bytes(shape)) for name in names
            )

        combine = PRODUCTS["combine"].least_bytes(shape) - cost.ID_BYTES * shape.rows
        backward = self.floor_ms(0.0, combine - cost.SCORE_BYTES * shape.rows)
        return products(cost.FORWARD) + self.floor_ms(0.0, combine), products(cost.BACKWARD) + backward


@dataclass(frozen=True)
class Machine:
    """device: "cuda" or "cpu".  rounds: of which times are medians; on a CPU the quickest counts.  peers: the programs that are
    wanted beside ours."""

    device: str
    rounds: int
    rates: Rates
    peers: tuple[str, ...]

    def times(self, calls: Mapping[str, Call], together: Sequence[str] = ()) -> GpuTimes:
        """Milliseconds by name, as `gpu_ms` measures them, or by the clock; those of ``together`` are measured alike."""
        if self.device == "cuda":
            return gpu_ms(calls, [name for name in together if name in calls], self.rounds)
        return GpuTimes(cpu.measure(calls, self.rounds), dict.fromkeys(calls, "clock"), {})

    def kernels(self, calls: Mapping[str, Call]) -> GpuTimes:
        """Sums of kernel durations by name, for calls of which one is known not to be captured; on a CPU by the clock."""
        if self.device == "cuda":
            found = {name: each.total for name, each in kernel_times(calls, self.rounds).items()}
            return GpuTimes(found, dict.fromkeys(calls, "kernels"), {})
        return self.times(calls)

    def eager(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Milliseconds of eager calls by name, host time included."""
        return interleaved_ms(calls, self.rounds) if self.device == "cuda" else cpu.measure(calls, self.rounds)

    def peak_bytes(self, call: Call) -> int:
        return peak_bytes(call) if self.device == "cuda" else host_peak_bytes(call)


def measure_rates(device: str, rounds: int) -> dict[str, Any]:
    """A row: how fast this machine multiplies square bf16 matrices (cuBLAS on a GPU, random data), and how fast it copies."""
    a, b = (torch.randn(SIDE[device], SIDE[device], device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    source = torch.empty(COPIED[device], device=device, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"product": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    ms = Machine(device, rounds, Rates(1.0, 1.0), ()).times(calls).ms
    row = {"matrices": SIDE[device], "copied_bytes": source.nbytes}
    return row | {"operations": 2e3 * SIDE[device] ** 3 / ms["product"], "bytes": 2e3 * source.nbytes / ms["copy"]}
