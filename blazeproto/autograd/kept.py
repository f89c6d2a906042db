"""Weights in fp8 that outlive a forward pass: for how long they are those that their weights would be quantized to.

`QuantizedWeights` are the caller's, who says when the weights have changed: a forward with others raises. `KeptWeights` are a
layer's own, made by the first forward with a version of a weight, and freed when an optimizer steps:

    forward ──> quantize, both orders ──> backward, forward of the next micro-batch, backward ──> optimizer.step() frees them

The host sees most writes: by another tensor, by another version, and by a hook on optimizers, since fused ones change no version.
It does not see a write through ``weight.data`` or by a replayed CUDA graph. So each forward with kept copies looks at one of 32
numbers on the device, in each row and each column. If one has changed, the weight is quantized again (cuda/quantize.cu).
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from blazeproto.autograd.operators import cast, gpu_of, ready
from blazeproto.autograd.records import new_orders, weight_in
from blazeproto.gemm.e4m3 import scales_shape
from blazeproto.gemm.recipe import RECIPES
from blazeproto.runtime.arrays import current_stream
from blazeproto.runtime.checks import instance, one_of, require

_State = tuple[ref[torch.UntypedStorage], int, torch.Size, int | None]

_MADE_OF: WeakKeyDictionary[torch.UntypedStorage, _State | None] = WeakKeyDictionary()
"""By a record's memory: the weight then; None: an optimizer has stepped since, or it is a copy. Without an exported program's."""


def _state(weight: Tensor) -> _State:
    """A tensor's memory, shape and version, which tell a write or another tensor. A replayed CUDA graph and ``weight.data``
    change no version; tensors that were made in inference mode have none."""
    version = None if weight.is_inference() else weight._version
    return ref(weight.untyped_storage()), weight.data_ptr(), weight.shape, version


_MET: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()
"""By the memory of a weight that a layer has met: whether an optimizer has stepped it. In a program that steps copies of its own
that stays False."""

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
    if not torch.compiler.is_compiling() and (_MADE_OF or _MET):
        closure = any(map(callable, (*args[1:], *options.values())))  # args: the optimizer first
        _STEPPING[optimizer] = _to_step(optimizer, all_trained=closure)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """A fused optimizer writes to weights whose versions stay as they were."""
    if torch.compiler.is_compiling() or not (_MADE_OF or _MET):
        return
    stepped = {*_to_step(optimizer), *_STEPPING.pop(optimizer, ())}
    for storage in stepped & {*_MET}:
        _MET[storage] = True
    for kept in [*_KEPT]:
        kept.end(stepped)
    for record, state in [*_MADE_OF.items()]:
        if state and state[0]() in stepped:
            _MADE_OF[record] = None


def check_unchanged(record: Tensor, weight: Tensor, *, copies: bool) -> None:
    """ValueError: a weight is not that which the record was made of, or was written to since. copies: whether a copy of a record
    passes, as an exported program has one."""
    state = _state(weight)
    if _MADE_OF.get(record.untyped_storage(), state if copies else None) != state:
        raise ValueError(
            "quantized: expected copies of these weights as they are now, got copies of others, or from before a change: "
            "call quantize_weights again"
        )


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """Both weights of an expert MLP in fp8, each in forward's order and transposed: what `quantize_weights` made.

    up, down: records (2, E, bytes), uint8 (`records`).  dtype: of x, to which weights were rounded first.  precision: the recipe.
    One that was made by hand, copied deeply, or saved and loaded, is of no weights: a forward with it raises ValueError.
    """

    up: Tensor
    down: Tensor
    dtype: torch.dtype
    precision: str = "fp8"

    def __post_init__(self) -> None:
        """Notes the records as of no weights: a compiled call would else take them for those in an exported program."""
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
    if not isinstance(quantized, QuantizedWeights):
        raise TypeError(f"quantized: expected QuantizedWeights, KeptWeights or None, got {type(quantized).__name__}")
    require(all(isinstance(weight, Tensor) for weight in weights), "quantized", "None with stored weights", "some")
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
        with gpu_of(weight):
            backend.quantize_weights(
                *(ready(cast(weight, dtype)), backend.place_of(weight), *orders),
                scale_values=RECIPES[precision].weights.scale_values,
            )
        _MADE_OF[record.untyped_storage()] = _state(weight)
        records.append(record)
    up, down = records
    return QuantizedWeights(up, down, dtype, precision)


# ---- kept by a layer ---------------------------------------------------------------------------------------------

_KEPT: "WeakSet[KeptWeights]" = WeakSet()


class _Kept(NamedTuple):
    """Copies.  hashes: of both weights' blocks (`quantize.launch_refresh`).  fits: dtype of x, recipe, stream, places and shapes
    of the weights that the memory is for. Of others it is left as it is, for a backward to come; on another stream a product
    would not wait for what makes them.  of: the states of the weights, none once an optimizer has stepped."""

    weights: QuantizedWeights
    hashes: tuple[Tensor, ...]
    fits: tuple[Any, ...]
    of: tuple[_State, ...]


class KeptWeights:
    """A layer's quantized weights, which it makes by itself, and keeps from one forward to the next where it may.

    how: "step": an optimizer's step frees them. "changed": their memory stays, and the first forward after a step fills it
    again. "used": nothing is kept, and each forward quantizes.

    Trained weights are kept once a torch optimizer has stepped them; frozen weights, and all in forwards without gradients, at
    once. Nothing is kept of a weight that is no `nn.Parameter`, such as a DTensor, or was made in inference mode, nor while a
    CUDA graph is captured or tensors are fake.

    ValueError for another ``how``, as the layer's argument keep_quantized.
    """

    def __init__(self, how: str = "step") -> None:
        one_of("keep_quantized", how, ("step", "changed", "used"))
        self.how = how
        self._made: _Kept | None = None
        self._calls = 0
        _KEPT.add(self)

    def __reduce__(self) -> Any:
        """Copies and what is loaded have nothing yet."""
        return KeptWeights, (self.how,)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: about twice the number of the weights' elements, or 0."""
        return 0 if self._made is None else self._made.weights.nbytes + sum(each.nbytes for each in self._made.hashes)

    @torch.enable_grad()
    def keeps(self, *weights: Any) -> bool:
        """Whether a forward with gradients has kept copies of these weights, or makes them."""
        return self.how != "used" and all(map(_may_keep, weights))

    def of_weights(
        self, weights: tuple[Any, Any], dtype: torch.dtype, backend: Any, precision: str
    ) -> QuantizedWeights | None:
        """The weights (E, 2n, d) and (E, d, n), quantized as they are now; None where nothing is kept of them."""
        _watch_optimizers()
        if (
            {*map(_may_keep, weights)} != {True}  # looks at both, for each is to be met
            or self.how == "used"
            or type(weights[0].new_empty(0)) is not Tensor  # a mode makes fake ones
            or (weights[0].is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            self._made = None
            return None
        made, of, how = self._made, tuple(map(_state, weights)), (dtype, precision, stream_of(weights[0]))
        # In inference mode no backward could save what is made.
        with torch.no_grad(), torch.inference_mode(False), gpu_of(weights[0]):
            if made is None or made.of != of or made.fits[: len(how)] != how:
                made = self._made = self._anew(weights, *how)._replace(of=of)
                for known, record, state in zip(made.hashes, (made.weights.up, made.weights.down), of, strict=True):
                    known.zero_()
                    _MADE_OF[record.untyped_storage()] = state
            self._calls += 1
            for weight, record, hashes in zip(weights, (made.weights.up, made.weights.down), made.hashes, strict=True):
                orders = weight_in(record, weight), weight_in(record, weight, transposed=True)
                backend.refresh_weights(
                    *(weight, dtype, *orders, hashes, self._calls),
                    scale_values=RECIPES[precision].weights.scale_values,
                )
        return made.weights

    def _anew(self, weights: tuple[Tensor, ...], dtype: torch.dtype, precision: str, stream: int) -> _Kept:
        """The memory from before if it fits, else new memory."""
        made, self._made = self._made, None
        fits = (dtype, precision, stream, *(_state(weight)[:3] for weight in weights))
        if made is None or made.fits != fits:
            made = None  # its memory goes first
            up, down = (new_orders(weight, (True, True))[0] for weight in weights)
            hashes = tuple(
                weight.new_empty(prod(scales_shape("128x128", weight.shape)) + 1, dtype=torch.int32)
                for weight in weights
            )
            made = _Kept(QuantizedWeights(up, down, dtype, precision), hashes, fits, ())
        return made

    def end(self, stepped: set[torch.UntypedStorage]) -> None:
        """An optimizer has stepped these weights."""
        if self._made is not None and any(state[0]() in stepped for state in self._made.of):
            self.clear()

    def clear(self) -> None:
        """The next forward quantizes."""
        self._made = self._made._replace(of=()) if self._made is not None and self.how == "changed" else None


def stream_of(weight: Tensor) -> int:
    """The stream that the caller works on, where the weight is on a GPU."""
    return current_stream(weight) if weight.is_cuda else 0


def _may_keep(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter or weight.is_inference() or not weight.is_contiguous():
        return False
    stepped = _MET.setdefault(weight.untyped_storage(), False)
    return stepped or not (weight.requires_grad and torch.is_grad_enabled())
