"""Solutions of the tutorial's exercises are right, and wrong ones are found: in NumPy here, in Numba in the simulator. Those in
CUDA compile; test_exercises_gpu.py judges them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exercises
import pytest
import wrong_cuda
import wrong_numpy
from exercises import EXERCISES, check_exercise
from simulator import simulate

SOLUTIONS = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "solutions"
FOLDER = Path(__file__).parent


def solution(name: str) -> Callable[..., Any] | str:
    cuda = SOLUTIONS / f"{name}.cu"
    return cuda.read_text() if cuda.exists() else runpy.run_path(str(SOLUTIONS / f"{name}.py"))[name]


def test_each_exercise_has_a_solution_and_three_wrong_ones() -> None:
    import ast

    assert {path.stem for path in SOLUTIONS.iterdir() if path.is_file()} == set(EXERCISES)
    tree = ast.parse((FOLDER / "wrong_numba.py").read_text())  # it needs the simulator
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    in_numba = {ast.literal_eval(key): value.elts for key, value in zip(table.keys, table.values, strict=True)}
    wrong = {**wrong_numpy.WRONG, **wrong_cuda.WRONG, **in_numba}
    assert wrong.keys() == EXERCISES.keys() and all(len(those) >= 3 for those in wrong.values())


@pytest.mark.parametrize("name", wrong_numpy.WRONG)
def test_solutions_in_numpy(name: str) -> None:
    outcome = check_exercise(name, solution(name))
    assert outcome and repr(outcome) == f"{name}: right. As the twin on all inputs."


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, those in wrong_numpy.WRONG.items() for wrong in those]
)
def test_wrong_solutions_in_numpy(name: str, wrong: Callable[..., Any]) -> None:
    outcome = check_exercise(name, wrong)
    assert outcome.passed is False
    assert outcome.report.startswith("topk_experts=[") and "expected" in outcome.report, (
        "input, place, and what was right"
    )


def test_solutions_and_wrong_ones_in_numba() -> None:
    simulate(FOLDER / "in_the_simulator.py")


@pytest.mark.parametrize("raised", [IndexError("too far"), SystemError("odd")])
def test_what_a_solution_raises_is_in_the_report(raised: Exception) -> None:
    def failing(*_: Any) -> None:
        raise raised

    outcome = check_exercise("score_gradient", failing)
    assert not outcome and f"{type(raised).__name__}: {raised}" in outcome.report


def test_nan_is_wrong() -> None:
    right = solution("score_gradient")
    assert callable(right)
    outcome = check_exercise("score_gradient", lambda *arrays: right(*arrays) * float("nan"))
    assert not outcome and "is nan" in outcome.report


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("dispatch", None, ValueError, r"name: expected one of \('dispatch_lists'"),
        ("dispatch_lists", 3, TypeError, "solution: expected a function for dispatch_lists, got int"),
        ("silu_by_exp", 3, TypeError, "solution: expected CUDA text for silu_by_exp, got int"),
    ],
)
def test_bad_input(name: str, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_exercise(name, given)


def test_numba_needs_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercises, "simulated", lambda: False)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        check_exercise("stable_rank", print)


@pytest.mark.parametrize("name", wrong_cuda.WRONG)
def test_regions_are_in_the_sources(name: str) -> None:
    region = EXERCISES[name].region
    assert 3 <= len(region.splitlines()) <= 8 and region.endswith("\n")


def test_others_have_no_region() -> None:
    with pytest.raises(ValueError, match="expected one in CUDA, got 'stable_rank'"):
        _ = EXERCISES["stable_rank"].region


def test_an_edited_region_is_all_that_changes(tmp_path: Path) -> None:
    source = exercises.CUDA_SOURCES / "up.cu"
    (tmp_path / "up.cu").write_text(source.read_text())
    EXERCISES["silu_by_exp"].edit(tmp_path, "// mine")
    region = EXERCISES["silu_by_exp"].region
    assert (tmp_path / "up.cu").read_text() == source.read_text().replace(region, "// mine\n")
    with pytest.raises(ValueError, match=r"up\.cu: expected one region that begins with"):
        EXERCISES["silu_by_exp"].edit(tmp_path, "// again")


@pytest.mark.parametrize("name", wrong_cuda.WRONG)
def test_solutions_in_cuda_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercises, "has_hopper", lambda: False)
    outcome = check_exercise(name, str(solution(name)))
    assert outcome.passed is None and not outcome
    assert " registers, 0 B spilled." in outcome.report, repr(outcome)


@pytest.mark.full
@pytest.mark.parametrize(("name", "what"), [(name, what) for name, those in wrong_cuda.WRONG.items() for what in those])
def test_wrong_solutions_in_cuda_compile(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercises, "has_hopper", lambda: False)
    assert check_exercise(name, wrong_cuda.WRONG[name][what]).passed is None


def test_what_does_not_compile_is_wrong() -> None:
    outcome = check_exercise("silu_by_exp", "DEVICE float act_of(float gate, float up) { return gat; }")
    assert outcome.passed is False and "gat" in outcome.report and "up.cu" in outcome.report
