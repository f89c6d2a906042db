"""The router's linear map, logits = x W^T: by bf16 tensor cores with fp32 sums on a Hopper GPU, in fp32 elsewhere.

A product of two bf16 numbers is exact in fp32, and a number in fp32 is the sum of two in bf16 but for 2^-16 of it. So an fp32
operand becomes two bf16 ones (logits_kernels.py has the formulas).

    forward     x (high W + low W)^T                       gemm/cuda/logits.cu; its high part alone for a weight in bf16
    backward    dX = dL W                                  fp16 rows and scales (gemm/logits.py), for a weight in bf16 on a Hopper
                dW = dL^T x                                GPU and E a multiple of 8; dL: the gradient of the logits, fp32

                dX = [high dL | low dL] [W; W]             gemm/cuda/linear.cu, elsewhere
                dW = [high dL | low dL]^T x                cuBLAS, in parts of LONGEST_SUM tokens: tensor cores cut the low bits
                                                           off their running sums, which shows after some thousand terms

In logits and dX a token's bits depend neither on other tokens nor on their number: both are products of this package, which sum
in an order that the widths alone decide. cuBLAS takes other algorithms for other numbers of tokens (docs/batch_invariance.md).

Router arithmetic in fp32 inside a bf16 model: Switch Transformer §2.4, "selective precision".

Floor: `blazeproto.cost.router_floor_ms`, which passes once over each product: 2 T d E operations, or 2 (T d + E d) + 4 T E bytes.
Two parts of an fp32 operand are two passes.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd.backends import has_dispatch_kernels
from blazeproto.autograd.operators import Gradients, define, without_autocast
from blazeproto.autograd.private import unobserved
from blazeproto.dispatch.structures import addresses_of_rows
from blazeproto.gemm.tiles import ALIGNMENT, BK, CHUNK
from blazeproto.router import fallback
from blazeproto.router.logits import finish_kernel, halve_kernel, multiply, split_kernel, units_of
from blazeproto.router.public import place_of
from blazeproto.router.topk import MAX_EXPERTS
from blazeproto.runtime.arch import HOPPER, arch_on

LONGEST_SUM = 4096  # tokens that tensor cores add up at once
PARTS_AT_ONCE = 64  # of the sum over tokens, whose results are in memory together


def _on_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    """Whether bf16 products make the logits. Asked inside the operators, which torch.compile does not trace."""
    return (
        x.dtype == torch.bfloat16
        and weight.dtype in (torch.bfloat16, torch.float32)
        and x.shape[0] > 0
        and x.shape[1] % CHUNK == 0
        and weight.shape[0] <= MAX_EXPERTS
        and has_dispatch_kernels("auto", x.device)
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices, or batches of them, in fp32."""
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    return multiply(a, b, out_dtype=torch.float32)


def _aligned(t: Tensor) -> Tensor:
    """Contiguous, from an address that TMA reads from."""
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _split(weight: Tensor, *parts: str) -> Tensor:
    """(E, d) in fp32 -> (parts E, d) in bf16, "high" or "low" over each other: what is nearest to it, and the rest."""
    made = weight.new_empty(len(parts), *weight.shape, dtype=torch.bfloat16)
    for part, out in zip(parts, made, strict=True):
        if part == "high":
            out.copy_(weight)
        else:
            torch.sub(weight, made[0], out=out)
    return made.flatten(0, 1)


def _rows_times(a: Tensor, matrix: Tensor) -> Tensor:
    """a (T, k) @ matrix (k, d), all bf16, by the product that makes dX of the experts: each row's sums are in k's order."""
    from blazeproto.gemm import linear

    if missing := -a.shape[1] % CHUNK:
        a, matrix = F.pad(a, (0, missing)), F.pad(matrix, (0, 0, 0, missing))
    (num_rows, _), out = a.shape, a.new_empty(len(a), matrix.shape[1])
    offsets = torch.arange(0, num_rows + 1, num_rows, dtype=torch.int32, device=a.device)
    at = addresses_of_rows(num_rows, offsets.data_ptr(), *place_of(a))
    linear.launch(a, matrix[None], at, transposed=True, out=out)
    return out


def _wide(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


# ---- forward -----------------------------------------------------------------------------------------------------


def _logits_fake(x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=_wide(x, weight))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, mask = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, mask, output)


def _backward(ctx: Any, d_logits: Tensor) -> Gradients:
    x, weight, *rest = ctx.saved_tensors
    if x is None:  # dX alone, for which its shape is enough
        x = d_logits.new_empty(1, 1, dtype=ctx.dtype).expand(len(d_logits), weight.shape[1])
    tensors = d_logits, x, weight, *rest
    hidden = not torch.is_grad_enabled() and unobserved(tensors)  # enabled: create_graph=True
    backward = router_logits_backward.kernel if hidden else router_logits_backward.gradients
    return *backward(ctx.needs_input_grad[:2], *tensors), None


