"""The table and sentences of whole layers, `module.json`, and the sentence of the router alone, `router.json`."""

import statistics
from collections.abc import Sequence

from blazeproto.gemm import Sizes
from scripts.bench.common import EXTRA_SHAPES, MODULE_SHAPES, SHAPES, TABLES, geometric_mean, table_of
from scripts.bench.markdown import (
    SHAPE,
    Entry,
    Record,
    Rows,
    Sentence,
    Table,
    condition,
    gpus_of,
    having,
    look_up,
    mean_and_span,
    number,
    plainly,
    span,
    split,
    values,
    versions_of,
    warned,
)

PACKAGES = ("sonic-moe", "quack-kernels", "torch")

# What SonicMoE's time over ours has to be, forward + backward: least on a shape, and the geometric mean of the large ones.
LEAST_RATIO, LEAST_MEAN = 1.05, 1.07
CLOSE_SHAPES = dict.fromkeys((SHAPES[3], SHAPES[8], *EXTRA_SHAPES[2:4]), 1.03)
LARGE_TABLES = ("sonicmoe-9a", "moeblaze-1")
EVEN = 0.02  # a ratio this near to 1 is even
TINY = "moeblaze-2"  # one tiny layer with five numbers of tokens, whose ratios are far from the others'
# Above 1 we are ahead; above 1 we take more.
TIMES_OURS, PEAK_RATIO = "sonic_fwdbwd_ms / ours_fwdbwd_ms", "ours_peak_fwdbwd_MiB / sonic_peak_fwdbwd_MiB"
BOUNDS = {
    "time": f"SonicMoE's time over ours, forward + backward, at least {LEAST_RATIO}, or 1.03 on four close shapes",
    "peak": "our peak not above SonicMoE's",
    "saved": "the router saves at most x, (T, E) fp32 and (T, K)",
}


def sizes_of(row: Record) -> Sizes:
    return Sizes(**row["cfg"])


# -------------------------------------------------------------------------------------------------------------- bounds


def bounds(row: Record) -> dict[str, bool | None]:
    """Whether a row holds what is asked of it, by name; None: not measured."""
    times, peak = look_up(row, TIMES_OURS), look_up(row, PEAK_RATIO)
    return {
        "time": None if times is None else times >= CLOSE_SHAPES.get(sizes_of(row), LEAST_RATIO),
        "peak": None if peak is None else peak <= 1,
        "saved": row["router_saved_bytes"] <= row["router_may_save_bytes"],
    }


def mean_of_large(rows: Rows) -> tuple[float, int]:
    """Geometric mean of TIMES_OURS over the shapes of LARGE_TABLES, and how many of them were measured."""
    found = values((row for row in rows if table_of(sizes_of(row)) in LARGE_TABLES), TIMES_OURS)
    return geometric_mean(found), len(found)


def verdicts(rows: Rows) -> list[tuple[str, bool]]:
    """Each bound in words, on how many shapes it holds, and whether on all."""
    made = []
    for name, what in BOUNDS.items():
        held = [bounds(row)[name] for row in rows]
        failing = [str(sizes_of(row)) for row, holds in zip(rows, held, strict=True) if holds is False]
        of_these = f", not on {', '.join(failing)}" if failing else ""
        made.append((f"{what}: on {held.count(True)} of {len(rows)} shapes{of_these}", all(held)))
    mean, measured = mean_of_large(rows)
    large = sum(len(TABLES[table]) for table in LARGE_TABLES)
    what = f"geometric mean of SonicMoE's time over ours, {measured} of {large} large shapes: {mean:.3f}, at least {LEAST_MEAN}"
    return [*made, (what, mean >= LEAST_MEAN and measured == large)]


# ----------------------------------------------------------------------------------------------------------- sentences


def by_layer(rows: Rows) -> dict[str, Rows]:
    """The rows of the tiny layer apart from all others, by what they are."""
    tiny, others = split(rows, lambda row: table_of(sizes_of(row)) == TINY)
    return {what: each for what, each in (("shapes", others), ("sizes of one tiny layer", tiny)) if each}


def standing(times: Sequence[float]) -> str:
    """On how many of these times over ours we are faster, even and slower."""
    ahead, behind = sum(each > 1 + EVEN for each in times), sum(each < 1 - EVEN for each in times)
    return f"faster on {ahead}, even within 2 % on {len(times) - ahead - behind}, slower on {behind} of {len(times)}"


