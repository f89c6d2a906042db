"""The tables and measured sentences of README and docs/*.md, made from results/. `plot_results.py` puts them there.

A page marks each place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced: by a table, which
stands between empty lines, or by a sentence, which stands in its paragraph. If the results are missing, the text stays.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from scripts.bench import fp8_tables, headline_tables, tables
from scripts.bench.blocksparse_tables import block_layers_table, block_products_claim, block_products_table
from scripts.bench.common import read_json
from scripts.bench.cost_tables import predicted_claim, predicted_table
from scripts.bench.distributed_tables import exchange_share
from scripts.bench.markdown import (
    LABELS,
    NOT_MEASURED,
    OURS,
    Column,
    Record,
    caveat,
    figure,
    number,
    origin,
    plain_shape,
    shape_of,
    table,
)
from scripts.bench.models import tables as models
from scripts.bench.module_tables import (
    EVEN,
    is_tiny,
    module_claim,
    module_details,
    module_table,
    router_accuracy,
    span,
)
from scripts.bench.paper.steps_tables import CLAIMS
from scripts.bench.paper.tables import TABLES as PAPER_TABLES
from scripts.bench.rank_memory import rank_memory_table
from scripts.bench.review_tables import REVIEW
from scripts.bench.training_tables import TRAINING, TRAINING_CLAIMS, curves


def load(name: str, results: Path) -> Record | None:
    """A file's record; for "A|B" the first file's that exists. Figures that no H200 has measured are an H100's."""
    folders = (results, results.parent / "h100")
    paths = (folder / f"{each}.json" for each in name.split("|") for folder in folders)
    return next((read_json(path) for path in paths if path.exists()), None)


PEERS = ("torch", "sonic-moe", "quack-kernels")  # whose versions stand under tables of layers
HOST_FIGURES = {
    "host_fwdbwd_without_dispatch_ms": "with autograd's thread",
    "host_fwdbwd_single_thread_ms": "in one thread",
    "host_fwdbwd_kernels_ms": "its kernels alone, allocated for and launched",
}


def backward_ms(figures: Record) -> float:
    return float(figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])


def layer_peers(record: Record) -> list[str]:
    """The peers in a record other than ours, in the order of LABELS."""
    return [name for name in LABELS if name != OURS and any(name in row["peers"] for row in record["rows"])]


def of_peers(names: Sequence[str], first: str, value: Callable[[Record], float], digits: int = 2) -> list[Column]:
    """A column a program, with what ``value`` makes of its figures; ours is ``first`` said in full."""

    def column(name: str) -> Column:
        head = f"{first}: ours" if name == OURS else LABELS[name]
        return head, lambda row: number(value(row["peers"][name]) if name in row["peers"] else None, digits)

    return [column(name) for name in names]


def over_ours(field: str) -> Callable[[Record], str]:
    """SonicMoE's figure over ours."""

    def cell(row: Record) -> str:
        peers = row["peers"]
        return number(peers["sonic"][field] / peers[OURS][field] if "sonic" in peers else None)

    return cell


def layer_table(record: Record) -> str:
    """Time by shape: ours and the peers, forward and backward, with the ratio to SonicMoE and to the floor."""
    others = layer_peers(record)
    of_forward, *forwards = of_peers([OURS, *others], "forward ms", itemgetter("gpu_fwd_ms"))
    of_backward, *backwards = of_peers([OURS, *others], "backward ms", backward_ms)
    columns: list[Column] = [("T, d, n, E, K", plain_shape), of_forward, *forwards, ("floor", figure("floor_fwd_ms"))]
    columns += [of_backward, *backwards, ("floor", figure("floor_bwd_ms"))]
    columns += [("SonicMoE / ours: fwd", over_ours("gpu_fwd_ms")), ("fwd + bwd", over_ours("gpu_fwdbwd_ms"))]
    means = []
    for name in others:
        pairs = [(row["peers"][name], row["peers"][OURS]) for row in record["rows"] if name in row["peers"]]
        forward = statistics.geometric_mean([peer["gpu_fwd_ms"] / ours["gpu_fwd_ms"] for peer, ours in pairs])
        backward = statistics.geometric_mean([backward_ms(peer) / backward_ms(ours) for peer, ours in pairs])
        means.append(f"{LABELS[name]} {number(forward)}× forward, {number(backward)}× backward ({len(pairs)} shapes)")
    note = f"GPU time, ms. Times of ours, geometric means: {'; '.join(means)}. {origin(record['rows'], *PEERS)}"
    return f"{table(record['rows'], columns)}\n\n{note}"


