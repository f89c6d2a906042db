"""The table and sentences of whole layers, `module.json`, and the sentence of the router alone, `router.json`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from blazeproto.gemm import Sizes
from scripts.bench.common import EXTRA_SHAPES, MODULE_SHAPES, SHAPES, TABLES, geometric_mean, table_of
from scripts.bench.markdown import (
    NOT_MEASURED,
    Column,
    Record,
    caveat,
    figure,
    number,
    origin,
    plain_shape,
    table,
    versions_of,
)

METHOD = "Sum of kernel durations by the profiler, an overlap counted once; ms."
PACKAGES = ("sonic-moe", "quack-kernels", "torch")

# What SonicMoE's time over ours has to be, forward + backward: least on a shape, and the geometric mean of the large ones.
LEAST_RATIO, LEAST_MEAN = 1.05, 1.07
CLOSE_SHAPES = dict.fromkeys((SHAPES[3], SHAPES[8], *EXTRA_SHAPES[2:4]), 1.03)
LARGE_TABLES = ("sonicmoe-9a", "moeblaze-1")
EVEN = 0.02  # a ratio this near to 1 is even
TINY = "moeblaze-2"  # one tiny layer with five numbers of tokens


# -------------------------------------------------------------------------------------------------------------- bounds


def ratio(row: Record, part: str = "fwdbwd", kind: str = "ms") -> float | None:
    """SonicMoE's time over ours; above 1 we are ahead."""
    theirs = row.get(f"sonic_{part}_{kind}")
    return None if theirs is None else float(theirs / row[f"ours_{part}_{kind}"])


def sizes_of(row: Record) -> Sizes:
    return Sizes(**row["cfg"])


def bounds(row: Record) -> dict[str, bool | None]:
    """Whether a row holds what is asked of it, by name; None: not measured."""
    faster, peaks = ratio(row), [row.get(f"{name}_peak_fwdbwd_MiB") for name in ("ours", "sonic")]
    return {
        "time": None if faster is None else faster >= CLOSE_SHAPES.get(sizes_of(row), LEAST_RATIO),
        "peak": None if peaks[1] is None else peaks[0] <= peaks[1],
        "saved": row["router_saved_bytes"] <= row["router_may_save_bytes"],
    }


def mean_of_large(rows: list[Record]) -> tuple[float, int]:
    """Geometric mean of `ratio` over the shapes of LARGE_TABLES, and how many of them were measured."""
    large = [row for row in rows if table_of(sizes_of(row)) in LARGE_TABLES]
    found = [value for row in large if (value := ratio(row)) is not None]
    return geometric_mean(found), len(found)


def verdicts(rows: list[Record]) -> list[tuple[str, bool]]:
    """Each bound in words, on how many shapes it holds, and whether on all."""
    made = []
    for name, what in (
        (
            "time",
            f"SonicMoE's time over ours, forward + backward, at least {LEAST_RATIO}, or 1.03 on four close shapes",
        ),
        ("peak", "our peak not above SonicMoE's"),
        ("saved", "the router saves at most x, (T, E) fp32 and (T, K)"),
    ):
        failing = [str(sizes_of(row)) for row in rows if bounds(row)[name] is False]
        holding = sum(bounds(row)[name] is True for row in rows)
        said = f"{what}: {holding} of {len(rows)} shapes{'; not: ' * bool(failing)}{', '.join(failing)}"
        made.append((said, holding == len(rows)))
    mean, measured = mean_of_large(rows)
    large = sum(len(TABLES[table]) for table in LARGE_TABLES)
    what = f"geometric mean of SonicMoE's time over ours, {measured} of {large} large shapes: {mean:.3f}, at least {LEAST_MEAN}"
    return [*made, (what, mean >= LEAST_MEAN and measured == large)]


# ----------------------------------------------------------------------------------------------- sentences and tables


def compared(record: Record) -> list[Record]:
    """The rows that have SonicMoE's module beside ours."""
    return [row for row in record["rows"] if "sonic_fwdbwd_ms" in row]


def times_ours(row: Record, part: str = "fwdbwd") -> float:
    """SonicMoE's time over ours."""
    return float(row[f"sonic_{part}_ms"] / row[f"ours_{part}_ms"])


def peak_ratio(row: Record) -> float:
    """Our peak over SonicMoE's."""
    return float(row["ours_peak_fwdbwd_MiB"] / row["sonic_peak_fwdbwd_MiB"])


def span(values: Sequence[float]) -> str:
    """ "(1.03 to 1.20)"."""
    return f"({number(min(values))} to {number(max(values))})"


def mean_and_span(values: Sequence[float]) -> str:
    return f"{number(geometric_mean(values))} in the geometric mean {span(values)}"


def is_tiny(row: Record) -> bool:
    """Whether a row is of the tiny layer, whose ratios are far from the others'."""
    return table_of(sizes_of(row)) == TINY


