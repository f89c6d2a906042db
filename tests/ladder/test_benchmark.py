"""The ladder's benchmark has a row for each kernel, and its bounds."""

import json

import pytest
from rung import RESULTS

from scripts.bench import ladder


def record(*tflops: float) -> dict:
    return {"rows": [{"rung": number, "tflops": value} for number, value in enumerate(tflops, 1)]}


def test_each_kernel_has_a_row() -> None:
    (item,) = ladder.BENCH.items.values()
    assert [*item.cases] == [*ladder.RUNGS] and ladder.NUMBERS["threads"] == ladder.NUMBERS["tiles"] == 1


@pytest.mark.parametrize(
    ("tflops", "holds"),
    [
        ((1, 2, 3), [True, True]),
        ((1, 3, 2), [True, False]),
        ((1, 2, 3, 4, 5, 4.5), [True, True, True, True]),
        ((1, 2, 3, 5, 4, 3), [True, True, False, False]),
        ((1,), []),
    ],
)
def test_bounds(tflops: tuple[float, ...], holds: list[bool]) -> None:
    assert [each for _, each in ladder.bounds(record(*tflops))] == holds


def test_the_results_keep_the_bounds() -> None:
    if not RESULTS.exists():
        pytest.skip("results/h200/ladder.json: python -m scripts.bench.ladder, on an H200")
    stored = json.loads(RESULTS.read_text())
    assert {row["entry"] for row in stored["rows"]} == {*ladder.RUNGS}
    assert [holds for _, holds in ladder.bounds(stored)] == [True] * 4
