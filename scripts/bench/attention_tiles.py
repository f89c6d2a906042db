"""Batch tiling on attention in the language model: time and memory of a batch over the number of tiles G.

    python -m scripts.bench.attention_tiles             # -> results/h200/attention_tiles.json on an H200
    python -m scripts.bench.attention_tiles --quick     # fewer rounds, G = 1, 8 and 64 -> attention_tiles-quick.json
    python -m scripts.bench.attention_tiles --cpu --out results/cpu    # a small model on a CPU

The model and the batch of the Hopper preset, random bytes, bf16 by autocast. tiled: forward and backward of one batch whose
sequences go through each block's attention in G tiles, computed again in backward, and through the experts all at once. micro:
the same sequences as G batches, one after the other, whose gradients are added up: attention sees as many sequences at a time as
a tile has, but so do the experts. Milliseconds between CUDA events, medians of rounds in which all are run in turn; on a CPU the
quickest round. saved: what autograd keeps after the forward, of micro after one batch's. peak: the most that is allocated in
forward and backward over what was there before, gradients included; on a CPU by the profiler.
"""

from functools import partial

import torch
from torch import Tensor

from scripts.bench.common import MIB, sizes_of_run
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, saved_bytes
from scripts.lm.model import GPT, VOCABULARY, Output
from scripts.lm.settings import PRESETS, Config

Tiled = tuple[Config, tuple[int, ...]]  # a model, and the numbers of tiles
SMALL = Config(layers=2, d_model=64, heads=2, context=64, d_expert=32)


def forward(model: GPT, ids: Tensor, tiles: int, *, bf16: bool) -> Output:
    """The model's output for ids (B, context + 1), in ``tiles`` tiles."""
    for block in model.blocks:
        block.attention_tiles = tiles
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        made: Output = model(ids[:, :-1], ids[:, 1:])
    return made


def step(model: GPT, ids: Tensor, tiles: int, micro: int, *, bf16: bool) -> None:
    """Forward and backward of ``ids`` in ``micro`` batches of ``tiles`` tiles each; no gradient is left behind."""
    for part in ids.chunk(micro):
        out = forward(model, part, tiles, bf16=bf16)
        assert out.loss is not None
        ((out.loss + out.aux_loss) / micro).backward()
    model.zero_grad(set_to_none=True)


def measure(case: Tiled, machine: Machine) -> list[Row]:
    """A row for each number of tiles."""
    config, tiles = case
    torch.manual_seed(config.seed)
    model = GPT(config).to(machine.device)
    ids = torch.randint(VOCABULARY, (config.batch, config.context + 1), device=machine.device)
    programs = {f"tiled {G}": (G, 1) for G in tiles} | {f"micro {G}": (1, G) for G in tiles}
    steps = {name: partial(step, model, ids, *parts, bf16=config.bf16) for name, parts in programs.items()}
    for call in steps.values():  # what the first call allocates for good is nobody's peak
        call()
    saved, peaks = dict[str, float](), dict[str, float]()
    for name, (G, micro) in programs.items():
        first = partial(forward, model, ids.chunk(micro)[0], G, bf16=config.bf16)
        saved[name] = saved_bytes(first, model.parameters()) / MIB
        peaks[name] = machine.peak_bytes(steps[name]) / MIB
    figures = {"ms": (machine.eager(steps), 3), "saved_MiB": (saved, 2), "peak_MiB": (peaks, 2)}
    return [
        {"tiles": G, "row_counts": [config.batch * config.context * config.top_k // each for each in tiles]}
        | {
            f"{kind}_{field}": round(values[f"{kind} {G}"], digits)
            for kind in ("tiled", "micro")
            for field, (values, digits) in figures.items()
        }
        for G in tiles
    ]


def of_config(case: Tiled) -> Row:
    config, _ = case
    cfg: Row = sizes_of_run(config, config.batch)["cfg"]
    return {"cfg": cfg | {"layers": config.layers, "sequences": config.batch}}


FULL: list[Tiled] = [(PRESETS["hopper"], (1, 2, 4, 8, 16, 32, 64))]
QUICK: list[Tiled] = [(PRESETS["hopper"], (1, 8, 64))]
BENCH = Bench("attention_tiles", __doc__, {"rows": Item(measure, FULL, [(SMALL, (1, 2, 4, 8))], QUICK, of_config)})

if __name__ == "__main__":
    run(BENCH)
