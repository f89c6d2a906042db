"""Runs launches of several GPUs at once, each GPU's one after the other, as on a stream; the seed decides over all warps.

The GPUs reach each other's memory: `world.py` says what of it they see, and when.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ptxsim.cta import Cluster, Launch
from ptxsim.memory import Memory
from ptxsim.races import Races
from ptxsim.schedule import Report, Schedule
from ptxsim.world import World


def run_together(
    streams: Sequence[Sequence[tuple[Sequence[Any], Mapping[str, Any]]]],
    memory: Memory,
    seed: int = 0,
    resident: float = float("inf"),
    most: float = float("inf"),
) -> Report:
    """Run all to their end; one report of all.

    streams: of each GPU its launches, in order: arguments and options of `Launch`, behind its world.
    resident: clusters of a launch that run at once; others begin as these end, in order of their index.
    most: warp instructions of all.
    Raises what `run` raises.
    """
    races = Races(together=True)
    world = World(memory, races, len(streams))
    queues = [
        [
            Launch(world, *arguments, **options, gpu=gpu, name=f"GPU {gpu}, " + f"launch {n}, " * (len(stream) > 1))
            for n, (arguments, options) in enumerate(stream)
        ]
        for gpu, stream in enumerate(streams)
    ]
    names = (f"GPU {gpu}: {', '.join(one.entry.name for one in queue) or '-'}" for gpu, queue in enumerate(queues))
    report = Report("; ".join(names), seed)
    schedule = Together(world, races, queues, resident, random.Random(seed), report)
    schedule.finish(most)
    schedule.tell()
    report.ended = True
    return report


class Together(Schedule):
    """queues: launches of each GPU that have not ended; the first one runs. begun: CTAs of a launch."""

    def __init__(
        self,
        world: World,
        races: Races,
        queues: list[list[Launch]],
        resident: float,
        draw: random.Random,
        report: Report,
    ) -> None:
        super().__init__(world, [], draw, report)
        self.races, self.queues, self.resident, self.going = races, queues, resident, -1
        self.begun: dict[Launch, int] = dict.fromkeys((launch for queue in queues for launch in queue), 0)

    def _begin(self) -> None:
        if len(self.warps) == self.going:
            return
        for queue in self.queues:
            while queue and not self._runs(queue[0]):
                self._end(*queue[:2])
                queue.pop(0)
        self.going = len(self.warps)

    def _runs(self, launch: Launch) -> bool:
        """Clusters begin where there is room for them: whether there is one that has not ended."""
        running = len({warp.cta.cluster for warp in self.warps if warp.cta.launch is launch})
        while running < self.resident and self.begun[launch] < launch.count:
            self.clusters.append(Cluster(launch, self.begun[launch]))
            self.warps += self.clusters[-1].warps
            self.begun[launch] += launch.cluster
            running += 1
        return running > 0

    def _end(self, launch: Launch, following: Launch | None = None) -> None:
        """All GPUs see what a launch has done, and the next one on its GPU knows of it."""
        self._ended(launch)
        self.world.end(launch)
        known = self.races.end([warp for one in self.clusters if one.launch is launch for warp in one.warps])
        self.clusters = [one for one in self.clusters if one.launch is not launch]
        if following:
            following.known = known

    def who_is_where(self, what: str) -> str:
        left = ((launch, self.begun[launch]) for queue in self.queues for launch in queue[:1])
        more = [f"  {launch.name}CTAs from {begun} on: not begun" for launch, begun in left if begun < launch.count]
        return "\n".join([super().who_is_where(what), *more])
