"""The papers' tables as we show them, for the terminal and for docs/papers.md: columns of what was measured beside what is printed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from scripts.bench.markdown import LABELS, OURS, Column, Record, figure, number, origin, plain_shape, signs_of, table
from scripts.bench.paper import printed

Rows = list[Record]
Cell = Callable[[Record], str]
PACKAGES = ("torch", "sonic-moe", "quack-kernels", "megablocks")
SHAPE: Column = ("T, d, n, E, K", plain_shape)
LABEL: Column = ("", itemgetter("label"))
ACTIVATION: Column = ("activation", itemgetter("activation"))


class Shown(NamedTuple):
    """A table. columns: of the rows that it has; ``rows`` makes them of a file's.  note: stands below."""

    item: str  # whose results it shows
    title: str
    columns: Callable[[Rows], list[Column]]
    note: str = ""
    rows: Callable[[Rows], Rows] = list
    picture: str = ""  # in docs/


# ----------------------------------------------------------------------------------------------------------- cells, rows


def of(program: str, field: str, digits: int = 2) -> Cell:
    return figure("programs", program, field, digits=digits)


def value(row: Record, program: str, field: str) -> float | None:
    found: float | None = row["programs"].get(program, {}).get(field)
    return found


def ratio(over: str, under: str, field: str, digits: int = 2) -> Cell:
    """One program's figure over another's."""

    def cell(row: Record) -> str:
        above, below = value(row, over, field), value(row, under, field)
        return number(above / below if above and below else None, digits)

    return cell


def backward_ms(row: Record, program: str) -> float | None:
    both, forward = value(row, program, "fwdbwd_ms"), value(row, program, "fwd_ms")
    return None if both is None or forward is None else both - forward


def tflops(row: Record, program: str, part: str) -> float | None:
    """Of a SwiGLU layer: 6 T K n d operations forward ("fwd"), 12 T K n d backward ("bwd")."""
    ms = value(row, program, "fwd_ms") if part == "fwd" else backward_ms(row, program)
    sizes = row["cfg"]
    operations = (6 if part == "fwd" else 12) * sizes["T"] * sizes["K"] * sizes["n"] * sizes["d"]
    return 1e-9 * operations / ms if ms else None


def programs_in(rows: Rows) -> list[str]:
    """Of LABELS, those that some row has."""
    return [name for name in LABELS if any(name in row["programs"] for row in rows)]


def by_program(rows: Rows) -> Rows:
    """A row for each program of each row."""
    kept = ("cfg", "activation", "label", "of")
    return [
        {key: row[key] for key in kept} | {"program": name} | each for row in rows for name, each in row["programs"].items()
    ]


def looked_up(known: dict[Any, Any], key: Callable[[Record], Any], index: int, digits: int = 1) -> Cell:
    """A printed figure."""

    def cell(row: Record) -> str:
        found = known.get(key(row))
        return "–" if found is None else number(found[index], digits)

    return cell


# -------------------------------------------------------------------------------------------------------------- MoEBlaze


def figures_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [LABEL, SHAPE, ACTIVATION, ("saved MiB: ours", of(OURS, "saved_MiB", 0))]
    columns += [("ours, as Algorithm 1", of("paper", "saved_MiB", 0)), ("MegaBlocks", of("mb_sparse", "saved_MiB", 0))]
    columns.append(("printed MB: MoEBlaze, MegaBlocks", lambda row: printed_memory(row)))
    columns += [("peak MiB: ours", of(OURS, "peak_MiB", 0)), ("MegaBlocks", of("mb_sparse", "peak_MiB", 0))]
    columns += [("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")), ("MegaBlocks", of("mb_sparse", "fwdbwd_ms"))]
    columns += [("floor", lambda row: number(row["floor_fwd_ms"] + row["floor_bwd_ms"]))]
    columns += [("MegaBlocks / ours", ratio("mb_sparse", OURS, "fwdbwd_ms"))]
    columns += [("eager", ratio("mb_sparse", OURS, "eager_fwdbwd_ms"))]
    columns.append(("printed", lambda row: printed.FIGURE_SPEED[row["activation"]]))
    return [*columns, ("up projection, FLOP/B", figure("up_operations_a_byte", digits=0))]


