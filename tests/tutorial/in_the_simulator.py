"""Judges the Numba exercises beside the simulator: another process reports the race; where it can't, the simulator runs the
kernels, and the report says so. Prints what is not so.

NUMBA_ENABLE_CUDASIM=1 python in_the_simulator.py
"""

import runpy
import sys
from pathlib import Path

from numba import cuda
from wrong_numba import WRONG, without_syncthreads

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
sys.path.insert(0, str(TUTORIAL))

import exercises  # noqa: E402
from exercises import check_exercise  # noqa: E402

RACES = ("racing", "without_a_barrier", "without_syncthreads")  # which the simulator may miss


def main() -> None:
    said = [
        repr(check_exercise("stable_rank", kernel))
        for kernel in (without_syncthreads, cuda.jit(solution("stable_rank")))
    ]
    lines = [f"not found by another process: {said[0]}"] * ("race in byte" not in said[0])
    lines += [f"not right in another process: {said[1]}"] * ("right. As the twin on all inputs, and" not in said[1])
    exercises._outcome_of_another_process = lambda *_: "Numba can't compile here: ImportError"
    for name, wrong in WRONG.items():
        outcome = check_exercise(name, solution(name))
        if not outcome or "In Numba's simulator, which reports no race (Numba can't" not in outcome.report:
            lines.append(repr(outcome))
        mistakes = [kernel for kernel in wrong if kernel.__name__ not in RACES]
        lines += [f"{name}: {kernel.__name__} passed" for kernel in mistakes if check_exercise(name, kernel)]
    print("\n".join(lines))
    sys.exit(bool(lines))


def solution(name: str):
    return runpy.run_path(str(TUTORIAL / "solutions" / f"{name}.py"))[name]


if __name__ == "__main__":
    main()
