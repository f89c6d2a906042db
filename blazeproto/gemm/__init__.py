"""The grouped matrix products: CUDA C++ in ``gemm/cuda``, compiled by NVRTC, hosted by CuPy modules. No torch in here.

Shapes: T tokens, d model width, n expert width, E experts, R rows in expert order, P pairs; G is 2 for a gated activation (h is
[gate, up]), else 1. Arrays are bf16 and contiguous, scores fp32, indices int32: torch, CuPy, Numba, JAX. The six products of a
layer take `Quantized` operands (e4m3.py) as well. Every product takes a
`blazeproto.dispatch.Dispatch` as it is made, runs on the caller's current stream, returns its outputs, and makes those that are
not handed in, of the kind of array that came. Its specification is its twin, ``gemm.TWINS[name]``: the formula in its file,
computed by NumPy. NumPy arrays, and torch's on a CPU, run that: float32 ones are rounded to bf16 where the kernels store bf16,
float64 ones are not (`blazeproto.runtime.libraries`). TypeError or ValueError names the argument, before anything is launched: d
and n are multiples of 8 (TMA moves 16 bytes), pointers 16-byte aligned, E at most 512, and all arrays on the current GPU.

>>> from blazeproto import dispatch, gemm
>>> gemm.kernel_for("up_forward")                                # to look into: .source .ptx .sass .registers .spills
>>> h, act = gemm.up_forward(x, up_proj, dispatch.build_dispatch(topk_experts, num_experts))
"""

from blazeproto.gemm.combine import combine
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.down_backward import down_backward_act, score_partials
from blazeproto.gemm.dsd import dds, dsd
from blazeproto.gemm.fused import down_forward_fused, up_backward_act_fused
from blazeproto.gemm.linear import down_forward, grouped_mm, up_backward_act
from blazeproto.gemm.product import Product, Sizes
from blazeproto.gemm.reduce import bias_score_grad, expert_row_sum
from blazeproto.gemm.registry import BLOCK_PRODUCTS, PRODUCTS, TWINS, all_kernels, candidates, kernel_for, prepare
from blazeproto.gemm.sdd import sdd
from blazeproto.gemm.tiles import TILES, TileConfig
from blazeproto.gemm.up import up_forward
from blazeproto.gemm.weight import down_backward_weight, up_backward_weight, weight_workspace

__all__ = [
    "BLOCK_PRODUCTS",
    "PRODUCTS",
    "TILES",
    "TWINS",
    "Kernel",
    "Product",
    "Sizes",
    "TileConfig",
    "all_kernels",
    "bias_score_grad",
    "candidates",
    "combine",
    "dds",
    "down_backward_act",
    "down_backward_weight",
    "down_forward",
    "down_forward_fused",
    "dsd",
    "expert_row_sum",
    "grouped_mm",
    "kernel_for",
    "prepare",
    "score_partials",
    "sdd",
    "up_backward_act",
    "up_backward_act_fused",
    "up_backward_weight",
    "up_forward",
    "weight_workspace",
]
