"""README's headline, made of the runs of `scripts.bench.headline` by the rule of results/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from scripts.bench.common import geometric_mean
from scripts.bench.identity import compared
from scripts.bench.markdown import NOT_MEASURED, OURS, Column, Record, caveat, number, origin, shape_of, table
from scripts.bench.models.shapes import T
from scripts.bench.models.tables import ONLY_SIZES, RUNS, share_of_floor
from scripts.bench.models.tables import times_ours as one_run
from scripts.bench.module_tables import EVEN, span
from scripts.bench.module_tables import ratio as module_ratio
from scripts.bench.paper.cells import of

HEADLINE = ("Qwen3-30B-A3B", "DeepSeek-V3", "Mixtral 8x7B", "gpt-oss-120b", "GLM-4.5-Air", "Kimi K2")
MODELS_OF = {"h100": ("Qwen3-30B-A3B", "gpt-oss-120b", "Mixtral 8x7B")}
PEERS = ("sonic", "grouped_mm", "torch_grouped")
USERS_CALL = {
    "sonic": "SonicMoE's module",
    "grouped_mm": "transformers' Qwen3-MoE block with `grouped_mm`",
    "torch_grouped": "the same block on torch's `grouped_mm` by hand",
}
PACKAGES = ("torch", "sonic-moe", "quack-kernels", "transformers")
PART = "fwdbwd"
SHORT = {"sonic": "SonicMoE", "grouped_mm": "transformers", "torch_grouped": "torch grouped_mm"}
SAID = {"ahead": "faster", "even": "even, within 2 %,", "behind": "slower"}
VERDICTS = (*SAID,)


def together(runs: Sequence[Record]) -> Record:
    """The row of a model's runs. programs: each figure's median over the runs that have it.  of: the last run's.

    ValueError where the runs are not of one GPU, one set of kernels and one benchmark.
    """
    if len({(run["of"]["gpu"], *compared(run["of"])) for run in runs}) > 1:
        raise ValueError(
            f"runs: expected one GPU, one set of kernels and one benchmark of {runs[0]['label']}, got others"
        )
    kept = {key: runs[-1][key] for key in ("cfg", "activation", "label", "of")}
    names = [name for name in (OURS, *PEERS) if any(name in run["programs"] for run in runs)]
    programs = {name: _medians([run["programs"][name] for run in runs if name in run["programs"]]) for name in names}
    return kept | {"programs": programs, "runs": list(runs)}


def _medians(figures: Sequence[Record]) -> Record:
    names = [name for name in figures[0] if name.endswith(("_ms", "_MiB")) and not name.endswith("_rounds_ms")]
    return {name: round(statistics.median(each[name] for each in figures), 4) for name in names}


def ratios(row: Record, peer: str) -> list[float]:
    """A program's time over ours in each run that has both, forward and backward."""
    programs = [run["programs"] for run in row["runs"] if peer in run["programs"]]
    return [each[peer][f"{PART}_ms"] / each[OURS][f"{PART}_ms"] for each in programs]


def times_ours(row: Record, peer: str) -> float | None:
    """The median of the runs' ratios; None with fewer than RUNS."""
    found = ratios(row, peer)
    return statistics.median(found) if len(found) >= RUNS else None


def verdict(ratio: float) -> str:
    """One of VERDICTS."""
    return "even" if abs(ratio - 1) <= EVEN else "ahead" if ratio > 1 else "behind"


def with_span(peer: str, wider_than: float, row: Record) -> str:
    """The median of the runs' ratios, and their range where it is wider than that share of it."""
    middle, found = times_ours(row, peer), ratios(row, peer)
    if middle is None:
        return number(None)
    return f"{number(middle)} {span(found)}" if max(found) / min(found) - 1 > wider_than else number(middle)


def peak_ratio(row: Record) -> float | None:
    """Our peak over SonicMoE's."""
    theirs = row["programs"].get("sonic")
    return theirs and row["programs"][OURS]["peak_MiB"] / theirs["peak_MiB"]


def has_runs(row: Record) -> bool:
    """Whether the rule's number of runs is there, so that ratios of the row may stand in a table."""
    return len(row["runs"]) >= RUNS


def ratio_columns(wider_than: float) -> list[Column]:
    """The models, our time, and its ratios; ranges where they are wider than that share."""
    columns: list[Column] = [("a layer of", itemgetter("label")), ("blazeproto, ms", of(OURS, f"{PART}_ms"))]
    columns += [(f"{short} / ours", partial(with_span, peer, wider_than)) for peer, short in SHORT.items()]
    columns += [("floor / ours", lambda row: number(share_of_floor(row) if has_runs(row) else None))]
    return [*columns, ("peak, ours / SonicMoE", lambda row: number(peak_ratio(row) if has_runs(row) else None))]


def caption(rows: Sequence[Record]) -> str:
    """The tokens and runs of a table, and which models have fewer runs than the rule asks for."""
    few = [f"{row['label']}: {row['cfg']['T']}" for row in rows if row["cfg"]["T"] != T]
    counts = sorted({len(row["runs"]) for row in rows if has_runs(row)})
    said = f"Kernel time in bf16, forward + backward of {', '.join([f'{T} tokens', *few])}"
    said += f"; medians of {' or '.join(map(str, counts))} runs" if counts else ""
    fewer = ", ".join(f"{row['label']} ({len(row['runs'])})" for row in rows if not has_runs(row))
    return f"{said}. Fewer runs than the rule's {RUNS}, so no ratio: {fewer}." if fewer else f"{said}."


