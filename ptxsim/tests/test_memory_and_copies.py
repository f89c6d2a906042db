"""Memory, atomics, copies, products, and lanes that meet: what a GPU makes of them, and what is an error."""

import sys

import numpy as np
import pytest
from small_kernels import INTS, cuda, faults_of, ptx, zeros

import ptxsim
from ptxsim import Arrays, MachineError, Program, Report
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


# --- Warps and lanes that meet: masks of members, barriers, mbarriers, and what of them is an error ----------------------


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

    assert report("").races and not report("__syncthreads();").races and (out == x.cumsum()).all()


# --- Lanes that branched apart meet at what they all take part in, also where some come from further back in the text ----


TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry program(.param .u64 program_param_0)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 kept[4];
    ld.param.u64 %rd1, [program_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r4, kept;
    mov.u32 %r2, 1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $FAR;
$HERE:
    MEET
    ld.shared.u32 %r3, [%r4];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r3;
    ret;
$FAR:
    mov.u32 %r2, 7;
    st.shared.u32 [%r4], %r2;
    THEN
}
"""


def result_of(meet: str, then: str, threads: int) -> list[int]:
    out = np.zeros(threads, np.uint32)
    for seed in range(5):
        out[:] = 0
        assert not ptxsim.run(TEXT.replace("MEET", meet).replace("THEN", then), 1, threads, [out], seed=seed).races
    return out.tolist()


@pytest.mark.parametrize(
    ("meet", "threads"),
    [
        ("bar.sync 0;", 64),
        ("bar.warp.sync 0xffffffff;", 32),
        ("redux.sync.add.s32 %r3, %r2, 0xffffffff;", 32),
        ("shfl.sync.idx.b32 %r3, %r2, 0, 31, 0xffffffff;", 32),
        ("vote.sync.any.pred %p2, %p1, 0xffffffff;", 32),
        ("elect.sync %r3|%p2, 0xffffffff;", 32),
    ],
)
def test_lanes_wait_for_those_from_further_on(meet: str, threads: int) -> None:
    assert result_of(meet, "bra $HERE;", threads) == [7] * threads


@pytest.mark.parametrize("meet", ["bar.sync 0;", "bar.warp.sync 0xffffffff;"])
def test_lanes_at_their_end_are_not_waited_for(meet: str) -> None:
    assert result_of(meet, "ret;", 32) == [0] + [7] * 31
