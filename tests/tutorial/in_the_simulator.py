"""Judges the Numba exercises: solutions are right, wrong ones are found. Prints what is not so.

NUMBA_ENABLE_CUDASIM=1 python in_the_simulator.py [repeats]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from numba import cuda
from wrong_numba import WRONG

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
SOLUTIONS = TUTORIAL / "solutions"
sys.path.insert(0, str(TUTORIAL))

from exercises import check_exercise  # noqa: E402


def main(repeats: int) -> None:
    lines = []
    for name, wrong in WRONG.items():
        for _ in range(repeats):
            solution = runpy.run_path(str(SOLUTIONS / f"{name}.py"))[name]
            outcomes = [check_exercise(name, kernel) for kernel in (solution, cuda.jit(solution))]
            lines += [repr(outcome) for outcome in outcomes if not outcome]
            lines += [f"{name}: {kernel.__name__} passed" for kernel in wrong if check_exercise(name, kernel)]
    print("\n".join(lines))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
