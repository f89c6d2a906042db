"""The products of the expert MLP with plain torch operations: any device, any floating dtype.

This is the ``backend="torch"``. It rounds where the Hopper kernels round (H, act, Y, dH, A' in the dtype of X), sums in
float32 or better, saves the same and needs no loop over experts where torch has a grouped product
(``torch.nn.functional.grouped_mm``: bf16, fp16, fp32). In float64, which it lacks, :func:`_loop_mm` steps in. A CPU without
instructions for bf16 or fp16 products multiplies in float32 (:func:`_multiplies`), several times as fast.

Rows past the last (``offsets[E]`` and beyond; sentinels and unused capacity leave them) hold whatever a grouped product
left there. Nothing grouped reads them; what is gathered by pair is first cleaned by :func:`_zero_past_last`, and a pair
without a row (-1) reads the very last row, which is then such a clean one.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd.policy import DownGradients, Needs, Rows, UpGradients
from blazeproto.reference import GATED, UNGATED, is_gated

GROUPED_MM_ALIGNMENT = 16  # bytes that grouped_mm wants row strides to be a multiple of


def rows_for(rows: Rows) -> Rows:
    """``rows`` as the products here take them: as they are."""
    return rows


# ---- forward -----------------------------------------------------------------------------------------------------


def up_forward(
    x: Tensor, up_proj: Tensor, bias: Tensor | None, rows: Rows, activation: str, h_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x (T, d), up_proj (E, G*n, d) -> h (R, G*n), act (R, n). ``h_out`` is a place to put h."""
    h = _grouped_mm(_gather(x, _row_tokens(rows)), up_proj.transpose(-2, -1), rows.offsets)
    if bias is not None:
        h = h.add_(bias.to(h.dtype)[_row_experts(rows)])
    h = h if h_out is None else h_out.copy_(h)
    return h, _activate(h, activation)


recompute_h = up_forward  # act comes along and down_backward uses it


def down_forward(
    act: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    scores: Tensor,
    rows: Rows,
    num_tokens: int,
    combine: str,
    out: Tensor | None = None,
    *,
    overwrite_act: bool = False,
) -> Tensor:
    """act (R, n), down_proj (E, d, n), scores (T, K) or (P,) -> out (T, d). Both kinds of combine are one here.

    ``overwrite_act``: ``act`` may be written over, and here it is not.
    """
    y = _grouped_mm(act, down_proj.transpose(-2, -1), rows.offsets)
    if bias is not None:
        y = y.add_(bias.to(y.dtype)[_row_experts(rows)])
    made = _combine(y, scores, rows, num_tokens)
    return made if out is None else out.copy_(made)


# ---- backward ----------------------------------------------------------------------------------------------------


def down_backward(
    d_out: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    h: Tensor,
    act: Tensor | None,
    scores: Tensor,
    rows: Rows,
    activation: str,
    needs: Needs,
    weight_dtype: torch.dtype,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
    *,
    overwrite_h: bool = False,
) -> DownGradients:
    """Gradients (dH (R, G*n), d_scores like scores, d_down_proj (E, d, n), d_bias (E, d)); None where not needed.

    ``act`` (R, n) is used where it was saved, else made again from ``h``. ``d_weight`` and ``d_bias`` are float32
    accumulators to add to. ``overwrite_h``: dH may be written over ``h``, and here it is not.
    """
    needs_h, needs_scores, needs_weight, needs_bias = needs
    d_rows = _gather(d_out, _row_tokens(rows))  # (R, d): dO of each row's token
    row_scores = _row_scores(scores, rows)  # (R, 1)
    dh = d_scores = None

    act = _activate(h, activation) if act is None else act
    if needs_weight:
        a_scaled = (act * row_scores).to(h.dtype)  # A' = S act
        d_weight = _deliver(_grouped_outer(d_rows, a_scaled, rows.offsets).to(weight_dtype), d_weight)
        del a_scaled
    if needs_bias:
        d_bias = _deliver(_expert_sum(_accumulation(d_rows) * row_scores, rows), d_bias)
    if needs_h or needs_scores:
        d_act = _accumulation(_grouped_mm(d_rows, down_proj, rows.offsets))  # dA' = dO W_down, before the score
        if needs_scores:
            row_d_scores = (d_act * act).sum(-1, keepdim=True)
            if bias is not None:
                row_d_scores += (_accumulation(d_rows) * bias[_row_experts(rows)]).sum(-1, keepdim=True)
            d_scores = _by_pair(_zero_past_last(row_d_scores, rows), rows).reshape(scores.shape)
        if needs_h:
            dh = _activation_backward(d_act.mul_(row_scores), h, activation)
    return dh, d_scores, d_weight, d_bias


