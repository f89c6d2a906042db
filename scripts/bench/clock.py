"""A small MoE and a dense model of equal operations a token: the times of a training step, and where their difference goes.

    python -m scripts.bench.clock             # -> results/h200/clock.json on an H200
    python -m scripts.bench.clock --quick     # two sizes, fewer rounds -> clock-quick.json
    python -m scripts.bench.clock --cpu --out results/cpu    # two small models on a CPU

The models of train_lm with 8 layers and heads of 128. A step: 32 sequences of 1024 random bytes, forward under bf16 autocast,
backward, clipping at norm 1, fused AdamW on fp32 weights. The dense model's SwiGLU MLP has the width K n, 3072 at d = 1024,
4096 at d = 1536, and on a GPU runs under torch.compile; all else is eager in both models. Sizes with more than 4e9 weights of
experts are left out. Both models are timed in turn (A B A B), medians of rounds. eager_ms: 3 steps in a row from an idle GPU,
host included. graph_ms: the same step replayed as a CUDA graph, without the host; empty, with the reason in refused, where a
model can't be captured. eager, graph: the MoE's time over the dense model's. host_ms: the host in a step behind another one, with
its waits for room in the GPU's queue, which two steps can fill. kernels_ms: durations by the profiler, an overlap counted once,
mean of 2 eager steps; empty where the profiler lost a marker. products: of the experts or the MLP, with the activation; routing:
router, dispatch, combine; casts: between dtypes, in the same layers; those that torch.compile makes, of the dense model, count as
products; optimizer: with clipping; rest: attention, norms, embedding, head, loss. The router's dX, by the experts' kernel, counts
as a product. more_ms: kernels_ms of the MoE minus the dense model's. peak_MiB: the most that is allocated in an eager step, with
weights and AdamW's moments. balance: the largest load over the mean, of all layers.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from blazeproto.distributed import clip_grad_norm_
from blazeproto.gemm import Sizes
from blazeproto.lab.times import Rotation
from scripts.bench.attention_tiles import SMALL, forward
from scripts.bench.common import MIB, sizes_of_run
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import MARKER, Machine, Row, device_spans, host_ms
from scripts.lm.model import GPT, VOCABULARY
from scripts.lm.settings import Config
from scripts.train_lm import make_optimizer

# A capture compares the losses of two steps in a row: at this learning rate they are nearly equal.
LARGE = Config(layers=8, context=1024, batch=32, bf16=True, lr=1e-5)
STEPS = 3  # in a row, between two readings of the clock
PROFILED = 2  # steps that kernel times are the mean of
MOST = 1.15  # asked of the better ratio, for E <= 16 and K <= 2
OPTIMIZER = re.compile("multi_tensor|lpnorm_cleanup|^Optimizer")  # in names of kernels
PRODUCTS = re.compile("up_forward|linear|down_backward|weight_gradient|weight_sum")  # that names of ours begin with


class Program:
    """A model, its optimizer and one batch. A call is a training step, and returns its loss, ()."""

    def __init__(self, config: Config, device: str) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        with torch.device(device):
            self.ids = torch.randint(VOCABULARY, (config.batch, config.context + 1))
            self.model = GPT(config)
        if device == "cuda" and config.formulation == "dense":
            torch.compiler.reset()  # compiled for another case's sizes, it would be made for all
            for block in self.model.blocks:
                block.moe.forward = torch.compile(
                    block.moe.forward
                )  # SwiGLU in one kernel each way, as experts have it
        self.optimizer = make_optimizer(self.model, config)
        for group in self.optimizer.param_groups:
            group["capturable"] = device == "cuda"

    def __call__(self) -> torch.Tensor:
        # Autocast begins and ends inside: no cast that it keeps outlives a capture.
        out = forward(self.model, self.ids, 1, bf16=self.config.bf16)
        assert out.loss is not None
        (out.loss + out.aux_loss).backward()
        clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return out.loss.detach()


def by_kind(spans: Iterable[tuple[str, float, float]], *, dense: bool) -> dict[str, float]:
    """Kernel milliseconds by kind, a step's mean, an overlap counted once.

    Markers lie around a layer of experts, or the MLP in its place, in forward and in backward.
    """
    found = dict.fromkeys(("products", "routing", "casts", "optimizer", "rest"), 0.0)
    inside, last = False, 0.0
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        if MARKER in name:
            inside = not inside
        else:
            own = "products" if dense or PRODUCTS.match(name) else "routing"
            kinds = {"optimizer": OPTIMIZER.search(name), "rest": not inside, "casts": "copy_kernel" in name, own: True}
            found[next(kind for kind, holds in kinds.items() if holds)] += max(0.0, end - max(begin, last)) / 1e3
        last = max(last, end)
    return {kind: round(ms / PROFILED, 3) for kind, ms in found.items()}


def kernels_ms(program: Program) -> dict[str, float]:
    """`by_kind` of a few steps; nothing where a marker is missing."""

    def mark(*_: object) -> None:
        torch.cuda._sleep(1)

    def around(layer: object, given: tuple[Any, ...], made: tuple[Any, ...] = ()) -> None:
        mark()
        (made or given)[0].register_hook(mark)  # before the layer's backward, or after it

    layers = [block.moe for block in program.model.blocks]
    handles = [add(around) for each in layers for add in (each.register_forward_pre_hook, each.register_forward_hook)]
    spans = device_spans(lambda: [program() for _ in range(PROFILED)])
    for handle in handles:
        handle.remove()
    if sum(MARKER in name for name, *_ in spans) != 4 * len(layers) * PROFILED:
        return {}
    return by_kind(spans, dense=program.config.formulation == "dense")


def measure(shape: Sizes, machine: Machine) -> Row:
    """Each figure of the MoE and of the dense model, and the ratios of their times."""
    config = replace(
        LARGE if shape.d >= 128 else SMALL,
        d_model=shape.d,
        heads=max(1, shape.d // 128),
        d_expert=shape.n,
        num_experts=shape.E,
        top_k=shape.K,
    )
    configs = {"moe": config, "dense": replace(config, formulation="dense")}
    programs = {name: Program(each, machine.device) for name, each in configs.items()}
    eager = machine.eager({name: Rotation([program] * STEPS) for name, program in programs.items()})
    weights = {name: sum(p.numel() for p in program.model.parameters()) for name, program in programs.items()}
    loads = forward(programs["moe"].model, programs["moe"].ids, 1, bf16=config.bf16).loads.float()
    row: Row = sizes_of_run(config, config.batch) | {
        "parameters": weights,
        "eager_ms": {name: round(ms, 3) for name, ms in eager.items()},
        "eager": round(eager["moe"] / eager["dense"], 4),
        "tokens_per_s": {name: round(1e3 * shape.T / ms) for name, ms in eager.items()},
        "host_ms": {name: round(host_ms(each, 2, 1), 3) for name, each in programs.items()},
        # A weight and its two moments are in fp32.
        "peak_MiB": {name: (machine.peak_bytes(each) + 12 * weights[name]) // MIB for name, each in programs.items()},
        "kernels_ms": {name: kernels_ms(each) if machine.on_gpu else {} for name, each in programs.items()},
        "balance": round(float((loads.amax(1) / loads.mean(1)).mean()), 3),
    }
    moe, dense = row["kernels_ms"].values()
    row["more_ms"] = {kind: round(ms - dense[kind], 3) for kind, ms in moe.items() if dense}
    replayed = machine.times(programs, tuple(programs))
    graph = {name: ms for name, ms in replayed.ms.items() if replayed.method[name] == "graph"}
    return row | {
        "graph_ms": {name: round(ms, 3) for name, ms in graph.items()},
        "graph": round(graph["moe"] / graph["dense"], 4) if graph else None,
        "refused": replayed.refused,
    }


def bounds(record: Row) -> Iterator[tuple[str, bool]]:
    """The better of both ratios, at every size with few experts."""
    for row in record["rows"]:
        if row["cfg"]["E"] <= 16 and row["cfg"]["K"] <= 2:
            ratio, setting = min((row[setting], setting) for setting in ("eager", "graph") if row[setting])
            shape = ", ".join(f"{letter} = {row['cfg'][letter]}" for letter in "dEK")
            yield f"{shape}: a step over the dense model's at most {MOST}: {ratio:.3f}, {setting}", ratio <= MOST


FULL = sorted(
    (
        Sizes(32768, d, width // K, E, K)
        for d, width in ((1024, 3072), (1536, 4096))
        for E in (8, 16, 64)
        for K in (1, 2, 4)
        if LARGE.layers * 3 * E * d * width // K <= 4e9
    ),
    key=lambda shape: shape.E > 16 or shape.K > 2,  # those of which a bound is asked come first
)
SHORT = [Sizes(512, 64, 32 // K, 4, K) for K in (1, 2)]
BENCH = Bench("clock", __doc__, {"rows": Item(measure, FULL, SHORT, FULL[:2], rounds=5)}, bounds=bounds)

if __name__ == "__main__":
    run(BENCH)
