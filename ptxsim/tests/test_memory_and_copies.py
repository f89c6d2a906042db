"""Memory, atomics, copies and products: what a GPU makes of them, and what is an error."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from small_kernels import cuda, faults_of, ptx, zeros

import ptxsim
from ptxsim import Arrays, MachineError, Program
from ptxsim.schedule import run as run_program

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_sums_of_subnormals(space: str) -> None:
    """PTX ISA §9.7.13.5: atom.add.f32 flushes subnormals in global memory, and not in shared memory."""
    out = zeros(2, np.uint32)
    to = "mov.u64 %rd1, s; st.shared.u32 [%rd1], 0;" if space == "shared" else ""
    back = "ld.shared.u32 %r1, [%rd1]; ld.param.u64 %rd1, [o]; st.global.u32 [%rd1], %r1;" if to else ""
    body = f"{to} mov.b32 %f1, 5; red.{space}.add.f32 [%rd1], %f1; {back}"
    ptxsim.run(ptx(body, before=".shared .align 4 .b8 s[4];"), 1, 1, [out])
    assert out[0] == (5 if to else 0)


@pytest.mark.parametrize("fence", ["fence();", ""])
def test_a_slot_that_threads_read_is_loaded_again_behind_a_proxy_fence(fence: str) -> None:
    """Readers arrive, TMA waits for them, and loads. PTX ISA §8: what two proxies access is ordered by a proxy fence alone,
    reads by threads before writes by the async proxy too, although kernels that leave it out are not rare."""
    body = """__shared__ __align__(128) u32 s[32]; __shared__ u64 full, empty;
    if (!threadIdx.x) { init(&full, 1); init(&empty, 32); fence(); } __syncthreads();
    if (threadIdx.x == 0) for (int i = 0; i < 3; i++) {
        wait(&empty, i % 2 ^ 1); expect(&full, 128);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            :: "r"(at(s)), "l"(&map), "r"(at(&full)), "r"(0), "r"(i) : "memory");
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int i = 0; i < 3; i++) { wait(&full, i % 2); sum += s[threadIdx.x - 32]; FENCE arrive(&empty); }
        o[threadIdx.x - 32] = sum;
    }"""
    data, out = np.arange(64, dtype=np.int32).reshape(8, 8), zeros()
    report = ptxsim.run(
        cuda(body.replace("FENCE", fence), "const __grid_constant__ Map map, int* o"),
        1,
        64,
        [ptxsim.tensor_map(data, (4, 8)), out],
    )
    assert (out[:32] == sum(data[i : i + 4].ravel() for i in range(3))).all()
    assert bool(report.races) != bool(fence)


def test_what_cp_async_copies_of_nobody_s_bytes() -> None:
    """`Arrays.empty`: "kernels that read it are told so", also by way of cp.async (and of TMA)."""
    body = """__shared__ alignas(16) int s[128]; copy(s + threadIdx.x * 4, x + threadIdx.x * 4); COMMIT; WAIT(0);
    o[threadIdx.x] = s[threadIdx.x * 4];"""
    arrays = Arrays()
    given, out = arrays.empty((128,), np.int32), zeros(32)
    parameters = b"".join(arrays.address(array).to_bytes(8, "little") for array in (out, given))
    with pytest.raises(MachineError, match="nobody wrote"):
        run_program(Program.read(ptxsim.compile(cuda(body)).ptx), None, (1,), (32,), parameters, memory=arrays.memory)


@pytest.mark.parametrize("mask", [0, 7])
def test_a_multicast_to_nobody_and_to_ranks_that_there_are_not(mask: int) -> None:
    body = f"""__shared__ __align__(128) u32 s[32]; __shared__ u64 b; if (!threadIdx.x) {{ init(&b, 1); fence(); expect(&b, 128);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {{%3, %3}}], [%2], %4;" :: "r"(at(s)), "l"(&map), "r"(at(&b)), "r"(0), "h"((short){mask}) : "memory"); }}
    __syncthreads(); wait(&b, 0);"""
    box = ptxsim.tensor_map(np.zeros((8, 8), np.int32), (4, 8))
    faults_of(cuda(body, "const __grid_constant__ Map map"), [box])
