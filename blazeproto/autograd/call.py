"""One call of the experts' operators as one record, `ExpertsCall`, and the two places where it is a flat tuple; a backend's
products, `Backend`, and what one is told, `BackendStep` and `OuterSum`.

An operator takes tensors, numbers and strings: `pack`, `unpack`. An autograd node saves tensors: `store`, `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ForwardRef, NamedTuple, Protocol

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.low_rank import LowRows
from blazeproto.autograd.options import Options
from blazeproto.autograd.policy import Saved
from blazeproto.autograd.private import refuse_batches
from blazeproto.autograd.ranks import EXCHANGES, AddUp
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.recipe import FP8, RECIPES, Operand, Recipe
from blazeproto.gemm.stored import RUN
from blazeproto.stored.weight import StoredWeight

One = Any
"""A tensor: where a record holds gradients, or says whether they are needed, anything."""
Maybe = Any
"""The same, or None."""
SymInt = int
STORED, NO_RUN = ("stored weights",), ("stored weights whose scales are not of a multiple of 32 numbers of a row",)
"""The extra that kernels must have to read a `StoredWeight`; one that none has."""


class Parameters(NamedTuple):
    """The differentiable tensors; also their gradients, and as booleans which gradients are needed."""

    x: One  # (T, d)
    up_proj: One  # (E, G n, d); a stored weight's values outside, a `StoredWeight` inside the operators
    up_bias: Maybe  # (E, G n)
    up_a: Maybe  # (E, r, d)
    up_b: Maybe  # (E, G n, r)
    down_proj: One  # (E, d, n), likewise
    down_bias: Maybe  # (E, d)
    down_a: Maybe  # (E, r, n)
    down_b: Maybe  # (E, d, r)
    scores: One  # (T, K) or (P,)
    up_rest: Maybe = None  # (E, n, d): the up rows, where up_proj has the gate rows alone


class Beside(NamedTuple):
    """The other tensors, but for the dispatch's."""

    up_kept: Maybe = None  # of `QuantizedWeights`
    down_kept: Maybe = None
    token_ranks: Maybe = None  # of an exchange
    send_order: Maybe = None  # of an exchange whose rows products send
    send_begins: Maybe = None
    up_scales: Maybe = None  # of stored weights
    up_zeros: Maybe = None
    down_scales: Maybe = None
    down_zeros: Maybe = None


class How(NamedTuple):
    """The call's options and sizes: all that is no tensor."""

    options: Options
    save: str = "recompute"  # the save policy of this call
    keep_transposed: bool = False
    top_k: int = 0  # 0: it varies
    chunk_tokens: SymInt = 0
    exchange: str = ""
    up_stored: str = ""  # `StoredWeight.how`
    down_stored: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The extras that kernels must have for this call (`Arch.extras`)."""
        blocks = [int(how.split()[2]) for how in (self.up_stored, self.down_stored) if how]
        return self.options.needs + STORED * bool(blocks) + NO_RUN * any(columns % RUN for columns in blocks)


class ExpertsCall(NamedTuple):
    """Everything that an operator of the experts is told."""

    p: Parameters
    beside: Beside
    dispatch: Dispatch  # with chunks, one for each: offsets (chunks, E+1)
    how: How

    @property
    def up_width(self) -> int:
        """G n."""
        width: int = self.p.down_proj.shape[2] * activation_named(self.how.options.activation).halves
        return width

    @property
    def recipe(self) -> Recipe:
        """The products' operands."""
        return RECIPES[str(self.how.options.precision)]

    @property
    def quantized(self) -> bool:
        """Whether the products' operands are."""
        return self.how.options.precision != "bf16"

    def joined(self) -> ExpertsCall:
        """With the up projection's weight as one, where gate and up are two."""
        if self.p.up_rest is None:
            return self
        return self._replace(
            p=self.p._replace(up_proj=torch.cat((self.p.up_proj, self.p.up_rest), dim=1), up_rest=None)
        )


# ---- a backend ---------------------------------------------------------------------------------------------------


class BackendStep(NamedTuple):
    """The arguments of a backend's product beside the rows that it reads and the places that it fills."""

    rows: Any
    """The dispatch, as the backend's ``rows_of`` made it."""

    weight: Any
    """A weight in x's dtype, or a `StoredWeight`, or as `records.quantized_weight` made it, in backward the transpose."""

    bias: Tensor | None = None
    """Likewise in x's dtype."""

    unquantized: Any = None
    """dO (T, d) in x's dtype, of which a down bias's share of dS is made."""

    low: LowRows | None = None
    """The term of low-rank factors: rows (R, r), r a multiple of 8, and the factor that they are multiplied by."""

    scores: Any = None  # (T, K) or (P,)
    activation: str = "swiglu"
    combine: str = "gather"
    add_up: AddUp | None = None
    """The sum of a token's rows, where its experts are on several ranks."""

    recipe: Recipe = FP8

    sending: Any = None
    """A `Sending` (gemm/sending.py): rows that this product brings to other ranks; None for none."""


