"""One call of the experts' operators as one record, `ExpertsCall`, and the two places where it is a flat tuple.

An operator takes tensors, numbers and strings: `pack`, `unpack`. An autograd node saves tensors: `store`, `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ForwardRef, NamedTuple

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.options import Options
from blazeproto.autograd.policy import Saved
from blazeproto.autograd.ranks import EXCHANGES
from blazeproto.dispatch.structures import Dispatch

One = Any
"""A tensor: where a record holds gradients, or says whether they are needed, anything."""
Maybe = Any
"""The same, or None."""
SymInt = int


class Parameters(NamedTuple):
    """The differentiable tensors; also their gradients, and as booleans which gradients are needed."""

    x: One  # (T, d)
    up_proj: One  # (E, G n, d)
    up_bias: Maybe  # (E, G n)
    up_a: Maybe  # (E, r, d)
    up_b: Maybe  # (E, G n, r)
    down_proj: One  # (E, d, n)
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


class How(NamedTuple):
    """The call's options and sizes: all that is no tensor."""

    options: Options
    save: str = "recompute"  # the save policy of this call
    keep_transposed: bool = False
    top_k: int = 0  # 0: it varies
    chunk_tokens: SymInt = 0
    exchange: str = ""


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
    return (*call.p, *call.beside, *lists)


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
    return ExpertsCall(p, beside, _dispatch(p, lists, how, p.x.shape[0]), how)


def store(ctx: Any, call: ExpertsCall, saved: Saved) -> None:
    """Save a call and what it left in its autograd node."""
    ctx.how = call.how
    ctx.save_for_backward(*tensors_of(call), *saved)


def load(ctx: Any, d_out: Tensor | None) -> tuple[ExpertsCall, Saved]:
    """The call and the tensors that `store` saved. Where X was not saved, a tensor of its shape stands for it."""
    values = iter(ctx.saved_tensors)
    p, beside, lists = first(Parameters, values), first(Beside, values), [*islice(values, 5)]
    if p.x is None and d_out is not None:
        p = p._replace(x=d_out.new_empty(1, 1).expand_as(d_out))
    num_tokens = 0 if p.x is None else p.x.shape[0]  # without a gradient nothing reads it
    return ExpertsCall(p, beside, _dispatch(p, lists, ctx.how, num_tokens), ctx.how), first(Saved, values)
