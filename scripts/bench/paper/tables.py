"""The papers' tables as docs/papers.md has them, what was measured beside what is printed, and what a review asks of a layer.

Rows and values of programs' figures are shared with the tables of models and the headline.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

from blazeproto import cost
from blazeproto.activations import activation_named
from blazeproto.autograd import SavePolicy
from blazeproto.gemm import PRODUCTS, Sizes
from scripts.bench.markdown import (
    LABELS,
    OURS,
    SHAPE,
    Entry,
    Record,
    Rows,
    Table,
    each_of,
    least_to_most,
    look_up,
    number,
    values,
)
from scripts.bench.module_tables import sizes_of
from scripts.bench.paper import printed

# ---------------------------------------------------------------------------------------------------- programs' figures

LABEL: Entry = ("", "label")
ACTIVATION: Entry = ("activation", "activation")


def of(program: str, field: str) -> str:
    """The place of a program's figure in a row."""
    return f"programs.{program}.{field}"


def ratio(over: str, under: str, field: str) -> str:
    """One program's figure over another's."""
    return f"{of(over, field)} / {of(under, field)}"


def programs_in(rows: Rows) -> list[str]:
    """Those of LABELS that some row has."""
    return [name for name in LABELS if any(name in row["programs"] for row in rows)]


def by_program(record: Record) -> Rows:
    """A row for each program of each row."""
    return [
        {key: row[key] for key in ("cfg", "activation", "label", "of")} | {"program": name} | each
        for row in record["rows"]
        for name, each in row["programs"].items()
    ]


def with_speeds(record: Record) -> Rows:
    """The rows, each program with the ms of its backward alone, and with the TFLOP/s of a SwiGLU layer: 6 T K n d operations
    forward ("fwd_tflops"), 12 T K n d backward."""

    def more(row: Record, figures: Record) -> Record:
        operations = 6e-9 * math.prod(row["cfg"][key] for key in "TKnd")
        forward, backward = figures["fwd_ms"], (figures["fwdbwd_ms"] - figures["fwd_ms"]) or math.nan
        speeds = {"fwd_tflops": operations / forward, "bwd_tflops": 2 * operations / backward}
        return figures | speeds | {"bwd_ms": backward}

    return [
        row | {"programs": {name: more(row, figures) for name, figures in row["programs"].items()}}
        for row in record["rows"]
    ]


def gpu_of(row: Record) -> str | None:
    """The name in `blazeproto.cost.GPUS` of what a row was measured on; None where it isn't there, as a CPU."""
    return cost.known_gpu(row["of"]["gpu"])


def floor(row: Record, least_ms: Callable[[Sizes, str], float]) -> float | None:
    """The floor by ``least_ms`` of a row's sizes on its GPU; None for a GPU without rates."""
    gpu = gpu_of(row)
    return None if gpu is None else least_ms(Sizes(**row["cfg"]), gpu)


def experts_ms(sizes: Sizes, gpu: str) -> float:
    """The floor of a layer's experts, forward and backward."""
    return sum(cost.layer_floor_ms(sizes, gpu))


# -------------------------------------------------------------------------------------------- what stands below a table

PACKAGES = {
    "sonic": ("sonic-moe", "quack-kernels"),
    "mb_sparse": ("megablocks",),
    "grouped_mm": ("transformers",),
    "scattermoe": ("scattermoe",),
    "liger": ("liger-kernel",),
    "quack": ("quack-kernels",),
}
"""Whose versions stand under a table in which a program is."""


def packages_of(record: Record) -> list[str]:
    programs = {name for row in record["rows"] for name in (*row.get("programs", {}), *row.get("absent", {}))}
    return ["torch", *dict.fromkeys(package for name, each in PACKAGES.items() if name in programs for package in each)]


