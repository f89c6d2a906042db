"""Tables of fp8 beside bf16, made from results/GPU/fp8.json."""

from __future__ import annotations

from dataclasses import fields

from blazeproto.gemm.recipe import FP8, Recipe
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, Record, gpus_of, noted, number, span


def recipe_table(_: Record) -> str:
    """`blazeproto.gemm.recipe.Recipe`, which `Options` takes."""
    rows = [
        (each.name, each.metadata["shape"], *getattr(FP8, each.name), each.metadata["when"])
        for each in fields(Recipe)
        if each.metadata
    ]
    header = ("operand", "shape", "elements", "one scale for", "quantized")
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


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
        return words.format(f"{number(geometric_mean(ratios))} {span(ratios)}")

    modes = [f"{mode} {', '.join(said(*each) for each in figures)}" for mode, figures in MODES.items()]
    where = f"in one run of {len(rows)} layers on one {gpus_of(rows)}"
    return noted(f"{where}, in the geometric mean: {'; '.join(modes)}", rows)


TABLES = {"fp8_recipe": ("fp8", recipe_table)}
SENTENCES = {"fp8_claim": ("fp8", claim)}
