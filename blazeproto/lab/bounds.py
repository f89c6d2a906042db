"""How far each element of a product's output may be from the exact value: what rounding and fp32 sums can cost it, and no more.

A bound of each element finds a single wrong 16-byte chunk in millions, which a norm (accuracy.py) does not. It is made of

    sums        c 2^-22 Σ |a b| of c = terms / 16 + 16 additions that truncate (wgmma adds 16 products at a time)
    functions   of the gate, by tanh.approx (activation.cuh): |gate| 2^-11, twice what ptx.cuh says
    rounding    2^-8 of the value, for bf16 outputs

Of quantized operands a sum keeps 14 bits, and e4m3 outputs are off by 2^-4 of the value or 2^-10 of the scale.

The product's own formula makes it, of numbers that have an error beside them: for a linear product, the formula of absolute
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product as every
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from blazeproto.activations import activate, activate_backward, activation_named, gate_and_up, mathematics, side_by_side
from blazeproto.lab.calls import CALLS, Case
from blazeproto.lab.oracle import EXACT

ROUNDING = 1.02 * 2.0**-8  # of a bf16 number, and a little for the fp32 operations before
STEP, FP32_STEP = 2.0**-22, 2.0**-23  # of an addition of wgmma, and of one that rounds to nearest
FUNCTION = 2.0**-11  # of f(1)
E4M3_ROUNDING, E4M3_STEP, E4M3_LARGEST = 2.0**-4, 2.0**-10, 448.0  # of a number; of a scale; over a scale
TINY = 2.0**-126  # where bf16 has no more digits


class Reference(NamedTuple):
    exact: Tensor  # float64
    bound: Tensor  # float32, of |output - exact|


def reference(product: str, case: Case, given: Mapping[str, Tensor]) -> dict[str, Reference]:
    """What each output of a product should be, and how near; rows in use only. Inputs are the case's and those ``given``."""
    call, m = CALLS[product], Bounds(case)
    used = {name: case.in_use(name, value) for name, value in given.items()}
    formula = call.entry.spec.formula
    values = formula(m, **call.takes(formula, case, used))
    made = {}
    for (name, array), value in zip(call.made.items(), values if isinstance(values, tuple) else (values,), strict=True):
        exact, error = m.stored(value) if array.dtype == "bfloat16" else value
        if call.is_quantized(case, array):
            error = error + e4m3_error(exact.abs() + error)
        made[name] = Reference(exact, (error + TINY).float())
    return made


@dataclass(frozen=True)
class Near:
    """Numbers in float64, and how far from them a kernel's may be.  stored: as bf16, which is in the error."""

    exact: Tensor
    error: Tensor
    is_stored: bool = False

    def __mul__(self, other: Tensor | Near) -> Near:
        """The rounding of one multiplication is that of the number that is stored at last."""
        other = _near(other)
        error = self.exact.abs() * other.error + self.error * other.exact.abs() + self.error * other.error
        return Near(self.exact * other.exact, error)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.exact, self.error))


def e4m3_error(most: Tensor) -> Tensor:
    """What quantizing rows costs numbers of such magnitudes at the most; 128 columns share a scale."""
    return E4M3_ROUNDING * most + E4M3_STEP * largest_of(most, 128) / E4M3_LARGEST * 2


def largest_of(values: Tensor, columns: int) -> Tensor:
    """Each number's largest neighbour among so many columns."""
    by_block = values.view(len(values), -1, columns).amax(2, keepdim=True)
    return by_block.expand(-1, -1, columns).reshape(values.shape)


def _near(values: Tensor | Near) -> Near:
    """An input is what it is."""
    return values if isinstance(values, Near) else Near(values.double(), torch.zeros_like(values, dtype=torch.float64))


