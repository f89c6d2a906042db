"""How wrong a result may be: measured against how wrong careful bf16 arithmetic is anyway.

For each output, pooled over the runs given to `Pool.add`:

    ‖out − exact‖ ≤ 1.1 ‖yardstick − exact‖                             the whole
    worst row, worst element of |out − exact| ≤ 3 × the yardstick's     since a norm can miss one wrong 16-byte chunk

Rows and elements are measured by their row's root mean square, so that a small row's error counts as a large one's does.

A norm misses one wrong 16-byte chunk in millions, which a bound of each element of a product's output finds (`reference`): what
rounding and fp32 sums can cost it, and no more. It is made of

    sums        c 2^-22 Σ |a b| of c = terms / 16 + 16 additions that truncate (wgmma adds 16 products at a time)
    functions   of the gate, by tanh.approx (activation.cuh): |gate| 2^-11, twice what ptx.cuh says
    rounding    2^-8 of the value, for bf16 outputs

Sums of quantized operands keep 14 bits, and e4m3 outputs are off by 2^-4 of the value or 2^-10 of the scale.

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

NORM_FACTOR, WORST_FACTOR = 1.1, 3.0
# An fp32 result has no last rounding to hide behind: tensor cores truncate where the yardstick may round to nearest, and the
# order of the sums differs. Both errors are near 1e-7.
FP32_NORM_FACTOR, FP32_WORST_FACTOR = 4.0, 8.0
# Where slack says that a pool is too small to judge finely, an fp32 output may also be wrong by what truncation makes of a
# long sum: of one or two numbers the yardstick's may be right to 1e-8 by chance, and a library may cut the sum into pieces,
# which spares it most of that. wgmma truncates after every 16 products: some 4e-6 of a sum of 3500, as
# tests/gemm/test_twins.py emulates it; the fuzzer's longest has 4000.
POOL_ELEMENTS, FP32_NOISE = 10_000, 2.0**-17
SMALL_ROW = 1e-2  # of the output's root mean square: rows smaller than that are measured by it
ELEMENTS_AT_ONCE = 2**27
ROUNDING = 1.02 * 2.0**-8  # of a bf16 number, and a little for the fp32 operations before
STEP, FP32_STEP = 2.0**-22, 2.0**-23  # of an addition of wgmma, and of one that rounds to nearest
FUNCTION = 2.0**-11  # of f(1)
E4M3_ROUNDING, E4M3_STEP, E4M3_LARGEST = 2.0**-4, 2.0**-10, 448.0  # of a number; of a scale; over a scale
TINY = 2.0**-126  # where bf16 has no more digits


class Pool:
    """Errors of outputs by name. Everything stays on the device until `failures` is asked for."""

    def __init__(self) -> None:
        # By output name: Σ error² and the yardstick's (over the exact mean square), worst row and the yardstick's,
        # worst element and the yardstick's.
        self.totals: dict[str, Tensor] = {}
        self.elements: dict[str, int] = {}
        self.fp32: set[str] = set()

    def add(self, name: str, out: Tensor, yardstick: Tensor, exact: Tensor) -> None:
        """Three arrays of one shape; the last dimension is a row."""
        if out.shape != exact.shape:
            raise ValueError(f"{name}: expected shape {tuple(exact.shape)}, got {tuple(out.shape)}")
        if out.numel() == 0:
            return
        if out.dtype == torch.float32:
            self.fp32.add(name)
        self._take(name, _errors(out, yardstick, exact), out.numel())

    def _take(self, name: str, total: Tensor, elements: int) -> None:
        before = self.totals.get(name)
        if before is not None:
            total = torch.cat([before[:2] + total[:2], torch.maximum(before[2:], total[2:])])
        self.totals[name] = total
        self.elements[name] = self.elements.get(name, 0) + elements

    def merge(self, other: Pool) -> None:
        """Take in what another pool holds."""
        self.fp32 |= other.fp32
        for name, total in other.totals.items():
            self._take(name, total, other.elements[name])

    def add_all(self, out: Mapping[str, Tensor], yardstick: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        """By name; row outputs of ``out`` may have more rows than are in use."""
        for name, reference in exact.items():
            self.add(name, out[name][: len(reference)], yardstick[name], reference)

    def failures(self, slack: float = 1.0, fp32_noise: float = FP32_NOISE) -> list[str]:
        """One line for each bound that doesn't hold. slack: widens all bounds, for pools too small to judge finely.
        fp32_noise: how wrong an fp32 output of a small pool may be with slack, of the size of its row."""
        lines = []
        for name, total in self.totals.items():
            error2, yardstick2, *worst = total.tolist()
            fp32 = name in self.fp32
            norm_factor, worst_factor = (FP32_NORM_FACTOR, FP32_WORST_FACTOR) if fp32 else (NORM_FACTOR, WORST_FACTOR)
            noise = fp32_noise if slack > 1 and fp32 and self.elements[name] < POOL_ELEMENTS else 0.0
            bounds = {
                "norm": (error2**0.5, yardstick2**0.5, norm_factor, noise * self.elements[name] ** 0.5),
                "worst row": (worst[0], worst[1], worst_factor, noise),
                "worst element": (worst[2], worst[3], worst_factor, noise),
            }
            for what, (error, yardstick, factor, truncation) in bounds.items():
                factor *= slack
                if not error <= max(factor * yardstick, truncation):  # so that NaN fails
                    lines.append(
                        f"{name}: {what} of the error {error:.3g} > {factor:.3g} x yardstick's {yardstick:.3g} "
                        f"({self.elements[name]} elements)"
                    )
        return lines


def far_off(
    out: Mapping[str, Tensor], yardstick: Mapping[str, Tensor], exact: Mapping[str, tuple[Tensor, Tensor]]
) -> list[str]:
    """The bounds that do not hold for outputs of one run: those that ``yardstick`` has. exact: by name, and what is beside it.

    Quantized numbers may each be off by 2^-4, behind which a factor for all of them would hide.
    """
    pool = Pool()
    for name, right in yardstick.items():
        pool.add(name, out[name].double(), right.double(), exact[name][0])  # fp32 has factors of its own
    return pool.failures(slack=1.0 if min(pool.elements.values(), default=0) >= POOL_ELEMENTS else 2.0)


def _errors(out: Tensor, yardstick: Tensor, exact: Tensor) -> Tensor:
    """(6,) float64: Σ error², Σ yardstick error² (over the exact mean square), worst row, its, worst element, its."""
    out, yardstick, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t[None] for t in (out, yardstick, exact))
    size = torch.linalg.vector_norm(exact) / exact.numel() ** 0.5 + 1e-150  # root mean square
    floor = SMALL_ROW * size
    totals = []
    step = max(1, ELEMENTS_AT_ONCE // exact.shape[1])
    for start in range(0, exact.shape[0], step):
        part = exact[start : start + step].double()
        scale = part.square().mean(dim=1, keepdim=True).sqrt().clamp_min(floor)
        sums, rows, elements = [], [], []
        for values in (out, yardstick):
            error = values[start : start + step].double() - part
            sums.append(error.square().sum())
            error = (error / scale).abs()
            rows.append(error.square().mean(dim=1).sqrt().max())
            elements.append(error.max())
        totals.append(torch.stack([*sums, *rows, *elements]))
    parts = torch.stack(totals)
    return torch.cat([parts[:, :2].sum(dim=0) / size**2, parts[:, 2:].amax(dim=0)])


def worst_mismatches(out: Tensor, exact: Tensor, count: int = 5) -> list[str]:
    """The elements of ``out`` that are farthest from ``exact``, NaN first: lines of (row, column), got, want."""
    if out.numel() == 0:
        return []
    out, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t[None] for t in (out.double(), exact.double()))
    distance = (out - exact).abs().nan_to_num(nan=torch.inf).flatten()
    worst = distance.topk(min(count, distance.numel())).indices.tolist()
    places = [divmod(index, out.shape[1]) for index in worst]
    return [f"  ({r}, {c}): got {out[r, c].item():.6g}, want {exact[r, c].item():.6g}" for r, c in places]


# --- A bound of each element -----------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    exact: Tensor  # float64
    bound: Tensor  # float32, of |output - exact|


def reference(product: str, case: Case, given: Mapping[str, Tensor]) -> dict[str, Reference]:
    """The expected value of each output of a product, and its bound; rows in use only. Inputs: the case's, and ``given``."""
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
    """The largest error of quantizing rows of such magnitudes; 128 columns share a scale."""
    return E4M3_ROUNDING * most + E4M3_STEP * largest_of(most, 128) / E4M3_LARGEST * 2


def largest_of(values: Tensor, columns: int) -> Tensor:
    """Each number's largest neighbour among this many columns."""
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
