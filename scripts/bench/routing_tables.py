"""The tables and sentences of dispatch, top-k and token rounding."""

from __future__ import annotations

from operator import itemgetter

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
    words,
)

DISPATCH_COLUMNS = {
    "torch_sort_ms": "torch.sort",
    "sort_ms": "CuPy sort",
    "paper_sort_ms": "MoEBlaze sorting (H100)",
    "paper_hash_ms": "MoEBlaze hash (H100)",
}


def dispatch_table(record: Record) -> str:
    """Dispatch builders by model: every column that ends in _ms, and the ratio to the floor. The paper's figures are of
    an H100, and their columns say so."""
    fields = [field for field in record["rows"][0] if field.endswith("_ms")]
    columns: list[Column] = [("model", itemgetter("name")), *words("TEK")]
    columns += [(DISPATCH_COLUMNS.get(f, f[:-3].replace("_", " ")), figure(f, digits=3)) for f in fields]
    columns.append(("tiled / floor", lambda row: number(row["tiled_ms"] / row["floor_ms"])))
    paper = (
        "; the columns marked H100 are the paper's own times (MoEBlaze, Table 3)" if "paper_sort_ms" in fields else ""
    )
    return f"{table(record['rows'], columns)}\n\nms of GPU time{paper}. {origin(record['rows'], 'torch')}"


def experts_growth(record: Record) -> str:
    """The time of a dispatch for the most experts over one for the fewest, one sentence."""
    rows = sorted(record.get("series", {}).get("E", []), key=lambda row: row["E"])
    if not rows:
        return NOT_MEASURED
    least, most = rows[0], rows[-1]
    conditions = "; ".join(filter(None, [f"T = {least['T']}, K = {least['K']}", caveat([least, most])]))
    return (
        f"A dispatch for {most['E']} experts takes {number(most['tiled_ms'] / least['tiled_ms'])} times one for "
        f"{least['E']} ({conditions})"
    )


def topk_table(record: Record) -> str:
    """The fused top-k against torch's."""
    columns: list[Column] = [("scores", itemgetter("score")), ("logits", itemgetter("dtype")), *words("TEK")]
    columns += [(f"{name} ms", figure(f"{name}_ms", digits=3)) for name in ("fused", "torch", "floor")]
    columns += [("fused / floor", lambda row: number(row["fused_ms"] / row["floor_ms"]))]
    columns += [("torch / fused", lambda row: number(row["torch_ms"] / row["fused_ms"], 1))]
    note = "ms of GPU time; torch: its topk and softmax or sigmoid."
    return f"{table(record['rows'], columns)}\n\n{note} {origin(record['rows'], 'torch')}"


def small_dispatch_table(record: Record) -> str:
    """A dispatch of few tokens, where launching counts."""
    columns: list[Column] = [*words("TEK"), ("GPU µs", figure("gpu_us", digits=1))]
    columns += [("host µs, into arrays given", figure("host_us", digits=1))]
    columns += [("host µs, allocating", figure("host_us_allocating", digits=1))]
    return f"{table(record['small'], columns)}\n\n{origin(record['small'])}"


GAINS: list[Column] = [
    ("gain forward", figure("fwd_gain", digits=3)),
    ("backward", figure("bwd_gain", digits=3)),
    ("both", figure("fwdbwd_gain", digits=3)),
]


def rounding_table(record: Record) -> str:
    """Token rounding against plain top-k: model TFLOP/s of both, and the gain."""

    def empty(row: Record) -> str:
        return number(100 * (row["top_k"]["padded_rows"] / row["top_k"]["rows"] - 1), 1)

    columns: list[Column] = [("T, d, n, E, K", plain_shape), ("empty rows of tiles, %", empty)]
    for part, name in (("fwd", "forward"), ("bwd", "backward")):
        columns += [(f"{name}: top-k", figure("top_k", f"{part}_tflops", digits=0))]
        columns += [("rounded", figure("rounded", f"{part}_tflops", digits=0))]
    return f"{table(record['rows'], columns + GAINS)}\n\nModel TFLOP/s. {origin(record['rows'])}"


def rounding_layers_table(record: Record) -> str:
    """The same in whole layers: time with each router, and the gain in model TFLOP/s."""
    rows = [{"cfg": row["cfg"], "of": row["of"], **row["layers"]} for row in record["rows"] if "layers" in row]
    columns: list[Column] = [("T, d, n, E, K", plain_shape)]
    for part, name in (("gpu_fwd_ms", "forward ms"), ("gpu_fwdbwd_ms", "forward + backward ms")):
        routers = {"top_k": f"{name}: top-k", "rounded": "rounded", "down": "DOWN", "up": "UP"}
        columns += [(head, figure(router, part)) for router, head in routers.items()]
    made = table(rows, columns + GAINS)
    return f"{made}\n\nGPU time; gain: model TFLOP/s, rounded over top-k. {origin(rows)}" if rows else NOT_MEASURED


def few_tokens_table(record: Record) -> str:
    """A layer's forward for few tokens beside its floor."""
    columns: list[Column] = [
        ("T", lambda row: number(row["cfg"]["T"], 0)),
        ("experts drawn", lambda row: number(row["experts"], 0)),
        ("floor, µs", lambda row: number(row["floor_us"], 1)),
        ("forward, µs", lambda row: number(row["forward_us"], 1)),
        ("over the floor", lambda row: number(row["over_floor"], 2)),
    ]
    return f"{table(record['rows'], columns)}\n\nGPU time by graph replay. {origin(record['rows'])}"
