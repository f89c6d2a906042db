"""The grouped matrix products: CUDA C++ in ``gemm/cuda``, compiled by NVRTC, hosted by CuPy modules. No torch in here.

>>> from blazeproto import gemm
>>> gemm.kernel_for("up_forward", gemm.TileConfig())      # a kernel to look into: .source .ptx .sass .registers .spills
>>> h, act = gemm.up_forward(x, up_proj, rows)            # any DLPack or CUDA arrays; `blazeproto.gemm.reference` is the twin
"""

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.config import TileConfig, all_kernels, candidates, kernel_for
from blazeproto.gemm.layer_kernels import prepare
from blazeproto.gemm.products import (
    down_backward_act,
    down_backward_weight,
    down_forward,
    down_forward_fused,
    grouped_mm,
    score_partials,
    up_backward_act,
    up_backward_weight,
    up_forward,
    weight_workspace,
)
from blazeproto.gemm.rowops import bias_score_grad, combine, expert_row_sum
from blazeproto.gemm.rows import Rows

__all__ = [
    "Kernel",
    "Rows",
    "TileConfig",
    "all_kernels",
    "bias_score_grad",
    "candidates",
    "combine",
    "down_backward_act",
    "down_backward_weight",
    "down_forward",
    "down_forward_fused",
    "expert_row_sum",
    "grouped_mm",
    "kernel_for",
    "prepare",
    "score_partials",
    "up_backward_act",
    "up_backward_weight",
    "up_forward",
    "weight_workspace",
]
