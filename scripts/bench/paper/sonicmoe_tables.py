"""The columns of SonicMoE's figures: what was measured beside what the paper prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import LABELS, OURS, Column, Record, figure, number
from scripts.bench.paper import printed
from scripts.bench.paper.cells import LABEL, SHAPE, Rows, backward_ms, floor_cell, of, programs_in, ratio, tflops, value
from scripts.bench.render import fixed


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
    return columns + [
        (named("speed of the bmm bound's, forward", name), ratio("bmm_ub", name, "fwd_ms")) for name in others
    ]


def span(values: Sequence[float | None]) -> str:
    known = [each for each in values if each is not None]
    return "–" if not known else f"{number(statistics.fmean(known))} ({number(min(known))} to {number(max(known))})"


def over(rows: Iterable[Record], above: str, below: str, measure: Callable[[Record, str], float | None]) -> list[float]:
    pairs = [(measure(row, above), measure(row, below)) for row in rows]
    return [a / b for a, b in pairs if a and b]


def claims(rows: Rows) -> Rows:
    """The claims of SonicMoE's text about Figures 1, 5 and 6a, measured: a row a claim, by program."""
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


claims_columns = fixed(("", "said"), ("printed of SonicMoE", "printed"), ("SonicMoE here", "sonic"), ("ours", "ours"))


def phases(rows: Rows) -> Rows:
    """A row for each program and phase."""
    made = []
    for row in rows:
        for name, each in row["programs"].items():
            for phase, found in each.items():
                made.append({"cfg": row["cfg"], "of": row["of"], "program": LABELS[name], "phase": phase} | found)
    return made


def longest(row: Record) -> str:
    return "; ".join(f"{short(line['kernel'])} {number(line['ms'])}" for line in row["kernels"][:4])


phases_columns = fixed(
    SHAPE,
    ("program", "program"),
    ("", "phase"),
    ("ms of products", "products_ms"),
    ("of all others", "others_ms"),
    ("TFLOP/s of the products", "tflops", 0),
    ("longest kernels, ms", longest),
)


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


our_kernels_columns = fixed(
    SHAPE,
    ("", "phase"),
    ("kernel", lambda row: short(row["kernel"])),
    ("launches", "launches", 0),
    ("ms", "ms", 3),
    ("TFLOP/s", lambda row: 1e-9 * row["operations"] / row["ms"], 0),
    ("TB/s", lambda row: 1e-9 * row["least_bytes"] / row["ms"]),
)


ROUTINGS = {"top_k": "top-k", "rounded": "nearest", "down": "DOWN", "up": "UP"}


def rounding_columns(rows: Rows) -> list[Column]:
    columns: list[Column] = [LABEL, SHAPE, ("empty rows of tiles, %", lambda row: number(100 * row["wasted"], 1))]
    for part, head in (("fwd", "forward TFLOP/s"), ("bwd", "backward TFLOP/s")):
        heads = ROUTINGS | {"top_k": f"{head}: top-k"}
        columns += [(said, figure(name, f"{part}_tflops", digits=0)) for name, said in heads.items()]
    gains = {"fwd": "nearest over top-k: forward", "bwd": "backward", "fwdbwd": "both"}
    columns += [(head, partial(rounding_gain, part)) for part, head in gains.items()]
    return [*columns, ("printed", printed_rounding)]


def rounding_gain(part: str, row: Record) -> str:
    nearest, plain = (row[name][f"{part}_tflops"] for name in ("rounded", "top_k"))
    return number(nearest / plain if plain else None, 3)


def printed_rounding(row: Record) -> str:
    found = printed.ROUNDING_GAIN.get((row["label"], row["cfg"]["E"]))
    return "–" if found is None else ", ".join(number(each, 3) for each in found)


def dot_ms(sizes: Sizes, gpu: str) -> float:
    """The floor of <dO, Y>: both are read in bf16, a number a row is written in fp32."""
    return cost.floor_ms(0.0, 2 * sizes.d * (sizes.rows + sizes.T) + 4 * sizes.rows, gpu)


scores_columns = fixed(
    SHAPE,
    ("backward ms, dS in it", "bwd_ms"),
    ("⟨dO, Y⟩ beside it", "dot_ms", 3),
    ("floor", floor_cell(dot_ms, 3)),
    ("of the backward, %", lambda row: 100 * row["dot_ms"] / row["bwd_ms"], 1),
    ("saved MiB", "saved_MiB", 0),
    ("with Y", lambda row: row["saved_MiB"] + row["y_MiB"], 0),
)
