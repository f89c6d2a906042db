"""Fill the tables and measured sentences of README.md and docs/*.md, and draw docs/*.png, from results/.

python -m scripts.bench.plot_results             # every page that has markers; the pictures of PICTURES
python -m scripts.bench.plot_results --check     # writes nothing; exit code 1, and names, if a page is out of date
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from scripts.bench.common import REPOSITORY, RESULTS
from scripts.bench.cost_tables import name_of_table, plot_predicted
from scripts.bench.headline_tables import has_runs
from scripts.bench.identity import rows_in
from scripts.bench.markdown import LABELS, OURS, Record, origin, plain_shape, signs_of
from scripts.bench.models.tables import share_of_floor
from scripts.bench.paper.cells import programs_in, tflops
from scripts.bench.paper.sonicmoe_tables import ROUTINGS
from scripts.bench.paper.steps_tables import plot_policies, plot_waterfall
from scripts.bench.result_tables import MARKED, PEERS, fill, layer_peers, load
from scripts.bench.training_tables import plot_runs
from scripts.command import argument_parser, refuse

DOCS = REPOSITORY / "docs"

CAPTION = "Description"  # among a PNG file's texts

Value = Callable[[Record, str], float | None]  # of a row, and a program's name

COLORS = {
    OURS: "#d1495b",
    "sonic": "#00798c",
    "bmm_ub": "#8d96a3",
    "torch_grouped": "#edae49",
    "scattermoe": "#66a182",
    "mb_sparse": "#2e4057",
    "grouped_mm": "#9c6b4a",
    "dmoe": "#b5c99a",
    "sequential": "#7b5ea7",
}


def short_name(row: Record, sign: str) -> str:
    T, d, n, E, K = (row["cfg"][key] for key in "TdnEK")
    tokens = f"{T >> 20}M" if T >= 1 << 20 else f"{T >> 10}k"
    return f"{tokens}{sign}\nd{d}\nn{n}\nE{E}\nK{K}"


def caption(record: Record) -> str:
    """The text below a picture: `origin` of its rows, as plain text."""
    drawn = next(record[name] for name in ("series", "rows", "weak_scaling") if record.get(name))
    rows = [*rows_in(drawn)]
    return origin(rows, *(("torch",) if "series" in record else PEERS)).replace("*", "")


def save(figure: Figure, record: Record, path: Path) -> None:
    """With its caption, which the file has as text too."""
    width = 200 if figure.get_figwidth() > 8 else 100  # characters a line
    figure.supxlabel(textwrap.fill(caption(record), width), fontsize=8)
    figure.savefig(path, dpi=110, metadata={CAPTION: caption(record)})


def caption_in(path: Path) -> str | None:
    """The caption of a picture that `save` has written."""
    with Image.open(path) as picture:
        return picture.info.get(CAPTION)


def bars(axis: Any, rows: Sequence[Record], names: Sequence[str], value: Value) -> None:
    """Grouped bars: a group for each row, a bar for each name that has a value."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [value(row, name) for row in rows]
        places = [place - 0.4 + (index + 0.5) * width for place, height in enumerate(heights) if height is not None]
        axis.bar(places, [h for h in heights if h is not None], width, label=LABELS[name], color=COLORS[name])
    axis.set_xticks(range(len(rows)), list(map(short_name, rows, signs_of(rows))), fontsize=7)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)


def plot_models(record: Record, path: Path) -> None:
    """Share of the floor's speed that layers of models reach, forward + backward; 690 pixels wide, to be read at that width."""
    rows = [row for row in record["rows"] if has_runs(row)][::-1]
    if not rows:
        return
    names = programs_in(rows)
    figure = Figure(figsize=(6.9, 1.2 + 0.42 * len(rows)), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        bars = [(place, of_floor(row, name)) for place, row in enumerate(rows) if name in row["programs"]]
        places = [place + 0.4 - (index + 0.5) * height for place, _ in bars]
        axis.barh(places, [share for _, share in bars], height, label=LABELS[name], color=COLORS[name])
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(rows)), [row["label"] + sign for row, sign in zip(rows, signs_of(rows), strict=True)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlabel("one MoE layer, forward + backward: share of the hardware floor's speed")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=math.ceil(len(names) / 2), loc="outside upper center", frameon=False)
    save(figure, record, path)


