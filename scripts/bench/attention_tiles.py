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

import dataclasses

import torch
from torch import Tensor

from scripts.bench.common import MIB
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, saved_bytes
from scripts.lm.model import GPT, VOCABULARY, Output
from scripts.lm.settings import PRESETS, Config

Tiled = tuple[Config, tuple[int, ...]]  # a model, and the numbers of tiles
SMALL = Config(layers=2, d_model=64, heads=2, context=64, d_expert=32)


@dataclasses.dataclass(frozen=True)
class Step:
    """Forward and backward of ``ids`` in ``micro`` batches of ``tiles`` tiles each; no gradient is left behind."""

    model: GPT
    ids: Tensor  # (B, context + 1) bytes
    bf16: bool
    tiles: int = 1
    micro: int = 1

    def forward(self) -> Output:
        """The first batch's."""
        return self.forward_of(self.ids.chunk(self.micro)[0])

    def forward_of(self, ids: Tensor) -> Output:
        for block in self.model.blocks:
            block.attention_tiles = self.tiles
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            made: Output = self.model(ids[:, :-1], ids[:, 1:])
        return made

    def __call__(self) -> None:
        for ids in self.ids.chunk(self.micro):
            out = self.forward_of(ids)
            assert out.loss is not None
            ((out.loss + out.aux_loss) / self.micro).backward()
        self.model.zero_grad(set_to_none=True)


def measure(case: Tiled, machine: Machine) -> list[Row]:
    """A row for each number of tiles."""
    config, tiles = case
    torch.manual_seed(config.seed)
    model = GPT(config).to(machine.device)
    ids = torch.randint(VOCABULARY, (config.batch, config.context + 1), device=machine.device)
    steps = {f"tiled {G}": Step(model, ids, config.bf16, tiles=G) for G in tiles}
    steps |= {f"micro {G}": Step(model, ids, config.bf16, micro=G) for G in tiles}
    for step in steps.values():  # what the first call allocates for good is nobody's peak
        step()
    saved = {name: saved_bytes(step.forward, model.parameters()) / MIB for name, step in steps.items()}
    peaks = {name: machine.peak_bytes(step) / MIB for name, step in steps.items()}
    ms = machine.eager(steps)
    rows = []
    for G in tiles:
        row: Row = {"tiles": G}
        for kind in ("tiled", "micro"):
            name = f"{kind} {G}"
            row |= {f"{kind}_ms": round(ms[name], 3), f"{kind}_saved_MiB": round(saved[name], 2)}
            row[f"{kind}_peak_MiB"] = round(peaks[name], 2)
        rows.append(row)
    return rows


def of_config(case: Tiled) -> Row:
    config, _ = case
    cfg = {"T": config.batch * config.context, "d": config.d_model, "n": config.d_expert, "E": config.num_experts}
    return {"cfg": cfg | {"K": config.top_k, "layers": config.layers, "sequences": config.batch}}


FULL: list[Tiled] = [(PRESETS["hopper"], (1, 2, 4, 8, 16, 32, 64))]
QUICK: list[Tiled] = [(PRESETS["hopper"], (1, 8, 64))]
BENCH = Bench("attention_tiles", __doc__, {"rows": Item(measure, FULL, [(SMALL, (1, 2, 4, 8))], QUICK, of_config)})

if __name__ == "__main__":
    run(BENCH)