def printed_memory(row: Record) -> str:
    return printed.FIGURE_MEMORY.get((row["label"], row["activation"]), "–")


def activation_and_tokens(row: Record) -> tuple[str, int]:
    return row["activation"], row["cfg"]["T"]


def scale_columns(rows: Rows) -> list[Column]:
    cell = partial(looked_up, printed.SCALE, activation_and_tokens)
    columns: list[Column] = [ACTIVATION, ("T", lambda row: str(row["cfg"]["T"]))]
    columns += [("fwd + bwd ms: ours", of(OURS, "fwdbwd_ms")), ("eager", of(OURS, "eager_fwdbwd_ms"))]
    columns += [("printed", cell(0)), ("MegaBlocks", of("mb_sparse", "fwdbwd_ms"))]
    columns += [("eager", of("mb_sparse", "eager_fwdbwd_ms")), ("printed", cell(2))]
    columns += [("saved MiB: ours", of(OURS, "saved_MiB", 0)), ("ours, as Algorithm 1", of("paper", "saved_MiB", 0))]
    columns += [("printed", cell(1, 0)), ("MegaBlocks", of("mb_sparse", "saved_MiB", 0)), ("printed", cell(3, 0))]
    return [*columns, ("peak MiB: ours", of(OURS, "peak_MiB", 0)), ("MegaBlocks", of("mb_sparse", "peak_MiB", 0))]


def dispatch_columns(rows: Rows) -> list[Column]:
    cell = partial(looked_up, printed.DISPATCH, itemgetter("label"))
    columns: list[Column] = [LABEL, ("E / K", lambda row: f"{row['cfg']['E']} / {row['cfg']['K']}")]
    names = {"tiled": "ours", "dense": "the paper's three steps", "sort": "CuPy sort", "torch_sort": "torch.sort"}
    columns += [(f"{'ms: ' if name == 'tiled' else ''}{head}", figure(f"{name}_ms", digits=3)) for name, head in names.items()]
    columns += [("floor", figure("floor_ms", digits=3)), ("printed: sorting", cell(0)), ("hash", cell(1))]
    columns.append(("CuPy sort / the three steps", lambda row: number(row["sort_ms"] / row["dense_ms"], 1)))
    columns.append(("CuPy sort / ours", lambda row: number(row["sort_ms"] / row["tiled_ms"], 1)))
    return [*columns, ("printed: sorting / hash", lambda row: number(printed_gain(row["label"]), 1))]


def printed_gain(model: str) -> float:
    sorting, hashed = printed.DISPATCH[model]
    return sorting / hashed


def ablation_columns(rows: Rows) -> list[Column]:
    def cell(row: Record, index: int) -> str:
        sizes = row["cfg"]
        known = printed.ABLATION.get((sizes["d"], sizes["E"], sizes["n"]))
        return "–" if known is None else str(known[printed.LINES.index(row["program"])][index])

    columns: list[Column] = [SHAPE, ("", itemgetter("program")), ("fwd + bwd ms: eager", figure("eager_fwdbwd_ms"))]
    columns += [("kernels", figure("fwdbwd_ms")), ("printed", lambda row: cell(row, 0))]
    columns += [("saved MiB", figure("saved_MiB", digits=0)), ("printed", lambda row: cell(row, 1))]
    return [*columns, ("peak MiB", figure("peak_MiB", digits=0))]


def gather_columns(rows: Rows) -> list[Column]:
    names = {"gathered": "ms: gathered", "contiguous": "rows in order", "copied_torch": "grouped_mm after a copy"}
    names |= {"torch": "grouped_mm, rows in order"}
    columns: list[Column] = [SHAPE, *[(head, figure(f"{name}_ms")) for name, head in names.items()]]
    columns.append(("gathered over rows in order, %", lambda row: number(100 * row["gather_overhead"], 1)))
    return [*columns, ("printed", lambda row: f"about {number(100 * printed.GATHER_OVERHEAD, 0)}")]


