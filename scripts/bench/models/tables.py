"""The tables of docs/results.md and README that `scripts.bench.models` makes, as the papers' are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import (
    LABELS,
    NOT_MEASURED,
    OURS,
    Column,
    Record,
    caveat,
    number,
    plain_shape,
)
from scripts.bench.module_tables import EVEN, mean_and_span
from scripts.bench.paper.cells import SHAPE, Rows, experts_ms, floor, floor_cell, of, ratio, value
from scripts.bench.paper.tables import Shown, markdown
from scripts.bench.render import Entry, fixed

RUNS = 3  # of a model, of which the headline is the median
MODEL: Column = ("model", itemgetter("label"))
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


def times_ours(name: str, row: Record, part: str = "fwdbwd") -> float | None:
    """A program's time over ours."""
    above, below = value(row, name, f"{part}_ms"), value(row, OURS, f"{part}_ms")
    return above / below if above and below else None


def over_ours(name: str, part: str = "fwdbwd") -> Callable[[Record], str]:
    return lambda row: number(times_ours(name, row, part))


def module_ms(part: str, sizes: Sizes, gpu: str) -> float:
    """The floor of a whole layer, its router included: forward ("fwd"), or forward and backward ("fwdbwd")."""
    forward, backward = map(sum, zip(cost.layer_floor_ms(sizes, gpu), cost.router_floor_ms(sizes, gpu), strict=True))
    return forward if part == "fwd" else forward + backward


def share_of_floor(row: Record) -> float | None:
    least = floor(row, partial(module_ms, "fwdbwd"))
    return least and least / row["programs"][OURS]["fwdbwd_ms"]


def times_beside_floor(part: str, head: str) -> list[Entry]:
    return [
        (f"{head}: ours", of(OURS, f"{part}_ms")),
        ("SonicMoE", of("sonic", f"{part}_ms")),
        ("grouped_mm", of("grouped_mm", f"{part}_ms")),
        ("floor", floor_cell(partial(module_ms, part))),
    ]


layers_columns = fixed(
    MODEL,
    ("T, d, n, E, K", plain_shape),
    *times_beside_floor("fwd", "forward"),
    *times_beside_floor("fwdbwd", "forward + backward"),
    ("SonicMoE / ours: fwd", over_ours("sonic", "fwd")),
    ("fwd + bwd", over_ours("sonic")),
    ("grouped_mm / ours: fwd + bwd", over_ours("grouped_mm")),
    ("floor / ours", share_of_floor),
    ("peak MiB: ours", of(OURS, "peak_MiB", 0)),
    ("SonicMoE", of("sonic", "peak_MiB", 0)),
    ("grouped_mm", of("grouped_mm", "peak_MiB", 0)),
)


LAYERS_NOTE = (
    "Kernel time, ms; grouped_mm: transformers' Qwen3-MoE block, and the auxiliary loss as its models compute it. "
    "Router included."
)
ONLY_SIZES = "Only the sizes are the models': SwiGLU, no biases, no shared experts."
NOT_THE_HEADLINE = "One run of each model: not the headline, which is the median of several runs."


def outside(record: Record, headline: Record) -> Record:
    """The models that the headline has no figure of."""
    measured = {row["label"] for row in headline["rows"] if len(row["runs"]) >= RUNS}
    return record | {"rows": [row for row in record["rows"] if row["label"] not in measured]}


def claim(record: Record, headline: Record) -> str:
    """How ours stands beside each peer on the models of one run each that the headline has no figure of; sentences."""
    said, rows = [], outside(record, headline)["rows"]
    for name, who in (
        ("sonic", "SonicMoE's module"),
        ("grouped_mm", "transformers' Qwen3-MoE block with `grouped_mm`"),
    ):
        found = [times for row in rows if (times := times_ours(name, row)) is not None]
        if found:
            ahead, behind = sum(times > 1 + EVEN for times in found), sum(times < 1 - EVEN for times in found)
            counts = f"faster on {ahead}, even within 2 % on {len(found) - ahead - behind}, slower on {behind} of {len(found)}"
            said.append(f"beside {who} {counts}, {mean_and_span(found)}")
    if not said:
        return NOT_MEASURED
    of_earlier = f" ({note})" if (note := caveat(rows)) else ""
    return f"{NOT_THE_HEADLINE} Forward and backward, ours is {'; '.join(said)}{of_earlier}."


def figure_10_columns(rows: Rows) -> list[Column]:
    names = (OURS, "dmoe", "sequential")
    columns: list[Column] = [("E", lambda row: str(row["cfg"]["E"]))]
    columns += [(f"{LABELS[name]}, ms", partial(with_deviation, name)) for name in names]
    columns += [("sequential / `dMoE`", ratio("sequential", "dmoe", "fwd_ms"))]
    columns += [("printed of an A100", lambda row: PRINTED.get(row["cfg"]["E"], "–"))]
    return [*columns, ("sequential / blazeproto", ratio("sequential", OURS, "fwd_ms"))]


def with_deviation(name: str, row: Record) -> str:
    found = row["programs"][name]
    return f"{number(found['fwd_ms'], 3)} ± {number(found['deviation_ms'], 3)}"


def micro_batch_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [("experts", lambda row: SYSTEMS[row["system"]]), ("model", itemgetter("model"))]
    columns += [("largest micro-batch", lambda row: str(row["micro_batch"]))]
    columns += [("printed", lambda row: PRINTED_BATCH.get(row["system"], "–"))]
    common = min((row["micro_batch"] for row in rows), default=0)
    return [*columns, (f"peak GiB at {common}", lambda row: number(row["peak_GiB"].get(str(common)), 1))]