def of_floor(row: Record, name: str) -> float:
    """The share that a program of a row of models has; SonicMoE's of another run by ours that was measured beside it."""
    program = row["programs"][name]
    beside = program.get("ours_fwdbwd_ms", row["programs"][OURS]["fwdbwd_ms"])
    ours = share_of_floor(row) or 0.0
    return ours * float(beside / program["fwdbwd_ms"]) if name != OURS else ours


def plot_figure_10(record: Record, path: Path) -> None:
    """MegaBlocks Figure 10: the forward over E, means and standard deviations of the rounds."""
    figure = Figure(figsize=(6.9, 4.5), layout="constrained")
    axis = figure.subplots()
    experts = [row["cfg"]["E"] for row in record["rows"]]
    for name in programs_in(record["rows"]):
        found = [row["programs"][name] for row in record["rows"]]
        means, deviations = ([each[field] for each in found] for field in ("fwd_ms", "deviation_ms"))
        axis.errorbar(
            experts, means, deviations, fmt="o-", capsize=3, label=LABELS[name], color=COLORS[name], markersize=3
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="experts", ylabel="forward, ms", title="MegaBlocks' Figure 10: T = 16384, d = 768, n = 3072, K = 1")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    save(figure, record, path)


def plot_experts(record: Record, path: Path) -> None:
    """Share of the floor's speed (1 = the floor) that each program of the experts alone reaches."""

    def share(part: str, row: Record, name: str) -> float | None:
        floor = row["floor_fwd_ms"] + (row["floor_bwd_ms"] if part == "fwdbwd" else 0.0)
        return floor / row["peers"][name][f"gpu_{part}_ms"] if name in row["peers"] else None

    panels = {
        f"The experts of one MoE layer, {title}: share of the hardware floor's speed (higher is faster)": partial(
            share, part
        )
        for part, title in (("fwd", "forward"), ("fwdbwd", "forward + backward"))
    }
    plot_panels(record, [OURS, *layer_peers(record)], panels, "floor time / measured time", path)


def plot_memory(record: Record, path: Path) -> None:
    """Saved and peak bytes over ours."""

    def over_ours(field: str, row: Record, name: str) -> float | None:
        return row["peers"][name][field] / row["peers"][OURS][field] if name in row["peers"] else None

    titles = {"saved_MiB": "saved for backward", "peak_fwdbwd_MiB": "peak over forward + backward, gradients included"}
    panels = {
        f"The experts of one MoE layer, {title}: times ours (lower is less memory)": partial(over_ours, field)
        for field, title in titles.items()
    }
    plot_panels(record, [OURS, *layer_peers(record)], panels, "bytes / ours", path)


def plot_panels(record: Record, names: Sequence[str], panels: Mapping[str, Value], ylabel: str, path: Path) -> None:
    """Bars over all shapes, a panel for each title and what it shows of a row and a program."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    axes = figure.subplots(len(panels), 1)
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        bars(axis, record["rows"], names, value)
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylabel(ylabel)
        axis.set_title(title)
    axes[0].legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, 1.2), frameon=False)
    save(figure, record, path)


def plot_dispatch(record: Record, path: Path) -> bool:
    """Dispatch time over T and over E, if the record has such series: {"series": {"T": [rows], "E": [rows]}}."""
    series = record.get("series")
    if not series:
        return False
    methods = {
        "tiled_ms": "tiled",
        "dense_ms": "dense",
        "sort_ms": "CuPy sort",
        "torch_sort_ms": "torch.sort",
        "floor_ms": "floor",
    }
    figure = Figure(figsize=(6 * len(series), 4), layout="constrained")
    axes = figure.subplots(1, len(series), squeeze=False)
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
    save(figure, record, path)
    return True


def plot_prediction(record: Record, path: Path, name: Callable[[Record], str], title: str) -> None:
    """Measured over predicted times of whole layers or of products."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    plot_predicted(figure.subplots(), record["rows"], name, title)
    save(figure, record, path)


