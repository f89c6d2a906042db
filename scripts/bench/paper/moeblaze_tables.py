"""The columns of MoEBlaze's tables and figures, and of the ways to combine: what was measured beside what the paper prints."""

from __future__ import annotations

from functools import partial
from operator import itemgetter

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import OURS, Column, Record, figure, number
from scripts.bench.paper import printed
from scripts.bench.paper.cells import (
    ACTIVATION,
    LABEL,
    SHAPE,
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


def figures_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [LABEL, SHAPE, ACTIVATION, ("saved MiB: ours", of(OURS, "saved_MiB", 0))]
    columns += [("ours, as Algorithm 1", of("paper", "saved_MiB", 0)), ("MegaBlocks", of("mb_sparse", "saved_MiB", 0))]
    columns.append(("printed MB: MoEBlaze, MegaBlocks", lambda row: printed_memory(row)))
    columns += [("peak MiB: ours", of(OURS, "peak_MiB", 0)), ("MegaBlocks", of("mb_sparse", "peak_MiB", 0))]
    columns += [("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")), ("MegaBlocks", of("mb_sparse", "fwdbwd_ms"))]
    columns += [("floor", floor_cell(experts_ms))]
    columns += [("MegaBlocks / ours", ratio("mb_sparse", OURS, "fwdbwd_ms"))]
    columns += [("eager", ratio("mb_sparse", OURS, "eager_fwdbwd_ms"))]
    columns.append(("printed", lambda row: printed.FIGURE_SPEED[row["activation"]]))
    columns.append(("MegaBlocks / floor", over_floor))
    return [*columns, ("up projection, FLOP/B", figure("up_operations_a_byte", digits=0))]


def over_floor(row: Record) -> str:
    """How many times the floor MegaBlocks takes: the most that can be had over it on this GPU."""
    ms, least = value(row, "mb_sparse", "fwdbwd_ms"), floor(row, experts_ms)
    return number(ms / least if ms and least else None)


def printed_memory(row: Record) -> str:
    return printed.FIGURE_MEMORY.get((row["label"], row["activation"]), "–")


def activation_and_tokens(row: Record) -> tuple[str, int]:
    return row["activation"], row["cfg"]["T"]


def scale_columns(rows: Rows) -> list[Column]:
    cell = partial(looked_up, printed.SCALE, activation_and_tokens)
    columns: list[Column] = [ACTIVATION, ("T", lambda row: str(row["cfg"]["T"]))]
    columns += [("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")), ("eager", of(OURS, "eager_fwdbwd_ms"))]
    columns += [("printed", cell(0)), ("MegaBlocks", of("mb_sparse", "fwdbwd_ms"))]
    columns += [("eager", of("mb_sparse", "eager_fwdbwd_ms")), ("printed", cell(2))]
    columns += [("MegaBlocks / ours", ratio("mb_sparse", OURS, "fwdbwd_ms"))]
    columns += [("eager", ratio("mb_sparse", OURS, "eager_fwdbwd_ms")), ("printed", printed_speedup)]
    columns.append(("MegaBlocks / floor", over_floor))
    columns += [("saved MiB: ours", of(OURS, "saved_MiB", 0)), ("ours, as Algorithm 1", of("paper", "saved_MiB", 0))]
    columns += [("printed", cell(1, 0)), ("MegaBlocks", of("mb_sparse", "saved_MiB", 0)), ("printed", cell(3, 0))]
    return [*columns, ("peak MiB: ours", of(OURS, "peak_MiB", 0)), ("MegaBlocks", of("mb_sparse", "peak_MiB", 0))]


def printed_speedup(row: Record) -> str:
    blaze, _, block, _ = printed.SCALE.get(activation_and_tokens(row), (1.0, 0, None, None))
    return "–" if block is None else number(block / blaze, 1)


def dispatch_columns(rows: Rows) -> list[Column]:
    cell = partial(looked_up, printed.DISPATCH, itemgetter("label"))
    columns: list[Column] = [LABEL, ("E / K", lambda row: f"{row['cfg']['E']} / {row['cfg']['K']}")]
    names = {"tiled": "ours", "dense": "the paper's three steps", "sort": "CuPy sort", "torch_sort": "torch.sort"}
    columns += [
        (f"{'ms: ' if name == 'tiled' else ''}{head}", figure(f"{name}_ms", digits=3)) for name, head in names.items()
    ]
    columns += [
        ("floor", floor_cell(dispatch_ms, 3)),
        ("printed: sorting", cell(0)),
        ("hash", cell(1)),
    ]
    columns.append(("CuPy sort / the three steps", lambda row: number(row["sort_ms"] / row["dense_ms"], 1)))
    columns.append(("CuPy sort / ours", lambda row: number(row["sort_ms"] / row["tiled_ms"], 1)))
    return [*columns, ("printed: sorting / hash", lambda row: number(printed_gain(row["label"]), 1))]


def dispatch_ms(sizes: Sizes, gpu: str) -> float:
    return cost.floor_ms(0.0, cost.dispatch_bytes(sizes.rows), gpu)


def printed_gain(model: str) -> float:
    sorting, hashed = printed.DISPATCH[model]
    return sorting / hashed


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
