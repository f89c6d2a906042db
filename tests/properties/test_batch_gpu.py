"""A token's bits whatever else is in its batch: some of the random layers of scripts.checks.batch_invariance."""

from collections import Counter

import pytest

from scripts.checks.batch_invariance import WAYS, Case, run_case

pytestmark = pytest.mark.gpu
QUICK = [way for way in WAYS if way != "compiled"]


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_no_token_differs(seed: int, backend: str) -> None:
    assert not run_case(Case.drawn(seed), QUICK, Counter(), backend)


@pytest.mark.parametrize("d_shared", [False, True])
def test_no_token_differs_compiled(d_shared: bool, backend: str) -> None:
    cases = (case for case in map(Case.drawn, range(2000, 3000)) if case.T > 100 and not case.elsewhere)
    assert not run_case(
        next(case for case in cases if bool(case.d_shared) == d_shared), ["compiled"], Counter(), backend
    )
