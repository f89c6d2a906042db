"""The steps of Algorithm 1 that `node.py` puts in order: each a backend's products for the rows of one chunk.

A step makes what belongs to a weight's bias and low-rank factors too. It returns None for what is not needed, and runs nothing
for it. `node.Operators` has the same steps as calls of an operator.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.call import FIELDS, Backend, BackendStep, ExpertsCall, OuterSum, Parameters, first
from blazeproto.autograd.chunks import WHOLE, Chunk, chunks_of, take
from blazeproto.autograd.kept import check_unchanged
from blazeproto.autograd.operators import cast
from blazeproto.autograd.policy import Saved, SavePolicy
from blazeproto.autograd.ranks import EXCHANGES
from blazeproto.autograd.records import quantized_weight
from blazeproto.gemm.recipe import Operand
from blazeproto.stored.weight import StoredWeight, logical_shape

MAKES = {
    "down_backward": ("dh", "a_scaled", "scores", "xa", "d_out_b", "act_a"),
    "down_gradients": ("down_proj", "down_bias", "down_a", "down_b"),
    "up_backward": ("x", "dh_b"),
    "up_gradients": ("up_proj", "up_bias", "up_a", "up_b"),
    "backward": Parameters._fields,
}
"""What a step of backward returns. With low-rank factors d_out_b is dO B_down, dh_b is dH B_up, act_a is S act A_down^T."""


def wanted(step: str, call: ExpertsCall, needs: Parameters) -> list[bool]:
    """The gradients that are needed."""
    inner = {
        "dh": any(needs_of_up(needs)),
        "a_scaled": needs.down_proj or needs.down_a,
        "xa": needs.up_b and call.how.save == SavePolicy.RECOMPUTE,
        "d_out_b": needs.down_a,
        "act_a": needs.down_b,
        "dh_b": needs.up_a,
    }
    return [bool(inner[name] if name in inner else getattr(needs, name)) for name in MAKES[step]]


def needs_of_up(needs: Parameters) -> tuple[Any, ...]:
    """Those for which dH is made."""
    return needs.x, needs.up_proj, needs.up_bias, needs.up_a, needs.up_b


def steps_of(call: ExpertsCall, needs: Any = None, sums: Any = None, *, overwrite_h: bool = False) -> Iterator["Steps"]:
    """The steps of each chunk. needs: which gradients are needed; None in forward, which checks kept records of weights.
    sums: where chunks' gradients are summed."""
    p, beside, dispatch, how = call
    backend = backend_on(how.options.backend, p.x.device, p.x.dtype, *p.down_proj.shape, needs=how.needs)
    for kept, weight in ((beside.up_kept, p.up_proj), (beside.down_kept, p.down_proj)):
        if kept is not None and needs is None:
            check_unchanged(kept, weight, copies=True)
    quantize = partial(backend.quantize_weights, scale_values=call.recipe.weights.scale_values)
    prepare: Any = partial(quantized_weight, quantize) if call.quantized else _in_dtype
    if how.chunk_tokens != WHOLE:  # each product of each chunk takes the same weights, so the cast ones are kept
        prepare = partial(_once, {}, prepare)
    for chunk in chunks_of(dispatch, how.chunk_tokens):
        yield Steps(call, chunk, backend, prepare, needs, sums, overwrite_h)


def _in_dtype(weight: Any, dtype: torch.dtype, *_: Any, **__: Any) -> Any:
    """The counterpart of `quantized_weight` where nothing is quantized. A stored weight stays as it is."""
    return weight if isinstance(weight, StoredWeight) else cast(weight, dtype)


def _in_list(rows: Any) -> list[Any]:
    """Rows for `OuterSum.ordered`, from which a backend takes them."""
    return rows if isinstance(rows, list) else [rows]


def _once(made: dict[int, Any], prepare: Any, weight: Tensor, *how: Any, **options: Any) -> Any:
    if id(weight) not in made:
        made[id(weight)] = prepare(weight, *how, **options)
    return made[id(weight)]