def layer_claim(record: Record) -> str:
    """On how many shapes the experts are faster than SonicMoE's, one tiny layer apart, and at what peak; one sentence."""
    pairs = [(row, row["peers"][OURS], row["peers"]["sonic"]) for row in record["rows"] if "sonic" in row["peers"]]
    if not pairs:
        return NOT_MEASURED
    parts = []
    for tiny, what in ((False, "shapes"), (True, "sizes of one tiny layer")):
        times = [s["gpu_fwdbwd_ms"] / o["gpu_fwdbwd_ms"] for row, o, s in pairs if is_tiny(row) is tiny]
        if times:
            ahead = f"on {sum(time > 1 + EVEN for time in times)} of {len(times)} {what}"
            parts.append(
                f"{ahead}, {number(statistics.geometric_mean(times))} times in the geometric mean {span(times)}"
            )
    peaks = [ours["peak_fwdbwd_MiB"] / sonic["peak_fwdbwd_MiB"] for _, ours, sonic in pairs]
    return (
        f"faster by more than 2 % than SonicMoE's {', and '.join(parts)}, at {number(statistics.geometric_mean(peaks))} of "
        f"its peak memory {span(peaks)}{in_brackets(record['rows'])}"
    )


def torch_backward(record: Record) -> str:
    """How long torch grouped_mm's backward takes, in times its forward, by experts a token; part of a sentence."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for row in record["rows"]:
        if (figures := row["peers"].get("torch_grouped")) is not None:
            found[row["cfg"]["K"] in (2, 4)].append(backward_ms(figures) / figures["gpu_fwd_ms"])
    if not all(found.values()):
        return NOT_MEASURED
    few, other = (f"{number(min(times))} to {number(max(times))}" for times in found.values())
    said = f"{few} times as long as its forward with 2 or 4 experts a token, and {other} times with other numbers"
    return said + in_brackets(record["rows"])


def in_brackets(rows: Sequence[Record]) -> str:
    """`caveat` at the end of a sentence."""
    return f" ({said})" if (said := caveat(rows)) else ""


def eager_table(record: Record) -> str:
    """Eager time, host time included, of the same programs."""
    names = [OURS, *layer_peers(record)]
    columns: list[Column] = [("T, d, n, E, K", plain_shape), *of_peers(names, "forward ms", itemgetter("fwd_ms"))]
    columns += of_peers(names, "forward + backward ms", lambda figures: figures["fwd_ms"] + figures["bwd_ms"])
    columns.append(("host ms of ours", figure("peers", OURS, "host_fwdbwd_ms")))
    known = [row["peers"][OURS] for row in record["rows"] if row["peers"][OURS].keys() >= HOST_FIGURES.keys()]
    note = origin(record["rows"], *PEERS)
    if known:
        medians = [
            f"{what} {number(statistics.median(r[field] for r in known))}" for field, what in HOST_FIGURES.items()
        ]
        note += f" The host in a forward + backward of ours on a dispatch made beforehand, medians of {len(known)} shapes, ms: "
        note += f"{'; '.join(medians)}."
    return f"{table(record['rows'], columns)}\n\n{note}"


def memory_table(record: Record) -> str:
    """Saved and peak MiB by shape."""
    others = layer_peers(record)
    columns: list[Column] = [("T, d, n, E, K", plain_shape)]
    columns += of_peers([OURS, *others], "saved MiB", itemgetter("saved_MiB"), 0)
    columns += of_peers([OURS, *others], "peak MiB", itemgetter("peak_fwdbwd_MiB"), 0)
    means = []
    for name in others:
        pairs = [(row["peers"][OURS], row["peers"][name]) for row in record["rows"] if name in row["peers"]]
        ratios = [ours["peak_fwdbwd_MiB"] / peer["peak_fwdbwd_MiB"] for ours, peer in pairs]
        span = f"{number(min(ratios))} to {number(max(ratios))}"
        means.append(f"{number(statistics.geometric_mean(ratios))} of {LABELS[name]} ({span})")
    note = f"Our peak, geometric means: {'; '.join(means)}. " if means else ""
    return f"{table(record['rows'], columns)}\n\n{note}{origin(record['rows'], *PEERS)}"


def many_tokens(record: Record) -> str:
    """The largest batch that was run, one sentence."""
    if (row := record.get("four_million_tokens")) is None:
        return NOT_MEASURED
    return (
        f"{number(row['cfg']['T'], 0)} tokens at (d, n, E, K) = ({', '.join(shape_of(row)[1:])}): forward + backward "
        f"{number(row['fwdbwd_ms'])} ms, peak {number(row['peak_fwdbwd_MiB'], 0)} of the GPU's {number(row['gpu_MiB'], 0)} MiB"
        f"{in_brackets([row])}"
    )


def gather_cost(record: Record) -> str:
    """Least speed of gathered rows over contiguous ones, products by rows and weight gradients apart; one sentence."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for row in record["rows"]:
        if row.get("gathered_to_plain_speed") is not None:
            speeds[row["product"].endswith("weight")].append(row["gathered_to_plain_speed"])
    if not all(speeds.values()):
        return NOT_MEASURED
    by_rows, weights = (min(found) for found in speeds.values())
    least = f"gathered rows reach at least {number(by_rows, 3)} of the speed of contiguous rows in the products by rows"
    return f"{least}, and at least {number(weights, 3)} in the weight gradients{in_brackets(record['rows'])}"