def absent(record: Record, _: Rows) -> str:
    """The programs that are absent from some rows, from how many, and why."""
    reasons = Counter(each for row in record["rows"] for each in row.get("absent", {}).items())
    rows = len(record["rows"])
    missing = "; ".join(
        f"{LABELS.get(name, name)}{f' in {count} of the {rows} rows measured' * (count < rows)} ({why})"
        for (name, why), count in reasons.items()
    )
    return f"Absent: {missing}." if missing else ""


def rates_and_absent(record: Record, rows: Rows) -> str:
    """The rates of floors too."""
    said = []
    for gpu in sorted(filter(None, {*map(gpu_of, rows)})):
        operations, least_bytes, source = cost.GPUS[gpu]
        rates = f"{number(operations / 1e12, 0)} TFLOP/s and {number(least_bytes / 1e12)} TB/s"
        said.append(f"Floors: {rates} ({gpu}: {source}).")
    return " ".join(filter(None, [*said, absent(record, rows)]))


Programs = partial(Table, packages=packages_of, after=absent, only_measured=True)
BesideFloor = partial(Programs, after=rates_and_absent)


# --------------------------------------------------------------------------------------------------- rows and columns


def with_printed(
    known: Mapping[Any, Sequence[Any]], key: Callable[[Record], Hashable], *names: str
) -> Callable[[Record], Rows]:
    """The rows, each with the figures that a paper prints of it, by name."""
    return lambda record: [
        row | {"printed": dict(zip(names, known.get(key(row), ()), strict=False))} for row in record["rows"]
    ]


def over_floor(row: Record) -> float | None:
    """How many times the floor MegaBlocks takes: the most that can be had over it on this GPU."""
    ms, least = look_up(row, of("mb_sparse", "fwdbwd_ms")), floor(row, experts_ms)
    return ms / least if ms and least else None


def dispatch_ms(sizes: Sizes, gpu: str) -> float:
    return cost.floor_ms(0.0, cost.dispatch_bytes(sizes.rows), gpu)


def dot_ms(sizes: Sizes, gpu: str) -> float:
    """The floor of <dO, Y>: both are read in bf16, a number a row is written in fp32."""
    return cost.floor_ms(0.0, 2 * sizes.d * (sizes.rows + sizes.T) + 4 * sizes.rows, gpu)


def ablation(record: Record) -> Rows:
    """A row for each line of MoEBlaze's Tables 4 and 5."""
    rows = by_program(record)
    for row in rows:
        if lines := printed.ABLATION.get(tuple(row["cfg"][key] for key in "dEn")):
            row["printed"] = dict(zip(("ms", "MB"), lines[printed.LINES.index(row["program"])], strict=True))
    return rows


def combine_entries(rows: Rows) -> list[Entry]:
    modes = list(dict.fromkeys(name for row in rows for name in row["programs"]))
    parts = (("fwd_ms", "forward ms", 2), ("fwdbwd_ms", "fwd + bwd ms", 2), ("peak_MiB", "peak MiB", 0))
    measured: list[Entry] = [
        (f"{head}: {mode}" if mode == modes[0] else mode, of(mode, field), digits)
        for field, head, digits in parts
        for mode in modes
    ]
    gathered: list[Entry] = [
        (f"{mode} / gather", ratio(mode, "gather", "fwdbwd_ms")) for mode in modes if mode != "gather"
    ]
    return [SHAPE, *measured, *gathered]


def granularity(record: Record) -> Rows:
    """Figure 1's four shapes, coarse to fine."""
    rows = [row for row in record["rows"] if (row["cfg"]["T"], row["cfg"]["d"]) == (32768, 4096)]
    return sorted((row for row in rows if row["cfg"]["n"] * row["cfg"]["K"] == 4096), key=lambda row: row["cfg"]["K"])


