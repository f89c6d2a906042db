"""Tables, sentences and the plot of training runs: of curves.json, train.json, and `scripts.lm.compare_runs`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scripts.bench.markdown import NOT_MEASURED, Entry, Record, Table, condition, gpus_of, noted, number
from scripts.bench.paper.printed import PERPLEXITY
from scripts.lm.compare_backends import largest_difference, smoothed
from scripts.lm.training_items import ITEMS, RUNS

REFERENCE, BASELINE, OURS = "torch_fp32", "dense", "ours"
LAST = 50  # steps whose losses are a run's training loss
SONICMOE_LAST = 100  # Table 1's "Train"

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


# -------------------------------------------------------------------------------------------- of a row, or of two runs'


def validation(row: Record) -> float:
    """The last validation's loss."""
    return float(row["validation"][-1][1])


def training_loss(row: Record, last: int = LAST) -> float:
    return statistics.fmean(row["losses"][-last:])


def more_validation(row: Record, other: Record) -> float:
    return validation(row) - validation(other)


def share_of_validation(row: Record, other: Record) -> float:
    """Percent."""
    return 100 * abs(more_validation(row, other)) / validation(other)


def more_training(row: Record, other: Record) -> float:
    return training_loss(row, SONICMOE_LAST) - training_loss(other, SONICMOE_LAST)


def apart(row: Record, other: Record) -> float:
    return 100 * largest_difference(row["losses"], other["losses"])[0]


def seconds_to_loss(row: Record, other: Record) -> float | None:
    """Seconds of training, validation apart, until the smoothed loss is that with which the other run ends; None: never."""
    target = smoothed(other["losses"])[-1]
    steps = next((step for step, loss in enumerate(smoothed(row["losses"]), 1) if loss <= target), None)
    return None if steps is None or row["ms_a_step"] is None else steps * row["ms_a_step"] / 1e3


def part_of_seconds(row: Record, other: Record) -> float | None:
    """The part of the other run's time in which a run has its last loss."""
    whole, seconds = seconds_to_loss(other, other), seconds_to_loss(row, other)
    return None if not whole or seconds is None else seconds / whole


def from_float64(row: Record, other: Record) -> list[float]:
    return [abs(a - b) / b for a, b in zip(row["losses"], other["losses"], strict=True)]


def millionths(of: Callable[[list[float]], float], row: Record, other: Record) -> float:
    return 1e6 * of(from_float64(row, other))


def seeds_apart(group: Group) -> float | None:
    """How far two seeds' mean losses of the last steps are apart."""
    losses = [training_loss(row, SONICMOE_LAST) for row in group.values()]
    return max(losses) - min(losses) if len(losses) > 1 else None


def beside(group: Group, others: Group, value: Beside) -> list[float]:
    """``value`` of a run's row and the other run's of the same seed, of every seed that both have."""
    pairs = [value(row, others[seed]) for seed, row in group.items() if seed in others]
    return [each for each in pairs if each is not None]


# -------------------------------------------------------------------------------------------------------------- tables


def line_of(run: str, found: dict[str, Group]) -> Record:
    """The figures of a run that the tables show. of: with the kernels of all seeds."""
    group, rows, dense = found[run], [*found[run].values()], found.get(BASELINE, {})

    def mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    def known(field: str) -> list[float]:
        return [row[field] for row in rows if row[field] is not None]

    def by_seed(values: Sequence[float | None], digits: int = 4) -> str:
        return ", ".join(number(value, digits) for value in values)

    def against(other: str, value: Beside) -> list[float]:
        return beside(group, found.get(other, {}), value)

    seconds = [seconds_to_loss(row, dense[seed]) if seed in dense else None for seed, row in group.items()]
    return {
        "of": rows[0]["of"] | {"kernels": sorted({name for row in rows for name in row["of"]["kernels"]})},
        "runs": rows,
        "label": RUNS[run].label,
        "validation": by_seed([validation(row) for row in rows]),
        "training": by_seed([training_loss(row) for row in rows]),
        "training_100": by_seed([training_loss(row, SONICMOE_LAST) for row in rows]),
        "over_reference": mean(against(REFERENCE, more_validation)),
        "from_reference": max(against(REFERENCE, apart), default=None),
        "over_ours": mean(against(OURS, more_validation)),
        "training_over_ours": mean(against(OURS, more_training)),
        "seeds_apart": seeds_apart(group),
        "ms": mean(known("ms_a_step")),
        # Bytes that differ between seeds are of two loads, or of two versions of what is saved: a mean would be of neither.
        "saved": ", ".join(dict.fromkeys(number(each, 0) for each in known("saved_MiB"))),
        "balance": mean(known("balance")),
        "seconds": by_seed(seconds, 1),
        "printed": dict(zip(("training", "validation"), PERPLEXITY.get(run, ()), strict=False)),
        "mean": mean(against("float64", partial(millionths, statistics.fmean))),
        "largest": mean(against("float64", partial(millionths, max))),
    }


