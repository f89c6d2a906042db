"""Bugs that a hostile reader found: kernels and arguments that the machine took wrongly. A comment says which still fail."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blazeproto import lab
from blazeproto.lab.machine import Machine, MachineError, Program, PtxError, Report
from blazeproto.lab.machine.run import run as run_program
from blazeproto.lab.programs import _text

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")

HEAD = """
typedef unsigned u32;
typedef unsigned long long u64;
__device__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
__device__ void expect(u64* b, u32 n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
}
__device__ bool over(u64* b, u32 parity) {
    u32 r;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(r) : "r"(at(b)), "r"(parity) : "memory");
    return r;
}
__device__ void wait(u64* b, u32 parity) { while (!over(b, parity)); }
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void copy(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(at(to)), "l"(from) : "memory");
}
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
struct alignas(64) Map { char bytes[128]; };
"""
INTS = np.arange(64, dtype=np.int32)


def cuda(body: str, takes: str = "int* o, const int* x", before: str = "", attributes: str = "") -> str:
    return f'{HEAD}{before}\nextern "C" __global__ void {attributes} k({takes}) {{ {body} }}'


def ptx(body: str, takes: str = ".param .u64 o", before: str = "", directives: str = "") -> str:
    """A kernel of which %rd1 is the first parameter."""
    first = "ld.param.u64 %rd1, [o];" if takes else ""
    return f"""
.version 8.7
.target sm_90a
.address_size 64
{before}
.visible .entry k({takes}) {directives}
{{
.reg .pred %p<4>;
.reg .b16 %h<4>;
.reg .b32 %r<12>;
.reg .f32 %f<12>;
.reg .b64 %rd<8>;
{first}
{body}
ret;
}}
"""


def out_of(
    source: str, threads: int = 32, x: Any = INTS, dtype: Any = np.int32, grid: int = 1, **options: Any
) -> list[Any]:
    """What a kernel writes to its 64 numbers. No race may be reported."""
    out = np.zeros(64, dtype)
    report = lab.run(source, grid, threads, [out, x] if "int* x" in source else [out], **options)
    assert not report.races
    return out.tolist()


def faults_of(source: str, arguments: Sequence[Any], threads: int = 32, **options: Any) -> list[str]:
    """What the machine says of a faulty kernel in three schedules, which must all say something."""
    found = []
    for seed in range(3):
        try:
            report = lab.run(source, 1, threads, arguments, seed=seed, **options)
            found.append(str(report.races[0]) if report.races else "")
        except MachineError as error:
            found.append(str(error))
    assert all(found), found
    return found


def zeros(count: int = 64, dtype: Any = np.int32) -> np.ndarray:
    return np.zeros(count, dtype)


# --- Wrong results ----------------------------------------------------------------------------------------------------


def test_labels_are_of_their_block() -> None:
    """PTX ISA §4.4 and the guide of inline PTX: a name declared in braces is the block's own, labels too."""
    part = "{ .reg .pred p; setp.lt.s32 p, %0, LIMIT; @p bra DONE; add.s32 %0, %0, ADDED; DONE: }"
    parts = [part.replace("LIMIT", limit).replace("ADDED", added) for limit, added in (("5", "100"), ("3", "1000"))]
    body = (
        "int a = x[threadIdx.x];"
        + "".join(f'asm volatile("{one}" : "+r"(a));' for one in parts)
        + "o[threadIdx.x] = a;"
    )
    first = [a if a < 5 else a + 100 for a in range(32)]
    # fails: the last label of a name is that of all blocks
    assert out_of(cuda(body))[:32] == [a if a < 3 else a + 1000 for a in first]


def test_both_predicates_of_setp() -> None:
    """PTX ISA §9.7.6.2: q is the complement of p."""
    body = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; setp.eq.u32 %p2, %r1, %r1;"
    body += "setp.lt.u32 %p1|%p2, %r1, 5; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%rd3], %r2;"
    assert out_of(ptx(body))[:32] == [0] * 5 + [1] * 27  # fails: q keeps what it was


