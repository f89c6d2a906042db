"""Batch tiling on attention in the language model: time and memory of a batch over the number of tiles G.

    python -m scripts.bench.attention_tiles             # -> results/h200/attention_tiles.json on an H200
    python -m scripts.bench.attention_tiles --quick     # fewer rounds, G = 1, 8 and 64 -> attention_tiles-quick.json
    python -m scripts.bench.attention_tiles --cpu       # a small model on a CPU -> results/cpu/attention_tiles.json

The model and the batch of the Hopper preset, random bytes, bf16 by autocast. tiled: forward and backward of one batch whose
sequences go through each block's attention in G tiles, computed again in backward, and through the experts all at once. micro:
the same sequences as G batches, one after the other, whose gradients are added up: attention sees as many sequences at a time as
a tile has, but so do the experts. Milliseconds between CUDA events, medians of rounds in which all are run in turn; on a CPU the
quickest round. saved: what autograd keeps after the forward, of micro after one batch's. peak: the most that is allocated in
forward and backward over what was there before, gradients included; on a CPU by the profiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from blazeproto.lab.times import interleaved_ms
from scripts.bench import cpu
from scripts.bench.common import MIB, RESULTS, begun, bench_parser, folder_of, gpu_name, settled, stamped, write_json
from scripts.bench.tables import TABLES
from scripts.bench.timing import peak_bytes, saved_bytes
from scripts.command import need_hopper
from scripts.lm.model import GPT, VOCABULARY, Output
from scripts.lm.settings import PRESETS, Config

Row = dict[str, Any]

TILES: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
QUICK_TILES = (1, 8, 64)
SMALL = Config(layers=2, d_model=64, heads=2, context=64, d_expert=32)
SMALL_TILES: tuple[int, ...] = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Step:
    """Forward and backward of ``ids`` in ``micro`` batches, with so many tiles in each; no gradient is left behind."""

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


def host_peak_bytes(call: Callable[[], object]) -> int:
    """`peak_bytes` on a CPU: the most that was allocated at a time during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most


def measure(config: Config, tiles: tuple[int, ...], rounds: int, device: str = "cuda") -> list[Row]:
    """A row for each number of tiles."""
    torch.manual_seed(config.seed)
    model = GPT(config).to(device)
    ids = torch.randint(VOCABULARY, (config.batch, config.context + 1), device=device)
    steps = {("tiled", G): Step(model, ids, config.bf16, tiles=G) for G in tiles}
    steps |= {("micro", G): Step(model, ids, config.bf16, micro=G) for G in tiles}
    on_gpu = device == "cuda"
    for step in steps.values():  # what the first call allocates for good is nobody's peak
        step()
    peak = peak_bytes if on_gpu else host_peak_bytes
    memory = {
        key: {"saved_MiB": saved_bytes(step.forward, model.parameters()) / MIB, "peak_MiB": peak(step) / MIB}
        for key, step in steps.items()
    }
    named = {f"{kind} {G}": step for (kind, G), step in steps.items()}
    ms = interleaved_ms(named, rounds) if on_gpu else cpu.measure(named, rounds)
    cfg = {"T": config.batch * config.context, "d": config.d_model, "n": config.d_expert, "E": config.num_experts}
    cfg |= {"K": config.top_k, "layers": config.layers, "sequences": config.batch}
    rows = []
    for G in tiles:
        row: Row = {"cfg": cfg, "tiles": G}
        for kind in ("tiled", "micro"):
            row[f"{kind}_ms"] = round(ms[f"{kind} {G}"], 3)
            row |= {f"{kind}_{name}": round(value, 2) for name, value in memory[kind, G].items()}
        rows.append(row)
    return rows


def main() -> None:
    parser = bench_parser("attention_tiles", __doc__, quick="fewer rounds and tiles -> attention_tiles-quick.json")
    parser.add_argument("--cpu", action="store_true", help="a small model on a CPU -> results/cpu/attention_tiles.json")
    options = parser.parse_args()
    if options.cpu and options.quick:
        parser.error("--quick: expected none with --cpu, which is short")
    options = settled(options, "attention_tiles", rounds=5 if options.cpu else 20)
    if options.cpu:
        config, tiles, place = SMALL, SMALL_TILES, RESULTS.parent / "cpu"
    else:
        need_hopper()
        config, tiles = PRESETS["hopper"], QUICK_TILES if options.quick else TILES
        place = RESULTS.parent / folder_of(gpu_name())
    out = options.out or place / "attention_tiles.json"
    record = begun("attention_tiles", __doc__)
    record["rows"] = stamped(measure, config, tiles, options.rounds, "cpu" if options.cpu else "cuda")
    write_json(out, record)
    print(TABLES["attention_tiles"](record))
    print("wrote", out)


if __name__ == "__main__":
    main()
