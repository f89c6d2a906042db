"""Fill the tables and measured sentences of README.md and docs/*.md, and draw docs/*.png, from results/.

python -m scripts.bench.plot_results             # every page that has markers; the pictures of PICTURES
python -m scripts.bench.plot_results --check     # writes nothing; exit code 1, and names, if a page is out of date
"""

import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib import colors, rc_context
from matplotlib.figure import Figure
from PIL import Image

from scripts.bench import training_tables
from scripts.bench.common import REPOSITORY, RESULTS
from scripts.bench.cost_tables import plot_predicted
from scripts.bench.headline_tables import has_runs
from scripts.bench.identity import rows_in
from scripts.bench.markdown import LABELS, OURS, Record, RowsOf, look_up, origin, plain_shape, rows_of, signs_of, values
from scripts.bench.models.tables import share_of_floor
from scripts.bench.paper.tables import (
    FIELDS,
    POLICIES,
    ROUTINGS,
    STEPS,
    longer,
    of,
    predicted_longer,
    programs_in,
    ratio,
    with_speeds,
)
from scripts.bench.result_tables import MARKED, PEERS, fill, layer_rows, load
from scripts.command import argument_parser, refuse

DOCS = REPOSITORY / "docs"
CAPTION = "Description"  # among a PNG file's texts
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
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


@dataclass(frozen=True)
class Picture:
    """A picture of a results file."""

    file: str
    draw: Callable[[Any, Record], None]
    size: tuple[float, float]  # inches
    rows: RowsOf = "rows"  # that it shows; without any it is not drawn
    packages: Sequence[str] = PEERS  # whose versions the caption has

    def caption(self, record: Record) -> str:
        """The text below: `origin` of the rows, as plain text."""
        return origin(rows_in(rows_of(self.rows, record)), *self.packages).replace("*", "")

    def save(self, record: Record, path: Path) -> None:
        """Draw it, with its caption, which the file has as text too."""
        if not rows_of(self.rows, record):
            return
        with rc_context(STYLE):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure, record)
            width = 200 if figure.get_figwidth() > 8 else 100  # characters a line
            figure.supxlabel(textwrap.fill(self.caption(record), width), fontsize=8)
            figure.savefig(path, dpi=110, metadata={CAPTION: self.caption(record)})


def caption_in(path: Path) -> str | None:
    """The caption of a picture that `Picture.save` has written."""
    with Image.open(path) as picture:
        return picture.info.get(CAPTION)


# -------------------------------------------------------------------------------------------- bars, a panel for a value


def short_name(row: Record, sign: str) -> str:
    T, d, n, E, K = (row["cfg"][key] for key in "TdnEK")
    tokens = f"{T >> 20}M" if T >= 1 << 20 else f"{T >> 10}k"
    return f"{tokens}{sign}\nd{d}\nn{n}\nE{E}\nK{K}"


def bars(axis: Any, rows: Sequence[Record], names: Sequence[str], path: str) -> None:
    """Grouped bars: a group for each row, a bar for each name that has a value at ``path``, in which {} is the name."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        found = {place: look_up(row, path.format(name)) for place, row in enumerate(rows)}
        heights = {place - 0.4 + (index + 0.5) * width: value for place, value in found.items() if value is not None}
        axis.bar(heights.keys(), heights.values(), width, label=LABELS[name], color=COLORS[name])
    several = len({row.get("activation") for row in rows}) > 1
    ticks = [
        f"{short_name(row, sign)}\n{row['activation']}" if several else short_name(row, sign)
        for row, sign in zip(rows, signs_of(rows), strict=True)
    ]
    axis.set_xticks(range(len(rows)), ticks, fontsize=7)
    axis.set_xlim(-0.6, len(rows) - 0.4)


def panels(shown: Mapping[str, str], rows: Sequence[Record], above: float, figure: Any) -> Any:
    """Bars over all rows, a panel for each title and path. above: where the legend is, in heights of a panel."""
    names = programs_in([*rows])
    figure.set_size_inches(16, 4 * len(shown))
    axes = figure.subplots(len(shown), 1)
    for axis, (title, path) in zip(axes, shown.items(), strict=True):
        bars(axis, rows, names, path)
        axis.set_title(title)
    axes[0].legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, above))
    return axes


def plot_paper(shown: Mapping[str, str], figure: Any, record: Record) -> None:
    """A paper's layers, by activation."""
    panels(shown, sorted(with_speeds(record), key=itemgetter("activation")), 1.25, figure)