@pytest.mark.parametrize(
    ("declared", "kind", "value"),
    [
        ("__device__ volatile float g = 1.5f;", "float", 1.5),  # fails: 0f3FC00000 is read as 0, 3, 00000
        ("__device__ volatile double g = 2.5;", "double", 2.5),  # fails: as above
        (
            "__device__ int a[2] = {5, 6}; __device__ int* volatile p = a + 1;\n#define g *p",
            "int",
            6,
        ),  # fails: generic(a)+4
    ],
)
def test_initial_values_of_variables(declared: str, kind: str, value: float) -> None:
    out = zeros(1, {"float": np.float32, "double": np.float64, "int": np.int32}[kind])
    lab.run(cuda("o[0] = g;", f"{kind}* o", declared), 1, 1, [out])
    assert out[0] == value


def test_what_an_initial_value_leaves_out_is_zero() -> None:
    """As `__constant__ int c[32] = {1, 2, 3}`, of which NVRTC writes 9 bytes. PTX ISA §5.4.4."""
    source = cuda("o[threadIdx.x] = c[threadIdx.x];", before="__constant__ int c[32] = {1, 2, 3};")
    assert out_of(source)[:4] == [1, 2, 3, 0]  # fails: out of bounds behind byte 8


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
    assert out_of(source)[:32] == [expected[0]] * 16 + [expected[1]] * 16  # fails but for shfl: all take lane 0's mask


def test_atomics_of_bf16_or_an_error() -> None:
    out = zeros(2, np.uint16)
    try:
        lab.run(ptx("mov.b16 %h1, 0x3F80; red.global.add.noftz.bf16 [%rd1], %h1;"), 1, 3, [out])
    except PtxError:
        return
    assert out[0] == 0x4040  # fails: the words are added as integers


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_sums_of_subnormals(space: str) -> None:
    """PTX ISA §9.7.13.5: atom.add.f32 flushes subnormals in global memory, and not in shared memory."""
    out = zeros(2, np.uint32)
    to = "mov.u64 %rd1, s; st.shared.u32 [%rd1], 0;" if space == "shared" else ""
    back = "ld.shared.u32 %r1, [%rd1]; ld.param.u64 %rd1, [o]; st.global.u32 [%rd1], %r1;" if to else ""
    body = f"{to} mov.b32 %f1, 5; red.{space}.add.f32 [%rd1], %f1; {back}"
    lab.run(ptx(body, before=".shared .align 4 .b8 s[4];"), 1, 1, [out])
    assert out[0] == (5 if to else 0)  # fails: global memory keeps them


def test_a_reduction_by_tma_or_an_error() -> None:
    """cp.reduce.async.bulk.tensor.add adds."""
    body = """__shared__ __align__(128) float s[32]; s[threadIdx.x] = threadIdx.x; fence(); __syncthreads();
    if (!threadIdx.x) asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%1, {%2, %2}], [%0];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" :: "r"(at(s)), "l"(&map), "r"(0) : "memory");"""
    data = np.full((4, 8), 100, np.float32)
    try:
        lab.run(cuda(body, "const __grid_constant__ Map map"), 1, 32, [lab.tensor_map(data, (4, 8))])
    except PtxError:
        return
    assert (data.ravel() == 100 + np.arange(32)).all()  # fails: it stores


def test_barrier_cta_arrive_does_not_wait() -> None:
    """PTX ISA §9.7.13.1: barrier{.cta}.arrive."""
    asm = 'asm volatile("{}" ::: "memory");'.format
    first = asm("barrier.cta.arrive 1, 64;") + asm("barrier.cta.sync 2, 64;")
    second = asm("barrier.cta.sync 2, 64;") + asm("barrier.cta.sync 1, 64;")
    body = f"if (threadIdx.x < 32) {{ {first} }} else {{ {second} }} o[threadIdx.x] = 1;"
    assert sum(out_of(cuda(body), 64)) == 64  # fails: a deadlock; words[1], "cta", is taken for sync


def test_mbarrier_complete_tx_or_an_error() -> None:
    body = """__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); expect(&b, 64);
    asm volatile("mbarrier.complete_tx.shared::cta.b64 [%0], 64;" :: "r"(at(&b)) : "memory"); }
    __syncthreads(); wait(&b, 0); o[threadIdx.x] = 1;"""
    try:
        assert sum(out_of(cuda(body))) == 32  # fails: it does nothing
    except PtxError:
        return


def test_test_wait_answers_each_lane() -> None:
    body = """__shared__ u64 b[2]; if (!threadIdx.x) { init(b, 1); init(b + 1, 1); arrive(b); }
    __syncthreads(); u32 r;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
        : "=r"(r) : "r"(at(b + threadIdx.x % 2)) : "memory");
    o[threadIdx.x] = r;"""
    assert out_of(cuda(body))[:32] == [1, 0] * 16  # fails: 0 for all


