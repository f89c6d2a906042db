"""The grouped products in NumPy: what each kernel computes, in the order of the paper's Algorithm 1 and nothing else.

Same names and signatures as the kernels, on any floating dtype (float64 makes an oracle, float32 a fair opponent); no rounding
between steps. Shapes: T tokens, E experts, d model width, n expert width, R rows, P pairs; G is 2 for a gated activation
(its h is [gate, up]), else 1. Rows of no pair (from ``offsets[E]`` on) come out as NaN, for nothing may ever read them.

``rows`` is a `blazeproto.gemm.Rows`: ``pair_indices (R,)`` the pair in each row, ``offsets (E+1,)`` where each expert's rows
begin, ``token_index_map (P,)`` the row of each pair or -1, and how a pair finds its token: ``top_k``, or ``pair_tokens (P,)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
GATED = ("swiglu", "geglu")

_erf = np.vectorize(math.erf, otypes=[float])


# --- Who is in which row ---------------------------------------------------------------------------------------------


def experts(rows: Any) -> Iterator[tuple[int, slice]]:
    """Each expert with its rows."""
    for expert, (begin, end) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
        yield expert, slice(int(begin), int(end))


def row_tokens(rows: Any) -> Array:
    """(R,) the token in each row; meaningless from ``offsets[E]`` on."""
    return rows.pair_indices // rows.top_k if rows.top_k else rows.pair_tokens[rows.pair_indices]


def num_tokens(rows: Any) -> int:
    return len(rows.token_index_map) // rows.top_k if rows.top_k else len(rows.token_offsets) - 1


def _slice(columns: range | None) -> slice:
    return slice(None) if columns is None else slice(columns.start, columns.stop)


def _unwritten(out: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.full(shape, np.nan, dtype) if out is None else out


# --- Activations -----------------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _normal_cdf(x: Array) -> Array:
    return (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype)


def _normal_density(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# name: (f, f'), of the gate where there is one
POINTWISE = {
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "silu": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "gelu": (lambda x: x * _normal_cdf(x), lambda x: _normal_cdf(x) + x * _normal_density(x)),
}
POINTWISE |= {"swiglu": POINTWISE["silu"], "geglu": POINTWISE["gelu"]}


def activate(h: Array, activation: str) -> Array:
    """h (…, G·n) → act (…, n): f(gate)·up where there is a gate, else f(h)."""
    f, _ = POINTWISE[activation]
    if activation not in GATED:
        return f(h)
    gate, up = np.split(h, 2, axis=-1)
    return f(gate) * up


def activate_backward(h: Array, d_act: Array, activation: str) -> Array:
    """dH (…, G·n) from h and the gradient of act (…, n)."""
    f, slope = POINTWISE[activation]
    if activation not in GATED:
        return d_act * slope(h)
    gate, up = np.split(h, 2, axis=-1)
    return np.concatenate([d_act * up * slope(gate), d_act * f(gate)], axis=-1)


# --- Forward ---------------------------------------------------------------------------------------------------------


def up_forward(
    x: Array,
    up_proj: Array,
    rows: Any,
    *,
    activation: str = "swiglu",
    bias: Array | None = None,
    h: Array | None = None,
    act: Array | None = None,
) -> tuple[Array, Array]:
    """x (T, d), up_proj (E, G·n, d), bias (E, G·n) → h (R, G·n), act (R, n).  h_r = x_t W_upᵀ + b, act = SiLU(gate)·up."""
    num_rows, width = len(rows.pair_indices), up_proj.shape[1]
    h = _unwritten(h, (num_rows, width), x.dtype)
    act = _unwritten(act, (num_rows, width // 2 if activation in GATED else width), x.dtype)
    tokens = row_tokens(rows)
    for e, r in experts(rows):
        h[r] = x[tokens[r]] @ up_proj[e].T + (0 if bias is None else bias[e])
        act[r] = activate(h[r], activation)
    return h, act


def down_forward(
    act: Array,
    down_proj: Array,
    rows: Any,
    *,
    bias: Array | None = None,
    columns: range | None = None,
    y: Array | None = None,
) -> Array:
    """act (R, n), down_proj (E, d, n), bias (E, d) → y (R, d), or only these of its columns.  y_r = act_r W_downᵀ + b."""
    some = _slice(columns)
    y = _unwritten(y, (len(act), down_proj[0, some].shape[0]), act.dtype)
    for e, r in experts(rows):
        y[r] = act[r] @ down_proj[e, some].T + (0 if bias is None else bias[e, some])
    return y


def down_forward_fused(
    act: Array, down_proj: Array, scores: Array, rows: Any, *, bias: Array | None = None, out_f32: Array
) -> Array:
    """`down_forward` and `combine` in one: adds into out_f32 (T, d), which the caller has zeroed."""
    y = down_forward(act, down_proj, rows, bias=bias)
    out_f32 += combine(y, rows, scores=scores)
    return out_f32


def combine(
    y: Array,
    rows: Any,
    *,
    scores: Array | None = None,
    columns: range | None = None,
    out: Array | None = None,
) -> Array:
    """y (R, d), scores (P,) → out (T, d): a token's rows, weighted and summed in slot order; pairs without a row are left out.

    With scores it makes the output from Y; without, dX from the rows' dX̃. columns: those of a wider ``out`` that y is summed to.
    """
    out = _unwritten(out, (num_tokens(rows), y.shape[1]), y.dtype)
    out[:, _slice(columns)] = 0
    pairs = np.flatnonzero(rows.token_index_map >= 0)
    tokens = pairs // rows.top_k if rows.top_k else rows.pair_tokens[pairs]
    weights = 1 if scores is None else scores.reshape(-1)[pairs, None]
    # In the order of the pairs.
    np.add.at(out[:, _slice(columns)], tokens, weights * y[rows.token_index_map[pairs]])
    return out


# --- Backward --------------------------------------------------------------------------------------------------------


def down_backward_act(
    d_out: Array,
    down_proj: Array,
    h: Array,
    scores: Array,
    rows: Any,
    *,
    activation: str,
    dh: Array | None = None,
    a_scaled: Array | None = None,
    d_scores: Array | None = None,
    workspace: Any = None,
) -> tuple[Array, Array, Array]:
    """d_out (T, d), down_proj (E, d, n), h (R, G·n), scores (P,) → dh (R, G·n), a_scaled (R, n), d_scores (P,).

    dA' = dO_t W_down; dS_p = ⟨dA', act⟩ (SonicMoE §3: no need for Y), 0 for a pair without a row; a_scaled = S_p·act;
    dH from the gradient S_p·dA' of act, which is made again from h.
    """
    dh = _unwritten(dh, h.shape, h.dtype)
    a_scaled = _unwritten(a_scaled, (len(h), down_proj.shape[2]), h.dtype)
    d_scores = _unwritten(d_scores, (len(rows.token_index_map),), scores.dtype)
    d_scores[...] = 0
    tokens = row_tokens(rows)
    for e, r in experts(rows):
        pairs = rows.pair_indices[r]
        score = scores.reshape(-1)[pairs, None]
        d_act = d_out[tokens[r]] @ down_proj[e]
        act = activate(h[r], activation)
        d_scores.reshape(-1)[pairs] = (d_act * act).sum(axis=1)
        a_scaled[r] = score * act
        dh[r] = activate_backward(h[r], score * d_act, activation)
    return dh, a_scaled, d_scores


def down_backward_weight(
    d_out: Array,
    a_scaled: Array,
    rows: Any,
    *,
    dw: Array | None = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
) -> Array:
    """d_out (T, d), a_scaled (R, n) → dw (E, d, n).  ddown = Σ dO_tᵀ a_scaled_r over an expert's rows, 0 where it has none."""
    return _weight_gradient(d_out[row_tokens(rows)] if gather else d_out, a_scaled, rows, dw, accumulate)


