"""How far each element of a product's output may be from the exact value: what rounding and fp32 sums can cost it, and no more.

A bound of each element finds a single wrong 16-byte chunk in millions, which a norm (accuracy.py) does not. It is made of

    sums        c 2^-22 Σ |a b| of c = terms / 16 + 16 additions that truncate (wgmma adds 16 products at a time)
    functions   of the gate, by tanh.approx (activation.cuh): |gate| 2^-11, twice what ptx.cuh says
    rounding    2^-8 of the value, for bf16 outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product as every
from typing import NamedTuple, cast

import torch
from torch import Tensor

from blazeproto.activations import activate, activation_named, gate_and_up, mathematics, side_by_side
from blazeproto.lab.oracle import EXACT, Case, evaluate

ROUNDING = 1.02 * 2.0**-8  # of a bf16 number, and a little for the fp32 operations before
STEP, FP32_STEP = 2.0**-22, 2.0**-23  # of an addition of wgmma, and of one that rounds to nearest
FUNCTION = 2.0**-11  # of f(1)
TINY = 2.0**-126  # where bf16 has no more digits


class Reference(NamedTuple):
    exact: Tensor  # float64
    bound: Tensor  # float32, of |output - exact|


def reference(product: str, case: Case, given: Mapping[str, Tensor]) -> dict[str, Reference]:
    """Of each output of a product, which takes its inputs from the case and from ``given``; rows in use only."""
    exact = evaluate(EXACT, case, given)
    used = {name: value[: len(case.row_pair)] if name in ("act", "h", "dh", "a_scaled", "y") else value
            for name, value in given.items()}  # fmt: skip
    bounds = _BOUNDS[product](case, used, exact)
    return {name: Reference(exact[name], (bound + TINY).float()) for name, bound in bounds.items()}


def _sum_error(terms: int | Tensor, absolute: Tensor) -> Tensor:
    return (terms / 16 + 16) * STEP * absolute


def _rounded(exact: Tensor, error: Tensor) -> Tensor:
    """The error of what is rounded to bf16."""
    return error * (1 + ROUNDING) + ROUNDING * exact.abs()


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
    """Of act, by how the kernels compute it from an exact h (rows, G n)."""
    return FUNCTION * gate_and_up(h, activation)[0].abs() * _factor(h, activation)


def _slope_errors(h: Tensor, activation: str) -> Tensor:
    """Of the derivatives of act by h, likewise: (rows, G n)."""
    gate = gate_and_up(h, activation)[0].abs()
    by_gate = FUNCTION * (1 + 4 * _steepness(activation) * gate) * _factor(h, activation)
    return _for_halves(by_gate, FUNCTION * gate, activation)


def _for_halves(of_gate: Tensor, of_up: Tensor, activation: str) -> Tensor:
    """(rows, n) each -> laid out as h; of_gate alone without a gate."""
    return cast(Tensor, side_by_side(of_gate, of_up if activation_named(activation).gated else None, activation))


def _activation_error(h: Tensor, error: Tensor, activation: str) -> Tensor:
    """Of act, where h is wrong by at most ``error``. An activation is monotonic between two points so near, or curved."""
    act, (gate, up) = activate(h, activation), gate_and_up(error, activation)
    worst = torch.zeros_like(act)
    for of_gate, of_up in every((-1.0, 1.0), repeat=2):
        moved = side_by_side(of_gate * gate, None if up is None else of_up * up, activation)
        worst = torch.maximum(worst, (activate(h + moved, activation) - act).abs())
    curved = 2 * _steepness(activation) * gate.square() * _factor(h, activation)
    return worst + curved + _value_error(h, activation)


def _of_pairs(case: Case, by_row: Tensor) -> Tensor:
    """(rows,) -> (P,), zero for pairs without a row."""
    return torch.zeros_like(case.scores, dtype=by_row.dtype).index_copy_(0, case.row_pair, by_row)


def _terms_of_experts(case: Case) -> Tensor:
    return case.dispatch.expert_token_offsets.diff().double()


# --- The products ----------------------------------------------------------------------------------------------------------


def _up(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.by_expert(case.x[case.row_token].abs(), case.up_proj.mT.abs(), case)
    error = _rounded(exact["h"], _sum_error(case.x.shape[1], absolute))
    act = _activation_error(exact["h"], error, case.activation)
    return {"h": error, "act": _rounded(exact["act"], act)}


def _down(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.by_expert(given["act"].abs(), case.down_proj.mT.abs(), case)
    return {"y": _rounded(exact["y"], _sum_error(case.down_proj.shape[2], absolute))}


def _fused(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.by_expert(given["act"].abs(), case.down_proj.mT.abs(), case)
    error = _sum_error(case.down_proj.shape[2], absolute) + _terms_of_tokens(case) * FP32_STEP * absolute
    return {"fused": EXACT.combine(error, case, case.scores.double())}


def _terms_of_tokens(case: Case) -> int:
    return len(case.scores) // max(1, len(case.x)) + 4


def _combine(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.combine(given["y"].abs(), case, case.scores.double())
    return {"out": _rounded(exact["out"], _terms_of_tokens(case) * FP32_STEP * absolute)}


def _down_backward(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    d_out, h = case.d_out[case.row_token], given["h"].double().requires_grad_()
    score = case.scores.double()[case.row_pair, None]
    d_act = EXACT.by_expert(d_out, case.down_proj, case)
    error = _sum_error(case.x.shape[1], EXACT.by_expert(d_out.abs(), case.down_proj.abs(), case))
    act = activate(h, case.activation)
    slopes = torch.autograd.grad(act.sum(), h)[0].abs()
    act, h = act.detach(), h.detach()

    wrong_slopes = _slope_errors(h, case.activation)
    moved, d_a = (_for_halves(score * t, score * t, case.activation) for t in (error, d_act.abs()))
    dh = moved * (slopes + wrong_slopes) + d_a * wrong_slopes
    wrong_act = _value_error(h, case.activation)
    by_row = (error * (act.abs() + wrong_act) + d_act.abs() * wrong_act).sum(dim=1)
    by_row += _sum_error(4 * act.shape[1], (d_act * act).abs().sum(dim=1))
    return {
        "dh": _rounded(exact["dh"], dh),
        "a_scaled": _rounded(exact["a_scaled"], score * wrong_act),
        "d_scores": _of_pairs(case, by_row),
    }


def _up_backward(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.by_expert(given["dh"].abs(), case.up_proj.abs(), case)
    return {"dx_rows": _rounded(exact["dx_rows"], _sum_error(case.up_proj.shape[1], absolute))}


def _down_weight(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.outer_by_expert(case.d_out[case.row_token].abs(), given["a_scaled"].abs(), case)
    terms = _terms_of_experts(case)[:, None, None]
    return {"d_down": _rounded(exact["d_down"], _sum_error(terms, absolute))}


def _up_weight(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.outer_by_expert(given["dh"].abs(), case.x[case.row_token].abs(), case)
    terms = _terms_of_experts(case)[:, None, None]
    return {"d_up": _rounded(exact["d_up"], _sum_error(terms, absolute))}


def _bias_score(case: Case, given: Mapping[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    assert case.down_bias is not None
    terms = case.d_out[case.row_token].double() * case.down_bias[case.row_expert].double()
    exact["bias_scores"] = _of_pairs(case, terms.sum(dim=1))
    return {"bias_scores": _of_pairs(case, _sum_error(terms.shape[1], terms.abs().sum(dim=1)))}


def _row_sum(case: Case, given: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    absolute = EXACT.expert_sum(given["dh"].abs(), case)
    terms = _terms_of_experts(case)[:, None]
    return {"d_up_bias": _rounded(exact["d_up_bias"], _sum_error(4 * terms, absolute))}


_BOUNDS = {
    "up_forward": _up,
    "down_forward": _down,
    "down_forward_fused": _fused,
    "combine": _combine,
    "down_backward_act": _down_backward,
    "bias_score_grad": _bias_score,
    "down_backward_weight": _down_weight,
    "up_backward_act": _up_backward,
    "up_backward_weight": _up_weight,
    "expert_row_sum": _row_sum,
}
