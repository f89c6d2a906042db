"""The fallback in the place of the kernels: for tests of what operators do around a launch."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from blazeproto.gemm import logits as gemm_logits
from blazeproto.router import fallback, linear, losses, ops, pairs
from blazeproto.router.kinds import GOLDEN
from blazeproto.router.public import RowKernel
from blazeproto.runtime import arrays

Compute = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]
BY_ROWS: dict[str, Compute] = {  # (constants, numbers, *operands) -> the outputs, which are the last operands
    "topk_route": lambda c, _, logits, bias, *made: fallback.topk_route(
        logits, c["top_k"], bias=bias if c["biased"] else None, **scoring(c), **groups_of(c)
    ),
    "topk_route_backward": lambda c, _, *given: fallback.topk_route_backward(*given[:3], **scoring(c)),
    "score_pairs": lambda c, _, *given: fallback.score_pairs(*given[:3], **scoring(c)),
    "score_pairs_backward": lambda c, _, *given: fallback.score_pairs_backward(*given[:4], **scoring(c)),
    "routing_losses_backward": lambda c, numbers, *given: fallback.routing_losses_backward(
        *given[:4], numbers[1], score=c["score"], balance=c["balance"], z=c["z"]
    ),
    "hash_route": lambda c, numbers, ids, _: fallback.hash_route(
        ids, c["num_experts"], c["top_k"], seed=numbers[0] * pow(GOLDEN, -1, 2**32) - 1
    ),
    "finish_logits": lambda c, _, logits: fallback.finish_logits(logits),
    "split_gradient": lambda c, _, *given: fallback.split_gradient(*given[:2], c["parts"]),
    "halve_rows": lambda c, _, *given: halve_rows(c["gradient"], *given),
}


def scoring(constants: dict[str, Any]) -> dict[str, Any]:
    together = constants.get("renormalize", constants.get("together"))
    return {"score": constants["score"], "renormalize": together, "scale": constants["scale"]}


def groups_of(constants: dict[str, Any]) -> dict[str, int]:
    return {name: constants[name] for name in ("num_groups", "top_groups")}


def halve_rows(
    gradient: bool,
    rows: torch.Tensor,
    logits: torch.Tensor,
    factors: torch.Tensor,
    made: torch.Tensor,
    scales: torch.Tensor,
) -> Tensors:
    """The twin of `halve_kernels.halve_rows`."""
    wide, least = rows.float(), 15 if gradient else 117
    if gradient:
        wide = (wide * factors[: rows.shape[1]]).masked_fill(logits[:, :1].isnan(), 0)
    largest = wide.where(wide.isfinite(), 0).abs().amax(1)
    exponent = (largest.view(torch.int32) >> 23).clamp(min=least)
    raised, lowered = ((bits << 23).view(torch.float32) for bits in (268 - exponent, exponent - 14))
    padded = scales.clone() if not gradient else torch.zeros_like(scales)
    padded[: len(rows)] = lowered.masked_fill(largest == 0, 0) if gradient else lowered
    return (wide * raised[:, None]).half(), padded


def fill(outputs: Sequence[torch.Tensor], made: Any) -> None:
    for output, result in zip(outputs, made if isinstance(made, tuple) else (made,), strict=True):
        assert output.shape == result.shape and output.dtype == result.dtype
        output.copy_(result)


def play_kernels(patch: pytest.MonkeyPatch) -> set[str]:
    """Launches fill their outputs by the fallback, on any device. Returns the names of those launched, which grow as they are."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    launched: set[str] = set()

    def over(kernel: RowKernel, num_rows: int, place: Any, given: Tensors, *numbers: int, made: Any = ()) -> Any:
        launched.add(kernel.name)
        operands = (*given, *made) if isinstance(made, tuple) else (*given, made)
        computed = BY_ROWS[kernel.name](kernel.constants, numbers, *(t.detach() for t in operands))
        fill(operands[-2:] if isinstance(computed, tuple) else operands[-1:], computed)
        return made

    def launch_losses(place: Any, operands: tuple[torch.Tensor, ...], **options: Any) -> None:
        launched.add("routing_losses")
        logits, experts, *outputs, _ = operands
        fill(outputs, fallback.routing_losses(logits.detach(), experts, **options))

    def launch_choice(
        place: Any, operands: tuple[Any, ...], by: str, options: Sequence[float], size: Any, limits: Any
    ) -> None:
        launched.add("choose_pairs")
        scores, experts, draws, *outputs = operands
        fill(outputs, fallback.choose_pairs(scores, experts, by, size, len(outputs[0]), draws=draws))

    def multiply(place: Any, call: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        launched.add("logits_product")
        fill([out], fallback.logits_product(x, weight, call["parts"]))

    def rows_times(a: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        launched.add("up_backward_act")
        return (a.float() @ matrix.float()).bfloat16()

    def rows_of(at: Any) -> slice:
        return slice(*(ctypes.c_int32 * 2).from_address(at.expert_token_offsets))

    def backward_rows(halves: torch.Tensor, weights: Any, scales: torch.Tensor, at: Any, out: torch.Tensor) -> None:
        launched.add("backward_rows")
        rows = rows_of(at)
        out[rows] = (scales[rows, None].double() * (halves[rows].double() @ weights[0].double())).bfloat16()

    def backward_weight(
        halves: torch.Tensor, x: Any, scales: torch.Tensor, at: Any, out: torch.Tensor, _: Any, accumulate: bool
    ) -> None:
        launched.add("backward_weight")
        rows = rows_of(at)
        made = halves[rows].double().t() @ (scales[rows, None].double() * x[rows].double())
        out[0] = made + (out[0] if accumulate else 0)

    def in_fp16(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and len(weight) % 8 == 0

    patch.setattr(gemm_logits, "backward_parts", lambda num_rows, *_: 1 + num_rows // 64)
    patch.setattr(linear, "_in_fp16", in_fp16)
    patch.setattr(gemm_logits, "backward_rows", backward_rows)
    patch.setattr(gemm_logits, "backward_weight", backward_weight)
    patch.setattr(gemm_logits, "backward_workspace", lambda *_: 0)
    patch.setattr(RowKernel, "over", over)
    patch.setattr(linear, "multiply", multiply)
    patch.setattr(linear, "_rows_times", rows_times)
    patch.setattr(losses, "launch", launch_losses)
    patch.setattr(pairs, "launch_choice", launch_choice)
    patch.setattr(arrays, "current_stream", lambda t: 0)
    patch.setattr(ops, "has_dispatch_kernels", lambda *_: True)
    return launched
