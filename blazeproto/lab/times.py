"""Timing: GPU programs against each other, in turn (A B A B), so that clocks and temperature treat all alike; and one
alone, with a cold L2 cache."""

import math
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blazeproto import cost
from blazeproto.runtime import checks

Call = Callable[[], object]

ROUNDS = 20
WARMUPS = 5
LONG_MS = 60.0  # programs longer than this are timed over fewer rounds
LONG_ROUNDS = 8
BURST_MS = 1.0  # a timed interval holds enough calls to last about this long
HOLD_CYCLES = 2_000_000  # that the GPU is held, about a millisecond, while the host queues what is timed
COLD_ROUNDS, COLD_WARMUPS = 10, 3  # of a program alone
FLUSH_NUMBERS = 2**26  # fp32, read between two runs: five times an H200's L2 cache
MOST_FLUSHES = 128  # some ten milliseconds, in which the host queues a call
# T, d, n, E, K of models' layers; and of the package's kernels there the share of the floor's speed, in results/h200/tune.json.
MODELS = {
    "Qwen3-30B-A3B": (16384, 2048, 768, 128, 8),
    "Qwen3-Next": (16384, 2048, 512, 512, 10),
    "Mixtral 8x7B": (16384, 4096, 14336, 8, 2),
}
STORED = {
    "Qwen3-30B-A3B": {
        "up_forward": "90 %",
        "down_forward": "90 %",
        "down_backward_act": "70 %",
        "up_backward_act": "94 %",
    },
    "Qwen3-Next": {
        "up_forward": "77 %",
        "down_forward": "72 %",
        "down_backward_act": "58 %",
        "up_backward_act": "73 %",
    },
    "Mixtral 8x7B": {
        "up_forward": "85 %",
        "down_forward": "95 %",
        "down_backward_act": "80 %",
        "up_backward_act": "89 %",
    },
}


class Rotation:
    """Calls the members in turn: one callable over several sets of inputs, so that none stays in the L2 cache."""

    def __init__(self, members: Sequence[Call]) -> None:
        self.members = list(members)
        self.next = 0

    def __call__(self) -> object:
        member = self.members[self.next]
        self.next = (self.next + 1) % len(self.members)
        return member()

    def __len__(self) -> int:
        return len(self.members)


def elapsed_ms(call: Call, calls: int, *, queued: bool = False) -> float:
    """Milliseconds a call, over `calls` calls in a row from an idle GPU, by CUDA events.

    queued: the GPU is held until the host has queued them all. Otherwise the first launch would be timed too, and it
    takes 0.1 ms after the host has slept. The calls must not wait for the GPU.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    hold = HOLD_CYCLES
    while True:
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(hold)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        too_short = queued and start.query()  # the GPU went on before the host was through
        end.synchronize()
        if not too_short:
            return float(start.elapsed_time(end)) / calls
        hold *= 2


def interleaved_ms(
    calls: Mapping[str, Call], rounds: int = ROUNDS, warmups: int = WARMUPS, *, queued: bool = False
) -> dict[str, float]:
    """Median milliseconds a call, by name. queued: see `elapsed_ms`."""
    burst, plan = {}, {}
    for name, call in calls.items():
        elapsed_ms(call, max(1, warmups - 3), queued=queued)
        once = min(elapsed_ms(call, 1, queued=queued) for _ in range(3))
        members = len(call) if isinstance(call, Rotation) else 1
        burst[name] = members * max(1, min(10, math.ceil(BURST_MS / max(once, 1e-3) / members)))
        plan[name] = rounds if once < LONG_MS else min(rounds, LONG_ROUNDS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name, call in calls.items():
            if index < plan[name]:
                samples[name].append(elapsed_ms(call, burst[name], queued=queued))
    return {name: statistics.median(times) for name, times in samples.items()}


def cold_ms(call: Call, rounds: int = COLD_ROUNDS) -> float:
    """Median milliseconds of one call on the current GPU and stream, by CUDA events, with none of its inputs in the L2 cache.

    The GPU reads other memory while the host queues the call, so launches are not timed, and nothing in the cache need be
    written back first. The call must not wait for the GPU.
    """
    for _ in range(COLD_WARMUPS):
        call()
    other = torch.zeros(FLUSH_NUMBERS, dtype=torch.float32, device="cuda")
    samples: list[float] = []
    flushes = 2
    while len(samples) < rounds:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(flushes):
            other.sum()
        start.record()
        call()
        end.record()
        late = start.query()  # the GPU was through with the reading before the host with the call
        end.synchronize()
        if late and flushes < MOST_FLUSHES:
            flushes *= 2
        else:
            samples.append(float(start.elapsed_time(end)))
    return statistics.median(samples)


def wall_ms(call: Callable[[], object], rounds: int = COLD_ROUNDS) -> float:
    """Median milliseconds of one call by the host's clock, which is right on a CPU alone."""
    return 1e3 * statistics.median(timeit.repeat(call, number=1, repeat=COLD_WARMUPS + rounds)[COLD_WARMUPS:])


def gpu_here() -> str | None:
    """The name in `blazeproto.cost.GPUS` of the GPU that is here; None where it isn't there."""
    return cost.known_gpu(torch.cuda.get_device_name())


@dataclass(frozen=True, repr=False)
class Times:
    """Milliseconds of one call, by CUDA-graph replay: medians over rounds in turn.

    floor_ms: at the rates that `blazeproto.cost.GPUS` has of this GPU; None where it has none.
    share: of the floor's speed, 1 being as fast as can be.
    unedited_ms: of the package's own kernel, if it is edited.
    """

    product: str
    ms: float
    floor_ms: float | None
    unedited_ms: float | None = None

    @property
    def share(self) -> float | None:
        return None if self.floor_ms is None else self.floor_ms / self.ms

    def __repr__(self) -> str:
        line = f"{self.product}: {self.ms:.4f} ms"
        if self.floor_ms is not None:
            line += f", {self.share:.0%} of the floor's speed ({self.floor_ms:.4f} ms)"
        if self.unedited_ms is None:
            return line
        ratio = self.ms / self.unedited_ms
        return f"{line}; the unedited kernel {self.unedited_ms:.4f} ms: {ratio:.3f} times as long"


def score(bench: Any, model: str) -> Times:
    """See `blazeproto.lab.workbench.Workbench.score`. bench: of a product of `gemm.PRODUCTS`."""
    checks.one_of("product", bench.product, (*cost.FORWARD, *cost.BACKWARD, "combine"))
    checks.one_of("model", model, tuple(MODELS))
    if bench.lacking:
        raise RuntimeError(
            f"score: expected {bench.lacking}; check() needs none. Stored, not measured here: the package's kernel, "
            f"{STORED[model].get(bench.product, 'no share')} of the floor's speed on an H200, 24 November 2026"
        )
    large = type(bench)(
        bench.product,
        *MODELS[model],
        **{name: getattr(bench, name) for name in ("activation", "routing", "seed", "config", "precision")},
    )
    large.edited = bench.edited
    if not (verdict := large.check()):
        raise ValueError(f"score: expected a kernel that is right, got {verdict.summary}")
    return replace(large.time(), product=f"{bench.product}, {model}")
