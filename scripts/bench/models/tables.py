"""The tables of docs/results.md and README that `scripts.bench.models` makes, as the papers' are made."""

import math
from collections.abc import Callable
from functools import partial

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import (
    LABELS,
    OURS,
    Entry,
    Record,
    Rows,
    Sentence,
    mean_and_span,
    number,
    values,
)
from scripts.bench.module_tables import standing
from scripts.bench.paper.tables import SHAPE, BesideFloor, Programs, experts_ms, floor, of, ratio

RUNS = 2  # of a model, at least, of which the headline is the median
MODEL: Entry = ("model", "label")
PRINTED = {2: "1.15", 128: "20"}  # MegaBlocks, Figure 10: SwitchMLP's time over dMoE's, on an A100
PRINTED_BATCH = {"dmoe": "64", "dropping": "32"}  # MegaBlocks, Table 3: dMoE-XS by MegaBlocks and by Tutel
SYSTEMS = {"moe": "`MoE`", "dmoe": "`dMoE`", "dropping": "padded to the largest load", "sequential": "in sequence"}
CHOICES = {"top_k": "top-k", "token_rounding": "token rounding", "capacity": "capacity"}
CHOICES |= {"expert_choice": "expert choice", "hash": "hash"}
PADDED = {"all": "all tokens", "masked": "half masked", "half": "half as many"}
SKEWED = {
    "uniform": "uniform",
    "trained": "a trained router's",
    "zipf": "Zipf(1.2)",
    "everybody_s": "one expert has all",
    "same": "the same K for all",
}
PEERS = {"sonic": "SonicMoE's module", "grouped_mm": "transformers' Qwen3-MoE block with `grouped_mm`"}
TIMES = (("fwd_ms", "forward ms", 2), ("fwdbwd_ms", "forward + backward ms", 2))
PEAK = ("peak_MiB", "peak MiB", 0)
LAYERS_NOTE = (
    "Kernel time, ms; grouped_mm: transformers' Qwen3-MoE block, and the auxiliary loss as its models compute it. "
    "Router included."
)
ONLY_SIZES = "Only the sizes are the models': SwiGLU, no biases, no shared experts."
NOT_THE_HEADLINE = "One run of each model: not the headline, which is the median of several runs."


def times_ours(name: str) -> str:
    """A program's time over ours."""
    return ratio(name, OURS, "fwdbwd_ms")


def outside(record: Record, headline: Record) -> Rows:
    """The models that the headline has no figure of."""
    measured = {row["label"] for row in headline["rows"] if len(row["runs"]) >= RUNS}
    return [row for row in record["rows"] if row["label"] not in measured]


def claim(rows: Rows) -> str:
    """How ours stands beside each peer on the models of one run each that the headline has no figure of; sentences."""
    times = {who: values(rows, times_ours(name)) for name, who in PEERS.items()}
    said = [
        f"beside {who} {standing(found)}, {mean_and_span(found, ' times as fast')}"
        for who, found in times.items()
        if found
    ]
    return f"{NOT_THE_HEADLINE} Forward and backward, ours is {'; '.join(said)}." if said else ""


SENTENCES = {"models_claim": Sentence("models/layers headline", claim, outside)}


# ------------------------------------------------------------------------------------------------------------- columns


def module_ms(part: str, sizes: Sizes, gpu: str) -> float:
    """The floor of a whole layer, its router included: forward ("fwd"), or forward and backward ("fwdbwd")."""
    forward, backward = map(sum, zip(cost.layer_floor_ms(sizes, gpu), cost.router_floor_ms(sizes, gpu), strict=True))
    return forward if part == "fwd" else forward + backward


def share_of_floor(row: Record, program: str = OURS) -> float:
    """The share of the floor's speed that a program has; NaN for a GPU without rates."""
    least = floor(row, partial(module_ms, "fwdbwd")) or math.nan
    return least / float(row["programs"][program]["fwdbwd_ms"])


def beside_floor(part: str, head: str) -> list[Entry]:
    return [
        (f"{head}: ours", of(OURS, f"{part}_ms")),
        ("SonicMoE", of("sonic", f"{part}_ms")),
        ("grouped_mm", of("grouped_mm", f"{part}_ms")),
        ("floor", partial(floor, least_ms=partial(module_ms, part))),
    ]


def with_deviation(name: str, row: Record) -> str:
    found = row["programs"][name]
    return f"{number(found['fwd_ms'], 3)} ± {number(found['deviation_ms'], 3)}"


def micro_batch_entries(rows: Rows) -> list[Entry]:
    common = min(row["micro_batch"] for row in rows)
    return [
        ("experts", lambda row: SYSTEMS[row["system"]]),
        ("model", "model"),
        ("largest micro-batch", "micro_batch", None),
        ("printed", lambda row: PRINTED_BATCH.get(row["system"])),
        (f"peak GiB at {common}", f"peak_GiB.{common}", 1),
    ]


def by_kind(names: dict[str, str], *parts: tuple[str, str, int]) -> list[Entry]:
    """A row's programs, each part's first and then the others' over it."""
    (base, first), *others = names.items()
    columns: list[Entry] = [MODEL, ("T", lambda row: row.get("tokens") or row["cfg"]["T"], None)]
    for field, head, digits in parts:
        columns.append((f"{head}: {first}", of(base, field), digits))
        columns += [(f"{said} ×", ratio(name, base, field)) for name, said in others]
    return columns


