"""Faults planted into copies of the CUDA sources: a bench finds each within ten schedules, and says where."""

import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import TileConfig
from blazeproto.lab import Workbench
from blazeproto.lab.target import Machine
from blazeproto.lab.verdict import Verdict
from tests.lab.planted_bugs import BUGS, SHAPE, Bug, plant

SMALL = {"T": 80, "d": 192, "n": 64, "E": 2, "K": 1}  # three stages a tile, a strip and a part of one in an expert
NARROW = TileConfig(tile_n=128, stages=2)
RACE, DEADLOCK, ERROR, WRONG = "race", "deadlock", "error", "wrong result"


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
        ("tma_store_", "stmatrix"),
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
    shape = SHAPE | {"T": 500} | ({"d": 64} if bug.product in ("up_forward", "down_backward_act") else {})
    lines = (COPY, WGMMA) if race else ("", "")
    return Fault(bug.name, bug.product, bug.edits, RACE if race else WRONG, lines, shape=shape, config=None)


SEEDS = 10
QUICK = (
    "a missing proxy fence before wgmma",
    "a wrong transaction count",
    "a missing wgmma wait before the accumulators are read",
    "a stage released one step early",
    "one ticket taken twice",
)


def is_found(fault: Fault, folder: Path, verdict: Verdict) -> bool:
    """As the table says: by a race of these two lines of the sources, by what an error says, or by a wrong result."""
    if fault.way == RACE:
        places = [re.findall(r"^  (\S+?):(\d+)", race, re.MULTILINE) for race in verdict.races]
        lines = [[(folder / file).read_text().splitlines()[int(line) - 1] for file, line in pair] for pair in places]
        a, b = fault.lines
        return any((a in one and b in other) or (b in one and a in other) for one, other in lines)
    if fault.way == WRONG:
        return bool(verdict.mismatches)
    expected = (fault.says, "nobody can go on" if fault.way == DEADLOCK else "")
    return any(all(words in error for words in expected) for error in verdict.errors)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in QUICK else pytest.mark.full)
        for fault in (*FAULTS, *map(of_bug, BUGS))
    ],
)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    """With the first schedule, or with one of ten."""
    folder = tmp_path / "sources"
    bench = Workbench(fault.product, **fault.shape, config=fault.config, device="cpu")
    plant(bench.edit(folder), fault.edits)
    assert any(is_found(fault, folder, bench.check(runs)) for runs in (1, SEEDS)), f"{fault.name}: not by a {fault.way}"


@pytest.mark.parametrize("product", ["up_forward", "up_backward_weight"])
def test_nothing_is_reported_of_the_true_sources(product: str) -> None:
    assert Workbench(product, **SMALL, config=NARROW, device="cpu").check()


@pytest.mark.full
def test_watching_races_takes_about_as_long_again() -> None:
    bench = Workbench("up_forward", **SMALL, config=NARROW, device="cpu")

    def seconds(races: bool) -> float:
        begin = time.process_time()
        bench._run(bench._build(), Machine(2, seed=0, races=races))
        return time.process_time() - begin

    seconds(True)  # what is read and compiled once
    watched, alone = (min(each) for each in zip(*((seconds(True), seconds(False)) for _ in range(4)), strict=True))
    assert watched < 2.5 * alone, f"{watched:.2f} s, without {alone:.2f} s"


def test_a_report_is_as_the_page_shows_it(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "machine.md").read_text()
    report = page.partition("## Reading a report\n\n")[2].partition("\n\n")[0]
    bench = Workbench("up_forward", T=100, d=136, n=72, E=2, K=1, device="cpu")
    header = bench.edit(tmp_path / "sources") / "mainloop.cuh"
    header.write_text(header.read_text().replace("if (GATHER) fence_proxy_async();", "", 1))
    assert "".join(report.split()) in "".join(str(bench.check()).split())