def combine_columns(rows: Rows) -> list[Column]:
    modes = list(dict.fromkeys(name for row in rows for name in row["programs"]))
    columns: list[Column] = [SHAPE]
    for field, head, digits in (("fwd_ms", "forward ms", 2), ("fwdbwd_ms", "fwd + bwd ms", 2), ("peak_MiB", "peak MiB", 0)):
        columns += [(f"{head}: {mode}" if mode == modes[0] else mode, of(mode, field, digits)) for mode in modes]
    return columns + [(f"{mode} / gather", ratio(mode, "gather", "fwdbwd_ms")) for mode in modes if mode != "gather"]


# -------------------------------------------------------------------------------------------------------------- SonicMoE


def layers_columns(rows: Rows) -> list[Column]:
    columns, names = [SHAPE], programs_in(rows)
    for part, head in (("fwd", "forward TFLOP/s"), ("bwd", "backward TFLOP/s")):
        columns += [(named(head, name), partial(tflops_cell, name, part)) for name in names]
    columns += [(named("saved MiB", name), of(name, "saved_MiB", 0)) for name in names]
    return columns + [(named("peak MiB", name), of(name, "peak_MiB", 0)) for name in names]


def named(head: str, name: str) -> str:
    return f"{head}: ours" if name == OURS else LABELS[name]


def tflops_cell(name: str, part: str, row: Record) -> str:
    return number(tflops(row, name, part), 0)


def granularity(rows: Rows) -> Rows:
    """Figure 1's four shapes, coarse to fine."""
    fields = ("T", "d")
    chosen = [row for row in rows if [row["cfg"][field] for field in fields] == [32768, 4096]]
    return sorted((row for row in chosen if row["cfg"]["n"] * row["cfg"]["K"] == 4096), key=lambda row: row["cfg"]["K"])


def granularity_columns(rows: Rows) -> list[Column]:
    names = programs_in(rows)
    columns: list[Column] = [SHAPE, ("d / n", lambda row: number(row["cfg"]["d"] / row["cfg"]["n"], 0))]
    columns += [(named("saved MiB", name), of(name, "saved_MiB", 0)) for name in names]
    others = [name for name in names if name != "bmm_ub"]
    return columns + [(named("speed of the bmm bound's, forward", name), ratio("bmm_ub", name, "fwd_ms")) for name in others]


def span(values: Sequence[float | None]) -> str:
    known = [each for each in values if each is not None]
    return "–" if not known else f"{number(statistics.fmean(known))} ({number(min(known))} to {number(max(known))})"


def over(rows: Iterable[Record], above: str, below: str, measure: Callable[[Record, str], float | None]) -> list[float]:
    pairs = [(measure(row, above), measure(row, below)) for row in rows]
    return [a / b for a, b in pairs if a and b]


def claims(rows: Rows) -> Rows:
    """What SonicMoE's text says of Figures 1, 5 and 6a, measured: a row a claim, by program."""
    seven = [row for row in rows if (row["cfg"]["d"], row["cfg"]["n"]) == (1536, 256)]
    small = [row for row in rows if row["cfg"]["d"] in (768, 1536)]

    def forward(row: Record, name: str) -> float | None:
        return value(row, name, "fwd_ms")

    def both(row: Record, name: str) -> float | None:
        return value(row, name, "fwdbwd_ms")

    def saved(row: Record, name: str) -> float | None:
        return value(row, name, "saved_MiB")

    def of_program(name: str) -> list[str]:
        return [
            span(over(granularity(rows), "bmm_ub", name, forward)),
            span(over(seven, name, "scattermoe", saved)),
            span(over(small, "scattermoe", name, both)),
            span(over(seven, "scattermoe", name, backward_ms)),
        ]

    said = (
        "forward speed over the bmm bound's, the four shapes of Figure 1",
        "saved bytes over ScatterMoE's, 7B with n = 256",
        "speed over ScatterMoE's, forward + backward, 1.4B and 7B",
        "backward speed over ScatterMoE's, 7B with n = 256",
    )
    found = zip(said, printed.CLAIMS, of_program("sonic"), of_program(OURS), strict=True)
    last = {"of": rows[-1]["of"]} if rows else {}
    return [last | dict(zip(("said", "printed", "sonic", "ours"), each, strict=True)) for each in found] if rows else []