class Steps:
    """The steps of one chunk.  held: what was saved of it."""

    def __init__(
        self,
        call: ExpertsCall,
        chunk: Chunk,
        backend: Backend,
        prepare: Any,
        needs: Any,
        sums: Any,
        overwrite_h: bool,
    ) -> None:
        """prepare: makes a weight what products take, as `quantized_weight` does.
        overwrite_h: whether dH may lie over H."""
        self.call, self.chunk, self.backend, self.prepare, self.quantized = (
            call,
            chunk,
            backend,
            prepare,
            call.quantized,
        )
        self.exchange: Any = EXCHANGES.get(call.how.exchange)
        self.needs, self.sums, self.overwrite_h = needs, sums, overwrite_h
        self.rows, self.dtype = backend.rows_of(chunk.dispatch), call.p.x.dtype
        in_bf16 = (call.p.up_a, call.p.down_a, call.p.down_bias)  # which take tokens that are not quantized
        whole = call.quantized and call.recipe.x.scale == "token"  # an exchange has room for one scale a token
        self.sends_quantized = self.exchange and whole and all(t is None for t in in_bf16)
        self.loaded: tuple[Any, Any] = None, None
        self.sending: Any = None
        others = (call.p.up_a, call.p.down_a)  # factors meet the rows before a product does
        plain = not any(isinstance(weight, StoredWeight) for weight in (call.p.up_proj, call.p.down_proj))
        able = self.exchange and self.exchange.by_products and call.beside.send_order is not None
        self.by_products = able and plain and not call.quantized and all(t is None for t in others)
        self.held: list[Saved] = []
        self.scores = take(call.p.scores, chunk.tokens)
        add_up = self.exchange and partial(self.exchange.add_up, call.beside.token_ranks)
        self.combined: Any = {"combine": call.how.options.combine, "add_up": add_up}

    def load(self, t: Any, operand: Operand, *, plain: bool = False, sends: bool = False) -> Any:
        """The tokens (T, d) whose rows are here, as products take them: a chunk's, or what an exchange brings, until it brings
        another. In fp8 they are quantized before an exchange sends them, else in each call; then ``loaded[1]`` is as they came,
        for biases and low-rank factors.  operand: what they are, quantized.  plain: not quantized.
        sends: whether the product that takes them can send them, as the attribute ``sending`` tells it."""
        if self.loaded[0] is not t:
            here = take(t, self.chunk.tokens).contiguous()  # out.sum() delivers a gradient of stride 0
            if self.by_products and sends:
                here = self._sending(here, awaited=True)
            elif self.exchange:
                here = self.backend.quantized_tokens(here, self.rows, operand) if self.sends_quantized else here
                here = self.exchange.send(here, self.call.beside.token_ranks)
            self.loaded = t, here
        if plain or not self.quantized or self.sends_quantized:
            return self.loaded[1]
        return self.backend.quantized_tokens(self.loaded[1], self.rows, operand)

    def _sending(self, t: Tensor, *, awaited: bool) -> Tensor:
        """t (T, d) -> the places where the next product brings its rows."""
        beside = self.call.beside
        rows, self.sending = self.exchange.sending(t, beside.send_order, beside.send_begins, awaited=awaited)
        return rows

    # ---- forward -------------------------------------------------------------------------------------------------

    def up(self, x: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Any]:
        """x as `load` gives it -> H, act and X A_up^T (R, r), in the places that ``saved`` has."""
        p, rows = self._joined() if self.needs else self.call.joined().p, self.chunk.rows
        weight = self.prepare(p.up_proj, self.dtype, self.rows, self.call.beside.up_kept, saved.up_t)
        low = self._low(self.loaded[1], p.up_a, p.up_b, gather=True, out=take(saved.xa, rows))
        options: dict[str, Any] = {"activation": self.call.how.options.activation, "recipe": self.call.recipe}
        options["sending"], self.sending = self.sending, None
        step = BackendStep(self.rows, weight, cast(p.up_bias, self.dtype), low=low, **options)
        return *self.backend.up_forward(step, x, take(saved.h, rows), take(saved.act, rows)), low and low[0]

    def down(self, act: Tensor, out: Tensor | None, saved: Saved) -> Tensor:
        """-> out (T, d), all of it, made where it is None; act A_down^T in its place."""
        p = self.call.p
        weight = self.prepare(p.down_proj, self.dtype, self.rows, self.call.beside.down_kept, saved.down_t)
        low = self._low(act, p.down_a, p.down_b, gather=False, out=take(saved.act_a, self.chunk.rows))
        out = torch.empty_like(p.x) if out is None else out
        step = BackendStep(
            self.rows, weight, cast(p.down_bias, self.dtype), low=low, scores=self.scores, **self.combined
        )
        over = self.call.how.save != SavePolicy.PAPER
        self.backend.down_forward(step, act, take(out, self.chunk.tokens), overwrite_act=over)
        return out

    # ---- backward ------------------------------------------------------------------------------------------------

    def down_backward(self, d_out: Tensor, saved: Saved) -> tuple[Any, ...]:
        """d_out (T, d) -> dH, A' = S act (R, n), dS, X A_up^T, dO B_down (R, r), S act A_down^T (R, r)."""
        needs, p, h, act, xa, act_a = self.needs, self.call.p, saved.h, saved.act, saved.xa, saved.act_a
        wants = any(needs_of_up(needs)), needs.scores, needs.down_proj or needs.down_a
        dh = d_scores = a_scaled = low = None
        if not any((*wants, needs.down_b)):
            return (None,) * len(MAKES["down_backward"])
        if again := h is None:
            h, act, xa = self.up(self.load(p.x, self.call.recipe.x, sends=True), Saved())
            act_a = self._low(act, p.down_a, p.down_b, gather=False)[0] if needs.down_b else None
            act = act if self.backend.READS_ACT and not self.quantized else None
        if any(wants):
            d_out = self.load(d_out, self.call.recipe.d_out, sends=True)
            low = self._low(self.loaded[1], p.down_b, p.down_a, gather=True, transposed=True)
            kept = self.call.beside.down_kept if saved.down_t is None else saved.down_t
            weight = self.prepare(p.down_proj, self.dtype, self.rows, kept, transposed=True)
            bias, activation = cast(p.down_bias, self.dtype) if needs.scores else None, self.call.how.options.activation
            how = {"low": low, "scores": self.scores, "activation": activation, "sending": self.sending}
            step, self.sending = BackendStep(self.rows, weight, bias, self.loaded[1], **how), None
            over = self.overwrite_h or again
            dh, d_scores, a_scaled = self.backend.down_backward_act(step, wants, d_out, h, act, overwrite_h=over)
        if needs.scores and self.sums:
            take(self.sums.scores, self.chunk.tokens).copy_(d_scores)
        if needs.down_b:
            pairs = self.chunk.dispatch.expert_pair_indices.clamp_min(0)  # rows past the last get a score that exists
            act_a = (act_a * self.scores.reshape(-1, 1).index_select(0, pairs)).to(self.dtype)
        if self.quantized:
            self.loaded = None, None
        return dh if wants[0] else None, a_scaled if wants[2] else None, d_scores, xa, low and low[0], act_a

    def down_gradients(self, d_out: Tensor, a_scaled: Any, d_out_b: Any, act_a: Any) -> tuple[Any, ...]:
        """-> dW_down, and of its bias and factors."""
        needs, tokens, a_scaled = self.needs, None, _in_list(a_scaled)
        if needs.down_proj or needs.down_bias or needs.down_b:
            tokens = self.load(d_out, self.call.recipe.d_out, plain=not needs.down_proj)
        plain, self.loaded = self.loaded[1], (None, None)
        others = (
            self._bias("down_bias", plain, self.scores),
            self._outer("down_a", a_scaled[0], d_out_b, gather=False, transposed=True),
            self._outer("down_b", plain, act_a, gather=True, transposed=False),
        )
        return self._outer("down_proj", tokens, a_scaled, gather=True, transposed=False), *others

    def up_backward(self, dh: Any, up_t: Tensor | None) -> tuple[Any, Any]:
        """-> dX (T, d), dH B_up (R, r)."""
        needs, p, low, dx = self.needs, self.call.p, None, None
        if needs.x or needs.up_a:
            low = self._low(dh, p.up_b, p.up_a, gather=False, transposed=True)
        if needs.x:
            p = self._joined()
            kept = self.call.beside.up_kept if up_t is None else up_t
            weight = self.prepare(p.up_proj, self.dtype, self.rows, kept, transposed=True)
            dx = torch.empty_like(p.x) if self.sums is None else take(self.sums.x, self.chunk.tokens)
            if self.by_products and needs.up_proj:
                self.loaded = p.x, self._sending(p.x, awaited=False)
            step, self.sending = BackendStep(self.rows, weight, low=low, sending=self.sending, **self.combined), None
            self.backend.up_backward_act(step, dh, dx)
        return dx, low and low[0]

    def up_gradients(self, dh: Any, dh_b: Any, xa: Any) -> tuple[Any, ...]:
        """-> dW_up, and of its bias and factors."""
        needs, x, dh = self.needs, None, _in_list(dh)
        if needs.up_proj or needs.up_a:
            x = self.load(self.call.p.x, self.call.recipe.x_of_dw, plain=not needs.up_proj)
        others = (
            self._bias("up_bias", dh[0], None),
            self._outer("up_a", self.loaded[1], dh_b, gather=True, transposed=True),
            self._outer("up_b", dh[0], xa, gather=False, transposed=False),
        )
        return self._outer("up_proj", x, dh, gather=True, transposed=True), *others

    # ---- what they are made of -----------------------------------------------------------------------------------

    def _low(self, a: Any, factor: Any, other: Any, **how: Any) -> Any:
        """The rows (R, r) that one low-rank factor makes of rows or tokens, and the factor that they meet; None without."""
        if factor is None:
            return None
        how, a = {"transposed": False, **how}, self._plain(a)
        return self.backend.low_rank_rows(a, cast(factor, self.dtype), self.rows, **how), cast(other, self.dtype)

    def _plain(self, rows: Any) -> Any:
        """Rows in x's dtype, for biases and low-rank factors."""
        return self.backend.plain_rows(rows, self.rows, self.dtype) if rows.dtype == torch.uint8 else rows

    def _joined(self) -> Parameters:
        """In backward, where gate and up are two, joined once."""
        self.call = self.call.joined()
        return self.call.p

    def _outer(self, name: str, left: Any, ordered: Any, *, gather: bool, transposed: bool) -> Any:
        """The gradient of a weight or a factor, of what `OuterSum` says."""
        if not getattr(self.needs, name):
            return None
        p, accumulator = self._joined() if name == "up_proj" else self.call.p, self.sums and getattr(self.sums, name)
        factor = name.endswith(("_a", "_b"))
        left = self._plain(left) if factor else left
        of = OuterSum(left, ordered, getattr(p, name), accumulator, gather, transposed, factor)
        return self.backend.weight_gradient(self.rows, of)

    def _bias(self, name: str, values: Any, scores: Tensor | None) -> Any:
        if not getattr(self.needs, name):
            return None
        p, accumulator = self.call.p, self.sums and getattr(self.sums, name)
        made = self.backend.expert_row_sum(self._plain(values), len(p.down_proj), self.rows, scores, accumulator)
        return made if self.sums else cast(made, getattr(p, name).dtype)


