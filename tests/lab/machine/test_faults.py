"""Faults planted into copies of the CUDA sources: a bench finds each within ten schedules, and says where."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.lab import Workbench
from blazeproto.lab.target import Machine
from blazeproto.lab.verdict import Verdict
from tests.lab.machine.planted_faults import DEADLOCK, EVERY_FAULT, FAULTS, NARROW, RACE, SMALL, WRONG, Fault
from tests.lab.planted_bugs import plant

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


def assert_found(fault: Fault, folder: Path) -> None:
    """With the first schedule, or with one of ten."""
    bench = Workbench(fault.product, **fault.shape, config=fault.config, device="cpu")
    plant(bench.edit(folder), fault.edits)
    assert any(is_found(fault, folder, bench.check(runs)) for runs in (1, SEEDS)), f"{fault.name}: not by a {fault.way}"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in QUICK], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert_found(fault, tmp_path / "sources")


@pytest.mark.full
@pytest.mark.parametrize("fault", EVERY_FAULT, ids=lambda fault: fault.name)
def test_every_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert_found(fault, tmp_path / "sources")


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
