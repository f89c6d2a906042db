"""The tutorial's CUDA exercises, judged by `Workbench.check`: solutions pass, wrong ones do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from exercises import EXERCISES, check_exercise
from wrong_cuda import WRONG

pytestmark = pytest.mark.gpu

SOLUTIONS = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "solutions"


@pytest.mark.parametrize("name", WRONG)
def test_solutions_are_right(name: str) -> None:
    outcome = check_exercise(name, (SOLUTIONS / f"{name}.cu").read_text())
    assert outcome.passed is True, repr(outcome)


@pytest.mark.parametrize("name", WRONG)
def test_the_package_is_right(name: str) -> None:
    """The region as it is, put back into a copy."""
    outcome = check_exercise(name, EXERCISES[name].region)
    assert outcome.passed is True, repr(outcome)


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, those in WRONG.items() for what in those])
def test_wrong_solutions_are_found(name: str, what: str) -> None:
    outcome = check_exercise(name, WRONG[name][what])
    assert outcome.passed is False, repr(outcome)
    assert " registers, " in outcome.report, f"it should have compiled: {outcome!r}"
