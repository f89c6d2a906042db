"""The exercises of the tutorial, and what judges solutions of them. For notebooks and IPython started in this folder.

>>> from exercises import EXERCISES, check_exercise
>>> print(EXERCISES["stable_rank"])
>>> check_exercise("stable_rank", my_kernel)
stable_rank: wrong. experts=[3, 1, 0, 1, ...], 100 of them, E=4: ranks[0] is 1, expected 0 (100 of 100 differ)

A solution in NumPy is a function; one for Numba a kernel, with ``cuda.jit`` or without; one in CUDA the text that replaces a
region of a source file. NumPy and Numba are compared with the twins, on random and adversarial inputs. Numba's PTX runs on the
machine (`ptxsim`), which reports races; where Numba can't compile, its simulator runs the kernel instead. CUDA is
compiled by a `Workbench`, whose ``check()`` judges the whole kernel: on a Hopper GPU, elsewhere on the machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from blazeproto import gemm
from blazeproto.activations import activate
from blazeproto.dispatch import reference as dispatch_twin
from blazeproto.gemm.compile import CUDA_SOURCES
from blazeproto.gemm.nvrtc import CompileError
from blazeproto.runtime import checks
from blazeproto.runtime.arrays import simulated

THREADS = 64  # of a block of the Numba exercises: two warps
MOST = 10**6  # instructions of a launch
SECONDS = 300  # that another process may take
Launch = Callable[
    ..., str
]  # of a kernel, with a number of blocks and arrays by name; returns what races, "" if nothing does


@dataclass(frozen=True)
class Exercise:
    """What is asked for.

    name, task: the exercise, and what its solution must do.  judge: takes a solution and returns what is wrong with it, "" if
    nothing is.  judge_launches: the same of a Numba kernel, whose `Launch` it takes.
    file, first, last: of a CUDA exercise, the source file and the first and the last line of what is replaced.
    product: of a CUDA exercise, the one that `Workbench` checks.
    """

    name: str
    task: str
    judge: Callable[[Any], str] | None = None
    judge_launches: Callable[[Launch], str] | None = None
    file: str = ""
    first: str = ""
    last: str = ""
    product: str = ""

    def __str__(self) -> str:
        return textwrap.fill(self.task, 100)

    @property
    def region(self) -> str:
        """The CUDA text that a solution replaces, as the package has it. ValueError for an exercise that is not in CUDA."""
        return self._split(CUDA_SOURCES)[1]

    def edit(self, folder: Path, solution: str) -> None:
        """Replace the region in a folder of edited sources. ValueError if it is not there."""
        before, _, after = self._split(folder)
        (folder / self.file).write_text(before + solution.strip("\n") + "\n" + after)

    def _split(self, folder: Path) -> tuple[str, str, str]:
        """The file's text before the region, in it and after it."""
        if not self.file:
            raise ValueError(f"exercise: expected one in CUDA, got {self.name!r}")
        source = (folder / self.file).read_text()
        before, first, rest = source.partition(self.first)
        region, last, after = rest.partition(self.last)
        if not (first and last) or self.first in rest:
            ends = f"begins with {self.first!r} and ends with {self.last!r}"
            raise ValueError(f"{self.file}: expected one region that {ends}")
        return before, first + region + last, after


@dataclass(frozen=True, repr=False)
class Outcome:
    """What came of a solution; true if it is right.

    report: the first mismatch, or how it was judged.
    """

    name: str
    passed: bool
    report: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{self.name}: {'right' if self.passed else 'wrong'}. {self.report}"


def check_exercise(name: str, solution: Any) -> Outcome:
    """Judge a solution: a function (NumPy), a kernel, with ``cuda.jit`` or without (Numba), or CUDA text.

    ValueError for an unknown exercise; TypeError for a solution of another kind; RuntimeError for a Numba exercise outside the
    simulator, where Numba can't compile. Whatever the solution itself raises is in the report.
    """
    checks.one_of("name", name, tuple(EXERCISES))
    exercise = EXERCISES[name]
    if exercise.file:
        if not isinstance(solution, str):
            raise TypeError(f"solution: expected CUDA text for {name}, got {type(solution).__name__}")
        return _check_cuda(exercise, solution)
    if not callable(solution):
        raise TypeError(f"solution: expected a function for {name}, got {type(solution).__name__}")
    if exercise.judge_launches:
        return _check_numba(exercise, getattr(solution, "py_func", getattr(solution, "fn", solution)))
    assert exercise.judge
    wrong = exercise.judge(solution)
    return Outcome(name, not wrong, wrong or "As the twin on all inputs.")


def has_hopper() -> bool:
    """Whether there is a GPU that runs the products."""
    import torch

    from blazeproto.runtime.arch import arch_of

    return torch.cuda.is_available() and arch_of(torch.cuda.get_device_capability()) is not None