def test_a_cluster_of_the_kernel_s_own_size() -> None:
    """__cluster_dims__ (.reqnctapercluster): the launch has it, or is refused."""
    body = 'int n; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); o[blockIdx.x] = n;'
    source, out = cuda(body, "int* o", attributes="__cluster_dims__(2, 1, 1)"), zeros(4)
    try:
        lab.run(source, 4, 1, [out])
    except ValueError:
        return
    assert out.tolist() == [2] * 4  # fails: clusters of one


# --- False reports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [32, 8])
def test_a_reduction_of_eight_lanes(threads: int) -> None:
    """shfl.down from a lane without a part gives an undefined value, which is no fault unless it is used (CUDA guide 10.22)."""
    body = """int v = x[threadIdx.x]; if (threadIdx.x < 8) {
    for (int i = 4; i; i /= 2) v += __shfl_down_sync(0xff, v, i);
    if (!threadIdx.x) o[0] = v; }"""
    assert out_of(cuda(body), threads)[0] == 28  # fails: "it reads a lane that takes no part"


@pytest.mark.parametrize(("threads", "stay"), [(64, 32), (96, 64), (64, 40)])
def test_threads_that_have_ended_hold_no_barrier(threads: int, stay: int) -> None:
    """PTX ISA, exit: "If the exiting threads are holding up the barrier, the barrier is released." """
    body = f"""if (threadIdx.x >= {stay}) return; __shared__ int s[{stay}];
    s[threadIdx.x] = x[threadIdx.x % 64]; __syncthreads(); if (!threadIdx.x) o[0] = s[{stay - 1}];"""
    assert out_of(cuda(body), threads)[0] == stay - 1  # fails where a whole warp has ended: a deadlock


@pytest.mark.parametrize("meet", ["__syncwarp();", 'asm volatile("barrier.sync 0;" ::: "memory");'])
def test_lanes_meet_at_barriers_of_two_branches(meet: str) -> None:
    """PTX ISA: bar.warp.sync and barrier.sync without .aligned wait for threads, not for one place in the text."""
    body = f"""__shared__ volatile int s[32]; const int i = threadIdx.x;
    if (i < 16) {{ s[i] = i; {meet} o[i] = s[i + 16]; }} else {{ s[i] = 2 * i; {meet} o[i] = s[i - 16]; }}"""
    # fails: "its mask names lanes that are elsewhere", and a deadlock
    assert out_of(cuda(body))[:32] == [*range(32, 64, 2), *range(16)]


def test_a_lock_taken_by_lanes_of_one_warp() -> None:
    """Since Volta lanes make progress independently of each other (CUDA guide, "Independent Thread Scheduling")."""
    body = """__shared__ int lock; if (!threadIdx.x) lock = 0; __syncthreads();
    while (atomicCAS(&lock, 0, 1)); o[0] += 1; __threadfence(); atomicExch(&lock, 0);"""
    out = zeros()
    stepper = lab.step(cuda(body), 1, 32, [out, INTS]).step(10_000)
    assert stepper.done and out[0] == 32  # fails: those further back spin for ever


def test_a_slot_that_was_read_and_is_released_may_be_loaded_again() -> None:
    """Readers arrive, TMA waits for them, and loads: no writes of threads, so no proxy fence (docs/machine.md: what threads
    *wrote*), as in CUTLASS's pipelines whose consumers read with ld.shared or ldmatrix."""
    body = """__shared__ __align__(128) u32 s[32]; __shared__ u64 full, empty;
    if (!threadIdx.x) { init(&full, 1); init(&empty, 32); fence(); } __syncthreads();
    if (threadIdx.x == 0) for (int i = 0; i < 3; i++) {
        wait(&empty, i % 2 ^ 1); expect(&full, 128);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            :: "r"(at(s)), "l"(&map), "r"(at(&full)), "r"(0), "r"(i) : "memory");
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int i = 0; i < 3; i++) { wait(&full, i % 2); sum += s[threadIdx.x - 32]; arrive(&empty); }
        o[threadIdx.x - 32] = sum;
    }"""
    data, out = np.arange(64, dtype=np.int32).reshape(8, 8), zeros()
    report = lab.run(cuda(body, "const __grid_constant__ Map map, int* o"), 1, 64, [lab.tensor_map(data, (4, 8)), out])
    assert (out[:32] == sum(data[i : i + 4].ravel() for i in range(3))).all()
    assert not report.races  # fails: "a read, then a write"; or docs/machine.md should say that reads need a fence too


