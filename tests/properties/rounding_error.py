"""How far the expert MLP may be off when it is computed in a low precision: a bound for every element of every result.

Each number is carried as its exact value and a bound on its error (running error analysis, Higham 2002, §3.3). Results of a
step are rounded to the dtype of x where `blazeproto.autograd.torch_backend` and the kernels round: H, act, Y, dA' (by the
torch backend alone), A', dH, dX~, and what is returned. Sums are taken in float32, or float64 for float64, in any order: a
sum of m products is off by at most (m + 1) v times the sum of their absolute values, v its unit roundoff.

The slope of an activation may jump, and is nowhere linear: what it makes of an error is looked up at both ends of the
interval that the argument may lie in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blazeproto.activations import activate, activate_backward, activation_named, gate_and_up, side_by_side

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# Half of the least distance between two numbers; bf16 and fp32 products may also be flushed below the least normal number.
LEAST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
FUNCTION_ULPS = 16  # of an activation or its slope, computed in float32 or float64


@dataclass
class Bounded:
    """A tensor in float64 and a bound on how far a computed one may be off, element by element."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Bounded:
        return cls(value, torch.zeros_like(value))

    @property
    def size(self) -> Tensor:
        """The largest absolute value that a computed element may have."""
        return self.value.abs() + self.error

    def rounded(self, dtype: torch.dtype) -> Bounded:
        return Bounded(self.value, self.error + UNIT[dtype] * self.size + LEAST[dtype])

    def __getitem__(self, index: Tensor) -> Bounded:
        return Bounded(self.value[index], self.error[index])

    def times(self, other: Bounded, unit: float) -> Bounded:
        """Element by element, with one rounding."""
        error = self.error * other.value.abs() + self.value.abs() * other.error + self.error * other.error
        return Bounded(self.value * other.value, error + unit * self.size * other.size)

    def plus(self, other: Bounded, unit: float) -> Bounded:
        made = self.value + other.value
        return Bounded(made, self.error + other.error + unit * (made.abs() + self.error + other.error))


