"""Expert weights quantized once for several forwards, as gradient accumulation has them; the caller says when they changed.

kept = quantize_weights(gate_up_proj, down_proj)      # after every step of the optimizer
out = moe_mlp(x, gate_up_proj, down_proj, ..., precision="fp8", quantized=kept)
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.checks import check_dense, check_dtype, check_experts
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.options import Options
from blazeproto.runtime.checks import instance

_State = tuple[ref[torch.UntypedStorage], int, torch.Size, int | None]

_MADE_OF: WeakKeyDictionary[torch.UntypedStorage, _State | None] = WeakKeyDictionary()
"""By a record's memory: the weight then; None: an optimizer has stepped since, or it is a copy. Without an exported program's."""


def _state(weight: Tensor) -> _State:
    """What changes where a tensor is written to or is another one. Not what a replayed CUDA graph or ``weight.data`` writes;
    tensors that were made in inference mode have no version."""
    version = None if weight.is_inference() else weight._version
    return ref(weight.untyped_storage()), weight.data_ptr(), weight.shape, version


_STEPPING: WeakKeyDictionary[Optimizer, WeakSet[torch.UntypedStorage]] = WeakKeyDictionary()
"""The weights that a step which has begun may write to: those with gradients, which the optimizer's own hooks may drop before it
ends, and with a closure, which makes the gradients, all."""


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_stepping)
    register_optimizer_step_post_hook(_stepped)


def _to_step(optimizer: Optimizer, *, all_trained: bool = False) -> WeakSet[torch.UntypedStorage]:
    """The weights with gradients. Sparse ones, which no expert has, have no storage."""
    weights = (p for group in optimizer.param_groups for p in group["params"] if p.layout is torch.strided)
    return WeakSet(p.untyped_storage() for p in weights if p.grad is not None or (all_trained and p.requires_grad))


def _stepping(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling() and _MADE_OF:
        closure = any(map(callable, (*args[1:], *options.values())))  # args: the optimizer first
        _STEPPING[optimizer] = _to_step(optimizer, all_trained=closure)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """A fused optimizer writes to weights whose versions stay as they were."""
    if torch.compiler.is_compiling() or not _MADE_OF:
        return
    stepped = {*_to_step(optimizer), *_STEPPING.pop(optimizer, ())}
    for record, state in [*_MADE_OF.items()]:
        if state and state[0]() in stepped:
            _MADE_OF[record] = None


def check_unchanged(record: Tensor, weight: Tensor, *, copies: bool) -> None:
    """ValueError: a weight is not that which the record was made of, or was written to since. copies: whether a copy of a record
    passes, as an exported program has one."""
    state = _state(weight)
    if _MADE_OF.get(record.untyped_storage(), state if copies else None) != state:
        raise ValueError(
            "quantized: expected of these weights, got of others, or of them before they changed: call quantize_weights again"
        )


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """Both weights of an expert MLP in fp8, each in forward's order and transposed: what `quantize_weights` made.

    up, down: records (2, E, bytes), uint8, see `blazeproto.autograd.records`.  dtype: of x, to which weights were rounded first.
    One that was made by hand, copied deeply, or saved and loaded, is of no weights: a forward with it raises ValueError.
    """

    up: Tensor
    down: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """What is not noted yet is of no weights: a compiled call would else take it for a record in an exported program."""
        for name, record in (("up", self.up), ("down", self.down)):
            instance(name, record, Tensor)
            _MADE_OF.setdefault(record.untyped_storage())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __copy__(self) -> Self:
        return self  # nothing in it changes

    @property
    def nbytes(self) -> int:
        """Bytes of memory: about twice the number of the weights' elements."""
        return self.up.nbytes + self.down.nbytes


def records_of(
    quantized: QuantizedWeights, dtype: torch.dtype, weights: tuple[Tensor, Tensor], precision: Any
) -> tuple[Tensor, Tensor]:
    """up and down. TypeError for what is not `QuantizedWeights`; ValueError: they are not for x of this dtype or for this
    precision, or not of these weights as they are, which a compiled call finds in its operators (`node.experts`)."""
    instance("quantized", quantized, QuantizedWeights, optional=True)
    for name, expected, got in (("precision", "fp8", precision), ("x", quantized.dtype, dtype)):
        if expected != got:
            raise ValueError(f"quantized: expected {name} in {expected}, got {got}")
    records = quantized.up, quantized.down
    if not torch.compiler.is_compiling():
        for record, weight in zip(records, weights, strict=True):
            check_unchanged(record, weight, copies=False)
    return records


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def quantize_weights(
    gate_up_proj: Tensor, down_proj: Tensor, *, dtype: torch.dtype | None = None, backend: str = "auto"
) -> QuantizedWeights:
    """Both weights in fp8, in both orders, in one pass: the bits that every forward and backward makes without.

    gate_up_proj: (E, 2n, d), of any dtype that `moe_mlp` takes, contiguous.  down_proj: (E, d, n), of the same dtype.
    dtype: of x as the experts see it; default: autocast's where it is enabled, else the weights'.  backend: as in `moe_mlp`.

    To be called again when a weight has changed. TypeError or ValueError for weights that precision="fp8" does not take; for a
    DTensor too: what FSDP gathers for one forward is gone after it, so that there each forward quantizes weights.
    """
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        check_dense(name, weight)
        check_dtype(weight.dtype, f"{name}.dtype")
    if down_proj.dim() != 3 or not len(down_proj):
        raise ValueError(f"down_proj: expected shape (E, d, n) with E >= 1, got {tuple(down_proj.shape)}")
    if gate_up_proj.dtype != down_proj.dtype:
        raise ValueError(f"down_proj: expected dtype {gate_up_proj.dtype} as gate_up_proj has, got {down_proj.dtype}")
    check_dtype(dtype)
    with torch.inference_mode(False):  # or no backward could save what is made
        dtype = dtype or autocast_dtype(down_proj.device.type) or down_proj.dtype
        x = torch.empty(0, down_proj.shape[1], dtype=dtype, device=down_proj.device)
        options = Options(backend=backend, precision="fp8")
        check_experts(x, (gate_up_proj,), down_proj, *[None] * 4, num_experts=len(down_proj), options=options)
        made: Any = backend_on(backend, x.device, dtype, *down_proj.shape, precision="fp8")
        up, down = (made.keep(weight, dtype) for weight in (gate_up_proj, down_proj))
    _watch_optimizers()
    _MADE_OF.update({up.untyped_storage(): _state(gate_up_proj), down.untyped_storage(): _state(down_proj)})
    return QuantizedWeights(up, down, dtype)