def claims_columns(rows: Rows) -> list[Column]:
    heads = {"said": "", "printed": "printed of SonicMoE", "sonic": "SonicMoE here", "ours": "ours"}
    return [(head, itemgetter(field)) for field, head in heads.items()]


def phases(rows: Rows) -> Rows:
    """A row for each program and phase."""
    made = []
    for row in rows:
        for name, each in row["programs"].items():
            for phase, found in each.items():
                made.append({"cfg": row["cfg"], "of": row["of"], "program": LABELS[name], "phase": phase} | found)
    return made


def phases_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [SHAPE, ("program", itemgetter("program")), ("", itemgetter("phase"))]
    columns += [("ms of products", figure("products_ms")), ("of all others", figure("others_ms"))]
    return [*columns, ("TFLOP/s of the products", figure("tflops", digits=0)), ("longest kernels, ms", longest)]


def longest(row: Record) -> str:
    return "; ".join(f"{short(line['kernel'])} {number(line['ms'])}" for line in row["kernels"][:4])


def short(kernel: str) -> str:
    """A kernel's name for a cell."""
    name = kernel.replace("void ", "").split("<")[0].split("(")[0].replace("|", "/")
    return f"`{name[:40]}`"


def our_kernels(rows: Rows) -> Rows:
    """A row for each of our kernels whose operations and bytes are known."""
    return [
        {"cfg": row["cfg"], "of": row["of"], "phase": phase} | line
        for row in rows
        for phase, found in row["programs"].get(OURS, {}).items()
        for line in found["kernels"]
        if "least_bytes" in line
    ]


def our_kernels_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [SHAPE, ("", itemgetter("phase")), ("kernel", lambda row: short(row["kernel"]))]
    columns += [("launches", figure("launches", digits=0)), ("ms", figure("ms", digits=3))]
    columns.append(("TFLOP/s", lambda row: number(1e-9 * row["operations"] / row["ms"], 0)))
    return [*columns, ("TB/s", lambda row: number(1e-9 * row["least_bytes"] / row["ms"], 2))]


ROUTINGS = {"top_k": "top-k", "rounded": "nearest", "down": "DOWN", "up": "UP"}


def rounding_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [LABEL, SHAPE, ("empty rows of tiles, %", lambda row: number(100 * row["wasted"], 1))]
    for part, head in (("fwd", "forward TFLOP/s"), ("bwd", "backward TFLOP/s")):
        names = ROUTINGS.items()
        columns += [(f"{head}: {said}" if name == "top_k" else said, figure(name, f"{part}_tflops", digits=0)) for name, said in names]
    gains = {"fwd": "nearest over top-k: forward", "bwd": "backward", "fwdbwd": "both"}
    columns += [(head, partial(rounding_gain, part)) for part, head in gains.items()]
    return [*columns, ("printed", printed_rounding)]


def rounding_gain(part: str, row: Record) -> str:
    nearest, plain = (row[name][f"{part}_tflops"] for name in ("rounded", "top_k"))
    return number(nearest / plain if plain else None, 3)


def printed_rounding(row: Record) -> str:
    found = printed.ROUNDING_GAIN.get((row["label"], row["cfg"]["E"]))
    return "–" if found is None else ", ".join(number(each, 3) for each in found)