def up_backward(
    dh: Tensor,
    x: Tensor,
    up_proj: Tensor,
    rows: Rows,
    needs: Needs,
    weight_dtype: torch.dtype,
    dx: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
) -> UpGradients:
    """Gradients (dX (T, d), d_up_proj (E, G*n, d), d_bias (E, G*n)); None where not needed.

    ``dx`` is a place to write to, ``d_weight`` and ``d_bias`` are float32 accumulators to add to.
    """
    needs_x, needs_weight, needs_bias = needs
    if needs_x:
        made = _combine(_grouped_mm(dh, up_proj, rows.offsets), None, rows, x.shape[0])
        dx = made if dx is None else dx.copy_(made)
    if needs_weight:
        d_weight = _deliver(_grouped_outer(dh, _gather(x, _row_tokens(rows)), rows.offsets).to(weight_dtype), d_weight)
    if needs_bias:
        d_bias = _deliver(_expert_sum(_accumulation(dh), rows), d_bias)
    return dx, d_weight, d_bias


def _deliver(grad: Tensor, accumulator: Tensor | None) -> Tensor:
    return grad if accumulator is None else accumulator.add_(grad)


def _activate(h: Tensor, activation: str) -> Tensor:
    """h (R, G*n) -> act (R, n), rounded to the dtype of ``h`` once, at the end."""
    if not is_gated(activation):
        return UNGATED[activation](_accumulation(h)).to(h.dtype)
    gate, up = h.chunk(2, dim=-1)
    return GATED[activation](_accumulation(gate)).mul_(_accumulation(up)).to(h.dtype)


def _activation_backward(d_act: Tensor, h: Tensor, activation: str) -> Tensor:
    """d_act (R, n), h (R, G*n) -> dH (R, G*n) in the dtype of ``h``."""
    if not is_gated(activation):
        return _d_nonlinearity(UNGATED[activation], d_act, _accumulation(h)).to(h.dtype)
    gate, up = (_accumulation(half) for half in h.chunk(2, dim=-1))
    dh = torch.empty_like(h)
    d_gate, d_up = dh.chunk(2, dim=-1)
    d_up.copy_(GATED[activation](gate).mul_(d_act))
    d_gate.copy_(_d_nonlinearity(GATED[activation], d_act.mul_(up), gate))
    return dh


def _d_nonlinearity(nonlinearity: object, grad: Tensor, z: Tensor) -> Tensor:
    if nonlinearity is F.silu:
        return torch.ops.aten.silu_backward(grad, z)
    if nonlinearity is F.gelu:
        return torch.ops.aten.gelu_backward(grad, z)
    return torch.ops.aten.threshold_backward(grad, z, 0)  # ReLU


# ---- rows, pairs, tokens, experts --------------------------------------------------------------------------------


def _row_tokens(rows: Rows) -> Tensor:
    """(R,) the token of each row; rows past the last get a token that exists, and are not read."""
    pairs = rows.pair_indices.clamp_min(0)
    if rows.top_k is not None:
        return pairs // rows.top_k
    assert rows.pair_tokens is not None
    return rows.pair_tokens[pairs].clamp_min(0)


def _row_experts(rows: Rows) -> Tensor:
    """(R,) the expert of each row; rows past the last get the last expert."""
    index = torch.arange(rows.pair_indices.shape[0], device=rows.offsets.device, dtype=torch.int32)
    return torch.searchsorted(rows.offsets[1:], index, right=True).clamp_max_(rows.offsets.shape[0] - 2)


def _row_scores(scores: Tensor, rows: Rows) -> Tensor:
    """(R, 1) the score of each row's pair."""
    return scores.reshape(-1, 1).index_select(0, rows.pair_indices.clamp_min(0))


def _by_pair(values: Tensor, rows: Rows) -> Tensor:
    """values (R, m) with clean rows past the last -> (P, m); a pair without a row reads the last row, a clean one."""
    num_rows = values.shape[0]
    return values if num_rows == 0 else values.index_select(0, rows.token_index_map.remainder(num_rows))


def _zero_past_last(values: Tensor, rows: Rows) -> Tensor:
    """Zero the rows of ``values`` (R, m) that belong to no pair, in place. On a GPU without asking the host."""
    if values.device.type == "cpu":
        values[int(rows.offsets[-1]) :] = 0
        return values
    return values.masked_fill_(rows.pair_indices[:, None] < 0, 0)


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """x (T, d), tokens (R,) -> (R, d)."""
    if x.shape[0] == 0:  # rows can outnumber the tokens only as unused capacity
        return x.new_zeros(tokens.shape[0], x.shape[1])
    return x.index_select(0, tokens)


