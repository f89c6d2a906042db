"""What measures: a Hopper GPU, or in the short form a CPU. Times and bytes of calls on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blazeproto.lab.times import Call, interleaved_ms
from scripts.bench import cpu
from scripts.bench.attention_tiles import host_peak_bytes
from scripts.bench.timing import GpuTimes, gpu_ms, kernel_times, peak_bytes


@dataclass(frozen=True)
class Machine:
    """device: "cuda" or "cpu".  rounds: of which times are medians; on a CPU the quickest counts.  peers: the programs that are
    wanted beside ours."""

    device: str
    rounds: int
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
