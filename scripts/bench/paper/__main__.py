"""The papers' tables and figures, measured here beside what they print, and what a review asks of a layer.

    python -m scripts.bench.paper moeblaze-figures        # -> results/h200/paper/moeblaze-figures.json on an H200
    python -m scripts.bench.paper moeblaze-scale sonicmoe-layers --time-budget 120
    python -m scripts.bench.paper waterfall policies activations    # what a review of MoEBlaze asks
    python -m scripts.bench.paper all                     # one after the other
    python -m scripts.bench.paper combine --rounds 20 --again
    python -m scripts.bench.paper all --cpu               # a short form on a CPU: tables alone, or files with --out FOLDER

Rows that a file has of the same kernels and benchmark are kept, so that a run that ended early, at --time-budget or by Ctrl-C,
goes on with the same command. A peer that does not run is a reason in the row. SonicMoE compiles for minutes at first: --caches
keeps what it made.

Layers in bf16, random data, uniform routing, dispatch included, routers not. Times are medians of rounds in which all programs
run in turn: GPU time by CUDA-graph replay, or the sum of kernel durations where one of those that are compared can't be captured;
eager: host time included. saved: what autograd keeps for backward, weights excluded; peak: the most that is allocated in forward
and backward over what was there before, gradients included. Floors are of the rates that `blazeproto.cost.GPUS` has.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from blazeproto.activations import activation_named
from blazeproto.gemm import Sizes
from scripts.bench import running
from scripts.bench.common import SHAPES, TABLES
from scripts.bench.dispatch import MODELS, T
from scripts.bench.paper import kernels, layers
from scripts.bench.paper.layers import Case
from scripts.bench.paper.printed import ABLATION, DISPATCH
from scripts.bench.rounding import SUBFIGURES

ACTIVATIONS = ("silu", "swiglu")
Item = partial(running.Item, key=running.of_case, rounds=7)


def with_activations(shapes: Iterable[tuple[str, Sizes]]) -> tuple[Case, ...]:
    """Each labelled shape without a gate and with one."""
    return tuple(
        Case(shape._replace(halves=activation_named(activation).halves), activation, label)
        for label, shape in shapes
        for activation in ACTIVATIONS
    )


def plain(*shapes: Sizes) -> tuple[Case, ...]:
    return tuple(map(Case, shapes))


SMALL = Sizes(256, 64, 32, 8, 2)
CONFIGURATIONS = [(f"conf{number}", shape) for number, shape in enumerate(TABLES["moeblaze-1"], 1)]
CONFIGURATIONS.append(("conf4 of the text", Sizes(32768, 2048, 8192, 16, 4)))  # §6.4, which is not Table 1's
ALL_PEERS = ("sonic", "bmm_ub", "torch_grouped", "scattermoe", "mb_sparse")
COARSEST = Sizes(32768, 4096, 2048, 32, 2)  # of SonicMoE's Figure 1; its other three shapes are Figure 5's
BLOCKS = SMALL._replace(n=128)  # the side of a block
QWEN = Sizes(32768, 2048, 768, 128, 8)  # Qwen3-30B's layer
OVER_T = tuple(Case(QWEN._replace(T=T), label="T") for T in (1024, 4096, 16384, 32768, 65536, 131072))
OVER_N = tuple(Case(QWEN._replace(n=n), label="n") for n in (128, 256, 512, 1024, 2048))

ITEMS = {
    "moeblaze-figures": Item(
        layers.against_megablocks,
        with_activations(CONFIGURATIONS),
        with_activations([("small", SMALL)]),
        peers=("mb_sparse",),
    ),
    "sonicmoe-layers": Item(
        layers.against_all,
        plain(*TABLES["sonicmoe-9a"], COARSEST),
        plain(SMALL, SMALL._replace(n=16, E=16, K=4)),
        peers=ALL_PEERS,
    ),
    "moeblaze-scale": Item(
        layers.against_megablocks,
        with_activations(("", shape) for shape in TABLES["moeblaze-2"]),
        with_activations([("", SMALL)]),
        peers=("mb_sparse",),
    ),
    "moeblaze-dispatch": Item(
        kernels.dispatches,
        tuple(Case(Sizes(T, 0, 0, E, K), "", name) for name, E, K in MODELS if name in DISPATCH),
        (Case(Sizes(1024, 0, 0, 16, 4), "", "DBRX"),),
        rounds=15,
    ),
    "moeblaze-ablation": Item(
        layers.ablation, plain(*(Sizes(1 << 19, d, n, E, 4) for d, E, n in ABLATION)), plain(SMALL), rounds=5
    ),
    "moeblaze-gather": Item(
        kernels.gather, plain(*(Sizes(409600, 1024, n, 8, 2) for n in (1024, 4096))), plain(SMALL), rounds=15
    ),
    "combine": Item(layers.combines, plain(*SHAPES), plain(SMALL)),
    "sonicmoe-kernels": Item(
        kernels.kernel_times, plain(Sizes(24576, 1536, 256, 128, 8)), plain(SMALL), peers=ALL_PEERS
    ),
    "sonicmoe-rounding": Item(
        kernels.token_rounding,
        tuple(Case(shape, label=name) for name, shapes in SUBFIGURES.items() for shape in shapes),
        (Case(SMALL, label="small"),),
    ),
    "waterfall": Item(
        layers.waterfall,
        plain(Sizes(24576, 1536, 256, 128, 8), CONFIGURATIONS[1][1], Sizes(32768, 4096, 1024, 128, 8)),
        plain(BLOCKS),
        peers=("mb_sparse",),
        rounds=5,
    ),
    "policies": Item(layers.policies, OVER_T + OVER_N, (Case(SMALL, label="T"), Case(BLOCKS, label="n"))),
    "activations": Item(
        layers.activations,
        with_activations([("", Sizes(24576, 1536, 256, 128, 8)), ("", Sizes(32768, 4096, 1024, 128, 8))]),
        with_activations([("", SMALL)]),
    ),
    "sonicmoe-scores": Item(kernels.scores_gradient, plain(*TABLES["sonicmoe-9a"]), plain(SMALL), rounds=15),
}
ITEMS = {name: replace(item, file=f"paper/{name}") for name, item in ITEMS.items()}
BENCH = running.Bench("paper", __doc__, ITEMS, peers=ALL_PEERS, goes_on=True)

if __name__ == "__main__":
    running.run(BENCH)
