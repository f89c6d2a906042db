"""The products of the expert MLP with plain torch operations: any device, any floating dtype.

This is the ``backend="torch"``, a `blazeproto.autograd.backends.Backend`, whose docstrings give the shapes. It rounds where
the Hopper kernels round (H, act, Y, dH, A', dX~ in the dtype of X) and rounds dA' too, sums in float32 or better, saves the same
and needs no loop over experts where torch has a grouped product (``torch.nn.functional.grouped_mm``: bf16, fp16, fp32). In
float64, which that lacks, `_loop_mm` steps in. A CPU without instructions for bf16 or fp16 products multiplies in float32
(`_multiplies`), several times as fast.

Rows past the last (``expert_token_offsets[E]`` and beyond; sentinels and unused capacity leave them) hold whatever a grouped
product left there. Nothing grouped reads them; what is gathered by pair is first cleaned by `_zero_past_last`. A pair
without a row (-1) reads the very last row, which is then such a clean one: where there are as many rows as pairs, some row is
left over, and where there are fewer (``row_capacity``), one of zeros is appended.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto import activations
from blazeproto.autograd.low_rank import LowRows
from blazeproto.dispatch.structures import Dispatch

READS_ACT = True
GROUPED_MM_ALIGNMENT = 16  # bytes that grouped_mm wants row strides to be a multiple of


def build_dispatch(topk_experts: Tensor, num_experts: int, lists: tuple[Tensor, Tensor, Tensor]) -> None:
    pair_indices, offsets, token_index_map = lists
    num_rows = pair_indices.shape[0]
    experts = topk_experts.reshape(-1)
    here = (experts >= 0) & (experts < num_experts)
    keys = torch.where(here, experts, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    counts.scatter_add_(0, keys.long(), torch.ones_like(keys, dtype=torch.int32))
    offsets[:1].zero_()  # offsets[0] = 0 would copy a number from the host and wait
    offsets[1:] = counts[:-1].cumsum(0).clamp_max_(num_rows)
    order = torch.sort(keys, stable=True).indices  # (P,) the pair in each row; pairs without a row come last
    token_index_map[order] = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    token_index_map.masked_fill_(~here | (token_index_map >= num_rows), -1)
    order = order[:num_rows]
    pair_indices.copy_(order).masked_fill_(~here[order], -1)


def rows_of(dispatch: Dispatch) -> Dispatch:
    """As it is."""
    return dispatch


# ---- forward -----------------------------------------------------------------------------------------------------


def up_forward(
    x: Tensor,
    up_proj: Tensor,
    bias: Tensor | None,
    rows: Dispatch,
    activation: str,
    low: LowRows | None = None,
    h: Tensor | None = None,
    act: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    made = _product(_gather(x, _row_tokens(rows)), up_proj.transpose(-2, -1), rows, bias, _transposed(low))
    h = _place(made, h)
    return h, _place(_activate(h, activation), act)


def _activate(h: Tensor, activation: str) -> Tensor:
    """act (R, n) in h's dtype."""
    return activations.activate(_accumulation(h), activation).to(h.dtype)


def down_forward(
    act: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    scores: Tensor,
    rows: Dispatch,
    out: Tensor,
    combine: str,
    low: LowRows | None = None,
    *,
    overwrite_act: bool,
) -> None:
    """Both kinds of combine are one here, and ``act`` is not written over."""
    y = _product(act, down_proj.transpose(-2, -1), rows, bias, _transposed(low))
    out.copy_(_combine(y, scores, rows))


# ---- backward ----------------------------------------------------------------------------------------------------


