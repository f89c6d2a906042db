"""Tables and the picture of training on several GPUs, made from results/GPU/distributed.json."""

from __future__ import annotations

import math
from typing import Any

from scripts.bench.markdown import NOT_MEASURED, Record, figure, number, origin, plain_shape, table, words
from scripts.bench.rank_memory import rank_memory_table

STYLES = {"fsdp": ("#00798c", "o-"), "hsdp": ("#8d96a3", "s-"), "ep": ("#d1495b", "o--"), "ep+fsdp": ("#edae49", "s--")}


def weak_scaling_table(record: Record) -> str:
    """Tokens per second and GPU by mode and number of GPUs, beside one GPU's of the same run."""
    rows = record.get("weak_scaling", [])
    columns = [
        *words(["mode"]),
        ("GPUs", figure("gpus", digits=0)),
        ("tokens/s a GPU", figure("tokens_per_s_per_gpu", digits=0)),
        ("one GPU alone", figure("tokens_per_s_alone", digits=0)),
        ("efficiency", figure("efficiency", digits=3)),
    ]
    return f"{table(rows, columns)}\n\n{origin(rows, 'torch')}".rstrip()


def rank_losses_table(record: Record) -> str:
    """How far losses part from one GPU's with the same global batch."""
    rows = [row | {"percent": 100 * row["largest_difference"]} for row in record.get("losses", [])]
    columns = [
        *words(["mode"]),
        ("GPUs", figure("gpus", digits=0)),
        ("steps", figure("steps", digits=0)),
        ("largest difference of the smoothed losses, %", figure("percent")),
        ("at step", figure("step", digits=0)),
    ]
    return f"{table(rows, columns)}\n\n{origin(rows, 'torch')}".rstrip()


DISPATCHERS = {
    "symmetric": "`Symmetric`",
    "capacity": "`Symmetric`, 1.25 times the mean rows",
    "all_to_all": "`AllToAll`",
    "vdev_2d": "torch's `all_to_all_vdev_2d`, the exchange alone",
}


def expert_parallel_table(record: Record) -> str:
    """Layers with their experts over GPUs, and the exchange alone, by dispatcher."""

    def dispatcher(row: Record) -> str:
        return DISPATCHERS[row["dispatcher"]] + (f" (absent: {row['absent']})" if "absent" in row else "")

    alone = {plain_shape(row): row["alone_MiB"] for row in record.get("ep", []) if row.get("alone_MiB")}
    rows = [
        row | {"of_one": row.get("peak_MiB", math.nan) / alone.get(plain_shape(row), math.nan)}
        for row in record.get("ep", [])
    ]
    columns = [
        ("T of a rank, d, n, E, K", plain_shape),
        ("GPUs", figure("gpus", digits=0)),
        ("dispatcher", dispatcher),
        ("forward, TFLOP/s a GPU", figure("fwd_tflops", digits=0)),
        ("backward", figure("bwd_tflops", digits=0)),
        ("out, GB/s", figure("dispatch_gbps", digits=0)),
        ("back", figure("combine_gbps", digits=0)),
        ("peak MiB", figure("peak_MiB", digits=0)),
        ("peak over one GPU's", figure("of_one")),
    ]
    return f"{table(rows, columns)}\n\n{origin(rows, 'torch')}".rstrip()


def exchange_share(record: Record) -> str:
    """The exchange's share of a layer's forward, by its sizes; a sentence."""
    rows = [row for row in record.get("ep", []) if "dispatch_ms" in row and "fwd_ms" in row]
    if not rows:
        return NOT_MEASURED
    shares = [
        f"{number(100 * (row['dispatch_ms'] + row['combine_ms']) / row['fwd_ms'], 0)} % of forward at ({plain_shape(row)})"
        for row in rows
    ]
    gpus = {f"{row['gpus']} {row['of']['gpu'].split(',')[0]}" for row in rows}
    return f"With `Symmetric`, out and back are {', '.join(shares)}, on {', '.join(sorted(gpus))}."


FILE = "distributed"
SENTENCES = {"exchange_share": (FILE, exchange_share)}
TABLES = {
    "weak_scaling": (FILE, weak_scaling_table),
    "rank_losses": (FILE, rank_losses_table),
    "expert_parallel": (FILE, expert_parallel_table),
    "rank_memory": (FILE, rank_memory_table),
}


def plot_efficiency(axis: Any, rows: list[Record]) -> None:
    """Throughput a GPU over one GPU's, by number of GPUs: MoEBlaze Figure 7."""
    for mode, (color, style) in STYLES.items():
        if points := sorted((row["gpus"], row["efficiency"]) for row in rows if row["mode"] == mode):
            axis.plot(*zip(*points, strict=True), style, color=color, label=mode)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="GPUs", ylabel="tokens/s a GPU over one GPU's", title="Weak scaling", ylim=(0, 1.1))
    axis.set_xticks(sorted({row["gpus"] for row in rows}))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
