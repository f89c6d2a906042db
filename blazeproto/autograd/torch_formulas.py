"""The products' formulas by plain torch operations: any device, any floating dtype (`blazeproto.gemm.formulas.Namespace`).

It rounds where the Hopper kernels round (H, act, Y, dH, A', dX~ in the dtype of X) and rounds dA' too, sums in float32 or better,
and needs no loop over experts where torch has a grouped product (``torch.nn.functional.grouped_mm``: bf16, fp16, fp32). In
float64, which that lacks, `_loop_mm` steps in. A CPU without instructions for bf16 or fp16 products multiplies in float32
(`_multiplies`), several times as fast.

Rows past the last (``expert_token_offsets[E]`` and beyond; sentinels and unused capacity leave them) hold whatever a grouped
product left there. Nothing grouped reads them; a pair without a row (-1) reads the very last one, which
`_clean` makes zero: with as many rows as pairs some row is left over, and with fewer (``row_capacity``) one of zeros is appended.
"""

from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto import activations
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.specification import Specification
from blazeproto.stored.weight import StoredWeight

GROUPED_MM_ALIGNMENT = 16  # bytes that grouped_mm wants row strides to be a multiple of
# On a CPU with AMX, products of bf16 (oneDNN 3.12, torch 2.13) read so many bytes past a shorter row, and multiply them with
# zeros: a NaN in the next token's row would spread.
CPU_ALIGNMENT = 64


def outputs(spec: Specification, rows: Dispatch, dtype: torch.dtype, **call: Any) -> Any:
    """The outputs of a product's formula for these arrays and options; outputs that the kernels store in bf16 have ``dtype``.

    Outputs that the call does not need are None; one output is no tuple.
    """
    values = spec.formula(Torch(rows), **call)
    made = values if isinstance(values, tuple) else (values,)
    stored = tuple(
        value if value is None or array.f32 or array.dtype != "bfloat16" else value.to(dtype)
        for array, value in zip(spec.outputs, made, strict=True)
    )
    return stored if isinstance(values, tuple) else stored[0]


