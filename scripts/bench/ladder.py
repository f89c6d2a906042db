"""The kernels of docs/ladder on one dense product, and rung 6's on grouped rows.

    python -m scripts.bench.ladder                     # all -> results/h200/ladder.json on an H200
    python -m scripts.bench.ladder --configs 1,4

m = n = k = 4096, bf16, random normal data; rung 6: 32768 tokens, 8 of 128 random experts each, d = 2048, n = 768. Each kernel
is first compared with float64 on the small sizes of its notebook. Times are medians over rounds by CUDA events, the GPU being
held until all calls of a round are queued; operands of the dense product lie in the L2 cache.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.bench.common import REPOSITORY
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row

sys.path.append(str(REPOSITORY / "docs" / "ladder"))
RUNGS: dict[str, Any] = import_module("rungs").RUNGS
NUMBERS = {rung.entry: int(Path(rung.file).name[0]) for rung in RUNGS.values()}
RISING = ((1, 2), (2, 3), (4, 5))
LEAST_OF_DENSE = 0.85  # of rung 5's TFLOP/s, by rung 6


def measure(entry: str, machine: Machine) -> Row:
    """One row of the results."""
    rung = RUNGS[entry]
    if not (judgement := rung.check()):
        raise RuntimeError(f"{entry}: expected a right result, got {judgement!r}")
    speed = rung.time(machine.rounds)
    assert speed.ms is not None and speed.tflops is not None
    figures = {"ms": round(speed.ms, 4), "tflops": round(speed.tflops, 2), "floor_ms": round(rung.floor(), 4)}
    return {"rung": NUMBERS[entry], "file": rung.file, "sizes": [*rung.timed]} | figures


def of_entry(entry: str) -> Row:
    return {"entry": entry}


def bounds(record: Row) -> list[tuple[str, bool]]:
    """The bounds of the results, in words, and whether they hold. A rung's speed is its fastest kernel's."""
    best: dict[int, float] = {}
    for row in record["rows"]:
        best[row["rung"]] = max(best.get(row["rung"], 0.0), row["tflops"])
    found = []
    for lower, upper in RISING:
        if {lower, upper} <= best.keys():
            said = f"rung {upper}: {best[upper]:.1f} TFLOP/s, more than rung {lower}'s {best[lower]:.1f}"
            found.append((said, best[upper] > best[lower]))
    if {5, 6} <= best.keys():
        share = best[6] / best[5]
        found.append((f"rung 6: {share:.2f} of rung 5's TFLOP/s, at least {LEAST_OF_DENSE}", share >= LEAST_OF_DENSE))
    return found


BENCH = Bench("ladder", __doc__, {"kernels": Item(measure, tuple(RUNGS), key=of_entry, rounds=10)}, bounds=bounds)


if __name__ == "__main__":
    run(BENCH)
