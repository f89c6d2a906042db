"""Times are medians: of several rounds neither the best one nor the mean."""

import itertools
import time

import pytest

from blazeproto.lab import times
from scripts.bench import timing
from scripts.bench.timing import KernelTime


def test_kernel_times_are_medians_of_rounds() -> None:
    """Two calls a round count as their mean; the sums of durations have a median of their own."""
    rounds = [(5.0, 20.0), (1.0, 60.0), (9.0, 70.0), (3.0, 80.0), (2.0, 10.0)]
    spans = [KernelTime(busy + step, total + step) for busy, total in rounds for step in (-1.0, 1.0)]
    found = timing._median_of_rounds(spans, 5)
    assert found == KernelTime(3.0, 60.0, (5.0, 1.0, 9.0, 3.0, 2.0))


def test_host_times_are_medians_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.chain.from_iterable((0.0, seconds) for seconds in (0.4, 0.1, 0.9)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing.torch.cuda, "is_available", bool)
    assert timing.host_ms(lambda: None, rounds=3, calls=4) == pytest.approx(1e3 * 0.4 / 4)


def test_times_in_turn_are_medians_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up and three estimates, a burst a round."""
    measured = {"A": iter([0, 50, 50, 50, 4, 1, 9]), "B": iter([0, 60, 60, 60, 7, 8, 2])}
    order: list[str] = []

    def elapsed(call: str, calls: int, *, queued: bool = False) -> float:
        order.append(call)
        return float(next(measured[call]))

    monkeypatch.setattr(times, "elapsed_ms", elapsed)
    calls = {name: name for name in measured}
    assert times.interleaved_ms(calls, rounds=3) == {"A": 4.0, "B": 7.0}  # type: ignore[arg-type]
    assert order[-6:] == ["A", "B"] * 3