# --- Faults that are not found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "left"), [(3, 3), (3, 4), (3, 5), (5, 6)])
def test_a_wait_for_fewer_groups_than_there_are(groups: int, left: int) -> None:
    """cp.async.wait_group N waits for nothing where N or fewer groups are pending."""
    body = f"""__shared__ alignas(16) int s[8][128];
    for (int i = 0; i < {groups}; i++) {{ copy(&s[i][threadIdx.x * 4], x + threadIdx.x * 4); COMMIT; }}
    WAIT({left}); o[threadIdx.x] = s[0][threadIdx.x * 4];"""
    faults_of(
        cuda(body), [zeros(), np.arange(128, dtype=np.int32)]
    )  # fails for N > groups: closed[:negative] is waited for


@pytest.mark.parametrize("store", [True, False])
def test_a_null_pointer_is_not_shared_memory(store: bool) -> None:
    """Global addresses below 2^40 are nobody's, whatever shared memory there is."""
    body = "__shared__ int s[32]; s[threadIdx.x] = 7; __syncthreads(); "
    body += (
        "o[threadIdx.x + 256] = s[31 - threadIdx.x];"
        if store
        else "o[threadIdx.x] = x[threadIdx.x + 256] + s[31 - threadIdx.x];"
    )
    faults_of(cuda(body), [0 if store else zeros(), 0])  # fails: byte 1024 on is shared memory for ld.global too


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
    faults_of(cuda(body), [zeros(), INTS])  # fails: nothing is said


@pytest.mark.parametrize(
    "body",
    [
        "__shared__ u64 b; if (!threadIdx.x) init(&b, 1); __syncthreads(); wait(&b, 2);",  # fails: any parity but 0, 1 passes
        "__shared__ u64 b[2]; if (!threadIdx.x) { init(b + 100, 1); arrive(b + 100); b[0] = 1; }",  # fails: out of bounds
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); *(volatile u64*)&b = 0; arrive(&b); }",  # fails: a store to its bytes
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); init(&b, 2); }",  # fails: made twice without inval
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); expect(&b, 1 << 20); }",  # fails: more than 2^20 - 1 bytes
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
    box = lab.tensor_map(np.zeros((8, 8), np.int32), (4, 8))
    faults_of(cuda(body, "const __grid_constant__ Map map"), [box])  # fails: nothing is said


@pytest.mark.parametrize("mask", [0, 7])
def test_a_multicast_to_nobody_and_to_ranks_that_there_are_not(mask: int) -> None:
    body = f"""__shared__ __align__(128) u32 s[32]; __shared__ u64 b; if (!threadIdx.x) {{ init(&b, 1); fence(); expect(&b, 128);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {{%3, %3}}], [%2], %4;" :: "r"(at(s)), "l"(&map), "r"(at(&b)), "r"(0), "h"((short){mask}) : "memory"); }}
    __syncthreads(); wait(&b, 0);"""
    box = lab.tensor_map(np.zeros((8, 8), np.int32), (4, 8))
    faults_of(cuda(body, "const __grid_constant__ Map map"), [box])  # fails: 0 is a bare IndexError, 7 passes


