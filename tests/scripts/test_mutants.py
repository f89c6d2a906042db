"""The list of faults, and the program that runs the tests with each."""

import json
import sys
from pathlib import Path

import pytest

from scripts.bench.common import REPOSITORY
from scripts.checks import mutants

FAULTS = mutants.read()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.at)
def test_a_fault_is_in_the_sources(fault: mutants.Mutant) -> None:
    before = (REPOSITORY / fault.file).read_text()
    changed = [
        pair for pair in zip(before.split("\n"), fault.applied(before).split("\n"), strict=True) if len({*pair}) > 1
    ]
    assert [(old.strip(), new.strip()) for old, new in changed] == [(fault.old.strip(), fault.new.strip())]


def test_the_results_are_of_the_list() -> None:
    """Each fault is noticed, or has a reason why it can't be; what was not run has no time."""
    rows = json.loads(mutants.OUT.read_text())["rows"]
    listed = {mutants.place_of(fault._asdict()): fault for fault in FAULTS}
    assert {mutants.place_of(row["mutant"]) for row in rows} == listed.keys() and len(rows) == len(FAULTS)
    for row in rows:
        same = listed[mutants.place_of(row["mutant"])].same
        assert row["mutant"].get("same", "") == same
        assert bool(row["noticed_by"]) is not bool(same) and ("measured" in row) is not bool(same)


def test_one_fault_is_run_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def noticed(fault: mutants.Mutant, folder: Path, jobs: int) -> str:
        ran.append(fault.at)
        return "a test"

    monkeypatch.setattr(mutants, "copied", lambda folder: None)
    monkeypatch.setattr(mutants, "noticed", noticed)
    same, other = (next(each for each in FAULTS if bool(each.same) is kind) for kind in (True, False))
    for fault in (same, other):
        monkeypatch.setattr(sys, "argv", ["mutants", "--at", fault.at, "--out", str(tmp_path / "out.json")])
        mutants.main()
    first, second = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert ran == [other.at] and second["noticed_by"] == "a test" and "measured" in second
    assert first == {"mutant": {**same._asdict(), "tests": [*same.tests]}, "noticed_by": ""}
    monkeypatch.setattr(sys, "argv", ["mutants", "--at", "README.md:1"])
    with pytest.raises(SystemExit):
        mutants.main()
    said = capsys.readouterr()
    assert "--at: expected FILE:LINE of a fault of mutants.json, got README.md:1" in said.err
    assert f"the same  {same.at}" in said.out and f"a test  {other.at}" in said.out