# ---- operations --------------------------------------------------------------------------------------------------
# Operations of each operator, for `torch.utils.flop_counter.FlopCounterMode`: two for each multiplication with a sum.
#
#     forward    2 R (G n d + n d)       that is 6 T K n d with a gate      MoEBlaze §2.1
#     backward   twice that, and 2 R G n d where H is made again; for a frozen weight, half of its share
#
# R is the number of rows, which counts places that no pair takes (sentinels, unused capacity). Low-rank factors add a product of
# their own sizes beside each product of their weight. Shapes stand for tensors here: so torch calls a formula.

Shape = Sequence[int]


def _read(packed: Sequence[Any]) -> tuple[Parameters, int]:
    """The shapes of a packed call, and R."""
    named = dict(zip(FIELDS, packed, strict=True))
    p = first(Parameters, packed)
    for weight, how in (("up_proj", named["up_stored"]), ("down_proj", named["down_stored"])):
        p = p._replace(**{weight: logical_shape(how.split()[0], getattr(p, weight))}) if how else p
    return p, named["expert_pair_indices"][0]


def _of_all_rows(num_rows: int, *weights: Any) -> int:
    """Every row with its expert's matrix; a gradient of the matrix takes as much. weights: (E, rows, columns)."""
    return sum(2 * num_rows * prod(weight[1:]) for weight in weights if weight is not None)