WGMMA = """
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.SHAPE.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd2, %rd2, SCALE, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""


@pytest.mark.parametrize(
    "before",
    [
        "and.b32 %r1, %r1, 32; add.u32 %r1, %r1, 64; cvt.u64.u32 %rd2, %r1;",  # fails: the first warp's descriptor counts
        "and.b32 %r1, %r1, 1; add.u32 %r1, %r1, 64; cvt.u64.u32 %rd2, %r1;",  # fails: the first lane's counts
        "and.b32 %r1, %r1, 1; setp.eq.u32 %p1, %r1, 0; mov.u64 %rd2, 64;",  # fails: the first lane's scale-d counts
    ],
)
def test_operands_of_wgmma_that_differ(before: str) -> None:
    """PTX ISA §9.7.15.5: the same in all threads of the warpgroup."""
    scale = "%p1" if "%p1" in before else "0"
    start = f"mov.u32 %r1, %tid.x; {''.join(f'mov.b32 %f{n}, 0;' for n in range(4))}"
    body = start + before + WGMMA.replace("SHAPE", "m64n8k16").replace("SCALE", scale)
    faults_of(ptx(body, ""), [], 128, shared=8192)


def test_what_cp_async_copies_of_nobody_s_bytes() -> None:
    """`Machine.empty`: "kernels that read it are told so", also by way of cp.async (and of TMA)."""
    body = """__shared__ alignas(16) int s[128]; copy(s + threadIdx.x * 4, x + threadIdx.x * 4); COMMIT; WAIT(0);
    o[threadIdx.x] = s[threadIdx.x * 4];"""
    machine = Machine()
    given, out = machine.empty((128,), np.int32), machine.zeros((32,), np.int32)
    parameters = b"".join(machine.address(array).to_bytes(8, "little") for array in (out, given))
    with pytest.raises(MachineError, match="nobody wrote"):  # fails: it counts as written
        run_program(Program.read(_text(cuda(body))), None, (1,), (32,), parameters, memory=machine.memory)


def test_a_race_through_two_arrays_of_one_buffer() -> None:
    """As `tensor.numpy()` and `tensor[4:].numpy()`: their bases are no arrays, and their bytes the same."""
    buffer = bytearray(64)
    whole, part = np.frombuffer(buffer, np.int32), np.frombuffer(buffer, np.int32, offset=16)
    source = cuda("if (blockIdx.x == 0) a[4] = 1; else o[0] = b[0];", "int* a, int* b, int* o")
    assert lab.run(
        source, 2, 1, [whole, part, zeros(1)]
    ).races  # fails: two blocks of memory that know nothing of each other


@pytest.mark.parametrize("directive", [".reqntid 64, 1, 1", ".maxntid 64, 1, 1"])
def test_more_threads_than_the_kernel_may_have(directive: str) -> None:
    """PTX ISA §11.4: the launch fails. As of __launch_bounds__(64)."""
    with pytest.raises(ValueError, match="block"):  # fails: it runs
        lab.run(ptx("mov.u32 %r1, 1;", "", directives=directive), 1, 128, [])


# --- Errors that are none, or no PtxError, or come late ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "threads"),
    [
        (cuda("o[threadIdx.x] = __syncthreads_count(x[threadIdx.x] & 1);"), 32),  # fails: a bare KeyError while it runs
        (  # fails: StopIteration; NVRTC writes a generic ld for what may be of two spaces
            cuda(
                "__shared__ int s[32]; s[threadIdx.x] = 16; __syncthreads();"
                "const int* p = x[1] == 9 ? x : s; o[threadIdx.x] = p[threadIdx.x];"
            ),
            32,
        ),
        (  # fails: StopIteration; ".local" is taken for ".loc"
            cuda("int a[8]; for (int i = 0; i < 8; i++) a[i] = 2 * x[i]; o[threadIdx.x] = a[x[threadIdx.x] % 8 ^ 1];"),
            32,
        ),
    ],
)
def test_it_runs_or_is_refused_with_its_line(source: str, threads: int) -> None:
    try:
        assert any(out_of(source, threads))
    except PtxError:
        with pytest.raises(PtxError, match="line"):
            out_of(source, threads)


@pytest.mark.parametrize(
    "body",
    [
        "mov.u32 %r1, nobody;",  # fails: it is no error before the instruction runs, and has no line
        "mov.u32 %r1, 018;",  # fails: a bare ValueError
        "bra %p1;",  # fails: AttributeError
        "bra;",  # fails: IndexError
        "mov.u32 %r1, 1024; redux.sync.min.abs.NaN.f32 %r1, %r1, -1;",  # fails: ValueError
        "mov.u32 %r1, 1; redux.sync.min.f32 %r1, %r1, -1;",  # fails: it is that of u32
        "mov.u32 %r1, 1024; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r1, [%r1];",  # fails: a st
        "bar.sync 17;",  # fails: it passes; 0 to 15
        "bar.sync 1, 40;",  # fails: it passes; a multiple of 32
        "mov.u32 %r1, 1024; ld.shared.u32 %r2, [%r1]; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3}, [%r1];",  # fails
        "add.u64 %r1, 1, 1;",  # fails: cut off; §9.4 wants registers of the instruction's size
        WGMMA.replace("SHAPE", "m64n16k16")
        .replace("SCALE", "0")
        .replace("%rd2", "64"),  # fails: NumPy's error as it runs
        WGMMA.replace("SHAPE", "m64n12k16")
        .replace("SCALE", "0")
        .replace("%rd2", "64"),  # fails: as above; n is a multiple of 8
        WGMMA.replace("SHAPE", "m64k16").replace("SCALE", "0").replace("%rd2", "64"),  # fails: ValueError
        "A: mov.u32 %r1, 1; A: mov.u32 %r1, 2;",  # fails: a label twice in a block
        "fence.proxy.nonsense;",  # fails: taken for fence.proxy.async
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd2, {%r1, %r1}];",  # fails: StopIteration
        "mov.u32 %r1, 1024; cp.async.cg.shared.global [%r1], [%rd2], 4;",  # fails: no PtxError; .cg has 16 bytes alone
    ],
)
def test_text_that_ptxas_refuses_or_the_machine_does_not_know(body: str) -> None:
    with pytest.raises(PtxError, match="line"):
        lab.step(ptx(body, ""), 1, 128, [], shared=8192).step(50)


@pytest.mark.parametrize(
    "text", [".version 8.0\n}\n", ".version 8.0\n.reg .b32 %r<3>;\n", ".visible .entry k()\n{\n}\n"]
)
def test_broken_text(text: str) -> None:
    try:
        lab.run(text, 1, 1, [])
    except PtxError:  # fails: IndexError, AssertionError; an entry without instructions is a kernel that does nothing
        return
    assert text.startswith(".visible")


def test_an_integer_of_bits_and_of_eights() -> None:
    """PTX ISA §4.5.1: octal and binary constants, and WARP_SZ (§4.4), which has no percent sign."""
    body = "mov.u32 %r1, 017; add.u32 %r1, %r1, 0b101; add.u32 %r1, %r1, WARP_SZ; st.global.u32 [%rd1+0x4], %r1;"
    assert out_of(ptx(body), 1)[1] == 15 + 5 + 32  # fails: ValueError, "unknown symbol", "unknown special register"


def test_comments() -> None:
    assert out_of(ptx("/* one\n two */ st.global.u32 [%rd1], 5; // three"), 1)[0] == 5  # fails: unknown operand


def test_a_source_of_more_bytes_than_the_copy() -> None:
    """PTX ISA: src-size is at most cp-size."""
    body = """__shared__ alignas(16) int s[4]; asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"(at(s)), "l"(x), "r"(8) : "memory"); COMMIT; WAIT(0); o[0] = s[0];"""
    faults_of(cuda(body), [zeros(), INTS], 1)  # fails: NumPy's ValueError, without a line