@define(
    "router_logits(Tensor x, Tensor weight, Tensor? mask) -> Tensor", _logits_fake, setup=_setup, backward=_backward
)
def router_logits(x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """x (T, d) times weight (E, d) transposed, in fp32 at least and outside autocast -> (T, E).

    A token with a NaN or infinite logit gets NaN logits throughout, so that it shows in that token's output and in no other's.
    So does one whose mask (T,) bool is False; what x has there reaches no gradient. Backward keeps the weight, the mask, the
    logits and, where the weight is trained, x.
    """
    with without_autocast(x.device.type):
        if not _on_tensor_cores(x, weight):
            x = x.contiguous()  # so that other strides give the same bits
            wide = _wide(x, weight)
            return _masked(fallback.finish_logits(x.to(wide) @ weight.to(wide).t()), mask)
        parts = 2 if weight.dtype == torch.float32 else 1
        operand = _split(weight, "high", "low") if parts == 2 else _aligned(weight)
        place, x = place_of(x), _aligned(x)
        logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
        multiply(place, {"E": len(weight), "parts": parts}, x, operand, logits)
        return _masked(finish_kernel(len(weight)).over(len(x), place, (), made=logits), mask)


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill_(~mask[:, None], torch.nan)


# ---- backward ----------------------------------------------------------------------------------------------------


def _gradients_fake(needs: Sequence[bool], d_logits: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Gradients:
    return [torch.empty_like(t) if need else None for t, need in zip((x, weight), needs, strict=True)]


@define(
    "router_logits_backward(bool[] needs, Tensor d_logits, Tensor x, Tensor weight, Tensor? mask, Tensor logits) -> Tensor[]",
    _gradients_fake,
)
def router_logits_backward(
    needs: Sequence[bool], d_logits: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, logits: Tensor
) -> Gradients:
    """d_logits (T, E) -> those needed of dX (T, d) and dW (E, d), in the dtypes of x and the weight.

    A token with NaN logits passes no gradient.
    """
    (needs_x, needs_weight), num_experts = needs, len(weight)
    x = x.contiguous() if needs_weight else x
    if mask is not None and needs_weight:
        x = x.masked_fill(~mask[:, None], 0)  # times a gradient of 0 a NaN would be one
    d_x = d_weight = None
    with without_autocast(x.device.type):
        if not _on_tensor_cores(x, weight):
            d_logits = d_logits.masked_fill(logits[:, :1].isnan(), 0)
            if needs_x:
                d_x = (d_logits @ weight.to(d_logits.dtype)).to(x.dtype)
            if needs_weight:
                d_weight = (d_logits.t() @ x.to(d_logits.dtype)).to(weight.dtype)
            return d_x, d_weight
        if _in_fp16(x, weight):
            return _backward_in_fp16(needs, _aligned(d_logits), x, weight, logits)
        wide = weight.dtype == torch.float32
        parts = 3 if wide else 2
        split = x.new_empty(len(x), parts * num_experts)
        operands = d_logits.contiguous(), logits, split
        split_kernel(num_experts, parts).over(units_of(len(x), num_experts), place_of(x), operands, len(x))
        if needs_x:  # high high + low high + high low, where the weight has a low part
            operand = _split(weight, "high", "high", "low") if wide else torch.cat((weight, weight))
            d_x = _rows_times(split, operand)
        if needs_weight:
            halves = _sum_over_tokens(split[:, : 2 * num_experts], x)
            d_weight = (halves[:num_experts] + halves[num_experts:]).to(weight.dtype)
    return d_x, d_weight


def _in_fp16(x: Tensor, weight: Tensor) -> bool:
    """Whether one pass over fp16 rows makes each gradient. By widths and types: a token's dX depends on no number of tokens."""
    return weight.dtype == torch.bfloat16 and len(weight) % CHUNK == 0 and arch_on(x.get_device()) is HOPPER


def _backward_in_fp16(needs: Sequence[bool], d_logits: Tensor, x: Tensor, weight: Tensor, logits: Tensor) -> Gradients:
    """`router_logits_backward` by the formulas of gemm/logits.py."""
    from blazeproto.gemm.logits import backward_parts, backward_rows, backward_weight, backward_workspace

    (num_rows, num_experts), place, weight = d_logits.shape, place_of(x), _aligned(weight)
    halves, half_weight = (torch.empty_like(t, dtype=torch.float16) for t in (d_logits, weight))
    factors, scales = (d_logits.new_empty(-(-rows // BK) * BK) for rows in (num_experts, num_rows))
    halve_kernel(x.shape[1], False).over(num_experts, place, (weight, logits, factors), made=(half_weight, factors))
    halve_kernel(num_experts, True).over(num_rows, place, (d_logits, logits, factors), made=(halves, scales))
    sizes = num_rows, num_experts, x.shape[1], place[0]
    parts = backward_parts(*sizes)
    rows = num_rows if parts == 1 else -(-num_rows // (parts * BK)) * BK
    offsets = torch.arange(0, num_rows + rows, rows, dtype=torch.int32, device=x.device)
    offsets = offsets if parts == 1 else offsets.clamp_(max=num_rows)
    x = _aligned(x) if needs[1] else x
    d_x = x.new_empty(x.shape) if needs[0] else None
    sums, workspace = d_logits.new_empty(1, *weight.shape), d_logits.new_empty(backward_workspace(*sizes) * needs[1])
    for part in range(len(offsets) - 1):
        at = addresses_of_rows(num_rows, offsets.data_ptr() + offsets.itemsize * part, *place)
        if d_x is not None:
            backward_rows(halves, half_weight[None], scales, at, d_x)
        if needs[1]:
            backward_weight(halves, x, scales, at, sums, workspace, part > 0)
    return d_x, torch.div(sums[0], factors[:num_experts, None], out=torch.empty_like(weight)) if needs[1] else None


def _sum_over_tokens(split: Tensor, x: Tensor) -> Tensor:
    """split (T, C)^T x (T, d) -> (C, d) fp32, a part of LONGEST_SUM tokens after the other."""
    whole = len(x) - len(x) % LONGEST_SUM

    def sums() -> Iterator[Tensor]:
        for begin in range(0, whole, PARTS_AT_ONCE * LONGEST_SUM):
            part = slice(begin, min(begin + PARTS_AT_ONCE * LONGEST_SUM, whole))
            a, b = (t[part].unflatten(0, (-1, LONGEST_SUM)) for t in (split, x))
            yield _product(a.transpose(1, 2), b).sum(0)
        if whole < len(x):
            yield _product(split[whole:].t(), x[whole:])

    return reduce(Tensor.add_, sums())