def plot_drawn(record: Record, path: Path, draw: Callable[[Any, Record], None], size: tuple[float, float]) -> None:
    """A figure that ``draw`` fills from the record."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure, record)
    save(figure, record, path)


PREDICTED_LAYERS = partial(plot_prediction, name=name_of_table, title="whole layers, forward + backward; lines: 10 %")
PREDICTED_PRODUCTS = partial(plot_prediction, name=itemgetter("product"), title="products; lines: 10 %")


WEAK_SCALING = {
    "fsdp": ("#00798c", "o-"),
    "hsdp": ("#8d96a3", "s-"),
    "ep": ("#d1495b", "o--"),
    "ep+fsdp": ("#edae49", "s--"),
}


def plot_weak_scaling(record: Record, path: Path) -> None:
    """MoEBlaze Figure 7, if the record has such rows: throughput a GPU over one GPU's, by number of GPUs."""
    rows = record.get("weak_scaling")
    if not rows:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for mode, (color, style) in WEAK_SCALING.items():
        if points := sorted((row["gpus"], row["efficiency"]) for row in rows if row["mode"] == mode):
            axis.plot(*zip(*points, strict=True), style, color=color, label=mode)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="GPUs", ylabel="tokens/s a GPU over one GPU's", title="Weak scaling", ylim=(0, 1.1))
    axis.set_xticks(sorted({row["gpus"] for row in rows}))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, record, path)


def panels_of(record: Record, rows: Sequence[Record], panels: Mapping[str, Value], path: Path) -> None:
    """Bars of the peers of some rows, a panel for each title; a row is named by its shape, and its activation if they differ."""
    figure = Figure(figsize=(16, 4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    names = programs_in(list(rows))
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        bars(axis, rows, names, value)
        axis.set_title(title)
        if len({row["activation"] for row in rows}) > 1:
            ticks = zip(axis.get_xticklabels(), rows, strict=True)
            axis.set_xticks(axis.get_xticks(), [f"{tick.get_text()}\n{row['activation']}" for tick, row in ticks])
    axes[0].legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, 1.25), frameon=False)
    save(figure, record, path)


def field_of(field: str, row: Record, name: str) -> float | None:
    found: float | None = row["programs"].get(name, {}).get(field)
    return found


def plot_moeblaze(record: Record, path: Path) -> None:
    """MoEBlaze Figures 3 to 6: what is saved, and time, ours and MegaBlocks'."""
    titles = {"saved_MiB": "saved for backward, MiB", "fwdbwd_ms": "forward + backward, ms"}
    titles["eager_fwdbwd_ms"] = "the same as eager calls, ms"
    rows = sorted(record["rows"], key=lambda row: row["activation"])
    panels = {f"MoEBlaze's configurations: {title}": partial(field_of, field) for field, title in titles.items()}
    panels_of(record, rows, panels, path)


def plot_sonicmoe(record: Record, path: Path) -> None:
    """SonicMoE Figures 6a and 5: TFLOP/s by program, forward and backward, and what is saved."""
    panels: dict[str, Value] = {
        f"SonicMoE's configurations: {title}, TFLOP/s": lambda row, name, part=part: tflops(row, name, part)  # type: ignore[misc]
        for part, title in (("fwd", "forward"), ("bwd", "backward"))
    }
    panels["SonicMoE's configurations: saved for backward, MiB"] = partial(field_of, "saved_MiB")
    panels_of(record, record["rows"], panels, path)


def plot_kernels(record: Record, path: Path) -> None:
    """SonicMoE Figure 2a: milliseconds by kernel, stacked, products in colour, with the speed of ours where it is known."""
    figure = Figure(figsize=(16, 6), layout="constrained")
    axes = figure.subplots(1, 2)
    (row, *_) = record["rows"]
    for axis, phase in zip(axes, ("forward", "backward"), strict=True):
        for place, name in enumerate(row["programs"]):
            bottom = 0.0
            kernels = sorted(row["programs"][name][phase]["kernels"], key=lambda kernel: not kernel["multiplies"])
            for kernel in kernels:
                color = COLORS[name] if kernel["multiplies"] else "#d9d9d9"
                axis.bar(place, kernel["ms"], 0.7, bottom=bottom, color=color, edgecolor="white", linewidth=1)
                if kernel["ms"] > 0.05 * sum(each["ms"] for each in kernels):
                    axis.text(place, bottom + kernel["ms"] / 2, said_of(kernel), ha="center", va="center", fontsize=7)
                bottom += kernel["ms"]
        axis.set_xticks(range(len(row["programs"])), [LABELS[name] for name in row["programs"]])
        axis.set(title=f"{phase}, {plain_shape(row)}: products in colour", ylabel="ms")
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, record, path)


