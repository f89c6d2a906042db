"""Tables of fp8 beside bf16, made from results/GPU/fp8.json."""

from __future__ import annotations

from dataclasses import fields

from blazeproto.cost import PEAK_BYTES
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


FIGURES = (  # above, below, how it is said
    ("bf16_2_ms", "fp8_2_ms", "a step of two micro-batches runs {} times as fast as in bf16"),
    ("bf16_1_ms", "fp8_1_ms", "of one {} times"),
    ("bf16_fwd_ms", "fp8_fwd_ms", "an evaluation {} times"),
    ("bf16_1_ms", "fp8_used_1_ms", 'one micro-batch with `keep_quantized="used"` {} times'),
)


def claim(record: Record) -> str:
    """How much faster layers are; geometric means."""
    rows = record["rows"]
    if not rows:
        return NOT_MEASURED

    def said(above: str, below: str, words: str) -> str:
        ratios = [row[above] / row[below] for row in rows]
        return words.format(f"{number(geometric_mean(ratios))} {span(ratios)}")

    where = f"in one run of {len(rows)} layers on one {gpus_of(rows)}"
    return noted(f"{where}, in the geometric mean: {', '.join(said(*each) for each in FIGURES)}", rows)


def weights_of(row: Record) -> float:
    """A layer's, 10^9."""
    return 3e-9 * float(row["cfg"]["E"] * row["cfg"]["n"] * row["cfg"]["d"])


def saved_inside(row: Record) -> float:
    """Milliseconds that two bytes of each weight take, which quantizing inside the products does not move."""
    return 2e12 * weights_of(row) / PEAK_BYTES


TABLES = {"fp8_recipe": ("fp8", recipe_table)}
SENTENCES = {"fp8_claim": ("fp8", claim)}