def plot_experts(shown: Mapping[str, str], ylabel: str, figure: Any, record: Record) -> None:
    """Ratios of the programs of the experts alone, around 1."""
    rows = [row | {"floor_fwdbwd_ms": row["floor_fwd_ms"] + row["floor_bwd_ms"]} for row in layer_rows(record)]
    for axis in panels(shown, rows, 1.2, figure):
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylabel(ylabel)


ONE_LAYER = "The experts of one MoE layer"
SPEED = "share of the hardware floor's speed (higher is faster)"
SPEEDS = {
    f"{ONE_LAYER}, forward: {SPEED}": "floor_fwd_ms / programs.{}.gpu_fwd_ms",
    f"{ONE_LAYER}, forward + backward: {SPEED}": "floor_fwdbwd_ms / programs.{}.gpu_fwdbwd_ms",
}
LESS = "times ours (lower is less memory)"
PEAK = "peak over forward + backward, gradients included"
MEMORY = {
    f"{ONE_LAYER}, saved for backward: {LESS}": ratio("{}", OURS, "saved_MiB"),
    f"{ONE_LAYER}, {PEAK}: {LESS}": ratio("{}", OURS, "peak_fwdbwd_MiB"),
}
MOEBLAZE = {  # Figures 3 to 6
    "MoEBlaze's configurations: saved for backward, MiB": of("{}", "saved_MiB"),
    "MoEBlaze's configurations: forward + backward, ms": of("{}", "fwdbwd_ms"),
    "MoEBlaze's configurations: the same as eager calls, ms": of("{}", "eager_fwdbwd_ms"),
}
SONICMOE = {  # Figures 6a and 5
    "SonicMoE's configurations: forward, TFLOP/s": of("{}", "fwd_tflops"),
    "SonicMoE's configurations: backward, TFLOP/s": of("{}", "bwd_tflops"),
    "SonicMoE's configurations: saved for backward, MiB": of("{}", "saved_MiB"),
}


# -------------------------------------------------------------------------------------------------------- models, lines


def with_runs(record: Record) -> list[Record]:
    return [row for row in record["rows"] if has_runs(row)]


def plot_models(figure: Any, record: Record) -> None:
    """Share of the floor's speed that layers of models reach, forward + backward; 690 pixels wide, to be read at that width."""
    rows = with_runs(record)[::-1]
    names = programs_in(rows)
    figure.set_size_inches(6.9, 1.2 + 0.42 * len(rows))
    axis = figure.subplots()
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        shares = {place: share_of_floor(row, name) for place, row in enumerate(rows) if name in row["programs"]}
        places = [place + 0.4 - (index + 0.5) * height for place in shares]
        axis.barh(places, shares.values(), height, label=LABELS[name], color=COLORS[name])
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(rows)), [row["label"] + sign for row, sign in zip(rows, signs_of(rows), strict=True)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlabel("one MoE layer, forward + backward: share of the hardware floor's speed")
    figure.legend(ncols=math.ceil(len(names) / 2), loc="outside upper center")


def plot_figure_10(figure: Any, record: Record) -> None:
    """MegaBlocks Figure 10: the forward over E, means and standard deviations of the rounds."""
    axis = figure.subplots()
    experts = [row["cfg"]["E"] for row in record["rows"]]
    for name in programs_in(record["rows"]):
        means, deviations = (values(record["rows"], of(name, field)) for field in ("fwd_ms", "deviation_ms"))
        style = {"label": LABELS[name], "color": COLORS[name]}
        axis.errorbar(experts, means, deviations, fmt="o-", capsize=3, markersize=3, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="experts", ylabel="forward, ms", title="MegaBlocks' Figure 10: T = 16384, d = 768, n = 3072, K = 1")
    axis.legend()


METHODS = {
    "tiled_ms": "tiled",
    "dense_ms": "dense",
    "sort_ms": "CuPy sort",
    "torch_sort_ms": "torch.sort",
    "floor_ms": "floor",
}


def plot_dispatch(figure: Any, record: Record) -> None:
    """Dispatch time over T and over E: {"series": {"T": [rows], "E": [rows]}}."""
    series = record["series"]
    figure.set_size_inches(6 * len(series), 4)
    axes = figure.subplots(1, len(series), squeeze=False)[0]
    for axis, (variable, rows) in zip(axes, series.items(), strict=True):
        for field, label in METHODS.items():
            points = [(row[variable], row[field]) for row in rows if row.get(field) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), "k:" if label == "floor" else "o-", label=label, markersize=3)
        fixed = ", ".join(f"{key} = {rows[0][key]}" for key in "TEK" if key != variable and key in rows[0])
        axis.set(xlabel=variable, ylabel="GPU ms", title=f"dispatch, {fixed}", xscale="log", yscale="log")
        axis.legend()


