"""The language model on several GPUs: throughput a GPU over one GPU's, and how far losses part from one GPU's.

    torchrun --nproc-per-node 2 -m scripts.bench.distributed             # -> results/h200/distributed.json, named by the GPU
    torchrun --nproc-per-node 2 -m scripts.bench.distributed --quick     # small, on CPUs too -> distributed-quick.json
    python -m scripts.bench.distributed --quick                          # the same with one rank

weak_scaling: an 8-layer GPT (d = 1536, n = 512, E = 64, K = 4), 16 x 1024 tokens a GPU, AdamW, bf16.
tokens_per_s_per_gpu is that of the mode on all GPUs, efficiency its ratio to one GPU's under autocast, which every rank
measures for itself: steps of both in turn (A B A B), the host waiting for the GPU before and after some steps, medians of rounds, the
slowest rank's. losses: the Hopper preset without dropout at learning rate 3e-4, every step's loss of the mode and of one GPU
with the same global batch; largest_difference is the largest relative one of the smoothed losses
(`scripts.lm.compare_backends`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.common import (
    REPOSITORY,
    begun,
    bench_parser,
    gpu_name,
    in_turn,
    read_json,
    settled,
    stamped,
    write_json,
)
from scripts.command import some_of
from scripts.lm.compare_backends import largest_difference
from scripts.lm.ranks import Ranks, joined
from scripts.lm.settings import PARALLEL, PRESETS, Config
from scripts.train_lm import Trainer

Row = dict[str, Any]

SCALING = Config(
    layers=8, d_model=1536, heads=12, context=1024, d_expert=512, num_experts=64, top_k=4, bf16=True, batch=16, lr=3e-4
)
LOSSES = replace(PRESETS["hopper"], dropout=0.0, lr=3e-4, steps=200)
SMALL = Config(layers=2, d_model=32, heads=2, context=32, d_expert=16, num_experts=4, batch=4, steps=10)
STEPS = 10  # in a row, between two readings of the clock
TIMEOUT = 600  # seconds that a rank waits for another


def trainer(config: Config, ranks: Ranks, mode: str) -> Trainer:
    """A run that leaves no file."""
    return Trainer(replace(config, parallel=mode), Path(tempfile.gettempdir()) / "no-run", ranks)


def seconds_of(trainer: Trainer, steps: int) -> float:
    """Of one step."""
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
    return {"mode": mode, "gpus": ranks.size, **speeds, "efficiency": round(several / alone, 4)}


def losses(mode: str, config: Config, ranks: Ranks) -> Row:
    """A row of ``losses``."""
    found = []
    for those, how in ((Ranks(ranks.device), "none"), (ranks, mode)):
        program = trainer(config, those, how)
        found.append(torch.stack([program.train_step()[0] for _ in range(config.steps)]).tolist())
        del program
    difference, step = largest_difference(found[1], found[0])
    return {
        "mode": mode,
        "gpus": ranks.size,
        "largest_difference": round(difference, 6),
        "step": step,
        "steps": config.steps,
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("distributed", __doc__, quick="small models, a few steps")
    modes, ways = PARALLEL[1:], ", ".join(PARALLEL[1:])
    parser.add_argument(
        "--scaling", type=some_of(modes), default=["fsdp"], metavar="MODES", help=f"some of {ways} [default fsdp]"
    )
    parser.add_argument(
        "--losses", type=some_of(modes), default=["fsdp", "ep"], metavar="MODES", help="[default fsdp,ep]"
    )
    parser.add_argument("--device", help="cpu or cuda [default cuda where there is one, else cpu]")
    return settled(parser.parse_args(words), "distributed", rounds=7, quick_rounds=2)


def results_file() -> Path:
    """By the GPU: results/h200/distributed.json."""
    names = [word.lower() for word in gpu_name().partition(",")[0].split() if any(map(str.isdigit, word))]
    return REPOSITORY / "results" / (names[0] if names else "cpu") / "distributed.json"


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    with joined(options.device, TIMEOUT) as ranks:
        out = options.out or results_file()
        record = read_json(out) if out.exists() else {}
        record |= {name: value for name, value in begun("distributed", __doc__).items() if name != "rows"}
        scaling, config, steps = (SMALL, SMALL, 2) if options.quick else (SCALING, LOSSES, STEPS)
        measured: dict[str, list[Row]] = {"weak_scaling": [], "losses": []}
        wanted: list[tuple[Any, ...]] = [
            (weak_scaling, mode, scaling, ranks, options.rounds, steps) for mode in options.scaling
        ]
        for call in in_turn(wanted + [(losses, mode, config, ranks) for mode in options.losses]):
            row = stamped(*call)
            measured[call[0].__name__].append(row)
            if ranks.first:
                print({name: value for name, value in row.items() if name != "of"}, flush=True)
        if ranks.first:
            write_json(out, record | measured)
            print("wrote", out)


if __name__ == "__main__":
    main()