def claims(record: Record) -> Rows:
    """The claims of SonicMoE's text about Figures 1, 5 and 6a, by program: a row a claim, as old as its oldest layer."""
    rows = with_speeds(record)
    seven = [row for row in rows if (row["cfg"]["d"], row["cfg"]["n"]) == (1536, 256)]
    small = [row for row in rows if row["cfg"]["d"] in (768, 1536)]
    claimed = {
        "forward speed over the bmm bound's, the four shapes of Figure 1": (
            granularity(record),
            "bmm_ub",
            "{}",
            "fwd_ms",
        ),
        "saved bytes (printed: peak of activations) over ScatterMoE's, 7B with n = 256": (
            seven,
            "{}",
            "scattermoe",
            "saved_MiB",
        ),
        "speed over ScatterMoE's, forward + backward, 1.4B and 7B": (small, "scattermoe", "{}", "fwdbwd_ms"),
        "backward speed over ScatterMoE's, 7B with n = 256": (seven, "scattermoe", "{}", "bwd_ms"),
    }

    def mean(program: str, of_rows: Rows, *measure: str) -> str:
        found = values(of_rows, ratio(*measure).format(program))
        return f"{number(statistics.fmean(found))} ({least_to_most(found)})" if found else number(None)

    return [
        {
            "said": said,
            "printed": cited,
            "sonic": mean("sonic", *measure),
            "ours": mean(OURS, *measure),
            "of": min((row["of"] for row in measure[0]), key=itemgetter("measured")),
            "runs": measure[0],
        }
        for (said, measure), cited in zip(claimed.items(), printed.CLAIMS, strict=True)
        if measure[0]
    ]


def phases(record: Record) -> Rows:
    """A row for each program and phase."""
    return [
        {"cfg": row["cfg"], "of": row["of"], "program": name, "phase": phase} | found
        for row in record["rows"]
        for name, each in row["programs"].items()
        for phase, found in each.items()
    ]


def our_kernels(record: Record) -> Rows:
    """A row for each of our kernels whose operations and bytes are known."""
    ours = [row for row in phases(record) if row["program"] == OURS]
    return [row | line for row in ours for line in row["kernels"] if "least_bytes" in line]


def short(kernel: str) -> str:
    """A kernel's name for a cell."""
    name = (
        kernel.replace("void ", "").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].replace("|", "/")
    )
    return f"`{name[:40]}`"


def longest(row: Record) -> str:
    return "; ".join(f"{short(line['kernel'])} {number(line['ms'])}" for line in row["kernels"][:4])


ROUTINGS = {"top_k": "top-k", "rounded": "nearest", "down": "DOWN", "up": "UP"}


# -------------------------------------------------------------------------- steps, policies and activations of a layer

STEPS = {
    "plain": "torch, an expert after the other; sort",
    "blocks": "block-sparse kernels (MegaBlocks' formulation)",
    "copies": "grouped kernels with the activation inside, on copied tokens; sort",
    "sort": "tokens read by index",
    "tiled": "dispatch by tiles",
    "minimal": "act computed again in backward: ours",
    "fused": "beyond: experts summed inside the products (`fused_both`)",
    "recompute": 'beyond: the up projection again, `save="recompute"`',
}
"""What each program of the waterfall exchanges of the one before; the last two each of "minimal"."""

POLICIES = tuple(policy.value for policy in SavePolicy)
BEFORE = {name: before for before, name in zip(STEPS, [*STEPS][1:], strict=False)} | {"recompute": "minimal"}
"""What each step of the waterfall is compared with."""
FIELDS = {"fwdbwd_ms": "ms", "saved_MiB": "MiB"}


def steps_of(record: Record) -> Rows:
    """A row for each program of the waterfall, in the order of the steps, with what it saves over the step before."""
    made = []
    for row in record["rows"]:
        found = {line["program"]: line for line in by_program({"rows": [row]})}
        for name in [name for name in ("mb_sparse", *STEPS) if name in found]:
            before = found.get(BEFORE.get(name, ""), {})
            saves = {f"less_{field}": before[field] - found[name][field] for field in FIELDS if field in before}
            made.append(found[name] | saves)
    return made


