"""The bug of notebook 5. Look at what the machine reports before you read on."""

from __future__ import annotations

from pathlib import Path

ARRIVE = "                cp_async_mbarrier_arrive(ring.full_barrier());\n"
LEFT = "                const int width_left = p.reduction - k - column;\n"


def plant(folder: Path) -> None:
    """Into the sources that lie in ``folder``: a producer's threads say that a stage is full before they copy its rows."""
    path = folder / "varlen_m.cuh"
    text = path.read_text()
    for line in (ARRIVE, LEFT):
        if text.count(line) != 1:
            raise ValueError(f"{path.name}: expected one line {line.strip()!r}, got {text.count(line)}")
    path.write_text(
        text.replace(ARRIVE, "").replace(LEFT, "                mbarrier_arrive(ring.full_barrier());\n" + LEFT)
    )
