"""Small kernels as CUDA C++ and PTX text, and what the machine makes of them: their results, or what it says of their faults."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import ptxsim
from ptxsim import MachineError

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
    report = ptxsim.run(source, grid, threads, [out, x] if "int* x" in source else [out], **options)
    assert not report.races
    return out.tolist()


def faults_of(source: str, arguments: Sequence[Any], threads: int = 32, **options: Any) -> list[str]:
    """What the machine says of a faulty kernel in three schedules, which must all say something."""
    found = []
    for seed in range(3):
        try:
            report = ptxsim.run(source, 1, threads, arguments, seed=seed, **options)
            found.append(str(report.races[0]) if report.races else "")
        except MachineError as error:
            found.append(str(error))
    assert all(found), found
    return found


def zeros(count: int = 64, dtype: Any = np.int32) -> np.ndarray:
    return np.zeros(count, dtype)


WGMMA = """
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.SHAPE.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd2, %rd2, SCALE, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
