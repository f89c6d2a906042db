"""Tables, sentences and the plot of training runs: of curves.json, train.json, and `scripts.lm.compare_runs`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scripts.bench.markdown import NOT_MEASURED, Column, Record, number, origin, table
from scripts.bench.paper.printed import PERPLEXITY
from scripts.bench.review_tables import noted
from scripts.lm.compare_backends import largest_difference, smoothed
from scripts.lm.training_items import ITEMS, RUNS

REFERENCE, BASELINE, OURS = "torch_fp32", "dense", "ours"
LAST = 50  # steps whose losses are a run's training loss
SONICMOE_LAST = 100  # Table 1's "Train"


# -------------------------------------------------------------------------------------------------- one run, or a pair


def curves(record: Record) -> str:
    """How far the losses of two runs are apart, part of a sentence."""
    if "losses" not in record:
        return NOT_MEASURED
    steps, difference = len(record["losses"]["hopper"]), number(100 * record["largest_difference"])
    return noted(f"the smoothed losses of {steps} steps differ by at most {difference} %", [record])


# ----------------------------------------------------------------------------------------------------------- many runs

Group = dict[int, Record]  # a run's rows by seed
Beside = Callable[[Record, Record], float | None]  # of two runs' rows of one seed


def groups(record: Record, item: str) -> dict[str, Group]:
    """The rows that answer a question, by run, in the question's order; missing runs are left out."""
    length = ITEMS[item].length
    found = {
        run: {row["seed"]: row for row in record["rows"] if (row["run"], row["length"]) == (run, length)}
        for run in ITEMS[item].runs
    }
    return {run: dict(sorted(group.items())) for run, group in found.items() if group}


def line_of(run: str, group: Group) -> Record:
    """The record that a table's columns are made from. of: with the kernels of all seeds."""
    rows = [*group.values()]
    kernels = sorted({name for row in rows for name in row["of"]["kernels"]})
    return {"run": run, "group": group, "of": rows[0]["of"] | {"kernels": kernels}}


def validation(row: Record) -> float:
    """The last validation's loss."""
    return float(row["validation"][-1][1])


def training_loss(row: Record, last: int = LAST) -> float:
    return statistics.fmean(row["losses"][-last:])


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def each_seed(value: Callable[[Record], float], digits: int = 4) -> Callable[[Record], str]:
    return lambda line: ", ".join(number(value(row), digits) for row in line["group"].values())


def beside(others: Group, line: Record, value: Beside) -> list[float]:
    """``value`` of a run's row and the other run's of the same seed, of every seed that both have."""
    pairs = [value(row, others[seed]) for seed, row in line["group"].items() if seed in others]
    return [each for each in pairs if each is not None]


def more_validation(row: Record, other: Record) -> float:
    return validation(row) - validation(other)


def apart(row: Record, other: Record) -> float:
    return 100 * largest_difference(row["losses"], other["losses"])[0]


def seconds_to_loss(row: Record, other: Record) -> float | None:
    """Seconds of training, validation apart, until the smoothed loss is that with which the other run ends; None: never."""
    target = smoothed(other["losses"])[-1]
    steps = next((step for step, loss in enumerate(smoothed(row["losses"]), 1) if loss <= target), None)
    return None if steps is None or row["ms_a_step"] is None else steps * row["ms_a_step"] / 1e3


def from_float64(row: Record, other: Record) -> list[float]:
    return [abs(a - b) / b for a, b in zip(row["losses"], other["losses"], strict=True)]


LABEL: Column = ("", lambda line: RUNS[line["run"]].label)
VALIDATION: Column = ("validation loss by seed", each_seed(validation))
MS: Column = ("ms a step", lambda line: number(mean(known(line, "ms_a_step")), 1))
# Bytes that differ between seeds are of two loads, or of two versions of what is saved: a mean would be of neither.
SAVED: Column = (
    "saved, MiB",
    lambda line: ", ".join(dict.fromkeys(number(each, 0) for each in known(line, "saved_MiB"))),
)


def known(line: Record, field: str) -> list[float]:
    return [row[field] for row in line["group"].values() if row[field] is not None]


