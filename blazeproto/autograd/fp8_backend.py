"""The backends with fp8 (e4m3) operands, ``precision="fp8"`` (`blazeproto.gemm.recipe`).

Each is a `blazeproto.autograd.step.Backend` over one in bf16, which has what stays so: dispatch, combine. H, act, dH and A'
are records (`records`), of rows that are quantized in blocks of 128. Tokens are quantized, each by itself, where they are used; a
weight, 128 x 128 together, in forward in both orders, or each order before its product (`Options.keep_transposed`), unless the
caller has kept it (`QuantizedWeights`). The checks refuse biases, low-rank factors and other sums than `combine`'s: all None.

    x ─q─> [ up ] ─> H_q, act_q ─> [ down ] ─> Y ─combine─> out        saved: X, H_q, S, indices
    dO ─q─> [ down^T ] ─> dH_q, A'_q, dS      dH_q ─> [ up^T ] ─> dX~ ─combine─> dX
    dH_q, x_q turned ─> dW_up                 dO_q, A'_q turned ─> dW_down, when dH_q is gone
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd import hopper_backend, torch_backend
from blazeproto.autograd.operators import cast
from blazeproto.autograd.records import new_quantized, new_rows, new_weights, rows_in, weights_in, width_of
from blazeproto.autograd.step import BackendStep, OuterSum
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import down_backward, linear, quantize, up, weight_fp8
from blazeproto.gemm.combine import column_slices, in_slices
from blazeproto.gemm.combine import launch as launch_combine
from blazeproto.gemm.e4m3 import Quantized, from_e4m3, in_e4m3, to_e4m3
from blazeproto.gemm.quantize import OnStream
from blazeproto.gemm.recipe import FP8, Operand
from blazeproto.runtime.arrays import current_stream


class Hopper:
    """By the products' kernels of quantized operands."""

    READS_ACT = False
    build_dispatch = staticmethod(hopper_backend.build_dispatch)
    rows_of = staticmethod(hopper_backend.rows_of)

    @staticmethod
    def forward_weight(
        weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None, place: Tensor | None = None
    ) -> Quantized:
        if kept is None:
            kept, *orders = _orders(weight, (True, False), place)
            quantize.launch_weights(hopper_backend.ready(cast(weight, dtype)), rows, *orders)
        return weights_in(kept[0], *weight.shape[1:])

    @staticmethod
    def backward_weight(weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None) -> Quantized:
        """The transpose, quantized."""
        if kept is None:
            kept, *orders = _orders(weight, (False, True))
            quantize.launch_weights(hopper_backend.ready(cast(weight, dtype)), rows, *orders)
        return weights_in(kept[-1], *weight.shape[:0:-1])

    @staticmethod
    def keep(weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A record (2, E, bytes): forward's order, and transposed."""
        record, *orders = _orders(weight, (True, True))
        at = OnStream(weight.get_device(), current_stream(weight))
        quantize.launch_weights(hopper_backend.ready(cast(weight, dtype)), at, *orders)
        return record

    def up_forward(self, step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, width = step.rows, step.weight.values.shape[1]
        h = new_rows(x, rows.num_rows, width) if h is None else h
        act = new_rows(x, rows.num_rows, width // 2)
        places: dict[str, Any] = {"h": rows_in(h, width), "act": rows_in(act, width // 2)}
        tokens = new_quantized(x, FP8.x.scale, *x.shape)
        quantize.launch_rows(hopper_backend.ready(x), rows, tokens)
        up.launch(tokens, step.weight, rows, activation=step.activation, **places)
        return h, act

    def down_forward(self, step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
        # Half of what bf16 has, so that Y leaves room for the weights' copies.
        act_rows, scores = rows_in(act, step.weight.values.shape[2]), hopper_backend.ready(step.scores)
        self._rows_and_sums("down_forward", step, act_rows, out, scores)

    def down_backward_act(
        self,
        step: BackendStep,
        needs: Sequence[bool],
        d_out: Tensor,
        h: Tensor,
        act: Tensor | None,
        *,
        overwrite_h: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, scores, d_expert = step.rows, hopper_backend.ready(step.scores), step.weight.values.shape[1]
        dh = h if overwrite_h else torch.empty_like(h)
        a_scaled, d_scores = new_rows(h, rows.num_rows, d_expert), torch.empty_like(scores)
        tokens = new_quantized(d_out, FP8.d_out.scale, *d_out.shape)
        quantize.launch_rows(hopper_backend.ready(d_out), rows, tokens)
        down_backward.launch(
            tokens,
            step.weight,
            rows_in(h, 2 * d_expert),
            scores,
            rows,
            activation=step.activation,
            dh=rows_in(dh, 2 * d_expert),
            a_scaled=rows_in(a_scaled, d_expert),
            d_scores=d_scores,
            workspace=scores.new_empty(down_backward.score_partials(d_expert), rows.num_rows),
        )
        return dh, d_scores, a_scaled

    def up_backward_act(self, step: BackendStep, dh: Tensor, dx: Tensor) -> None:
        self._rows_and_sums("up_backward_act", step, rows_in(dh, step.weight.values.shape[2]), dx, None)

    def weight_gradient(self, rows: Addresses, of: OuterSum) -> Tensor:
        """Some of a token's columns at a time, whose transpose takes at most 3/4 of the ordered rows': so a layer's peak is not
        above bf16's (docs/fp8.md, Memory)."""
        left, like, width, d_model = of.left, of.like, width_of(of.ordered), of.left.shape[1]
        f32 = like.dtype == torch.float32
        dw = torch.empty_like(like, dtype=torch.float32 if f32 else left.dtype)
        name = "up_backward_weight" if of.transposed else "down_backward_weight"
        before = left.new_empty(rows.num_experts + 1, dtype=torch.int32)
        quantize.launch_block_offsets(rows, before)
        turned = self._turned(rows_in(of.ordered, width), range(width), rows, before, gather=False)
        tokens = new_quantized(left, FP8.x.scale, *left.shape)
        quantize.launch_rows(hopper_backend.ready(left), rows, tokens)
        for columns in in_slices(d_model, 1 if f32 else -(-4 * d_model // (3 * width))):
            part = self._turned(tokens, columns, rows, before, gather=True)
            operands, first = (
                ((turned, part), (0, columns.start)) if of.transposed else ((part, turned), (columns.start, 0))
            )
            weight_fp8.launch(name, *operands, rows, before, dw=dw, first=first, f32=f32, accumulate=False)
            del part, operands  # before the next one is allocated
        return cast(dw, like.dtype)

    def _turned(self, of: Quantized, columns: range, rows: Addresses, before: Tensor, *, gather: bool) -> Quantized:
        length = quantize.most_blocks(rows.num_rows, rows.num_experts) * quantize.BLOCK
        out = new_quantized(of.values, FP8.of_dw.scale, len(columns), length)
        quantize.launch_transpose(of, rows, before, columns, out, gather=gather)
        return out

    def _rows_and_sums(self, name: str, step: BackendStep, a: Quantized, out: Tensor, scores: Tensor | None) -> None:
        """The sums over a token's rows of a W^T, some columns at a time, as `hopper_backend` has them. name: of the product."""
        rows, weights = step.rows, step.weight
        for columns in column_slices(rows.num_rows, out.shape[1], 2 * weights.values.nbytes):
            made = out.new_empty(rows.num_rows, len(columns))
            linear.launch(a, weights, rows, columns=columns, out=made, name=name)
            launch_combine(made, rows, scores=scores, columns=columns, out=out)
            del made  # before the next one is allocated


def _orders(
    weight: Tensor, orders: tuple[bool, bool], place: Tensor | None = None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """A record of a weight, and its orders, which one pass fills.  orders: whether forward's and the transpose are in it.
    place: a record of its own for the transpose."""
    record = new_weights(weight, weight.shape, sum(orders))
    back = record if orders[1] else place
    to = weights_in(record[0], *weight.shape[1:]) if orders[0] else None
    return record, to, None if back is None else weights_in(back[-1], *weight.shape[:0:-1])


class Plain:
    """By plain torch operations: what the kernels compute, of numbers in x's dtype that are e4m3 times their scales."""

    READS_ACT = False
    build_dispatch = staticmethod(torch_backend.build_dispatch)
    rows_of = staticmethod(torch_backend.rows_of)

    @staticmethod
    def forward_weight(
        weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None, place: Tensor | None = None
    ) -> Tensor:
        if place is not None:
            place.copy_(Plain.keep(weight, dtype)[1:])
        if kept is None:
            return _rounded(cast(weight, dtype), FP8.weights)
        return from_e4m3(torch, weights_in(kept[0], *weight.shape[1:]), "128x128").to(dtype)

    @staticmethod
    def backward_weight(weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None) -> Tensor:
        """As forward has it, of which torch's products give the same bits: transposing changes no number."""
        if kept is None:
            return Plain.forward_weight(weight, dtype, rows, None)
        return from_e4m3(torch, weights_in(kept[-1], *weight.shape[:0:-1]), "128x128").to(dtype).mT.contiguous()

    @staticmethod
    def keep(weight: Tensor, dtype: torch.dtype) -> Tensor:
        """As that of `Hopper`."""
        made, record = to_e4m3(torch, cast(weight, dtype), "128x128"), new_weights(weight, weight.shape, 2)
        for values, scales, to in (
            (*made, weights_in(record[0], *weight.shape[1:])),
            (made.values.mT, made.scales.mT, weights_in(record[1], *weight.shape[:0:-1])),
        ):
            to.values.copy_(values), to.scales.copy_(scales)
        return record

    def up_forward(self, step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
        made = torch_backend.up_forward(step, _rounded(x, FP8.x), None, None)
        return _to_record(made[0], h), _to_record(made[1])

    def down_forward(self, step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
        torch_backend.down_forward(step, _from_record(act, step.weight.dtype), out, overwrite_act=overwrite_act)

    def down_backward_act(
        self,
        step: BackendStep,
        needs: Sequence[bool],
        d_out: Tensor,
        h: Tensor,
        act: Tensor | None,
        *,
        overwrite_h: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        d_out, h = _rounded(d_out, FP8.d_out), _from_record(h, d_out.dtype)
        made = torch_backend.down_backward_act(step, needs, d_out, h, act, overwrite_h=overwrite_h)
        dh, d_scores, a_scaled = made
        return None if dh is None else _to_record(dh), d_scores, None if a_scaled is None else _to_record(a_scaled)

    def up_backward_act(self, step: BackendStep, dh: Tensor, dx: Tensor) -> None:
        torch_backend.up_backward_act(step, _from_record(dh, step.weight.dtype), dx)

    def weight_gradient(self, rows: Dispatch, of: OuterSum) -> Tensor:
        left = _rounded(of.left, FP8.x)
        return torch_backend.weight_gradient(rows, of._replace(left=left, ordered=_from_record(of.ordered, left.dtype)))


def _rounded(values: Tensor, operand: Operand) -> Tensor:
    return in_e4m3(torch, values, operand.scale).to(values.dtype)  # type: ignore[no-any-return]


def _to_record(rows: Tensor, place: Tensor | None = None) -> Tensor:
    record = new_rows(rows, *rows.shape) if place is None else place
    made, to = to_e4m3(torch, rows, "1x128"), rows_in(record, rows.shape[1])
    to.values.copy_(made.values), to.scales.copy_(made.scales)
    return record


def _from_record(record: Tensor, dtype: torch.dtype) -> Tensor:
    return from_e4m3(torch, rows_in(record, width_of(record)), "1x128").to(dtype)
