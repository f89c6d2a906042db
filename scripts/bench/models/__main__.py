"""MoE layers of models that people know, by name; MegaBlocks' Figure 10 and Table 3; choices of experts, skew, padding.

    python -m scripts.bench.models layers                  # -> results/h200/models/layers.json on an H200
    python -m scripts.bench.models all --time-budget 450   # in order, each leaving time for those after it; once more goes on
    python -m scripts.bench.models layers --peers grouped_mm
    python -m scripts.bench.models all --cpu               # a short form on a CPU: tables alone, or files with --out FOLDER

Rows that a file has of the same kernels and benchmark are kept, so that a run that ended early, at --time-budget or by Ctrl-C,
goes on with the same command. A peer that does not run is a reason in the row. SonicMoE compiles for minutes at first: --caches
keeps what it made. The environment variable BENCH_PEERS names the folders of packages that only
`liger` and `quack` need.

Whole layers in bf16, router weights too, training mode, auxiliary loss 0.01; random tokens and weights, the same for all
programs, which run in turn in one process, five rounds; those that don't fit beside each other, and peers that want other
libraries, in processes of their own, in turn (A B A B by process). Times are medians of the durations of the kernels, by the
profiler, an overlap counted once; the GPU is held until the host has queued a call. Peak: the most that is allocated in forward
and backward over what was there before, gradients included. Before they are timed, programs are shown to compute the same.
figure_10: forwards between CUDA events, host included, so that nothing else may run on the host's cores.
"""

from dataclasses import replace
from functools import partial

from blazeproto.gemm import Sizes
from scripts.bench.models import layers, megablocks
from scripts.bench.models.layers import ManyTokens
from scripts.bench.models.megablocks import SYSTEMS
from scripts.bench.models.shapes import BY_NAME
from scripts.bench.paper import layers as paper_layers
from scripts.bench.paper.layers import Case
from scripts.bench.running import Bench, of_case, run
from scripts.bench.running import Item as AnyItem

Item = partial(AnyItem, key=of_case, rounds=5)
PEERS = ("sonic", "grouped_mm", "torch_grouped")
SMALL = Sizes(64, 32, 128, 4, 2)
FIGURE_10 = Sizes(16 * 1024, 768, 4 * 768, 2, 1, halves=1)
EXPERTS = (2, 4, 8, 16, 32, 64, 128)
FEW = (1, 8, 64, 512)  # tokens
RATIO = Sizes(16384, 2048, 2048, 32, 4)  # n = d; the other widths have as many operations and weights


def of(*names: str) -> tuple[Case, ...]:
    return tuple(Case(BY_NAME[name], label=name) for name in names)


def many(*names: str) -> tuple[Case, ...]:
    return tuple(ManyTokens(case.shape, label=case.label) for case in of(*names))


def systems(model: str) -> tuple[Case, ...]:
    config = megablocks.SIZES[model]
    sizes = Sizes(config.context, config.d_model, config.d_expert, config.num_experts, config.top_k)
    return tuple(ManyTokens(sizes, label=f"{model}, {name}") for name in SYSTEMS)


def ratios(shape: Sizes, times: tuple[float, ...]) -> tuple[Case, ...]:
    """Experts a multiple as wide, with as many fewer of them a token."""
    made = [shape._replace(n=int(shape.n * x), E=int(shape.E / x), K=int(shape.K / x)) for x in times]
    return tuple(Case(each, label=f"{each.n / each.d:g}") for each in made)


ITEMS = {
    "layers": Item(
        layers.models,
        of(*BY_NAME),
        (Case(SMALL, label="small"),),
        peers=("sonic", "grouped_mm"),
    ),
    "figure_10": Item(
        megablocks.figure_10,
        tuple(Case(FIGURE_10._replace(E=experts), "gelu") for experts in EXPERTS),
        tuple(Case(SMALL._replace(E=experts, K=1, halves=1), "gelu") for experts in (2, 4)),
        seconds=20,
    ),
    "choices": Item(
        layers.choices,
        many("Qwen3-30B-A3B", "gpt-oss-20b"),
        (ManyTokens(SMALL._replace(T=256), label="small"),),
        seconds=15,
    ),
    "skew": Item(
        layers.skew,
        of("Qwen3-30B-A3B", "Mixtral 8x7B", "Llama 4 Scout"),
        (Case(SMALL, label="small"),),
        seconds=35,
    ),
    "padding": Item(
        layers.padding,
        many("Qwen3-30B-A3B", "Mixtral 8x7B"),
        (ManyTokens(SMALL, label="small"),),
        seconds=10,
    ),
    "micro_batch": Item(megablocks.micro_batch, systems("dMoE-XS"), systems("small"), rounds=1, seconds=40),
    "decode": Item(
        layers.decode,
        tuple(
            replace(case, shape=case.shape._replace(T=tokens))
            for case in of("Qwen3-30B-A3B", "gpt-oss-20b", "Mixtral 8x7B")
            for tokens in FEW
        ),
        (Case(SMALL._replace(T=2), label="small"),),
        seconds=25,
    ),
    "ratios": Item(
        paper_layers.against_all,
        ratios(RATIO, (0.125, 0.25, 0.5, 1, 2, 4)),
        (Case(SMALL, label="4"),),
        peers=("torch_grouped",),
    ),
    "liger": Item(
        layers.liger,
        of("Qwen3-30B-A3B"),
        (Case(SMALL, label="small"),),
    ),
    "quack": Item(layers.quack, of("Qwen3-30B-A3B"), (Case(SMALL, label="small"),)),
}
ITEMS = {name: replace(item, file=f"models/{name}") for name, item in ITEMS.items()}
BENCH = Bench("models", __doc__, ITEMS, peers=PEERS, goes_on=True)

if __name__ == "__main__":
    run(BENCH)