def against(others: Group, value: Beside, digits: int, join: Any = mean) -> Callable[[Record], str]:
    """A cell: of all seeds' values beside another run's, their mean, or what ``join`` makes of them."""

    def cell(line: Record) -> str:
        values = beside(others, line, value)
        return number(join(values) if values else None, digits)

    return cell


def seconds_by_seed(others: Group) -> Callable[[Record], str]:
    """A cell: each seed's `seconds_to_loss`; a dash where it was not timed, or is never there."""

    def cell(line: Record) -> str:
        pairs = [(row, others.get(seed)) for seed, row in line["group"].items()]
        return ", ".join(number(seconds_to_loss(row, other) if other else None, 1) for row, other in pairs)

    return cell


def accuracy_columns(found: dict[str, Group]) -> list[Column]:
    reference, dense = found.get(REFERENCE, {}), found.get(BASELINE, {})
    columns = [LABEL, VALIDATION, (f"training loss, last {LAST} steps", each_seed(training_loss))]
    columns.append(("validation, minus torch's in fp32", against(reference, more_validation, 4)))
    columns.append(("smoothed losses, largest difference from torch's in fp32, %", against(reference, apart, 2, max)))
    return [*columns, MS, SAVED, ("s to the dense model's last loss, by seed", seconds_by_seed(dense))]


def capacity_columns(found: dict[str, Group]) -> list[Column]:
    columns = [LABEL, VALIDATION, ("minus dropless", against(found.get(OURS, {}), more_validation, 4))]
    columns.append(("largest load / mean, last step", lambda line: number(mean(known(line, "balance")))))
    dense = found.get(BASELINE, {})
    return [*columns, MS, SAVED, ("s to the dense model's last loss, by seed", seconds_by_seed(dense))]


def routers_columns(found: dict[str, Group]) -> list[Column]:
    columns = [
        LABEL,
        (f"training loss, last {SONICMOE_LAST} steps", each_seed(partial(training_loss, last=SONICMOE_LAST))),
    ]
    columns += [VALIDATION, ("minus top-k", against(found.get(OURS, {}), more_validation, 4)), MS]
    return [*columns, ("printed perplexity: training", printed(0)), ("validation", printed(1))]


def seeds_apart(group: Group) -> float | None:
    """How far two seeds' mean losses of the last steps are apart."""
    losses = [training_loss(row, SONICMOE_LAST) for row in group.values()]
    return max(losses) - min(losses) if len(losses) > 1 else None


def more_training(row: Record, other: Record) -> float:
    return training_loss(row, SONICMOE_LAST) - training_loss(other, SONICMOE_LAST)


def fp8_columns(found: dict[str, Group]) -> list[Column]:
    return [
        LABEL,
        (f"training loss, last {SONICMOE_LAST} steps", each_seed(partial(training_loss, last=SONICMOE_LAST))),
        ("minus bf16, mean of seeds", against(found.get(OURS, {}), more_training, 4)),
        ("two seeds apart", lambda line: number(seeds_apart(line["group"]), 4)),
        *(VALIDATION, MS, SAVED),
    ]


def gradients_table(record: Record) -> str:
    """Cosines of experts' weight gradients with float64's."""
    rows = record.get("gradients", [])
    lines = [
        {"precision": precision, "weight": weight, "rows": these}
        for precision, weight in dict.fromkeys((row["precision"], row["weight"]) for row in rows)
        if (these := [row for row in rows if (row["precision"], row["weight"]) == (precision, weight)])
    ]
    columns: list[Column] = [
        ("precision", lambda line: line["precision"]),
        ("weight", lambda line: line["weight"]),
        ("gradients", lambda line: str(sum(row["experts"] for row in line["rows"]))),
        ("least cosine", lambda line: number(min(row["least"] for row in line["rows"]), 5)),
        ("mean", lambda line: number(statistics.fmean(row["mean"] for row in line["rows"]), 5)),
    ]
    return f"{table(lines, columns)}\n\n{origin(rows, 'torch')}" if rows else NOT_MEASURED