def predicted_ms(policy: str, row: Record) -> float:
    """Forward + backward of the experts and their dispatch, predicted of a row's GPU; of an H200 where that has no rates."""
    sizes, known = sizes_of(row), {*PRODUCTS, "dispatch"}
    steps = [work for work in cost.layer_work(sizes, policy) if work.name.removesuffix(" again") in known]
    return sum(cost.predicted_work_ms(work, sizes, gpu_of(row) or "H200") for work in steps)


def predicted_longer(policy: str, row: Record) -> float:
    """A policy's time over "minimal"'s."""
    return predicted_ms(policy, row) / predicted_ms("minimal", row)


def longer(policy: str) -> str:
    return ratio(policy, "minimal", "fwdbwd_ms")


def activations_of(record: Record) -> Rows:
    """A row for each activation, with the time of SwiGLU, or of SiLU for those without a gate."""
    return [
        line | {"base_ms": look_up(row, of(row["activation"], "fwdbwd_ms"))}
        for row in record["rows"]
        for line in by_program({"rows": [row]})
    ]


def beside_prediction(policy: str) -> list[Entry]:
    return [(f"{policy}: ms", of(policy, "fwdbwd_ms")), ("predicted", partial(predicted_ms, policy))]


def longer_beside_prediction(policy: str) -> list[Entry]:
    return [(f"{policy} / minimal", longer(policy), 3), ("predicted", partial(predicted_longer, policy), 3)]


# ---------------------------------------------------------------------------------------------------------- the tables

