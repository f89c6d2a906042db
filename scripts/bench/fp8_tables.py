"""Tables of fp8 beside bf16, made from results/GPU/fp8.json, and of the bits of fp8_rollout, from rollout.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial

from blazeproto.cost import PEAK_BYTES
from blazeproto.gemm.recipe import RECIPES, Recipe
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, Record, Rows, Table, gpus_of, noted, number, origin, shape_of, span


def recipe_table(name: str, _: Record) -> str:
    """A `blazeproto.gemm.recipe.Recipe`, which `Options` takes. Other recipes show the operands that differ from "fp8"."""
    recipe, usual = RECIPES[name], RECIPES["fp8"]
    rows = [
        (each.name, each.metadata["shape"], *(word.replace("_", " ") for word in own), each.metadata["when"])
        for each in fields(Recipe)
        if each.metadata and ((own := getattr(recipe, each.name)) != getattr(usual, each.name) or recipe is usual)
    ]
    header = ("operand", "shape", "elements", "one scale for", "values of scales", "quantized")
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


FIGURES = (  # above, below, how it is said
    ("bf16_2_ms", "fp8_2_ms", "a step of two micro-batches runs {} times as fast as in bf16"),
    ("bf16_1_ms", "fp8_1_ms", "of one {} times"),
    ("bf16_fwd_ms", "fp8_fwd_ms", "an evaluation {} times"),
    ("bf16_1_ms", "fp8_used_1_ms", 'one micro-batch with `keep_quantized="used"` {} times'),
)


COMPARED = {  # numbers of rollout.json, and how they are said
    "x": "x and its scales",
    "up_proj": "gate_up_proj",
    "up_proj^T": "its transpose",
    "down_proj": "down_proj",
    "down_proj^T": "its transpose",
    "H": "H",
    "act": "act",
    "Y": "Y",
}


def compared_in(rows: Rows) -> dict[str, tuple[int, int]]:
    """The numbers with their scales of all layers, and those that differ; of what was compared."""
    found = Counter[str]()
    for row in rows:
        found.update(row["found"])
    return {
        name: tuple(sum(found[f"{name}{part}{differ}"] for part in ("", " scales")) for differ in ("", " differ"))  # type: ignore[misc]
        for name in COMPARED
        if name in found
    }


def rollout_bits(record: Record) -> str:
    """The numbers that were compared, and those whose bits differ."""
    if not (rows := record["rows"]):
        return NOT_MEASURED
    lines = [("numbers, with their scales", "compared", "differ"), ("---", "---:", "---:")]
    lines += [
        (COMPARED[name], f"{count:,}".replace(",", " "), f"{differ:,}".replace(",", " "))
        for name, (count, differ) in compared_in(rows).items()
    ]
    made = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{made}\n\n{origin(rows, 'torch', 'sgl-deep-gemm')}"


def rollout_claim(record: Record) -> str:
    """The layers, and the numbers that differ."""
    if not (rows := record["rows"]):
        return NOT_MEASURED
    counts = list(compared_in(rows).values())
    layers, numbers, differ = sum(row["found"]["layers"] for row in rows), *map(sum, zip(*counts, strict=True))
    return noted(f"of {numbers:.2e} numbers in {layers} layers on one {gpus_of(rows)}, {differ} differ", rows)


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


TIMES = Table(
    "rollout",
    [
        ("T, d, n, E, K", lambda row: ", ".join(shape_of(row))),
        *(
            (f"{when}: {name}" if name == "fp8" else name, f"ms.{name}{suffix}")
            for when, suffix in (
                ("fwd ms, weights quantized before", ", weights quantized before"),
                ("fwd ms", ""),
                ("fwd + bwd ms", ", with backward"),
            )
            for name in ("fp8", "fp8_rollout")
        ),
    ],
    rows="times",
)
TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "fp8_recipe": ("fp8", partial(recipe_table, "fp8")),
    "rollout_recipe": ("fp8", partial(recipe_table, "fp8_rollout")),
    "rollout_bits": ("rollout", rollout_bits),
    "rollout_times": ("rollout", TIMES),
}
SENTENCES = {"fp8_claim": ("fp8", claim), "rollout_claim": ("rollout", rollout_claim)}
