"""The tables and sentences of whole layers, `module.json`, and of the router alone, `router.json`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from scripts.bench.common import MODULE_SHAPES
from scripts.bench.markdown import (
    NOT_MEASURED,
    Column,
    Record,
    figure,
    layer_shape,
    markdown_table,
    measured_on,
    number,
    rows_measured_on,
    table,
)

# The rows of README's table: small and large experts, and from few wide to many narrow ones.
README_SHAPES = (
    (40960, 768, 256, 128, 8),
    (24576, 1536, 512, 64, 4),
    (32768, 4096, 1024, 64, 4),
    (16384, 4096, 512, 512, 8),
    (16384, 2880, 2880, 128, 4),
    (8192, 4096, 1536, 256, 6),
)
METHOD = "Sum of kernel durations by the profiler, an overlap counted once; ms."


def compared(record: Record) -> list[Record]:
    """The rows that have SonicMoE's module beside ours."""
    return [row for row in record["rows"] if "sonic_fwdbwd_ms" in row]


def times_ours(row: Record, part: str = "fwdbwd") -> float:
    """SonicMoE's time over ours."""
    return float(row[f"sonic_{part}_ms"] / row[f"ours_{part}_ms"])


def peak_ratio(row: Record) -> float:
    """Our peak over SonicMoE's."""
    return float(row["ours_peak_fwdbwd_MiB"] / row["sonic_peak_fwdbwd_MiB"])


def module_claim(record: Record) -> str:
    """On how many shapes the module is faster than SonicMoE's, and how much memory it takes; a sentence, of README's headline."""
    rows = compared(record)
    if not rows:
        return NOT_MEASURED
    times, peaks = [times_ours(row) for row in rows], [peak_ratio(row) for row in rows]
    return (
        "A whole layer, `MoE` with its router and auxiliary loss, forward and backward, is faster than SonicMoE's module on "
        f"{sum(time > 1 for time in times)} of {len(times)} shapes, {number(statistics.geometric_mean(times))} times in the "
        f"geometric mean ({number(min(times))} to {number(max(times))}), at {number(statistics.geometric_mean(peaks))} of its "
        f"peak memory ({number(min(peaks))} to {number(max(peaks))}). Both in bf16, router weights too; logits, scores and "
        f"losses of ours have fp32's accuracy.{_left_out(len(rows))}"
    )


def _left_out(measured: int) -> str:
    """How many of the benchmark's shapes a record lacks; a sentence, or nothing."""
    missing = len(MODULE_SHAPES) - measured
    return f" {missing} of the benchmark's {len(MODULE_SHAPES)} shapes have not been measured." if missing else ""


def readme_table(record: Record) -> str:
    """Six shapes: forward + backward of both modules, the share of the floor's speed, and the peak."""
    measured = {tuple(row["cfg"][key] for key in ("T", "d", "n", "E", "K")): row for row in compared(record)}
    columns: list[Column] = [("T, d, n, E, K", layer_shape), ("blazeproto, ms", figure("ours_fwdbwd_ms", bold=True))]
    columns += [("SonicMoE, ms", figure("sonic_fwdbwd_ms")), ("SonicMoE / ours", lambda row: number(times_ours(row)))]
    columns += [("floor / ours", lambda row: number(row["floor_fwdbwd_ms"] / row["ours_fwdbwd_ms"]))]
    columns += [("peak memory, ours / SonicMoE", lambda row: number(peak_ratio(row)))]
    rows = filter(None, map(measured.get, README_SHAPES))
    return f"{table(rows, columns)}\n\n{METHOD} {rows_measured_on(record)}"


def module_table(record: Record) -> str:
    """All shapes: times of both modules, our router's part of them, the floor, peaks, and what the router saves."""
    measured = compared(record)

    def ratio(part: str) -> Callable[[Record], str]:
        return lambda row: number(times_ours(row, part) if row in measured else None)

    columns: list[Column] = [("T, d, n, E, K", layer_shape)]
    for part, name in (("fwd", "forward"), ("fwdbwd", "forward + backward")):
        columns += [(f"{name}: ours", figure(f"ours_{part}_ms", bold=True)), ("SonicMoE", figure(f"sonic_{part}_ms"))]
        columns.append(("floor", figure(f"floor_{part}_ms")))
    columns += [("SonicMoE / ours: fwd", ratio("fwd")), ("fwd + bwd", ratio("fwdbwd"))]
    columns += [("our router: fwd", figure("router_fwd_ms")), ("fwd + bwd", figure("router_fwdbwd_ms"))]
    columns += [("peak MiB: ours", figure("ours_peak_fwdbwd_MiB", digits=0))]
    columns += [("SonicMoE", figure("sonic_peak_fwdbwd_MiB", digits=0))]
    columns += [("router saves MiB", lambda row: number(row["router_saved_bytes"] / 2**20, 0))]
    return f"{table(record['rows'], columns)}\n\n{METHOD} {rows_measured_on(record)}"


def router_table(record: Record) -> str:
    """The router's time against its floor, and its errors against float64."""
    rows = []
    for row in record["rows"]:
        plain = row["accuracy"]["plain"]
        line = [", ".join(str(row["cfg"][key]) for key in "TdEK"), row["weight"]]
        for part in ("fwd", "fwdbwd"):
            line += [number(row[f"{part}_ms"], 3), number(row[f"floor_{part}_ms"], 3)]
        line += [f"{plain[name]:.1e}" for name in ("logits", "dX", "dW")]
        other = sum(found["other_tokens"] for found in row["accuracy"].values())
        rows.append([*line, f"{other} of {sum(found['tokens'] for found in row['accuracy'].values())}"])
    header = ["T, d, E, K", "router weight", "forward ms", "floor", "forward + backward ms", "floor"]
    header += ["error of logits", "of dX", "of dW", "tokens that chose otherwise than float64"]
    note = "GPU time. Errors: norm of the difference from float64 over its norm; dX is bf16, dW has the weight's type."
    return f"{markdown_table(header, rows)}\n\n{note} {measured_on(record)}"