OF_MEGABLOCKS = ("mb_sparse", OURS)
TABLES = {
    "paper_figures": BesideFloor(
        "paper/moeblaze-figures",
        [
            LABEL,
            SHAPE,
            ACTIVATION,
            ("saved MiB: ours", of(OURS, "saved_MiB"), 0),
            ("ours, as Algorithm 1", of("paper", "saved_MiB"), 0),
            ("MegaBlocks", of("mb_sparse", "saved_MiB"), 0),
            (
                "printed MB: MoEBlaze, MegaBlocks",
                lambda row: printed.FIGURE_MEMORY.get((row["label"], row["activation"])),
            ),
            ("peak MiB: ours", of(OURS, "peak_MiB"), 0),
            ("MegaBlocks", of("mb_sparse", "peak_MiB"), 0),
            ("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")),
            ("MegaBlocks", of("mb_sparse", "fwdbwd_ms")),
            ("floor", partial(floor, least_ms=experts_ms)),
            ("MegaBlocks / ours", ratio(*OF_MEGABLOCKS, "fwdbwd_ms")),
            ("eager", ratio(*OF_MEGABLOCKS, "eager_fwdbwd_ms")),
            ("printed speedup over MegaBlocks", lambda row: printed.FIGURE_SPEED[row["activation"]]),
            ("MegaBlocks / floor", over_floor),
            ("up projection, FLOP/B", "up_operations_a_byte", 0),
        ],
        picture="![MoEBlaze, Figures 3 to 6](paper_moeblaze.png)",
    ),
    "paper_scale": BesideFloor(
        "paper/moeblaze-scale",
        [
            ACTIVATION,
            ("T", "cfg.T", None),
            ("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")),
            ("eager", of(OURS, "eager_fwdbwd_ms")),
            ("printed, MoEBlaze", "printed.ms", 1),
            ("MegaBlocks", of("mb_sparse", "fwdbwd_ms")),
            ("eager", of("mb_sparse", "eager_fwdbwd_ms")),
            ("printed, MegaBlocks", "printed.megablocks_ms", 1),
            ("MegaBlocks / ours", ratio(*OF_MEGABLOCKS, "fwdbwd_ms")),
            ("eager", ratio(*OF_MEGABLOCKS, "eager_fwdbwd_ms")),
            ("printed, MegaBlocks / MoEBlaze", "printed.megablocks_ms / printed.ms", 1),
            ("MegaBlocks / floor", over_floor),
            ("saved MiB: ours", of(OURS, "saved_MiB"), 0),
            ("ours, as Algorithm 1", of("paper", "saved_MiB"), 0),
            ("printed, MoEBlaze", "printed.MB", 0),
            ("MegaBlocks", of("mb_sparse", "saved_MiB"), 0),
            ("printed, MegaBlocks", "printed.megablocks_MB", 0),
            ("peak MiB: ours", of(OURS, "peak_MiB"), 0),
            ("MegaBlocks", of("mb_sparse", "peak_MiB"), 0),
        ],
        rows=with_printed(
            printed.SCALE,
            lambda row: (row["activation"], row["cfg"]["T"]),
            *("ms", "MB", "megablocks_ms", "megablocks_MB"),
        ),
    ),
    "paper_dispatch": BesideFloor(
        "paper/moeblaze-dispatch",
        [
            LABEL,
            ("E / K", lambda row: f"{row['cfg']['E']} / {row['cfg']['K']}"),
            ("ms: ours", "tiled_ms", 3),
            ("the paper's three steps", "dense_ms", 3),
            ("CuPy sort", "sort_ms", 3),
            ("torch.sort", "torch_sort_ms", 3),
            ("floor", partial(floor, least_ms=dispatch_ms), 3),
            ("printed: sorting", "printed.sorting", 1),
            ("hash", "printed.hash", 1),
            ("CuPy sort / the three steps", "sort_ms / dense_ms", 1),
            ("CuPy sort / ours", "sort_ms / tiled_ms", 1),
            ("printed: sorting / hash", "printed.sorting / printed.hash", 1),
        ],
        rows=with_printed(printed.DISPATCH, itemgetter("label"), "sorting", "hash"),
    ),
    "paper_ablation": Programs(
        "paper/moeblaze-ablation",
        [
            SHAPE,
            ("", "program"),
            ("fwd + bwd ms: eager", "eager_fwdbwd_ms"),
            ("kernels", "fwdbwd_ms"),
            ("printed", "printed.ms"),
            ("saved MiB", "saved_MiB", 0),
            ("printed", lambda row: str(row["printed"]["MB"]) if "printed" in row else None),
            ("peak MiB", "peak_MiB", 0),
        ],
        rows=ablation,
    ),
    "paper_gather": Programs(
        "paper/moeblaze-gather",
        [
            SHAPE,
            ("ms: gathered", "gathered_ms"),
            ("rows in order", "contiguous_ms"),
            ("grouped_mm after a copy", "copied_torch_ms"),
            ("grouped_mm, rows in order", "torch_ms"),
            ("gathered over rows in order, %", lambda row: 100 * row["gather_overhead"], 1),
            ("printed", lambda row: f"about {number(100 * printed.GATHER_OVERHEAD, 0)}"),
        ],
    ),
    "paper_combine": Programs("paper/combine", combine_entries),
    "paper_claims": Programs(
        "paper/sonicmoe-layers",
        [("", "said"), ("printed of SonicMoE", "printed"), ("SonicMoE here", "sonic"), ("ours", "ours")],
        "Means, and least to most.",
        claims,
        after="",
    ),
    "paper_phases": Programs(
        "paper/sonicmoe-kernels",
        [
            SHAPE,
            ("program", lambda row: LABELS[row["program"]]),
            ("", "phase"),
            ("ms of products", "products_ms"),
            ("of all others", "others_ms"),
            ("TFLOP/s of the products", "tflops", 0),
            ("longest kernels, ms", longest),
        ],
        rows=phases,
        picture="![SonicMoE, Figure 2a](paper_kernels.png)",
    ),
    "paper_kernels": Programs(
        "paper/sonicmoe-kernels",
        [
            SHAPE,
            ("", "phase"),
            ("kernel", lambda row: short(row["kernel"])),
            ("launches", "launches", 0),
            ("ms", "ms", 3),
            ("TFLOP/s", lambda row: 1e-9 * row["operations"] / row["ms"], 0),
            ("TB/s", lambda row: 1e-9 * row["least_bytes"] / row["ms"]),
        ],
        rows=our_kernels,
    ),
    "paper_rounding": Programs(
        "paper/sonicmoe-rounding",
        [
            LABEL,
            SHAPE,
            ("empty rows of tiles, %", lambda row: 100 * row["wasted"], 1),
            *each_of(ROUTINGS | {"top_k": "forward TFLOP/s: top-k"}, "{}.fwd_tflops", 0),
            *each_of(ROUTINGS | {"top_k": "backward TFLOP/s: top-k"}, "{}.bwd_tflops", 0),
            ("nearest over top-k: forward", "rounded.fwd_tflops / top_k.fwd_tflops", 3),
            ("backward", "rounded.bwd_tflops / top_k.bwd_tflops", 3),
            ("both", "rounded.fwdbwd_tflops / top_k.fwdbwd_tflops", 3),
            ("printed", lambda row: printed.ROUNDING_GAIN.get((row["label"], row["cfg"]["E"]))),
        ],
        picture="![SonicMoE, Figures 3 and 7, the experts alone](paper_rounding.png)",
    ),
    "paper_scores": BesideFloor(
        "paper/sonicmoe-scores",
        [
            SHAPE,
            ("backward ms, dS in it", "bwd_ms"),
            ("⟨dO, Y⟩ beside it", "dot_ms", 3),
            ("floor", partial(floor, least_ms=dot_ms), 3),
            ("of the backward, %", lambda row: 100 * row["dot_ms"] / row["bwd_ms"], 1),
            ("saved MiB", "saved_MiB", 0),
            ("with Y", lambda row: row["saved_MiB"] + row["y_MiB"], 0),
        ],
    ),
    "paper_waterfall": Programs(
        "paper/waterfall",
        [
            SHAPE,
            ("", lambda row: STEPS.get(row["program"]) or LABELS[row["program"]]),
            ("forward ms", "fwd_ms"),
            ("forward + backward ms", "fwdbwd_ms"),
            ("less than before, ms", "less_fwdbwd_ms"),
            ("saved MiB", "saved_MiB", 0),
            ("less, MiB", "less_saved_MiB", 0),
            ("peak MiB", "peak_MiB", 0),
        ],
        "Sums of kernel durations.",
        steps_of,
        picture="![What each step saves](waterfall.png)",
    ),
    "paper_policies": Programs(
        "paper/policies",
        [
            ("over", "label"),
            SHAPE,
            *chain.from_iterable(map(beside_prediction, POLICIES)),
            *chain.from_iterable(map(longer_beside_prediction, POLICIES[1:])),
            *each_of({policy: f"saved MiB: {policy}" for policy in POLICIES}, of("{}", "saved_MiB"), 0),
            *each_of({policy: f"peak MiB: {policy}" for policy in POLICIES}, of("{}", "peak_MiB"), 0),
        ],
        "The experts alone, forward + backward.",
        picture="![Save policies over T and n](policies.png)",
    ),
    "paper_activations": Programs(
        "paper/activations",
        [
            SHAPE,
            ("activation", "program"),
            ("gate", lambda row: "yes" if activation_named(row["program"]).gated else "no"),
            ("forward ms", "fwd_ms"),
            ("forward + backward ms", "fwdbwd_ms"),
            ("over SwiGLU's, or SiLU's", "fwdbwd_ms / base_ms", 3),
            ("saved MiB", "saved_MiB", 0),
            ("peak MiB", "peak_MiB", 0),
        ],
        rows=activations_of,
    ),
}
"""By the name of a marker, as `scripts.bench.tables.TABLES`."""
