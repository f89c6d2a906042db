"""Ways to time programs against each other: eagerly, by CUDA-graph replay, as a sum of kernel durations; on a CPU by the clock.

Every function takes several callables by name and runs them in turn (A B A B), so that clocks and temperature treat
all alike, and returns medians by name. Eager time below a millisecond is host time; the other two leave the host out.
"""

import gc
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from blazeproto.autograd import private
from blazeproto.lab.times import HOLD_CYCLES, ROUNDS, Call, Rotation, interleaved_ms

if TYPE_CHECKING:
    from scripts.lm.ranks import Ranks

Pool = Any  # what torch.cuda.graph_pool_handle gives

HOST_CALLS = 9  # their launches fit into a stream's queue, or the host would wait
MOST_HOLD_CYCLES = 64 * HOLD_CYCLES  # for a call that waits for the GPU no hold is long enough
MARKER = "spin_kernel"  # what torch.cuda._sleep launches
ROUND_MS = 20.0  # a program's part of a round of `long_bursts` holds enough calls to last about this long
MOST_CALLS = 12


def host_ms(call: Call, rounds: int = ROUNDS, calls: int = HOST_CALLS - 1) -> float:
    """Milliseconds the host spends in a call: the median over rounds of ``calls`` in a row, none of which waits for a GPU.

    One more before them is not counted: how long it takes depends on how long the host has slept while the GPU was busy.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    samples = []
    for _ in range(rounds):
        wait()
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e3 * (time.perf_counter() - begin) / calls)
    wait()
    return statistics.median(samples)


def quickest_ms(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each call's quickest round, by the clock: on a CPU other work only adds time. They run in turns."""
    samples = [{name: host_ms(call, 1, calls=1) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(sample[name] for sample in samples) for name in calls}


def tensors_in(result: object) -> list[torch.Tensor]:
    """The tensors of a call's result, tuples flattened."""
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [tensor for item in result for tensor in tensors_in(item)] if isinstance(result, tuple) else []


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| in fp32, or in float64 if one is, a slice at a time; NaN where either is."""
    difference = norm = 0.0
    a, b = torch.atleast_1d(a, b)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    step = max(1, (1 << 27) // max(1, b[:1].numel()))
    for x, y in zip(a.split(step), b.split(step), strict=True):
        difference += float((x.to(wide) - y.to(wide)).square().sum())
        norm += float(y.to(wide).square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def capture(call: Call, pool: Pool) -> torch.cuda.CUDAGraph:
    """A warmed-up call as a CUDA graph, shown to compute what the call does: its results are poisoned, replayed and compared.

    Raises what the capture raises (at a host synchronisation, say), or RuntimeError where a replay gives other results.
    Graphs that share a pool share memory: they must not run at the same time, and their results are not read afterwards.
    """
    # A leaf's AccumulateGrad node that lives on after a backward is used again, with its stream: so what runs before the capture
    # runs on the stream that captures. That is the caller's, where it is not the default one, which can't be captured.
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = tensors_in(call())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a capture can't return cached blocks to make room
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            results = tensors_in(call())
    except Exception:
        # torch's random numbers wait for the end of a capture that failed: they take the end of the next one.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        raise
    for result in results:
        result.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    differences = [relative_difference(r, e) for r, e in zip(results, expected, strict=True)]
    if wrong := [each for each in differences if not each < 1e-2]:  # NaN too
        raise RuntimeError(f"replay differs from the eager call by {wrong[0]:.3g}")
    return graph


def captured(call: Call, pool: Pool) -> Rotation:
    """Replays of a call, or of each member of a rotation, as graphs."""
    members = call.members if isinstance(call, Rotation) else [call]
    return Rotation([capture(member, pool).replay for member in members])


class KernelTime(NamedTuple):
    """Milliseconds that a call's kernels, copies and fills take."""

    busy: float  # in which at least one of them runs
    total: float  # their durations' sum: more than busy where one begins early (programmatic dependent launch)
    rounds: tuple[float, ...] = ()  # busy of each round, of which ``busy`` is the median


def device_spans(call: Call) -> list[tuple[str, float, float]]:
    """The kernels, copies and fills that a call launches, from the profiler: name, begin and end in microseconds.

    Our layer runs as it does without a profiler. Told of one, it would keep H for whoever looks, instead of writing dH over it,
    and times would not be of the way through it that peaks are of.
    """
    device = torch.autograd.DeviceType.CUDA
    torch.cuda.synchronize()
    untold = mock.patch.object(private, "_profiler_enabled", bool)  # False
    with untold, torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return [(e.name, e.time_range.start, e.time_range.end) for e in recorded.events() if e.device_type == device]


def kernel_times(
    calls: Mapping[str, Call], rounds: int = ROUNDS, *, burst: Mapping[str, int] | None = None, queued: bool = False
) -> dict[str, KernelTime]:
    """Median over the rounds of a call's kernel times, by name, from the profiler.

    burst: how many calls of a name make up its part of a round, which is then their mean; 1 for a name that is left out.
    queued: the GPU is held until the host has queued a call, so that its kernels follow each other without a gap.
    """
    burst = burst or {}
    holds = dict.fromkeys(calls, HOLD_CYCLES)

    def run(name: str) -> None:
        if queued:
            torch.cuda.synchronize()
            torch.cuda._sleep(holds[name])
            (held := torch.cuda.Event()).record()
        calls[name]()
        if queued and held.query():  # the GPU went on before the host was through
            holds[name] = min(2 * holds[name], MOST_HOLD_CYCLES)
        torch.cuda._sleep(1)  # a marker ends each call

    for name in [name for name in calls for _ in range(6 if queued else 0)]:
        run(name)
    holds = {name: 2 * hold for name, hold in holds.items()}  # the profiler slows the host down
    order = [name for _ in range(rounds) for name in calls for _ in range(burst.get(name, 1))]
    spans = device_spans(lambda: [*map(run, order)])
    times = split_by_marker(spans)[:-1]
    if queued:
        times = times[1::2]  # before each stands what lies between a marker and a hold: nothing
    if len(times) != len(order):
        raise RuntimeError(f"profiler: expected {len(order)} marked calls, got {len(times)}")
    return {
        name: _median_of_rounds([t for n, t in zip(order, times, strict=True) if n == name], rounds) for name in calls
    }


def long_bursts(calls: Mapping[str, Call], rounds: int) -> dict[str, KernelTime]:
    """`kernel_times`, queued, of parts of a round that last about `ROUND_MS`; a rotation's members are called equally often."""
    once = kernel_times(calls, 1)
    burst = {}
    for name, call in calls.items():
        wanted = min(MOST_CALLS, math.ceil(ROUND_MS / max(once[name].busy, 1e-3)))
        members = len(call) if isinstance(call, Rotation) else 1
        burst[name] = members * math.ceil(wanted / members)
    return kernel_times(calls, rounds, burst=burst, queued=True)


def split_by_marker(spans: Sequence[tuple[str, float, float]]) -> list[KernelTime]:
    """The kernel times before, between and after the markers, of (name, begin, end) in microseconds on one stream."""
    microseconds, last = [(0.0, 0.0)], -math.inf
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        if MARKER in name:
            microseconds.append((0.0, 0.0))
        else:
            busy, total = microseconds[-1]
            microseconds[-1] = (busy + max(0.0, end - max(begin, last)), total + end - begin)
        last = max(last, end)
    return [KernelTime(busy / 1e3, total / 1e3) for busy, total in microseconds]


def _median_of_rounds(times: Sequence[KernelTime], rounds: int) -> KernelTime:
    each = len(times) // rounds
    busy, total = (
        [statistics.fmean(part[start : start + each]) for start in range(0, len(part), each)]
        for part in ([time.busy for time in times], [time.total for time in times])
    )
    return KernelTime(statistics.median(busy), statistics.median(total), tuple(busy))


@dataclass(frozen=True)
class GpuTimes:
    """GPU milliseconds by name, and how each was taken: "graph", "kernels" or "events"."""

    ms: dict[str, float]
    method: dict[str, str]
    refused: dict[str, str]  # why a program is not timed as a graph


# ------------------------------------------------------------------------------------------------------------ memory


class SavedBytes:
    """Counts the bytes that autograd keeps for backward, each storage once, without some tensors': ``with counter.hooks:``."""

    def __init__(self, not_counted: Iterable[torch.Tensor]) -> None:
        self.excluded = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
        self.storages: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def saved_bytes(call: Call, not_counted: Iterable[torch.Tensor]) -> int:
    """`SavedBytes` of a call."""
    with (saved := SavedBytes(not_counted)).hooks:
        result = call()
    del result
    return saved.total


def peak_bytes(call: Call) -> int:
    """Most bytes allocated during a call over what was there before it."""
    gc.collect()  # else garbage that the call happens to free counts as there before it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)


def host_peak_bytes(call: Call) -> int:
    """`peak_bytes` on a CPU, by the profiler: the most that was allocated at a time during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most


# ----------------------------------------------------------------------------------------------------------- machines

Row = dict[str, Any]
PARTS = {"fwd": "forward", "fwdbwd": "forward_backward"}  # of a layer's step: in results, and of a program


def alone() -> "Ranks":
    """This process, without others."""
    from scripts.lm.ranks import HOST, Ranks  # not above: `compare_worker` takes the package of another checkout

    return Ranks(HOST)


@dataclass(frozen=True)
class Machine:
    """device: "cuda" or "cpu".  rounds: of which times are medians; on a CPU the quickest counts.  peers: the programs that are
    wanted beside ours.  ranks: the processes that measure together."""

    device: str
    rounds: int
    peers: tuple[str, ...] = ()
    ranks: "Ranks" = field(default_factory=alone)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value of the rank that has the largest."""
        made = torch.tensor(values, dtype=torch.float64, device=self.ranks.device)
        if self.ranks.size > 1:
            dist.all_reduce(made, dist.ReduceOp.MAX)
        return made.tolist()

    def times(
        self, calls: Mapping[str, Call], together: Sequence[str] = (), *, graphs: bool = True, gaps: bool = False
    ) -> GpuTimes:
        """Milliseconds by name, by graph replay where a program captures, else by kernel durations; on a CPU by the clock.

        together: programs that are measured alike: if one of them can't be captured, none is timed as a graph.  graphs: whether
        graphs are tried at all.  gaps: what is not timed as a graph is timed from its first kernel to its last, by events, the
        GPU being held until all is queued: with the gaps between kernels, as a graph has them.
        """
        if not self.on_gpu:
            return GpuTimes(quickest_ms(calls, self.rounds), dict.fromkeys(calls, "clock"), {})
        pool = torch.cuda.graph_pool_handle()
        replays: dict[str, Call] = {}
        refused: dict[str, str] = {}
        for name, call in calls.items() if graphs else ():
            try:
                replays[name] = captured(call, pool)
            except Exception as error:  # noqa: BLE001  whatever a peer does under capture, the others go on
                refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
                pool = torch.cuda.graph_pool_handle()  # the old one records for ever
        if refused.keys() & {*together}:
            replays.clear()
        ms = interleaved_ms(replays, self.rounds, warmups=3, queued=True)
        replays.clear()
        rest = {name: call for name, call in calls.items() if name not in ms}
        method = dict.fromkeys(ms, "graph") | dict.fromkeys(rest, "events" if gaps else "kernels")
        if rest and gaps:
            ms |= interleaved_ms(rest, self.rounds, queued=True)
        elif rest:
            ms |= {name: time.total for name, time in kernel_times(rest, self.rounds).items()}
        return GpuTimes(ms, method, refused)

    def eager(self, calls: Mapping[str, Call], warmups: int = 5, *, queued: bool = False) -> dict[str, float]:
        """Milliseconds of eager calls by name, host time included, or with the host queueing them beforehand (``queued``)."""
        if self.on_gpu:
            return interleaved_ms(calls, self.rounds, warmups, queued=queued)
        return quickest_ms(calls, self.rounds)

    def peak_bytes(self, call: Call) -> int:
        return peak_bytes(call) if self.on_gpu else host_peak_bytes(call)

    def kernel_figures(self, calls: Mapping[str, Call], part: str) -> dict[str, Row]:
        """Figures of a part by program, of kernel durations: an overlap is counted once; the GPU is held until the host has
        queued a call. ``_sum_ms``: of the durations; ``_rounds_ms``: of each round."""
        if self.on_gpu:
            times = long_bursts(calls, self.rounds)
        else:
            times = {name: KernelTime(ms, ms, (ms,)) for name, ms in quickest_ms(calls, self.rounds).items()}
        return {
            name: {
                f"{part}_ms": round(time.busy, 4),
                f"{part}_sum_ms": round(time.total, 4),
                f"{part}_rounds_ms": [round(ms, 4) for ms in time.rounds],
            }
            for name, time in times.items()
        }


def rotations(programs: Mapping[str, Sequence[Any]], step: str) -> dict[str, Call]:
    """``step`` of each program by name, on its sets of inputs in turn."""
    return {name: Rotation([getattr(program, step) for program in each]) for name, each in programs.items()}


def part_times(programs: Mapping[str, Sequence[Any]], machine: Machine) -> Row:
    """Kernel figures of a forward, and of a forward and backward, as fields of a row: ``ours_fwd_ms``."""
    row: Row = {}
    for part, step in PARTS.items():
        for name, figures in machine.kernel_figures(rotations(programs, step), part).items():
            row |= {f"{name}_{field}": value for field, value in figures.items()}
    return row


def step_times(
    programs: Mapping[str, Sequence[Any]],
    machine: Machine,
    together: Sequence[str],
    prefix: str = "",
    *,
    graphs: bool = True,
) -> tuple[dict[str, Row], dict[str, str]]:
    """GPU times of forward, and forward and backward, by program, and how each was taken; why programs were not captured.

    together: those that are timed alike.  prefix: of the figures' names.  graphs: whether graphs are tried at all.
    """
    forward, both = (machine.times(rotations(programs, step), together, graphs=graphs) for step in PARTS.values())
    found = {
        name: {
            f"{prefix}fwd_ms": round(forward.ms[name], 4),
            f"{prefix}fwdbwd_ms": round(both.ms[name], 4),
            f"{prefix}method": f"{forward.method[name]}/{both.method[name]}",
        }
        for name in programs
    }
    return found, forward.refused | both.refused