def scores_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [SHAPE, ("backward ms, dS in it", figure("bwd_ms"))]
    columns += [("⟨dO, Y⟩ beside it", figure("dot_ms", digits=3)), ("floor", figure("dot_floor_ms", digits=3))]
    columns.append(("of the backward, %", lambda row: number(100 * row["dot_ms"] / row["bwd_ms"], 1)))
    return [*columns, ("saved MiB", figure("saved_MiB", digits=0)), ("with Y", lambda row: number(row["saved_MiB"] + row["y_MiB"], 0))]


# ---------------------------------------------------------------------------------------------------------------- tables

SHOWN = {
    "figures": Shown("moeblaze-figures", "MoEBlaze, Figures 3 to 6", figures_columns, picture="paper_moeblaze.png"),
    "scale": Shown("moeblaze-scale", "MoEBlaze, Table 2", scale_columns),
    "dispatch": Shown("moeblaze-dispatch", "MoEBlaze, Table 3", dispatch_columns),
    "ablation": Shown("moeblaze-ablation", "MoEBlaze, Tables 4 and 5", ablation_columns, rows=by_program),
    "gather": Shown("moeblaze-gather", "MoEBlaze §7.3, rows gathered by index", gather_columns),
    "combine": Shown("combine", "A token's experts summed in the product, or gathered", combine_columns),
    "layers": Shown("sonicmoe-layers", "SonicMoE, Figures 5 and 6a", layers_columns, picture="paper_sonicmoe.png"),
    "granularity": Shown("sonicmoe-layers", "SonicMoE, Figure 1", granularity_columns, rows=granularity),
    "claims": Shown("sonicmoe-layers", "SonicMoE, what its text says", claims_columns, "Means, and least to most.", claims),
    "phases": Shown("sonicmoe-kernels", "SonicMoE, Figure 2a", phases_columns, rows=phases, picture="paper_kernels.png"),
    "kernels": Shown("sonicmoe-kernels", "Our kernels in it", our_kernels_columns, rows=our_kernels),
    "rounding": Shown("sonicmoe-rounding", "SonicMoE, Figures 3 and 7, the experts alone", rounding_columns),
    "scores": Shown("sonicmoe-scores", "SonicMoE, appendix D.1", scores_columns),
}


def notes(shown: Shown, record: Record) -> str:
    """Where it was measured, at which rates, and who is absent."""
    rows = record["rows"]
    absent = {name: reason for row in rows for name, reason in row.get("absent", {}).items()}
    missing = "; ".join(f"{LABELS.get(name, name)} ({reason})" for name, reason in absent.items())
    rates = record["rates"]
    speed = f"{number(rates['operations'] / 1e12, 0)} TFLOP/s (cuBLAS, {rates['matrices']}³), {number(rates['bytes'] / 1e12)} TB/s (copy)"
    said = [shown.note, f"{origin(rows, *PACKAGES)} Measured there: {speed}.", f"Absent somewhere: {missing}." if missing else ""]
    return " ".join(filter(None, said))


def markdown(shown: Shown, record: Record) -> str:
    """As a page has it, its picture first."""
    rows = shown.rows(record["rows"])
    picture = f"![{shown.title}]({shown.picture})\n\n" if shown.picture else ""
    return f"{picture}{table(rows, shown.columns(rows))}\n\n{notes(shown, record)}"


def terminal(shown: Shown, record: Record) -> RichTable:
    """The same for a terminal."""
    rows = shown.rows(record["rows"])
    columns = shown.columns(rows)
    made = RichTable(title=shown.title, caption=notes(shown, record), caption_justify="left")
    for head, _ in columns:
        made.add_column(head, justify="right", overflow="fold")
    for row, sign in zip(rows, signs_of(rows), strict=True):
        first, *rest = (cell(row) for _, cell in columns)
        made.add_row(first + sign, *rest)
    return made


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    f"paper_{name}": (f"../h100/paper/{shown.item}", partial(markdown, shown)) for name, shown in SHOWN.items()
}
"""Of docs/papers.md: the results file and what makes the table, as `result_tables.TABLES` has them."""
