"""How long each step of a layer takes, alone, on a Hopper GPU: the measured column of `explain`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.lab.steps import Shape
from blazeproto.layer import MoE
from blazeproto.router import ops
from blazeproto.router.linear import router_logits, router_logits_backward

ROUNDS, WARMUPS = 10, 3
FLUSH_NUMBERS = 2**26  # fp32, read between two runs: five times an H200's L2 cache
MOST_FLUSHES = 128  # some ten milliseconds, in which the host queues a call

Call = Callable[[], object]


def cold_ms(call: Call, rounds: int = ROUNDS) -> float:
    """Median milliseconds of one call on the current GPU and stream, by CUDA events, with none of its inputs in the L2 cache.

    The GPU reads other memory while the host queues the call, so launches are not timed, and nothing in the cache need be
    written back first. The call must not wait for the GPU.
    """
    for _ in range(WARMUPS):
        call()
    other = torch.zeros(FLUSH_NUMBERS, device="cuda")
    samples: list[float] = []
    flushes = 2
    while len(samples) < rounds:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(flushes):
            other.sum()
        start.record()
        call()
        end.record()
        late = start.query()  # the GPU was through with the reading before the host with the call
        end.synchronize()
        if late and flushes < MOST_FLUSHES:
            flushes *= 2
        else:
            samples.append(float(start.elapsed_time(end)))
    return statistics.median(samples)


def measured(layer: MoE, x: Tensor, routing: Any, shape: Shape) -> dict[tuple[str, str], float]:
    """Milliseconds of a layer's steps by (phase, name), those of `steps_of` that are kernels of this package or a sum.

    x (T, d) in bf16, routing of it by the layer's router, shape of both. What is missing: steps of other routers, of choices
    and of the shared expert.
    """
    with torch.cuda.device(x.device), torch.autocast("cuda", enabled=False):
        calls = _experts(layer, x, routing, shape) | _router(layer, x, routing, shape)
        return {step: cold_ms(call) for step, call in calls.items()}


def _dispatch(layer: MoE, routing: Any) -> Any:
    options: dict[str, Any] = {"num_experts": layer.num_experts, "row_capacity": layer.row_capacity}
    if routing.pair_tokens is None:
        return build_dispatch(routing.experts.contiguous(), **options)
    return build_dispatch_varying(routing.experts, routing.pair_tokens, routing.token_offsets, **options)


def _experts(layer: MoE, x: Tensor, routing: Any, shape: Shape) -> dict[tuple[str, str], Call]:
    dtype, activation = x.dtype, layer.activation
    masters = [layer.up_proj_weight.detach().contiguous(), layer.down_proj.detach().contiguous()]
    up, down = (weight.to(dtype) for weight in masters)
    up_bias, down_bias = (
        None if bias is None else bias.detach().to(dtype).contiguous()
        for bias in (getattr(layer, f"{layer.up_name}_bias"), layer.down_proj_bias)
    )
    dispatch, scores = _dispatch(layer, routing), routing.scores.detach().float().contiguous()
    h, act = gemm.up_forward(x, up, dispatch, activation=activation, bias=up_bias)
    y, out, d_out = x.new_empty(dispatch.num_rows, shape.d), torch.empty_like(x), torch.randn_like(x)
    dh, a_scaled, d_scores = gemm.down_backward_act(d_out, down, h, scores, dispatch, activation=activation)
    d_up, d_down = (torch.empty_like(weight) for weight in masters)

    def up_forward() -> object:
        return gemm.up_forward(x, up, dispatch, activation=activation, bias=up_bias, h=h, act=act)

    def down_backward_act() -> object:
        outputs = {"dh": dh, "a_scaled": a_scaled, "d_scores": d_scores}
        return gemm.down_backward_act(d_out, down, h, scores, dispatch, activation=activation, **outputs)

    backward: dict[str, Call] = {
        "down_backward_act": down_backward_act,
        "down_backward_weight": lambda: gemm.down_backward_weight(d_out, a_scaled, dispatch, dw=d_down),
        "up_backward_act": lambda: gemm.up_backward_act(dh, up, dispatch, dx_rows=y),
        "combine": lambda: gemm.combine(y, dispatch, out=out),
        "up_backward_weight": lambda: gemm.up_backward_weight(dh, x, dispatch, dw=d_up),
        "sum of dX": lambda: torch.add(x, d_out, out=out),
    }
    forward: dict[str, Call] = {"dispatch": lambda: _dispatch(layer, routing), "up_forward": up_forward}
    if shape.fused:
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        forward["down_forward_fused"] = lambda: gemm.down_forward_fused(
            act, down, scores, dispatch, bias=down_bias, out_f32=sums
        )
        forward["out to x's dtype"] = lambda: out.copy_(sums)
    else:
        forward["down_forward"] = lambda: gemm.down_forward(act, down, dispatch, bias=down_bias, y=y)
        forward["combine"] = lambda: gemm.combine(y, dispatch, scores=scores, out=out)
    if shape.save == "recompute":
        backward["up_forward again"] = up_forward
    if shape.weight_itemsize != shape.itemsize:
        forward["weights to x's dtype"] = backward["weights to x's dtype"] = lambda: [w.to(dtype) for w in masters]
    if up_bias is not None and down_bias is not None:
        backward["bias_score_grad"] = lambda: gemm.bias_score_grad(d_out, down_bias, dispatch, d_scores=d_scores)
        backward["expert_row_sum of dO"] = lambda: gemm.expert_row_sum(d_out, dispatch, gather=True, scores=scores)
        backward["expert_row_sum of dH"] = lambda: gemm.expert_row_sum(dh, dispatch)
    named = (("forward", forward), ("backward", backward))
    return {(phase, name): call for phase, calls in named for name, call in calls.items()}


def _router(layer: MoE, x: Tensor, routing: Any, shape: Shape) -> dict[tuple[str, str], Call]:
    """The operators' kernels, past torch's dispatcher."""
    if shape.router == "other":
        return {}
    router: Any = layer.router
    weight, logits = router.weight.detach(), routing.logits.detach()
    d_logits = torch.randn_like(logits)
    calls: dict[tuple[str, str], Call] = {
        ("forward", "router product"): lambda: router_logits.kernel(x, weight),
        ("backward", "router product"): lambda: router_logits_backward.kernel(
            (True, True), d_logits, x, weight, logits
        ),
    }
    if shape.router != "top_k":
        return calls
    score = (router.score, router.renormalize, router.scale)
    losses = (router.score, router.aux_loss, router.z_loss)
    experts, load, top_k = routing.experts, routing.load, layer.top_k
    d_scores, one = torch.randn_like(routing.scores), logits.new_ones(())
    calls["forward", "top-k"] = lambda: ops.route_top_k.kernel(logits, router.expert_bias, top_k, *score)
    calls["forward", "load and losses"] = lambda: ops.routing_losses.kernel(logits, experts, *losses)
    calls["backward", "top-k"] = lambda: ops.route_top_k_backward.kernel(logits, experts, d_scores, *score)
    if shape.losses:
        calls["backward", "load and losses"] = lambda: ops.routing_losses_backward.kernel(
            logits, load, one, one, top_k, *losses
        )
        calls["backward", "sum of dlogits"] = lambda: torch.add(d_logits, d_logits)
    return calls
