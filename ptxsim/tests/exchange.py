"""Runs exchange.cu on several GPUs at once, for several epochs, with what a planted fault changes in it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import ptxsim
from ptxsim import MachineError, Report

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
