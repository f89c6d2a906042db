"""The sentences of docs/review.md, which answers the review of MoEBlaze."""

from __future__ import annotations

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import Rows, least_to_most, number, span, values
from scripts.bench.module_tables import sizes_of
from scripts.bench.render import Sentence, having, plainly

KINDS = ("zipf", "half_on_one")  # of skewed routings
HALVES = {"gelu": 1, "swiglu": 2}
SHEET = "H100, data sheet"


def percents(shares: list[float]) -> str:
    """Shares as "68 to 88 %"."""
    return f"{least_to_most([100 * share for share in shares], 0)} %"


def skew_claim(rows: Rows) -> str:
    """How much longer a layer takes with a skewed routing, part of a sentence."""
    ratios = [row[kind]["fwdbwd_to_uniform"] for row in rows for kind in KINDS]
    return f"{least_to_most(ratios)} times what they take on a uniform one"


def dispatch_claim(rows: Rows) -> str:
    """The builders' time over a radix sort's, and the part of the map of all tokens and experts that is in memory; sentences."""
    tiled, dense = (least_to_most(values(rows, f"sort_ms / {name}_ms"), 1) for name in ("tiled", "dense"))
    most = number(100 * max(row["tiled_workspace_share"] for row in rows), 1)
    return (
        f"a radix sort (CuPy's) takes {tiled} times the time of the tiled builder on the models of MoEBlaze's Table 3 and two "
        f"more, and {dense} times that of the paper's three steps with the map in memory. The tiled builder's workspace is at "
        f"most {most} % of that map"
    )


def megablocks_claim(rows: Rows) -> str:
    """MegaBlocks' time and saved bytes over ours, part of a sentence."""
    time, kept = (values(rows, f"megablocks_{field} / moe_{field}") for field in ("fwdbwd_sum_ms", "saved_MiB"))
    return (
        f"MegaBlocks takes {number(geometric_mean(time))} times the time {span(time)} and {number(geometric_mean(kept))} times "
        f"the bytes for backward {span(kept)}, geometric means of {len(rows)} layers"
    )


def memory_split(rows: Rows) -> str:
    """The activation's intermediates as a share of what MegaBlocks keeps beyond ours, by count; a sentence."""
    shares: dict[str, list[float]] = {activation: [] for activation in HALVES}
    for row in rows:
        intermediates = HALVES[row["activation"]] * cost.intermediate_bytes(sizes_of(row).rows, sizes_of(row).n)
        beyond = row["megablocks_saved_MiB"] - row["moe_saved_MiB"]
        shares[row["activation"]].append(intermediates / 2**20 / beyond)
    said = ", ".join(f"{percents(found)} with {activation}" for activation, found in shares.items() if found)
    return f"of the bytes that MegaBlocks keeps beyond ours (measured), the intermediates' (by formula) are {said}"


def longer_by(sizes: Sizes, gpu: str) -> float:
    """The predicted cost of "recompute", as a share of a forward + backward."""
    minimal, recompute = (sum(cost.predicted_layer_ms(sizes, save, gpu)) for save in ("minimal", "recompute"))
    return recompute / minimal - 1


def recompute_claim(rows: Rows) -> str:
    """The bytes that the policies keep, and the predicted cost of "recompute"; sentences."""
    sizes = [sizes_of(row) for row in rows]
    paper, recompute = (
        percents([cost.saved_bytes(each, policy) / cost.saved_bytes(each) for each in sizes])
        for policy in ("paper", "recompute")
    )
    h200, h100, b200 = (percents([longer_by(each, gpu) for each in sizes]) for gpu in ("H200", SHEET, "B200"))
    return (
        f'"recompute" keeps {recompute} of what "minimal" keeps, "paper" {paper}. A layer with "recompute" is predicted to take '
        f"{h200} longer on the H200, by data sheet {h100} on an H100 and {b200} on a B200"
    )


SENTENCES = {
    "skew_claim": Sentence("layer", skew_claim, "skew"),
    "dispatch_claim": Sentence("dispatch", dispatch_claim),
    "megablocks_claim": Sentence("blocksparse", megablocks_claim, having("megablocks_saved_MiB")),
    "memory_split": Sentence("blocksparse", memory_split, having("megablocks_saved_MiB")),
    "recompute_claim": Sentence("module", recompute_claim, note=plainly),
}
