"""The table of batch tiling on attention, made from results/h200/attention_tiles.json."""

from __future__ import annotations

from scripts.bench.markdown import Record, figure, origin, table


def attention_tiles_table(record: Record) -> str:
    """Time and memory over the number of tiles, and of as many micro-batches."""
    rows = record["rows"]
    columns = [
        ("G", figure("tiles", digits=0)),
        ("ms", figure("tiled_ms", digits=1)),
        ("saved, MiB", figure("tiled_saved_MiB", digits=0)),
        ("peak, MiB", figure("tiled_peak_MiB", digits=0)),
        ("G micro-batches, ms", figure("micro_ms", digits=1)),
        ("saved, MiB", figure("micro_saved_MiB", digits=0)),
        ("peak, MiB", figure("micro_peak_MiB", digits=0)),
    ]
    cfg = rows[0]["cfg"]
    shape = ", ".join(str(cfg[key]) for key in ("layers", "d", "n", "E", "K"))
    size = f"{cfg['sequences']} sequences of {cfg['T'] // cfg['sequences']} bytes"
    note = f"Forward and backward of {size}; layers, d, n, E, K = {shape}."
    return f"{table(rows, columns)}\n\n{note} {origin(rows, 'torch')}"
