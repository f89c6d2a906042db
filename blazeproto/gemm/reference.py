"""The grouped products in NumPy: what each kernel computes, in the order of the paper's Algorithm 1 and nothing else.

Same names and signatures as the kernels, on any floating dtype (float64 makes an oracle, float32 a fair opponent). Nothing is
rounded but what ``round_to="bf16"``, which only twins have, rounds: to bf16 whatever a kernel stores in bf16, before it is used
again. (Weight gradients and sums over an expert's rows that go to memory of the caller's stand for fp32 ones, and are left.)
Shapes: T tokens, E experts, d model width, n expert width, R rows, P pairs; G is 2 for a gated activation
(its h is [gate, up]), else 1. Rows of no pair (from ``expert_token_offsets[E]`` on) come out as NaN: nothing may read them.

``dispatch`` is a `blazeproto.dispatch.Dispatch` of NumPy arrays. Outputs that are given are filled; those that are not have the
dtype that the inputs promote to. ``config``, ``stream`` and ``workspace`` change nothing. A twin refuses what its function
refuses (arguments.py); where that one needs bf16 or a multiple of 8, any floating dtype and width will do.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blazeproto.activations import activate, activate_backward
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm import down_backward, fused, linear, reduce, up, weight
from blazeproto.gemm.arguments import TwinArguments
from blazeproto.gemm.combine import check as combine_check
from blazeproto.gemm.tiles import TileConfig
from blazeproto.runtime.rounding import to_bfloat16

Array = NDArray[Any]
RoundTo = Literal["bf16"] | None


# --- Who is in which row ---------------------------------------------------------------------------------------------


def experts(dispatch: Dispatch) -> Iterator[tuple[int, slice, Array, Array]]:
    """Each expert with its rows, and the pair and the token of each of these."""
    for expert, rows in enumerate(pairwise(dispatch.expert_token_offsets.tolist())):
        pairs = dispatch.expert_pair_indices[slice(*rows)]
        yield expert, slice(*rows), pairs, tokens_of(pairs, dispatch)


def tokens_of(pairs: Array, dispatch: Dispatch) -> Array:
    """The token of each of ``pairs``."""
    return pairs // dispatch.top_k if dispatch.top_k else dispatch.pair_tokens[pairs]


def _low(low: tuple[Array, Array] | None, expert: int, rows: slice, transposed: bool) -> Array | int:
    """What low-rank factors add to an expert's rows; the factor is (E, columns, r), or with ``transposed`` (E, r, columns)."""
    if low is None:
        return 0
    values, factor = low
    return values[rows] @ (factor[expert] if transposed else factor[expert].T)


def _slice(columns: range | None) -> slice:
    return slice(None) if columns is None else slice(columns.start, columns.stop)


def _rounding(round_to: RoundTo) -> Callable[[Array], Array]:
    """What is done to numbers that a kernel stores in bf16. ValueError for another ``round_to``."""
    if round_to not in (None, "bf16"):
        raise ValueError(f"round_to: expected None or 'bf16', got {round_to!r}")
    return to_bfloat16 if round_to else lambda values: values


def _checked(check: Any, dispatch: Dispatch, config: Any, stream: Any, *arguments: Any) -> dict[str, Array]:
    """The arrays of a call, by name, with new ones for outputs that were not given. check: of the product's file."""
    given = check(TwinArguments(dispatch, stream, config), *arguments)
    given.lists()
    return given.arrays


# --- Forward ---------------------------------------------------------------------------------------------------------


