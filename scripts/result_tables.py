"""The tables of README and docs/routers.md, made from results/h200/*.json. `plot_results.py` puts them there.

A page marks each table's place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced.
A table whose results are not there stays as it is.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

OURS = "blazeproto"
LABELS = {
    OURS: "blazeproto",
    "sonic": "SonicMoE",
    "bmm_ub": "bmm bound",
    "torch_grouped": "torch grouped_mm",
    "scattermoe": "ScatterMoE",
    "mb_sparse": "MegaBlocks",
}


def load(name: str, results: Path) -> Record | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not measured with these sources."
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


HOST_FIGURES = {
    "host_fwdbwd_without_dispatch_ms": "with autograd's thread",
    "host_fwdbwd_single_thread_ms": "in one thread",
    "host_fwdbwd_kernels_ms": "its kernels alone, allocated for and launched",
}


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}".replace(",", " ")


def shape_of(row: Record) -> list[str]:
    return [str(row["cfg"][key]) for key in ("T", "d", "n", "E", "K") if key in row["cfg"]]


def layer_shape(row: Record) -> str:
    """Marked where the row was measured with other sources than the rest."""
    return ", ".join(shape_of(row)) + (" †" if "other_sources" in row else "")


def backward_ms(figures: Record) -> float:
    return float(figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])


def measured_on(record: Record) -> str:
    return f"{record['gpu']}; {record['measured']}; sources `{record['sources_sha256'][:12]}`."


def dagger(marks: Iterable[Record]) -> str:
    """A note on what was measured with other sources than the rest, empty where nothing was."""
    marked = sorted({(mark["measured"], mark["sources_sha256"][:12]) for mark in marks})
    return " ".join(f"†: {measured}, sources `{sources}`." for measured, sources in marked)


def rows_measured_on(record: Record) -> str:
    """:func:`measured_on` of a layer record, and a note on its marked rows."""
    marks = [row["other_sources"] for row in record["rows"] if "other_sources" in row]
    return f"{measured_on(record)} {dagger(marks)}".rstrip()


def with_extra_note(table: str, record: Record, name: str) -> str:
    """An extra's table, with a note if it was measured with other sources than the rows of its file."""
    mark = record.get("extras_of_other_sources", {}).get(name)
    return f"{table}\n\nMeasured {mark['measured']}, sources `{mark['sources_sha256'][:12]}`." if mark else table


def layer_peers(record: Record) -> list[str]:
    """The peers in a record other than ours, in the order of LABELS."""
    return [name for name in LABELS if name != OURS and any(name in row["peers"] for row in record["rows"])]


def layer_table(record: Record) -> str:
    """Time by shape: ours and the peers, forward and backward, with the ratio to SonicMoE and to the floor."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "forward ms: ours", *(LABELS[name] for name in others), "floor"]
    header += ["backward ms: ours", *(LABELS[name] for name in others), "floor", "SonicMoE / ours: fwd", "fwd + bwd"]
    rows = []
    for row in record["rows"]:
        peers, ours = row["peers"], row["peers"][OURS]
        line = [layer_shape(row), f"**{number(ours['gpu_fwd_ms'])}**"]
        line += [number(peers[name]["gpu_fwd_ms"]) if name in peers else "–" for name in others]
        line += [number(row["floor_fwd_ms"]), f"**{number(backward_ms(ours))}**"]
        line += [number(backward_ms(peers[name])) if name in peers else "–" for name in others]
        line.append(number(row["floor_bwd_ms"]))
        for field in ("gpu_fwd_ms", "gpu_fwdbwd_ms"):
            line.append(number(peers["sonic"][field] / ours[field]) if "sonic" in peers else "–")
        rows.append(line)
    means = []
    for name in others:
        pairs = [(row["peers"][name], row["peers"][OURS]) for row in record["rows"] if name in row["peers"]]
        forward = statistics.geometric_mean([peer["gpu_fwd_ms"] / ours["gpu_fwd_ms"] for peer, ours in pairs])
        backward = statistics.geometric_mean([backward_ms(peer) / backward_ms(ours) for peer, ours in pairs])
        means.append(f"{LABELS[name]} {number(forward)}× forward, {number(backward)}× backward ({len(pairs)} shapes)")
    note = f"GPU time, ms. Times of ours, geometric means: {'; '.join(means)}. {rows_measured_on(record)}"
    return f"{markdown_table(header, rows)}\n\n{note}"


def eager_table(record: Record) -> str:
    """Eager time, host time included, of the same programs."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "forward ms: ours", *(LABELS[name] for name in others)]
    header += ["forward + backward ms: ours", *(LABELS[name] for name in others), "host ms of ours"]
    rows = []
    for row in record["rows"]:
        peers, names = row["peers"], [OURS, *others]
        line = [layer_shape(row)]
        line += [number(peers[name]["fwd_ms"]) if name in peers else "–" for name in names]
        line += [number(peers[name]["fwd_ms"] + peers[name]["bwd_ms"]) if name in peers else "–" for name in names]
        rows.append([*line, number(peers[OURS].get("host_fwdbwd_ms"))])
    known = [row["peers"][OURS] for row in record["rows"] if row["peers"][OURS].keys() >= HOST_FIGURES.keys()]
    note = rows_measured_on(record)
    if known:
        medians = [
            f"{what} {number(statistics.median(r[field] for r in known))}" for field, what in HOST_FIGURES.items()
        ]
        note += f" The host in a forward + backward of ours on a dispatch made beforehand, medians of {len(known)} shapes, ms: "
        note += f"{'; '.join(medians)}."
    return f"{markdown_table(header, rows)}\n\n{note}"


