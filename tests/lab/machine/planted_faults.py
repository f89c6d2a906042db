"""Faults of asynchronous programs for copies of the CUDA sources, beside the twelve bugs of tests/lab/planted_bugs.py.

`found_by` runs a product of such a copy on the machine, and says which way the machine found the fault.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blazeproto import gemm
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import TileConfig, product
from blazeproto.gemm.compile import CUDA_SOURCES
from blazeproto.lab.target import Machine
from blazeproto.runtime.target import launches_on
from ptxsim import Deadlock, MachineError, Report
from ptxsim.races import Race
from tests.lab import planted_bugs
from tests.lab.planted_bugs import BUGS, Bug, plant

SMALL = {"T": 80, "d": 192, "n": 64, "E": 2, "K": 1}  # three stages a tile, a strip and a part of one in an expert
NARROW = TileConfig(tile_n=128, stages=2)
RACE, DEADLOCK, ERROR, WRONG = "race", "deadlock", "error", "wrong result"
ROUNDING = 2.0**-7  # of bf16 and of sums, of numbers around one


class Fault(NamedTuple):
    """An edit, as those of `planted_bugs.Bug`, and how it is found.

    way: how.  lines: of a race, a text of either source line.  says: what the message of a deadlock or an error has.
    shape, config: of the product.
    """

    name: str
    product: str
    edits: tuple[tuple[str, str, str], ...]
    way: str
    lines: tuple[str, str] = ("", "")
    says: str = ""
    shape: dict[str, int] = SMALL
    config: TileConfig | None = NARROW


WGMMA, COPY, TMA = "wgmma<MN_A, MN_B>(acc", "cp_async_16(", "tma_load_"
FAULTS = (
    Fault(
        "a dropped full-wait",
        "up_forward",
        (("mainloop.cuh", "    ring.wait_until_full();\n    if (GATHER)", "    if (GATHER)"),),
        RACE,
        (COPY, WGMMA),
    ),
    Fault(
        "a dropped empty-wait",
        "up_forward",
        (
            (
                "varlen_m.cuh",
                "ring.wait_until_empty();\n                if (threadIdx.x == 0) {\n",
                "if (threadIdx.x == 0) {\n",
            ),
        ),
        RACE,
        (COPY, WGMMA),
    ),
    Fault(
        "a wrong phase",
        "up_forward",
        (("mainloop.cuh", "mbarrier_wait(full_barrier(), phase());", "mbarrier_wait(full_barrier(), phase() ^ 1);"),),
        RACE,
        (COPY, WGMMA),
    ),
    Fault(
        "a wrong transaction count",
        "up_forward",
        (
            (
                "varlen_m.cuh",
                "mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);",
                "mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES + 16);",
            ),
        ),
        DEADLOCK,
        says="16 bytes missing",
    ),
    Fault(
        "a stage released one step early",
        "up_forward",
        (("mainloop.cuh", "wgmma_wait_group<1>();", "wgmma_wait_group<2>();"),),
        RACE,
        (COPY, WGMMA),
    ),
    Fault(
        "a missing proxy fence before wgmma",
        "up_forward",
        (("mainloop.cuh", "    if (GATHER) fence_proxy_async();", ""),),
        RACE,
        (COPY, WGMMA),
    ),
    Fault(
        "a missing wgmma wait before the accumulators are read",
        "up_forward",
        (("mainloop.cuh", "    wgmma_wait_group<0>();\n", ""),),
        ERROR,
        says="is under way",
    ),
    Fault(
        "a slab overwritten before its TMA store has read it",
        "up_forward",
        (("up.cu", "    if (thread == 0) bulk_wait_group_read<0>();\n    if", "    if"),),
        RACE,
        ("tma_store_3d(", "stmatrix"),
        shape=SMALL | {"T": 256, "n": 128, "d": 64},
    ),
    Fault(
        "a missing named barrier",
        "up_forward",
        (
            (
                "varlen_m.cuh",
                "                named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);\n            }\n            if (TICKETS",
                "            }\n            if (TICKETS",
            ),
        ),
        RACE,
        ("slots()[mine", "reinterpret_cast<const int4*>"),
    ),
    Fault(
        "an early return before a named barrier",
        "down_backward_weight",
        (
            (
                "epilogue.cuh",
                "    if (warpgroup_thread() == 0) bulk_wait_group_read<0>();\n    warpgroup_sync();",
                "    if (warpgroup_thread() == 0) bulk_wait_group_read<0>();\n    if (warpgroup_thread() >= 96) return;\n"
                "    warpgroup_sync();",
            ),
        ),
        DEADLOCK,
        says="96 of 128 threads",
    ),
    Fault(
        "a tail row stored past the expert's end",
        "up_forward",
        (
            (
                "up.cu",
                "row + first_row + pass * PASS_ROWS < tile.row_end;",
                "row + first_row + pass * PASS_ROWS <= tile.row_end;",
            ),
        ),
        RACE,
        ("__stcs", "__stcs"),
    ),
    Fault(
        "one ticket taken twice",
        "up_forward",
        (
            (
                "tiles.cuh",
                "{ return atomicInc(p.tickets, tiles() - 1); }",
                "{\n        const uint32_t ticket = *p.tickets;\n"
                "        *p.tickets = ticket == uint32_t(tiles() - 1) ? 0 : ticket + 1;\n        return ticket;\n    }",
            ),
        ),
        RACE,
        ("*p.tickets", "*p.tickets"),
        config=TileConfig(tile_n=128, stages=2, tickets=True),
    ),
)


def of_bug(bug: Bug) -> Fault:
    """A bug of the workbench's tests, which gives a wrong result; one of them is a race. Fewer rows and stages do."""
    race = bug.name.endswith("a race")
    shape = planted_bugs.SHAPE | {"T": 500} | ({"d": 64} if bug.product in ("up_forward", "down_backward_act") else {})
    lines = (COPY, WGMMA) if race else ("", "")
    return Fault(bug.name, bug.product, bug.edits, RACE if race else WRONG, lines, shape=shape, config=None)


