"""The rows, cells and the sentence of layers over several GPUs, made from results/GPU/distributed.json."""

from __future__ import annotations

import math

from scripts.bench.markdown import NOT_MEASURED, Record, number, plain_shape

DISPATCHERS = {
    "symmetric": "`Symmetric`",
    "capacity": "`Symmetric`, 1.25 times the mean rows",
    "zipf": "`Symmetric`, experts by a law of Zipf, exponent 1",
    "all_to_all": "`AllToAll`",
    "vdev_2d": "torch's `all_to_all_vdev_2d`, the exchange alone",
}


def dispatcher(row: Record) -> str:
    return DISPATCHERS[row["dispatcher"]] + "".join(f" (absent: {why})" for why in row.get("absent", {}).values())


def over_one_gpu(record: Record) -> list[Record]:
    """The layers over GPUs, with their peak over one GPU's with the same sizes."""
    alone = {plain_shape(row): row["alone_MiB"] for row in record.get("ep", []) if row.get("alone_MiB")}
    return [
        row | {"of_one": row.get("peak_MiB", math.nan) / alone.get(plain_shape(row), math.nan)}
        for row in record.get("ep", [])
    ]


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
    return f"With `Symmetric`, out and back take by themselves {', '.join(shares)}, on {', '.join(sorted(gpus))}."
