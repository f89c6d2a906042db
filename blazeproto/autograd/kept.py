"""Expert weights quantized once for several forwards, as gradient accumulation has them; the caller says when they changed.

kept = quantize_weights(gate_up_proj, down_proj)      # after every step of the optimizer
out = moe_mlp(x, gate_up_proj, down_proj, ..., precision="fp8", quantized=kept)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.checks import check_experts
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.options import Options


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes where a tensor is written to or is another one; what a replayed CUDA graph writes is not seen."""
    return weight.data_ptr(), weight._version


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """Both weights of an expert MLP in fp8, each in forward's order and transposed: what `quantize_weights` made.

    up, down: records (2, E, bytes), uint8, see `blazeproto.autograd.records`.  dtype: of x, to which weights were rounded first.
    states: where each weight lay, and its version then.
    """

    up: Tensor
    down: Tensor
    dtype: torch.dtype
    states: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory: about twice the number of the weights' elements."""
        return self.up.nbytes + self.down.nbytes


def records_of(
    quantized: QuantizedWeights, dtype: torch.dtype, weights: tuple[Tensor, Tensor], precision: Any
) -> tuple[Tensor, Tensor]:
    """up and down. ValueError: they are not for x of this dtype or for this precision, or the weights are not those they were
    made of, unchanged."""
    for name, expected, got in (("precision", "fp8", precision), ("x", quantized.dtype, dtype)):
        if expected != got:
            raise ValueError(f"quantized: expected {name} in {expected}, got {got}")
    if not torch.compiler.is_compiling() and quantized.states != tuple(map(_state, weights)):
        raise ValueError("quantized: expected of these weights, got of others, or of them before they changed")
    return quantized.up, quantized.down


@torch.no_grad()
def quantize_weights(
    gate_up_proj: Tensor, down_proj: Tensor, *, dtype: torch.dtype | None = None, backend: str = "auto"
) -> QuantizedWeights:
    """Both weights in fp8, in both orders, in one pass: the bits that every forward and backward makes without.

    gate_up_proj: (E, 2n, d), of any dtype that `moe_mlp` takes, contiguous.  down_proj: (E, d, n), of the same dtype.
    dtype: of x as the experts see it; default: autocast's where it is enabled, else the weights'.  backend: as in `moe_mlp`.

    To be called again when a weight has changed. TypeError or ValueError for weights that precision="fp8" does not take; for a
    DTensor too: what FSDP gathers for one forward is gone after it, so that there weights are quantized before each product.
    """
    if dtype is None:
        dtype = autocast_dtype(down_proj.device.type) or down_proj.dtype
    x = torch.empty(0, down_proj.shape[1], dtype=dtype, device=down_proj.device)
    options = Options(backend=backend, precision="fp8")
    others = (down_proj, None, None, None, None)
    check_experts(x, (gate_up_proj,), *others, num_experts=len(down_proj), options=options)
    made: Any = backend_on(backend, x.device, dtype, *down_proj.shape, precision="fp8")
    weights = gate_up_proj, down_proj
    up, down = (made.keep(weight, dtype) for weight in weights)
    return QuantizedWeights(up, down, dtype, tuple(map(_state, weights)))
