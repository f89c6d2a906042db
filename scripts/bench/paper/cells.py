"""Rows and values of programs' figures, which the tables of papers, models and the headline share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import LABELS, OURS, Record, Rows, look_up, plain_shape
from scripts.bench.render import Entry

SHAPE: Entry = ("T, d, n, E, K", plain_shape)
LABEL: Entry = ("", "label")
ACTIVATION: Entry = ("activation", "activation")


def of(program: str, field: str) -> str:
    """The place of a program's figure in a row."""
    return f"programs.{program}.{field}"


def ratio(over: str, under: str, field: str) -> str:
    """One program's figure over another's."""
    return f"{of(over, field)} / {of(under, field)}"


def of_programs(names: Sequence[str], head: str, field: str, digits: int = 2) -> list[Entry]:
    """A column for each program; ours has the head in full."""
    return [(f"{head}: ours" if name == OURS else LABELS[name], of(name, field), digits) for name in names]


def figure_of(field: str, row: Record, program: str) -> float | None:
    found: float | None = look_up(row, of(program, field))
    return found


def programs_in(rows: Rows) -> list[str]:
    """Those of LABELS that some row has."""
    return [name for name in LABELS if any(name in row["programs"] for row in rows)]


def by_program(record: Record) -> Rows:
    """A row for each program of each row."""
    return [
        {key: row[key] for key in ("cfg", "activation", "label", "of")} | {"program": name} | each
        for row in record["rows"]
        for name, each in row["programs"].items()
    ]


def with_speeds(record: Record) -> Rows:
    """The rows, each program with the ms of its backward alone, and with the TFLOP/s of a SwiGLU layer: 6 T K n d operations
    forward ("fwd_tflops"), 12 T K n d backward."""

    def more(row: Record, figures: Record) -> Record:
        operations = 6e-9 * math.prod(row["cfg"][key] for key in "TKnd")
        forward, backward = figures["fwd_ms"], (figures["fwdbwd_ms"] - figures["fwd_ms"]) or math.nan
        speeds = {"fwd_tflops": operations / forward, "bwd_tflops": 2 * operations / backward}
        return figures | speeds | {"bwd_ms": backward}

    return [
        row | {"programs": {name: more(row, figures) for name, figures in row["programs"].items()}}
        for row in record["rows"]
    ]


def gpu_of(row: Record) -> str | None:
    """The name in `blazeproto.cost.GPUS` of what a row was measured on; None where it isn't there, as a CPU."""
    return cost.known_gpu(row["of"]["gpu"])


def floor(row: Record, least_ms: Callable[[Sizes, str], float]) -> float | None:
    """The floor by ``least_ms`` of a row's sizes on its GPU; None for a GPU without rates."""
    gpu = gpu_of(row)
    return None if gpu is None else least_ms(Sizes(**row["cfg"]), gpu)


def experts_ms(sizes: Sizes, gpu: str) -> float:
    """The floor of a layer's experts, forward and backward."""
    return sum(cost.layer_floor_ms(sizes, gpu))
