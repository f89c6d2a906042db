"""Faults planted into copies of the CUDA sources: the machine finds each within ten seeds, and says where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from blazeproto.lab.target import Machine
from tests.lab.machine.planted_faults import EVERY_FAULT, FAULTS, NARROW, RACE, SMALL, Fault, found_by, has_lines, run

SEEDS = 10
QUICK = (
    "a missing proxy fence before wgmma",
    "a wrong transaction count",
    "a missing wgmma wait before the accumulators are read",
    "a stage released one step early",
    "one ticket taken twice",
)


def assert_found(fault: Fault, folder: Path) -> None:
    """As the table says: by the race report with both lines, by what an error says, or by a wrong result."""
    findings = []
    for seed in range(SEEDS):
        finding = found_by(fault, folder, seed)
        named = any(has_lines(folder, race, fault.lines) for race in finding.races) if fault.way == RACE else True
        if finding.way == fault.way and fault.says in finding.text and named:
            return
        findings.append(finding)
    raise AssertionError(f"{fault.name}: not found as {fault.way}: {findings}")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in QUICK], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert_found(fault, tmp_path / "sources")


@pytest.mark.full
@pytest.mark.parametrize("fault", EVERY_FAULT, ids=lambda fault: fault.name)
def test_every_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert_found(fault, tmp_path / "sources")


@pytest.mark.parametrize("product", ["up_forward", "up_backward_weight"])
def test_nothing_is_reported_of_the_true_sources(product: str) -> None:
    machine = Machine(2, seed=0)
    assert run(product, machine, SMALL, NARROW)
    assert machine.reports and not any(report.races for report in machine.reports)


@pytest.mark.full
def test_watching_races_takes_about_as_long_again() -> None:
    def seconds(races: bool) -> float:
        begin = time.process_time()
        assert run("up_forward", Machine(2, seed=0, races=races), SMALL, NARROW)
        return time.process_time() - begin

    seconds(True)  # what is read and compiled once
    watched, alone = (min(each) for each in zip(*((seconds(True), seconds(False)) for _ in range(4)), strict=True))
    assert watched < 2.5 * alone, f"{watched:.2f} s, without {alone:.2f} s"