def product(equation: str, a: Bounded, b: Bounded, terms: int, unit: float) -> Bounded:
    """torch.einsum of two, each element of the result a sum of ``terms`` products."""

    def sums(left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum(equation, left, right)

    error = sums(a.error, b.value.abs()) + sums(a.size, b.error)
    return Bounded(sums(a.value, b.value), error + (terms + 1) * unit * sums(a.size, b.size))


def gathered_sum(values: Bounded, index: Tensor, length: int, unit: float) -> Bounded:
    """out[i] = the sum of the rows r with index[r] = i."""

    def sums(rows: Tensor) -> Tensor:
        return rows.new_zeros(length, *rows.shape[1:]).index_add(0, index, rows)

    return Bounded(sums(values.value), sums(values.error) + (len(index) + 1) * unit * sums(values.size))


def function_of(
    h: Bounded, activation: str, function: Callable[[Tensor], Tensor], sizes: Tensor, unit: float
) -> Bounded:
    """A function of H, which may have jumps. sizes: of what is multiplied in it. Looked up at H's value and at the corners of
    where H may lie: gate and up move each both ways; and with up as near to 0 as it may lie, for two clamps may be nearer to
    each other than the corners. Inside, a smooth function leaves the corners' range by second-order terms only."""

    def joined(gates: Tensor, ups: Tensor) -> Tensor:
        """Gate of the one, up of the other."""
        return side_by_side(gate_and_up(gates, activation)[0], gate_and_up(ups, activation)[1], activation)

    value, both = function(h.value), torch.ones_like(h.value)
    mixed = joined(both, -both)
    corners = [function(h.value + signs * h.error) for signs in (both, -both, mixed, -mixed)]
    nearest_0 = h.value.sign() * (h.value.abs() - h.error).clamp_min(0)
    gates = (h.value + h.error, h.value - h.error, nearest_0)
    corners += [function(joined(gate, nearest_0)) for gate in gates]
    error = torch.stack([(corner - value).abs() for corner in corners]).amax(dim=0)
    return Bounded(value, 1.1 * error + FUNCTION_ULPS * unit * sizes)


@dataclass
class Problem:
    """What enters forward and backward, as it is given. Rows are the pairs that take part."""

    x: Tensor  # (T, d)
    up_proj: Tensor  # (E, G n, d)
    down_proj: Tensor  # (E, d, n)
    scores: Tensor  # (P,)
    up_bias: Tensor | None
    down_bias: Tensor | None
    d_out: Tensor  # (T, d)
    activation: str
    row_pair: Tensor  # (R,)
    row_token: Tensor
    row_expert: Tensor
    dtype: torch.dtype  # in which products are computed: that of x, or of autocast


def error_bounds(problem: Problem) -> dict[str, Tensor]:
    """A bound on the error of out and of the gradients of x, scores, weights and biases, by name, element by element."""
    p, dtype = problem, problem.dtype
    wide = torch.promote_types(dtype, torch.float32)
    unit = UNIT[wide]
    (num_tokens, d), (num_experts, _, n) = p.x.shape, p.down_proj.shape
    token, expert, pair = p.row_token, p.row_expert, p.row_pair

    def given(t: Tensor, as_dtype: torch.dtype = dtype) -> Bounded:
        exact = Bounded.exact(t.detach().double())
        loses = torch.promote_types(t.dtype, as_dtype) != as_dtype
        return exact.rounded(as_dtype) if loses else exact

    x, up, down, d_out = given(p.x)[token], given(p.up_proj)[expert], given(p.down_proj)[expert], given(p.d_out)[token]
    scores = given(p.scores.reshape(-1), wide)[pair][:, None]

    # Forward
    h = product("rd,rhd->rh", x, up, d, unit)
    h = h if p.up_bias is None else h.plus(given(p.up_bias)[expert], unit)
    h = h.rounded(dtype)
    gated = activation_named(p.activation).gated
    largest = h.size.clamp_min(1)
    gates, ups = gate_and_up(largest, p.activation)
    sizes = gates * (ups + 1) if gated else largest * largest
    act = function_of(h, p.activation, lambda t: activate(t, p.activation), sizes, unit).rounded(dtype)
    y = product("rn,rdn->rd", act, down, n, unit)
    y = y if p.down_bias is None else y.plus(given(p.down_bias)[expert], unit)
    out = gathered_sum(y.rounded(dtype).times(scores, unit), token, num_tokens, unit).rounded(dtype)

    # Backward
    d_act = product("rd,rdn->rn", d_out, down, d, unit).rounded(dtype)
    d_scores = product("rn,rn->r", d_act, act, n, unit)
    if p.down_bias is not None:
        d_scores = d_scores.plus(product("rd,rd->r", d_out, given(p.down_bias)[expert], d, unit), unit)
    a_scaled = act.times(scores, unit).rounded(dtype)
    scaled = d_act.times(scores, unit)
    if gated:
        slopes = function_of(
            h,
            p.activation,
            lambda t: activate_backward(t, torch.ones_like(t[:, :n]), p.activation),
            side_by_side(sizes, sizes, p.activation),
            unit,
        )
        scaled = Bounded(*(side_by_side(part, part, p.activation) for part in (scaled.value, scaled.error)))
    else:
        slopes = function_of(
            h, p.activation, lambda t: activate_backward(t, torch.ones_like(t), p.activation), sizes, unit
        )
    dh = slopes.times(scaled, 4 * unit).rounded(dtype)

    def of_experts(values: Bounded) -> Bounded:
        return gathered_sum(values, expert, num_experts, unit)

    def outer(left: Bounded, right: Bounded) -> Bounded:
        return of_experts(product("rm,rk->rmk", left, right, 1, unit))

    dx_rows = product("rh,rhd->rd", dh, up, h.value.shape[1], unit).rounded(dtype)
    made = {
        "out": out,
        "x": gathered_sum(dx_rows, token, num_tokens, unit).rounded(dtype).rounded(p.x.dtype),
        "gate_up_proj": outer(dh, x).rounded(p.up_proj.dtype),
        "down_proj": outer(d_out, a_scaled).rounded(p.down_proj.dtype),
    }
    flat = torch.zeros(p.scores.numel(), dtype=torch.float64)
    of_pairs = Bounded(flat.index_copy(0, pair, d_scores.value), flat.index_copy(0, pair, d_scores.error))
    of_pairs = of_pairs.rounded(p.scores.dtype)
    made["scores"] = Bounded(of_pairs.value.view_as(p.scores), of_pairs.error.view_as(p.scores))
    if p.up_bias is not None:
        made["up_bias"] = of_experts(dh).rounded(p.up_bias.dtype)
    if p.down_bias is not None:
        made["down_bias"] = of_experts(d_out.times(scores, unit)).rounded(p.down_bias.dtype)
    return {name: bounded.error for name, bounded in made.items()}
