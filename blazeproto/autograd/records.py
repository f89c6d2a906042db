"""fp8 tensors and their scales as one tensor of bytes, a record, so that operators pass and save one where they have one in bf16.

    rows       (R, width + width / 32)                values (R, width), then scales (width / 128, R) fp32
    weights    (E, m k + 4 (m / 128) (k / 128))       values (E, m, k), then scales (E, m / 128, k / 128) fp32; of one order, and
                                                      (1 or 2, E, ...) of the orders that are there

A record is one run of memory: its shape only says how long it is, and that a chunk's rows have a record of their own. An expert's
bytes are rounded up to 16, so that the second order begins where tensor maps can.

`QuantizedWeights` holds the records of both weights for several forwards, as in gradient accumulation; the caller says when
the weights changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from blazeproto.autograd.operators import cast, ready
from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks, scales_shape
from blazeproto.gemm.recipe import RECIPES
from blazeproto.gemm.tiles import ALIGNMENT
from blazeproto.runtime.checks import instance
from blazeproto.stored.weight import StoredWeight


def row_bytes(width: int) -> int:
    """Bytes that a row takes in a record."""
    return width + 4 * width // BLOCK


def weight_bytes(m: int, k: int) -> int:
    """Bytes that an expert's weight (m, k) takes in a record."""
    return m * k + -(-4 * blocks(m) * blocks(k) // ALIGNMENT) * ALIGNMENT


def new_quantized(like: Tensor, scale: str, *shape: int) -> Quantized:
    """Uninitialised values of this shape, no record, and their scales.  scale: what shares one (`e4m3.scales_shape`)."""
    return Quantized(
        like.new_empty(shape, dtype=torch.float8_e4m3fn),
        like.new_empty(scales_shape(scale, shape), dtype=torch.float32),
    )


def new_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Uninitialised."""
    return like.new_empty(num_rows, row_bytes(width), dtype=torch.uint8)


def new_weights(like: Tensor, shape: Sequence[int], orders: int) -> Tensor:
    """Uninitialised, for a weight of this shape, (E, m, k), in one or two orders."""
    experts, m, k = shape
    return like.new_empty(orders, experts, weight_bytes(m, k), dtype=torch.uint8)


def rows_in(record: Tensor, width: int) -> Quantized:
    """Views of values and scales. width: of a row, a multiple of 128."""
    return _views(record, "1x128", len(record), width)


def width_of(record: Tensor) -> int:
    """How wide the rows in it are."""
    return record.shape[1] * BLOCK // (BLOCK + 4)


def weight_in(record: Tensor, weight: Tensor, *, transposed: bool = False) -> Quantized:
    """Views of values and scales of a weight (E, m, k) in forward's order, a record's first, or of the transpose, its last."""
    order, shape = (record[-1], weight.shape[:0:-1]) if transposed else (record[0], weight.shape[1:])
    return _views(order, "128x128", len(order), *shape)


def new_orders(
    weight: Tensor, orders: tuple[bool, bool], place: Tensor | None = None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """A record of a weight, and its orders, which one pass fills.  orders: whether forward's and the transpose are in it.
    place: a record of its own for the transpose."""
    record = new_weights(weight, weight.shape, sum(orders))
    back = record if orders[1] else place
    to = weight_in(record, weight) if orders[0] else None
    return record, to, None if back is None else weight_in(back, weight, transposed=True)


def _views(record: Tensor, scale: str, *shape: int) -> Quantized:
    flat, end, scales = record.view(-1), prod(shape), scales_shape(scale, shape)
    of_scales = flat[end : end + 4 * prod(scales)]
    return Quantized(flat[:end].view(torch.float8_e4m3fn).view(shape), of_scales.view(torch.float32).view(scales))


def quantized_weight(
    quantize: Any,
    weight: Tensor | StoredWeight,
    dtype: torch.dtype,
    at: Any,
    kept: Tensor | None,
    place: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Quantized:
    """A weight, or its transpose, in e4m3.  quantize: a backend's ``quantize_weights``.  dtype: x's, to which it is rounded
    first.  kept: a record that has it already.  place: a record that gets the transpose, too. A `StoredWeight`'s numbers and
    scales stay as they are."""
    if isinstance(weight, StoredWeight):
        lying = weight.values.view(torch.uint8), weight.scales.float()
        codes, scales = (t.mT.contiguous() for t in lying) if transposed else lying
        return Quantized(codes.view(weight.values.dtype), scales)
    if kept is None:
        kept, *orders = new_orders(weight, (not transposed, transposed), place)
        quantize(ready(cast(weight, dtype)), at, *orders)
    return weight_in(kept, weight, transposed=transposed)


# ---- kept by the caller ------------------------------------------------------------------------------------------

_State = tuple[ref[torch.UntypedStorage], int, torch.Size, int | None]

_MADE_OF: WeakKeyDictionary[torch.UntypedStorage, _State | None] = WeakKeyDictionary()
"""By a record's memory: the weight then; None: an optimizer has stepped since, or it is a copy. Without an exported program's."""


def _state(weight: Tensor) -> _State:
    """What changes where a tensor is written to or is another one. Not what a replayed CUDA graph or ``weight.data`` writes;
    tensors that were made in inference mode have no version."""
    version = None if weight.is_inference() else weight._version
    return ref(weight.untyped_storage()), weight.data_ptr(), weight.shape, version


_STEPPING: WeakKeyDictionary[Optimizer, WeakSet[torch.UntypedStorage]] = WeakKeyDictionary()
"""The weights that a step in progress may write to: those with gradients at its start, since hooks may clear them before it ends;
every trainable one if the step has a closure."""


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

    up, down: records (2, E, bytes), uint8, see above.  dtype: of x, to which weights were rounded first.  precision: the recipe.
    One that was made by hand, copied deeply, or saved and loaded, is of no weights: a forward with it raises ValueError.
    """

    up: Tensor
    down: Tensor
    dtype: torch.dtype
    precision: str = "fp8"

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
    quantized: QuantizedWeights, dtype: torch.dtype, weights: tuple[Any, Any], precision: Any
) -> tuple[Tensor, Tensor]:
    """up and down. TypeError for what is not `QuantizedWeights`; ValueError: they are not for x of this dtype or for this
    precision, or not of these weights as they are, which a compiled call finds in its operators (`node.experts`)."""
    instance("quantized", quantized, QuantizedWeights, optional=True)
    for name, expected, got in (("precision", quantized.precision, precision), ("x", quantized.dtype, dtype)):
        if expected != got:
            raise ValueError(f"quantized: expected {name} in {expected}, got {got}")
    records = quantized.up, quantized.down
    if not torch.compiler.is_compiling():
        for record, weight in zip(records, weights, strict=True):
            check_unchanged(record, weight, copies=False)
    return records


def made_of(
    gate_up_proj: Tensor, down_proj: Tensor, dtype: torch.dtype, backend: Any, precision: str
) -> QuantizedWeights:
    """Both weights' records, for as long as the weights stay as they are."""
    _watch_optimizers()
    records = []
    for weight in (gate_up_proj, down_proj):
        record, *orders = new_orders(weight, (True, True))
        backend.quantize_weights(
            ready(cast(weight, dtype)),
            backend.place_of(weight),
            *orders,
            scale_values=RECIPES[precision].weights.scale_values,
        )
        _MADE_OF[record.untyped_storage()] = _state(weight)
        records.append(record)
    up, down = records
    return QuantizedWeights(up, down, dtype, precision)