class Torch:
    """The namespace, for the rows of one dispatch.  sums: the dtype of `outer`; None: the rows' dtype."""

    def __init__(self, rows: Dispatch, sums: torch.dtype | None = None) -> None:
        self.rows, self.sums = rows, sums

    def gather(self, values: Tensor) -> Tensor:
        if values.shape[0] == 0:  # rows can outnumber the tokens only as unused capacity
            return values.new_zeros(self._tokens.shape[0], values.shape[1])
        return values.index_select(0, self._tokens)

    def of_rows(self, scores: Tensor) -> Tensor:
        return scores.reshape(-1, 1).index_select(0, self.rows.expert_pair_indices.clamp_min(0))

    def product(
        self,
        rows: Tensor,
        weights: Any,
        *,
        transposed: bool,
        bias: Tensor | None = None,
        low: tuple[Tensor, Tensor] | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """A kernel adds ``low`` in the same sum. Here that would take a copy of the weights, so its product is made in float32,
        with the bias, and added to the rounded other one."""
        some = slice(None) if columns is None else slice(columns.start, columns.stop)
        offsets, bias = self.rows.expert_token_offsets, None if bias is None else bias[:, some]
        inside = bias if low is None else None
        if isinstance(weights, StoredWeight):
            made = _by_expert(rows, weights, offsets, inside, transposed=transposed, columns=some)
        else:
            made = _grouped_mm(rows, (weights if transposed else weights.mT)[..., some], offsets, inside)
        if low is None:
            return made
        factor, bias = (low[1] if transposed else low[1].mT)[..., some], None if bias is None else bias.to(rows.dtype)
        added = _grouped_mm(_accumulation(low[0]), _accumulation(factor), offsets, bias)
        return added.add_(made).to(rows.dtype)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return _grouped_outer(left, right, self.rows.expert_token_offsets, self.sums or left.dtype)

    def expert_sum(self, values: Tensor) -> Tensor:
        values, offsets = _accumulation(values).contiguous(), self.rows.expert_token_offsets
        return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0)

    def combine(self, values: Tensor, scores: Tensor | None = None) -> Tensor:
        """In float32 or better."""
        rows, y = self.rows, self._clean(values)
        num_tokens, top_k = rows.num_tokens, rows.top_k
        if scores is not None:  # a score that multiplies nothing may be anything, NaN too
            scores = scores.reshape(-1, 1).masked_fill(rows.token_index_map[:, None] < 0, 0)
        if top_k is None:
            by_pair = _accumulation(self._by_pair(y))
            by_pair = by_pair if scores is None else by_pair * scores
            return torch.segment_reduce(by_pair, "sum", offsets=rows.token_offsets, unsafe=True, initial=0)
        if y.device.type == "cpu" and rows.num_pairs:  # gathers and sums at once
            y = self._with_zero_row(y)
            row_of = rows.token_index_map.remainder(y.shape[0]).view(num_tokens, top_k)
            weights = None if scores is None else scores.view(num_tokens, top_k)
            return F.embedding_bag(row_of, _accumulation(y), mode="sum", per_sample_weights=weights)
        by_token, sums = self._by_pair(y).view(num_tokens, top_k, y.shape[1]), _accumulation(y[:0]).dtype
        if scores is None:
            return by_token.sum(dim=1, dtype=sums)
        weights = scores.view(num_tokens, top_k, 1).to(sums)
        out = by_token[:, 0] * weights[:, 0]
        for slot in range(1, top_k):
            out.addcmul_(by_token[:, slot], weights[:, slot])
        return out

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        return (_accumulation(left) * right).sum(-1, keepdim=True)

    def dot_expert(self, rows: Tensor, vectors: Tensor) -> Tensor:
        return self.dot(rows, _accumulation(vectors.to(rows.dtype))[self._experts])

    def by_pair(self, values: Tensor) -> Tensor:
        return self._by_pair(self._clean(values))[:, 0]

    def activate(self, h: Tensor, activation: str) -> Tensor:
        made: Tensor = activations.activate(_accumulation(h), activation)
        return made.to(h.dtype)

    def activate_backward(self, h: Tensor, d_act: Tensor, activation: str) -> Tensor:
        wide = _accumulation(h), _accumulation(d_act)
        made: Tensor = activations.activate_backward(*wide, activation, lambda half: half.to(h.dtype))
        return made

    def stored(self, values: Tensor) -> Tensor:
        """As it is: rows are made in the dtype that they are stored in."""
        return values

    # ---- rows, pairs, tokens, experts ----------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> Tensor:
        """(R,) the token of each row; rows past the last get a token that exists, and are not read."""
        pairs = self.rows.expert_pair_indices.clamp_min(0)
        return pairs // self.rows.top_k if self.rows.top_k else self.rows.pair_tokens[pairs].clamp_min(0)

    @cached_property
    def _experts(self) -> Tensor:
        """(R,) the expert of each row; rows past the last get the last expert."""
        offsets = self.rows.expert_token_offsets
        index = torch.arange(self.rows.num_rows, device=offsets.device, dtype=torch.int32)
        return torch.searchsorted(offsets[1:], index, right=True).clamp_max_(offsets.shape[0] - 2)

    def _by_pair(self, values: Tensor) -> Tensor:
        """values (R, m) with a clean last row -> (P, m); zeros for a pair without a row."""
        values = self._with_zero_row(values)
        row_of = self.rows.token_index_map.remainder(max(1, values.shape[0]))
        return values.index_select(0, row_of) if self.rows.num_pairs else values

    def _with_zero_row(self, values: Tensor) -> Tensor:
        """values (R, m) with a clean last row -> the same, whose last row is zero if a pair has no row."""
        return values if values.shape[0] == self.rows.num_pairs else F.pad(values, (0, 0, 0, 1))

    def _clean(self, values: Tensor) -> Tensor:
        """Zero the last row of ``values`` (R, m) in place, where no pair has it: what pairs without a row read."""
        values[-1:].masked_fill_(self.rows.expert_pair_indices[-1:, None] < 0, 0)
        return values


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


def _by_expert(
    a: Tensor, b: StoredWeight, offsets: Tensor, bias: Tensor | None, *, transposed: bool, columns: slice
) -> Tensor:
    """`_grouped_mm` of a stored weight, one decoded expert at a time, to the same bits on a CPU; reads offsets on the host."""
    width = b.shape[2 if transposed else 1]
    out = a.new_empty(a.shape[0], len(range(width)[columns]))
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin < end:
            weight = b.decode(expert, a.dtype)[None]
            of_one = offsets.new_tensor((0, end - begin)), None if bias is None else bias[expert : expert + 1]
            out[begin:end] = _grouped_mm(a[begin:end], (weight if transposed else weight.mT)[..., columns], *of_one)
    return out


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
    if not _empty_groups_are_zero(out.device):
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


@cache
def _empty_groups_are_zero(device: torch.device) -> bool:
    """Whether grouped_mm makes zeros of a group without rows: on Hopper and on a CPU. On Blackwell it does not
    (github.com/pytorch/pytorch/issues/172439), and no page of torch promises it."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0))


def _aligned(t: Tensor) -> bool:
    """Whether grouped_mm takes ``t`` (a row-major or column-major matrix): its stride and address."""
    leading = max(t.stride()[-2:]) * t.element_size()
    return leading % _alignment(t) == 0 and t.data_ptr() % GROUPED_MM_ALIGNMENT == 0


def _alignment(t: Tensor) -> int:
    """Bytes that a row of ``t`` has to be a multiple of."""
    return CPU_ALIGNMENT if t.device.type == "cpu" and t.element_size() == 2 else GROUPED_MM_ALIGNMENT


def _pad_of(size: int, t: Tensor) -> int:
    """Elements to add to ``size`` until a row of it is aligned."""
    return -size % (_alignment(t) // t.element_size())
