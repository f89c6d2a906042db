"""DeepGEMM's grouped product for Hopper: the kernel of sgl-deep-gemm 0.2.1, compiled by nvcc and launched by the driver.

The package's compiled host code works with one release of torch only. The package is therefore not imported; its folder
``include`` has the kernel. Tiles are 128 x 128, without clusters. DeepGEMM chooses other tiles for some shapes, and all of them
add in the same order.
"""

import ctypes
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.gemm.e4m3 import BLOCK, Quantized
from blazeproto.gemm.nvrtc import find_tool
from blazeproto.runtime import driver, optional

CTAS, STAGES, TMA_THREADS, MATH_THREADS = 132, 5, 128, 256  # as DeepGEMM chooses for these tiles on an H200
SWIZZLE = 128  # bytes
SOURCE = """#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
using namespace deep_gemm;
auto kernel = &sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, {sizes}, false, {ctas}, GemmType::MGroupedContiguous,
                                       cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>;
"""
OPTIONS = "-arch=sm_90a -std=c++20 --expt-relaxed-constexpr -Xptxas=--register-usage-level=10 -diag-suppress=174,177"
DATA_TYPES = {torch.float8_e4m3fn: 0, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType: e4m3 as UINT8


class Tiled(NamedTuple):
    """A contiguous matrix with a tensor map.  box: rows and columns of one copy.  swizzle: bytes, or 0."""

    matrix: Tensor
    box: tuple[int, int]
    swizzle: int

    def encode(self, at: int) -> int:
        """cuTensorMapEncodeTiled, to address ``at``, which is returned."""
        (rows, columns), matrix, longs, ints = self.matrix.shape, self.matrix, ctypes.c_uint64, ctypes.c_uint32
        where = ctypes.c_void_p(at), DATA_TYPES[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr())
        shape, strides = (longs * 2)(columns, rows), (longs * 1)(columns * matrix.element_size())
        how = (0, 3 if self.swizzle else 0, 3, 0)  # not interleaved; SWIZZLE_128B; L2_256B; zeros outside
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        if error := encode(*where, shape, strides, (ints * 2)(*self.box[::-1]), (ints * 2)(1, 1), *how):
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}")
        return at


def compiled(kind: str, experts: int, ctas: int = CTAS) -> bytes:
    """The kernel as "cubin" or "ptx". ModuleNotFoundError without the package, FileNotFoundError without nvcc."""
    if (spec := importlib.util.find_spec("deep_gemm")) is None or spec.origin is None:
        raise ModuleNotFoundError("deep_gemm: expected the folder of sgl-deep-gemm 0.2.1 on PYTHONPATH, got none")
    sizes = (0, 0, 0, experts, *[BLOCK] * 3, *[SWIZZLE] * 3, STAGES, TMA_THREADS, MATH_THREADS, 1)
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.cu"), Path(folder, "made")
        source.write_text(SOURCE.format(sizes=", ".join(map(str, sizes)), ctas=ctas))
        include = f"-I{Path(spec.origin).parent / 'include'}"
        subprocess.run([find_tool("nvcc"), f"-{kind}", *OPTIONS.split(), include, source, "-o", made], check=True)
        return made.read_bytes()


def shared_bytes(k: int) -> int:
    """The output tile; stages of both operands and the rows' scales; the weights' scales; at most 16 pairs of barriers."""
    return 2 * BLOCK**2 + STAGES * (2 * BLOCK**2 + 4 * BLOCK) + 8 * -(-k // (2 * BLOCK)) + 16 * 16


def arguments(rows: Quantized, weights: Quantized, out: Tensor, expert_of: Tensor) -> list[Any]:
    """The kernel's, in order: tensors, ints and tensor maps. As `Kernel.__call__`."""
    (m, k), n, tile = rows.values.shape, out.shape[1], (BLOCK, BLOCK)
    of_rows, of_weights = Tiled(rows.values, tile, SWIZZLE), Tiled(weights.values.flatten(0, 1), tile, SWIZZLE)
    of_out = Tiled(out, (BLOCK, SWIZZLE // out.element_size()), SWIZZLE)
    of_scales = Tiled(rows.scales.T.contiguous(), (1, BLOCK), 0)
    return [weights.scales.contiguous(), expert_of, m, n, k, of_rows, of_weights, of_out, of_scales]


class Kernel:
    """The kernel on the current device.  experts: the weights' first dimension."""

    def __init__(self, experts: int) -> None:
        code = compiled("cubin", experts)
        [entry] = set(re.findall(rb"\.text\.(\w+)", code))
        self.function = driver.load(code, entry.decode(), torch.cuda.current_device())

    def __call__(self, rows: Quantized, weights: Quantized, out: Tensor, expert_of: Tensor) -> None:
        """rows: (m, k), scales (m, k / 128).  weights: (E, n, k), scales (E, n / 128, k / 128).  out: (m, n) bf16.
        expert_of: (m,) int32, one value in each 128 rows; -1: none."""
        values, places = list[Any](), list[int]()
        for index, value in enumerate(arguments(rows, weights, out, expert_of)):
            if isinstance(value, Tiled):
                places.append(value.encode(driver.arguments.address + 128 * index))
                continue
            values.append(ctypes.c_uint32(value) if isinstance(value, int) else ctypes.c_void_p(value.data_ptr()))
            places.append(ctypes.addressof(values[-1]))
        pointers, stream = (ctypes.c_void_p * len(places))(*places), torch.cuda.current_stream().cuda_stream
        threads, shared = (TMA_THREADS + MATH_THREADS, 1, 1), shared_bytes(rows.values.shape[1])
        launch = optional.cupy().cuda.driver.launchKernel
        launch(self.function.ptr, CTAS, 1, 1, *threads, shared, stream, ctypes.addressof(pointers), 0)
