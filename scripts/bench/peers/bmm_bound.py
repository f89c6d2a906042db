"""A bound of dense products: torch.bmm on tokens already gathered and spread evenly over the experts.

SonicMoE's own "upper bound": torch.bmm, a fused SwiGLU, torch.bmm, a fused gather-sum. It does no dispatch and no
gather, and its backward stops at the gradient of the gathered tokens, so it does less than a layer; a program that
fuses more can still beat it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program

TILE = 2048  # elements one Triton program handles


@triton.jit
def _swiglu_forward(h_ptr, act_ptr, elements, n: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    gate_at = (i // n) * 2 * n + i % n
    gate = tl.load(h_ptr + gate_at, mask=mask).to(tl.float32)
    up = tl.load(h_ptr + gate_at + n, mask=mask).to(tl.float32)
    tl.store(act_ptr + i, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=mask)


@triton.jit
def _swiglu_backward(h_ptr, dact_ptr, dh_ptr, elements, n: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    gate_at = (i // n) * 2 * n + i % n
    gate = tl.load(h_ptr + gate_at, mask=mask).to(tl.float32)
    up = tl.load(h_ptr + gate_at + n, mask=mask).to(tl.float32)
    dact = tl.load(dact_ptr + i, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dh_ptr + gate_at, dgate.to(tl.bfloat16), mask=mask)
    tl.store(dh_ptr + gate_at + n, (dact * gate * sigmoid).to(tl.bfloat16), mask=mask)


@triton.jit
def _combine_forward(  # type: ignore[no-untyped-def]
    y_ptr,
    scores_ptr,
    row_ptr,
    out_ptr,
    tokens,
    d: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (token < tokens)[:, None] & (column < d)[None, :]
    total = tl.zeros([TOKENS, WIDTH], dtype=tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_ptr + token * K + slot, mask=token < tokens, other=0).to(tl.int64)
        score = tl.load(scores_ptr + token * K + slot, mask=token < tokens, other=0.0)
        y = tl.load(y_ptr + row[:, None] * d + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += score[:, None] * y
    tl.store(out_ptr + token[:, None] * d + column[None, :], total.to(tl.bfloat16), mask=mask)


@triton.jit
def _combine_backward(  # type: ignore[no-untyped-def]
    grad_ptr,
    y_ptr,
    scores_ptr,
    row_ptr,
    dy_ptr,
    dscores_ptr,
    pairs,
    d: tl.constexpr,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    row = tl.load(row_ptr + pair, mask=inside, other=0).to(tl.int64)
    score = tl.load(scores_ptr + pair, mask=inside, other=0.0)
    dscore = tl.zeros([PAIRS], dtype=tl.float32)
    for start in range(0, d, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = inside[:, None] & (column < d)[None, :]
        grad = tl.load(grad_ptr + (pair // K)[:, None] * d + column[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row[:, None] * d + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dy_ptr + row[:, None] * d + column[None, :], (score[:, None] * grad).to(tl.bfloat16), mask=mask)
        dscore += tl.sum(grad * y, axis=1)
    tl.store(dscores_ptr + pair, dscore, mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        act = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
        _swiglu_forward[(triton.cdiv(act.numel(), TILE),)](h, act, act.numel(), n=act.shape[-1], BLOCK=TILE)
        return act

    @staticmethod
    def backward(ctx: Any, dact: torch.Tensor) -> torch.Tensor:
        (h,) = ctx.saved_tensors
        dh = torch.empty_like(h)
        _swiglu_backward[(triton.cdiv(dact.numel(), TILE),)](
            h, dact, dh, dact.numel(), n=dact.shape[-1], BLOCK=TILE
        )  # fmt: skip
        return dh


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, scores, rows)
        (tokens, K), d = scores.shape, y.shape[-1]
        out = y.new_empty(tokens, d)
        width = min(triton.next_power_of_2(d), TILE)
        grid = (triton.cdiv(tokens, TILE // width), triton.cdiv(d, width))
        _combine_forward[grid](y, scores, rows, out, tokens, d=d, K=K, TOKENS=TILE // width, WIDTH=width)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        y, scores, rows = ctx.saved_tensors
        dy, dscores, d = torch.empty_like(y), torch.empty_like(scores), y.shape[-1]
        width, pairs = min(triton.next_power_of_2(d), TILE), scores.numel()
        grid = (triton.cdiv(pairs, TILE // width),)
        _combine_backward[grid](
            grad, y, scores, rows, dy, dscores, pairs, d=d, K=scores.shape[1], PAIRS=TILE // width, WIDTH=width
        )  # fmt: skip
        return dy, dscores, None


def build(shape: Sizes, inputs: LayerInputs) -> Program:
    if shape.rows % shape.E:
        raise ValueError(f"T * K: expected a multiple of E = {shape.E} for an even spread, got {shape.rows}")
    each = shape.rows // shape.E
    pair = torch.arange(shape.rows, device=inputs.x.device)
    rows = (pair % shape.E * each + pair // shape.E).to(torch.int32)  # pairs dealt to the experts in turn, in order
    gathered = torch.empty(shape.rows, shape.d, dtype=inputs.x.dtype, device=inputs.x.device)
    with torch.no_grad():
        gathered[rows.long()] = inputs.x.repeat_interleave(shape.K, dim=0)
    gathered = gathered.view(shape.E, each, shape.d).requires_grad_()

    def forward() -> Any:
        h = torch.bmm(gathered, inputs.gate_up_proj.transpose(1, 2))
        y = torch.bmm(_SwiGLU.apply(h), inputs.down_proj.transpose(1, 2))
        return _Combine.apply(y, inputs.scores, rows)

    return layer_program(replace(inputs, x=gathered), forward, computes_layer=False)