def lines(item: str, record: Record) -> list[Record]:
    found = groups(record, item)
    return [line_of(run, found) for run in found]


def gradients(record: Record) -> list[Record]:
    """A line for each precision and weight, of all layers."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in record.get("gradients", []):
        found.setdefault((row["precision"], row["weight"]), []).append(row)
    return [
        {"precision": precision, "weight": weight, "of": rows[0]["of"], "runs": rows}
        | {"experts": sum(row["experts"] for row in rows), "least": min(row["least"] for row in rows)}
        | {"mean": statistics.fmean(row["mean"] for row in rows)}
        for (precision, weight), rows in found.items()
    ]


LABEL: Entry = ("", "label")
VALIDATION: Entry = ("validation loss by seed", "validation")
TRAINING_100: Entry = (f"training loss, last {SONICMOE_LAST} steps", "training_100")
MS: Entry = ("ms a step", "ms", 1)
SAVED: Entry = ("saved, MiB", "saved")
SECONDS: Entry = ("s to the dense model's last loss, by seed", "seconds")
TABLES = {
    "accuracy": Table(
        "training",
        [
            LABEL,
            VALIDATION,
            (f"training loss, last {LAST} steps", "training"),
            ("validation, minus torch's in fp32", "over_reference", 4),
            ("smoothed losses, largest difference from torch's in fp32, %", "from_reference"),
            MS,
            SAVED,
            SECONDS,
        ],
        "Rounding alone parts two programs' losses after some hundred steps; the float64 table compares the first ones.",
        partial(lines, "accuracy"),
    ),
    "capacity": Table(
        "training",
        [
            LABEL,
            VALIDATION,
            ("minus dropless", "over_ours", 4),
            ("largest load / mean, last step", "balance"),
            MS,
            SAVED,
            SECONDS,
        ],
        "Largest load over the mean: of the whole batch, in the last step. Padded to the largest load, Tutel's dynamic "
        "capacity factor: each part of a batch has room for its own largest load; saved is what the first step's first part "
        "saves.",
        partial(lines, "capacity"),
    ),
    "routers": Table(
        "training",
        [
            LABEL,
            TRAINING_100,
            VALIDATION,
            ("minus top-k", "over_ours", 4),
            MS,
            ("printed perplexity: training", "printed.training"),
            ("validation", "printed.validation"),
        ],
        "Printed: SonicMoE's Tables 1a and 6a, of 0.5 B parameters and 40 B tokens; perplexities, ours are nats a byte. "
        "All are validated with top-k.",
        partial(lines, "routers"),
    ),
    "fp8": Table(
        "training",
        [
            LABEL,
            TRAINING_100,
            ("minus bf16, mean of seeds", "training_over_ours", 4),
            ("two seeds apart", "seeds_apart", 4),
            VALIDATION,
            MS,
            SAVED,
        ],
        "The same data and first weights by seed.",
        partial(lines, "fp8"),
    ),
    "float64": Table(
        "training",
        [LABEL, *((f"{said} difference, 10⁻⁶", said, 3) for said in ("mean", "largest"))],
        "Losses of the first 20 training steps, compared with float64's. The first loss is ln 256 for all: their "
        "heads start at zero.",
        partial(lines, "float64"),
    ),
}
GRADIENTS = Table(
    "training",
    [
        ("precision", "precision"),
        ("weight", "weight"),
        ("gradients", "experts", None),
        ("least cosine", "least", 5),
        ("mean", "mean", 5),
    ],
    rows=gradients,
)
PICTURES = {"accuracy": "training.png", "fp8": "fp8_training.png"}


def runs_table(item: str, record: Record) -> str:
    """A line for each run of a question, both seeds in it, below the picture of their losses."""
    made = TABLES[item](record)
    pictured = item in PICTURES and made != NOT_MEASURED
    return f"![losses over steps and seconds]({PICTURES[item]})\n\n{made}" if pictured else made


TRAINING: dict[str, tuple[str, Callable[[Record], str]]] = {
    f"training_{item}": ("training", partial(runs_table, item)) for item in ITEMS
} | {"fp8_gradients": ("training", GRADIENTS)}


# ----------------------------------------------------------------------------------------------------------- sentences


def curves(record: Record) -> str:
    """How far the losses of two runs are apart, part of a sentence."""
    if "losses" not in record:
        return NOT_MEASURED
    steps, difference = len(record["losses"]["hopper"]), number(100 * record["largest_difference"])
    said = f"the smoothed losses of {steps} steps on one {gpus_of([record])} differ by at most {difference} %"
    return noted(said, [record])


def rows_for(record: Record, item: str) -> list[Record]:
    return [row for group in groups(record, item).values() for row in group.values()]


def claim(
    item: str,
    what: str,
    runs: Sequence[str],
    other: str,
    value: Beside,
    digits: int,
    unit: str,
    of: Callable[[list[float]], float],
    record: Record,
) -> str:
    """Part of a sentence: after ``what`` "0.10 % (a), 0.20 % (b, of one seed)", which ``of`` makes of the seeds' values."""
    found = groups(record, item)
    values = {run: beside(found[run], found.get(other, {}), value) for run in runs if run in found}
    said = [
        f"{number(of(each), digits)} {unit} ({RUNS[run].label}{', of one seed' if len(each) == 1 else ''})"
        for run, each in values.items()
        if each
    ]
    shown = [row for run in (*values, other) for row in found.get(run, {}).values()]
    return noted(f"{what} {', '.join(said)}, {condition(shown)}", rows_for(record, item)) if said else NOT_MEASURED


