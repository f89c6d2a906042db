"""Tables of fp8 beside bf16, made from results/GPU/fp8.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from blazeproto.gemm.recipe import FP8, Recipe
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, Column, Record, figure, number, origin, plain_shape, table
from scripts.bench.review_tables import noted


def over(numerator: str, denominator: str) -> Callable[[Record], str]:
    return lambda row: number(row[numerator] / row[denominator])


def layers_table(record: Record) -> str:
    """One layer's experts: times, what is saved, peaks."""
    columns: list[Column] = [
        ("T, d, n, E, K", plain_shape),
        ("fwd + bwd ms: bf16", figure("bf16_fwdbwd_ms")),
        ("fp8", figure("fp8_fwdbwd_ms")),
        ("fp8, `keep_transposed=False`", figure("fp8_each_fwdbwd_ms")),
        ("fp8, weights quantized before", figure("fp8_kept_fwdbwd_ms")),
        ("bf16 / fp8", over("bf16_fwdbwd_ms", "fp8_fwdbwd_ms")),
        ("fwd ms: bf16", figure("bf16_fwd_ms")),
        ("fp8, weights quantized before", figure("fp8_fwd_ms")),
        ("with them", figure("fp8_fwd_with_weights_ms")),
        ("saved MiB: bf16", figure("bf16_saved_MiB", digits=0)),
        ("fp8", figure("fp8_each_saved_MiB", digits=0)),
        ("weights' transposes", lambda row: number(row["fp8_saved_MiB"] - row["fp8_each_saved_MiB"], 0)),
        ("peak MiB: bf16", figure("bf16_peak_MiB", digits=0)),
        ("fp8", figure("fp8_peak_MiB", digits=0)),
    ]
    return f"{table(record['rows'], columns)}\n\n{origin(record['rows'], 'torch')}"


def in_a_row_table(record: Record) -> str:
    """Several layers one after the other."""
    columns: list[Column] = [
        ("T, d, n, E, K", plain_shape),
        ("layers", figure("layers", digits=0)),
        *(
            (f"{said}: bf16" if way == "bf16" else name, figure(f"{way}_{what}", digits=digits))
            for said, what, digits in (
                ("saved MiB", "saved_MiB", 0),
                ("peak MiB", "peak_MiB", 0),
                ("fwd + bwd ms", "fwdbwd_ms", 2),
            )
            for way, name in (("bf16", ""), ("fp8", "fp8"), ("fp8_each", "fp8, `keep_transposed=False`"))
        ),
    ]
    rows = record.get("in_a_row", [])
    return f"{table(rows, columns)}\n\n{origin(rows, 'torch')}" if rows else NOT_MEASURED


def recipe_table(_: Record) -> str:
    """`blazeproto.gemm.recipe.Recipe`, which `Options` takes."""
    rows = [
        (each.name, each.metadata["shape"], *getattr(FP8, each.name), each.metadata["when"])
        for each in fields(Recipe)
        if each.metadata
    ]
    header = ("operand", "shape", "elements", "one scale for", "quantized")
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def products_table(record: Record) -> str:
    """TFLOP/s of each product in bf16 and in fp8, without quantizing."""
    columns: list[Column] = [
        ("T, d, n, E, K", plain_shape),
        *(
            (f"{name}: bf16" if precision == "bf16" else "fp8", figure("tflops", f"{name} {precision}", digits=0))
            for name in FP8.products
            for precision in ("bf16", "fp8")
        ),
    ]
    return f"{table(record['products'], columns)}\n\n{origin(record['products'], 'torch')}"


def peers_table(record: Record) -> str:
    """A layer's experts by torchao, and DeepGEMM's products."""
    columns: list[Column] = [
        ("T, d, n, E, K", plain_shape),
        *(
            (f"fwd + bwd ms: {name}", figure("fwdbwd_ms", name))
            for name in ("ours bf16", "ours fp8", "torch grouped_mm bf16", "torchao fp8")
        ),
        *((f"DeepGEMM, TFLOP/s: {name}", figure("tflops", name, digits=0)) for name in ("up", "down")),
    ]
    tflops = {str(row["cfg"]): row["tflops"] for row in record["products"]}
    rows = [row | {"tflops": tflops.get(str(row["cfg"]))} for row in record["rows"]]
    return f"{table(rows, columns)}\n\n{origin(record['rows'], 'torch', 'torchao', 'sgl-deep-gemm')}"


MODES = {  # figures over bf16's in each mode, and how they are said
    "in its default mode": (
        ("bf16_fwdbwd_ms", "fp8_fwdbwd_ms", "forward and backward run {} times as fast as in bf16"),
        ("bf16_fwd_ms", "fp8_fwd_with_weights_ms", "forward alone {} times"),
        ("fp8_saved_MiB", "bf16_saved_MiB", "backward keeps {} times bf16's bytes"),
        ("fp8_peak_MiB", "bf16_peak_MiB", "the peak is {} of bf16's"),
    ),
    "with `keep_transposed=False`": (
        ("bf16_fwdbwd_ms", "fp8_each_fwdbwd_ms", "forward and backward run {} times as fast"),
        ("fp8_each_saved_MiB", "bf16_saved_MiB", "backward keeps {} of bf16's bytes"),
    ),
    "with weights quantized before": (
        ("bf16_fwdbwd_ms", "fp8_kept_fwdbwd_ms", "forward and backward run {} times as fast"),
        ("bf16_fwd_ms", "fp8_fwd_ms", "forward alone {} times"),
    ),
}


def claim(record: Record) -> str:
    """How much faster a layer's experts are in each mode, and how many bytes they take in that mode; geometric means."""
    rows = record["rows"]
    if not rows:
        return NOT_MEASURED

    def said(above: str, below: str, words: str) -> str:
        ratios = [row[above] / row[below] for row in rows]
        return words.format(f"{number(geometric_mean(ratios))} ({number(min(ratios))} to {number(max(ratios))})")

    modes = [f"{mode} {', '.join(said(*each) for each in figures)}" for mode, figures in MODES.items()]
    gpus = ", ".join(sorted({row["of"]["gpu"].split(",")[0] for row in rows}))
    return noted(f"in one run of {len(rows)} layers on one {gpus}, in the geometric mean: {'; '.join(modes)}", rows)


TABLES = {
    "fp8_layers": ("fp8", layers_table),
    "fp8_in_a_row": ("fp8", in_a_row_table),
    "fp8_products": ("fp8", products_table),
    "fp8_recipe": ("fp8", recipe_table),
    "fp8_peers": ("fp8_peers", peers_table),
}
SENTENCES = {"fp8_claim": ("fp8", claim)}
