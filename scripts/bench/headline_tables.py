"""README's headline, made of the runs of `scripts.bench.headline` by the rule of results/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter

from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, OURS, Column, Record, caveat, number, origin, table
from scripts.bench.models.shapes import T
from scripts.bench.models.tables import ONLY_SIZES, RUNS, of_floor
from scripts.bench.module_tables import EVEN, span
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
VERDICTS = ("ahead", "even", "behind")


def together(runs: Sequence[Record]) -> Record:
    """The row of a model's runs. programs: each figure's median over the runs that have it.  of: the last run's.

    ValueError where the runs are not of one GPU, one set of kernels and one benchmark.
    """
    for key in ("gpu", "kernels", "protocol_identity"):
        if len({str(run["of"][key]) for run in runs}) > 1:
            raise ValueError(f"runs: expected the same {key} in all runs of {runs[0]['label']}, got others")
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
    """The median of the runs' ratios; None where there are fewer than RUNS."""
    found = ratios(row, peer)
    return statistics.median(found) if len(found) >= RUNS else None


def verdict(ratio: float) -> str:
    """One of VERDICTS."""
    return "even" if abs(ratio - 1) <= EVEN else "ahead" if ratio > 1 else "behind"


def with_span(peer: str) -> Callable[[Record], str]:
    """The median of the runs' ratios, and their range."""

    def cell(row: Record) -> str:
        found = times_ours(row, peer)
        return number(None) if found is None else f"{number(found)} {span(ratios(row, peer))}"

    return cell


def peak_ratio(row: Record) -> float | None:
    """Our peak over SonicMoE's."""
    theirs = row["programs"].get("sonic")
    return theirs and row["programs"][OURS]["peak_MiB"] / theirs["peak_MiB"]


def headline_table(record: Record) -> str:
    rows = record["rows"]
    columns: list[Column] = [("a layer of", itemgetter("label")), ("blazeproto, ms", of(OURS, f"{PART}_ms"))]
    columns += [("SonicMoE / ours", with_span("sonic")), ("transformers / ours", with_span("grouped_mm"))]
    columns += [("torch grouped_mm / ours", with_span("torch_grouped")), ("floor / ours", of_floor)]
    columns += [
        ("peak, ours / SonicMoE", lambda row: number(peak_ratio(row))),
        ("runs", lambda row: str(len(row["runs"]))),
    ]
    few = [f"{row['label']}: {row['cfg']['T']}" for row in rows if row["cfg"]["T"] != T]
    counts = sorted({len(row["runs"]) for row in rows})
    what = (
        f"the median of {' or '.join(map(str, counts))} runs, each a process of its own, and in brackets their range."
    )
    if max(counts, default=0) < RUNS:
        what = f"{max(counts, default=0)} run of each model, where the rule asks for {RUNS}, so that no ratio of times is shown."
    note = (
        f"Kernel time in bf16, forward + backward of {', '.join([f'{T} tokens', *few])}: {what} {ONLY_SIZES} "
        f"transformers: {USERS_CALL['grouped_mm']}; torch grouped_mm: {USERS_CALL['torch_grouped']}."
    )
    return f"{table(rows, columns)}\n\n{note} {origin(rows, *PACKAGES)}".rstrip()


def headline_claim(record: Record) -> str:
    """On how many models ours is faster, even and slower; sentences of one mode and one GPU."""
    said = []
    for peer in PEERS:
        found = {row["label"]: ratio for row in record["rows"] if (ratio := times_ours(row, peer)) is not None}
        if not found:
            continue
        of_kind = {kind: [label for label, each in found.items() if verdict(each) == kind] for kind in VERDICTS}
        parts = [f"faster on {len(of_kind['ahead'])} of {len(found)} models"]
        parts += [f"even, within 2 %, on {', '.join(of_kind['even'])}"] * bool(of_kind["even"])
        parts += [f"slower on {', '.join(of_kind['behind'])}"] * bool(of_kind["behind"])
        mean = f"{number(geometric_mean([*found.values()]))} times as fast in the geometric mean"
        said.append(f"Than {USERS_CALL[peer]} it is {', '.join(parts)}: {mean} {span([*found.values()])}.")
    if not said:
        return f"No model has {RUNS} runs yet: no sentence, and no ratio below." if record["rows"] else NOT_MEASURED
    gpus = ", ".join(sorted({row["of"]["gpu"].split(",")[0] for row in record["rows"]}))
    first = f"A whole MoE layer of ours, forward + backward in bf16, router and auxiliary loss included, on one {gpus}."
    note = caveat(record["rows"])
    return " ".join([first, *said, *([f"**({note[0].upper()}{note[1:]}.)**"] if note else [])])


TABLES = {"headline": ("headline", headline_table), "headline_h100": ("../h100/headline", headline_table)}
SENTENCES = {
    "headline_claim": ("headline", headline_claim),
    "headline_claim_h100": ("../h100/headline", headline_claim),
}