def headline_table(record: Record) -> str:
    rows = record["rows"]
    columns = [*ratio_columns(0.0), ("runs", lambda row: str(len(row["runs"])))]
    apart = [row["label"] for row in rows if any("versions" in run for run in row["runs"])]  # of a process each
    said = [caption(rows), "A run is a process of its own; in brackets the range of the runs' ratios."]
    said += [
        f"{', '.join(apart)}: each program has a process of its own in a run, so that programs do not take turns."
    ] * bool(apart)
    said += [ONLY_SIZES, f"transformers: {USERS_CALL['grouped_mm']}; torch grouped_mm: {USERS_CALL['torch_grouped']}."]
    return f"{table(rows, columns)}\n\n{' '.join(said)} {origin(rows, *PACKAGES)}".rstrip()


def readme(record: Record) -> str:
    """The headline in short."""
    rows = record["rows"]
    said = [caption(rows), f"In brackets: ranges of runs wider than {100 * EVEN:.0f} %.", ONLY_SIZES]
    said += ["transformers: its Qwen3-MoE block with `grouped_mm`; torch grouped_mm: the same on torch's own call."]
    return f"{table(rows, ratio_columns(EVEN))}\n\n{' '.join(said)} {origin(rows, *PACKAGES)}".rstrip()


def headline_claim(record: Record) -> str:
    """On how many models ours is faster, even and slower; sentences of one mode and one GPU."""
    said = []
    for peer in PEERS:
        found = {row["label"]: (ratio, row) for row in record["rows"] if (ratio := times_ours(row, peer)) is not None}
        medians = [ratio for ratio, _ in found.values()]
        if len(found) > 1:
            said.append(f"Than {USERS_CALL[peer]} it is {counted(found)}: {mean_of(medians)}.")
        for label, (ratio, row) in found.items() if len(found) == 1 else ():
            of_runs = f"{number(ratio)} times as fast {span(ratios(row, peer))}, the median and range of {len(row['runs'])} runs"
            said.append(f"Than {USERS_CALL[peer]} it is {SAID[verdict(ratio)]} on {label}: {of_runs}.")
    if not said:
        return f"No model has {RUNS} runs yet: no sentence, and no ratio below." if record["rows"] else NOT_MEASURED
    gpus = ", ".join(sorted({row["of"]["gpu"].split(",")[0] for row in record["rows"]}))
    first = f"A whole MoE layer of ours, forward + backward in bf16, router and auxiliary loss included, on one {gpus}."
    note = caveat(record["rows"])
    return " ".join([first, *said, *([f"**({note[0].upper()}{note[1:]}.)**"] if note else [])])


def counted(found: dict[str, tuple[float, Record]]) -> str:
    """ "faster on 4 of 6 models, even, within 2 %, on A, slower on B"."""
    of_kind = {kind: [label for label, (each, _) in found.items() if verdict(each) == kind] for kind in VERDICTS}
    parts = [f"{SAID['ahead']} on {len(of_kind['ahead'])} of {len(found)} models"]
    return ", ".join(parts + [f"{SAID[kind]} on {', '.join(of_kind[kind])}" for kind in VERDICTS[1:] if of_kind[kind]])


def mean_of(medians: Sequence[float]) -> str:
    low, high = number(min(medians)), number(max(medians))
    return f"{number(geometric_mean(medians))} times as fast in the geometric mean (medians of models: {low} to {high})"


def single_runs(ratio: Callable[[Record], float | None], record: Record, headline: Record) -> str:
    """How far a file's ratios of one run each are from the headline's, by the sizes that both have; a sentence."""
    here = {tuple(shape_of(row)): each for row in record["rows"] if (each := ratio(row)) is not None}
    both = {
        row["label"]: (here[shape], there)
        for row in headline["rows"]
        if (shape := tuple(shape_of(row))) in here and (there := times_ours(row, "sonic")) is not None
    }
    if not both:
        return NOT_MEASURED
    days = sorted({row["of"]["measured"].split(" ")[0] for row in record["rows"]})
    label, pair = max(both.items(), key=lambda each: abs(each[1][0] - each[1][1]))
    return (
        f"Single runs of {' and '.join(days)}, not the headline's: SonicMoE's time over ours, forward + backward, is up to "
        f"{number(abs(pair[0] - pair[1]))} away from the headline's on the {len(both)} models that both have "
        f"({label}: {number(pair[0])} here, {number(pair[1])} there)."
    )


TABLES = {"readme": ("headline", readme), "headline": ("headline", headline_table)}
TABLES |= {"headline_h100": ("../h100/headline", headline_table)}
SENTENCES: dict[str, tuple[str, Callable[..., str]]] = {
    "headline_claim": ("headline", headline_claim),
    "headline_claim_h100": ("../h100/headline", headline_claim),
    "module_single_runs": ("module headline", partial(single_runs, module_ratio)),
    "models_single_runs": ("models/layers headline", partial(single_runs, partial(one_run, "sonic"))),
}
