"""How long each step of a layer takes, alone, on a Hopper GPU: the measured column of `explain`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.lab.calls import Case
from blazeproto.lab.steps import LayerCall, product_calls
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


def measured(layer: MoE, x: Tensor, routing: Any, of: LayerCall) -> dict[tuple[str, str], float]:
    """Milliseconds of a layer's steps by (phase, name), those of `steps_of` that are kernels of this package or a sum.

    x (T, d) in bf16, routing of it by the layer's router.  of: what `steps_of` makes the steps of. What is missing: steps of
    other routers, of choices and of the shared expert.
    """
    with torch.cuda.device(x.device), torch.autocast("cuda", enabled=False):
        calls = _experts(layer, x, routing, of) | _router(layer, x, routing, of)
        return {step: cold_ms(call) for step, call in calls.items()}


def _dispatch(layer: MoE, routing: Any) -> Any:
    options: dict[str, Any] = {"num_experts": layer.num_experts, "row_capacity": layer.row_capacity}
    if routing.pair_tokens is None:
        return build_dispatch(routing.experts.contiguous(), **options)
    return build_dispatch_varying(routing.experts, routing.pair_tokens, routing.token_offsets, **options)


def _experts(layer: MoE, x: Tensor, routing: Any, of: LayerCall) -> dict[tuple[str, str], Call]:
    dtype = x.dtype
    masters = [layer.up_proj_weight.detach().contiguous(), layer.down_proj.detach().contiguous()]
    up, down = (weight.to(dtype) for weight in masters)
    up_bias, down_bias = (
        None if bias is None else bias.detach().to(dtype).contiguous() for bias in (layer.up_bias, layer.down_proj_bias)
    )
    dispatch, scores = _dispatch(layer, routing), routing.scores.detach().float().contiguous().flatten()
    case = Case(x, up, down, scores, torch.randn_like(x), dispatch, layer.activation, up_bias, down_bias)
    made: dict[str, Tensor] = {}
    calls: dict[tuple[str, str], Call] = {("forward", "dispatch"): lambda: _dispatch(layer, routing)}
    for phase in ("forward", "backward"):
        for name, call in product_calls(of, phase).items():
            call = replace(call, f32=masters[0].dtype == torch.float32)
            out = {
                key: torch.zeros(o.shape, dtype=o.dtype, device=x.device) for key, o in call.outputs(case, made).items()
            }
            calls[phase, name] = partial(call.run, case, made, out)
            made.update({key: out[key] for key in call.made if key not in made})
            calls[phase, name]()
    other = torch.empty_like(x)
    calls["backward", "sum of dX"] = lambda: torch.add(x, case.d_out, out=other)
    if of.fused:
        calls["forward", "out to x's dtype"] = lambda: other.copy_(made["fused"])
    if "dx_fused" in made:  # x needs a gradient
        calls["backward", "dX to x's dtype"] = lambda: other.copy_(made["dx_fused"])
    if of.save == "recompute":
        calls["backward", "up_forward again"] = calls["forward", "up_forward"]
    if of.weight_itemsize != of.itemsize:
        for phase in ("forward", "backward"):
            calls[phase, "weights to x's dtype"] = lambda: [w.to(dtype) for w in masters]
    return calls


def _router(layer: MoE, x: Tensor, routing: Any, of: LayerCall) -> dict[tuple[str, str], Call]:
    """The operators' kernels, past torch's dispatcher."""
    if of.router == "other":
        return {}
    router: Any = layer.router
    weight, logits = router.weight.detach(), routing.logits.detach()
    d_logits = torch.randn_like(logits)
    calls: dict[tuple[str, str], Call] = {
        ("forward", "router product"): lambda: router_logits.kernel(x, weight, None),
        ("backward", "router product"): lambda: router_logits_backward.kernel(
            (True, True), d_logits, x, weight, None, logits
        ),
    }
    if of.router != "top-k":
        return calls
    score = (router.score, router.renormalize, router.scale)
    losses = (router.score, router.aux_loss, router.z_loss, False)
    experts, load, top_k = routing.experts, routing.load, layer.top_k
    d_scores, one = torch.randn_like(routing.scores), logits.new_ones(())
    groups = router.num_groups, router.top_groups
    calls["forward", "top-k"] = lambda: ops.route_top_k.kernel(logits, router.expert_bias, top_k, *score, *groups)
    calls["forward", "load and losses"] = lambda: ops.routing_losses.kernel(logits, experts, *losses)
    calls["backward", "top-k"] = lambda: ops.route_top_k_backward.kernel(logits, experts, d_scores, *score)
    if of.losses:
        calls["backward", "load and losses"] = lambda: ops.routing_losses_backward.kernel(
            logits, load, one, one, top_k, *losses
        )
        calls["backward", "sum of dlogits"] = lambda: torch.add(d_logits, d_logits)
    return calls
