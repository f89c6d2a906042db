"""The rule of accuracy (DESIGN §6): a norm of 1.1 times the yardstick's, a worst row and a worst element of 3 times its."""

import pytest
import torch
from torch import Tensor

from blazeproto.lab.accuracy import Pool

ROWS, COLUMNS = 64, 256


def judged(wrong: Tensor, yardstick: Tensor) -> list[str]:
    """What fails of an output that is wrong by these."""
    exact = torch.ones(ROWS, COLUMNS, dtype=torch.float64)
    pool = Pool()
    pool.add("out", (exact + wrong).double(), exact + yardstick, exact)
    return [line.partition(" of the error")[0].removeprefix("out: ") for line in pool.failures()]


@pytest.mark.parametrize("times", [1.09, 1.11])
def test_the_norm_may_be_a_tenth_more(times: float) -> None:
    error = torch.full((ROWS, COLUMNS), 1e-3, dtype=torch.float64)
    assert judged(times * error, error) == ["norm"] * (times > 1.1)


@pytest.mark.parametrize("times", [2.9, 3.1])
@pytest.mark.parametrize("what", ["worst row", "worst element"])
def test_the_worst_may_be_three_times_as_far(what: str, times: float) -> None:
    """One element, or a row, is wrong by so much, and the others by little."""
    error = torch.full((ROWS, COLUMNS), 1e-3, dtype=torch.float64)
    wrong = 0.1 * error
    wrong[5, slice(None) if what == "worst row" else 7] = times * 1e-3
    of_row = ["worst row", "worst element"]
    assert judged(wrong, error) == (of_row if what == "worst row" else of_row[1:]) * (times > 3)


def test_a_nan_fails_everywhere() -> None:
    wrong = torch.full((ROWS, COLUMNS), 1e-3, dtype=torch.float64)
    wrong[5, 7] = torch.nan
    assert judged(wrong, wrong.nan_to_num(1e-3)) == ["norm", "worst row", "worst element"]


def test_a_row_of_zeros_is_judged_by_the_size_of_the_others() -> None:
    exact, error, pool = torch.ones(ROWS, COLUMNS, dtype=torch.float64), 1e-3, Pool()
    exact[5] = 0
    pool.add("out", exact + error, exact + error, exact)
    assert pool.failures() == []


def test_a_pool_adds_up_errors_and_keeps_the_worst() -> None:
    error, pool = torch.full((ROWS, COLUMNS), 1e-3, dtype=torch.float64), Pool()
    exact = torch.ones_like(error)
    for times in (1.3, 0.5):
        pool.add("out", exact + times * error, exact + error, exact)
    assert not pool.failures() and pool.elements == {"out": 2 * ROWS * COLUMNS}
    pool.add("out", exact + 3.2 * error * (torch.arange(ROWS) == 3)[:, None], exact + error, exact)
    assert len(pool.failures()) == 2