def module_claim(rows: Rows) -> str:
    """How much longer SonicMoE's module takes in one run of each shape, one tiny layer apart, and how much memory."""
    times = {what: values(group, TIMES_OURS) for what, group in by_layer(rows).items()}
    parts = [f"{standing(each)} {what}, {mean_and_span(each, ' times as fast')}" for what, each in times.items()]
    peaks, missing = values(rows, PEAK_RATIO), len(MODULE_SHAPES) - len(rows)
    left_out = f" {missing} of the benchmark's {len(MODULE_SHAPES)} shapes have not been measured." if missing else ""
    return (
        f"One run of each shape ({versions_of(rows, PACKAGES)}; {gpus_of(rows)}), forward and backward in bf16: beside "
        f"SonicMoE's module ours is {'; '.join(parts)}. Over all {len(rows)} rows, peak memory is "
        f"{number(geometric_mean(peaks))} of SonicMoE's {span(peaks)}.{left_out}"
    )


def rounds(row: Record) -> list[float]:
    """SonicMoE's time over ours in each round, forward + backward."""
    pairs = zip(row.get("sonic_fwdbwd_rounds_ms", ()), row.get("ours_fwdbwd_rounds_ms", ()), strict=True)
    return [theirs / ours for theirs, ours in pairs]


def module_details(rows: Rows) -> str:
    """The benchmark's bounds that hold, how far a ratio moves from round to round, and times with gaps between kernels."""
    held = [f"{'Holds' if holds else 'Fails'}: {what}" for what, holds in verdicts(rows)]
    moved = "One run; what single rounds took was not recorded."
    if spreads := [100 * (max(each) / min(each) - 1) for each in map(rounds, rows) if each]:
        middle, most = number(statistics.median(spreads), 1), number(max(spreads), 1)
        shapes = f"in the median of {len(spreads)} shapes, {most} % at most"
        moved = f"From round to round a shape's ratio moves by {middle} % {shapes}."
    gaps = "With the gaps between kernels, by graph replay, whole layers have not been timed."
    if times := values(rows, "sonic_fwdbwd_gpu_ms / ours_fwdbwd_gpu_ms"):
        graphs = sum(row.get("gpu_fwdbwd_method") == "graph" for row in rows)
        others = ", the others from the first kernel to the last" * (graphs < len(times))
        shapes = f"{graphs} of {len(times)} shapes by graph replay{others}"
        gaps = f"With the gaps between kernels SonicMoE's time over ours is {mean_and_span(times)}: {shapes}."
    return f"The benchmark's own bounds, on one {gpus_of(rows)}. {'. '.join(held)}. {moved} {gaps}"


def router_accuracy(rows: Rows) -> str:
    """How far logits are from float64's, and torch's in fp32 beside them."""
    ours, torch = (values(rows, path) for path in ("accuracy.plain.logits", "torch_fp32_logits"))
    beside = f", torch's in fp32 by {min(torch):.1e} to {max(torch):.1e}" if torch else ""
    said = f"Our logits differ from float64's by {min(ours):.1e} to {max(ours):.1e} of their norm"
    return f"{said}{beside}, {condition(rows)}."


SENTENCES = {
    "module_claim": Sentence("module", module_claim, having("sonic_fwdbwd_ms"), warned),
    "module_details": Sentence("module", module_details, having("sonic_fwdbwd_ms"), note=plainly),
    "router_accuracy": Sentence("router", router_accuracy),
}


# --------------------------------------------------------------------------------------------------------------- table


def module_entries(rows: Rows) -> list[Entry]:
    """Times of both modules, our router's part of them, the floor, peaks, and what the router saves."""

    def beside(name: str, part: str, digits: int = 2) -> list[Entry]:
        return [(f"{name}: ours", f"ours_{part}", digits), ("SonicMoE", f"sonic_{part}", digits)]

    with_gaps = any("ours_fwdbwd_gpu_ms" in row for row in rows)
    return [
        SHAPE,
        *beside("forward", "fwd_ms"),
        ("floor", "floor_fwd_ms"),
        *beside("forward + backward", "fwdbwd_ms"),
        ("floor", "floor_fwdbwd_ms"),
        ("SonicMoE / ours: fwd", "sonic_fwd_ms / ours_fwd_ms"),
        ("fwd + bwd", TIMES_OURS),
        ("our router: fwd", "router_fwd_ms"),
        ("fwd + bwd", "router_fwdbwd_ms"),
        *(beside("fwd + bwd with gaps", "fwdbwd_gpu_ms") if with_gaps else ()),
        *beside("peak MiB", "peak_fwdbwd_MiB", 0),
        ("router saves MiB", lambda row: row["router_saved_bytes"] / 2**20, 0),
    ]


METHOD = "Sum of kernel durations by the profiler, an overlap counted once; ms."
TABLES_OF_LAYERS = {"module": Table("module", module_entries, METHOD, packages=PACKAGES)}
