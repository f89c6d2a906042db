"""One process of several that run scripts/train_lm.py together, started by `test_ranks.py`: run after run in one start."""

import os
import resource
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Run(NamedTuple):
    """options: of the command line.  stop: the number of steps after which the last rank alone hears a Ctrl-C, or 0.
    code: what it ends with, on all ranks.  damaged: a file of which a bit is flipped before.  full: the number of steps after
    which the last rank's disk alone is full, or 0."""

    options: list[str]
    stop: int = 0
    code: int = 0
    damaged: Path | None = None
    full: int = 0


def run_rank(rank: int, ranks: int, place: str, runs: list[Run], bench: Path | None) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(place, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    from scripts import train_lm
    from scripts.bench import distributed, running

    train_lm.SAMPLE_BYTES = 10
    train_step = train_lm.Trainer.train_step
    for run in runs:
        _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def with_event(trainer: Any, stop: int = run.stop, full: int = run.full, hard: int = hard) -> Any:
            if stop and rank == ranks - 1 and trainer.step == stop - 1:
                signal.raise_signal(signal.SIGINT)
            if full and rank == ranks - 1 and trainer.step == full - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            return train_step(trainer)

        if run.damaged and rank == 0:
            content = bytearray(run.damaged.read_bytes())
            content[len(content) // 2] ^= 4
            run.damaged.write_bytes(content)
        train_lm.Trainer.train_step = with_event  # type: ignore[method-assign]
        assert train_lm.main(run.options) == run.code, run
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if bench:
        train_lm.Trainer.train_step = train_step  # type: ignore[method-assign]
        data = runs[0].options[runs[0].options.index("--data") + 1]
        distributed.SMALL = replace(distributed.SMALL, data=data)
        running.run(distributed.BENCH, ["--cpu", "--modes", "fsdp", "--out", str(bench.parent)])
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive
