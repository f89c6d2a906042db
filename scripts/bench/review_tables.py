"""The sentences of docs/review.md, which answers the review of MoEBlaze."""

from functools import partial

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import Rows, Sentence, having, least_to_most, number, plainly, span, values
from scripts.bench.module_tables import sizes_of
from scripts.bench.paper.tables import FIELDS, POLICIES, activations_of, longer, predicted_longer, ratio

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
        f"MegaBlocks takes {number(geometric_mean(time))} times our time {span(time)} and {number(geometric_mean(kept))} times "
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
    return f"of the bytes that MegaBlocks keeps beyond ours (measured), intermediates (by formula) make up {said}"


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
        f'On the {len(rows)} shapes of whole layers "recompute" keeps {recompute} of what "minimal" keeps, "paper" {paper}. '
        f'A layer with "recompute" is predicted to take {h200} longer on the H200, by data sheet {h100} on an H100 and {b200} '
        "on a B200"
    )


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
    return f"on {len(rows)} layers, before a step over after it (below 1: the step costs): {'; '.join(said)}"


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
    "skew_claim": Sentence("layer", skew_claim, "skew"),
    "dispatch_claim": Sentence("dispatch", dispatch_claim),
    "megablocks_claim": Sentence("blocksparse", megablocks_claim, having("megablocks_saved_MiB")),
    "memory_split": Sentence("blocksparse", memory_split, having("megablocks_saved_MiB")),
    "recompute_claim": Sentence("module", recompute_claim, note=plainly),
    "waterfall_claim": Sentence("paper/waterfall", waterfall_claim, having("programs.plain", "programs.minimal")),
    "policies_claim": Sentence(
        "paper/policies", policies_claim, having(*(f"programs.{policy}" for policy in POLICIES))
    ),
    "activations_claim": Sentence("paper/activations", activations_claim, activations_of),
}
