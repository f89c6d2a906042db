"""The tables and measured sentences of README and docs/*.md, made from results/. `plot_results.py` puts them there.

A page marks each place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced: by a table, which
stands between empty lines, or by a sentence, which stands in its paragraph. If the results are missing, the text stays.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from scripts.bench import (
    cost_tables,
    fp8_tables,
    headline_tables,
    module_tables,
    review_tables,
    tables,
    training_tables,
)
from scripts.bench.blocksparse_tables import block_layers_table, block_products_claim, block_products_table
from scripts.bench.common import geometric_mean, read_json
from scripts.bench.distributed_tables import exchange_share
from scripts.bench.markdown import (
    LABELS,
    NOT_MEASURED,
    OURS,
    Record,
    Rows,
    least_to_most,
    mean_and_span,
    number,
    origin,
    plain_shape,
    shape_of,
    span,
    values,
)
from scripts.bench.models import tables as models
from scripts.bench.module_tables import EVEN, by_layer
from scripts.bench.paper import steps_tables
from scripts.bench.paper import tables as paper
from scripts.bench.rank_memory import rank_memory_table
from scripts.bench.render import Entry, Sentence, Table, having, plainly


def load(name: str, results: Path) -> Record | None:
    """A file's record; for "A|B" the first file's that exists. Figures that no H200 has measured are an H100's."""
    folders = (results, results.parent / "h100")
    paths = (folder / f"{each}.json" for each in name.split("|") for folder in folders)
    return next((read_json(path) for path in paths if path.exists()), None)


# -------------------------------------------------------------------------------------------------- the experts' tables

PEERS = ("torch", "sonic-moe", "quack-kernels")  # whose versions stand under tables of layers
HOST_FIGURES = {
    "host_fwdbwd_without_dispatch_ms": "with autograd's thread",
    "host_fwdbwd_single_thread_ms": "in one thread",
    "host_fwdbwd_kernels_ms": "its kernels alone, allocated for and launched",
}
SHAPE: Entry = ("T, d, n, E, K", plain_shape)
forward_ms = itemgetter("gpu_fwd_ms")


def backward_ms(figures: Record) -> float:
    return float(figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])


def eager_ms(figures: Record) -> float:
    return float(figures["fwd_ms"] + figures["bwd_ms"])


def peers_in(rows: Rows) -> list[str]:
    """The programs in the rows, ours first."""
    return [name for name in LABELS if any(name in row["peers"] for row in rows)]


def over(above: str, below: str, field: str) -> str:
    """One program's figure over another's."""
    return f"peers.{above}.{field} / peers.{below}.{field}"


def of_peers(names: Sequence[str], first: str, value: Callable[[Record], float], digits: int = 2) -> list[Entry]:
    """A column a program, with what ``value`` makes of its figures; ours is ``first`` said in full."""

    def entry(name: str) -> Entry:
        head = f"{first}: ours" if name == OURS else LABELS[name]
        return head, lambda row: value(row["peers"][name]) if name in row["peers"] else None, digits

    return [entry(name) for name in names]


def layer_entries(rows: Rows) -> list[Entry]:
    """Time by shape: ours and the peers, forward and backward, with the ratio to SonicMoE and to the floor."""
    names = peers_in(rows)
    return [
        SHAPE,
        *of_peers(names, "forward ms", forward_ms),
        ("floor", "floor_fwd_ms"),
        *of_peers(names, "backward ms", backward_ms),
        ("floor", "floor_bwd_ms"),
        ("SonicMoE / ours: fwd", over("sonic", OURS, "gpu_fwd_ms")),
        ("fwd + bwd", over("sonic", OURS, "gpu_fwdbwd_ms")),
    ]


def layer_note(rows: Rows) -> str:
    means = []
    for name in peers_in(rows)[1:]:
        pairs = [(row["peers"][name], row["peers"][OURS]) for row in rows if name in row["peers"]]
        forward, backward = (
            number(geometric_mean([part(peer) / part(ours) for peer, ours in pairs]))
            for part in (forward_ms, backward_ms)
        )
        means.append(f"{LABELS[name]} {forward}× forward, {backward}× backward ({len(pairs)} shapes)")
    return f"GPU time, ms. Times of ours, geometric means: {'; '.join(means)}."