def memory_table(record: Record) -> str:
    """Saved and peak MiB by shape."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "saved MiB: ours", *(LABELS[name] for name in others)]
    header += ["peak MiB: ours", *(LABELS[name] for name in others)]
    rows = []
    for row in record["rows"]:
        line = [layer_shape(row)]
        for field in ("saved_MiB", "peak_fwdbwd_MiB"):
            line += [number(row["peers"][n][field], 0) if n in row["peers"] else "–" for n in (OURS, *others)]
        rows.append(line)
    means = []
    for name in others:
        pairs = [(row["peers"][OURS], row["peers"][name]) for row in record["rows"] if name in row["peers"]]
        ratios = [ours["peak_fwdbwd_MiB"] / peer["peak_fwdbwd_MiB"] for ours, peer in pairs]
        span = f"{number(min(ratios))} to {number(max(ratios))}"
        means.append(f"{number(statistics.geometric_mean(ratios))} of {LABELS[name]} ({span})")
    note = f"Our peak, geometric means: {'; '.join(means)}. " if means else ""
    return f"{markdown_table(header, rows)}\n\n{note}{rows_measured_on(record)}"


def workspace_table(record: Record) -> str:
    """Bounded workspaces: peak and time, from the same file as the layer's."""
    rows = []
    for row in record.get("workspace", []):
        for name, program in row["programs"].items():
            bound = program["workspace_bytes"]
            label = LABELS.get(name, f"blazeproto, workspace {number((bound or 0) / 2**20, 0)} MiB")
            ratios = [number(program["time_to_unbounded"]), number(program["peak_to_sonic"])]
            figures = [number(program["gpu_fwdbwd_ms"]), number(program["peak_fwdbwd_MiB"], 0)]
            rows.append([shape_of(row)[0], label, *figures, *ratios])
    header = ["T (d = n = 256, E = 128, K = 4)", "program", "forward + backward ms", "peak MiB"]
    header += ["time / unbounded", "peak / SonicMoE"]
    return with_extra_note(markdown_table(header, rows), record, "workspace")


def skew_table(record: Record) -> str:
    """Skewed routings over the uniform one's time, from the same file as the layer's."""
    rows = []
    for row in record.get("skew", []):
        line = [", ".join(shape_of(row)), number(row["uniform"]["gpu_fwdbwd_ms"])]
        for kind in ("zipf", "half_on_one"):
            line += [number(row[kind]["fwd_to_uniform"]), number(row[kind]["fwdbwd_to_uniform"])]
        rows.append(line)
    header = ["T, d, n, E, K", "uniform, fwd + bwd ms", "Zipf(1.2): fwd ×", "fwd + bwd ×"]
    header += ["half on one expert: fwd ×", "fwd + bwd ×"]
    return with_extra_note(markdown_table(header, rows), record, "skew")


def products_table(record: Record) -> str:
    """Each product alone against torch's grouped_mm, gathered against contiguous, and its layer form against its floor."""
    rows = []
    for row in record["rows"]:
        times = [number(row.get(f"{version}_ms"), 3) for version in ("torch", "plain", "gathered", "layer")]
        ratios = [
            number(row.get(field)) for field in ("plain_to_torch_speed", "gathered_to_plain_speed", "layer_to_floor")
        ]
        rows.append([row["product"], ", ".join(shape_of(row)), *times, number(row["floor_ms"], 3), *ratios])
    header = ["product", "T, d, n, E, K", "torch grouped_mm", "plain store", "gathered", "in the layer", "floor"]
    header += ["speed to grouped_mm", "gathered to contiguous", "layer / floor"]
    return f"{markdown_table(header, rows)}\n\nms of GPU time. {measured_on(record)}"