# --- Arguments --------------------------------------------------------------------------------------------------------

COPY = 'extern "C" __global__ void k(const int* x, int* o) { o[threadIdx.x] = x[threadIdx.x]; }'
ONE = 'extern "C" __global__ void k(TYPE x, int* o) { if (threadIdx.x == 0) o[0] = 1; }'


@pytest.mark.parametrize(
    ("grid", "block", "options"),
    [
        (1, (2**32, 2**32), {}),  # fails: np.prod overflows to 0, and nothing runs
        ((2**32, 2**32), 32, {}),  # fails: as above
        (1, (1, 1, 128), {}),  # fails: CUDA has 64 threads in z
        ((1, 65536), 32, {}),  # fails: CUDA has 65535 CTAs in y and z
        (17, 32, {"cluster": 17}),  # fails: CUDA has 16 at most
    ],
)
def test_launches_that_cuda_refuses(grid: Any, block: Any, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"grid|block|cluster"):
        lab.step(ONE.replace("TYPE", "int"), grid, block, [1, zeros(4)], **options)


def test_static_and_dynamic_shared_memory_together() -> None:
    source = cuda(
        "extern __shared__ int d[]; __shared__ int s[12000]; s[threadIdx.x] = 1; d[threadIdx.x] = s[o[0]];", "int* o"
    )
    with pytest.raises(ValueError, match="shared"):  # fails: only the dynamic part is counted
        lab.run(source, 1, 32, [zeros()], shared=220 * 1024)