def training_claim(record: Record) -> str:
    """How far validation losses are from torch's in fp32, part of a sentence."""
    what, runs = (
        "validation losses differ from those of plain torch in fp32 by at most",
        ("torch_bf16", OURS, "fused", "block_sparse"),
    )
    said = claim("accuracy", what, runs, REFERENCE, share_of_validation, 2, "%", max, record)
    seeds = [[validation(row) for row in group.values()] for group in groups(record, "accuracy").values()]
    spread = max((100 * (max(each) / min(each) - 1) for each in seeds if len(each) > 1), default=None)
    more = "" if spread is None else f"; two seeds of one program by up to {number(spread)} %"
    return said if said == NOT_MEASURED else said + more


def fp8_training_claim(record: Record) -> str:
    """How far fp8's losses are from bf16's, part of a sentence."""
    found = groups(record, "fp8")
    apart_by = beside(found.get("fp8", {}), found.get(OURS, {}), more_training)
    if not apart_by:
        return NOT_MEASURED
    bf16 = seeds_apart(found[OURS])
    said = f"the mean loss of the last {SONICMOE_LAST} steps is {number(statistics.fmean(apart_by), 4)} nats a byte above bf16's"
    said += "" if bf16 is None else f", whose two seeds are {number(bf16, 4)} apart"
    return noted(f"{said}, {condition(rows_for(record, 'fp8'))}", rows_for(record, "fp8"))


def more_claim(item: str, what: str, runs: Sequence[str]) -> tuple[str, Callable[..., str]]:
    """The difference to the validation loss of ours with top-k, in the mean of the seeds."""
    above = f"with {what} the validation loss, mean of the seeds, is above top-k's (negative: below) by"
    return "training", partial(claim, item, above, runs, OURS, more_validation, 4, "nats a byte", statistics.fmean)


FLOAT64 = "losses of the first steps differ from float64's by at most"
DENSE = "the last training loss of a dense model with as many active parameters is reached in"
LARGEST = partial(millionths, max)
TRAINING_CLAIMS: dict[str, tuple[str, Callable[..., str]]] = {
    "training_claim": ("training", training_claim),
    "float64_claim": (
        "training",
        partial(
            claim, "float64", FLOAT64, ("torch_fp32", "torch_bf16", OURS), "float64", LARGEST, 1, "millionths", max
        ),
    ),
    "dense_claim": (
        "training",
        partial(
            claim,
            "accuracy",
            DENSE,
            (OURS, "block_sparse", "dropping_1.25"),
            BASELINE,
            part_of_seconds,
            2,
            "of that model's time",
            max,
        ),
    ),
    "fp8_training_claim": ("training", fp8_training_claim),
    "capacity_claim": more_claim("capacity", "dropped tokens", ("dropping_1.0", "dropping_1.5", "dropping_2.0")),
    "rounding_claim": more_claim("routers", "other choices", ITEMS["routers"].runs[1:]),
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
    axes[-1].set(xlabel="s")
    axes[0].set(xlabel="step", ylabel="training loss, smoothed, nats a byte", yscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