class Bounds:
    """`blazeproto.gemm.formulas.Namespace` of `Near` numbers: each operation adds what the kernels may be wrong by."""

    def __init__(self, case: Case) -> None:
        self.case, self.m = case, EXACT.over(case)
        self.sum_error = quantized_sum_error if case.quantized else sum_error
        self.counts = case.dispatch.expert_token_offsets.diff().double()
        self.of_token = len(case.scores) // max(1, len(case.x)) + 4  # additions

    def gather(self, values: Tensor) -> Near:
        return _near(self.m.gather(values))

    def of_rows(self, scores: Tensor) -> Near:
        return _near(self.m.of_rows(scores))

    def product(
        self,
        rows: Tensor | Near,
        weights: Tensor,
        *,
        bias: Tensor | None = None,
        low: tuple[Tensor, Tensor] | None = None,
        **lies: Any,
    ) -> Near:
        """lies: transposed, columns."""
        exact, error = _near(rows)
        terms = exact.shape[1] + (0 if low is None else low[0].shape[1])
        absolutes: dict[str, Any] = {
            "bias": None if bias is None else bias.abs(),
            "low": None if low is None else (low[0].abs(), low[1].abs()),
        }
        absolute = self.m.product(exact.abs(), weights.abs(), **absolutes, **lies)
        moved = self.m.product(error, weights.abs(), **lies) if error.any() else 0.0
        return Near(self.m.product(exact, weights, bias=bias, low=low, **lies), self.sum_error(terms, absolute) + moved)

    def outer(self, left: Tensor | Near, right: Tensor | Near) -> Near:
        (a, _), (b, _) = _near(left), _near(right)
        error = self.sum_error(self.counts[:, None, None], self.m.outer(a.abs(), b.abs()))
        if self.case.quantized:  # both are quantized again, with scales that 128 rows share
            lost = [torch.full_like(v, float(E4M3_STEP * 2 * v.abs().max() / E4M3_LARGEST)) for v in (a, b)]
            error = error + self.m.outer(lost[0], b.abs() + lost[1]) + self.m.outer(a.abs(), lost[1])
        return Near(self.m.outer(a, b), error)

    def expert_sum(self, values: Tensor | Near) -> Near:
        exact, error = _near(values)
        added = sum_error(4 * self.counts[:, None], self.m.expert_sum(exact.abs()))
        return Near(self.m.expert_sum(exact), added + self.m.expert_sum(error))

    def combine(self, values: Tensor | Near, scores: Tensor | None = None) -> Near:
        exact, error = _near(values)
        wrong = error + self.of_token * FP32_STEP * exact.abs()
        return Near(self.m.combine(exact, scores), self.m.combine(wrong, scores))

    def dot(self, left: Tensor | Near, right: Tensor | Near) -> Near:
        exact, error = _near(left) * _near(right)
        total, wrong = (values.sum(dim=1, keepdim=True) for values in (exact, error))
        return Near(total, wrong + sum_error(4 * exact.shape[1], exact.abs().sum(dim=1, keepdim=True)))

    def dot_expert(self, rows: Tensor | Near, vectors: Tensor) -> Near:
        exact, _ = _near(rows)
        absolute = self.m.dot_expert(exact.abs(), vectors.abs())
        return Near(self.m.dot_expert(exact, vectors), sum_error(exact.shape[1], absolute))

    def by_pair(self, values: Near) -> Near:
        return Near(self.m.by_pair(values.exact), self.m.by_pair(values.error))

    def activate(self, h: Tensor | Near, activation: str) -> Near:
        exact, error = _near(h)
        return Near(cast(Tensor, activate(exact, activation)), _activation_error(exact, error, activation))

    def activate_backward(self, h: Tensor | Near, d_act: Near, activation: str) -> Near:
        """From an exact h."""
        exact, _ = _near(h)
        made, slopes = (
            cast(Tensor, activate_backward(exact, d, activation)) for d in (d_act.exact, torch.ones_like(d_act.exact))
        )
        wrong = _slope_errors(exact, activation)
        moved, gradient = (_for_halves(values, values, activation) for values in (d_act.error, d_act.exact.abs()))
        return Near(made, moved * (slopes.abs() + wrong) + gradient * wrong)

    @staticmethod
    def stored(values: Near) -> Near:
        exact, error = values
        return values if values.is_stored else Near(exact, error * (1 + ROUNDING) + ROUNDING * exact.abs(), True)


def sum_error(terms: int | Tensor, absolute: Tensor) -> Tensor:
    return (terms / 16 + 16) * STEP * absolute


def quantized_sum_error(terms: int | Tensor, absolute: Tensor) -> Tensor:
    """A wgmma adds 32 products to a sum of 14 bits, four times before that is added in fp32."""
    return 4 * 33 * 2.0**-13 * absolute + sum_error(terms, absolute)


# --- Activations -----------------------------------------------------------------------------------------------------------


def _factor(h: Tensor, activation: str) -> Tensor:
    """|g(up)|, or ones without a gate: (rows, n)."""
    chosen, (gate, up) = activation_named(activation), gate_and_up(h, activation)
    if up is None:
        return torch.ones_like(gate)
    return (up if chosen.g is None else cast(Tensor, chosen.g(mathematics(up), up, *chosen.values))).abs()


@cache
def _steepness(activation: str) -> float:
    """The largest |f''| over SiLU's, which is 1/2, or 1 if that is more: how much a wrong sigmoid changes the slope."""
    chosen, x = activation_named(activation), torch.linspace(-30, 30, 60001, dtype=torch.float64, requires_grad=True)
    (curvature,) = torch.autograd.grad(chosen.slope(mathematics(x), x, *chosen.values).sum() + 0 * x.sum(), x)
    return max(1.0, 2 * float(curvature.abs().max()))


def _value_error(h: Tensor, activation: str) -> Tensor:
    """The error of act, by how the kernels compute it from an exact h (rows, G n)."""
    return FUNCTION * gate_and_up(h, activation)[0].abs() * _factor(h, activation)


def _slope_errors(h: Tensor, activation: str) -> Tensor:
    """The errors of act's derivatives by h, likewise: (rows, G n)."""
    gate = gate_and_up(h, activation)[0].abs()
    by_gate = FUNCTION * (1 + 4 * _steepness(activation) * gate) * _factor(h, activation)
    return _for_halves(by_gate, FUNCTION * gate, activation)


def _for_halves(of_gate: Tensor, of_up: Tensor, activation: str) -> Tensor:
    """(rows, n) each -> laid out as h; of_gate alone without a gate."""
    return cast(Tensor, side_by_side(of_gate, of_up if activation_named(activation).gated else None, activation))


def _activation_error(h: Tensor, error: Tensor, activation: str) -> Tensor:
    """The error of act, where h is wrong by ``error`` at most: between points so near an activation is monotonic, or curved."""
    act, (gate, up) = activate(h, activation), gate_and_up(error, activation)
    worst = torch.zeros_like(act)
    for of_gate, of_up in every((-1.0, 1.0), repeat=2):
        moved = side_by_side(of_gate * gate, None if up is None else of_up * up, activation)
        worst = torch.maximum(worst, (activate(h + moved, activation) - act).abs())
    curved = 2 * _steepness(activation) * gate.square() * _factor(h, activation)
    return worst + curved + _value_error(h, activation)
