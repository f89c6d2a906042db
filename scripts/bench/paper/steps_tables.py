"""Tables, sentences and plots of `steps`: the waterfall, save policies over T and n beside the prediction, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from blazeproto import cost
from blazeproto.activations import activation_named
from blazeproto.autograd import SavePolicy
from blazeproto.gemm import PRODUCTS
from scripts.bench.markdown import LABELS, NOT_MEASURED, Column, Record, number
from scripts.bench.module_tables import sizes_of
from scripts.bench.paper.cells import LABEL, SHAPE, Rows, by_program, gpu_of, of, value
from scripts.bench.render import fixed
from scripts.bench.review_tables import noted

STEPS = {
    "plain": "torch, an expert after the other; sort",
    "blocks": "block-sparse kernels (MegaBlocks' formulation)",
    "copies": "grouped kernels with the activation inside, on copied tokens; sort",
    "sort": "tokens read by index",
    "tiled": "dispatch by tiles",
    "minimal": "act computed again in backward: ours",
    "fused": "beyond: experts summed inside the products (`fused_both`)",
    "recompute": 'beyond: the up projection again, `save="recompute"`',
}
"""What each program of the waterfall exchanges of the one before; the last two each of "minimal"."""

POLICIES = tuple(policy.value for policy in SavePolicy)
BEFORE = {name: before for before, name in zip(STEPS, [*STEPS][1:], strict=False)} | {"recompute": "minimal"}
"""What each step of the waterfall is compared with."""
FIELDS = {"fwdbwd_ms": "ms", "saved_MiB": "MiB"}


def steps_of(rows: Rows) -> Rows:
    """A row for each program of the waterfall, in the order of the steps, with what it saves over the step before."""
    made = []
    for row in rows:
        found = {line["program"]: line for line in by_program([row])}
        for name in ["mb_sparse", *STEPS]:
            if name in found:
                before = found.get(BEFORE.get(name, ""), {})
                saves = {f"less_{field}": before[field] - found[name][field] for field in FIELDS if field in before}
                made.append(found[name] | saves)
    return made


waterfall_columns = fixed(
    SHAPE,
    ("", lambda row: STEPS.get(row["program"]) or LABELS[row["program"]]),
    ("forward ms", "fwd_ms"),
    ("forward + backward ms", "fwdbwd_ms"),
    ("less than before, ms", "less_fwdbwd_ms"),
    ("saved MiB", "saved_MiB", 0),
    ("less, MiB", "less_saved_MiB", 0),
    ("peak MiB", "peak_MiB", 0),
)


def predicted_ms(policy: str, row: Record) -> float:
    """Forward + backward of the experts and their dispatch, predicted of a row's GPU; of an H200 where that has no rates."""
    sizes = sizes_of(row)
    steps = [
        work for work in cost.layer_work(sizes, policy) if work.name.removesuffix(" again") in {*PRODUCTS, "dispatch"}
    ]
    return sum(cost.predicted_work_ms(work, sizes, gpu_of(row) or "H200") for work in steps)


def longer(policy: str, row: Record) -> float | None:
    """A policy's time over "minimal"'s."""
    ms, minimal = value(row, policy, "fwdbwd_ms"), value(row, "minimal", "fwdbwd_ms")
    return ms / minimal if ms and minimal else None


def predicted_longer(policy: str, row: Record) -> float:
    return predicted_ms(policy, row) / predicted_ms("minimal", row)


def policies_columns(_: Rows) -> list[Column]:
    columns: list[Column] = [("over", LABEL[1]), SHAPE]
    for policy in POLICIES:
        columns += [(f"{policy}: ms", of(policy, "fwdbwd_ms")), ("predicted", partial(ms_cell, policy))]
    for policy in POLICIES[1:]:
        columns += [
            (f"{policy} / minimal", partial(longer_cell, policy)),
            ("predicted", partial(predicted_cell, policy)),
        ]
    columns += [(f"saved MiB: {policy}", of(policy, "saved_MiB", 0)) for policy in POLICIES]
    return columns + [(f"peak MiB: {policy}", of(policy, "peak_MiB", 0)) for policy in POLICIES]


def ms_cell(policy: str, row: Record) -> str:
    return number(predicted_ms(policy, row))


def longer_cell(policy: str, row: Record) -> str:
    return number(longer(policy, row), 3)


def predicted_cell(policy: str, row: Record) -> str:
    return number(predicted_longer(policy, row), 3)


def activations_of(rows: Rows) -> Rows:
    """A row for each activation, with its time over SwiGLU's, or without a gate over SiLU's."""
    made = []
    for row in rows:
        base = value(row, row["activation"], "fwdbwd_ms")
        made += [line | {"over_base": line["fwdbwd_ms"] / base if base else None} for line in by_program([row])]
    return made


