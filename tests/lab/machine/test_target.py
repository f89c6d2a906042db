"""Kernels of the package on ptxsim: launches of several GPUs, a kernel of Numba, one of NVRTC; the old names warn."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

import ptxsim
from blazeproto import gemm, lab
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm.compile import CUDA_SOURCES, Kernel
from blazeproto.lab.target import Machine
from blazeproto.runtime import rounding
from ptxsim import floats

ADD = """
#include "ptx.cuh"
extern "C" __global__ void add(float* y, uint32_t count) { if (threadIdx.x < count) y[threadIdx.x] += 1; }
"""


def test_launches_of_the_package_on_two_gpus() -> None:
    """Each with its own arrays; held back until all are there."""
    draw, dispatch = np.random.default_rng(0), build_dispatch(np.array([[0, 1], [1, 0]], np.int32), 2)
    y = [draw.integers(0, 2**14, (4, 64), np.uint16) for _ in range(2)]
    machine, alone = Machine(), Machine()
    made: list[np.ndarray] = []
    report = machine.together([lambda rows=rows: made.append(gemm.combine(rows, dispatch)) for rows in y])
    alone.together([lambda: made.extend(gemm.combine(rows, dispatch) for rows in y)], resident=1)
    assert not report.races and machine.reports == [report]
    assert (made[0] == made[2]).all() and (made[1] == made[3]).all() and (made[0] != made[1]).any()


def test_a_kernel_of_numba() -> None:
    from blazeproto.runtime.arrays import simulated
    from blazeproto.runtime.numba_kernel import NumbaKernel

    if simulated():
        pytest.skip("Numba's simulator compiles nothing")
    kernel, values = NumbaKernel(doubling, "int32* int64", threads=32), np.arange(40, dtype=np.int32)
    ptxsim.run(kernel, 2, 32, [values, 35])
    assert (values[:35] == 2 * np.arange(35)).all() and values[35] == 35


def doubling(threads: int) -> Any:
    from blazeproto.runtime.numba import cuda

    def kernel(values: Any, count: int) -> None:
        place = cuda.grid(1)
        if place < count:
            values[place] = 2 * values[place]

    return kernel


def test_a_kernel_that_includes_the_headers_of_the_package(tmp_path: Path) -> None:
    y = np.zeros(4, np.float32)
    (tmp_path / "add.cu").write_text(ADD)
    ptxsim.run(Kernel(str(tmp_path / "add.cu"), "add"), 1, 32, [y, 4])
    ptxsim.run(ADD, 1, 32, [y, 3], options=[f"-I{CUDA_SOURCES}"])
    assert y.tolist() == [2, 2, 2, 1]


def test_e4m3_is_the_same_in_both() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(300)
    assert np.array_equal(floats.E4M3, rounding.E4M3, equal_nan=True)
    assert (floats.e4m3_bits(values) == rounding.e4m3_bits(values)).all()


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        ("lab", "run", "ptxsim.run"),
        ("lab", "run_together", "ptxsim.run_together"),
        ("lab", "step", "ptxsim.step"),
        ("lab", "tensor_map", "ptxsim.tensor_map"),
        ("lab.machine", "Machine", "blazeproto.lab.target.Machine"),
        ("lab.machine", "Stepper", "ptxsim.Stepper"),
        ("lab.spans", "Timeline", "blazeproto.lab.timeline.Timeline"),
        ("lab.mismatch", "Comparison", "blazeproto.lab.verdict.Comparison"),
    ],
)
def test_an_old_name_warns_and_says_the_new_one(module: str, name: str, new: str) -> None:
    home = importlib.import_module(f"blazeproto.{module}")
    with pytest.warns(DeprecationWarning, match=f"{name} is {new} now"):
        old = getattr(home, name)
    place, _, attribute = new.rpartition(".")
    assert not isinstance(old, type) or old is getattr(importlib.import_module(place), attribute)
    assert not hasattr(home, "nothing_of_this_name")


def test_old_functions_find_the_headers_of_the_package() -> None:
    y = np.zeros(4, np.float32)
    with pytest.warns(DeprecationWarning, match="lab.run is ptxsim.run now"):
        lab.run(ADD, 1, 32, [y, 4])
    assert y.tolist() == [1, 1, 1, 1]