def module_claim(record: Record) -> str:
    """How much longer SonicMoE's module takes in one run of each shape, one tiny layer apart, and how much memory."""
    rows = compared(record)
    if not rows:
        return NOT_MEASURED
    parts = []
    for tiny, what in ((False, "shapes"), (True, "sizes of one tiny layer")):
        times = [times_ours(row) for row in rows if is_tiny(row) is tiny]
        if times:
            ahead, behind = sum(time > 1 + EVEN for time in times), sum(time < 1 - EVEN for time in times)
            counts = f"faster on {ahead}, even within 2 % on {len(times) - ahead - behind}, slower on {behind}"
            parts.append(f"{counts} of {len(times)} {what}, {mean_and_span(times)}")
    peaks, gpus = [peak_ratio(row) for row in rows], ", ".join(sorted({row["of"]["gpu"].split(",")[0] for row in rows}))
    said = (
        f"One run of each shape ({versions_of(rows, PACKAGES)}; {gpus}), forward and backward in bf16: beside SonicMoE's "
        f"module ours is {'; '.join(parts)}. Over all {len(rows)} rows, peak memory is {number(geometric_mean(peaks))} of "
        f"SonicMoE's {span(peaks)}.{_left_out(len(rows))}"
    )
    return f"{said} **({note[0].upper()}{note[1:]}.)**" if (note := caveat(rows)) else said


def module_details(record: Record) -> str:
    """The benchmark's bounds that hold, how far a ratio moves from round to round, and times with gaps between kernels."""
    rows = compared(record)
    if not rows:
        return NOT_MEASURED
    held = [f"{'holds' if holds else 'fails'}: {what}" for what, holds in verdicts(rows)]
    said = [f"The benchmark's own bounds. {'. '.join(line[0].upper() + line[1:] for line in held)}."]
    spreads = [max(moved) / min(moved) - 1 for row in rows if (moved := _rounds(row))]
    if spreads:
        middle, most = (number(100 * value, 1) for value in (statistics.median(spreads), max(spreads)))
        said.append(
            f"From round to round a shape's ratio moves by {middle} % in the median of {len(spreads)} shapes, {most} % at most."
        )
    else:
        said.append("One run; what single rounds took was not recorded.")
    gaps = [value for row in rows if (value := ratio(row, kind="gpu_ms")) is not None]
    if gaps:
        graphs = sum(row["gpu_fwdbwd_method"] == "graph" for row in rows if "gpu_fwdbwd_method" in row)
        said.append(
            f"With the gaps between kernels SonicMoE's time over ours is {mean_and_span(gaps)}: {graphs} of {len(gaps)} shapes "
            "by graph replay, the others from the first kernel to the last."
        )
    else:
        said.append("With the gaps between kernels, by graph replay, whole layers have not been timed.")
    return " ".join(said)


def _rounds(row: Record) -> list[float]:
    """SonicMoE's time over ours in each round, forward + backward."""
    pairs = zip(row.get("sonic_fwdbwd_rounds_ms", ()), row.get("ours_fwdbwd_rounds_ms", ()), strict=True)
    return [theirs / ours for theirs, ours in pairs]


def router_accuracy(record: Record) -> str:
    """How far logits are from float64's, and torch's in fp32 beside them; a sentence."""
    rows = record["rows"]
    if not rows:
        return NOT_MEASURED

    def least_and_most(values: list[float]) -> str:
        return f"{min(values):.1e} to {max(values):.1e}"

    errors = least_and_most([row["accuracy"]["plain"]["logits"] for row in rows])
    torch = [row["torch_fp32_logits"] for row in rows if "torch_fp32_logits" in row]
    said = f"Our logits differ from float64's by {errors} of their norm"
    said += f", torch's in fp32 by {least_and_most(torch)}" if torch else ""
    return f"{said} ({note})." if (note := caveat(rows)) else f"{said}."


def _left_out(measured: int) -> str:
    """How many of the benchmark's shapes a record lacks; a sentence, or nothing."""
    missing = len(MODULE_SHAPES) - measured
    return f" {missing} of the benchmark's {len(MODULE_SHAPES)} shapes have not been measured." if missing else ""


def module_table(record: Record) -> str:
    """All shapes: times of both modules, our router's part of them, the floor, peaks, and what the router saves."""
    measured = compared(record)

    def ratio(part: str) -> Callable[[Record], str]:
        return lambda row: number(times_ours(row, part) if row in measured else None)

    columns: list[Column] = [("T, d, n, E, K", plain_shape)]
    for part, name in (("fwd", "forward"), ("fwdbwd", "forward + backward")):
        columns += [(f"{name}: ours", figure(f"ours_{part}_ms")), ("SonicMoE", figure(f"sonic_{part}_ms"))]
        columns.append(("floor", figure(f"floor_{part}_ms")))
    columns += [("SonicMoE / ours: fwd", ratio("fwd")), ("fwd + bwd", ratio("fwdbwd"))]
    columns += [("our router: fwd", figure("router_fwd_ms")), ("fwd + bwd", figure("router_fwdbwd_ms"))]
    if any("ours_fwdbwd_gpu_ms" in row for row in record["rows"]):
        columns += [
            ("fwd + bwd with gaps: ours", figure("ours_fwdbwd_gpu_ms")),
            ("SonicMoE", figure("sonic_fwdbwd_gpu_ms")),
        ]
    columns += [("peak MiB: ours", figure("ours_peak_fwdbwd_MiB", digits=0))]
    columns += [("SonicMoE", figure("sonic_peak_fwdbwd_MiB", digits=0))]
    columns += [("router saves MiB", lambda row: number(row["router_saved_bytes"] / 2**20, 0))]
    return f"{table(record['rows'], columns)}\n\n{METHOD} {origin(record['rows'], *PACKAGES)}".rstrip()