def up_forward(
    x: Array,
    up_proj: Array,
    dispatch: Dispatch,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    bias: Array | None = None,
    low: tuple[Any, Any] | None = None,
    h: Array | None = None,
    act: Array | None = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> tuple[Array, Array]:
    """x (T, d), up_proj (E, G·n, d), or with ``transposed`` (E, d, G·n), bias (E, G·n) → h (R, G·n), act (R, n).
    h_r = x_t W_upᵀ + b, act = SiLU(gate)·up."""
    a = _checked(up.check, dispatch, config, stream, x, up_proj, activation, transposed, bias, low, h, act)
    h, act, stored = a["h"], a["act"], _rounding(round_to)
    weights = up_proj if transposed else up_proj.swapaxes(1, 2)
    for e, r, _, tokens in experts(dispatch):
        h[r] = stored(x[tokens] @ weights[e] + _low(low, e, r, transposed) + (0 if bias is None else bias[e]))
        act[r] = stored(activate(h[r], activation))
    return h, act


def grouped_mm(
    a: Array,
    weights: Array,
    dispatch: Dispatch,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Array | None = None,
    columns: range | None = None,
    low: tuple[Any, Any] | None = None,
    out: Array | None = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """out_r = a_r W[e]ᵀ + b, a (R, reduction), or (T, reduction) with ``gather``; weights (E, columns, reduction), or with
    ``transposed`` (E, reduction, columns); bias (E, columns) → out (R, columns), or only these of its columns."""
    names, arrays = ("a", "weights", "out"), (a, weights, gather, transposed, bias, columns, low, out)
    out = _checked(linear.check, dispatch, config, stream, names, config, *arrays)["out"]
    return _grouped_mm(a, weights, dispatch, out, gather, transposed, bias, columns, round_to, low)


def _grouped_mm(
    a: Array,
    weights: Array,
    dispatch: Dispatch,
    out: Array,
    gather: bool = False,
    transposed: bool = False,
    bias: Array | None = None,
    columns: range | None = None,
    round_to: RoundTo = None,
    low: tuple[Array, Array] | None = None,
) -> Array:
    if low is not None and columns is not None:
        low = (low[0], low[1][..., _slice(columns)] if transposed else low[1][:, _slice(columns)])
    weights, some = weights if transposed else weights.swapaxes(1, 2), _slice(columns)
    stored = _rounding(round_to)
    for e, r, _, tokens in experts(dispatch):
        made = a[tokens if gather else r] @ weights[e, :, some] + _low(low, e, r, transposed)
        out[r] = stored(made + (0 if bias is None else bias[e, some]))
    return out


def down_forward(
    act: Array,
    down_proj: Array,
    dispatch: Dispatch,
    *,
    bias: Array | None = None,
    columns: range | None = None,
    y: Array | None = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """act (R, n), down_proj (E, d, n), bias (E, d) → y (R, d), or only these of its columns.  y_r = act_r W_downᵀ + b."""
    arrays = (act, down_proj, False, False, bias, columns, None, y)
    y = _checked(linear.check, dispatch, config, stream, linear.DOWN_NAMES, config, *arrays)["y"]
    return _grouped_mm(act, down_proj, dispatch, y, bias=bias, columns=columns, round_to=round_to)


def down_forward_fused(
    act: Array,
    down_proj: Array,
    scores: Array,
    dispatch: Dispatch,
    *,
    transposed: bool = False,
    bias: Array | None = None,
    out_f32: Array,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """`down_forward` and `combine` in one: adds into out_f32 (T, d), which the caller has zeroed."""
    _checked(fused.check, dispatch, config, stream, act, down_proj, scores, transposed, bias, out_f32)
    y = grouped_mm(act, down_proj, dispatch, transposed=transposed, bias=bias)
    out_f32 += combine(y, dispatch, scores=scores)
    return out_f32


def combine(
    y: Array,
    dispatch: Dispatch,
    *,
    scores: Array | None = None,
    columns: range | None = None,
    out: Array | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """y (R, d), scores (P,) → out (T, d): a token's rows, weighted and summed in slot order; pairs without a row are left out.

    With scores it makes the output from Y; without, dX from the rows' dX̃. columns: those of a wider ``out`` that y is summed to.
    """
    out = _checked(combine_check, dispatch, None, stream, y, scores, columns, out)["out"]
    total = np.zeros_like(out[:, _slice(columns)])
    pairs = np.flatnonzero(dispatch.token_index_map >= 0)
    weights = 1 if scores is None else scores.reshape(-1)[pairs, None]
    weighted = weights * y[dispatch.token_index_map[pairs]]
    np.add.at(total, tokens_of(pairs, dispatch), weighted)  # in the order of the pairs
    out[:, _slice(columns)] = _rounding(round_to)(total)
    return out


# --- Backward --------------------------------------------------------------------------------------------------------


def down_backward_act(
    d_out: Array,
    down_proj: Array,
    h: Array,
    scores: Array,
    dispatch: Dispatch,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    low: tuple[Any, Any] | None = None,
    dh: Array | None = None,
    a_scaled: Array | None = None,
    d_scores: Array | None = None,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> tuple[Array, Array, Array]:
    """d_out (T, d), down_proj (E, d, n), or with ``transposed`` (E, n, d), h (R, G·n), scores (P,) → dh (R, G·n),
    a_scaled (R, n), d_scores (P,).

    dA' = dO_t W_down; dS_p = ⟨dA', act⟩ (SonicMoE §3: no need for Y), 0 for a pair without a row; a_scaled = S_p·act;
    dH from the gradient S_p·dA' of act, which is made again from h.
    """
    arrays = (d_out, down_proj, h, scores, activation, transposed, low, dh, a_scaled, d_scores)
    a = _checked(down_backward.check, dispatch, config, stream, *arrays)
    dh, a_scaled, d_scores, stored = a["dh"], a["a_scaled"], a["d_scores"], _rounding(round_to)
    d_scores[...] = 0
    for e, r, pairs, tokens in experts(dispatch):
        score = scores.reshape(-1)[pairs, None]
        d_act = d_out[tokens] @ (down_proj[e].T if transposed else down_proj[e]) + _low(low, e, r, not transposed)
        act = activate(h[r], activation)
        d_scores.reshape(-1)[pairs] = (d_act * act).sum(axis=1)
        a_scaled[r] = stored(score * act)
        dh[r] = stored(activate_backward(h[r], score * d_act, activation))
    return dh, a_scaled, d_scores


def down_backward_weight(
    d_out: Array,
    a_scaled: Array,
    dispatch: Dispatch,
    *,
    dw: Array | None = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """d_out (T, d), a_scaled (R, n) → dw (E, d, n).  ddown = Σ dO_tᵀ a_scaled_r over an expert's rows, 0 where it has none."""
    stored = _rounding(round_to if dw is None else None)
    dw = _checked(weight.check_down, dispatch, config, stream, d_out, a_scaled, dw, gather, accumulate)["dw"]
    for e, r, _, tokens in experts(dispatch):
        product = d_out[tokens if gather else r].T @ a_scaled[r]
        dw[e] = dw[e] + product if accumulate else stored(product)
    return dw


def up_backward_act(
    dh: Array,
    up_proj: Array,
    dispatch: Dispatch,
    *,
    columns: range | None = None,
    dx_rows: Array | None = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """dh (R, G·n), up_proj (E, G·n, d) → dx_rows (R, d), or only these of its columns.  dX̃_r = dH_r W_up; `combine` sums a
    token's rows to dX."""
    arrays = (dh, up_proj, False, True, None, columns, None, dx_rows)
    dx_rows = _checked(linear.check, dispatch, config, stream, linear.UP_NAMES, config, *arrays)["dx_rows"]
    return _grouped_mm(dh, up_proj, dispatch, dx_rows, transposed=True, columns=columns, round_to=round_to)


def up_backward_weight(
    dh: Array,
    x: Array,
    dispatch: Dispatch,
    *,
    dw: Array | None = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """dh (R, G·n), x (T, d) → dw (E, G·n, d).  dW_up = Σ dH_rᵀ x_t over an expert's rows, 0 where it has none."""
    stored = _rounding(round_to if dw is None else None)
    dw = _checked(weight.check_up, dispatch, config, stream, dh, x, dw, gather, accumulate)["dw"]
    for e, r, _, tokens in experts(dispatch):
        product = dh[r].T @ x[tokens if gather else r]
        dw[e] = dw[e] + product if accumulate else stored(product)
    return dw


# --- Small sums beside the products ----------------------------------------------------------------------------------


def expert_row_sum(
    values: Array,
    dispatch: Dispatch,
    *,
    gather: bool = False,
    scores: Array | None = None,
    out: Array | None = None,
    accumulate: bool = False,
    workspace: Any = None,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """A bias's gradient, out (E, m): the sum over an expert's rows r of values[r], values (R, m).

    gather: of values[token of r], values (T, m).  scores (P,): weighted by scores[pair of r].
    """
    stored = _rounding(round_to if out is None else None)
    out = _checked(reduce.check_row_sum, dispatch, None, stream, values, gather, scores, out, accumulate)["out"]
    for e, r, pairs, tokens in experts(dispatch):
        weights = 1 if scores is None else scores.reshape(-1)[pairs, None]
        total = (weights * values[tokens if gather else r]).sum(axis=0)
        out[e] = out[e] + total if accumulate else stored(total)
    return out


def bias_score_grad(
    d_out: Array,
    down_bias: Array,
    dispatch: Dispatch,
    *,
    d_scores: Array,
    stream: int | None = None,
    round_to: RoundTo = None,
) -> Array:
    """Adds a down bias's share ⟨dO_t, b_e⟩ to d_scores (P,), in place. d_out (T, d), down_bias (E, d)."""
    _checked(reduce.check_score_grad, dispatch, None, stream, d_out, down_bias, d_scores)
    for e, _, pairs, tokens in experts(dispatch):
        d_scores.reshape(-1)[pairs] += d_out[tokens] @ down_bias[e]
    return d_scores