def by_kind(names: dict[str, str], base: str, parts: Sequence[tuple[str, str, int]], rows: Rows) -> list[Column]:
    """A row's programs, each part's first and then the others' over it."""
    columns: list[Column] = [MODEL, ("T", lambda row: str(row.get("tokens") or row["cfg"]["T"]))]
    for field, head, digits in parts:
        columns.append((f"{head}: {names[base]}", of(base, field, digits)))
        columns += [(f"{said} ×", ratio(name, base, field)) for name, said in names.items() if name != base]
    return columns


TIMES = (("fwd_ms", "forward ms", 2), ("fwdbwd_ms", "forward + backward ms", 2))
PEAK = ("peak_MiB", "peak MiB", 0)


def choices_columns(rows: Rows) -> list[Column]:
    return by_kind(CHOICES, "top_k", (*TIMES, PEAK, ("pairs", "pairs", 0)), rows)


def weights_us(row: Record) -> str:
    """The floor of few tokens: one pass over the weights of the experts that they chose, and the router's, in bf16."""

    def least_ms(sizes: Sizes, gpu: str) -> float:
        return cost.floor_ms(0.0, 2 * sizes.d * (row["chosen_experts"] * (sizes.h + sizes.n) + sizes.E), gpu)

    least = floor(row, least_ms)
    return number(least and 1e3 * least, 1)


decode_columns = fixed(
    MODEL,
    ("T", "cfg.T", None),
    ("experts chosen", "chosen_experts", 1),
    ("ours, µs", of(OURS, "fwd_us", 1)),
    ("grouped_mm", of("grouped_mm", "fwd_us", 1)),
    ("floor", weights_us),
    ("grouped_mm / ours", ratio("grouped_mm", OURS, "fwd_us")),
)


ratios_columns = fixed(
    ("n / d", "label"),
    SHAPE,
    ("forward ms: ours", of(OURS, "fwd_ms")),
    ("torch grouped_mm", of("torch_grouped", "fwd_ms")),
    ("forward + backward ms: ours", of(OURS, "fwdbwd_ms")),
    ("torch grouped_mm", of("torch_grouped", "fwdbwd_ms")),
    ("floor, forward + backward", floor_cell(experts_ms)),
)


def peer_columns(first: str, peer: str, parts: dict[str, str], rows: Rows) -> list[Column]:
    columns: list[Column] = [MODEL, SHAPE]
    for part, head in parts.items():
        columns += [(f"{head}: ours, ms", of(first, f"{part}_ms", 3)), (LABELS[peer], of(peer, f"{part}_ms", 3))]
        columns += [(f"{LABELS[peer]} / ours", ratio(peer, first, f"{part}_ms"))]
    return columns


def ran(peer: str, rows: Rows) -> Rows:
    """The rows in which a peer has run, by the versions of its own process."""

    def versions(row: Record) -> str:
        return ", ".join(each for each in row["versions"][peer] if each.startswith(("torch ", peer)))

    return [row | {"of": row["of"] | {"versions": versions(row)}} for row in rows if peer in row["programs"]]


SHOWN = {
    "layers": Shown("layers", "Layers of models", layers_columns, LAYERS_NOTE),
    "figure_10": Shown(
        "figure_10",
        "MegaBlocks, Figure 10",
        figure_10_columns,
        "Forward, eager, mean and standard deviation of the rounds; T = 16384, d = 768, n = 3072, K = 1, GELU.",
        picture="models_figure_10.png",
    ),
    "micro_batch": Shown(
        "micro_batch",
        "MegaBlocks, Table 3",
        micro_batch_columns,
        "A training step in at most 80 GiB of the GPU's memory, bf16 autocast, AdamW, sequences of 1024. The model reads "
        "bytes, the paper's 51200 words.",
    ),
    "choices": Shown("choices", "Choices of experts", choices_columns, "Whole layers; × top-k's."),
    "skew": Shown(
        "skew",
        "Skewed routings of models",
        partial(by_kind, SKEWED, "uniform", (("dispatch_ms", "dispatch ms", 3), *TIMES)),
        "Dispatch and experts on given ids; × uniform's. A trained router's: Zipf's law with the largest exponent that the "
        "routers of four layers have after 200 steps of a small language model.",
    ),
    "padding": Shown(
        "padding", "Masked tokens", partial(by_kind, PADDED, "all", (*TIMES, PEAK)), "Whole layers; × all tokens'."
    ),
    "decode": Shown(
        "decode",
        "Few tokens",
        decode_columns,
        "Whole layers, forward; the floor is the bytes of the weights of the chosen experts and of the router.",
    ),
    "ratios": Shown(
        "ratios", "Widths of experts", ratios_columns, "The experts alone, as many operations in each row."
    ),
    "liger": Shown(
        "liger",
        "Liger",
        partial(peer_columns, OURS, "liger", {"fwd": "forward", "fwdbwd": "forward + backward"}),
        "Whole layers, each program in processes of its own.",
        partial(ran, "liger"),
    ),
    "quack": Shown(
        "quack",
        "QuACK's gated products",
        partial(peer_columns, "our_products", "quack", {"up": "up projection", "dh": "dH"}),
        "Rows gathered, each program in processes of its own.",
        partial(ran, "quack"),
    ),
}

TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    f"models_{name}": (f"models/{shown.item}", partial(markdown, shown)) for name, shown in SHOWN.items()
} | {
    "models_layers": ("models/layers headline", lambda *records: markdown(SHOWN["layers"], outside(*records))),
}
TABLES |= {
    f"models_{name}_h100": (f"../h100/models/{name}", partial(markdown, SHOWN[name]))
    for name in ("ratios", "liger", "quack")
}
"""For docs/results.md: the results file and what makes the table, as `result_tables.TABLES` has them."""
SENTENCES: dict[str, tuple[str, Callable[..., str]]] = {"models_claim": ("models/layers headline", claim)}
