"""The language model on several GPUs: throughput a GPU over one GPU's, and how far losses part from one GPU's.

    torchrun --nproc-per-node 2 -m scripts.bench.distributed             # -> results/h200/distributed.json, named by the GPU
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --resume    # what that file lacks of so many GPUs
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --quick     # small, on CPUs too -> distributed-quick.json
    python -m scripts.bench.distributed --quick                          # the same with one rank

Any number of GPUs: rows of other numbers, and what else is in the file, stay. The file is written after every row.

weak_scaling: an 8-layer GPT (d = 1536, n = 512, E = 64, K = 4), 16 x 1024 tokens a GPU, AdamW, bf16; FSDP2 keeps gathered
weights until backward (train_lm --no-reshard), 2.4 GiB in bf16. tokens_per_s_per_gpu is
that of the mode on all GPUs, efficiency its ratio to one GPU's under autocast, which every rank measures for itself: steps of
both in turn (A B A B), the host waiting for the GPU before and after some steps, medians of rounds, the slowest rank's. losses:
the Hopper preset without dropout at learning rate 3e-4, every step's loss of the mode and of one GPU with the same global
batch; largest_difference is the largest relative one of the smoothed losses (`scripts.lm.compare_backends`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.common import (
    RESULTS,
    begun,
    bench_parser,
    folder_of,
    gpu_name,
    read_json,
    settled,
    sizes_of_run,
    stamped,
    write_json,
)
from scripts.bench.identity import earlier
from scripts.command import need_hopper, refuse, some_of
from scripts.lm import sharding
from scripts.lm.compare_backends import largest_difference
from scripts.lm.ranks import Ranks, joined
from scripts.lm.settings import PARALLEL, PRESETS, Config
from scripts.train_lm import Trainer

Row = dict[str, Any]
Asked = tuple[str, str]  # a list of the results file, and a mode

SCALING = Config(
    layers=8,
    d_model=1536,
    heads=12,
    context=1024,
    d_expert=512,
    num_experts=64,
    top_k=4,
    bf16=True,
    batch=16,
    lr=3e-4,
    reshard=False,
)
LOSSES = replace(PRESETS["hopper"], dropout=0.0, lr=3e-4, steps=200)
SMALL = Config(layers=2, d_model=32, heads=2, context=32, d_expert=16, num_experts=8, batch=8, steps=10)
STEPS = 10  # in a row, between two readings of the clock
TIMEOUT = 600  # seconds that a rank waits for another


def trainer(config: Config, ranks: Ranks, mode: str) -> Trainer:
    """A run that leaves no file."""
    return Trainer(replace(config, parallel=mode), Path(tempfile.gettempdir()) / "no-run", ranks)


def seconds_of(trainer: Trainer, steps: int) -> float:
    """The time of one step."""
    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    wait()
    return (time.perf_counter() - begin) / steps


def weak_scaling(mode: str, config: Config, ranks: Ranks, rounds: int, steps: int) -> Row:
    """A row of ``weak_scaling``. config: its batch is one GPU's."""
    whole = replace(config, batch=config.batch * ranks.size)
    programs = {"alone": trainer(config, Ranks(ranks.device), "none"), mode: trainer(whole, ranks, mode)}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds + 1):  # the first warms up
        for name, program in programs.items():
            taken[name].append(seconds_of(program, steps))
    slowest = torch.tensor([statistics.median(seconds[1:]) for seconds in taken.values()], dtype=torch.float64)
    if ranks.size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    alone, several = (config.batch * config.context / seconds for seconds in slowest.tolist())
    speeds = {"tokens_per_s_per_gpu": round(several, 1), "tokens_per_s_alone": round(alone, 1)}
    sizes = sizes_of_run(config, config.batch, ranks.size if "ep" in mode else 1)
    return {"mode": mode, "gpus": ranks.size, **sizes, **speeds, "efficiency": round(several / alone, 4)}


def losses_of(mode: str, config: Config, ranks: Ranks) -> list[float]:
    """Every step's loss."""
    program = trainer(config, ranks, mode)
    return torch.stack([program.train_step()[0] for _ in range(config.steps)]).tolist()


