"""Fill the tables of README and docs/routers.md and draw docs/*.png from results/h200/*.json.

    python scripts/plot_results.py                  # both pages, docs/speed.png, docs/memory.png, docs/dispatch.png
    python scripts/plot_results.py --check          # exit code 1 if the tables are not what the results say

A page marks each table's place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced.
A table whose results are not there stays as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "results" / "h200"
DOCS = REPOSITORY / "docs"

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
COLORS = {
    OURS: "#d1495b",
    "sonic": "#00798c",
    "bmm_ub": "#8d96a3",
    "torch_grouped": "#edae49",
    "scattermoe": "#66a182",
    "mb_sparse": "#2e4057",
}


def load(name: str, results: Path) -> Record | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# ------------------------------------------------------------------------------------------------------------ tables


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not measured with these sources."
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}".replace(",", " ")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def shape_of(row: Record) -> list[str]:
    return [str(row["cfg"][key]) for key in ("T", "d", "n", "E", "K") if key in row["cfg"]]


def layer_shape(row: Record) -> str:
    """Marked where the row was measured with other sources than the rest."""
    return ", ".join(shape_of(row)) + (" †" if "other_sources" in row else "")


def backward_ms(figures: Record) -> float:
    return float(figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])


def measured_on(record: Record) -> str:
    return f"{record['gpu']}; {record['measured']}; sources `{record['sources_sha256'][:12]}`."


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
        forward = geometric_mean([peer["gpu_fwd_ms"] / ours["gpu_fwd_ms"] for peer, ours in pairs])
        backward = geometric_mean([backward_ms(peer) / backward_ms(ours) for peer, ours in pairs])
        means.append(f"{LABELS[name]} {number(forward)}× forward, {number(backward)}× backward ({len(pairs)} shapes)")
    note = f"GPU time, ms. Times of ours, geometric means: {'; '.join(means)}. {measured_on(record)}"
    marked = {tuple(row["other_sources"].values()) for row in record["rows"] if "other_sources" in row}
    note += "".join(f" †: {measured}, sources `{sources[:12]}`." for measured, sources in sorted(marked))
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
    return markdown_table(header, rows)


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
        means.append(f"{number(geometric_mean(ratios))} of {LABELS[name]} ({span})")
    note = f"Our peak, geometric means: {'; '.join(means)}." if means else ""
    return f"{markdown_table(header, rows)}\n\n{note}".rstrip()


def workspace_table(record: Record) -> str:
    """Bounded workspaces: peak and time, from the same file as the layer's."""
    rows = []
    for row in record.get("workspace", []):
        for name, program in row["programs"].items():
            bound = program["workspace_bytes"]
            label = LABELS.get(name, f"blazeproto, workspace {number((bound or 0) / 2**20, 0)} MiB")
            ratios = [number(program["time_to_unbounded"]), number(program["peak_to_sonic"])]
            rows.append(
                [
                    shape_of(row)[0],
                    label,
                    number(program["gpu_fwdbwd_ms"]),
                    number(program["peak_fwdbwd_MiB"], 0),
                    *ratios,
                ]
            )
    header = [
        "T (d = n = 256, E = 128, K = 4)",
        "program",
        "forward + backward ms",
        "peak MiB",
        "time / unbounded",
        "peak / SonicMoE",
    ]
    return markdown_table(header, rows)


def skew_table(record: Record) -> str:
    """Skewed routings over the uniform one's time, from the same file as the layer's."""
    rows = []
    for row in record.get("skew", []):
        line = [", ".join(shape_of(row)), number(row["uniform"]["gpu_fwdbwd_ms"])]
        for kind in ("zipf", "half_on_one"):
            line += [number(row[kind]["fwd_to_uniform"]), number(row[kind]["fwdbwd_to_uniform"])]
        rows.append(line)
    header = [
        "T, d, n, E, K",
        "uniform, fwd + bwd ms",
        "Zipf(1.2): fwd ×",
        "fwd + bwd ×",
        "half on one expert: fwd ×",
        "fwd + bwd ×",
    ]
    return markdown_table(header, rows)


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
    return f"{markdown_table(['model', 'T', 'E', 'K', *names, 'tiled / floor'], rows)}\n\nms of GPU time."


def topk_table(record: Record) -> str:
    """The fused top-k against torch's."""
    rows = []
    for row in record.get("rows", [record]):
        ratios = [number(row["fused_ms"] / row["floor_ms"]), number(row["torch_ms"] / row["fused_ms"], 1)]
        times = [number(row[field], 3) for field in ("fused_ms", "torch_ms", "floor_ms")]
        rows.append([str(row["T"]), str(row["E"]), str(row["K"]), *times, *ratios])
    header = ["T", "E", "K", "fused ms", "torch.topk + softmax ms", "floor ms", "fused / floor", "torch / fused"]
    return markdown_table(header, rows)


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


