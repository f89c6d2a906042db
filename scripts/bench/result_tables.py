"""The tables and measured sentences of README and docs/*.md, made from results/. `plot_results.py` puts them there.

A page marks each place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced: by a table, which
stands between empty lines, or by a sentence, which stands in its paragraph. If the results are missing, the text stays.
"""

import math
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
    Entry,
    Record,
    Rows,
    Sentence,
    Table,
    condition,
    having,
    least_to_most,
    mean_and_span,
    number,
    origin,
    plain_shape,
    plainly,
    shape_of,
    span,
    split,
    values,
)
from scripts.bench.models import tables as models
from scripts.bench.module_tables import EVEN, by_layer
from scripts.bench.other_gpus import other_gpus_table
from scripts.bench.paper import tables as paper
from scripts.bench.paper.tables import SHAPE, of, programs_in, ratio
from scripts.bench.rank_memory import rank_memory_table
from scripts.bench.tables import PEERS


def load(name: str, results: Path) -> Record | None:
    """A file's record; for "A|B" the first file's that exists. Figures that no H200 has measured are an H100's."""
    folders = (results, results.parent / "h100")
    paths = (folder / f"{each}.json" for each in name.split("|") for folder in folders)
    return next((read_json(path) for path in paths if path.exists()), None)


# ------------------------------------------------------------------------------------- tables with a column for a program

HOST_FIGURES = {
    "host_fwdbwd_without_dispatch_ms": "with autograd's thread",
    "host_fwdbwd_single_thread_ms": "in one thread",
    "host_fwdbwd_kernels_ms": "allocating and launching alone",
}


def layer_rows(record: Record) -> Rows:
    """The rows of the experts alone, with the backward's part of a program's times beside its others, and eager calls' sum."""

    def more(figures: Record) -> Record:
        eager = figures.get("fwd_ms", math.nan) + figures.get("bwd_ms", math.nan)
        # Where noise made the forward the longer one, no time is left for backward.
        backward = max(0.0, figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])
        return figures | {"gpu_bwd_ms": backward or None, "fwdbwd_ms": eager}

    return [
        row | {"programs": {name: more(figures) for name, figures in row["peers"].items()}} for row in record["rows"]
    ]


def of_programs(names: Sequence[str], first: str, path: str, digits: int = 2) -> list[Entry]:
    """A column for each program; ours is ``first`` said in full. path: with {} for its name."""
    return [(f"{first}: ours" if name == OURS else LABELS[name], path.format(name), digits) for name in names]


def layer_entries(rows: Rows) -> list[Entry]:
    """Time by shape: ours and the peers, forward and backward, with the ratio to SonicMoE and to the floor."""
    names = programs_in(rows)
    return [
        SHAPE,
        *of_programs(names, "forward ms", of("{}", "gpu_fwd_ms")),
        ("floor", "floor_fwd_ms"),
        *of_programs(names, "backward ms", of("{}", "gpu_bwd_ms")),
        ("floor", "floor_bwd_ms"),
        ("SonicMoE / ours: fwd", ratio("sonic", OURS, "gpu_fwd_ms")),
        ("fwd + bwd", ratio("sonic", OURS, "gpu_fwdbwd_ms")),
    ]


def layer_note(rows: Rows) -> str:
    means = []
    for name in programs_in(rows)[1:]:
        forward, backward = (values(rows, ratio(name, OURS, f"gpu_{part}_ms")) for part in ("fwd", "bwd"))
        times = f"{number(geometric_mean(forward))} forward, {number(geometric_mean(backward))} backward"
        means.append(f"{LABELS[name]} {times} ({len(forward)} shapes)")
    return f"GPU time, ms. Time over ours, geometric means: {'; '.join(means)}."


def eager_entries(rows: Rows) -> list[Entry]:
    """Eager time, host time included, of the same programs."""
    names = programs_in(rows)
    return [
        SHAPE,
        *of_programs(names, "forward ms", of("{}", "fwd_ms")),
        *of_programs(names, "forward + backward ms", of("{}", "fwdbwd_ms")),
        ("host ms of ours", of(OURS, "host_fwdbwd_ms")),
    ]


