"""Tables, sentences and plots of `steps`: the waterfall, save policies over T and n beside the prediction, activations."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from blazeproto import cost
from blazeproto.activations import activation_named
from blazeproto.autograd import SavePolicy
from blazeproto.gemm import PRODUCTS
from scripts.bench.markdown import LABELS, Record, Rows, least_to_most, look_up, plain_shape, values
from scripts.bench.module_tables import sizes_of
from scripts.bench.paper.cells import SHAPE, by_program, figure_of, gpu_of, of, ratio
from scripts.bench.paper.tables import Programs
from scripts.bench.render import Entry, Sentence

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


def steps_of(record: Record) -> Rows:
    """A row for each program of the waterfall, in the order of the steps, with what it saves over the step before."""
    made = []
    for row in record["rows"]:
        found = {line["program"]: line for line in by_program({"rows": [row]})}
        for name in [name for name in ("mb_sparse", *STEPS) if name in found]:
            before = found.get(BEFORE.get(name, ""), {})
            saves = {f"less_{field}": before[field] - found[name][field] for field in FIELDS if field in before}
            made.append(found[name] | saves)
    return made


def predicted_ms(policy: str, row: Record) -> float:
    """Forward + backward of the experts and their dispatch, predicted of a row's GPU; of an H200 where that has no rates."""
    sizes, known = sizes_of(row), {*PRODUCTS, "dispatch"}
    steps = [work for work in cost.layer_work(sizes, policy) if work.name.removesuffix(" again") in known]
    return sum(cost.predicted_work_ms(work, sizes, gpu_of(row) or "H200") for work in steps)


def predicted_longer(policy: str, row: Record) -> float:
    """A policy's time over "minimal"'s."""
    return predicted_ms(policy, row) / predicted_ms("minimal", row)


def longer(policy: str) -> str:
    return ratio(policy, "minimal", "fwdbwd_ms")


def activations_of(record: Record) -> Rows:
    """A row for each activation, with the time of SwiGLU, or of SiLU for those without a gate."""
    return [
        line | {"base_ms": figure_of("fwdbwd_ms", row, row["activation"])}
        for row in record["rows"]
        for line in by_program({"rows": [row]})
    ]


def beside_prediction(policy: str) -> list[Entry]:
    return [(f"{policy}: ms", of(policy, "fwdbwd_ms")), ("predicted", partial(predicted_ms, policy))]


def longer_beside_prediction(policy: str) -> list[Entry]:
    return [(f"{policy} / minimal", longer(policy), 3), ("predicted", partial(predicted_longer, policy), 3)]


TABLES = {
    "paper_waterfall": Programs(
        "paper/waterfall",
        [
            SHAPE,
            ("", lambda row: STEPS.get(row["program"]) or LABELS[row["program"]]),
            ("forward ms", "fwd_ms"),
            ("forward + backward ms", "fwdbwd_ms"),
            ("less than before, ms", "less_fwdbwd_ms"),
            ("saved MiB", "saved_MiB", 0),
            ("less, MiB", "less_saved_MiB", 0),
            ("peak MiB", "peak_MiB", 0),
        ],
        "Sums of kernel durations.",
        steps_of,
        picture="![What each step saves](waterfall.png)",
    ),
    "paper_policies": Programs(
        "paper/policies",
        [
            ("over", "label"),
            SHAPE,
            *chain.from_iterable(map(beside_prediction, POLICIES)),
            *chain.from_iterable(map(longer_beside_prediction, POLICIES[1:])),
            *((f"saved MiB: {policy}", of(policy, "saved_MiB"), 0) for policy in POLICIES),
            *((f"peak MiB: {policy}", of(policy, "peak_MiB"), 0) for policy in POLICIES),
        ],
        "The experts alone, forward + backward.",
        picture="![Save policies over T and n](policies.png)",
    ),
    "paper_activations": Programs(
        "paper/activations",
        [
            SHAPE,
            ("activation", "program"),
            ("gate", lambda row: "yes" if activation_named(row["program"]).gated else "no"),
            ("forward ms", "fwd_ms"),
            ("forward + backward ms", "fwdbwd_ms"),
            ("over SwiGLU's, or SiLU's", "fwdbwd_ms / base_ms", 3),
            ("saved MiB", "saved_MiB", 0),
            ("peak MiB", "peak_MiB", 0),
        ],
        rows=activations_of,
    ),
}