activations_columns = fixed(
    SHAPE,
    ("activation", "program"),
    ("gate", lambda row: "yes" if activation_named(row["program"]).gated else "no"),
    ("forward ms", "fwd_ms"),
    ("forward + backward ms", "fwdbwd_ms"),
    ("over SwiGLU's, or SiLU's", "over_base", 3),
    ("saved MiB", "saved_MiB", 0),
    ("peak MiB", "peak_MiB", 0),
)


# ----------------------------------------------------------------------------------------------------------- sentences


def spread(values: list[float], digits: int = 2) -> str:
    return f"{number(min(values), digits)} to {number(max(values), digits)}"


def waterfall_claim(record: Record) -> str:
    """The time that the steps save, together and each, part of a sentence."""
    rows = [row for row in record["rows"] if {"plain", "minimal"} <= row["programs"].keys()]
    if not rows:
        return NOT_MEASURED

    def over(before: str, after: str, field: str) -> str:
        pairs = [(value(row, before, field), value(row, after, field)) for row in rows]
        found = [a / b for a, b in pairs if a and b]
        return spread(found) if found else "–"

    parts = [
        ("all steps from plain torch", "plain", "minimal"),
        ("fused kernels instead of blocks", "blocks", "copies"),
        ("tokens by index", "copies", "sort"),
        ("dispatch by tiles", "sort", "tiled"),
        ("act again", "tiled", "minimal"),
    ]
    said = [f"{what} {over(a, b, 'fwdbwd_ms')} in time and {over(a, b, 'saved_MiB')} in bytes" for what, a, b in parts]
    return noted(f"before over after on {len(rows)} layers: {'; '.join(said)}", rows)


def policies_claim(record: Record) -> str:
    """How much longer the policies take than "minimal", measured and predicted, part of a sentence."""
    rows = [row for row in record["rows"] if set(POLICIES) <= row["programs"].keys()]
    said = []
    for policy in POLICIES[1:]:
        measured = [found for row in rows if (found := longer(policy, row)) is not None]
        if measured:
            predicted = spread([predicted_longer(policy, row) for row in rows])
            said.append(f'"{policy}" takes {spread(measured)} times the time of "minimal" (predicted: {predicted})')
    return noted(", ".join(said), rows) if said else NOT_MEASURED


def activations_claim(record: Record) -> str:
    """How long the slowest activation takes beside SwiGLU or SiLU, part of a sentence."""
    found = [line for line in activations_of(record["rows"]) if line["over_base"]]
    if not found:
        return NOT_MEASURED
    said = f"{len({line['program'] for line in found})} activations take {spread([line['over_base'] for line in found])} times"
    return noted(f"{said} the time of SwiGLU, or of SiLU where they have no gate", record["rows"])


CLAIMS: dict[str, tuple[str, Callable[..., str]]] = {
    "waterfall_claim": ("paper/waterfall", waterfall_claim),
    "policies_claim": ("paper/policies", policies_claim),
    "activations_claim": ("paper/activations", activations_claim),
}
"""Sentences of docs/review.md, as `result_tables.SENTENCES` has them."""


# --------------------------------------------------------------------------------------------------------------- plots


def plot_waterfall(figure: Any, record: Record) -> None:
    """Time and saved bytes of each step, a panel for each layer and field."""
    axes = figure.subplots(2, len(record["rows"]), squeeze=False)
    for row, (upper, lower) in zip(record["rows"], axes.T, strict=True):
        names = [name for name in ("mb_sparse", *STEPS) if name in row["programs"]]
        for axis, (field, unit) in zip((upper, lower), FIELDS.items(), strict=True):
            axis.bar(names, [value(row, name, field) for name in names], color="#d1495b")
            axis.set(ylabel=f"{'forward + backward' if unit == 'ms' else 'saved'}, {unit}")
            axis.tick_params("x", rotation=60)
            axis.spines[["top", "right"]].set_visible(False)
        upper.set_title(SHAPE[1](row))


def plot_policies(figure: Any, record: Record) -> None:
    """Each policy's time over "minimal"'s, over T and over n: measured, and dotted the prediction."""
    axes = figure.subplots(1, 2, sharey=True)
    for axis, letter in zip(axes, "Tn", strict=True):
        rows = sorted((row for row in record["rows"] if row["label"] == letter), key=lambda row: row["cfg"][letter])
        for color, policy in zip(("#00798c", "#d1495b"), POLICIES[1:], strict=True):
            sizes = [row["cfg"][letter] for row in rows]
            axis.plot(sizes, [longer(policy, row) for row in rows], "o-", color=color, label=policy)
            axis.plot(
                sizes, [predicted_longer(policy, row) for row in rows], ":", color=color, label=f"{policy}, predicted"
            )
        axis.set(xscale="log", xlabel=letter, ylabel='time over that of "minimal"')
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