def plot_rounding(record: Record, path: Path) -> None:
    """SonicMoE Figures 7 and 3: TFLOP/s of each routing over E, and the empty rows of top-k's tiles."""
    figure = Figure(figsize=(16, 9), layout="constrained")
    groups = list(dict.fromkeys(row["label"] for row in record["rows"]))
    axes = figure.subplots(3, len(groups), squeeze=False)
    titles = {"fwd_tflops": "forward TFLOP/s", "bwd_tflops": "backward TFLOP/s"}
    for column, group in enumerate(groups):
        rows = [row for row in record["rows"] if row["label"] == group]
        experts = [row["cfg"]["E"] for row in rows]
        for axis, (field, title) in zip(axes[:, column], titles.items(), strict=False):
            for name, said in ROUTINGS.items():
                axis.plot(experts, [row[name][field] for row in rows], "o-", label=said, markersize=3)
            axis.set(ylabel=title)
        axes[2, column].plot(experts, [100 * row["wasted"] for row in rows], "ko-", markersize=3)
        axes[2, column].set(ylabel="empty rows of tiles, %", xlabel="E")
        axes[0, column].set(title=f"{group}: T, d, n, K = {', '.join(str(rows[0]['cfg'][key]) for key in 'TdnK')}")
    for axis in axes.flat:
        axis.set(xscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    save(figure, record, path)


def said_of(kernel: Record) -> str:
    """Milliseconds of a kernel; of one whose work is known TFLOP/s, or TB/s where it multiplies no matrices."""
    said = f"{kernel['ms']:.2f} ms"
    if not kernel.get("least_bytes"):
        return said
    if kernel["multiplies"]:
        return f"{said}, {1e-9 * kernel['operations'] / kernel['ms']:.0f} TFLOP/s"
    return f"{said}, {1e-9 * kernel['least_bytes'] / kernel['ms']:.1f} TB/s"


PICTURES: tuple[tuple[str, Callable[[Record, Path], object], str], ...] = (
    ("headline", plot_models, "speed.png"),
    ("models/figure_10", plot_figure_10, "models_figure_10.png"),
    ("layer", plot_experts, "experts.png"),
    ("layer", plot_memory, "memory.png"),
    ("dispatch", plot_dispatch, "dispatch.png"),
    ("module", PREDICTED_LAYERS, "predicted_layers.png"),
    ("products", PREDICTED_PRODUCTS, "predicted_products.png"),
    ("distributed", plot_weak_scaling, "weak_scaling.png"),
    ("paper/moeblaze-figures", plot_moeblaze, "paper_moeblaze.png"),
    ("paper/sonicmoe-layers", plot_sonicmoe, "paper_sonicmoe.png"),
    ("paper/sonicmoe-kernels", plot_kernels, "paper_kernels.png"),
    ("paper/sonicmoe-rounding", plot_rounding, "paper_rounding.png"),
    ("paper/waterfall", partial(plot_drawn, draw=plot_waterfall, size=(14, 8)), "waterfall.png"),
    ("paper/policies", partial(plot_drawn, draw=plot_policies, size=(10, 4.5)), "policies.png"),
    ("training", partial(plot_drawn, draw=plot_runs, size=(12, 5)), "training.png"),
    ("training", partial(plot_drawn, draw=partial(plot_runs, item="fp8"), size=(12, 5)), "fp8_training.png"),
)


def marked_pages(readme: Path, docs: Path) -> list[Path]:
    """README and the pages of docs/ that have markers."""
    return [page for page in (readme, *sorted(docs.glob("*.md"))) if page.exists() and MARKED.search(page.read_text())]


def stale_pictures(results: Path, docs: Path) -> list[Path]:
    """Pictures whose captions no longer say of what they are."""
    pictures = ((load(name, results), docs / picture) for name, _, picture in PICTURES)
    return [path for record, path in pictures if record and path.exists() and caption_in(path) != caption(record)]


def main() -> None:
    parser = argument_parser("scripts.bench.plot_results", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=REPOSITORY / "README.md")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args()
    if not any(options.results.glob("*.json")):
        refuse(f"--results: expected a folder of results, but {options.results} has none; nothing was written")
    filled = {page: fill(page.read_text(), options.results) for page in marked_pages(options.readme, options.docs)}
    stale = [page for page, text in filled.items() if page.read_text() != text]
    if options.check:
        stale += stale_pictures(options.results, options.docs)
        if stale:
            sys.exit(f"out of date: {', '.join(map(str, stale))}")
        print("all pages are up to date")
        return
    for page in stale:
        page.write_text(filled[page])
    options.docs.mkdir(parents=True, exist_ok=True)
    for name, plot, picture in PICTURES:
        if (record := load(name, options.results)) is not None:
            plot(record, options.docs / picture)


if __name__ == "__main__":
    main()
