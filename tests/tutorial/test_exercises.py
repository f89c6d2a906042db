"""Solutions of the tutorial's exercises are right, and wrong ones are found: in NumPy here, in Numba and in CUDA
on the machine and on a GPU."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exercises
import numpy as np
import pytest
import wrong_cuda
import wrong_numpy
from exercises import EXERCISES, check_exercise

from blazeproto.lab import workbench
from tests.python import simulate
from tests.refusals import refuses

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
    """On the machine: a race is found by its accesses, whatever came of it."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    from wrong_numba import WRONG

    for name, wrong in WRONG.items():
        outcome = check_exercise(name, solution(name))
        assert outcome and repr(outcome) == f"{name}: right. As the twin on all inputs, and without a race."
        reports = {kernel.__name__: check_exercise(name, kernel) for kernel in wrong}
        assert not [kernel for kernel, outcome in reports.items() if outcome]
        races = {kernel for kernel, outcome in reports.items() if "race in byte" in outcome.report}
        assert races == ({"racing"} if name == "expert_histogram" else {"without_a_barrier", "without_syncthreads"})
        assert all("wrong_numba.py:" in reports[kernel].report for kernel in races)


def test_numba_beside_its_simulator() -> None:
    simulate(FOLDER / "in_the_simulator.py")


def test_ids_elsewhere_are_small_enough_to_count() -> None:
    """A bincount of them, as the hint says, has as many numbers as the largest id."""
    assert max(int(ids.max(initial=0)) for ids, _ in exercises._routings()) < 10**6


@pytest.mark.parametrize("raised", [IndexError("too far"), SystemError("odd")])
def test_what_a_solution_raises_is_in_the_report(raised: Exception) -> None:
    def failing(*_: Any) -> None:
        raise raised

    outcome = check_exercise("score_gradient", failing)
    assert not outcome and f"{type(raised).__name__}: {raised}" in outcome.report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: array + 1.0, "expert_pair_indices[0] is 6.0, expected 5 ("),
        (lambda array: array + 0.5, "expert_pair_indices[0] is 5.5, expected 5 ("),
        (lambda array: array.astype(float) * np.nan, "expert_pair_indices[0] is nan, expected 5 ("),
        (lambda array: array.astype(str), "expert_pair_indices: expected numbers, got dtype <U"),
    ],
)
def test_wrong_numbers_of_another_type_are_shown(change: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    right = solution("dispatch_lists")
    assert callable(right)

    def wrong(ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, ...]:
        rows, offsets, index_map = right(ids, num_experts)
        return change(rows), offsets, index_map

    outcome = check_exercise("dispatch_lists", wrong)
    assert not outcome and message in outcome.report, outcome.report


@pytest.mark.parametrize(
    ("name", "given", "argument", "error"),
    [
        ("dispatch", None, "name", ValueError),
        ("dispatch_lists", 3, "solution", TypeError),
        ("silu_by_exp", 3, "solution", TypeError),
    ],
)
def test_bad_input(name: str, given: Any, argument: str, error: type[Exception]) -> None:
    refuses(lambda: check_exercise(name, given), argument, error)


def test_numba_that_can_neither_compile_nor_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercises, "_unable", lambda: "Numba can't compile here: ImportError")
    with pytest.raises(RuntimeError, match="can't compile here: ImportError: set NUMBA_ENABLE_CUDASIM=1"):
        check_exercise("stable_rank", print)


@pytest.mark.parametrize("name", wrong_cuda.WRONG)
def test_regions_are_in_the_sources(name: str) -> None:
    region = EXERCISES[name].region
    assert 3 <= len(region.splitlines()) <= 8 and region.endswith("\n")


def test_others_have_no_region() -> None:
    with pytest.raises(ValueError, match="expected one in CUDA, got 'stable_rank'"):
        _ = EXERCISES["stable_rank"].region


def test_an_edited_region_is_all_that_changes(tmp_path: Path) -> None:
    source = exercises.CUDA_SOURCES / "layout.cuh"
    (tmp_path / "layout.cuh").write_text(source.read_text())
    EXERCISES["silu_by_exp"].edit(tmp_path, "// mine")
    region = EXERCISES["silu_by_exp"].region
    assert (tmp_path / "layout.cuh").read_text() == source.read_text().replace(region, "// mine\n")
    with pytest.raises(ValueError, match=r"^layout\.cuh: "):
        EXERCISES["silu_by_exp"].edit(tmp_path, "// again")


@pytest.fixture
def on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "_lacking", lambda device: "a GPU")


@pytest.mark.usefixtures("on_a_laptop")
@pytest.mark.parametrize("name", wrong_cuda.WRONG)
@pytest.mark.parametrize("whose", ["the solution", pytest.param("the package", marks=pytest.mark.full)])
def test_solutions_in_cuda_are_right(name: str, whose: str) -> None:
    text = EXERCISES[name].region if whose == "the package" else str(solution(name))
    outcome = check_exercise(name, text)
    assert outcome, repr(outcome)
    assert " registers, 0 B spilled." in outcome.report and "on the machine" in outcome.report


@pytest.mark.usefixtures("on_a_laptop")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=[pytest.mark.full] if number else [])
        for name, those in wrong_cuda.WRONG.items()
        for number, what in enumerate(those)
    ],
)
def test_wrong_solutions_in_cuda_are_found(name: str, what: str) -> None:
    """By the tiles that are wrong, what came and what was right."""
    outcome = check_exercise(name, wrong_cuda.WRONG[name][what])
    assert outcome.passed is False and " B spilled." in outcome.report, repr(outcome)
    assert "elements out of bounds" in outcome.report and "the first 10 mismatches" in outcome.report


@pytest.mark.usefixtures("on_a_laptop")
def test_what_the_notebook_begins_with_is_wrong() -> None:
    zeros = "        d_score[h] += 0.0f * (value + slope + up + up_slope);\n        return {0.0f, 0.0f, 0.0f};\n"
    outcome = check_exercise("swiglu_backward", zeros)
    assert outcome.passed is False and "dh: " in outcome.report, repr(outcome)


def test_what_does_not_compile_is_wrong() -> None:
    outcome = check_exercise("silu_by_exp", "DEVICE float act_of(float gate, float up) { return gat; }")
    assert outcome.passed is False and "gat" in outcome.report and "layout.cuh" in outcome.report


# --- CUDA on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", wrong_cuda.WRONG)
def test_solutions_in_cuda_on_a_gpu(name: str) -> None:
    outcome = check_exercise(name, (SOLUTIONS / f"{name}.cu").read_text())
    assert outcome.passed is True, repr(outcome)


@pytest.mark.gpu
@pytest.mark.parametrize("name", wrong_cuda.WRONG)
def test_the_package_is_right_on_a_gpu(name: str) -> None:
    """The region as it is, put back into a copy."""
    outcome = check_exercise(name, EXERCISES[name].region)
    assert outcome.passed is True, repr(outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "what"), [(name, what) for name, those in wrong_cuda.WRONG.items() for what in those])
def test_wrong_solutions_in_cuda_are_found_on_a_gpu(name: str, what: str) -> None:
    outcome = check_exercise(name, wrong_cuda.WRONG[name][what])
    assert outcome.passed is False, repr(outcome)
    assert " registers, " in outcome.report, f"it should have compiled: {outcome!r}"
