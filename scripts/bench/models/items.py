"""What can be measured, in the order in which it is: what each item is of, and how long it takes on an H200."""

from __future__ import annotations

from blazeproto.gemm import Sizes
from scripts.bench.models import layers, megablocks
from scripts.bench.models.layers import ManyTokens
from scripts.bench.models.megablocks import SYSTEMS
from scripts.bench.models.shapes import BY_NAME, MODELS
from scripts.bench.paper import layers as paper_layers
from scripts.bench.paper.items import Item
from scripts.bench.paper.layers import Case

PEERS = ("sonic", "grouped_mm", "torch_grouped")
SMALL = Sizes(64, 32, 128, 4, 2)
FIGURE_10 = Sizes(16 * 1024, 768, 4 * 768, 2, 1, halves=1)
EXPERTS = (2, 4, 8, 16, 32, 64, 128)
FEW = (1, 8, 64, 512)  # tokens
RATIO = Sizes(16384, 2048, 2048, 32, 4)  # n = d; the other widths have as many operations and weights


def of(*names: str) -> tuple[Case, ...]:
    return tuple(Case(BY_NAME[name].sizes, label=name) for name in names)


def many(*names: str) -> tuple[Case, ...]:
    return tuple(ManyTokens(case.shape, label=case.label) for case in of(*names))


def systems(model: str) -> tuple[Case, ...]:
    config = megablocks.SIZES[model]
    sizes = Sizes(config.context, config.d_model, config.d_expert, config.num_experts, config.top_k)
    return tuple(ManyTokens(sizes, label=f"{model}, {name}") for name in SYSTEMS)


def ratios(shape: Sizes, times: tuple[float, ...]) -> tuple[Case, ...]:
    """Experts so many times as wide, of which a token has as many fewer."""
    made = [shape._replace(n=int(shape.n * x), E=int(shape.E / x), K=int(shape.K / x)) for x in times]
    return tuple(Case(each, label=f"{each.n / each.d:g}") for each in made)


ITEMS = {
    "layers": Item(
        layers.models,
        tuple(Case(model.sizes, label=model.name) for model in MODELS),
        (Case(SMALL, label="small"),),
        ("sonic", "grouped_mm"),
        rounds=5,
    ),
    "figure_10": Item(
        megablocks.figure_10,
        tuple(Case(FIGURE_10._replace(E=experts), "gelu") for experts in EXPERTS),
        tuple(Case(SMALL._replace(E=experts, K=1, halves=1), "gelu") for experts in (2, 4)),
        rounds=5,
        seconds=20,
    ),
    "choices": Item(
        layers.choices,
        many("Qwen3-30B-A3B", "gpt-oss-20b"),
        (ManyTokens(SMALL._replace(T=256), label="small"),),
        rounds=5,
        seconds=15,
    ),
    "skew": Item(
        layers.skew,
        of("Qwen3-30B-A3B", "Mixtral 8x7B", "Llama 4 Scout"),
        (Case(SMALL, label="small"),),
        rounds=5,
        seconds=35,
    ),
    "padding": Item(
        layers.padding,
        many("Qwen3-30B-A3B", "Mixtral 8x7B"),
        (ManyTokens(SMALL, label="small"),),
        rounds=5,
        seconds=10,
    ),
    "micro_batch": Item(megablocks.micro_batch, systems("dMoE-XS"), systems("small"), rounds=1, seconds=40),
    "decode": Item(
        layers.decode,
        tuple(
            Case(BY_NAME[name].sizes._replace(T=tokens), label=name)
            for name in ("Qwen3-30B-A3B", "gpt-oss-20b", "Mixtral 8x7B")
            for tokens in FEW
        ),
        (Case(SMALL._replace(T=2), label="small"),),
        rounds=5,
        seconds=25,
    ),
    "ratios": Item(
        paper_layers.against_all,
        ratios(RATIO, (0.125, 0.25, 0.5, 1, 2, 4)),
        (Case(SMALL, label="4"),),
        ("torch_grouped",),
        rounds=5,
    ),
    "liger": Item(
        layers.liger,
        of("Qwen3-30B-A3B"),
        (Case(SMALL, label="small"),),
        rounds=5,
    ),
    "quack": Item(layers.quack, of("Qwen3-30B-A3B"), (Case(SMALL, label="small"),), rounds=5),
}