# ------------------------------------------------------------------------------------------------------------- plots


def short_name(row: Record) -> str:
    T, d, n, E, K = (row["cfg"][key] for key in "TdnEK")
    tokens = f"{T >> 20}M" if T >= 1 << 20 else f"{T >> 10}k"
    return f"{tokens}\nd{d}\nn{n}\nE{E}\nK{K}"


def bars(axis: Any, rows: Sequence[Record], names: Sequence[str], value: Callable[[Record, str], float | None]) -> None:
    """Grouped bars: a group for each row, a bar for each name that has a value."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [value(row, name) for row in rows]
        places = [place - 0.4 + (index + 0.5) * width for place, height in enumerate(heights) if height is not None]
        axis.bar(places, [h for h in heights if h is not None], width, label=LABELS[name], color=COLORS[name])
    axis.set_xticks(range(len(rows)), [short_name(row) for row in rows], fontsize=7)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)


def plot_speed(record: Record, path: Path) -> None:
    """Share of the floor's speed that each program reaches (1 = the floor): forward, and forward + backward."""
    import matplotlib.pyplot as plt

    names = [OURS, *layer_peers(record)]
    figure, axes = plt.subplots(2, 1, figsize=(16, 8), constrained_layout=True)
    for axis, field, title in ((axes[0], "gpu_fwd_ms", "forward"), (axes[1], "gpu_fwdbwd_ms", "forward + backward")):

        def share(row: Record, name: str, field: str = field) -> float | None:
            floor = row["floor_fwd_ms"] + (row["floor_bwd_ms"] if field == "gpu_fwdbwd_ms" else 0.0)
            return floor / row["peers"][name][field] if name in row["peers"] else None

        bars(axis, record["rows"], names, share)
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylabel("floor time / measured time")
        axis.set_title(f"One MoE layer, {title}: share of the hardware floor's speed (higher is faster)")
    axes[0].legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, 1.2), frameon=False)
    figure.supxlabel(measured_on(record).replace("`", ""), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_memory(record: Record, path: Path) -> None:
    """Saved and peak bytes over ours."""
    import matplotlib.pyplot as plt

    names = [OURS, *layer_peers(record)]
    figure, axes = plt.subplots(2, 1, figsize=(16, 8), constrained_layout=True)
    titles = {"saved_MiB": "saved for backward", "peak_fwdbwd_MiB": "peak over forward + backward, gradients included"}
    for axis, (field, title) in zip(axes, titles.items(), strict=True):

        def over_ours(row: Record, name: str, field: str = field) -> float | None:
            return row["peers"][name][field] / row["peers"][OURS][field] if name in row["peers"] else None

        bars(axis, record["rows"], names, over_ours)
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylabel("bytes / ours")
        axis.set_title(f"One MoE layer, {title}: times ours (lower is less memory)")
    axes[0].legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, 1.2), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_dispatch(record: Record, path: Path) -> bool:
    """Dispatch time over T and over E, if the record has such series: {"series": {"T": [rows], "E": [rows]}}."""
    series = record.get("series")
    if not series:
        return False
    import matplotlib.pyplot as plt

    methods = {
        "tiled_ms": "tiled",
        "dense_ms": "dense",
        "sort_ms": "CuPy sort",
        "torch_sort_ms": "torch.sort",
        "floor_ms": "floor",
    }
    figure, axes = plt.subplots(1, len(series), figsize=(6 * len(series), 4), constrained_layout=True, squeeze=False)
    for axis, (variable, rows) in zip(axes[0], series.items(), strict=True):
        for field, label in methods.items():
            points = [(row[variable], row[field]) for row in rows if row.get(field) is not None]
            if points:
                style = "k:" if field == "floor_ms" else "o-"
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=3)
        fixed = ", ".join(f"{key} = {rows[0][key]}" for key in "TEK" if key != variable and key in rows[0])
        axis.set(xlabel=variable, ylabel="GPU ms", title=f"dispatch, {fixed}", xscale="log", yscale="log")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=REPOSITORY / "README.md")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args()
    pages = [page for page in (options.readme, options.docs / "routers.md") if page.exists()]
    filled = {page: fill(page.read_text(), options.results) for page in pages}
    if options.check:
        sys.exit(any(page.read_text() != text for page, text in filled.items()))
    for page, text in filled.items():
        page.write_text(text)
    options.docs.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("Agg")
    if (layer := load("layer", options.results)) is not None:
        plot_speed(layer, options.docs / "speed.png")
        plot_memory(layer, options.docs / "memory.png")
    if (dispatch := load("dispatch", options.results)) is not None:
        plot_dispatch(dispatch, options.docs / "dispatch.png")


if __name__ == "__main__":
    main()
