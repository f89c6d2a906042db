"""A small exchange between GPUs (exchange.cu), right with every seed, and faults planted in it, each found."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ptxsim
from ptxsim import Deadlock, MachineError, Report

THREADS, MOST = 64, 4
SOURCE = Path(__file__).with_name("exchange.cu")


@cache
def ptx(*changes: tuple[str, str]) -> str:
    """PTX of the source with each first text replaced by the second. AssertionError where it has none."""
    text = SOURCE.read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return ptxsim.compile(text).ptx


def exchange(
    kernel: str, seed: int, ranks: int = 2, chunks: int = 3, epochs: int = 3, grid: int = 2, **options: Any
) -> tuple[Report, bool]:
    """What the machine finds, and whether all sums are right."""
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 2**32, (epochs, ranks, chunks * THREADS * 4), np.uint32)
    out = np.zeros_like(x)
    inboxes = [np.zeros((ranks, chunks, THREADS * 4), np.uint32) for _ in range(ranks)]
    arrived, taken = ([np.zeros((ranks, chunks), np.uint32) for _ in range(ranks)] for _ in range(2))
    states = [np.zeros(3, np.uint32) for _ in range(ranks)]
    peers = tuple(array for kind in (inboxes, arrived, taken) for array in (kind * MOST)[:MOST])
    streams = [
        [
            {
                "kernel": kernel,
                "grid": grid,
                "block": THREADS,
                "arguments": [peers, x[epoch, rank], out[epoch, rank], states[rank], rank, ranks, chunks],
            }
            for epoch in range(epochs)
        ]
        for rank in range(ranks)
    ]
    report = ptxsim.run_together(streams, seed=seed, most=10**6, **options)
    return report, bool((out == x.sum(axis=1, dtype=np.uint32, keepdims=True)).all())


def found(kernel: str, seed: int, **sizes: Any) -> set[str]:
    """In what ways a fault shows: "error", "race", "values"."""
    try:
        report, right = exchange(kernel, seed, **sizes)
    except MachineError as error:
        return {"error"} | ({"race"} if error.report and error.report.races else set())
    return ({"race"} if report.races else set()) | (set() if right else {"values"})


STORED = "if (peer != rank) p.inbox[peer][(rank * chunks + chunk) * THREADS + thread] = mine;\n"
BARRIER = "        __syncthreads();\n"
SIGNAL = "        if (thread < ranks && thread != rank) signal(p.arrived[thread] + rank * chunks + chunk);\n"
WAITED = "wait(p.arrived[rank] + thread * chunks + chunk, epoch);\n"


class Fault(NamedTuple):
    """changes: of the source.  shows: "values" where sums are wrong with some seeds."""

    changes: tuple[tuple[str, str], ...]
    shows: str = "race"


FAULTS = {
    "no release": Fault((("red.release.sys", "red.relaxed.sys"),), "values"),
    "a release of the GPU": Fault((("red.release.sys", "red.release.gpu"),), "values"),
    "a fence of the GPU": Fault((('"red.release.sys', '"fence.acq_rel.gpu; red.relaxed.sys'),), "values"),
    "no acquire": Fault((("ld.acquire.sys", "ld.relaxed.sys"),)),
    "an acquire of the GPU": Fault((("ld.acquire.sys", "ld.acquire.gpu"),)),
    "a wait for the epoch before": Fault(((WAITED, WAITED.replace("epoch", "epoch - 1")),), "values"),
    "a buffer reused one step early": Fault((("chunk, epoch - 1);", "chunk, epoch - 2);"),), "values"),
    "a signal before the barrier": Fault(((STORED + BARRIER + SIGNAL, STORED + SIGNAL),), "values"),
    "no barrier behind the wait": Fault(((WAITED + BARRIER, WAITED),), "values"),
    "readers signal before the barrier": Fault((("= sum;\n" + BARRIER, "= sum;\n"),)),
    "a relaxed count of blocks": Fault((("atom.acq_rel.gpu", "atom.relaxed.gpu"),)),
}
FENCED = {
    "a fence before a relaxed signal": (('"red.release.sys', '"fence.acq_rel.sys; red.relaxed.sys'),),
    "a fence behind relaxed loads": (
        ("ld.acquire.sys", "ld.relaxed.sys"),
        ("while (int(found - value) < 0);", "while (int(found - value) < 0);\n    __threadfence_system();"),
    ),
}


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_right(seed: int) -> None:
    assert not found(ptx(), seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{}, {"ranks": 3}, {"ranks": 4, "chunks": 2}, {"grid": 5}, {"resident": 1}, {"ranks": 1}], ids=str
)
def test_sums_are_right_with_many_seeds(sizes: dict[str, int]) -> None:
    assert [seed for seed in range(25) if found(ptx(), seed, **sizes)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", FENCED)
def test_fences_do_for_releases_and_acquires(name: str) -> None:
    assert [seed for seed in range(20) if found(ptx(*FENCED[name]), seed)] == []


@pytest.mark.parametrize(
    "name",
    [name if fault.shows == "values" else pytest.param(name, marks=pytest.mark.full) for name, fault in FAULTS.items()],
)
def test_a_planted_fault_is_found(name: str) -> None:
    kernel = ptx(*FAULTS[name].changes)
    assert any(FAULTS[name].shows in found(kernel, seed) for seed in range(10))


def test_both_places_of_a_race_are_told() -> None:
    report, _ = exchange(ptx(*FAULTS["no release"].changes), 0)
    told = [str(race) for race in report.races]
    stored, read = r"kernel.cu:\d+: st.global.v4.u32 of GPU \d", r"kernel.cu:\d+: ld.global.v4.u32 of GPU \d"
    assert any(
        re.search(rf"argument 0, member \d, uint32.*: a write, then a read\n  {stored}.*\n  {read}", text)
        for text in told
    )


def test_a_signal_that_never_comes_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"GPU 1, launch 0, CTA 0, warp 0 asking again at kernel.cu:\d+ .*which is 0"):
        exchange(ptx((SIGNAL, "")), 0)
