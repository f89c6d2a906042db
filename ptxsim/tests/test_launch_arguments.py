"""Arguments of `ptxsim.run`, `ptxsim.step` and `ptxsim.tensor_map`, and a launch's sizes: refused before anything runs."""

import sys
from typing import Any

import numpy as np
import pytest
from small_kernels import INTS, cuda, ptx, zeros

import ptxsim

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


COPY = 'extern "C" __global__ void k(const int* x, int* o) { o[threadIdx.x] = x[threadIdx.x]; }'


ONE = 'extern "C" __global__ void k(TYPE x, int* o) { if (threadIdx.x == 0) o[0] = 1; }'


SHARED = cuda(
    "extern __shared__ int d[]; __shared__ int s[12000]; s[threadIdx.x] = 1; d[threadIdx.x] = s[o[0]];", "int* o"
)
REFUSED: list[tuple[str, Any, Any, Any, dict[str, int], str]] = [  # source, grid, block, arguments, options, what is named
    *((ONE.replace("TYPE", "int"), *sizes, [1, zeros(4)], {}, "grid|block") for sizes in [
        (1, (2**32, 2**32)), ((2**32, 2**32), 32), (1, (1, 1, 128)), ((1, 65536), 32)
    ]),
    (ONE.replace("TYPE", "int"), 17, 32, [1, zeros(4)], {"cluster": 17}, "grid|cluster"),
    (SHARED, 1, 32, [zeros()], {"shared": 220 * 1024}, "shared"),
    # PTX ISA §11.4: of more threads the launch fails. As of __launch_bounds__(64).
    *((ptx("mov.u32 %r1, 1;", "", directives=most), 1, 128, [], {}, "block") for most in (
        ".reqntid 64, 1, 1", ".maxntid 64, 1, 1"
    )),
    # arrays that are no plain memory: strided, transposed, reversed, broadcast, big-endian, objects
    *((COPY, 1, 4, [given, zeros(4)], {}, "argument 0") for given in (
        INTS[:8:2], INTS.reshape(8, 8).T, INTS[7::-1], np.broadcast_to(np.int32(7), (8,)), np.arange(8, dtype=">i4"),
        np.array([None] * 8),
    )),
    # values that a parameter does not take
    *((ONE.replace("TYPE", kind), 1, 1, [value, zeros(4)], {}, "argument 0") for kind, value in (
        ("double", zeros(4)), ("float4", 1.5), ("float3", 1.5), ("int", np.array(5, ">i4")), ("float", 1e60)
    )),
    *((COPY, 1, 4, arguments, {}, "arguments: expected") for arguments in (None, 5)),
    ("x" * 5000, 1, 1, [], {}, "kernel"),  # too long for a file's name
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("source", "grid", "block", "arguments", "options", "named"), REFUSED)
def test_a_launch_is_refused_before_anything_runs(
    source: str, grid: Any, block: Any, arguments: Any, options: dict[str, int], named: str
) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=named):
        ptxsim.step(source, grid, block, arguments, **options)


def test_a_cluster_of_the_kernel_s_own_size() -> None:
    """__cluster_dims__ (.reqnctapercluster): the launch has it, or is refused."""
    body = 'int n; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); o[blockIdx.x] = n;'
    source, out = cuda(body, "int* o", attributes="__cluster_dims__(2, 1, 1)"), zeros(4)
    with pytest.raises(ValueError, match=r"cluster: expected 2 CTAs, as k's .reqnctapercluster says, got 1"):
        ptxsim.run(source, 4, 1, [out])
    ptxsim.run(source, 4, 1, [out], cluster=2)
    assert out.tolist() == [2] * 4


def test_a_view_that_is_only_read_of_an_array_that_is_not() -> None:
    """A kernel has its address, and may write the array there."""
    view = zeros(4)[:]
    view.flags.writeable = False
    with pytest.raises(ValueError, match=r"argument 1 .*only read"):
        ptxsim.run(COPY, 1, 4, [INTS, view])


def test_a_race_through_two_arrays_of_one_buffer() -> None:
    """As `tensor.numpy()` and `tensor[4:].numpy()`: their bases are no arrays, and their bytes the same."""
    buffer = bytearray(64)
    whole, part = np.frombuffer(buffer, np.int32), np.frombuffer(buffer, np.int32, offset=16)
    source = cuda("if (blockIdx.x == 0) a[4] = 1; else o[0] = b[0];", "int* a, int* b, int* o")
    assert ptxsim.run(source, 2, 1, [whole, part, zeros(1)]).races
    with pytest.raises(ValueError, match="argument 1: expected memory of its own"):
        ptxsim.run(source, 2, 1, [part, whole, zeros(1)])


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [
        ("float*", np.float64),
        ("const __nv_bfloat16* __restrict__", np.float64),
        ("__nv_bfloat16*", np.float16),
        ("__nv_bfloat16*", np.int16),
        ("const float *", np.int32),
        ("u16*", np.uint32),
        ("long long*", np.int32),
        ("unsigned*", np.float32),
        ("double*", np.float32),
    ],
)
def test_an_array_of_another_type_than_the_source_declares(declared: str, dtype: Any) -> None:
    source = f"typedef unsigned short u16; struct __nv_bfloat16 {{ short bits; }};\n{ONE.replace('TYPE', declared)}"
    with pytest.raises(TypeError, match=rf"argument 0 .*expected an array of .*, got {np.dtype(dtype)}"):
        ptxsim.run(source, 1, 1, [np.zeros(4, dtype), zeros(4)])


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [
        ("float*", np.float32),
        ("float*", np.uint32),
        ("__nv_bfloat16*", np.uint16),
        ("unsigned char*", np.int8),
        ("unsigned long long*", np.int64),
        ("void*", np.float64),
        ("float4*", np.float32),
        ("float**", np.uint64),
    ],
)
def test_an_array_of_the_type_that_the_source_declares_or_of_its_bits(declared: str, dtype: Any) -> None:
    """And of any type where the source says none."""
    source = f"struct __nv_bfloat16 {{ short bits; }};\n{ONE.replace('TYPE', declared)}"
    assert ptxsim.run(source, 1, 1, [np.zeros(4, dtype), out := zeros(4)]).ended and out[0] == 1


def test_types_are_those_of_the_kernel_that_runs() -> None:
    """One of several kernels, by a mangled name too; none of a template or of a comment."""
    from ptxsim.declared import elements

    source = """
    /* __global__ void first(int* x) { */
    __global__ void __launch_bounds__(64) first(float* x, int n) {}
    __global__ void second(const double* x, long* y) {} // __global__ void second(int* x) {
    template <class T> __global__ void third(T* x) {}
    """
    assert [str(one) for one in elements(source, "_Z5firstPfi")] == [
        "float, 4 bytes each (or their bits, uint32)",
        "None",
    ]
    assert [one and one.size for one in elements(source, "second")] == [8, None]
    assert elements(source, "_Z5thirdIfEvPT_") == [None] and elements(source, "fourth") == []