def eager_entries(rows: Rows) -> list[Entry]:
    """Eager time, host time included, of the same programs."""
    names = peers_in(rows)
    both = of_peers(names, "forward + backward ms", eager_ms)
    return [
        SHAPE,
        *of_peers(names, "forward ms", itemgetter("fwd_ms")),
        *both,
        ("host ms of ours", f"peers.{OURS}.host_fwdbwd_ms"),
    ]


def host_note(_: Record, rows: Rows) -> str:
    known = [row["peers"][OURS] for row in rows if row["peers"][OURS].keys() >= HOST_FIGURES.keys()]
    if not known:
        return ""
    medians = [
        f"{what} {number(statistics.median(row[field] for row in known))}" for field, what in HOST_FIGURES.items()
    ]
    said = "The host in a forward + backward of ours on a dispatch made beforehand, medians of"
    return f"{said} {len(known)} shapes, ms: {'; '.join(medians)}."


def memory_entries(rows: Rows) -> list[Entry]:
    """Saved and peak MiB by shape."""
    names = peers_in(rows)
    saved = of_peers(names, "saved MiB", itemgetter("saved_MiB"), 0)
    return [SHAPE, *saved, *of_peers(names, "peak MiB", itemgetter("peak_fwdbwd_MiB"), 0)]


def memory_note(rows: Rows) -> str:
    peaks = {name: values(rows, over(OURS, name, "peak_fwdbwd_MiB")) for name in peers_in(rows)[1:]}
    means = [f"{number(geometric_mean(each))} of {LABELS[name]} {span(each)}" for name, each in peaks.items()]
    return f"Our peak, geometric means: {'; '.join(means)}." if means else ""


EXPERTS = {
    "layer": Table("layer", layer_entries, layer_note, packages=PEERS),
    "eager": Table("layer", eager_entries, packages=PEERS, after=host_note),
    "memory": Table("layer", memory_entries, memory_note, packages=PEERS),
}


# ----------------------------------------------------------------------------------------------------------- sentences


def layer_claim(rows: Rows) -> str:
    """On how many shapes the experts are faster than SonicMoE's, one tiny layer apart, and at what peak; one sentence."""
    parts = []
    for what, group in by_layer(rows).items():
        times = values(group, over("sonic", OURS, "gpu_fwdbwd_ms"))
        ahead = sum(time > 1 + EVEN for time in times)
        parts.append(f"on {ahead} of {len(times)} {what}, {mean_and_span(times, ' times')}")
    peaks = values(rows, over(OURS, "sonic", "peak_fwdbwd_MiB"))
    faster = f"faster by more than 2 % than SonicMoE's {', and '.join(parts)}"
    return f"{faster}, at {number(geometric_mean(peaks))} of its peak memory {span(peaks)}"


def torch_backward(rows: Rows) -> str:
    """How long torch grouped_mm's backward takes, in times its forward, by experts a token; part of a sentence."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        figures = row["peers"]["torch_grouped"]
        found[row["cfg"]["K"] in (2, 4)].append(backward_ms(figures) / forward_ms(figures))
    few, others = map(least_to_most, found.values())
    said = f"{few} times as long as its forward with 2 or 4 experts a token, and {others} times with other numbers"
    return said if all(found.values()) else ""


def many_tokens(rows: Rows) -> str:
    """The largest batch that was run, one sentence."""
    (row,) = rows
    return (
        f"{number(row['cfg']['T'], 0)} tokens at (d, n, E, K) = ({', '.join(shape_of(row)[1:])}): forward + backward "
        f"{number(row['fwdbwd_ms'])} ms, peak {number(row['peak_fwdbwd_MiB'], 0)} of the GPU's {number(row['gpu_MiB'], 0)} MiB"
    )


def gather_cost(rows: Rows) -> str:
    """Least speed of gathered rows over contiguous ones, products by rows and weight gradients apart; one sentence."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        speeds[row["product"].endswith("weight")].append(row["gathered_to_plain_speed"])
    if not all(speeds.values()):
        return ""
    by_rows, weights = (number(min(found), 3) for found in speeds.values())
    least = f"gathered rows reach at least {by_rows} of the speed of contiguous rows in the products by rows"
    return f"{least}, and at least {weights} in the weight gradients"