# --- Inputs and comparisons ----------------------------------------------------------------------------------------------


def _routings() -> Iterator[tuple[np.ndarray, int]]:
    """(T, K) ids and E: random ones, all tokens alike, empty experts, ids that are not here, no token."""
    rng = np.random.default_rng(0)
    for num_tokens, num_experts, top_k in ((5, 4, 2), (40, 8, 3), (33, 64, 2), (70, 3, 3), (0, 4, 2)):
        yield rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :top_k].astype(np.int32), num_experts
    yield np.tile(np.array([2, 0], np.int32), (70, 1)), 5
    ids = rng.random((50, 6)).argsort(axis=1)[:, :2]
    yield np.where(rng.random(ids.shape) < 0.4, rng.choice([-1, 6, 1000], ids.shape), ids).astype(np.int32), 6
    yield np.full((9, 2), -1, np.int32), 3


def _shown(array: np.ndarray, places: int = 12) -> str:
    flat = array.reshape(-1).tolist()
    return f"[{', '.join(map(str, flat[:places]))}{', ...' if len(flat) > places else ''}]"


def _mismatch(name: str, got: Any, expected: np.ndarray, tolerance: float = 0.0) -> str:
    """The first place where ``got`` is not as expected; "" if there is none."""
    if got is None or got is Ellipsis:
        return f"{name}: nothing came back"
    got = np.asarray(got)
    if got.shape != expected.shape:
        return f"{name}: expected shape {expected.shape}, got {got.shape}"
    if got.dtype.kind not in "biuf":
        return f"{name}: expected numbers, got dtype {got.dtype}"
    differs = ~(np.abs(got.astype(float) - expected) <= tolerance)  # so that NaN differs
    if not differs.any():
        return ""
    place = int(np.flatnonzero(differs)[0])
    found, right = (f"{value:.6g}" if tolerance else str(value) for value in (got.flat[place], expected.flat[place]))
    return f"{name}[{place}] is {found}, expected {right} ({int(differs.sum())} of {differs.size} differ)"


def _first_wrong(cases: Iterator[tuple[str, Callable[[], str]]]) -> str:
    """The first case whose judgement is not "", with what its input was."""
    for label, run in cases:
        try:
            wrong = run()
        except Exception as error:  # noqa: BLE001  a solution may raise anything
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return f"{label}: {wrong}"
    return ""


# --- NumPy ---------------------------------------------------------------------------------------------------------------


def _judge_dispatch_lists(solution: Callable[..., Any]) -> str:
    names = ("expert_pair_indices", "expert_token_offsets", "token_index_map")

    def run(ids: np.ndarray, num_experts: int) -> str:
        expected = dispatch_twin.build_dispatch(ids, num_experts)
        got = solution(ids.copy(), num_experts)
        if not isinstance(got, tuple) or len(got) != 3:
            nothing = got is None or got is Ellipsis
            return f"expected three arrays, got {'nothing' if nothing else type(got).__name__}"
        lines = (_mismatch(name, array, getattr(expected, name)) for name, array in zip(names, got, strict=True))
        return next(filter(None, lines), "")

    return _first_wrong(
        (f"topk_experts={_shown(ids)} of shape {ids.shape}, E={num_experts}", partial(run, ids, num_experts))
        for ids, num_experts in _routings()
    )


def _judge_score_gradient(solution: Callable[..., Any]) -> str:
    def run(ids: np.ndarray, num_experts: int) -> str:
        rng, d, n = np.random.default_rng(1), 8, 16
        dispatch = dispatch_twin.build_dispatch(ids, num_experts)
        d_out, h = rng.normal(size=(len(ids), d)), rng.normal(size=(ids.size, 2 * n))
        down_proj, scores = rng.normal(size=(num_experts, d, n)), rng.random(ids.size, np.float32) + 0.05
        expected = gemm.down_backward_act(d_out, down_proj, h, scores, dispatch)[2]
        d_act = gemm.grouped_mm(d_out, down_proj, dispatch, gather=True, transposed=True)
        got = solution(d_act, activate(h, "swiglu"), dispatch.expert_pair_indices.copy())
        return _mismatch("dS", got, expected, 1e-4)

    return _first_wrong(
        (f"topk_experts={_shown(ids)} of shape {ids.shape}, E={num_experts}", partial(run, ids, num_experts))
        for ids, num_experts in _routings()
    )


# --- Numba ---------------------------------------------------------------------------------------------------------------


