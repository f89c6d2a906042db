"""Ways to time GPU programs against each other: eagerly, by CUDA-graph replay, and as a sum of kernel durations.

Every function takes several callables by name and runs them in turn (A B A B), so that clocks and temperature treat
all alike, and returns medians by name. Eager time below a millisecond is host time; the other two leave the host out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]
Pool = Any  # what torch.cuda.graph_pool_handle gives

ROUNDS = 20
WARMUPS = 5
LONG_MS = 60.0  # programs longer than this are timed over fewer rounds
LONG_ROUNDS = 8
HOST_CALLS = 9  # their launches fit into a stream's queue, or the host would wait
BURST_MS = 1.0  # a timed interval holds enough calls to last about this long
HOLD_CYCLES = 2_000_000  # that the GPU is held, about a millisecond, while the host queues what is timed


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


def host_ms(call: Call, rounds: int = ROUNDS) -> float:
    """Milliseconds the host spends in one call of HOST_CALLS in a row, none of which it waits for.

    The first of them is not counted: how long it takes depends on how long the host has slept while the GPU was busy.
    """
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        call()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS - 1):
            call()
        samples.append(1e3 * (time.perf_counter() - begin) / (HOST_CALLS - 1))
    torch.cuda.synchronize()
    return statistics.median(samples)


def tensors_in(result: object) -> list[torch.Tensor]:
    """The tensors of a call's result, tuples flattened."""
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [tensor for item in result for tensor in tensors_in(item)] if isinstance(result, tuple) else []


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| in fp32, a slice at a time; NaN where either is."""
    difference = norm = 0.0
    step = max(1, (1 << 27) // max(1, b[0].numel()))
    for x, y in zip(a.split(step), b.split(step), strict=True):
        difference += float((x.float() - y.float()).square().sum())
        norm += float(y.float().square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def capture(call: Call, pool: Pool) -> torch.cuda.CUDAGraph:
    """A warmed-up call as a CUDA graph, shown to compute what the call does: its results are poisoned, replayed and compared.

    Raises what the capture raises (at a host synchronisation, say), or RuntimeError where a replay gives other results.
    Graphs that share a pool share memory: they must not run at the same time, and nobody reads their results afterwards.
    """
    expected = tensors_in(call())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a capture can't return cached blocks to make room
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = tensors_in(call())
    for result in results:
        result.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    worst = max((relative_difference(r, e) for r, e in zip(results, expected, strict=True)), key=_nan_is_largest)
    if not worst < 1e-2:
        raise RuntimeError(f"replay differs from the eager call by {worst:.3g}")
    return graph


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


def captured(call: Call, pool: Pool) -> Rotation:
    """Replays of a call, or of each member of a rotation, as graphs."""
    members = call.members if isinstance(call, Rotation) else [call]
    return Rotation([capture(member, pool).replay for member in members])


def kernel_ms(calls: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, float]:
    """Median over the rounds of the sum of a call's kernel, copy and fill durations in ms, by name, from the profiler.

    A marker kernel ends each call; on the one stream events sort into calls by their start.
    """
    marker = "spin_kernel"
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            for call in calls.values():
                call()
                torch.cuda._sleep(1)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    events = sorted((e for e in profile.events() if e.device_type == device), key=lambda e: e.time_range.start)
    sums = [0.0]
    for event in events:
        if marker in event.name:
            sums.append(0.0)
        else:
            sums[-1] += event.time_range.elapsed_us() / 1e3
    if len(sums) != rounds * len(calls) + 1:
        raise RuntimeError(f"profiler: expected {rounds * len(calls)} marked calls, got {len(sums) - 1}")
    return {name: statistics.median(sums[index : -1 : len(calls)]) for index, name in enumerate(calls)}


@dataclass(frozen=True)
class GpuTimes:
    """GPU milliseconds by name, and how each was taken: "graph" or "kernels"."""

    ms: dict[str, float]
    method: dict[str, str]
    refused: dict[str, str]  # why a program is not timed as a graph


def gpu_ms(calls: Mapping[str, Call], must_agree: Sequence[str], rounds: int = ROUNDS) -> GpuTimes:
    """GPU time by graph replay where a program captures, else by kernel durations.

    If one of `must_agree` can't be captured, none is timed as a graph: both sides of a ratio get the same method.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call, pool)
        except Exception as error:  # noqa: BLE001  whatever a peer does under capture, the others go on
            refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
    if any(name in refused for name in must_agree):
        graphs.clear()
    ms = interleaved_ms(graphs, rounds, warmups=3, queued=True)
    method = {name: "graph" if name in ms else "kernels" for name in calls}
    graphs.clear()
    rest = {name: call for name, call in calls.items() if name not in ms}
    if rest:
        ms |= kernel_ms(rest, rounds)
    return GpuTimes(ms, method, refused)


# ------------------------------------------------------------------------------------------------------------ memory


def saved_bytes(call: Call, not_counted: Sequence[torch.Tensor]) -> int:
    """Bytes of storage that a call's autograd graph keeps, each storage once, the given tensors' left out."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.data_ptr() not in excluded:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    total = sum(storages.values())
    del result
    return total


def peak_bytes(call: Call) -> int:
    """Most bytes allocated during a call over what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)