def experts_growth(rows: Rows) -> str:
    """The time of a dispatch for the most experts over one for the fewest, one sentence."""
    least, most = rows
    return (
        f"A dispatch for {most['E']} experts takes {number(most['tiled_ms'] / least['tiled_ms'])} times one for "
        f"{least['E']} (T = {least['T']}, K = {least['K']})"
    )


def fewest_and_most(record: Record) -> Rows:
    rows = sorted(record.get("series", {}).get("E", []), key=itemgetter("E"))
    return [rows[0], rows[-1]] if rows else []


def experts_longer(rows: Rows) -> str:
    """On how many shapes the experts alone, by graph replay, take longer than the whole layer as a sum of kernels; a sentence."""
    said, least = list[str](), list[float]()
    for name, field, who in (("sonic", "sonic", "SonicMoE's"), (OURS, "ours", "ours")):
        pairs = [(row["peers"].get(name), row["whole"].get(f"{field}_fwdbwd_ms")) for row in rows]
        ratios = [experts["gpu_fwdbwd_ms"] / ms for experts, ms in pairs if experts and ms]
        if ratios:
            longer = sum(ratio > 1 for ratio in ratios)
            said.append(f"{who} on {longer} of {len(ratios)} shapes, up to {number(max(ratios))} times as long")
            least += [ms for experts, ms in pairs if experts and ms and experts["gpu_fwdbwd_ms"] > ms]
    of_these = f"; the shortest of these layers takes {number(min(least))} ms" if least else ""
    return f"The experts alone can take longer here than the whole layer above: {', '.join(said)}{of_these}."


def with_whole_layer(layer: Record, module: Record) -> Rows:
    """The experts' rows with the whole layer's of the same sizes, where it was measured."""
    whole = {plain_shape(row): row for row in module["rows"]}
    return [row | {"whole": whole[plain_shape(row)]} for row in layer["rows"] if plain_shape(row) in whole]


def batch(rows: Rows) -> str:
    """How many batches gave other bits than the whole; a sentence."""
    (record,) = rows
    (first, last), batches = record["seeds"], sum(record["batches"].values())
    said = f"{len(record['differing'])} of {batches} batches differ in {record['cases']} cases, seeds {first} to {last}"
    return f"{said}; {origin(rows, 'torch')}"


def four_million(record: Record) -> Rows:
    return [record[name] for name in ("four_million_tokens",) if name in record]


OF_EXPERTS = {
    "layer_claim": Sentence("layer", layer_claim, having("peers.sonic")),
    "torch_backward": Sentence("layer", torch_backward, having("peers.torch_grouped")),
    "many_tokens": Sentence("layer", many_tokens, four_million),
    "gather_cost": Sentence("products", gather_cost, having("gathered_to_plain_speed")),
    "experts_growth": Sentence("dispatch", experts_growth, fewest_and_most),
    "experts_longer": Sentence("layer module", experts_longer, with_whole_layer),
    "batch": Sentence(
        "batch_invariance",
        batch,
        lambda record: [record] if "differing" in record else [],
        note=plainly,
    ),
}

# ----------------------------------------------------------------------------------------------------------- the pages

Made = tuple[str, Callable[..., str]]  # the results files, and what makes Markdown of their records


def placed(*groups: Mapping[str, Table | Sentence]) -> dict[str, Made]:
    return {name: (made.file, made) for group in groups for name, made in group.items()}


TABLES: dict[str, Made] = {
    "block_products": ("blocksparse", block_products_table),
    "block_layers": ("blocksparse", block_layers_table),
    "rank_memory": ("distributed", rank_memory_table),
    **training_tables.TRAINING | fp8_tables.TABLES,
    **placed(
        EXPERTS, module_tables.TABLES_OF_LAYERS, cost_tables.TABLES, tables.TABLES, paper.TABLES, steps_tables.TABLES
    ),
    **placed(models.TABLES, headline_tables.TABLES),
}
SENTENCES: dict[str, Made] = {
    "curves": ("curves", training_tables.curves),
    "block_products_claim": ("blocksparse", block_products_claim),
    "exchange_share": ("distributed", exchange_share),
    **training_tables.TRAINING_CLAIMS | fp8_tables.SENTENCES,
    **placed(OF_EXPERTS, module_tables.SENTENCES, cost_tables.SENTENCES, review_tables.SENTENCES),
    **placed(steps_tables.SENTENCES, models.SENTENCES, headline_tables.SENTENCES),
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