# ----------------------------------------------------------------------------------------------------------- sentences


def with_programs(*names: str) -> Any:
    """The rows of a record that have these programs."""
    return lambda record: [row for row in record["rows"] if {*names} <= row["programs"].keys()]


def waterfall_claim(rows: Rows) -> str:
    """The time that the steps save, together and each, part of a sentence."""
    parts = {
        "all steps from plain torch": ("plain", "minimal"),
        "fused kernels instead of blocks": ("blocks", "copies"),
        "tokens by index": ("copies", "sort"),
        "dispatch by tiles": ("sort", "tiled"),
        "act again": ("tiled", "minimal"),
    }
    said = []
    for what, steps in parts.items():
        time, kept = (least_to_most(values(rows, ratio(*steps, field))) for field in FIELDS)
        said.append(f"{what} {time} in time and {kept} in bytes")
    return f"before over after on {len(rows)} layers: {'; '.join(said)}"


def policies_claim(rows: Rows) -> str:
    """How much longer the policies take than "minimal", measured and predicted, part of a sentence."""
    said = []
    for policy in POLICIES[1:]:
        measured, predicted = (
            least_to_most(values(rows, source)) for source in (longer(policy), partial(predicted_longer, policy))
        )
        said.append(f'"{policy}" takes {measured} times the time of "minimal" (predicted: {predicted})')
    return ", ".join(said)


def activations_claim(lines: Rows) -> str:
    """How long the slowest activation takes beside SwiGLU or SiLU, part of a sentence."""
    times = least_to_most(values(lines, "fwdbwd_ms / base_ms"))
    activations = len({line["program"] for line in lines})
    return f"{activations} activations take {times} times the time of SwiGLU, or of SiLU where they have no gate"


SENTENCES = {
    "waterfall_claim": Sentence("paper/waterfall", waterfall_claim, with_programs("plain", "minimal")),
    "policies_claim": Sentence("paper/policies", policies_claim, with_programs(*POLICIES)),
    "activations_claim": Sentence("paper/activations", activations_claim, activations_of),
}


# --------------------------------------------------------------------------------------------------------------- plots


def plot_waterfall(figure: Any, record: Record) -> None:
    """Time and saved bytes of each step, a panel for each layer and field."""
    axes = figure.subplots(2, len(record["rows"]), squeeze=False)
    for row, panels in zip(record["rows"], axes.T, strict=True):
        names = [name for name in ("mb_sparse", *STEPS) if name in row["programs"]]
        for axis, (field, unit) in zip(panels, FIELDS.items(), strict=True):
            axis.bar(names, [figure_of(field, row, name) for name in names], color="#d1495b")
            axis.set(ylabel=f"{'forward + backward' if unit == 'ms' else 'saved'}, {unit}")
            axis.tick_params("x", rotation=60)
        panels[0].set_title(plain_shape(row))


def plot_policies(figure: Any, record: Record) -> None:
    """Each policy's time over "minimal"'s, over T and over n: measured, and dotted the prediction."""
    axes = figure.subplots(1, 2, sharey=True)
    for axis, letter in zip(axes, "Tn", strict=True):
        rows = sorted((row for row in record["rows"] if row["label"] == letter), key=lambda row: row["cfg"][letter])
        sizes = [row["cfg"][letter] for row in rows]
        for color, policy in zip(("#00798c", "#d1495b"), POLICIES[1:], strict=True):
            measured, predicted = (
                [look_up(row, longer(policy)) for row in rows],
                [predicted_longer(policy, row) for row in rows],
            )
            axis.plot(sizes, measured, "o-", color=color, label=policy)
            axis.plot(sizes, predicted, ":", color=color, label=f"{policy}, predicted")
        axis.set(xscale="log", xlabel=letter, ylabel='time over that of "minimal"')
    axes[0].legend()