def _check_numba(exercise: Exercise, kernel: Callable[..., Any]) -> Outcome:
    """On the machine. Beside the simulator Numba compiles nothing, so that another process judges for this one."""
    assert exercise.judge_launches
    if not simulated():
        if reason := _unable():
            raise RuntimeError(f"{reason}: set NUMBA_ENABLE_CUDASIM=1 before numba is imported, for Numba's simulator")
        wrong = exercise.judge_launches(partial(_launch_on_machine, kernel))
        return Outcome(exercise.name, not wrong, wrong or "As the twin on all inputs, and without a race.")
    outcome = _outcome_of_another_process(exercise.name, kernel)
    if isinstance(outcome, Outcome):
        return outcome
    wrong = exercise.judge_launches(partial(_launch_in_simulator, kernel))
    simulator = f"In Numba's simulator, which reports no race ({outcome})"
    return Outcome(exercise.name, not wrong, wrong or f"{simulator}: as the twin on all inputs.")


@cache
def _ptx(kernel: Callable[..., Any]) -> str:
    """Of a kernel that takes two arrays of int32."""
    from blazeproto.runtime.numba import cuda, types

    array = types.Array(types.int32, 1, "C")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a function that is in no file
        made = cuda.compile(
            kernel, types.void(array, array), device=False, abi="numba", cc=(9, 0), output="ptx", lineinfo=True
        )
    return made[0] if isinstance(made[0], str) else made[0].decode()


def _unable() -> str:
    """Why Numba compiles no kernel at all here; "" where it does."""

    def nothing(experts: Any, counts: Any) -> None: ...

    try:
        _ptx(nothing)
    except Exception as error:  # noqa: BLE001  of a missing library, whatever says so
        return f"Numba can't compile here: {type(error).__name__}"
    return ""


def _launch_on_machine(kernel: Callable[..., Any], blocks: int, **arrays: np.ndarray) -> str:
    import ptxsim

    words = []  # of an array as Numba's kernels take it, but its address: no owner, size, bytes of an element, shape, stride
    for array in arrays.values():
        words += [0, 0, array.size, array.itemsize, array, array.size, array.itemsize]
    return "\n".join(map(str, ptxsim.run(_ptx(kernel), blocks, THREADS, words, most=MOST).races))


def _outcome_of_another_process(name: str, kernel: Callable[..., Any]) -> Outcome | str:
    """What `check_exercise` says of a kernel outside the simulator, or why it can't."""
    from numba import cloudpickle

    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, __file__, name],
            input=cloudpickle.dumps(kernel),
            capture_output=True,
            env=environment,
            timeout=SECONDS,
            check=True,
        )
        return Outcome(name, *json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error).encode()).decode().strip()
        return said.splitlines()[-1].removeprefix("RuntimeError: ").partition(": set ")[0]


def _judge_kernel_of_another_process() -> None:
    """Of the exercise that the command line names, the kernel on standard input."""
    from numba import cloudpickle

    outcome = check_exercise(sys.argv[1], cloudpickle.load(sys.stdin.buffer))
    print(json.dumps([outcome.passed, outcome.report]))


class GlobalMemory:
    """An array as a simulated kernel sees it: an index out of bounds is an error, and a read takes a while.

    The simulator starts a block's threads one after the other, and a short thread ends before the next one begins. A read that
    takes longer than that lets them meet, as they do on a GPU.
    """

    LONGEST_READ = 1e-3  # seconds

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array, self.shape, self.size = name, array, array.shape, array.size

    def __len__(self) -> int:
        return self.size

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{self.name}[{index}] is out of bounds: it has {self.size} elements")
        return int(index)

    def __getitem__(self, index: int) -> Any:
        value = self.array[self._checked(index)]
        time.sleep(random.uniform(0, self.LONGEST_READ))
        return value

    def __setitem__(self, index: int, value: Any) -> None:
        self.array[self._checked(index)] = value


def _launch_in_simulator(kernel: Callable[..., Any], blocks: int, **arrays: np.ndarray) -> str:
    from blazeproto.runtime.numba import cuda

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the simulator waits in a loop, which would keep the interpreter from its threads
    try:
        cuda.jit(kernel)[blocks, THREADS](*(GlobalMemory(name, array) for name, array in arrays.items()))
    finally:
        sys.setswitchinterval(interval)
    return ""


def _lists_of_ids() -> Iterator[tuple[np.ndarray, int]]:
    """Ids (P,) and E, P mostly no multiple of a block."""
    rng = np.random.default_rng(2)
    yield rng.integers(0, 4, 100).astype(np.int32), 4
    yield np.zeros(THREADS, np.int32), 2
    yield rng.integers(-1, 4, 2 * THREADS + 37).astype(np.int32), 3  # -1 and 3 are elsewhere
    yield np.array([1], np.int32), 8


