"""Warps and lanes that meet: masks of members, barriers, mbarriers, and what of them is an error."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from small_kernels import INTS, cuda, faults_of, out_of, zeros

import ptxsim
from ptxsim import MachineError, Report

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("__ballot_sync(mask, x[threadIdx.x] % 2)", [0xAAAA, 0xAAAA0000 - 2**32]),
        ("__any_sync(mask, x[threadIdx.x] == 3)", [1, 0]),
        ("__reduce_add_sync(mask, x[threadIdx.x])", [120, 376]),
        ("__shfl_sync(mask, x[threadIdx.x], 15, 16)", [15, 31]),
    ],
)
def test_halves_of_a_warp_with_masks_of_their_own(call: str, expected: list[int]) -> None:
    """One instruction, two masks, as cooperative groups' tiles have them: each half gets its own result."""
    source = cuda(f"unsigned mask = threadIdx.x < 16 ? 0xffff : 0xffff0000; o[threadIdx.x] = {call};")
    assert out_of(source)[:32] == [expected[0]] * 16 + [expected[1]] * 16


@pytest.mark.parametrize(
    "body",
    [
        "o[threadIdx.x] = __ballot_sync(1, x[threadIdx.x]);",
        "o[threadIdx.x] = __any_sync(0xff, x[threadIdx.x]);",
        "o[threadIdx.x] = __shfl_sync(0xff, x[threadIdx.x], 0);",
        "__syncwarp(0xff); o[threadIdx.x] = 1;",
    ],
)
def test_a_lane_that_its_own_mask_leaves_out(body: str) -> None:
    """PTX ISA §9.7.9.6, §9.7.13: undefined where the executing thread is not in the membermask."""
    faults_of(cuda(body), [zeros(), INTS])


@pytest.mark.parametrize("threads", [32, 8])
def test_a_reduction_of_eight_lanes(threads: int) -> None:
    """shfl.down from a lane without a part gives an undefined value, which is no fault unless it is used (CUDA guide 10.22)."""
    body = """int v = x[threadIdx.x]; if (threadIdx.x < 8) {
    for (int i = 4; i; i /= 2) v += __shfl_down_sync(0xff, v, i);
    if (!threadIdx.x) o[0] = v; }"""
    assert out_of(cuda(body), threads)[0] == 28


@pytest.mark.parametrize(("threads", "stay"), [(64, 32), (96, 64), (64, 40)])
def test_threads_that_have_ended_hold_no_barrier(threads: int, stay: int) -> None:
    """PTX ISA, exit: "If the exiting threads are holding up the barrier, the barrier is released." """
    body = f"""if (threadIdx.x >= {stay}) return; __shared__ int s[{stay}];
    s[threadIdx.x] = x[threadIdx.x % 64]; __syncthreads(); if (!threadIdx.x) o[0] = s[{stay - 1}];"""
    assert out_of(cuda(body), threads)[0] == stay - 1


@pytest.mark.parametrize("meet", ["__syncwarp();", 'asm volatile("barrier.sync 0;" ::: "memory");'])
def test_lanes_meet_at_barriers_of_two_branches(meet: str) -> None:
    """PTX ISA: bar.warp.sync and barrier.sync without .aligned wait for threads, not for one place in the text."""
    body = f"""__shared__ volatile int s[32]; const int i = threadIdx.x;
    if (i < 16) {{ s[i] = i; {meet} o[i] = s[i + 16]; }} else {{ s[i] = 2 * i; {meet} o[i] = s[i - 16]; }}"""
    assert out_of(cuda(body))[:32] == [*range(32, 64, 2), *range(16)]


def test_a_lock_taken_by_lanes_of_one_warp_does_not_end() -> None:
    """On a GPU it does, since Volta (CUDA guide, "Independent Thread Scheduling"); here the lanes further back spin for ever."""
    body = """__shared__ int lock; if (!threadIdx.x) lock = 0; __syncthreads();
    while (atomicCAS(&lock, 0, 1)); o[0] += 1; __threadfence(); atomicExch(&lock, 0);"""
    with pytest.raises(MachineError, match=r"more than 2000 instructions\n  CTA 0, warp 0 at kernel.cu:\d+") as error:
        ptxsim.run(cuda(body), 1, 32, [zeros(), INTS], most=2000)
    assert error.value.report.steps == 2001


def test_barrier_cta_arrive_does_not_wait() -> None:
    """PTX ISA §9.7.13.1: barrier{.cta}.arrive."""
    asm = 'asm volatile("{}" ::: "memory");'.format
    first = asm("barrier.cta.arrive 1, 64;") + asm("barrier.cta.sync 2, 64;")
    second = asm("barrier.cta.sync 2, 64;") + asm("barrier.cta.sync 1, 64;")
    body = f"if (threadIdx.x < 32) {{ {first} }} else {{ {second} }} o[threadIdx.x] = 1;"
    assert sum(out_of(cuda(body), 64)) == 64


def test_test_wait_answers_each_lane() -> None:
    body = """__shared__ u64 b[2]; if (!threadIdx.x) { init(b, 1); init(b + 1, 1); arrive(b); }
    __syncthreads(); u32 r;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
        : "=r"(r) : "r"(at(b + threadIdx.x % 2)) : "memory");
    o[threadIdx.x] = r;"""
    assert out_of(cuda(body))[:32] == [1, 0] * 16


@pytest.mark.parametrize(
    "body",
    [
        "__shared__ u64 b; if (!threadIdx.x) init(&b, 1); __syncthreads(); wait(&b, 2);",
        "__shared__ u64 b[2]; if (!threadIdx.x) { init(b + 100, 1); arrive(b + 100); b[0] = 1; }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); *(volatile u64*)&b = 0; arrive(&b); }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); init(&b, 2); }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); expect(&b, 1 << 20); }",
    ],
)
def test_faulty_use_of_an_mbarrier(body: str) -> None:
    """PTX ISA §9.7.13.15: valid parities, places, counts; only mbarrier operations on an mbarrier object."""
    faults_of(cuda(body), [zeros(), INTS])


def test_tma_onto_an_mbarrier() -> None:
    body = """__shared__ __align__(128) u32 s[32]; u64* b = (u64*)(s + 8);
    if (!threadIdx.x) { init(b, 1); fence(); expect(b, 128);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3}], [%2];"
        :: "r"(at(s)), "l"(&map), "r"(at(b)), "r"(0) : "memory"); } __syncthreads(); wait(b, 0);"""
    box = ptxsim.tensor_map(np.zeros((8, 8), np.int32), (4, 8))
    faults_of(cuda(body, "const __grid_constant__ Map map"), [box])


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
