"""The papers' tables as docs/papers.md has them: what was measured beside what is printed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from blazeproto import cost
from scripts.bench.markdown import LABELS, Column, Record, number, origin, table, with_figures
from scripts.bench.paper import moeblaze_tables as moeblaze
from scripts.bench.paper import sonicmoe_tables as sonicmoe
from scripts.bench.paper import steps_tables as steps
from scripts.bench.paper.cells import Rows, by_program, gpu_of

PACKAGES = {
    "sonic": ("sonic-moe", "quack-kernels"),
    "mb_sparse": ("megablocks",),
    "grouped_mm": ("transformers",),
    "liger": ("liger-kernel",),
    "quack": ("quack-kernels",),
}
"""Whose versions stand under a table in which a program is."""


class Shown(NamedTuple):
    """A table. columns: of the rows that it has; ``rows`` makes them of a file's.  note: stands below."""

    item: str  # whose results it shows
    title: str
    columns: Callable[[Rows], list[Column]]
    note: str = ""
    rows: Callable[[Rows], Rows] = list
    picture: str = ""  # in docs/


SHOWN = {
    "figures": Shown(
        "moeblaze-figures", "MoEBlaze, Figures 3 to 6", moeblaze.figures_columns, picture="paper_moeblaze.png"
    ),
    "scale": Shown("moeblaze-scale", "MoEBlaze, Table 2", moeblaze.scale_columns),
    "dispatch": Shown("moeblaze-dispatch", "MoEBlaze, Table 3", moeblaze.dispatch_columns),
    "ablation": Shown("moeblaze-ablation", "MoEBlaze, Tables 4 and 5", moeblaze.ablation_columns, rows=by_program),
    "gather": Shown("moeblaze-gather", "MoEBlaze §7.3, rows gathered by index", moeblaze.gather_columns),
    "combine": Shown("combine", "A token's experts summed in the product, or gathered", moeblaze.combine_columns),
    "layers": Shown(
        "sonicmoe-layers", "SonicMoE, Figures 5 and 6a", sonicmoe.layers_columns, picture="paper_sonicmoe.png"
    ),
    "granularity": Shown(
        "sonicmoe-layers", "SonicMoE, Figure 1", sonicmoe.granularity_columns, rows=sonicmoe.granularity
    ),
    "claims": Shown(
        "sonicmoe-layers",
        "SonicMoE, what its text says",
        sonicmoe.claims_columns,
        "Means, and least to most.",
        sonicmoe.claims,
    ),
    "phases": Shown(
        "sonicmoe-kernels",
        "SonicMoE, Figure 2a",
        sonicmoe.phases_columns,
        rows=sonicmoe.phases,
        picture="paper_kernels.png",
    ),
    "kernels": Shown("sonicmoe-kernels", "Our kernels in it", sonicmoe.our_kernels_columns, rows=sonicmoe.our_kernels),
    "rounding": Shown(
        "sonicmoe-rounding",
        "SonicMoE, Figures 3 and 7, the experts alone",
        sonicmoe.rounding_columns,
        picture="paper_rounding.png",
    ),
    "waterfall": Shown(
        "waterfall",
        "What each step saves",
        steps.waterfall_columns,
        "Sums of kernel durations.",
        steps.steps_of,
        "waterfall.png",
    ),
    "policies": Shown(
        "policies",
        "Save policies over T and n",
        steps.policies_columns,
        "The experts alone, forward + backward.",
        picture="policies.png",
    ),
    "activations": Shown("activations", "Activations", steps.activations_columns, rows=steps.activations_of),
    "scores": Shown("sonicmoe-scores", "SonicMoE, appendix D.1", sonicmoe.scores_columns),
}


def rates(gpu: str) -> str:
    operations, least_bytes, source = cost.GPUS[gpu]
    return f"Floors: {number(operations / 1e12, 0)} TFLOP/s and {number(least_bytes / 1e12)} TB/s ({gpu}: {source})."


def notes(shown: Shown, record: Record) -> str:
    """Notes: the GPU and date, the rates of its floors, and the absent programs."""
    rows = record["rows"]
    there = shown.rows(rows) or rows
    absent = {name: reason for row in rows for name, reason in row.get("absent", {}).items()}
    programs = {name for row in rows for name in (*row.get("programs", {}), *row.get("absent", {}))}
    packages = [package for name, each in PACKAGES.items() if name in programs for package in each]
    missing = "; ".join(f"{LABELS.get(name, name)} ({reason})" for name, reason in absent.items())
    floors = [rates(gpu) for gpu in sorted(filter(None, {*map(gpu_of, there)}))]
    said = [
        shown.note,
        origin(there, "torch", *dict.fromkeys(packages)),
        *(floors if any("floor" in head for head, _ in shown.columns(there)) else ()),
        f"Absent from some rows: {missing}." if missing else "",
    ]
    return " ".join(filter(None, said))


def markdown(shown: Shown, record: Record) -> str:
    """As a page has it, its picture first."""
    rows = shown.rows(record["rows"])
    picture = f"![{shown.title}]({shown.picture})\n\n" if shown.picture else ""
    columns = with_figures(rows, shown.columns(rows))
    return f"{picture}{table(rows, columns)}\n\n{notes(shown, record)}"


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    f"paper_{name}": (f"paper/{shown.item}", partial(markdown, shown)) for name, shown in SHOWN.items()
}
"""Of docs/papers.md and docs/results.md: the results file and what makes the table, as `result_tables.TABLES` has them."""