def printed(index: int) -> Callable[[Record], str]:
    return lambda line: number(PERPLEXITY.get(line["run"], (None, None))[index])


def float64_columns(found: dict[str, Group]) -> list[Column]:
    exact = found.get("float64", {})
    parts: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean,
        "largest": max,
    }
    return [LABEL] + [
        (f"{said} difference, 10⁻⁶", against(exact, lambda row, other, of=of: 1e6 * of(from_float64(row, other)), 3))  # type: ignore[misc]
        for said, of in parts.items()
    ]


NOTES = {
    "accuracy": "Rounding alone parts two programs' losses after some hundred steps; the float64 table compares the first ones.",
    "capacity": "Largest load over the mean: of the whole batch, in the last step. Padded to the largest load, Tutel's dynamic "
    "capacity factor: each part of a batch has room for its own largest load; saved is what the first step's first part saves.",
    "routers": "Printed: SonicMoE's Tables 1a and 6a, of 0.5 B parameters and 40 B tokens; perplexities, ours are nats a byte. "
    "All are validated with top-k.",
    "fp8": "The same data and first weights by seed.",
    "float64": "Of the training losses of the first 20 steps, over float64's. The first loss is ln 256 for all: their "
    "heads start at zero.",
}


def runs_table(item: str, record: Record) -> str:
    """A line for each run of a question, both seeds in it."""
    found = groups(record, item)
    if not found:
        return NOT_MEASURED
    columns = {"accuracy": accuracy_columns, "capacity": capacity_columns}
    columns |= {"routers": routers_columns, "float64": float64_columns, "fp8": fp8_columns}
    lines = [line_of(run, group) for run, group in found.items()]
    rows = [row for group in found.values() for row in group.values()]
    picture = {"accuracy": "training.png", "fp8": "fp8_training.png"}.get(item)
    picture = f"![losses over steps and seconds]({picture})\n\n" if picture else ""
    return f"{picture}{table(lines, columns[item](found))}\n\n{NOTES[item]} {origin(rows, 'torch')}"


TRAINING: dict[str, tuple[str, Callable[[Record], str]]] = {
    f"training_{item}": ("training", partial(runs_table, item)) for item in ITEMS
} | {"fp8_gradients": ("training", gradients_table)}


# ----------------------------------------------------------------------------------------------------------- sentences


def pair(record: Record, item: str, run: str, other: str, value: Beside) -> list[float]:
    found = groups(record, item)
    return beside(found[other], line_of(run, found[run]), value) if {run, other} <= found.keys() else []


def rows_for(record: Record, item: str) -> list[Record]:
    return [row for group in groups(record, item).values() for row in group.values()]


def said_of(
    record: Record,
    item: str,
    parts: dict[str, list[float]],
    digits: int,
    unit: str,
    of: Callable[[list[float]], float] = max,
) -> str:
    """ "0.10 % (a), 0.20 % (b, of one seed)", of the seeds' values the largest one or what ``of`` makes."""
    said = [
        f"{number(of(values), digits)} {unit} ({RUNS[run].label}{', of one seed' if len(values) == 1 else ''})"
        for run, values in parts.items()
        if values
    ]
    return noted(", ".join(said), rows_for(record, item)) if said else ""


def training_claim(record: Record) -> str:
    """How far validation losses are from torch's in fp32, part of a sentence."""

    def share(row: Record, other: Record) -> float:
        return 100 * abs(more_validation(row, other)) / validation(other)

    runs = ("torch_bf16", OURS, "fused", "block_sparse")
    parts = {run: pair(record, "accuracy", run, REFERENCE, share) for run in runs}
    if not (said := said_of(record, "accuracy", parts, 2, "%")):
        return NOT_MEASURED
    seeds = [
        [validation(row) for row in group.values()] for group in groups(record, "accuracy").values() if len(group) > 1
    ]
    spread = max((100 * (max(each) / min(each) - 1) for each in seeds), default=None)
    more = "" if spread is None else f"; two seeds of one program by up to {number(spread)} %"
    return f"validation losses differ from those of plain torch in fp32 by at most {said}{more}"