def host_note(_: Record, rows: Rows) -> str:
    known = [row["programs"][OURS] for row in rows if row["programs"][OURS].keys() >= HOST_FIGURES.keys()]
    medians = [
        f"{what} {number(statistics.median(values(known, field)))}" for field, what in HOST_FIGURES.items() if known
    ]
    said = "Our host time, forward + backward, on a dispatch made beforehand, medians of"
    return f"{said} {len(known)} shapes, ms: {'; '.join(medians)}." if known else ""


def memory_entries(rows: Rows) -> list[Entry]:
    """Saved and peak MiB by shape."""
    names = programs_in(rows)
    return [
        SHAPE,
        *of_programs(names, "saved MiB", of("{}", "saved_MiB"), 0),
        *of_programs(names, "peak MiB", of("{}", "peak_fwdbwd_MiB"), 0),
    ]


def memory_note(rows: Rows) -> str:
    peaks = {name: values(rows, ratio(OURS, name, "peak_fwdbwd_MiB")) for name in programs_in(rows)[1:]}
    means = [f"{number(geometric_mean(each))} of {LABELS[name]} {span(each)}" for name, each in peaks.items()]
    return f"Our peak, geometric means: {'; '.join(means)}." if means else ""


def sonicmoe_entries(rows: Rows) -> list[Entry]:
    """SonicMoE's Figures 5 and 6a."""
    names = programs_in(rows)
    return [
        SHAPE,
        *of_programs(names, "forward TFLOP/s", of("{}", "fwd_tflops"), 0),
        *of_programs(names, "backward TFLOP/s", of("{}", "bwd_tflops"), 0),
        *of_programs(names, "saved MiB", of("{}", "saved_MiB"), 0),
        *of_programs(names, "peak MiB", of("{}", "peak_MiB"), 0),
    ]


def granularity_entries(rows: Rows) -> list[Entry]:
    """SonicMoE's Figure 1."""
    names = programs_in(rows)
    others = [name for name in names if name != "bmm_ub"]
    return [
        SHAPE,
        ("d / n", "cfg.d / cfg.n", 0),
        *of_programs(names, "saved MiB", of("{}", "saved_MiB"), 0),
        *of_programs(others, "speed of the bmm bound's, forward", ratio("bmm_ub", "{}", "fwd_ms")),
    ]


OF_PROGRAMS = {
    "layer": Table("layer", layer_entries, layer_note, layer_rows, PEERS),
    "eager": Table("layer", eager_entries, "", layer_rows, PEERS, host_note),
    "memory": Table("layer", memory_entries, memory_note, layer_rows, PEERS),
    "paper_layers": paper.Programs(
        "paper/sonicmoe-layers",
        sonicmoe_entries,
        rows=paper.with_speeds,
        picture="![SonicMoE, Figures 5 and 6a](paper_sonicmoe.png)",
    ),
    "paper_granularity": paper.Programs("paper/sonicmoe-layers", granularity_entries, rows=paper.granularity),
}


# ----------------------------------------------------------------------------------------------------------- sentences


def layer_claim(rows: Rows) -> str:
    """On how many shapes the experts are faster than SonicMoE's, one tiny layer apart, and at what peak; one sentence."""
    parts = []
    for what, group in by_layer(rows).items():
        times = values(group, ratio("sonic", OURS, "gpu_fwdbwd_ms"))
        ahead = sum(time > 1 + EVEN for time in times)
        parts.append(f"on {ahead} of {len(times)} {what}, {mean_and_span(times, ' times')}")
    peaks = values(rows, ratio(OURS, "sonic", "peak_fwdbwd_MiB"))
    faster = f"faster by more than 2 % than SonicMoE's {', and '.join(parts)}"
    return f"{faster}, at {number(geometric_mean(peaks))} of its peak memory {span(peaks)}"


def torch_backward(rows: Rows) -> str:
    """How long torch grouped_mm's backward takes, in times its forward, by experts a token; part of a sentence."""
    times = "programs.torch_grouped.gpu_bwd_ms / programs.torch_grouped.gpu_fwd_ms"
    few, others = (values(each, times) for each in split(rows, lambda row: row["cfg"]["K"] in (2, 4)))
    if not few or not others:
        return ""
    said = f"{least_to_most(few)} times as long as its forward with 2 or 4 experts a token"
    return f"{said}, and {least_to_most(others)} times with other numbers"