def up_backward_act(
    dh: Array, up_proj: Array, rows: Any, *, columns: range | None = None, dx_rows: Array | None = None
) -> Array:
    """dh (R, G·n), up_proj (E, G·n, d) → dx_rows (R, d), or only these of its columns.  dX̃_r = dH_r W_up; `combine` sums a
    token's rows to dX."""
    some = _slice(columns)
    dx_rows = _unwritten(dx_rows, (len(dh), up_proj[0, :, some].shape[1]), dh.dtype)
    for e, r in experts(rows):
        dx_rows[r] = dh[r] @ up_proj[e, :, some]
    return dx_rows


def up_backward_weight(
    dh: Array,
    x: Array,
    rows: Any,
    *,
    dw: Array | None = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
) -> Array:
    """dh (R, G·n), x (T, d) → dw (E, G·n, d).  dW_up = Σ dH_rᵀ x_t over an expert's rows, 0 where it has none."""
    return _weight_gradient(dh, x[row_tokens(rows)] if gather else x, rows, dw, accumulate)


def _weight_gradient(left: Array, right: Array, rows: Any, dw: Array | None, accumulate: bool) -> Array:
    """Σ left_rᵀ right_r over each expert's rows."""
    shape = (len(rows.offsets) - 1, left.shape[1], right.shape[1])
    if dw is None:
        dw = np.zeros(shape, left.dtype)
    for e, r in experts(rows):
        product = left[r].T @ right[r]
        dw[e] = dw[e] + product if accumulate else product
    return dw


# --- Small sums beside the products ----------------------------------------------------------------------------------


def reduce_scores_grad(partial: Array, token_index_map: Array, d_scores: Array | None = None) -> Array:
    """partial (J, R), one line a column tile of `down_backward_act` → d_scores (P,), 0 for a pair without a row."""
    d_scores = _unwritten(d_scores, token_index_map.shape, partial.dtype)
    d_scores.reshape(-1)[...] = np.where(token_index_map >= 0, partial.sum(axis=0)[token_index_map], 0)
    return d_scores


def expert_row_sum(
    values: Array,
    rows: Any,
    *,
    gather: bool = False,
    scores: Array | None = None,
    out: Array | None = None,
    accumulate: bool = False,
    workspace: Any = None,
) -> Array:
    """A bias's gradient, out (E, m): the sum over an expert's rows r of values[r], values (R, m).

    gather: of values[token of r], values (T, m).  scores (P,): weighted by scores[pair of r].
    """
    out = np.zeros((len(rows.offsets) - 1, values.shape[1]), values.dtype) if out is None else out
    tokens = row_tokens(rows)
    for e, r in experts(rows):
        weights = 1 if scores is None else scores.reshape(-1)[rows.pair_indices[r], None]
        total = (weights * values[tokens[r] if gather else r]).sum(axis=0)
        out[e] = out[e] + total if accumulate else total
    return out


def bias_score_grad(d_out: Array, down_bias: Array, rows: Any, *, d_scores: Array) -> Array:
    """Adds a down bias's share ⟨dO_t, b_e⟩ to d_scores (P,), in place. d_out (T, d), down_bias (E, d)."""
    tokens = row_tokens(rows)
    for e, r in experts(rows):
        d_scores.reshape(-1)[rows.pair_indices[r]] += d_out[tokens[r]] @ down_bias[e]
    return d_scores