def experts_growth(record: Record) -> str:
    """The time of a dispatch for the most experts over one for the fewest, one sentence."""
    rows = sorted(record.get("series", {}).get("E", []), key=lambda row: row["E"])
    if not rows:
        return NOT_MEASURED
    least, most = rows[0], rows[-1]
    conditions = "; ".join(filter(None, [f"T = {least['T']}, K = {least['K']}", caveat([least, most])]))
    return (
        f"A dispatch for {most['E']} experts takes {number(most['tiled_ms'] / least['tiled_ms'])} times one for "
        f"{least['E']} ({conditions})"
    )


PLAIN: dict[str, tuple[str, Callable[..., str]]] = {name: (made.file, made) for name, made in tables.TABLES.items()}

# name of a table -> (results file, what makes it)
TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "module": ("module", module_table),
    "layer": ("layer", layer_table),
    "eager": ("layer", eager_table),
    "memory": ("layer", memory_table),
    "predicted": ("module", predicted_table),
    "block_products": ("blocksparse", block_products_table),
    "block_layers": ("blocksparse", block_layers_table),
    "rank_memory": ("distributed", rank_memory_table),
    **PLAIN | TRAINING | PAPER_TABLES | models.TABLES | fp8_tables.TABLES | headline_tables.TABLES,
}


def experts_longer(layer: Record, module: Record) -> str:
    """On how many shapes the experts alone, by graph replay, take longer than the whole layer as a sum of kernels; a sentence."""
    whole = {tuple(row["cfg"].values()): row for row in module["rows"]}
    said, least = list[str](), list[float]()
    rows = [row for row in layer["rows"] if tuple(row["cfg"].values()) in whole]
    for name, field, who in (("sonic", "sonic", "SonicMoE's"), (OURS, "ours", "ours")):
        pairs = [(row["peers"].get(name), whole[tuple(row["cfg"].values())].get(f"{field}_fwdbwd_ms")) for row in rows]
        ratios = [experts["gpu_fwdbwd_ms"] / ms for experts, ms in pairs if experts and ms]
        if ratios:
            longer = sum(ratio > 1 for ratio in ratios)
            said.append(f"{who} on {longer} of {len(ratios)} shapes, up to {number(max(ratios))} times as long")
            least += [ms for experts, ms in pairs if experts and ms and experts["gpu_fwdbwd_ms"] > ms]
    if not said:
        return NOT_MEASURED
    of_these = f"; the shortest of these layers takes {number(min(least))} ms" if least else ""
    return f"The experts alone can take longer here than the whole layer above: {', '.join(said)}{of_these}{in_brackets(rows)}."


def batch(record: Record) -> str:
    """How many batches gave other bits than the whole; a sentence."""
    if "differing" not in record:
        return NOT_MEASURED
    (first, last), batches = record["seeds"], sum(record["batches"].values())
    said = f"{len(record['differing'])} of {batches} batches differ in {record['cases']} cases, seeds {first} to {last}"
    return f"{said}; {origin([record], 'torch')}"


# name of a sentence -> (results files, what makes it of them)
SENTENCES: dict[str, tuple[str, Callable[..., str]]] = {
    "experts_longer": ("layer module", experts_longer),
    "curves": ("curves", curves),
    "batch": ("batch_invariance", batch),
    "module_claim": ("module", module_claim),
    "module_details": ("module", module_details),
    "router_accuracy": ("router", router_accuracy),
    "layer_claim": ("layer", layer_claim),
    "torch_backward": ("layer", torch_backward),
    "many_tokens": ("layer", many_tokens),
    "gather_cost": ("products", gather_cost),
    "block_products_claim": ("blocksparse", block_products_claim),
    "experts_growth": ("dispatch", experts_growth),
    "predicted_claim": ("module products", predicted_claim),
    "exchange_share": ("distributed", exchange_share),
    **REVIEW | CLAIMS | TRAINING_CLAIMS | models.SENTENCES | fp8_tables.SENTENCES | headline_tables.SENTENCES,
}


MARKED = re.compile(r"<!-- results:(?P<name>\S+) -->.*?<!-- /results:(?P=name) -->", flags=re.DOTALL)


def fill(text: str, results: Path) -> str:
    """The text with every marked table and sentence made from the results. Doing it twice changes nothing.

    ValueError: a marker names neither a table nor a sentence.
    """

    def replacement(found: re.Match[str]) -> str:
        name = found["name"]
        known = TABLES | SENTENCES
        if name not in known:
            raise ValueError(f"results marker: expected one of {', '.join(known)}, got {name!r}")
        files, make = known[name]
        records = [load(file, results) for file in files.split()]
        if None in records:
            return found[0]
        space = "\n\n" if name in TABLES else ""
        made = make(*records)
        if made == NOT_MEASURED and text[found.end() :].startswith("."):  # the sentence has its own
            made = NOT_MEASURED.rstrip(".").lower()
        return f"<!-- results:{name} -->{space}{made}{space}<!-- /results:{name} -->"

    return MARKED.sub(replacement, text)
