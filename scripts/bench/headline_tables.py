"""README's headline, made of the runs of `scripts.bench.headline` by the rule of results/README.md."""

import statistics
from collections.abc import Sequence
from functools import partial

from scripts.bench.common import geometric_mean
from scripts.bench.identity import compared, earlier
from scripts.bench.markdown import (
    OURS,
    Entry,
    Record,
    Rows,
    Sentence,
    Source,
    Table,
    gpus_of,
    least_to_most,
    number,
    plain_shape,
    plainly,
    span,
    value_of,
    values,
    warned,
)
from scripts.bench.models.shapes import T
from scripts.bench.models.tables import ONLY_SIZES, RUNS, share_of_floor
from scripts.bench.models.tables import times_ours as one_run
from scripts.bench.module_tables import EVEN, TIMES_OURS
from scripts.bench.paper.tables import of, ratio

HEADLINE = ("Qwen3-30B-A3B", "DeepSeek-V3", "Mixtral 8x7B", "gpt-oss-120b", "GLM-4.5-Air", "Kimi K2")
MODELS_OF = {"h100": ("Qwen3-30B-A3B", "gpt-oss-120b", "Mixtral 8x7B")}
USERS_CALL = {
    "sonic": "SonicMoE's module",
    "grouped_mm": "transformers' Qwen3-MoE block with `grouped_mm`",
    "torch_grouped": "the same block on torch's `grouped_mm` by hand",
}
PEERS = (*USERS_CALL,)
PACKAGES = ("torch", "sonic-moe", "quack-kernels", "transformers")
SHORT = {"sonic": "SonicMoE", "grouped_mm": "transformers", "torch_grouped": "torch grouped_mm"}
SAID = {"ahead": "faster than", "even": "even, within 2 %, with", "behind": "slower than"}


# ----------------------------------------------------------------------------------------------------- runs of a model


def together(runs: Sequence[Record]) -> Record:
    """The row of a model's runs. programs: each figure's median over the runs that have it.  of: the last run's.

    ValueError where the runs are not of one GPU, one set of kernels and one benchmark.
    """
    if len({(run["of"]["gpu"], *compared(run["of"])) for run in runs}) > 1:
        raise ValueError(
            f"runs: expected one GPU, one set of kernels and one benchmark of {runs[0]['label']}, got others"
        )
    kept = {key: runs[-1][key] for key in ("cfg", "activation", "label", "of")}
    found = {name: [run["programs"][name] for run in runs if name in run["programs"]] for name in (OURS, *PEERS)}
    programs = {name: _medians(figures) for name, figures in found.items() if figures}
    return kept | {"programs": programs, "runs": list(runs)}


def _medians(figures: Sequence[Record]) -> Record:
    names = [name for name in figures[0] if name.endswith(("_ms", "_MiB")) and not name.endswith("_rounds_ms")]
    return {name: round(statistics.median(each[name] for each in figures), 4) for name in names}


def ratios(row: Record, peer: str) -> list[float]:
    """A program's time over ours in each run that has both, forward and backward."""
    return values(row["runs"], ratio(peer, OURS, "fwdbwd_ms"))


def times_ours(row: Record, peer: str) -> float | None:
    """The median of the runs' ratios; None with fewer than RUNS."""
    found = ratios(row, peer)
    return statistics.median(found) if len(found) >= RUNS else None


def verdict(ratio: float) -> str:
    """A key of SAID."""
    return "even" if abs(ratio - 1) <= EVEN else "ahead" if ratio > 1 else "behind"


def has_runs(row: Record) -> bool:
    """Whether the rule's number of runs is there, so that ratios of the row may stand in a table."""
    return len(row["runs"]) >= RUNS


# -------------------------------------------------------------------------------------------------------------- tables


def with_span(peer: str, wider_than: float, row: Record) -> str:
    """The median of the runs' ratios, and their range where it is wider than that share of it."""
    middle, found = times_ours(row, peer), ratios(row, peer)
    wide = middle is not None and max(found) / min(found) - 1 > wider_than
    return f"{number(middle)} {span(found)}" if wide else number(middle)


def with_runs(source: Source, row: Record) -> float | None:
    found: float | None = value_of(row, source) if has_runs(row) else None
    return found


def entries(wider_than: float) -> list[Entry]:
    """The models, our time, and its ratios; ranges where they are wider than that share."""
    return [
        ("a layer of", "label"),
        ("blazeproto, ms", of(OURS, "fwdbwd_ms")),
        *((f"{short} / ours", partial(with_span, peer, wider_than)) for peer, short in SHORT.items()),
        ("floor / ours", partial(with_runs, share_of_floor)),
        ("peak, ours / SonicMoE", partial(with_runs, ratio(OURS, "sonic", "peak_MiB"))),
    ]


def tokens_of(rows: Rows) -> str:
    return ", ".join([f"{T} tokens", *(f"{row['label']}: {row['cfg']['T']}" for row in rows if row["cfg"]["T"] != T)])