@cache
def losses_alone(config: Config, device: torch.device) -> list[float]:
    """One GPU's, with which all modes are compared."""
    return losses_of("none", config, Ranks(device))


def losses(mode: str, config: Config, ranks: Ranks) -> Row:
    """A row of ``losses``."""
    alone = losses_alone(config, ranks.device)
    difference, step = largest_difference(losses_of(mode, config, ranks), alone)
    return {
        "mode": mode,
        "gpus": ranks.size,
        **sizes_of_run(config, config.batch // ranks.size, ranks.size if "ep" in mode else 1),
        "largest_difference": round(difference, 6),
        "step": step,
        "steps": config.steps,
    }


MEASURES: dict[str, Callable[..., Row]] = {"weak_scaling": weak_scaling, "losses": losses}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("distributed", __doc__, quick="small models, a few steps", resume=True)
    for name, modes in {"scaling": "fsdp,ep", "losses": "fsdp,ep"}.items():
        what = f"some of {', '.join(PARALLEL[1:])}; or none [default {modes}]"
        parser.add_argument(f"--{name}", type=some_of(PARALLEL), default=modes.split(","), metavar="MODES", help=what)
    parser.add_argument("--device", help="cpu or cuda [default cuda where there is one, else cpu]")
    return settled(parser.parse_args(words), "distributed", rounds=7, quick_rounds=2)


def results_file() -> Path:
    """By the GPU: results/h200/distributed.json."""
    return RESULTS.parent / folder_of(gpu_name()) / "distributed.json"


def is_of(row: Row, mode: str, gpus: int) -> bool:
    return bool(row["mode"] == mode and row["gpus"] == gpus)


def lacking(record: dict[str, Any], asked: Iterable[Asked], gpus: int) -> list[Asked]:
    """What the record has no row of, made by today's kernels and this benchmark."""
    rows = {
        (name, row["mode"])
        for name in MEASURES
        for row in record.get(name, ())
        if row["gpus"] == gpus and not earlier(row)
    }
    return [each for each in asked if each not in rows]


def in_time(asked: list[Asked], seconds: float, ranks: Ranks) -> Iterator[Asked]:
    """Those that can begin in ``seconds`` by rank 0's clock, the GPU's memory being freed after each."""
    begin = time.monotonic()
    for number, each in enumerate(asked):
        if ranks.told(time.monotonic() - begin > seconds):
            if ranks.first:
                print("skipped for time:", *(" ".join(left) for left in asked[number:]), sep="\n  ")
            return
        yield each
        gc.collect()
        torch.cuda.empty_cache()


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if not options.quick:
        need_hopper()
    scaling, config, steps = (SMALL, SMALL, 2) if options.quick else (SCALING, LOSSES, STEPS)
    modes = {"weak_scaling": options.scaling, "losses": options.losses}
    asked = [(name, mode) for name, some in modes.items() for mode in some if mode != "none"]
    with joined(options.device, TIMEOUT) as ranks:
        try:
            for _, mode in asked:
                sharding.check(replace(config, parallel=mode), ranks)
        except ValueError as error:
            refuse(f"{error}; nothing was run")
        out = options.out or results_file()
        record = read_json(out) if ranks.first and out.exists() else {}
        if options.resume:
            asked = ranks.of_first(lambda: lacking(record, asked, ranks.size))
        if ranks.first:
            record |= {name: value for name, value in begun("distributed", __doc__).items() if name != "rows"}
        given = {"weak_scaling": (scaling, ranks, options.rounds, steps), "losses": (config, ranks)}
        for name, mode in in_time(asked, options.time_budget, ranks):
            row = stamped(MEASURES[name], mode, *given[name])
            if ranks.first:
                print(name, {field: value for field, value in row.items() if field != "of"}, flush=True)
                rows = [other for other in record.get(name, ()) if not is_of(other, mode, ranks.size)]
                record[name] = sorted([*rows, row], key=lambda row: (PARALLEL.index(row["mode"]), row["gpus"]))
                write_json(out, record)
        if ranks.first:
            print("wrote" if asked else "nothing to add to", out)


if __name__ == "__main__":
    main()