def down_backward_act(
    needs: Sequence[bool],
    d_out: Tensor,
    h: Tensor,
    act: Tensor | None,
    scores: Tensor,
    down_proj: Tensor,
    bias: Tensor | None,
    rows: Dispatch,
    activation: str,
    low: LowRows | None = None,
    *,
    overwrite_h: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``act`` is used where it was saved, else made again from ``h``, which is not written over."""
    needs_h, needs_scores, needs_a_scaled = needs
    d_rows, row_scores = _gather(d_out, _row_tokens(rows)), _row_scores(scores, rows)  # (R, d): dO of each row's token
    dh = d_scores = a_scaled = None
    act = _activate(h, activation) if act is None else act
    if needs_h or needs_scores:
        d_act = _accumulation(_product(d_rows, down_proj, rows, None, low))  # dA' = dO W_down, unscaled
        if needs_scores:
            d_scores = _score_gradient(d_act, act, d_rows, bias, rows).reshape(scores.shape)
        if needs_h:
            dh = activations.activate_backward(_accumulation(h), d_act.mul_(row_scores), activation).to(h.dtype)
    if needs_a_scaled:
        a_scaled = (act * row_scores).to(h.dtype)  # A' = S act
    return dh, d_scores, a_scaled


def _score_gradient(d_act: Tensor, act: Tensor, d_rows: Tensor, bias: Tensor | None, rows: Dispatch) -> Tensor:
    """(P, 1) dS of each pair; d_act: dO W_down, unscaled."""
    row_d_scores = (d_act * act).sum(-1, keepdim=True)
    if bias is not None:
        of_rows = _accumulation(bias.to(d_rows.dtype))[_row_experts(rows)]
        row_d_scores += (_accumulation(d_rows) * of_rows).sum(-1, keepdim=True)
    return _by_pair(_zero_past_last(row_d_scores, rows), rows)


def up_backward_act(
    dh: Tensor, x: Tensor, up_proj: Tensor, rows: Dispatch, low: LowRows | None = None, dx: Tensor | None = None
) -> Tensor:
    return _place(_combine(_product(dh, up_proj, rows, None, low), None, rows), dx)


def _place(made: Tensor, place: Tensor | None) -> Tensor:
    return made if place is None else place.copy_(made)


# ---- sums over an expert's rows ----------------------------------------------------------------------------------


def weight_gradient(
    left: Tensor,
    ordered: Tensor,
    like: Tensor,
    rows: Dispatch,
    accumulator: Tensor | None = None,
    *,
    gather: bool,
    transposed: bool,
    factor: bool = False,
) -> Tensor:
    left = _gather(left, _row_tokens(rows)) if gather else left
    dtype = like.dtype if accumulator is None else accumulator.dtype
    if like.is_contiguous():
        made = _grouped_outer(*((ordered, left) if transposed else (left, ordered)), rows.expert_token_offsets, dtype)
    else:  # it is made as it lies
        made = _grouped_outer(
            *((left, ordered) if transposed else (ordered, left)), rows.expert_token_offsets, dtype
        ).mT
    return made if accumulator is None else accumulator.add_(made)


def expert_row_sum(
    values: Tensor, num_experts: int, rows: Dispatch, scores: Tensor | None, accumulator: Tensor | None = None
) -> Tensor:
    if scores is None:
        values = _accumulation(values)
    else:
        values = _accumulation(_gather(values, _row_tokens(rows))) * _row_scores(scores, rows)
    offsets = rows.expert_token_offsets
    made = torch.segment_reduce(values.contiguous(), "sum", offsets=offsets, unsafe=True, initial=0)
    return made if accumulator is None else accumulator.add_(made)


# ---- products with low-rank factors ------------------------------------------------------------------------------


def low_rank_rows(
    a: Tensor, factor: Tensor, rows: Dispatch, *, gather: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    a = _gather(a, _row_tokens(rows)) if gather else a
    return _place(_grouped_mm(a, factor if transposed else factor.mT, rows.expert_token_offsets), out)


def _transposed(low: LowRows | None) -> LowRows | None:
    """low's factor (E, m, r) as `_product` takes it: (E, r, m)."""
    return None if low is None else (low[0], low[1].transpose(-2, -1))


def _product(a: Tensor, b: Tensor, rows: Dispatch, bias: Tensor | None, low: LowRows | None) -> Tensor:
    """`_grouped_mm`, with low = (rows (R, r), factor (E, r, m)) added.

    A kernel adds both in one sum. Here that would take a copy of ``b``, so the low-rank product is made in float32, with the
    bias, and added to the rounded other one.
    """
    offsets = rows.expert_token_offsets
    if low is None:
        return _grouped_mm(a, b, offsets, bias)
    bias = None if bias is None else bias.to(a.dtype)
    added = _grouped_mm(_accumulation(low[0]), _accumulation(low[1]), offsets, bias)
    return added.add_(_grouped_mm(a, b, offsets)).to(a.dtype)


# ---- rows, pairs, tokens, experts --------------------------------------------------------------------------------


def _row_tokens(rows: Dispatch) -> Tensor:
    """(R,) the token of each row; rows past the last get a token that exists, and are not read."""
    pairs = rows.expert_pair_indices.clamp_min(0)
    return pairs // rows.top_k if rows.top_k else rows.pair_tokens[pairs].clamp_min(0)


def _row_scores(scores: Tensor, rows: Dispatch) -> Tensor:
    """(R, 1) the score of each row's pair; rows past the last get one that exists."""
    return scores.reshape(-1, 1).index_select(0, rows.expert_pair_indices.clamp_min(0))


def _row_experts(rows: Dispatch) -> Tensor:
    """(R,) the expert of each row; rows past the last get the last expert."""
    index = torch.arange(rows.expert_pair_indices.shape[0], device=rows.expert_token_offsets.device, dtype=torch.int32)
    return torch.searchsorted(rows.expert_token_offsets[1:], index, right=True).clamp_max_(
        rows.expert_token_offsets.shape[0] - 2
    )


def _by_pair(values: Tensor, rows: Dispatch) -> Tensor:
    """values (R, m) with clean rows past the last -> (P, m); zeros for a pair without a row."""
    values = _with_zero_row(values, rows)
    return values.index_select(0, rows.token_index_map.remainder(values.shape[0])) if rows.num_pairs else values


def _with_zero_row(values: Tensor, rows: Dispatch) -> Tensor:
    """values (R, m) with clean rows past the last -> the same, whose last row is zero if a pair has no row."""
    return values if values.shape[0] == rows.num_pairs else F.pad(values, (0, 0, 0, 1))


def _zero_past_last(values: Tensor, rows: Dispatch) -> Tensor:
    """Zero the rows of ``values`` (R, m) that belong to no pair, in place. On a GPU without asking the host."""
    if values.device.type == "cpu":
        values[int(rows.expert_token_offsets[-1]) :] = 0
        return values
    return values.masked_fill_(rows.expert_pair_indices[:, None] < 0, 0)


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """x (T, d), tokens (R,) -> (R, d)."""
    if x.shape[0] == 0:  # rows can outnumber the tokens only as unused capacity
        return x.new_zeros(tokens.shape[0], x.shape[1])
    return x.index_select(0, tokens)


def _combine(y: Tensor, scores: Tensor | None, rows: Dispatch) -> Tensor:
    """out_t = sum over the pairs of t of S_p y_row(p), in slot order, in float32 or better. y (R, d) -> (T, d)."""
    y, num_tokens = _zero_past_last(y, rows), rows.num_tokens
    if scores is not None:  # a score that multiplies nothing may be anything, NaN too
        scores = scores.reshape(-1, 1).masked_fill(rows.token_index_map[:, None] < 0, 0)
    if rows.top_k is None:
        by_pair = _accumulation(_by_pair(y, rows))
        by_pair = by_pair if scores is None else by_pair * scores
        return torch.segment_reduce(by_pair, "sum", offsets=rows.token_offsets, unsafe=True, initial=0).to(y.dtype)
    if y.device.type == "cpu" and rows.num_pairs:  # gathers and sums at once
        y = _with_zero_row(y, rows)
        row_of = rows.token_index_map.remainder(y.shape[0]).view(num_tokens, rows.top_k)
        weights = None if scores is None else scores.view(num_tokens, rows.top_k)
        return F.embedding_bag(row_of, _accumulation(y), mode="sum", per_sample_weights=weights).to(y.dtype)
    out = torch.zeros(num_tokens, y.shape[1], dtype=_accumulation(y).dtype, device=y.device)
    by_token = _by_pair(y, rows).view(num_tokens, rows.top_k, y.shape[1])  # (T, K, d)
    for slot in range(rows.top_k):
        weight = 1 if scores is None else scores.view(num_tokens, rows.top_k, 1)[:, slot]
        out += by_token[:, slot] * weight
    return out.to(y.dtype)


def _accumulation(t: Tensor) -> Tensor:
    """``t`` in the dtype that sums and nonlinearities are computed in: float32, or float64 for float64."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


# ---- grouped products --------------------------------------------------------------------------------------------


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """c_r = a_r b[expert of r] + bias[expert of r]. a (R, k), b (E, k, m), bias (E, m) -> (R, m); rows past offsets[E] are
    undefined.

    The bias is one more row of ``b`` which one more column of ``a``, of ones, takes in, so that it is in the sum before that
    is rounded.
    """
    if bias is not None:
        a, b = F.pad(a, (0, 1), value=1.0), torch.cat((b, bias.to(b.dtype)[:, None]), dim=1)
    if a.dtype == torch.float64:
        return _loop_mm(a, b, offsets)
    if a.shape[0] == 0:
        return a.new_empty(0, b.shape[2])
    if not _multiplies(a.device.type, a.dtype):
        return _grouped_mm(a.float(), b.float(), offsets).to(a.dtype)
    if _aligned(a) and _aligned(b):
        return F.grouped_mm(
            a, b, offs=offsets[1:]
        ).contiguous()  # or strided rows would take other code, which rounds otherwise
    k, m = b.shape[1:]
    padded_b = F.pad(b, (0, _pad_of(m, b), 0, _pad_of(k, b)))
    return F.grouped_mm(F.pad(a, (0, _pad_of(k, a))), padded_b, offs=offsets[1:])[:, :m].contiguous()


def _grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """c[e] = sum over the rows of e of a_r^T b_r. a (R, m), b (R, k) -> (E, m, k) of ``dtype``; zeros where e has no row.

    A grouped product rounds to the dtype of its operands. For another dtype they are multiplied in float32, where a product of
    two bf16 or fp16 numbers is exact, so that the sums are rounded to ``dtype`` alone.
    """
    m, k = a.shape[1], b.shape[1]
    if a.dtype == torch.float64:
        return _loop_outer(a, b, offsets).to(dtype)
    if a.shape[0] == 0:
        return a.new_zeros(offsets.shape[0] - 1, m, k, dtype=dtype)
    if dtype != a.dtype or not _multiplies(a.device.type, a.dtype):
        a, b = a.float(), b.float()
    if _aligned(a) and _aligned(b):
        out = F.grouped_mm(a.t(), b, offs=offsets[1:])
    else:
        padded_a, padded_b = F.pad(a, (0, _pad_of(m, a))), F.pad(b, (0, _pad_of(k, b)))
        out = F.grouped_mm(padded_a.t(), padded_b, offs=offsets[1:])[:, :m, :k].contiguous()
    if out.device.type != "cpu":  # what a group of no rows gets there is nowhere promised
        out.masked_fill_((offsets.diff() == 0)[:, None, None], 0)
    return out.to(dtype)


def _loop_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`_grouped_mm` expert by expert; reads the offsets on the host."""
    out = a.new_empty(a.shape[0], b.shape[2])
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        torch.mm(a[begin:end], b[expert], out=out[begin:end])
    return out


def _loop_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`_grouped_outer` expert by expert; reads the offsets on the host."""
    return torch.stack([a[begin:end].t() @ b[begin:end] for begin, end in pairwise(offsets.tolist())])


@cache
def _multiplies(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device has products of this dtype. Where oneDNN says that a CPU has none, torch computes them one by one."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    asked = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, asked)())


def _aligned(t: Tensor) -> bool:
    """Whether grouped_mm takes ``t`` (a row-major or column-major matrix): its stride and address in 16 bytes."""
    leading = max(t.stride()[-2:]) * t.element_size()
    return leading % GROUPED_MM_ALIGNMENT == 0 and t.data_ptr() % GROUPED_MM_ALIGNMENT == 0


def _pad_of(size: int, t: Tensor) -> int:
    """Elements to add to ``size`` until a row of it is a multiple of 16 bytes."""
    return -size % (GROUPED_MM_ALIGNMENT // t.element_size())