def float64_claim(record: Record) -> str:
    """How far the first losses are from float64's, part of a sentence."""
    runs = ("torch_fp32", "torch_bf16", OURS)
    largest = {run: pair(record, "float64", run, "float64", lambda a, b: 1e6 * max(from_float64(a, b))) for run in runs}
    said = said_of(record, "float64", largest, 1, "millionths")
    return f"losses of the first steps differ from float64's by at most {said}" if said else NOT_MEASURED


def fp8_training_claim(record: Record) -> str:
    """How far fp8's losses are from bf16's, part of a sentence."""
    apart_by = pair(record, "fp8", "fp8", OURS, more_training)
    bf16 = seeds_apart(groups(record, "fp8").get(OURS, {}))
    if not apart_by:
        return NOT_MEASURED
    said = f"the mean loss of the last {SONICMOE_LAST} steps is {number(statistics.fmean(apart_by), 4)} nats a byte above bf16's"
    said += "" if bf16 is None else f", whose two seeds are {number(bf16, 4)} apart"
    return noted(said, rows_for(record, "fp8"))


def dense_claim(record: Record) -> str:
    """The part of a dense model's time in which others have its last loss, part of a sentence."""

    def part(row: Record, other: Record) -> float | None:
        whole, seconds = seconds_to_loss(other, other), seconds_to_loss(row, other)
        return None if not whole or seconds is None else seconds / whole

    parts = {run: pair(record, "accuracy", run, BASELINE, part) for run in (OURS, "block_sparse", "dropping_1.25")}
    said = said_of(record, "accuracy", parts, 2, "of its time")
    return (
        f"a dense model of as many active parameters: its last training loss is reached in {said}"
        if said
        else NOT_MEASURED
    )


def more_claim(item: str, what: str, runs: tuple[str, ...], record: Record) -> str:
    """The difference to the validation loss of ours with top-k, in the mean of the seeds; part of a sentence."""
    more = {run: pair(record, item, run, OURS, more_validation) for run in runs}
    said = said_of(record, item, more, 4, "nats a byte", statistics.fmean)
    return f"{what} {said}" if said else NOT_MEASURED


TRAINING_CLAIMS: dict[str, tuple[str, Callable[..., str]]] = {
    "training_claim": ("training", training_claim),
    "float64_claim": ("training", float64_claim),
    "dense_claim": ("training", dense_claim),
    "fp8_training_claim": ("training", fp8_training_claim),
    "capacity_claim": (
        "training",
        partial(
            more_claim,
            "capacity",
            "with dropped tokens the validation loss, mean of the seeds, is above top-k's (negative: below) by",
            ("dropping_1.0", "dropping_1.5", "dropping_2.0"),
        ),
    ),
    "rounding_claim": (
        "training",
        partial(
            more_claim,
            "routers",
            "with other choices the validation loss, mean of the seeds, is above top-k's (negative: below) by",
            ITEMS["routers"].runs[1:],
        ),
    ),
}
"""Name of a sentence: its results file, and what makes it of that."""


def plot_runs(figure: Any, record: Record, item: str = "accuracy") -> None:
    """Smoothed training losses of the first seed, over steps, and of the first that was timed, over seconds of training."""
    found = groups(record, item)
    timed = {
        run: row for run, group in found.items() for row in reversed(group.values()) if row["ms_a_step"] is not None
    }
    axes = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    for run, group in found.items():
        losses = smoothed(next(iter(group.values()))["losses"])
        (line,) = axes[0].plot(range(1, len(losses) + 1), losses, lw=1, label=RUNS[run].label)
        if run in timed:
            losses = smoothed(timed[run]["losses"])
            seconds = [step * timed[run]["ms_a_step"] / 1e3 for step in range(1, len(losses) + 1)]
            axes[1].plot(seconds, losses, lw=1, color=line.get_color())
    axes[0].set(xlabel="step", ylabel="training loss, smoothed, nats a byte", yscale="log")
    for axis in axes[1:]:
        axis.set(xlabel="s")
    axes[0].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