def dispatch_table(record: Record) -> str:
    """Dispatch builders by model: every column that ends in _ms (`paper_hash_ms`: "paper hash"), and the ratio to the floor."""
    fields = [field for field in record["rows"][0] if field.endswith("_ms")]
    names = [{"torch_sort_ms": "torch.sort", "sort_ms": "CuPy sort"}.get(f, f[:-3].replace("_", " ")) for f in fields]
    rows = []
    for row in record["rows"]:
        line = [str(row["name"]), *(str(row[key]) for key in "TEK"), *(number(row.get(f), 3) for f in fields)]
        rows.append([*line, number(row["tiled_ms"] / row["floor_ms"])])
    return f"{markdown_table(['model', 'T', 'E', 'K', *names, 'tiled / floor'], rows)}\n\nms of GPU time. {measured_on(record)}"


def topk_table(record: Record) -> str:
    """The fused top-k against torch's."""
    rows = []
    for row in record.get("rows", [record]):
        ratios = [number(row["fused_ms"] / row["floor_ms"]), number(row["torch_ms"] / row["fused_ms"], 1)]
        times = [number(row[field], 3) for field in ("fused_ms", "torch_ms", "floor_ms")]
        rows.append([row["score"], row["dtype"], str(row["T"]), str(row["E"]), str(row["K"]), *times, *ratios])
    header = ["scores", "logits", "T", "E", "K", "fused ms", "torch ms", "floor ms", "fused / floor", "torch / fused"]
    return f"{markdown_table(header, rows)}\n\nms of GPU time; torch: its topk and softmax or sigmoid. {measured_on(record)}"


def small_dispatch_table(record: Record) -> str:
    """A dispatch of few tokens, where launching counts."""
    fields = ("gpu_us", "host_us", "host_us_allocating")
    rows = [[*(str(row[key]) for key in "TEK"), *(number(row[key], 1) for key in fields)] for row in record["small"]]
    return markdown_table(["T", "E", "K", "GPU µs", "host µs, into arrays given", "host µs, allocating"], rows)


def rounding_table(record: Record) -> str:
    """Token rounding against plain top-k: model TFLOP/s of both, and the gain."""
    rows = []
    for row in record["rows"]:
        plain, rounded = row["top_k"], row["rounded"]
        line = [", ".join(shape_of(row)), number(100 * (plain["padded_rows"] / plain["rows"] - 1), 1)]
        for part in ("fwd", "bwd"):
            line += [number(figures[f"{part}_tflops"], 0) for figures in (plain, rounded)]
        rows.append(line + [number(row[f"{part}_gain"], 3) for part in ("fwd", "bwd", "fwdbwd")])
    header = ["T, d, n, E, K", "empty rows of tiles, %", "forward: top-k", "rounded", "backward: top-k", "rounded"]
    header += ["gain forward", "backward", "both"]
    return f"{markdown_table(header, rows)}\n\nModel TFLOP/s. {measured_on(record)}"


# name of a table -> (results file, what makes it)
TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "layer": ("layer", layer_table),
    "eager": ("layer", eager_table),
    "memory": ("layer", memory_table),
    "workspace": ("layer", workspace_table),
    "skew": ("layer", skew_table),
    "products": ("products", products_table),
    "dispatch": ("dispatch", dispatch_table),
    "small_dispatch": ("dispatch", small_dispatch_table),
    "topk": ("topk", topk_table),
    "rounding": ("rounding", rounding_table),
}


def fill(text: str, results: Path) -> str:
    """The text with every marked table made from the results. Doing it twice changes nothing."""

    def replacement(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise ValueError(f"results marker: expected one of {', '.join(TABLES)}, got {name!r}")
        file, make = TABLES[name]
        record = load(file, results)
        if record is None:
            return found[0]
        return f"<!-- results:{name} -->\n\n{make(record)}\n\n<!-- /results:{name} -->"

    return re.sub(r"<!-- results:(?P<name>\S+) -->.*?<!-- /results:(?P=name) -->", replacement, text, flags=re.DOTALL)