@pytest.mark.parametrize(
    "given",
    [
        np.arange(8, dtype=np.int32)[::2],  # fails: its gaps are read as elements
        np.arange(64, dtype=np.int32).reshape(8, 8).T,  # fails: read as what it is a view of
        np.arange(8, dtype=np.int32)[::-1],  # fails: an access out of bounds as it runs
        np.broadcast_to(np.int32(7), (8,)),  # fails: as above
        np.arange(8, dtype=">i4"),  # fails: read as if it were of this machine's byte order
        np.array([None] * 8),  # fails: NumPy's TypeError, which does not name the argument
    ],
    ids=["strided", "transposed", "reversed", "broadcast", "big-endian", "objects"],
)
def test_arrays_that_are_no_plain_memory(given: np.ndarray) -> None:
    with pytest.raises((TypeError, ValueError), match="argument 0"):
        lab.run(COPY, 1, 4, [given, zeros(4)])


def test_a_view_that_is_only_read() -> None:
    root = zeros(4)
    view = root[:]
    view.flags.writeable = False
    with pytest.raises(MachineError, match="only read"):  # fails: it is written, since its base may be
        lab.run(COPY, 1, 4, [INTS, view])
    assert not root.any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("double", zeros(4)),  # fails: the address's bits are the number
        ("float4", 1.5),  # fails: 16 bytes of np.longdouble
        ("float3", 1.5),  # fails: "data type 'f12' not understood"
        ("int", np.array(5, ">i4")),  # fails: 83886080
        ("float", 1e60),  # fails: infinity, and a RuntimeWarning
    ],
)
def test_values_that_a_parameter_does_not_take(kind: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="argument 0"):
        lab.run(ONE.replace("TYPE", kind), 1, 1, [value, zeros(4)])


@pytest.mark.parametrize("arguments", [None, 5])
def test_arguments_that_are_no_list(arguments: Any) -> None:
    with pytest.raises(TypeError, match="arguments: expected"):  # fails: "object of type ... has no len()"
        lab.run(COPY, 1, 4, arguments)


@pytest.mark.parametrize(
    ("box", "swizzle"),
    [(5, 0), (None, 0), ((4, 8), 32.0), ((4, 8), False), ((4, 8), np.array([0, 32]))],  # fails: all
)
def test_boxes_and_swizzles_of_a_wrong_type(box: Any, swizzle: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"(box|swizzle).*: expected"):
        lab.tensor_map(np.zeros((8, 8), np.float32), box, swizzle)


def test_a_tensor_map_of_objects() -> None:
    with pytest.raises((TypeError, ValueError), match="array"):  # fails: 8 bytes each
        lab.tensor_map(np.zeros((8, 8), object), (4, 8))


def test_a_name_too_long_for_a_file() -> None:
    with pytest.raises(FileNotFoundError, match="kernel"):  # fails: OSError of the system
        lab.run("x" * 5000, 1, 1, [])


def test_no_register_of_this_name() -> None:
    with pytest.raises(KeyError):  # fails: ValueError; the docstring says KeyError
        lab.step(COPY, 1, 128, [zeros(128), zeros(128)]).matrix(["nobody"])


def test_one_instruction_at_a_time_is_the_same_run() -> None:
    """Nobody promises it so far; but a race that `run` found by a seed is what a person would step to."""
    race = 'extern "C" __global__ void k(int* o) { o[0] = threadIdx.x / 32; o[1 + threadIdx.x / 32] = o[0]; }'
    for seed in range(6):
        whole, stepped = zeros(9), zeros(9)
        lab.run(race, 1, 256, [whole], seed=seed)
        stepper = lab.step(race, 1, 256, [stepped], seed=seed)
        while not stepper.done:
            stepper.step()
        assert (whole == stepped).all()  # fails: a turn that ends early draws another number


# --- What was right, and has no test elsewhere ------------------------------------------------------------------------


def test_prefix_sums_and_their_twin() -> None:
    body = """__shared__ int s[256]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();
    for (int d = 1; d < 256; d *= 2) {
        int v = threadIdx.x >= d ? s[threadIdx.x - d] : 0; BARRIER s[threadIdx.x] += v; __syncthreads();
    } o[threadIdx.x] = s[threadIdx.x];"""
    x, out = np.arange(256, dtype=np.int32), zeros(256)

    def report(barrier: str) -> Report:
        return lab.run(cuda(body.replace("BARRIER", barrier)), 1, 256, [out, x])

    assert report("").races
    assert not report("__syncthreads();").races and (out == x.cumsum()).all()
