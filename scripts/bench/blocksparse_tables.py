"""The tables of docs/blocksparse.md, made from results/h200/blocksparse.json: MegaBlocks' Figure 9, and whole layers."""

from __future__ import annotations

from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, Column, Record, caveat, figure, number, origin, plain_shape, table

OTHERS = {"stk": "stanford-stk", "bsr": "torch BSR"}
LAYERS = {"dmoe": "`dMoE`", "megablocks": "MegaBlocks", "dropping": "dropping, 1.0", "moe": "`MoE`"}
PACKAGES = ("torch", "megablocks", "stanford-stk", "triton")


def rows_of(record: Record, part: str) -> list[Record]:
    return [row for row in record["rows"] if row["part"] == part]


def speed(row: Record) -> float:
    """Our speed as a share of torch.bmm's."""
    return float(row["bmm_ms"] / row["ours_ms"])


def block_products_table(record: Record) -> str:
    """Each of the 18 products: ours, torch.bmm, and where they were measured the others."""
    rows = [dict(row) for row in rows_of(record, "products")]
    columns: list[Column] = [("model, product", lambda row: f"{row['model']}, {row['product']}")]
    columns += [("ours, ms", figure("ours_ms", digits=3)), ("torch.bmm, ms", figure("bmm_ms", digits=3))]
    columns.append(("bmm / ours", lambda row: number(speed(row))))
    for part, name in OTHERS.items():
        times = {(row["model"], row["product"]): row[f"{part}_ms"] for row in rows_of(record, part)}
        for row in rows:
            row[part] = times.get((row["model"], row["product"]))
        if times:
            columns.append((f"{name}, ms", figure(part, digits=3)))
    of = [*rows, *(row for part in OTHERS for row in rows_of(record, part))]
    return f"{table(rows, columns)}\n\n{origin(of, *PACKAGES)}".rstrip()


def block_products_claim(record: Record) -> str:
    """How fast the products are, part of a sentence."""
    if not (rows := rows_of(record, "products")):
        return NOT_MEASURED
    speeds, topology = [speed(row) for row in rows], [1e3 * row["topology_ms"] for row in rows]
    said = f"{number(geometric_mean(speeds), 3)} of torch.bmm's speed in the geometric mean of {len(rows)}"
    said += f" ({number(min(speeds), 3)} to {number(max(speeds), 3)}); the topology, which they don't include,"
    return f"{said} takes {number(max(topology), 1)} µs{f' ({where})' if (where := caveat(rows)) else ''}"


def block_layers_table(record: Record) -> str:
    """Layers on MoEBlaze's Table 1: forward + backward, saved bytes and peaks."""
    rows = rows_of(record, "layers")
    there = {name: label for name, label in LAYERS.items() if any(f"{name}_fwdbwd_ms" in row for row in rows)}
    columns: list[Column] = [("T, d, n, E, K", lambda row: f"{plain_shape(row)}, {row['activation']}")]
    for field, what, digits in (
        ("fwdbwd_sum_ms", "ms", 2),
        ("saved_MiB", "saved MiB", 0),
        ("peak_fwdbwd_MiB", "peak MiB", 0),
    ):
        columns += [(f"{label}, {what}", figure(f"{name}_{field}", digits=digits)) for name, label in there.items()]
    reasons = sorted(
        {f" {LAYERS[name]} did not run: {why}" for row in rows for name, why in row.get("absent", {}).items()}
    )
    note = f"Forward + backward, sums of kernel durations.{''.join(reasons)}"
    return f"{table(rows, columns)}\n\n{note} {origin(rows, *PACKAGES)}"