def forward_flops(*packed: Any, **out: Any) -> int:
    """Forward: H and Y, each with what two factors add."""
    p, num_rows = _read(packed)
    return _of_all_rows(num_rows, p.up_proj, p.up_rest, p.up_a, p.up_b, p.down_proj, p.down_a, p.down_b)


def backward_flops(step: str, needs: Sequence[bool], given: Sequence[Shape | None], *packed: Any, **out: Any) -> int:
    """A step's: dA' for dH and dS, dX, and the gradients of weights and factors; H, if it was not saved."""
    (p, num_rows), need, products = _read(packed), Parameters(*needs), list[Any]()
    whole, again = step == "backward", SavePolicy.RECOMPUTE in packed
    if whole or step == "down_backward":
        products += [p.up_proj, p.up_a, p.up_b, need.down_b and p.down_a] if again else []
        of_rows = any(needs_of_up(need)) or need.scores
        products += [p.down_proj, p.down_a] if of_rows else []
        products += [p.down_b] if of_rows or need.down_a else []
    if whole or step == "up_backward":
        products += [p.up_proj, p.up_a] if need.x else []
        products += [p.up_b] if need.x or need.up_a else []
    for part in ("down", "up"):
        if whole or step == f"{part}_gradients":
            products += [getattr(p, f"{part}_{name}") for name in ("proj", "a", "b") if getattr(need, f"{part}_{name}")]
    return _of_all_rows(num_rows, *(each for each in products if each))