class OuterSum(NamedTuple):
    """The gradient of a weight or a low-rank factor: left^T ordered, summed over each expert's rows."""

    left: Any  # (R, m) in expert order, or (T, m) with ``gather``
    ordered: Any
    """(R, k), or a list with it, from which a backend takes it: then it is freed once it has been read."""

    like: Tensor
    """The weight or factor: where its gradient lies, and in which dtype."""

    accumulator: Tensor | None
    """Float32 or float64: is added to and returned."""

    gather: bool
    transposed: bool
    """Whether the gradient is (E, k, m) in place of (E, m, k)."""

    factor: bool = False

    def taken(self) -> Any:
        """``ordered``, of which the record keeps nothing if it was in a list."""
        return self.ordered.pop() if isinstance(self.ordered, list) else self.ordered


class Backend(Protocol):
    """The products of the expert MLP, in an order that `blazeproto.autograd.node` gives. A backend is a module with these
    functions: `hopper_backend`, `torch_backend`.

    Shapes: x (T, d), up_proj (E, G n, d), down_proj (E, d, n), scores (T, K) or (P,), H (R, G n), act (R, n); G is 2 for a gated
    activation, else 1. H is the up projection of each row's token, with its bias if the layer has biases; act is the activation
    of H.
    """

    READS_ACT: bool
    """Whether `down_backward_act` reads act where it is there and no record."""

    def build_dispatch(self, topk_experts: Tensor, num_experts: int, lists: tuple[Tensor, Tensor, Tensor]) -> None:
        """topk_experts (T, K) or (P,), int32 or int64 -> fills expert_pair_indices (R,), expert_token_offsets (E+1,) and
        token_index_map (P,). If R < P, rows from R on are left out."""

    def rows_of(self, dispatch: Dispatch) -> Any:
        """The dispatch as the other functions take it; made once for all steps of an operator."""

    def quantized_tokens(self, t: Tensor, rows: Any, operand: Operand) -> Any:
        """With ``precision="fp8"``: x or dO (T, d) as the products take it. H, act, dH and A' are records then (`records`)."""

    def plain_rows(self, record: Tensor, rows: Any, dtype: torch.dtype) -> Tensor:
        """The numbers of rows in a record, (R, m) of x's dtype: biases and low-rank factors take them."""

    def quantize_weights(
        self, weights: Tensor, at: Any, out: Any, transposed: Any, *, scale_values: str = "power_of_two"
    ) -> None:
        """weights (E, m, k) -> `Quantized` ones and their transpose, those that are not None.  at: of `rows_of` or `place_of`.
        scale_values: of an `Operand`."""

    def refresh_weights(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        out: Any,
        transposed: Any,
        hashes: Tensor,
        call: int,
        *,
        scale_values: str,
    ) -> None:
        """Both orders of a weight (E, m, k), which is rounded to ``dtype`` first, made anew if it has changed.  hashes, call,
        scale_values: of `quantize.launch_refresh`, by which that is noticed."""

    def place_of(self, t: Tensor) -> Any:
        """The device and stream on which `quantize_weights` runs without a dispatch: t's."""

    def low_rank_rows(
        self, a: Tensor, factor: Tensor, rows: Any, *, gather: bool, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """-> (R, r) in a's dtype, new or in the place given: each row of a times its expert's factor (E, r, m)^T, or with
        ``transposed`` (E, m, r).  a: (R, m) in expert order, or (T, m) with ``gather``."""

    def up_forward(self, step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> H and act, new or in the places given. step.low: rows (R, r) and factor (E, G n, r); H gets rows factor^T before
        bias and activation."""

    def down_forward(self, step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
        """-> out (T, d), in place. step.low: rows (R, r) and factor (E, d, r), for Y. overwrite_act: ``act`` may be written
        over."""

    def down_backward_act(
        self,
        step: BackendStep,
        needs: Sequence[bool],
        d_out: Tensor,
        h: Tensor,
        act: Tensor | None,
        *,
        overwrite_h: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """-> dH, d_scores and A' = S act (R, n), at least those needed. act: where it was saved.  step.bias: for d_scores.
        step.low: rows (R, r) and factor (E, r, n), for dA' before the score.  overwrite_h: dH may lie over H."""

    def up_backward_act(self, step: BackendStep, dh: Tensor, dx: Tensor) -> None:
        """-> dX (T, d), in place. step.low: rows (R, r) and factor (E, r, d), for a row's dX before its token's sum."""

    def weight_gradient(self, rows: Any, of: OuterSum) -> Tensor:
        """-> (E, m, k), or with ``of.transposed`` (E, k, m), lying as the weight does, in its dtype, zeros for an expert without
        rows; or the accumulator."""

    def expert_row_sum(
        self, values: Tensor, num_experts: int, rows: Any, scores: Tensor | None, accumulator: Tensor | None
    ) -> Tensor:
        """A bias's gradient, float32 or float64: (E, m) sums over each expert's rows, of S values gathered from (T, m), or
        without scores of rows (R, m) as they are; new, or added to the accumulator."""


# ---- torch's edges -----------------------------------------------------------------------------------------------


_TYPES = {"One": "Tensor", "Maybe": "Tensor?", "Options": "str"}
_ARGUMENTS = {
    **{name: annotation for record in (Parameters, Beside) for name, annotation in record.__annotations__.items()},
    **dict.fromkeys(("expert_pair_indices", "expert_token_offsets", "token_index_map"), ForwardRef("One")),
    **dict.fromkeys(("pair_tokens", "token_offsets"), ForwardRef("Maybe")),
    **How.__annotations__,
}
FIELDS = tuple(_ARGUMENTS)
SCHEMA = ", ".join(
    f"{_TYPES.get(annotation.__forward_arg__, annotation.__forward_arg__)} {name}"
    for name, annotation in _ARGUMENTS.items()
)
"""The arguments of an operator that takes a packed call."""


def first(record: Any, values: Iterable[Any]) -> Any:
    """A record of the first of them."""
    return record(*islice(values, len(record._fields)))


def tensors_of(call: ExpertsCall) -> tuple[Any, ...]:
    """All of a call, in the order of its arguments."""
    d = call.dispatch
    lists = d.expert_pair_indices, d.expert_token_offsets, d.token_index_map, d.pair_tokens, d.token_offsets
    return (*(t.values if isinstance(t, StoredWeight) else t for t in call.p), *call.beside, *lists)


def taken_apart(up: Any, down: Any) -> tuple[tuple[Any, ...], tuple[str, str]]:
    """The last fields of `Beside` and of `How` for these weights."""
    stored = [weight if isinstance(weight, StoredWeight) else None for weight in (up, down)]
    beside = (t for weight in stored for t in ((None, None) if weight is None else weight.tensors[1:]))
    return tuple(beside), ("" if stored[0] is None else stored[0].how, "" if stored[1] is None else stored[1].how)


def _together(p: Parameters, beside: Beside, how: How) -> Parameters:
    if how.up_stored:
        p = p._replace(up_proj=StoredWeight(how.up_stored, p.up_proj, beside.up_scales, beside.up_zeros))
    if how.down_stored:
        p = p._replace(down_proj=StoredWeight(how.down_stored, p.down_proj, beside.down_scales, beside.down_zeros))
    return p


def _dispatch(p: Parameters, lists: Iterable[Any], how: How, num_tokens: int) -> Dispatch:
    pairs, offsets, index_map, pair_tokens, token_offsets = lists
    tokens = EXCHANGES[how.exchange].places if how.exchange else num_tokens
    sizes = len(p.down_proj), how.top_k or None, tokens
    return Dispatch(pairs, offsets, index_map, None, *sizes, token_offsets, pair_tokens)


def pack(call: ExpertsCall) -> tuple[Any, ...]:
    """As an operator takes it."""
    options, *how = call.how
    return (*tensors_of(call), options.encode(), *how)


def unpack(packed: Sequence[Any]) -> ExpertsCall:
    """The call that `pack` packed. Options that act before the operators have their defaults."""
    values = iter(packed)
    p, beside, lists = first(Parameters, values), first(Beside, values), [*islice(values, 5)]
    how = How(Options.decode(next(values)), *values)
    return ExpertsCall(_together(p, beside, how), beside, _dispatch(p, lists, how, p.x.shape[0]), how)


def store(ctx: Any, call: ExpertsCall, saved: Saved) -> None:
    """Save a call and what it left in its autograd node."""
    ctx.how = call.how
    ctx.save_for_backward(*tensors_of(call), *saved)


def load(ctx: Any, d_out: Tensor | None) -> tuple[ExpertsCall, Saved]:
    """The call and the tensors that `store` saved. If X was not saved, a tensor of its shape stands for it.

    RuntimeError for a d_out that `refuse_batches` refuses.
    """
    refuse_batches(d_out)
    values = iter(ctx.saved_tensors)
    p, beside, lists = first(Parameters, values), first(Beside, values), [*islice(values, 5)]
    if p.x is None and d_out is not None:
        p = p._replace(x=d_out.new_empty(1, 1).expand_as(d_out))
    num_tokens, p = 0 if p.x is None else p.x.shape[0], _together(p, beside, ctx.how)  # 0: nothing reads it
    return ExpertsCall(p, beside, _dispatch(p, lists, ctx.how, num_tokens), ctx.how), first(Saved, values)