WEAK_SCALING = {
    "fsdp": ("#00798c", "o-"),
    "hsdp": ("#8d96a3", "s-"),
    "ep": ("#d1495b", "o--"),
    "ep+fsdp": ("#edae49", "s--"),
}


def plot_weak_scaling(figure: Any, record: Record) -> None:
    """MoEBlaze Figure 7: throughput a GPU over one GPU's, by number of GPUs."""
    rows, axis = record["weak_scaling"], figure.subplots()
    for mode, (color, style) in WEAK_SCALING.items():
        points = sorted((row["gpus"], row["efficiency"]) for row in rows if row["mode"] == mode)
        if points:
            axis.plot(*zip(*points, strict=True), style, color=color, label=mode)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="GPUs", ylabel="tokens/s a GPU over one GPU's", title="Weak scaling", ylim=(0, 1.1))
    axis.set_xticks(sorted({row["gpus"] for row in rows}))
    axis.legend()


def plot_kernels(figure: Any, record: Record) -> None:
    """SonicMoE Figure 2a: milliseconds by kernel, stacked, products in colour, with the speed of ours where it is known."""
    row = record["rows"][0]
    for axis, phase in zip(figure.subplots(1, 2), ("forward", "backward"), strict=True):
        for place, (name, phases) in enumerate(row["programs"].items()):
            kernels = sorted(phases[phase]["kernels"], key=lambda kernel: not kernel["multiplies"])
            whole, bottom = sum(kernel["ms"] for kernel in kernels), 0.0
            for kernel in kernels:
                color = COLORS[name] if kernel["multiplies"] else "#d9d9d9"
                axis.bar(place, kernel["ms"], 0.9, bottom=bottom, color=color, edgecolor="white", linewidth=0.5)
                if kernel["ms"] > 0.05 * whole:
                    ink = "white" if sum(colors.to_rgb(color)) < 1 else "black"
                    axis.text(
                        place, bottom + kernel["ms"] / 2, said_of(kernel), color=ink, ha="center", va="center", size=7
                    )
                bottom += kernel["ms"]
        axis.set_xticks(range(len(row["programs"])), [LABELS[name] for name in row["programs"]])
        axis.set(title=f"{phase}, T, d, n, E, K = {plain_shape(row)}: products in colour", ylabel="ms")


def said_of(kernel: Record) -> str:
    """Milliseconds of a kernel; of one whose work is known TFLOP/s, or TB/s where it multiplies no matrices."""
    work, unit, digits = ("operations", "TFLOP/s", 0) if kernel["multiplies"] else ("least_bytes", "TB/s", 1)
    speed = f", {1e-9 * kernel[work] / kernel['ms']:.{digits}f} {unit}" if kernel.get("least_bytes") else ""
    return f"{kernel['ms']:.2f} ms{speed}"


def plot_rounding(figure: Any, record: Record) -> None:
    """SonicMoE Figures 7 and 3: TFLOP/s of each routing over E, and the empty rows of top-k's tiles."""
    groups = list(dict.fromkeys(row["label"] for row in record["rows"]))
    axes = figure.subplots(3, len(groups), squeeze=False)
    for (forward, backward, empty), group in zip(axes.T, groups, strict=True):
        rows = [row for row in record["rows"] if row["label"] == group]
        experts = [row["cfg"]["E"] for row in rows]
        for axis, part, title in ((forward, "fwd", "forward"), (backward, "bwd", "backward")):
            for name, said in ROUTINGS.items():
                axis.plot(experts, [row[name][f"{part}_tflops"] for row in rows], "o-", label=said, markersize=3)
            axis.set(ylabel=f"{title} TFLOP/s")
        empty.plot(experts, [100 * row["wasted"] for row in rows], "ko-", markersize=3)
        empty.set(ylabel="empty rows of tiles, %", xlabel="E")
        forward.set(title=f"{group}: T, d, n, K = {', '.join(str(rows[0]['cfg'][key]) for key in 'TdnK')}")
    for axis in axes.flat:
        axis.set(xscale="log")
    axes[0, 0].legend()


