"""What every test shares: the ``gpu`` marker skips where there is no Hopper GPU; seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


def _why_no_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device of compute capability 9.0, there is none"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs a CUDA device of compute capability 9.0, this one has {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_hopper()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
