"""How many random cases a property is tried on: the profiles "ci" (`make test`) and "full" (`make test-all`).

A test is parametrized by `SHARDS` and hands its property to `check`. Shard 0 is the ci profile: a quarter as many cases, the same
at every run. The others, marked `full`, draw new cases at every run, from a seed that they print.
"""

import random
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FULL_SHARDS = 5  # each four times as long as the ci profile, so that both together take 21 times as long
COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, **COMMON)
settings.register_profile("full", **COMMON)

SHARDS = pytest.mark.parametrize(
    "shard", [0, *(pytest.param(shard, marks=pytest.mark.full) for shard in range(1, FULL_SHARDS + 1))]
)


def check(property_of: Callable[[Any], None], shard: int, examples: int) -> None:
    """Try ``property_of(data)`` on ``examples`` cases of a full shard, data as of `hypothesis.strategies.data`."""
    if shard == 0:
        settings(settings.get_profile("ci"), max_examples=examples // 4)(given(st.data())(property_of))()
        return
    seed = random.SystemRandom().getrandbits(32)
    print(f"hypothesis seed {seed}, shard {shard}")
    tried = settings(settings.get_profile("full"), max_examples=examples)(given(st.data())(property_of))
    hypothesis.seed(seed)(tried)()
