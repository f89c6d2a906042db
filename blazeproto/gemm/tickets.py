"""Counters by which the CTAs of a launch share its tiles (cuda/tiles.cuh: tickets)."""

import itertools
from functools import cache

from blazeproto.runtime import optional, target

EAGER, CAPTURED = 1 << 16, 1 << 18  # counters for either kind of launch
COUNTERS = EAGER + CAPTURED
_BYTES = 4  # of a counter


class TicketCounters:
    """The counters of one device (a CUDA ordinal): memory is zeroed once, and every launch leaves its counter at zero.

    Launches take them in turn, and no queue is longer than the list of counters. A launch that is captured into a CUDA graph
    has one that eager launches don't take, since the graph may be replayed beside any of them.
    """

    def __init__(self, device: int) -> None:
        cuda = optional.cupy().cuda
        runtime = cuda.runtime
        self._is_capturing = runtime.streamIsCapturing
        with cuda.Device(device):
            self.address = runtime.malloc(_BYTES * COUNTERS)
            runtime.memset(self.address, 0, _BYTES * COUNTERS)
            runtime.deviceSynchronize()
        self._eager, self._captured = (
            itertools.count(),
            itertools.count(),
        )  # a step of either is one action of the interpreter

    def take(self, stream: int) -> int:
        """The address of a counter for a launch on ``stream``, a cudaStream_t."""
        captured = self._is_capturing(stream)
        index = EAGER + next(self._captured) % CAPTURED if captured else next(self._eager) % EAGER
        return self.address + _BYTES * index


class TargetCounters:
    """On a target every launch has a new one."""

    def take(self, stream: int) -> int:
        """Its address."""
        machine = target.here()
        return machine.address(machine.zeros((1,), "int32"))


@cache
def counters(device: int) -> TicketCounters | TargetCounters:
    return TargetCounters() if target.is_target(device) else TicketCounters(device)
