"""The columns of MoEBlaze's tables and figures, and of the ways to combine: what was measured beside what the paper prints."""

from __future__ import annotations

from operator import itemgetter

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import OURS, Column, Record, figure, number
from scripts.bench.paper import printed
from scripts.bench.paper.cells import (
    ACTIVATION,
    LABEL,
    SHAPE,
    Cell,
    Rows,
    experts_ms,
    floor,
    floor_cell,
    looked_up,
    of,
    ratio,
    value,
)
from scripts.bench.render import fixed


def over_floor(row: Record) -> str:
    """How many times the floor MegaBlocks takes: the most that can be had over it on this GPU."""
    ms, least = value(row, "mb_sparse", "fwdbwd_ms"), floor(row, experts_ms)
    return number(ms / least if ms and least else None)


def printed_memory(row: Record) -> str:
    return printed.FIGURE_MEMORY.get((row["label"], row["activation"]), "–")


figures_columns = fixed(
    LABEL,
    SHAPE,
    ACTIVATION,
    ("saved MiB: ours", of(OURS, "saved_MiB", 0)),
    ("ours, as Algorithm 1", of("paper", "saved_MiB", 0)),
    ("MegaBlocks", of("mb_sparse", "saved_MiB", 0)),
    ("printed MB: MoEBlaze, MegaBlocks", printed_memory),
    ("peak MiB: ours", of(OURS, "peak_MiB", 0)),
    ("MegaBlocks", of("mb_sparse", "peak_MiB", 0)),
    ("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")),
    ("MegaBlocks", of("mb_sparse", "fwdbwd_ms")),
    ("floor", floor_cell(experts_ms)),
    ("MegaBlocks / ours", ratio("mb_sparse", OURS, "fwdbwd_ms")),
    ("eager", ratio("mb_sparse", OURS, "eager_fwdbwd_ms")),
    ("printed", lambda row: printed.FIGURE_SPEED[row["activation"]]),
    ("MegaBlocks / floor", over_floor),
    ("up projection, FLOP/B", "up_operations_a_byte", 0),
)


def activation_and_tokens(row: Record) -> tuple[str, int]:
    return row["activation"], row["cfg"]["T"]


def printed_speedup(row: Record) -> str:
    blaze, _, block, _ = printed.SCALE.get(activation_and_tokens(row), (1.0, 0, None, None))
    return "–" if block is None else number(block / blaze, 1)


def printed_scale(index: int, digits: int = 1) -> Cell:
    return looked_up(printed.SCALE, activation_and_tokens, index, digits)


scale_columns = fixed(
    ACTIVATION,
    ("T", "cfg.T", None),
    ("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")),
    ("eager", of(OURS, "eager_fwdbwd_ms")),
    ("printed", printed_scale(0)),
    ("MegaBlocks", of("mb_sparse", "fwdbwd_ms")),
    ("eager", of("mb_sparse", "eager_fwdbwd_ms")),
    ("printed", printed_scale(2)),
    ("MegaBlocks / ours", ratio("mb_sparse", OURS, "fwdbwd_ms")),
    ("eager", ratio("mb_sparse", OURS, "eager_fwdbwd_ms")),
    ("printed", printed_speedup),
    ("MegaBlocks / floor", over_floor),
    ("saved MiB: ours", of(OURS, "saved_MiB", 0)),
    ("ours, as Algorithm 1", of("paper", "saved_MiB", 0)),
    ("printed", printed_scale(1, 0)),
    ("MegaBlocks", of("mb_sparse", "saved_MiB", 0)),
    ("printed", printed_scale(3, 0)),
    ("peak MiB: ours", of(OURS, "peak_MiB", 0)),
    ("MegaBlocks", of("mb_sparse", "peak_MiB", 0)),
)


def dispatch_ms(sizes: Sizes, gpu: str) -> float:
    return cost.floor_ms(0.0, cost.dispatch_bytes(sizes.rows), gpu)


def printed_gain(model: str) -> float:
    sorting, hashed = printed.DISPATCH[model]
    return sorting / hashed


dispatch_columns = fixed(
    LABEL,
    ("E / K", lambda row: f"{row['cfg']['E']} / {row['cfg']['K']}"),
    ("ms: ours", "tiled_ms", 3),
    ("the paper's three steps", "dense_ms", 3),
    ("CuPy sort", "sort_ms", 3),
    ("torch.sort", "torch_sort_ms", 3),
    ("floor", floor_cell(dispatch_ms, 3)),
    ("printed: sorting", looked_up(printed.DISPATCH, itemgetter("label"), 0)),
    ("hash", looked_up(printed.DISPATCH, itemgetter("label"), 1)),
    ("CuPy sort / the three steps", "sort_ms / dense_ms", 1),
    ("CuPy sort / ours", "sort_ms / tiled_ms", 1),
    ("printed: sorting / hash", lambda row: printed_gain(row["label"]), 1),
)


def ablation_columns(rows: Rows) -> list[Column]:
    def cell(row: Record, index: int) -> str:
        sizes = row["cfg"]
        known = printed.ABLATION.get((sizes["d"], sizes["E"], sizes["n"]))
        return "–" if known is None else str(known[printed.LINES.index(row["program"])][index])

    columns: list[Column] = [SHAPE, ("", itemgetter("program")), ("fwd + bwd ms: eager", figure("eager_fwdbwd_ms"))]
    columns += [("kernels", figure("fwdbwd_ms")), ("printed", lambda row: cell(row, 0))]
    columns += [("saved MiB", figure("saved_MiB", digits=0)), ("printed", lambda row: cell(row, 1))]
    return [*columns, ("peak MiB", figure("peak_MiB", digits=0))]


gather_columns = fixed(
    SHAPE,
    ("ms: gathered", "gathered_ms"),
    ("rows in order", "contiguous_ms"),
    ("grouped_mm after a copy", "copied_torch_ms"),
    ("grouped_mm, rows in order", "torch_ms"),
    ("gathered over rows in order, %", lambda row: 100 * row["gather_overhead"], 1),
    ("printed", lambda row: f"about {number(100 * printed.GATHER_OVERHEAD, 0)}"),
)


def combine_columns(rows: Rows) -> list[Column]:
    modes = list(dict.fromkeys(name for row in rows for name in row["programs"]))
    columns: list[Column] = [SHAPE]
    for field, head, digits in (
        ("fwd_ms", "forward ms", 2),
        ("fwdbwd_ms", "fwd + bwd ms", 2),
        ("peak_MiB", "peak MiB", 0),
    ):
        columns += [(f"{head}: {mode}" if mode == modes[0] else mode, of(mode, field, digits)) for mode in modes]
    return columns + [(f"{mode} / gather", ratio(mode, "gather", "fwdbwd_ms")) for mode in modes if mode != "gather"]
