"""Cells and rows of programs' figures, which the papers' tables share."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import LABELS, Column, Record, figure, number, plain_shape

Rows = list[Record]
Cell = Callable[[Record], str]
SHAPE: Column = ("T, d, n, E, K", plain_shape)
LABEL: Column = ("", itemgetter("label"))
ACTIVATION: Column = ("activation", itemgetter("activation"))


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
    """TFLOP/s of a SwiGLU layer: 6 T K n d operations forward ("fwd"), 12 T K n d backward ("bwd")."""
    ms = value(row, program, "fwd_ms") if part == "fwd" else backward_ms(row, program)
    sizes = row["cfg"]
    operations = (6 if part == "fwd" else 12) * sizes["T"] * sizes["K"] * sizes["n"] * sizes["d"]
    return 1e-9 * operations / ms if ms else None


def gpu_of(row: Record) -> str | None:
    """The name in `blazeproto.cost.GPUS` of what a row was measured on; None where it isn't there, as a CPU."""
    return cost.known_gpu(row["of"]["gpu"])


def floor(row: Record, least_ms: Callable[[Sizes, str], float]) -> float | None:
    """The floor by ``least_ms`` of a row's sizes on its GPU; None for a GPU without rates."""
    gpu = gpu_of(row)
    return None if gpu is None else least_ms(Sizes(**row["cfg"]), gpu)


def floor_cell(least_ms: Callable[[Sizes, str], float], digits: int = 2) -> Cell:
    return lambda row: number(floor(row, least_ms), digits)


def experts_ms(sizes: Sizes, gpu: str) -> float:
    """The floor of a layer's experts, forward and backward."""
    return sum(cost.layer_floor_ms(sizes, gpu))


def programs_in(rows: Rows) -> list[str]:
    """Those of LABELS that some row has."""
    return [name for name in LABELS if any(name in row["programs"] for row in rows)]


def by_program(rows: Rows) -> Rows:
    """A row for each program of each row."""
    kept = ("cfg", "activation", "label", "of")
    return [
        {key: row[key] for key in kept} | {"program": name} | each
        for row in rows
        for name, each in row["programs"].items()
    ]


def looked_up(known: dict[Any, Any], key: Callable[[Record], Any], index: int, digits: int = 1) -> Cell:
    """A printed figure."""

    def cell(row: Record) -> str:
        found = known.get(key(row))
        return "–" if found is None else number(found[index], digits)

    return cell