def weights_us(row: Record) -> float | None:
    """The floor of few tokens: one pass over the weights of the experts that they chose, and the router's, in bf16."""

    def least_us(sizes: Sizes, gpu: str) -> float:
        least_bytes = 2 * sizes.d * (row["chosen_experts"] * (sizes.h + sizes.n) + sizes.E)
        return 1e3 * cost.floor_ms(0.0, least_bytes, gpu)

    return floor(row, least_us)


def beside_peer(first: str, peer: str, parts: dict[str, str]) -> list[Entry]:
    columns: list[Entry] = [MODEL, SHAPE]
    for part, head in parts.items():
        columns += [(f"{head}: ours, ms", of(first, f"{part}_ms"), 3), (LABELS[peer], of(peer, f"{part}_ms"), 3)]
        columns.append((f"{LABELS[peer]} / ours", ratio(peer, first, f"{part}_ms")))
    return columns


def ran(peer: str) -> Callable[[Record], Rows]:
    """The rows in which a peer has run, by the versions of its own process."""

    def versions(row: Record) -> str:
        return ", ".join(each for each in row["versions"][peer] if each.startswith(("torch ", peer)))

    return lambda record: [
        row | {"of": row["of"] | {"versions": versions(row)}} for row in record["rows"] if peer in row["programs"]
    ]


# ---------------------------------------------------------------------------------------------------------- the tables

TABLES = {
    "models_layers": BesideFloor(
        "models/layers headline",
        [
            MODEL,
            SHAPE,
            *beside_floor("fwd", "forward"),
            *beside_floor("fwdbwd", "forward + backward"),
            ("SonicMoE / ours: fwd", ratio("sonic", OURS, "fwd_ms")),
            ("fwd + bwd", times_ours("sonic")),
            ("grouped_mm / ours: fwd + bwd", times_ours("grouped_mm")),
            ("floor / ours", share_of_floor),
            ("peak MiB: ours", of(OURS, "peak_MiB"), 0),
            ("SonicMoE", of("sonic", "peak_MiB"), 0),
            ("grouped_mm", of("grouped_mm", "peak_MiB"), 0),
        ],
        LAYERS_NOTE,
        outside,
    ),
    "models_figure_10": Programs(
        "models/figure_10",
        [
            ("E", "cfg.E", None),
            *((f"{LABELS[name]}, ms", partial(with_deviation, name)) for name in (OURS, "dmoe", "sequential")),
            ("sequential / `dMoE`", ratio("sequential", "dmoe", "fwd_ms")),
            ("printed of an A100", lambda row: PRINTED.get(row["cfg"]["E"])),
            ("sequential / blazeproto", ratio("sequential", OURS, "fwd_ms")),
        ],
        "Forward, eager, mean and standard deviation of the rounds; T = 16384, d = 768, n = 3072, K = 1, GELU.",
        picture="![MegaBlocks, Figure 10](models_figure_10.png)",
    ),
    "models_micro_batch": Programs(
        "models/micro_batch",
        micro_batch_entries,
        "A training step in at most 80 GiB of the GPU's memory, bf16 autocast, AdamW, sequences of 1024. The model reads "
        "bytes, the paper's 51200 words.",
    ),
    "models_choices": Programs(
        "models/choices", by_kind(CHOICES, *TIMES, PEAK, ("pairs", "pairs", 0)), "Whole layers; × top-k's."
    ),
    "models_skew": Programs(
        "models/skew",
        by_kind(SKEWED, ("dispatch_ms", "dispatch ms", 3), *TIMES),
        "Dispatch and experts on given ids; × uniform's. A trained router's: Zipf's law with the largest exponent that the "
        "routers of four layers have after 200 steps of a small language model.",
    ),
    "models_padding": Programs("models/padding", by_kind(PADDED, *TIMES, PEAK), "Whole layers; × all tokens'."),
    "models_decode": BesideFloor(
        "models/decode",
        [
            MODEL,
            ("T", "cfg.T", None),
            ("experts chosen", "chosen_experts", 1),
            ("ours, µs", of(OURS, "fwd_us"), 1),
            ("grouped_mm", of("grouped_mm", "fwd_us"), 1),
            ("floor", weights_us, 1),
            ("grouped_mm / ours", ratio("grouped_mm", OURS, "fwd_us")),
        ],
        "Whole layers, forward; the floor is the bytes of the weights of the chosen experts and of the router.",
    ),
    "models_ratios": BesideFloor(
        "models/ratios",
        [
            ("n / d", "label"),
            SHAPE,
            ("forward ms: ours", of(OURS, "fwd_ms")),
            ("torch grouped_mm", of("torch_grouped", "fwd_ms")),
            ("forward + backward ms: ours", of(OURS, "fwdbwd_ms")),
            ("torch grouped_mm", of("torch_grouped", "fwdbwd_ms")),
            ("floor, forward + backward", partial(floor, least_ms=experts_ms)),
        ],
        "The experts alone, as many operations in each row.",
    ),
    "models_liger": Programs(
        "models/liger",
        beside_peer(OURS, "liger", {"fwd": "forward", "fwdbwd": "forward + backward"}),
        "Whole layers, each program in processes of its own.",
        ran("liger"),
    ),
    "models_quack": Programs(
        "models/quack",
        beside_peer("our_products", "quack", {"up": "up projection", "dh": "dH"}),
        "Rows gathered, each program in processes of its own.",
        ran("quack"),
    ),
}
"""By the name of a marker, as `scripts.bench.tables.TABLES`."""