def _combine(y: Tensor, scores: Tensor | None, rows: Rows, num_tokens: int) -> Tensor:
    """out_t = sum over the pairs of t of S_p y_row(p), in slot order, in float32 or better. y (R, d) -> (T, d)."""
    y = _zero_past_last(y, rows)
    if scores is not None:  # a score that multiplies nothing may be anything, NaN too
        scores = scores.reshape(-1, 1).masked_fill(rows.token_index_map[:, None] < 0, 0)
    if rows.top_k is None:
        by_pair = _accumulation(_by_pair(y, rows))
        by_pair = by_pair if scores is None else by_pair * scores
        assert rows.token_offsets is not None
        return torch.segment_reduce(by_pair, "sum", offsets=rows.token_offsets, unsafe=True, initial=0).to(y.dtype)
    if (
        y.device.type == "cpu" and y.shape[0]
    ):  # gathers and sums at once; -1 becomes the last row, zero if there is a -1
        row_of = rows.token_index_map.remainder(y.shape[0]).view(num_tokens, rows.top_k)
        weights = None if scores is None else scores.view(num_tokens, rows.top_k)
        return F.embedding_bag(row_of, _accumulation(y), mode="sum", per_sample_weights=weights).to(y.dtype)
    by_token = _by_pair(y, rows).view(num_tokens, rows.top_k, y.shape[1])  # (T, K, d)
    if scores is None:
        return by_token.sum(1)
    by_slot = scores.view(num_tokens, 1, rows.top_k)
    if y.dtype == scores.dtype:
        return torch.bmm(by_slot, by_token).squeeze(1)
    out = torch.zeros(num_tokens, y.shape[1], dtype=scores.dtype, device=y.device)
    for slot in range(rows.top_k):
        out.addcmul_(by_token[:, slot], by_slot[:, :, slot])
    return out.to(y.dtype)


def _expert_sum(values: Tensor, rows: Rows) -> Tensor:
    """values (R, m) -> (E, m): the sum over each expert's rows."""
    return torch.segment_reduce(values.contiguous(), "sum", offsets=rows.offsets, unsafe=True, initial=0)


def _accumulation(t: Tensor) -> Tensor:
    """``t`` in the dtype that sums and nonlinearities are computed in: float32, or float64 for float64."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


# ---- grouped products --------------------------------------------------------------------------------------------


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """c_r = a_r b[expert of r]. a (R, k), b (E, k, m) -> (R, m); rows past offsets[E] are undefined."""
    if a.dtype == torch.float64:
        return _loop_mm(a, b, offsets)
    if a.shape[0] == 0:
        return a.new_empty(0, b.shape[2])
    if not _multiplies(a.device.type, a.dtype):
        return _grouped_mm(a.float(), b.float(), offsets).to(a.dtype)
    if _aligned(a) and _aligned(b):
        return F.grouped_mm(a, b, offs=offsets[1:])
    k, m = b.shape[1:]
    padded_b = F.pad(b, (0, _pad_of(m, b), 0, _pad_of(k, b)))
    return F.grouped_mm(F.pad(a, (0, _pad_of(k, a))), padded_b, offs=offsets[1:])[:, :m].contiguous()


def _grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """c[e] = sum over the rows of e of a_r^T b_r. a (R, m), b (R, k) -> (E, m, k); zeros where e has no row.

    In the dtype of ``a``, or in float32, unrounded, where the products are.
    """
    m, k = a.shape[1], b.shape[1]
    if a.dtype == torch.float64:
        return _loop_outer(a, b, offsets)
    if a.shape[0] == 0:
        return a.new_zeros(offsets.shape[0] - 1, m, k)
    if not _multiplies(a.device.type, a.dtype):
        return _grouped_outer(a.float(), b.float(), offsets)
    if _aligned(a) and _aligned(b):
        out = F.grouped_mm(a.t(), b, offs=offsets[1:])
    else:
        padded_a, padded_b = F.pad(a, (0, _pad_of(m, a))), F.pad(b, (0, _pad_of(k, b)))
        out = F.grouped_mm(padded_a.t(), padded_b, offs=offsets[1:])[:, :m, :k].contiguous()
    if out.device.type != "cpu":  # what a group of no rows gets there is nowhere promised
        out.masked_fill_((offsets.diff() == 0)[:, None, None], 0)
    return out


def _loop_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """:func:`_grouped_mm` expert by expert; reads the offsets on the host."""
    out = torch.empty(a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        torch.mm(a[begin:end], b[expert], out=out[begin:end])
    return out


def _loop_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """:func:`_grouped_outer` expert by expert; reads the offsets on the host."""
    bounds = offsets.tolist()
    out = torch.empty(len(bounds) - 1, a.shape[1], b.shape[1], dtype=a.dtype, device=a.device)
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
    return out


@cache
def _multiplies(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device has products of this dtype. Where oneDNN says that a CPU has none, torch computes them one by one."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    is_bf16 = dtype == torch.bfloat16
    return bool(operators._is_mkldnn_bf16_supported() if is_bf16 else operators._is_mkldnn_fp16_supported())


def _aligned(t: Tensor) -> bool:
    """Whether grouped_mm takes ``t`` (a row-major or column-major matrix): its stride and address in 16 bytes."""
    leading = max(t.stride()[-2:]) * t.element_size()
    return leading % GROUPED_MM_ALIGNMENT == 0 and t.data_ptr() % GROUPED_MM_ALIGNMENT == 0


def _pad_of(size: int, t: Tensor) -> int:
    """Elements to add to ``size`` until a row of it is a multiple of 16 bytes."""
    return -size % (GROUPED_MM_ALIGNMENT // t.element_size())