EVERY_FAULT = (*FAULTS, *map(of_bug, BUGS))


# --- Products on the machine -------------------------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> np.ndarray:
    """Cut off to bf16; its bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(array: Any) -> np.ndarray:
    """fp32 numbers of bf16's bits; fp32 as it is."""
    array = np.asarray(array)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if array.dtype.itemsize == 2 else array


def inputs(name: str, T: int, d: int, n: int, E: int, K: int) -> tuple[np.ndarray, ...]:
    """A product's arrays but the dispatch, in bf16 (scores in fp32), and the experts of every token."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return bf16(scale * rng.standard_normal(shape))

    experts = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    rows, tokens, hidden = T * K, normal(T, d), normal(T * K, 2 * n)
    made: dict[str, Callable[[], tuple[np.ndarray, ...]]] = {
        "up_forward": lambda: (tokens, normal(E, 2 * n, d, scale=d**-0.5)),
        "down_forward": lambda: (normal(rows, n), normal(E, d, n, scale=n**-0.5)),
        "down_backward_act": lambda: (
            tokens,
            normal(E, d, n, scale=d**-0.5),
            hidden,
            rng.random((T, K)).astype(np.float32),
        ),
        "up_backward_act": lambda: (hidden, normal(E, 2 * n, d, scale=n**-0.5)),
        "down_backward_weight": lambda: (tokens, normal(rows, n)),
        "up_backward_weight": lambda: (hidden, tokens),
    }
    return (*made[name](), experts)


def run(name: str, machine: Machine, shape: dict[str, int], config: TileConfig | None = None) -> bool:
    """One call of a product on the machine: whether it agrees with the twin. Raises what the machine does."""
    *given, experts = inputs(name, **shape)
    function, dispatch = getattr(gemm, name), build_dispatch(experts, shape["E"])
    expected = function(*[values_of(array) for array in given], dispatch)
    with launches_on(machine):
        got = function(*given, dispatch, config=config)
    pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (got, expected)), strict=True)
    return all(np.allclose(values_of(a), b, ROUNDING, ROUNDING * max(1, float(np.abs(b).std()))) for a, b in pairs)


class Finding(NamedTuple):
    """way: one of the four, or "" where nothing was found.  text: the message.  races: all of the run."""

    way: str
    text: str
    races: list[Race]


def found_by(fault: Fault, folder: Path, seed: int) -> Finding:
    """The fault in a copy of the sources in ``folder``, which need not be there yet, with this seed."""
    if not folder.is_dir():
        shutil.copytree(CUDA_SOURCES, folder)
        plant(folder, fault)
    machine = Machine(2, seed=seed)
    with product.edited(fault.product, folder):
        try:
            right = run(fault.product, machine, fault.shape, fault.config)
            way, text = ("" if right else WRONG), ""
        except Deadlock as error:
            way, text = DEADLOCK, str(error)
        except MachineError as error:
            way, text = ERROR, str(error)
    reports: list[Report] = machine.reports
    races = [race for report in reports for race in report.races]
    if races and fault.way == RACE:
        return Finding(RACE, "\n".join(map(str, reports)), races)
    return Finding(way, text, races)


def source_line(folder: Path, place: str) -> str:
    """The text of the line that a report begins with, as up.cu:12."""
    found = re.match(r"(\S+?):(\d+)", place)
    assert found, place
    return (folder / found[1]).read_text().splitlines()[int(found[2]) - 1]


def has_lines(folder: Path, race: Race, lines: tuple[str, str]) -> bool:
    """Whether the race's lines are these two, in either order."""
    first, second = (source_line(folder, place) for place in (race.first, race.second))
    return any(a in first and b in second for a, b in (lines, lines[::-1]))