def many_tokens(rows: Rows) -> str:
    """The largest batch that was run, one sentence."""
    (row,) = rows
    return (
        f"{number(row['cfg']['T'], 0)} tokens at (d, n, E, K) = ({', '.join(shape_of(row)[1:])}): forward + backward "
        f"{number(row['fwdbwd_ms'])} ms, peak {number(row['peak_fwdbwd_MiB'], 0)} of the GPU's {number(row['gpu_MiB'], 0)} MiB"
    )


def gather_cost(rows: Rows) -> str:
    """Least speed of gathered rows over contiguous ones, products by rows and weight gradients apart; one sentence."""
    groups = split(rows, lambda row: row["product"].endswith("weight"))
    weights, by_rows = (values(each, "gathered_to_plain_speed") for each in groups)
    if not weights or not by_rows:
        return ""
    least = f"gathered rows reach at least {number(min(by_rows), 3)} of the speed of contiguous rows in the products by rows"
    return f"{least}, and at least {number(min(weights), 3)} in the weight gradients, {condition(rows)}"


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


def experts_share(rows: Rows) -> str:
    """Time of the experts alone over the whole layer's, forward + backward, both by graph replay; a sentence."""
    said = list[str]()
    for name, field, who in ((OURS, "ours", "ours"), ("sonic", "sonic", "SonicMoE's")):
        pairs = [
            (row["peers"].get(name), row["whole"].get(f"{field}_fwdbwd_gpu_ms"))
            for row in rows
            if row["whole"].get("gpu_fwdbwd_method") == "graph"
        ]
        if ratios := [experts["gpu_fwdbwd_ms"] / ms for experts, ms in pairs if experts and ms]:
            said.append(f"{number(min(ratios))} to {number(max(ratios))} ({who}, {len(ratios)} shapes)")
    return f"Experts alone take {' and '.join(said)} of the time of whole layers that are replayed too." if said else ""


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


OF_EXPERTS = {
    "layer_claim": Sentence("layer", layer_claim, having("programs.sonic", rows=layer_rows)),
    "torch_backward": Sentence("layer", torch_backward, having("programs.torch_grouped", rows=layer_rows)),
    "many_tokens": Sentence("layer", many_tokens, "four_million_tokens"),
    "gather_cost": Sentence("products", gather_cost, having("gathered_to_plain_speed")),
    "experts_growth": Sentence("dispatch", experts_growth, fewest_and_most),
    "experts_share": Sentence("layer module", experts_share, with_whole_layer),
    **{
        name: Sentence(file, batch, lambda record: [record] if "differing" in record else [], note=plainly)
        for name, file in (("batch", "batch_invariance"), ("batch_ampere", "batch_invariance_ampere"))
    },
}

# ----------------------------------------------------------------------------------------------------------- the pages

Made = tuple[str, Callable[..., str]]  # the results files, and what makes Markdown of their records


def placed(*groups: Mapping[str, Table | Sentence]) -> dict[str, Made]:
    return {name: (made.file, made) for group in groups for name, made in group.items()}


TABLES: dict[str, Made] = {
    "block_products": ("blocksparse", block_products_table),
    "other_gpus": ("ampere", other_gpus_table),
    "block_layers": ("blocksparse", block_layers_table),
    "rank_memory": ("distributed", rank_memory_table),
    **training_tables.TRAINING | fp8_tables.TABLES,
    **placed(OF_PROGRAMS, module_tables.TABLES_OF_LAYERS, cost_tables.TABLES, tables.TABLES, paper.TABLES),
    **placed(models.TABLES, headline_tables.TABLES),
}
SENTENCES: dict[str, Made] = {
    "curves": ("curves", training_tables.curves),
    "block_products_claim": ("blocksparse", block_products_claim),
    "exchange_share": ("distributed", exchange_share),
    **training_tables.TRAINING_CLAIMS | fp8_tables.SENTENCES,
    **placed(OF_EXPERTS, module_tables.SENTENCES, cost_tables.SENTENCES, review_tables.SENTENCES, tables.SENTENCES),
    **placed(models.SENTENCES, headline_tables.SENTENCES),
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
