"""The language model on several GPUs: throughput a GPU over one GPU's, and how far losses part from one GPU's.

    torchrun --nproc-per-node 2 -m scripts.bench.distributed             # -> results/h200/distributed.json, named by the GPU
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --resume    # what that file lacks of so many GPUs
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --quick     # small -> distributed-quick.json
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --cpu       # small, on CPUs
    python -m scripts.bench.distributed --cpu                            # the same with one rank

Any number of GPUs: rows of other numbers, and what else is in the file, stay. The file is written after every row.

weak_scaling: an 8-layer GPT (d = 1536, n = 512, E = 64, K = 4), 16 x 1024 tokens a GPU, AdamW, bf16; FSDP2 keeps gathered
weights until backward (train_lm --no-reshard), 2.4 GiB in bf16. tokens_per_s_per_gpu is
the mode's on all GPUs, efficiency its ratio to one GPU's under autocast, which every rank measures for itself: steps of
both in turn (A B A B), the host waiting for the GPU before and after some steps, medians of rounds, the slowest rank's. losses:
the Hopper preset without dropout at learning rate 3e-4, every step's loss of the mode and of one GPU with the same global
batch; largest_difference is the largest relative one of the smoothed losses (`scripts.lm.compare_backends`).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.bench.common import sizes_of_run
from scripts.bench.running import Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row
from scripts.command import refuse, some_of
from scripts.lm import sharding
from scripts.lm.compare_backends import largest_difference
from scripts.lm.ranks import Ranks
from scripts.lm.settings import PARALLEL, PRESETS, Config
from scripts.train_lm import Trainer

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


class Asked(NamedTuple):
    """A mode of the language model. small: in its short form."""

    mode: str
    small: bool = False

    @property
    def key(self) -> Row:
        return {"mode": self.mode}


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


def weak_scaling(case: Asked, machine: Machine) -> Row:
    """Throughput a GPU of a mode on all ranks, and of each rank alone. The configuration's batch is one GPU's."""
    mode, ranks = case.mode, machine.ranks
    config, steps = (SMALL, 2) if case.small else (SCALING, STEPS)
    whole = replace(config, batch=config.batch * ranks.size)
    programs = {"alone": trainer(config, Ranks(ranks.device), "none"), mode: trainer(whole, ranks, mode)}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(machine.rounds + 1):  # the first warms up
        for name, program in programs.items():
            taken[name].append(seconds_of(program, steps))
    slowest = machine.largest([statistics.median(seconds[1:]) for seconds in taken.values()])
    alone, several = (config.batch * config.context / seconds for seconds in slowest)
    speeds = {"tokens_per_s_per_gpu": round(several, 1), "tokens_per_s_alone": round(alone, 1)}
    sizes = sizes_of_run(config, config.batch, ranks.size if "ep" in mode else 1)
    return {**sizes, **speeds, "efficiency": round(several / alone, 4)}


def losses_of(mode: str, config: Config, ranks: Ranks) -> list[float]:
    """Every step's loss."""
    program = trainer(config, ranks, mode)
    return torch.stack([program.train_step()[0] for _ in range(config.steps)]).tolist()


@cache
def losses_alone(config: Config, device: torch.device) -> list[float]:
    """One GPU's, with which all modes are compared."""
    return losses_of("none", config, Ranks(device))


def losses(case: Asked, machine: Machine) -> Row:
    """How far a mode's losses part from one GPU's with the same global batch."""
    mode, ranks, config = case.mode, machine.ranks, SMALL if case.small else LOSSES
    alone = losses_alone(config, ranks.device)
    difference, step = largest_difference(losses_of(mode, config, ranks), alone)
    sizes = sizes_of_run(config, config.batch // ranks.size, ranks.size if "ep" in mode else 1)
    return {**sizes, "largest_difference": round(difference, 6), "step": step, "steps": config.steps}


def add_options(parser: argparse.ArgumentParser) -> None:
    modes = PARALLEL[1:]
    parser.add_argument("--modes", type=some_of(modes), default=["fsdp", "ep"], help=f"of {', '.join(modes)}")


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    try:
        for mode in options.modes:
            sharding.check(replace(SMALL if options.cpu else LOSSES, parallel=mode), ranks)
    except ValueError as error:
        refuse(f"{error}; nothing was run")


MODES, SMALL_MODES = ([Asked(mode, small) for mode in PARALLEL[1:]] for small in (False, True))
BENCH = Bench(
    "distributed",
    __doc__,
    {
        name: Item(measure, MODES, SMALL_MODES, SMALL_MODES, of_case, part=name, rounds=7)
        for name, measure in (("weak_scaling", weak_scaling), ("losses", losses))
    },
    options=add_options,
    asked=lambda options, case: case.mode in options.modes,
    prepare=prepare,
    ranks=True,
)

if __name__ == "__main__":
    run(BENCH)