def plot_waterfall(figure: Any, record: Record) -> None:
    """Time and saved bytes of each step, a panel for each layer and field."""
    axes = figure.subplots(2, len(record["rows"]), squeeze=False)
    for row, panels in zip(record["rows"], axes.T, strict=True):
        names = [name for name in ("mb_sparse", *STEPS) if name in row["programs"]]
        for axis, (field, unit) in zip(panels, FIELDS.items(), strict=True):
            axis.bar(names, [row["programs"][name][field] for name in names], color="#d1495b")
            axis.set(ylabel=f"{'forward + backward' if unit == 'ms' else 'saved'}, {unit}")
            axis.tick_params("x", rotation=60)
        panels[0].set_title(plain_shape(row))


def plot_policies(figure: Any, record: Record) -> None:
    """Each policy's time over "minimal"'s, over T and over n: measured, and dotted the prediction."""
    axes = figure.subplots(1, 2, sharey=True)
    for axis, letter in zip(axes, "Tn", strict=True):
        rows = sorted((row for row in record["rows"] if row["label"] == letter), key=lambda row: row["cfg"][letter])
        sizes = [row["cfg"][letter] for row in rows]
        for color, policy in zip(("#00798c", "#d1495b"), POLICIES[1:], strict=True):
            predicted = [predicted_longer(policy, row) for row in rows]
            axis.plot(sizes, values(rows, longer(policy)), "o-", color=color, label=policy)
            axis.plot(sizes, predicted, ":", color=color, label=f"{policy}, predicted")
        axis.set(xscale="log", xlabel=letter, ylabel='time over that of "minimal"')
    axes[0].legend()


# ------------------------------------------------------------------------------------------------------------ all pages

WIDE = (16, 8)
PICTURES = {
    "speed.png": Picture("headline", plot_models, WIDE, with_runs, (*PEERS, "transformers")),
    "models_figure_10.png": Picture("models/figure_10", plot_figure_10, (6.9, 4.5), packages=("torch",)),
    "experts.png": Picture("layer", partial(plot_experts, SPEEDS, "floor time / measured time"), WIDE),
    "memory.png": Picture("layer", partial(plot_experts, MEMORY, "bytes / ours"), WIDE),
    "dispatch.png": Picture("dispatch", plot_dispatch, WIDE, "series", ("torch",)),
    "predicted_layers.png": Picture("module", plot_predicted, (9, 6), packages=("torch",)),
    "predicted_products.png": Picture("products", plot_predicted, (9, 6)),
    "weak_scaling.png": Picture("distributed", plot_weak_scaling, (7, 4), "weak_scaling"),
    "paper_moeblaze.png": Picture(
        "paper/moeblaze-figures", partial(plot_paper, MOEBLAZE), WIDE, packages=("torch", "megablocks")
    ),
    "paper_sonicmoe.png": Picture(
        "paper/sonicmoe-layers", partial(plot_paper, SONICMOE), WIDE, packages=(*PEERS, "megablocks")
    ),
    "paper_kernels.png": Picture("paper/sonicmoe-kernels", plot_kernels, (17.5, 6), packages=(*PEERS, "megablocks")),
    "paper_rounding.png": Picture("paper/sonicmoe-rounding", plot_rounding, (16, 9)),
    "waterfall.png": Picture("paper/waterfall", plot_waterfall, (14, 8)),
    "policies.png": Picture("paper/policies", plot_policies, (10, 4.5)),
    **{
        name: Picture(
            "training",
            partial(training_tables.plot_runs, item=item),
            (12, 5),
            partial(training_tables.rows_for, item=item),
            ("torch",),
        )
        for item, name in training_tables.PICTURES.items()
    },
}
"""By their names in docs/."""


def marked_pages(readme: Path, docs: Path) -> list[Path]:
    """README and the pages of docs/ that have markers."""
    return [page for page in (readme, *sorted(docs.glob("*.md"))) if page.exists() and MARKED.search(page.read_text())]


def stale_pictures(results: Path, docs: Path) -> list[Path]:
    """Pictures whose captions no longer say of what they are."""
    return [
        docs / name
        for name, picture in PICTURES.items()
        if (record := load(picture.file, results)) is not None
        and (docs / name).exists()
        and caption_in(docs / name) != picture.caption(record)
    ]


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
    for name, picture in PICTURES.items():
        if (record := load(picture.file, options.results)) is not None:
            picture.save(record, options.docs / name)


if __name__ == "__main__":
    main()