def _judge_expert_histogram(launch: Launch) -> str:
    def run(ids: np.ndarray, num_experts: int) -> str:
        counts = np.zeros(num_experts, np.int32)
        race = launch(1, experts=ids, counts=counts)
        expected = dispatch_twin.build_dispatch(ids[:, None], num_experts).expert_token_offsets
        return race or _mismatch("counts", counts, np.diff(expected))

    return _judged(run)


def _judge_stable_rank(launch: Launch) -> str:
    def run(ids: np.ndarray, num_experts: int) -> str:
        ranks, expected = np.full(ids.size, -77, np.int32), np.full(ids.size, -1, np.int32)
        for start in range(0, ids.size, THREADS):
            # A pair's row in the dispatch of its chunk, less its expert's first row.
            chunk = ids[start : start + THREADS]
            dispatch = dispatch_twin.build_dispatch(chunk[:, None], num_experts)
            here = (chunk >= 0) & (chunk < num_experts)
            first_rows = dispatch.expert_token_offsets[chunk[here]]
            expected[start : start + THREADS][here] = dispatch.token_index_map[here] - first_rows
        experts = np.where(ids < num_experts, ids, np.int32(-1))
        race = launch(-(-ids.size // THREADS), experts=experts, ranks=ranks)
        return race or _mismatch("ranks", ranks, expected)

    return _judged(run)


def _judged(run: Callable[[np.ndarray, int], str]) -> str:
    return _first_wrong(
        (f"experts={_shown(ids)}, {ids.size} of them, E={num_experts}", partial(run, ids, num_experts))
        for ids, num_experts in _lists_of_ids()
    )


# --- CUDA ----------------------------------------------------------------------------------------------------------------


def _check_cuda(exercise: Exercise, solution: str) -> Outcome:
    from blazeproto.lab.workbench import Workbench

    with tempfile.TemporaryDirectory() as parent:
        bench = Workbench(exercise.product, T=150, d=64, n=72, E=3, K=2)  # tails of rows and columns
        exercise.edit(bench.edit(Path(parent) / "cuda"), solution)
        try:
            kernel = bench.kernel
        except CompileError as error:
            return Outcome(exercise.name, False, str(error))
        verdict = bench.check()
    return Outcome(
        exercise.name, bool(verdict), f"{kernel.registers} registers, {kernel.spills} B spilled.\n{verdict!r}"
    )


# --- The table -----------------------------------------------------------------------------------------------------------

EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "dispatch_lists",
            "dispatch_lists(topk_experts, num_experts) -> (expert_pair_indices, expert_token_offsets, token_index_map). "
            "NumPy. topk_experts (T, K) int32; an id outside [0, E) is not here: its pair has no row, its token_index_map is -1, "
            "and what is left at the end of expert_pair_indices is -1.",
            _judge_dispatch_lists,
        ),
        Exercise(
            "score_gradient",
            "score_gradient(d_act, act, expert_pair_indices) -> dS (P,). NumPy. d_act and act (R, n) are by row; dS of a pair is "
            "the inner product of its row of both. Pairs without a row have dS = 0, and rows without a pair (index -1) hold NaN.",
            _judge_score_gradient,
        ),
        Exercise(
            "expert_histogram",
            "expert_histogram(experts, counts): a Numba kernel of one block. counts (E,) comes in as zeros and leaves with the "
            "number of pairs of each expert. experts (P,) may have more elements than there are threads, and ids outside [0, E).",
            judge_launches=_judge_expert_histogram,
        ),
        Exercise(
            "stable_rank",
            f"stable_rank(experts, ranks): a Numba kernel of {THREADS} threads a block, each with one pair of its block's chunk. "
            "ranks[p] = how many pairs before p in the same chunk have the same expert, -1 where experts[p] is -1. "
            "The last chunk may be shorter.",
            judge_launches=_judge_stable_rank,
        ),
        Exercise(
            "silu_by_exp",
            "CUDA, in layout.cuh, for up.cu's epilogue: act = SiLU(gate) * up of one hidden unit, with SiLU(x) = "
            "x / (1 + exp(-x)) by exp2_approx and reciprocal_approx instead of tanh_approx.",
            file="layout.cuh",
            first="DEVICE float act_of(float gate, float up) {\n",
            last="\n}\n",
            product="up_forward",
        ),
        Exercise(
            "swiglu_backward",
            "CUDA, in down_backward.cu's epilogue: add one hidden unit's share to d_score[h] and return {d_gate, d_up, a}, from "
            "d_a, score[h], value = f(gate), slope = f'(gate), up and up_slope.",
            file="down_backward.cuh",
            first="        const float act = value * up, d_a_scaled",
            last="score[h] * act};\n",
            product="down_backward_act",
        ),
    )
}

if __name__ == "__main__":
    _judge_kernel_of_another_process()
