"""Tables of small kernels: the result of each, or its fault, with the part of the PTX ISA that says so."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_kernels import INTS, WGMMA, cuda, faults_of, out_of, ptx, zeros

import ptxsim

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")

HALF = "unsigned mask = threadIdx.x < 16 ? 0xffff : 0xffff0000; o[threadIdx.x] = {};".format
SHUFFLED = """int v = x[threadIdx.x]; if (threadIdx.x < 8) {
for (int i = 4; i; i /= 2) v += __shfl_down_sync(0xff, v, i);
if (!threadIdx.x) o[0] = v; }"""
ENDED = """if (threadIdx.x >= STAY) return; __shared__ int s[STAY];
s[threadIdx.x] = x[threadIdx.x % 64]; __syncthreads(); if (!threadIdx.x) o[0] = s[STAY - 1];"""
BRANCHES = """__shared__ volatile int s[32]; const int i = threadIdx.x;
if (i < 16) { s[i] = i; MEET o[i] = s[i + 16]; } else { s[i] = 2 * i; MEET o[i] = s[i - 16]; }"""
BAR = 'asm volatile("barrier.cta.{}, 64;" ::: "memory");'.format
ARRIVES = f"""if (threadIdx.x < 32) {{ {BAR("arrive 1")} {BAR("sync 2")} }} else {{ {BAR("sync 2")} {BAR("sync 1")} }}
o[threadIdx.x] = 1;"""
ANSWERS = """__shared__ u64 b[2]; if (!threadIdx.x) { init(b, 1); init(b + 1, 1); arrive(b); }
__syncthreads(); o[threadIdx.x] = over(b + threadIdx.x % 2, 0);"""
BLOCK = 'asm volatile("{ .reg .pred p; setp.lt.s32 p, %0, LIMIT; @p bra DONE; add.s32 %0, %0, 100; DONE: }" : "+r"(a));'
LABELS = "int a = x[threadIdx.x];" + BLOCK.replace("LIMIT", "5") + BLOCK.replace("LIMIT", "3") + "o[threadIdx.x] = a;"
SPACES = """__shared__ int s[32]; s[threadIdx.x] = 16; __syncthreads(); const int* p = x[1] == WANTED ? x : s;
o[threadIdx.x] = p[threadIdx.x];"""
NUMBERS = "mov.u32 %r1, 017; add.u32 %r1, %r1, 0b101; add.u32 %r1, %r1, WARP_SZ; st.global.u32 [%rd1], %r1;"

RESULTS: dict[str, tuple[str, int, list[int]]] = {  # source, threads, what the first ones write
    # One instruction, two masks, as cooperative groups' tiles have them: each half gets its own result.
    "ballot of halves": (cuda(HALF("__ballot_sync(mask, x[threadIdx.x] % 2)")), 32, [0xAAAA] * 16 + [0xAAAA0000 - 2**32] * 16),
    "any of halves": (cuda(HALF("__any_sync(mask, x[threadIdx.x] == 3)")), 32, [1] * 16 + [0] * 16),
    "sum of halves": (cuda(HALF("__reduce_add_sync(mask, x[threadIdx.x])")), 32, [120] * 16 + [376] * 16),
    "shuffle of halves": (cuda(HALF("__shfl_sync(mask, x[threadIdx.x], 15, 16)")), 32, [15] * 16 + [31] * 16),
    # A lane without a part gives an undefined value, which is no fault unless it is used (CUDA guide 10.22).
    "sum of eight lanes": (cuda(SHUFFLED), 32, [28]),
    "sum of eight lanes, which are all": (cuda(SHUFFLED), 8, [28]),
    # PTX ISA, exit: "If the exiting threads are holding up the barrier, the barrier is released."
    "a warp has ended": (cuda(ENDED.replace("STAY", "32")), 64, [31]),
    "two warps have ended": (cuda(ENDED.replace("STAY", "32")), 96, [31]),
    "a part of a warp has ended": (cuda(ENDED.replace("STAY", "40")), 64, [39]),
    # bar.warp.sync and barrier.sync without .aligned wait for threads, not for one place in the text.
    "syncwarp in two branches": (cuda(BRANCHES.replace("MEET", "__syncwarp();")), 32, [*range(32, 64, 2), *range(16)]),
    "barrier in two branches": (
        cuda(BRANCHES.replace("MEET", 'asm volatile("barrier.sync 0;" ::: "memory");')), 32, [*range(32, 64, 2), *range(16)]
    ),
    "arriving does not wait": (cuda(ARRIVES), 64, [1] * 64),  # §9.7.13.1
    "test_wait answers each lane": (cuda(ANSWERS), 32, [1, 0] * 16),
    # §4.4 and the guide of inline PTX: a name declared in braces is the block's own, labels too.
    "labels of their block": (cuda(LABELS), 32, [0, 1, 2, 103, 104, *range(205, 232)]),
    # As `__constant__ int c[32] = {1, 2, 3}`, of which NVRTC writes 9 bytes: the rest is zero. §5.4.4
    "an initial value's rest": (
        cuda("o[threadIdx.x] = c[threadIdx.x];", before="__constant__ int c[32] = {1, 2, 3};"), 32, [1, 2, 3, 0]
    ),
    "octal, binary, WARP_SZ": (ptx(NUMBERS), 1, [15 + 5 + 32]),  # §4.5.1, §4.4
    "comments": (ptx("/* one\n two */ st.global.u32 [%rd1], 5; // three"), 1, [5]),
    # A generic ld, where NVRTC does not know the space. §6.4.1.1
    "a pointer to shared memory": (cuda(SPACES.replace("WANTED", "9")), 32, [16] * 32),
    "a pointer to global memory": (cuda(SPACES.replace("WANTED", "1")), 32, [*range(32)]),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    source, threads, expected = RESULTS[name]
    assert out_of(source, threads)[: len(expected)] == expected


GROUPS = """__shared__ alignas(16) int s[8][128];
for (int i = 0; i < {}; i++) {{ copy(&s[i][threadIdx.x * 4], x + threadIdx.x * 4); COMMIT; }}
WAIT({}); o[threadIdx.x] = s[0][threadIdx.x * 4];""".format
MORE_BYTES = """__shared__ alignas(16) int s[4]; asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
:: "r"(at(s)), "l"(x), "r"(8) : "memory"); COMMIT; WAIT(0); o[0] = s[0];"""
ONTO_MBARRIER = """__shared__ __align__(128) u32 s[32]; u64* b = (u64*)(s + 8);
if (!threadIdx.x) { init(b, 1); fence(); expect(b, 128);
asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3}], [%2];"
    :: "r"(at(s)), "l"(&map), "r"(at(b)), "r"(0) : "memory"); } __syncthreads(); wait(b, 0);"""
FILLED = "__shared__ int s[32]; s[threadIdx.x] = 7; __syncthreads(); "
PRODUCT = (
    "mov.u32 %r1, %tid.x;" + "".join(f"mov.b32 %f{n}, 0;" for n in range(4)) + "{}" + WGMMA.replace("SHAPE", "m64n8k16")
)


def differing(before: str, scale: str = "0") -> str:
    return ptx(PRODUCT.replace("{}", before, 1).replace("SCALE", scale), "")


def given() -> list[Any]:
    return [zeros(), np.arange(128, dtype=np.int32)]


FAULTY: list[tuple[str, Callable[[], list[Any]], int, dict[str, int]]] = [  # source, arguments, threads, options
    # §9.7.9.6, §9.7.13: undefined where the executing thread is not in the membermask.
    *((cuda(body), given, 32, {}) for body in (
        "o[threadIdx.x] = __ballot_sync(1, x[threadIdx.x]);",
        "o[threadIdx.x] = __any_sync(0xff, x[threadIdx.x]);",
        "o[threadIdx.x] = __shfl_sync(0xff, x[threadIdx.x], 0);",
        "__syncwarp(0xff); o[threadIdx.x] = 1;",
    )),
    # §9.7.13.15: valid parities, places, counts; only mbarrier operations on an mbarrier object.
    *((cuda(body), given, 32, {}) for body in (
        "__shared__ u64 b; if (!threadIdx.x) init(&b, 1); __syncthreads(); wait(&b, 2);",
        "__shared__ u64 b[2]; if (!threadIdx.x) { init(b + 100, 1); arrive(b + 100); b[0] = 1; }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); *(volatile u64*)&b = 0; arrive(&b); }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); init(&b, 2); }",
        "__shared__ u64 b; if (!threadIdx.x) { init(&b, 1); expect(&b, 1 << 20); }",
    )),
    (cuda(ONTO_MBARRIER, "const __grid_constant__ Map map"),
     lambda: [ptxsim.tensor_map(np.zeros((8, 8), np.int32), (4, 8))], 32, {}),
    # Global addresses below 2^40 are nobody's, whatever shared memory there is.
    (cuda(FILLED + "o[threadIdx.x + 256] = s[31 - threadIdx.x];"), lambda: [0, 0], 32, {}),
    (cuda(FILLED + "o[threadIdx.x] = x[threadIdx.x + 256] + s[31 - threadIdx.x];"), lambda: [zeros(), 0], 32, {}),
    # cp.async.wait_group N waits for nothing where N or fewer groups are pending.
    *((cuda(GROUPS(groups, left)), given, 32, {}) for groups, left in ((3, 3), (3, 4), (3, 5), (5, 6))),
    (cuda(MORE_BYTES), lambda: [zeros(), INTS], 1, {}),  # src-size is at most cp-size
    # §9.7.15.5: operands of wgmma are the same in all threads of the warpgroup.
    (differing("and.b32 %r1, %r1, 32; add.u32 %r1, %r1, 64; cvt.u64.u32 %rd2, %r1;"), list, 128, {"shared": 8192}),
    (differing("and.b32 %r1, %r1, 1; add.u32 %r1, %r1, 64; cvt.u64.u32 %rd2, %r1;"), list, 128, {"shared": 8192}),
    (differing("and.b32 %r1, %r1, 1; setp.eq.u32 %p1, %r1, 0; mov.u64 %rd2, 64;", "%p1"), list, 128, {"shared": 8192}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "arguments", "threads", "options"), FAULTY)
def test_faults(source: str, arguments: Callable[[], list[Any]], threads: int, options: dict[str, int]) -> None:
    faults_of(source, arguments(), threads, **options)
