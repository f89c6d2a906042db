"""MegaBlocks' questions: how experts in sequence fare as they become many (Figure 10), and which micro-batch fits (Table 3)."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.blocksparse import SequentialMoE, dMoE
from blazeproto.lab.times import Call, elapsed_ms
from scripts.bench.common import free_memory
from scripts.bench.markdown import OURS
from scripts.bench.paper.layers import Case
from scripts.bench.timing import Machine, Row, host_ms, relative_difference
from scripts.lm.model import GPT, VOCABULARY, Output
from scripts.lm.settings import GPTConfig

LAYERS: dict[str, Any] = {OURS: MoE, "dmoe": dMoE, "sequential": SequentialMoE}
ROUND_MS = 30.0  # a program's part of a round lasts about this long
SAME_OUTPUT = 0.02

# ----------------------------------------------------------------------------------------------------------- Figure 10


def figure_10(case: Case, machine: Machine) -> Row:
    """The forward of `MoE`, of `dMoE` and of experts in sequence, GELU without a gate, router included: eager calls with the
    host's time, because the host is what experts in sequence wait for. A round's time is the mean over calls that last 30 ms."""
    shape = case.shape
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": case.activation, "device": machine.device, "dtype": torch.bfloat16}
    layers = {name: kind(shape.d, shape.n, shape.E, shape.K, **options).eval() for name, kind in LAYERS.items()}
    first = layers[OURS]
    x = torch.randn(shape.T, shape.d, device=machine.device, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in layers.values():
            layer.load_state_dict(first.state_dict())
        expected = first(x)[0]
        for name, layer in layers.items():
            difference = relative_difference(layer(x)[0], expected)
            if not difference < SAME_OUTPUT:
                raise RuntimeError(f"{name}: its output differs from MoE's by {difference:.3g}")
        calls: dict[str, Call] = {name: partial(layer, x) for name, layer in layers.items()}
        for call in calls.values():
            time_of(call, 2, machine)
        most = {name: math.ceil(ROUND_MS / time_of(call, 2, machine)) for name, call in calls.items()}
        times = [
            {name: time_of(call, most[name] if machine.on_gpu else 1, machine) for name, call in calls.items()}
            for _ in range(machine.rounds)
        ]
    samples = {name: [each[name] for each in times] for name in layers}
    programs = {
        name: {
            "fwd_ms": round(statistics.fmean(rounds), 4),
            "deviation_ms": round(statistics.stdev(rounds), 5) if len(rounds) > 1 else 0.0,
            "rounds_ms": [round(ms, 4) for ms in rounds],
        }
        for name, rounds in samples.items()
    }
    return {"rounds": machine.rounds, "programs": programs}


def time_of(call: Call, calls: int, machine: Machine) -> float:
    """Milliseconds of an eager call."""
    return elapsed_ms(call, calls) if machine.on_gpu else host_ms(call, 1, calls=calls)


# ------------------------------------------------------------------------------------------------------------- Table 3

GIB = 80  # of memory, as the paper's A100 has
LEAST, MOST = {"cuda": 8, "cpu": 1}, {"cuda": 1024, "cpu": 4}  # sequences that are tried
SYSTEMS: dict[str, dict[str, Any]] = {"moe": {}, "dmoe": {}, "dropping": {"capacity_factor": 0.0}, "sequential": {}}
# MegaBlocks Tables 1 and 2, dMoE-XS, with SwiGLU experts two thirds as wide, so as many weights; bytes, and not its 51200 words.
SIZES = {
    "dMoE-XS": GPTConfig(layers=6, d_model=512, heads=8, context=1024, d_expert=1408, num_experts=64, top_k=1),
    "small": GPTConfig(layers=1, d_model=32, heads=2, context=16, d_expert=128, num_experts=2, top_k=1),
}


def micro_batch(case: Case, machine: Machine) -> Row:
    """The largest power of two of sequences of which a system's training step (bf16 autocast, AdamW) fits into 80 GiB, and its
    peak at each size that was tried. "dropping" has as many places an expert as the largest load needs, as Tutel."""
    name, _, system = case.label.partition(", ")
    config = replace(SIZES[name], formulation=system, **SYSTEMS[system])
    if machine.on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, GIB * 2**30 / total))
    try:
        step = partial(peak_of_steps, *trained_by(config, machine.device))
        largest, peaks = most_sequences(step, LEAST[machine.device], MOST[machine.device])
    finally:
        if machine.on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return {"system": system, "model": name, "micro_batch": largest, "peak_GiB": peaks}


def trained_by(config: GPTConfig, device: str, lr: float = 1e-4) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Output:
    """In bf16 autocast."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        out = model(inputs, targets)
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return cast(Output, out)


def most_sequences(fits: Callable[[int], float], least: int, most: int) -> tuple[int, dict[str, float]]:
    """The largest of least, 2 least, ... most for which ``fits`` does not run out of memory, and what it returns of each; 0 where
    none does."""
    peaks: dict[str, float] = {}
    sequences = least
    while sequences <= most:
        try:
            peaks[str(sequences)] = round(fits(sequences), 3)
        except torch.OutOfMemoryError:
            break
        finally:
            free_memory()
        sequences *= 2
    return max(map(int, peaks), default=0), peaks


def peak_of_steps(model: GPT, optimizer: torch.optim.Optimizer, sequences: int) -> float:
    """GiB at the peak of two training steps, weights included; on a CPU, where nobody counts them, 0. torch.OutOfMemoryError."""
    optimizer.zero_grad(set_to_none=True)
    device = model.embedding.weight.device.type
    ids = torch.randint(VOCABULARY, (sequences, model.config.context + 1), device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the optimizer's state is there in the second
        train_step(model, optimizer, ids[:, :-1], ids[:, 1:])
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
