"""Warps and lanes that meet: masks of members, barriers, mbarriers, and what of them is an error."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from small_kernels import INTS, cuda, zeros

import ptxsim
from ptxsim import MachineError, Report

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


def test_a_lock_taken_by_lanes_of_one_warp_does_not_end() -> None:
    """On a GPU it does, since Volta (CUDA guide, "Independent Thread Scheduling"); here the lanes further back spin for ever."""
    body = """__shared__ int lock; if (!threadIdx.x) lock = 0; __syncthreads();
    while (atomicCAS(&lock, 0, 1)); o[0] += 1; __threadfence(); atomicExch(&lock, 0);"""
    with pytest.raises(MachineError, match=r"more than 2000 instructions\n  CTA 0, warp 0 at kernel.cu:\d+") as error:
        ptxsim.run(cuda(body), 1, 32, [zeros(), INTS], most=2000)
    assert error.value.report.steps == 2001


def test_prefix_sums_race_without_their_second_barrier() -> None:
    body = """__shared__ int s[256]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();
    for (int d = 1; d < 256; d *= 2) {
        int v = threadIdx.x >= d ? s[threadIdx.x - d] : 0; BARRIER s[threadIdx.x] += v; __syncthreads();
    } o[threadIdx.x] = s[threadIdx.x];"""
    x, out = np.arange(256, dtype=np.int32), zeros(256)

    def report(barrier: str) -> Report:
        return ptxsim.run(cuda(body.replace("BARRIER", barrier)), 1, 256, [out, x])

    assert report("").races
    assert not report("__syncthreads();").races and (out == x.cumsum()).all()
