"""`ptxsim.run` and `ptxsim.tensor_map`: anybody's kernels, in CUDA C++ and in PTX, on the machine."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxsim
from ptxsim import Deadlock, MachineError, PtxError

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = a * x[i] + y[i];
}
"""
SUM = """
extern "C" __global__ void sum(const int* x, int* out) {
    __shared__ int kept[128];
    kept[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];
    for (int step = 64; step; step /= 2) {
        BARRIER
        if (threadIdx.x < step) kept[threadIdx.x] += kept[threadIdx.x + step];
    }
    if (!threadIdx.x) out[blockIdx.x] = kept[0];
}
"""
COPY = """
typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void copy(const __grid_constant__ Map map, float* out) {
    __shared__ alignas(1024) float tile[8 * 32];
    __shared__ uint64_t full;
    const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&full));
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(barrier) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            :: "r"(to), "l"(&map), "r"(barrier), "r"(COLUMN), "r"(2) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra WAIT; }" :: "r"(barrier));
    for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) out[i] = tile[i];
}
"""
ADD_ONE = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry add_one(.param .u64 to, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    add.s32 %r4, %r3, 1;
    st.global.u32 [%rd3], %r4;
DONE:
    ret;
}
"""


def test_saxpy_of_cuda_text() -> None:
    x, y = np.arange(300, dtype=np.float32), np.ones(400, np.float32)
    report = ptxsim.run(SAXPY, 3, 128, [2, x, y, len(x)])
    assert (y[:300] == 2 * x + 1).all() and (y[300:] == 1).all()
    assert report.entry == "saxpy" and not report.races and "no race" in repr(report)


def test_a_part_of_an_array_is_its_address() -> None:
    y = np.zeros(100, np.float32)
    ptxsim.run(SAXPY, 1, 32, [np.float32(1.0), np.ones(10, np.float32), y[40:], 10])
    assert np.flatnonzero(y).tolist() == list(range(40, 50))


def test_reduction_with_shared_memory_and_the_race_without_its_barrier() -> None:
    x, out = np.arange(256, dtype=np.int32), np.zeros(2, np.int32)
    report = ptxsim.run(SUM.replace("BARRIER", "__syncthreads();"), 2, 128, [x, out])
    assert out.tolist() == [x[:128].sum(), x[128:].sum()] and not report.races
    found = []
    for seed in range(3):  # a warp may add what nobody has written yet, which is an error besides
        try:
            found.append(ptxsim.run(SUM.replace("BARRIER", ""), 2, 128, [x, out], seed=seed).races)
        except MachineError as error:
            found.append(error.report.races)
    races = [race for races in found for race in races]
    assert races and "shared memory" in races[0].where
    assert {"kernel.cu:4", "kernel.cu:7"} <= {side.split(": ")[0] for race in races for side in race[2:]}


def test_a_run_that_an_error_cuts_short_is_not_said_to_have_no_race() -> None:
    with pytest.raises(MachineError, match="out of bounds") as raised:
        ptxsim.run(SAXPY, 1, 32, [1.0, np.ones(4, np.float32), np.ones(32, np.float32), 32])
    assert str(raised.value).endswith("not at its end; no race so far") and not raised.value.report.ended
    stepper = ptxsim.step(SAXPY, 1, 32, [1.0, np.ones(4, np.float32), np.ones(4, np.float32), 4])
    assert "no race so far" in repr(stepper.step().report) and repr(stepper.finish()).endswith("instructions; no race")


def test_a_misaligned_address() -> None:
    data = np.zeros(40, np.uint8)
    with pytest.raises(MachineError, match=r"kernel.cu:4.*not a multiple of 4 bytes.*lane 0"):
        ptxsim.run(SAXPY, 1, 32, [1.0, data[1:], data, 2])


@pytest.mark.parametrize("swizzle", [0, 128])
def test_tma_copy(swizzle: int) -> None:
    array, out = np.random.default_rng(0).random((9, 40), np.float32), np.zeros((8, 8, 4), np.float32)
    box = ptxsim.tensor_map(array, (8, 32), swizzle=swizzle)
    ptxsim.run(COPY.replace("COLUMN", "16"), 1, 64, [box, out])
    expected = np.zeros((8, 32), np.float32)
    expected[:7, :24] = array[2:, 16:]
    if swizzle:
        out = np.stack([out[row, np.arange(8) ^ row] for row in range(8)])
    assert (out.reshape(8, 32) == expected).all()


def test_ptx_text_and_files(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.uint32)
    ptxsim.run(ADD_ONE, 1, 64, [values, 33])
    (tmp_path / "add.ptx").write_text(ADD_ONE)
    ptxsim.run(tmp_path / "add.ptx", (1, 1), (64, 1, 1), [values, np.uint32(33)])
    ptxsim.run(str(tmp_path / "add.ptx"), 1, 64, [values, 33])
    assert (values[:33] == np.arange(33) + 3).all() and (values[33:] == np.arange(33, 40)).all()
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    y = np.zeros(4, np.float32)
    ptxsim.run(ptxsim.compile(str(tmp_path / "saxpy.cu")), 1, 32, [3.0, np.ones(4, np.float32), y, 4])
    ptxsim.run(tmp_path / "saxpy.cu", 1, 32, [3.0, np.ones(4, np.float32), y, 4])
    assert (y == 6).all()


STRUCT = """
struct Parameters { const float* x; int count; double* sum; };
extern "C" __global__ void sum(const Parameters p, short) {
    double all = 0;
    for (int i = 0; i < p.count; ++i) all += p.x[i];
    *p.sum = all;
}
"""


def test_a_struct_lies_as_in_c() -> None:
    x, out = np.ones(5, np.float32), np.zeros(1)
    ptxsim.run(STRUCT, 1, 1, [(x, np.int32(5), out), 1])
    assert out[0] == 5


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"kernel": "int main() {}"}, ValueError, "__global__ function"),
        ({"kernel": "nowhere.cu"}, FileNotFoundError, "got 'nowhere.cu'"),
        ({"kernel": 3}, TypeError, "kernel: expected text"),
        ({"entry": ["saxpy"]}, TypeError, "entry: expected a str or None, got list"),
        ({"entry": "saxpi"}, PtxError, "expected one of saxpy, got 'saxpi'"),
        ({"grid": 0}, ValueError, "grid: expected at least 1, got 0"),
        ({"grid": (1, 1, 1, 1)}, ValueError, "grid: expected one to three sizes"),
        ({"block": (32, 33)}, ValueError, r"block: expected at most 1024 threads, got \(32, 33\)"),
        ({"shared": 1 << 20}, ValueError, "shared: expected at most 232448 bytes"),
        ({"cluster": 2}, ValueError, "grid: expected a multiple of the cluster's 2 CTAs, got 1"),
        ({"arguments": [1.0]}, ValueError, "arguments: expected 4 for saxpy, got 1"),
        ({0: "2"}, TypeError, r"argument 0 \(4 bytes, .f32\): expected an array, .* got str"),
        ({0: np.float64(2)}, TypeError, r"argument 0 .*of its type, got np.float64\(2.0\)"),
        ({0: np.ones(3)}, ValueError, "argument 0 .*expected 4 bytes, got 8"),
        ({3: 2.5}, TypeError, r"argument 3 \(4 bytes, .u32\): expected an int, got 2.5"),
        ({3: 1 << 40}, ValueError, "argument 3 .*expected an int of 4 bytes, got 1099511627776"),
        ({1: (1.0,)}, TypeError, "argument 1 .*expected an array, a NumPy number or a tensor_map, got float"),
        ({1: np.ones((4, 4), np.float32, order="F")}, ValueError, "expected a C-contiguous array"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(change: dict, error: type[Exception], said: str) -> None:
    y = np.zeros(4, np.float32)
    given: dict[str, Any] = {"kernel": SAXPY, "grid": 1, "block": 32}
    arguments: list[Any] = [1.0, np.ones(4, np.float32), y, 4]
    for name, value in change.items():
        if isinstance(name, int):
            arguments[name] = value
        else:
            given[name] = value
    with pytest.raises(error, match=said):
        ptxsim.run(**{"arguments": arguments, **given})
    assert not y.any()


ADD = {"kernel": ADD_ONE, "grid": 1, "block": 1, "arguments": []}


@pytest.mark.parametrize(
    ("streams", "options", "error", "said"),
    [
        ({}, {}, TypeError, "streams: expected a list of each GPU's list of launches"),
        ([{}], {}, TypeError, "streams: expected a list of each GPU's list of launches"),
        ([[SAXPY]], {}, TypeError, "streams: expected each launch as a dict, got str"),
        ([[{"grid": 1}]], {}, TypeError, r"streams: expected launches of \['arguments', 'block', 'grid', 'kernel'\]"),
        ([[{**ADD, "blok": 1}]], {}, TypeError, "streams: expected .* 'blok'"),
        ([[]], {"resident": 0}, ValueError, "resident: expected"),
        ([[]], {"most": 0}, ValueError, "most: expected"),
        ([[ADD]], {}, ValueError, "arguments: expected 2"),
    ],
)
def test_streams_that_are_refused(streams: Any, options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ptxsim.run_together(streams, **options)


@pytest.mark.parametrize(
    ("array", "box", "swizzle", "error", "said"),
    [
        ([1, 2], (2,), 0, TypeError, "array: expected a NumPy array, got list"),
        (np.ones((8, 8), np.float32).T[1:], (4, 4), 0, ValueError, "array: expected the last dimension contiguous"),
        (np.ones((8, 8), np.float32), (4,), 0, ValueError, "box: expected 2 dimensions"),
        (np.ones((8, 8), np.float32), (4, 4.0), 0, TypeError, "box: expected an int, got float"),
        (np.ones((8, 8), np.float32), (4, 4), 32, ValueError, "rows of the swizzle's 32 bytes, got 16 bytes"),
        (np.ones((8, 7), np.float32), (4, 4), 0, ValueError, "strides: expected multiples of 16"),
        *(
            (np.ones((8, 8), np.float32), box, swizzle, (TypeError, ValueError), "(box|swizzle).*: expected")
            for box, swizzle in [(5, 0), (None, 0), ((4, 8), 32.0), ((4, 8), False), ((4, 8), np.array([0, 32]))]
        ),
        (np.zeros((8, 8), object), (4, 8), 0, (TypeError, ValueError), "array"),
    ],
)
def test_maps_that_the_driver_refuses(array: Any, box: Any, swizzle: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        ptxsim.tensor_map(array, box, swizzle=swizzle)


def test_what_a_kernel_may_not_do() -> None:
    with pytest.raises(MachineError, match=r"kernel.cu:4.*beyond the end of argument 1.*lane 4"):
        ptxsim.run(SAXPY, 1, 32, [1.0, np.ones(4, np.float32), np.ones(4, np.float32), 5])
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(MachineError, match=r"kernel.cu:4.*only read"):
        ptxsim.run(SAXPY, 1, 32, [1.0, fixed, fixed, 4])
    with pytest.raises(Deadlock, match="mbarrier"):
        ptxsim.run(COPY.replace("1024;", "1040;").replace("COLUMN", "0"), 1, 64, [copied(), np.zeros(256, np.float32)])


def copied() -> Any:
    return ptxsim.tensor_map(np.ones((9, 40), np.float32), (8, 32))


def test_source_on_macos_says_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"expected PTX text, got CUDA C.*macOS"):
        ptxsim.run(SAXPY, 1, 32, [])