def tokens_and_runs(rows: Rows) -> str:
    """The tokens and runs of a table, and which models have fewer runs than the rule asks for."""
    counts = sorted({len(row["runs"]) for row in rows if has_runs(row)})
    medians = f"; medians of {' or '.join(map(str, counts))} runs" if counts else ""
    said = f"Kernel time in bf16, forward + backward of {tokens_of(rows)}{medians}."
    fewer = ", ".join(f"{row['label']} ({len(row['runs'])})" for row in rows if not has_runs(row))
    return f"{said} Fewer runs than the rule's {RUNS}, so no ratio: {fewer}." if fewer else said


def headline_note(rows: Rows) -> str:
    apart = ", ".join(row["label"] for row in rows if any("versions" in run for run in row["runs"]))
    said = [
        tokens_and_runs(rows),
        "A run is a process of its own; in brackets the range of the runs' ratios.",
        f"{apart}: each program has a process of its own in a run, so that programs do not take turns."
        if apart
        else "",
        ONLY_SIZES,
        f"transformers: {USERS_CALL['grouped_mm']}; torch grouped_mm: {USERS_CALL['torch_grouped']}.",
    ]
    return " ".join(filter(None, said))


def readme_note(rows: Rows) -> str:
    """In short."""
    programs = "transformers: its Qwen3-MoE block with `grouped_mm`; torch grouped_mm: the same on torch's own call."
    return f"{tokens_and_runs(rows)} In brackets: ranges of runs wider than {100 * EVEN:.0f} %. {ONLY_SIZES} {programs}"


TABLES = {
    "readme": Table("headline", entries(EVEN), readme_note, packages=PACKAGES),
    "headline": Table(
        "headline", [*entries(0.0), ("runs", lambda row: len(row["runs"]), None)], headline_note, packages=PACKAGES
    ),
}


# ----------------------------------------------------------------------------------------------------------- sentences


def headline_claim(rows: Rows) -> str:
    """On how many models ours is faster, even and slower; sentences of one mode and one GPU."""
    said = []
    for peer, call in USERS_CALL.items():
        found = {row["label"]: times for row in rows if (times := times_ours(row, peer)) is not None}
        if len(found) > 1:
            said.append(f"It is {counted(found, call)}: {mean_of([*found.values()])}.")
        elif found:
            ((row, times),) = [(row, found[row["label"]]) for row in rows if row["label"] in found]
            of_runs = f"{number(times)} times as fast {span(ratios(row, peer))}, the median and range of {len(row['runs'])} runs"
            said.append(f"It is {SAID[verdict(times)]} {call} on {row['label']}: {of_runs}.")
    if not said:
        return f"No model has {RUNS} runs yet: no sentence, and no ratio below."
    whole = "A whole MoE layer of ours, router and auxiliary loss included, forward + backward in bf16 of"
    return " ".join([f"{whole} {tokens_of(rows)}, on one {gpus_of(rows)}.", *said])


def counted(found: dict[str, float], call: str) -> str:
    """ "faster than CALL on 4 of 6 models, even, within 2 %, on A, slower on B"."""
    of_kind = {kind: [label for label, times in found.items() if verdict(times) == kind] for kind in SAID}
    ahead = of_kind.pop("ahead")
    others = [f"{SAID[kind].rpartition(' ')[0]} on {', '.join(labels)}" for kind, labels in of_kind.items() if labels]
    return ", ".join([f"{SAID['ahead']} {call} on {len(ahead)} of {len(found)} models", *others])


def mean_of(medians: Sequence[float]) -> str:
    mean = number(geometric_mean(medians))
    return f"{mean} times as fast in the geometric mean (medians of models: {least_to_most(medians)})"


def beside_headline(source: Source, record: Record, headline: Record) -> Rows:
    """SonicMoE's time over ours in a file of one run each, by today's kernels, and in the headline; the sizes that both have."""
    sizes = {*map(plain_shape, headline["rows"])}
    rows = [row for row in record["rows"] if plain_shape(row) in sizes and not earlier(row)]
    here = {plain_shape(row): value_of(row, source) for row in rows}
    run = {
        "days": sorted({row["of"]["measured"].split(" ")[0] for row in rows}),
        "gpus": gpus_of(rows),
    }
    found = [
        run
        | {
            "label": row["label"],
            "cfg": row["cfg"],
            "here": here.get(plain_shape(row)),
            "there": times_ours(row, "sonic"),
        }
        for row in headline["rows"]
    ]
    return [row for row in found if row["here"] is not None and row["there"] is not None]


def single_runs(rows: Rows) -> str:
    """How far ratios of one run each are from the headline's; a sentence."""
    far = max(rows, key=lambda row: abs(row["here"] - row["there"]))
    return (
        f"Single runs of {' and '.join(far['days'])} on one {far['gpus']}, not the headline's: SonicMoE's time over ours, "
        f"forward + backward, is up to {number(abs(far['here'] - far['there']))} away from the headline's on the {len(rows)} "
        f"models that both have ({far['label']}, T = {far['cfg']['T']}: {number(far['here'])} in the single run, "
        f"{number(far['there'])} in the headline)."
    )


CLAIM = Sentence("headline", headline_claim, note=warned)
SENTENCES = {
    "headline_claim": CLAIM,
    "module_single_runs": Sentence("module headline", single_runs, partial(beside_headline, TIMES_OURS), note=plainly),
    "models_single_runs": Sentence(
        "models/layers headline", single_runs, partial(beside_headline, one_run("sonic")), note=plainly
    ),
}
