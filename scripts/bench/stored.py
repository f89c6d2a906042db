"""Experts with frozen weights in 4 and 8 bits beside the same in bf16: `moe_mlp` with low-rank factors, and forward alone.

    python -m scripts.bench.stored                     # -> results/h200/stored.json on an H200
    python -m scripts.bench.stored --parts few

The bf16 weights are what the stored ones decode to; both are frozen. "training": a forward and a backward, factors of rank 16 on
both weights; a peak is of the step, over what lies there before it and without the weights, whose bytes have fields of their own.
"few": a forward without factors, in microseconds; one CUDA graph runs SETS layers of different weights, more than L2 holds. All
programs of a row run in one process, in turn (A B A B). Times are the durations of the kernels, or of the graph's replay.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto import stored
from blazeproto.autograd import moe_mlp
from blazeproto.gemm import Sizes
from blazeproto.stored import StoredWeight
from scripts.bench import peers
from scripts.bench.common import MIB, cfg_of
from scripts.bench.layer import SMALL
from scripts.bench.lora import RANK, factors_of
from scripts.bench.peers import LayerInputs
from scripts.bench.peers import layers as experts
from scripts.bench.running import Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row, rotations

FORMATS = {"mxfp4": 1.35, "nf4": 1.5, "int4": 1.5, "fp8": 1.25}
"""What training may take of bf16's time, by format, on Hopper's kernels."""
MOST_OF_AMPERE = 1.5  # of its own bf16 kernels' time, in any format
LAYERS = (Sizes(32768, 2048, 768, 128, 8), Sizes(16384, 2880, 2880, 128, 4), Sizes(16384, 4096, 1536, 128, 8))
MOST_OF_FEW = (0.8, 0.6, 0.6)  # of bf16's time, by layer, of a forward of a few tokens in MXFP4
TOKENS, SETS = (1, 8, 64), 3
MOST_PEAK = 64.0  # MiB over bf16's


class Case(NamedTuple):
    """A row."""

    sizes: Sizes
    format: str
    backend: str

    @property
    def key(self) -> Row:
        return {"cfg": cfg_of(self.sizes), "format": self.format, "backend": self.backend}


def kept(weight: Tensor, format: str) -> StoredWeight:
    """Stored in blocks of the format's own size, or of 64 where that does not divide a row."""
    whole = all(width % 128 == 0 for width in weight.shape[1:])
    return stored.quantize(weight.detach(), format, None if whole or format != "fp8" else (64, 64))


@lru_cache(maxsize=SETS)
def inputs_of(sizes: Sizes, format: str, device: str, seed: int = 0) -> tuple[LayerInputs, LayerInputs]:
    """Inputs with stored weights, and with what they decode to."""
    inputs = peers.make_inputs(sizes, device=device, seed=seed)
    up, down = (kept(weight, format) for weight in (inputs.gate_up_proj, inputs.down_proj))
    frozen: Any = {"gate_up_proj": up, "down_proj": down}  # which programs take in a tensor's place
    return replace(inputs, **frozen), replace(inputs, gate_up_proj=up.decode(), down_proj=down.decode())


def measure(case: Case, machine: Machine) -> Row:
    """A row of training."""
    both = dict(zip(("stored", "bf16"), inputs_of(case.sizes, case.format, machine.device), strict=True))
    factors = [factors_of(weight, RANK) for weight in (both["bf16"].gate_up_proj, both["bf16"].down_proj)]
    programs, row = dict[str, list[Any]](), Row()
    for name, inputs in both.items():
        options: dict[str, Any] = {"up_factors": factors[0], "down_factors": factors[1], "backend": case.backend}
        program = experts.ours(case.sizes, inputs, **options)
        leaves = (inputs.x, inputs.scores, *factors[0], *factors[1])
        programs[name] = [replace(program, leaves=leaves, layouts=(Tensor.detach,) * 4)]
        peers.run_once(programs[name])
        row[f"{name}_peak_MiB"] = round(machine.peak_bytes(programs[name][0].forward_backward) / MIB, 1)
        row[f"{name}_weights_MiB"] = round((inputs.gate_up_proj.nbytes + inputs.down_proj.nbytes) / MIB, 1)
    figures = machine.kernel_figures(rotations(programs, "forward_backward"), "fwdbwd")
    return row | {f"{name}_ms": found["fwdbwd_ms"] for name, found in figures.items()}


@torch.no_grad()
def measure_few(case: Case, machine: Machine) -> Row:
    """A row of a few tokens' forward."""
    sizes = case.sizes
    pairs = [inputs_of(sizes, case.format, machine.device, seed) for seed in range(SETS)]

    def forward(side: int) -> tuple[Tensor, ...]:
        made = (pair[side] for pair in pairs)
        options: dict[str, Any] = {"num_experts": sizes.E, "backend": case.backend}
        return tuple(
            moe_mlp(i.x.detach(), i.gate_up_proj, i.down_proj, i.scores.detach(), i.experts, **options) for i in made
        )

    found = machine.times({"stored": lambda: forward(0), "bf16": lambda: forward(1)})
    return {f"{name}_us": round(1e3 * ms / SETS, 2) for name, ms in found.ms.items()}


def bounds(record: Row) -> Iterator[tuple[str, bool]]:
    for row in record.get("training", ()):
        most = MOST_OF_AMPERE if row["backend"] == "ampere" else FORMATS[row["format"]]
        ratio, over = row["stored_ms"] / row["bf16_ms"], row["stored_peak_MiB"] - row["bf16_peak_MiB"]
        said = f"{row['cfg']} {row['format']} {row['backend']}"
        yield f"{said}: {ratio:.3f} of bf16's time, at most {most}", ratio <= most
        yield f"{said}: peak {over:+.1f} MiB, at most {MOST_PEAK}", over <= MOST_PEAK
    for row in record.get("few", ()):
        at_most = dict(zip((layer[1:5] for layer in LAYERS), MOST_OF_FEW, strict=True)).get(
            tuple(row["cfg"].values())[1:]
        )
        ratio = row["stored_us"] / row["bf16_us"]
        if at_most:
            yield f"{row['cfg']} few: {ratio:.3f} of bf16's time, at most {at_most}", ratio <= at_most


CASES = [Case(layer, format, backend) for layer in LAYERS for format in FORMATS for backend in ("hopper", "ampere")]
FEW = [Case(layer._replace(T=tokens), "mxfp4", "hopper") for layer in LAYERS for tokens in TOKENS]
SHORT = Case(SMALL._replace(d=64, n=64), "mxfp4", "torch")
BENCH = Bench(
    "stored",
    __doc__,
    {
        "training": Item(measure, CASES, [SHORT], key=of_case, part="training", rounds=5),
        "few": Item(measure_few, FEW, [SHORT], key=of_case, part="few", rounds=15),
    },
    bounds=bounds,
)

if __name__ == "__main__":
    run(BENCH)
