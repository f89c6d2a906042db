"""The sentences of docs/review.md, which answers the review of MoEBlaze."""

from __future__ import annotations

from collections.abc import Callable

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.blocksparse_tables import rows_of
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, Record, caveat, number
from scripts.bench.module_tables import sizes_of, span

KINDS = ("zipf", "half_on_one")  # of skewed routings
HALVES = {"gelu": 1, "swiglu": 2}


def noted(said: str, rows: list[Record]) -> str:
    """A sentence, with the ``rows`` that earlier kernels made."""
    return f"{said} ({note})" if (note := caveat(rows)) else said


def percents(values: list[float]) -> str:
    """Shares as "68 to 88 %"."""
    return f"{number(100 * min(values), 0)} to {number(100 * max(values), 0)} %"


def times(values: list[float]) -> str:
    return f"{number(min(values), 1)} to {number(max(values), 1)} times"


def skew_claim(record: Record) -> str:
    """How much longer a layer takes with a skewed routing, part of a sentence."""
    if not (rows := record.get("skew")):
        return NOT_MEASURED
    ratios = [row[kind]["fwdbwd_to_uniform"] for row in rows for kind in KINDS]
    return noted(f"{number(min(ratios))} to {number(max(ratios))} times what they take on a uniform one", rows)


def dispatch_claim(record: Record) -> str:
    """The builders' time over a radix sort's, and the part of the map of all tokens and experts that is in memory; sentences."""
    if not (rows := record["rows"]):
        return NOT_MEASURED
    tiled, dense = ([row["sort_ms"] / row[f"{name}_ms"] for row in rows] for name in ("tiled", "dense"))
    most = number(100 * max(row["tiled_workspace_share"] for row in rows), 1)
    said = (
        f"a radix sort (CuPy's) takes {times(tiled)} the time of the tiled builder on the models of MoEBlaze's Table 3 and two "
        f"more, and {times(dense)} that of the paper's three steps with the map in memory. The tiled builder's workspace is at "
        f"most {most} % of that map"
    )
    return noted(said, rows)


def megablocks_claim(record: Record) -> str:
    """MegaBlocks' time and saved bytes over ours, part of a sentence."""
    rows = [row for row in rows_of(record, "layers") if "megablocks_saved_MiB" in row]
    if not rows:
        return NOT_MEASURED
    said = []
    for field, what in (("fwdbwd_sum_ms", "the time"), ("saved_MiB", "the bytes for backward")):
        found = [row[f"megablocks_{field}"] / row[f"moe_{field}"] for row in rows]
        said.append(f"{number(geometric_mean(found))} times {what} {span(found)}")
    return noted(f"MegaBlocks takes {' and '.join(said)}, geometric means of {len(rows)} layers", rows)


def memory_split(record: Record) -> str:
    """The activation's intermediates as a share of what MegaBlocks keeps beyond ours, by count; a sentence."""
    rows = [row for row in rows_of(record, "layers") if "megablocks_saved_MiB" in row]
    if not rows:
        return NOT_MEASURED
    said = []
    for activation, halves in HALVES.items():
        shares = [
            halves * cost.intermediate_bytes(sizes_of(row).rows, sizes_of(row).n)
            / (2**20 * (row["megablocks_saved_MiB"] - row["moe_saved_MiB"]))
            for row in rows
            if row["activation"] == activation
        ]  # fmt: skip
        if shares:
            said.append(f"{percents(shares)} with {activation}")
    return noted(
        f"of the bytes that MegaBlocks keeps beyond ours (measured), the intermediates' (by formula) are {', '.join(said)}",
        rows,
    )


SHEET = "H100, data sheet"


def longer_by(sizes: Sizes, gpu: str) -> float:
    """The predicted cost of "recompute", as a share of a forward + backward."""
    minimal, recompute = (sum(cost.predicted_layer_ms(sizes, save, gpu)) for save in ("minimal", "recompute"))
    return recompute / minimal - 1


def recompute_claim(record: Record) -> str:
    """The bytes that the policies keep, and the predicted cost of "recompute"; sentences."""
    if not (rows := record["rows"]):
        return NOT_MEASURED
    sizes = [sizes_of(row) for row in rows]
    kept = {
        policy: [cost.saved_bytes(each, policy) / cost.saved_bytes(each) for each in sizes]
        for policy in ("paper", "recompute")
    }
    longer = {gpu: percents([longer_by(each, gpu) for each in sizes]) for gpu in ("H200", SHEET, "B200")}
    return (
        f'"recompute" keeps {percents(kept["recompute"])} of what "minimal" keeps, "paper" {percents(kept["paper"])}. A layer '
        f'with "recompute" is predicted to take {longer["H200"]} longer on the H200, by data sheet {longer[SHEET]} on an H100 '
        f"and {longer['B200']} on a B200"
    )


REVIEW: dict[str, tuple[str, Callable[..., str]]] = {
    "skew_claim": ("layer", skew_claim),
    "dispatch_claim": ("dispatch", dispatch_claim),
    "megablocks_claim": ("blocksparse", megablocks_claim),
    "memory_split": ("blocksparse", memory_split),
    "recompute_claim": ("module", recompute_claim),
}
"""Name of a sentence: its results file, and what makes it of that."""
