"""`explain(layer, x)`: one forward and backward of a layer as a table of its steps.

print(explain(layer, x))                       # in IPython just: explain(layer, x)
explain(layer, x).rows[0].bytes_read
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.checks import check_dense, check_weights
from blazeproto.autograd.chunks import num_chunks
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.policy import SavePolicy
from blazeproto.autograd.ranks import refuse_ranks
from blazeproto.blocksparse.baselines import PlainMoE
from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.gemm import Sizes
from blazeproto.gemm.recipe import RECIPES
from blazeproto.lab.calls import Case
from blazeproto.lab.steps import LayerCall, Step, product_calls, steps_of
from blazeproto.lab.tables import Drawn, Table, View, in_bytes, in_ms, in_operations
from blazeproto.lab.times import Call, cold_ms
from blazeproto.layer import MoE
from blazeproto.router import Router, ops
from blazeproto.router.choices import Hash
from blazeproto.router.linear import router_logits, router_logits_backward
from blazeproto.runtime import checks


@dataclass(frozen=True)
class Totals:
    """Sums over steps; ms is None where none was measured."""

    bytes_read: int
    bytes_written: int
    operations: float
    floor_ms: float
    kept_bytes: int
    ms: float | None


@dataclass(frozen=True, repr=False)
class Explanation(Drawn):
    """The steps of a layer's forward and backward, in order, as `Step` has them.

    saved_bytes: what the experts keep for backward (`MoE.saved_bytes`, of this x); what the router keeps is in the rows too.
    """

    title: str
    rows: tuple[Step, ...]
    saved_bytes: int
    note: str

    @property
    def is_timed(self) -> bool:
        """Whether the steps were measured: on a Hopper GPU whose kernels the layer runs."""
        return any(step.ms is not None for step in self.rows)

    def totals(self, phase: str | None = None) -> Totals:
        """Sums over "forward", "backward" or, by default, both."""
        if phase is not None:
            checks.one_of("phase", phase, ("forward", "backward"))
        steps = [step for step in self.rows if phase in (None, step.phase)]
        return Totals(
            sum(step.bytes_read for step in steps),
            sum(step.bytes_written for step in steps),
            sum(step.operations or 0.0 for step in steps),
            sum(step.floor_ms for step in steps),
            sum(step.kept_bytes for step in steps),
            sum(step.ms or 0.0 for step in steps) if self.is_timed else None,
        )

    def view(self) -> View:
        """The tables, for terminals and notebooks: numbers by phase, then each step's arrays."""
        tables = []
        for phase in ("forward", "backward"):
            columns = [phase, "read", "written", "operations", "floor, ms"]
            columns += [*(["ms", "floor / ms"] if self.is_timed else []), "kept"]
            rows = [[step.name, *self._numbers(step)] for step in self.rows if step.phase == phase]
            tables.append(Table(columns, [*rows, ["sum", *self._numbers(self.totals(phase))]], left=[phase], last=1))
        columns = ["arrays of", "reads", "writes", "keeps for backward"]
        arrays = [
            [step.name, *(" ".join(map(str, part)) for part in (step.reads, step.writes, step.keeps))]
            for step in self.rows
        ]
        tables.append(Table(columns, arrays, left=columns))
        facts = {"kept by the experts": f"{in_bytes(self.saved_bytes)} (layer.saved_bytes)"}
        return View(self.title, facts, tables, self.note)

    def _numbers(self, of: Step | Totals) -> list[str]:
        moved = [in_bytes(of.bytes_read), in_bytes(of.bytes_written), in_operations(of.operations), in_ms(of.floor_ms)]
        timed = [in_ms(of.ms), f"{of.floor_ms / of.ms:.2f}" if of.ms else "–"] if self.is_timed else []
        return [*moved, *timed, in_bytes(of.kept_bytes) if of.kept_bytes else ""]

    def __rich__(self) -> View:
        return self.view()


@torch.no_grad()
def explain(layer: MoE, x: Tensor, token_ids: Tensor | None = None, *, measure: bool = True) -> Explanation:
    """Explains one forward and backward of ``layer`` on ``x``, step by step.

    layer: a `MoE`.  x: (..., d) floating point, as the layer takes it, on its device.
    token_ids: (...) integers, for hash routing alone.  measure: whether steps are timed where they can be.

    Each step has the arrays that it reads and writes, with their shapes; the bytes and operations; its floor on an H200
    (`blazeproto.cost`); what it keeps for backward. Backward makes the gradients of what requires one: of x, too, only if it
    does. The steps are the Hopper kernels', whatever the backend, and K, if it varies, is taken from this x's routing:
    the router runs once, and then its load is waited for. On a Hopper GPU whose kernels
    the layer takes, each step is also timed: alone, ten times, by CUDA events, with an L2 cache that holds none of its
    inputs, unless ``measure`` is False; with quantized operands none is. That takes memory for all arrays of the layer at once.
    The layer is left as it was.

    TypeError or ValueError for another layer or x, and for weights and options that forward refuses; the layers of
    `blazeproto.blocksparse` are refused too; ValueError for one on "meta" where K varies. RuntimeError for a layer with a
    dispatcher.
    """
    if not isinstance(layer, MoE) or isinstance(layer, PlainMoE):  # which has other steps
        raise TypeError(f"layer: expected a MoE, got {type(layer).__name__}")
    refuse_ranks(layer.dispatcher, "explain")
    checks.require(
        not layer.stored, "layer", "experts' weights that are not stored", f"stored {', '.join(layer.stored)}"
    )
    checks.boolean("measure", measure)
    check_dense("x", x)
    if x.dim() == 0 or x.shape[-1] != layer.d_model:
        raise ValueError(f"x: expected shape (..., {layer.d_model}), got {tuple(x.shape)}")
    if x.device != layer.down_proj.device:
        raise ValueError(f"x: expected device {layer.down_proj.device} (the layer's), got {x.device}")
    check_weights(layer.up_proj_weight, layer.down_proj, layer.up_bias, layer.down_proj_bias, layer.options)
    tokens = x.detach().reshape(-1, layer.d_model)
    routing = layer.router(tokens) if token_ids is None else layer.router(tokens, token_ids)
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype
    call = _call_of(layer, tokens, routing, dtype, _wanted(layer, x))
    steps = steps_of(call)
    if measure and not call.in_fp8 and len(tokens) and layer.runs_on(dtype) == "hopper":
        found = measured(layer, tokens.to(dtype).contiguous(), routing, call)
        steps = [replace(step, ms=found.get((step.phase, step.name))) for step in steps]
    T, d, n, E, K, _ = call.sizes
    per_token = K if K and call.rows == call.sizes.rows else f"{call.rows / max(T, 1):.2f} in the mean"
    return Explanation(
        f"MoE: T={T}, d={d}, n={n}, E={E}, K={per_token}, {layer.activation}, "
        f"save={call.save}, {f'{layer.precision} of ' if call.in_fp8 else ''}{str(dtype).removeprefix('torch.')}",
        tuple(steps),
        layer.saved_bytes(T, dtype, input_grad=x.requires_grad),
        _note(layer, call, dtype),
    )


def _note(layer: MoE, call: LayerCall, dtype: torch.dtype) -> str:
    router, without = type(layer.router).__name__, ", ".join(name for name, made in call.wanted.items() if not made)
    kept = _kept_bytes(layer)
    shared = call.shared and call.wants("x", "shared_up", "shared_down")
    notes = [
        (True, f"Here the layer runs on {layer.runs_on(dtype)}."),
        (without, f"No gradient is made of {without}."),
        (True, "Floors: the larger of operations and bytes at an H200's measured bf16 rate and bandwidth."),
        (
            dtype != torch.bfloat16,
            f"x is {str(dtype).removeprefix('torch.')}: bytes are its own, but the rate is that of bf16.",
        ),
        (
            call.in_fp8,
            "Products of fp8: at twice the rate of bf16. Short blocks that fill up an expert's rows are not counted.",
        ),
        (call.in_fp8, f"{layer.precision}: {call.recipe}."),
        (kept, f"Weights quantized before take {in_bytes(kept)} beside the weights."),
        (
            call.num_chunks > 1,
            f"The layer runs in {call.num_chunks} chunks of tokens; here its steps are those of the whole batch.",
        ),
        (shared, "What the shared expert keeps for backward is not counted."),
        (
            call.router == "other",
            f"What {router}, no Router of this package, reads and keeps itself is not counted.",
        ),
    ]
    return " ".join(note for holds, note in notes if holds)


def _kept_bytes(layer: MoE) -> int:
    """The bytes of quantized weights that a forward with gradients reads."""
    if layer.quantized is not None:
        return layer.quantized.nbytes
    return layer.kept.nbytes if layer.kept.keeps(layer.up_proj_weight, layer.down_proj_weight) else 0


def _wanted(layer: MoE, x: Tensor) -> dict[str, bool]:
    """As a `LayerCall` has it."""
    tensors = {"x": x, "up_proj": layer.up_proj_weight, "up_bias": layer.up_bias}
    tensors |= {"down_proj": layer.down_proj, "down_bias": layer.down_proj_bias}
    wanted = {name: tensor.requires_grad for name, tensor in tensors.items() if tensor is not None}
    wanted["router"] = any(parameter.requires_grad for parameter in layer.router.parameters())
    if (shared := layer.shared_expert) is not None:
        up, down = getattr(shared, shared.up_name), shared.down_proj
        wanted |= {"shared_up": up.requires_grad, "shared_down": down.requires_grad}
    return wanted


def _call_of(layer: MoE, tokens: Tensor, routing: Any, dtype: torch.dtype, wanted: dict[str, bool]) -> LayerCall:
    pairs, num_tokens = routing.experts.numel(), len(tokens)
    chunks = num_chunks(num_tokens, layer._chunk_tokens(num_tokens, dtype.itemsize))
    capacity = pairs if layer.row_capacity is None else min(layer.row_capacity, pairs)
    router, ours = layer.router, isinstance(layer.router, Router)
    weight = getattr(router, "weight", layer.down_proj)
    top_k = None if routing.pair_tokens is not None else routing.experts.shape[1]
    by_top_k = ours and top_k is not None and not isinstance(router.choice, Hash)
    rows = pairs
    if not ours or top_k is None:  # the load says how many pairs run
        if routing.load.is_meta:
            raise ValueError("x: expected values, which say how many experts a token has, got a meta tensor")
        rows = int(routing.load.sum())
    both = layer.keep_transposed and layer.save != SavePolicy.RECOMPUTE and wanted["x"]
    quantized = "before" if _kept_bytes(layer) else "both" if both else "each"
    return LayerCall(
        Sizes(
            num_tokens,
            layer.d_model,
            layer.d_expert,
            layer.num_experts,
            top_k or 0,
            activation_named(layer.activation).halves,
        ),
        rows=min(rows, capacity),
        pairs=pairs,
        places=pairs if chunks > 1 else capacity,
        num_chunks=chunks,
        itemsize=dtype.itemsize,
        weight_itemsize=layer.down_proj.itemsize,
        router_itemsize=weight.itemsize,
        logit_itemsize=routing.scores.itemsize,
        save=layer.options.policy(trains_down=wanted["down_proj"]),
        fused=layer.combine != "gather",
        fused_backward=layer.combine == "fused_both",
        bias=layer.down_proj_bias is not None,
        shared=0 if layer.shared_expert is None else layer.shared_expert.down_proj.shape[1],
        router="top-k" if by_top_k else "choice" if ours else "other",
        losses=ours and any(getattr(router, name, 0.0) for name in ("aux_loss", "z_loss")),
        wanted=wanted,
        in_fp8="" if layer.precision == "bf16" else quantized,
        recipe=RECIPES[layer.precision],
    )


# --- How long each step takes, alone ---------------------------------------------------------------------------------------


def measured(layer: MoE, x: Tensor, routing: Any, of: LayerCall) -> dict[tuple[str, str], float]:
    """Milliseconds of a layer's steps by (phase, name): the steps of `steps_of` that are kernels of this package or a sum.

    x (T, d) in bf16, routing of it by the layer's router.  of: the argument of `steps_of`. Steps of
    other routers, of choices and of the shared expert are not timed.
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
    calls |= {
        ("forward", "top-k"): lambda: ops.route_top_k.kernel(logits, router.expert_bias, top_k, *score, *groups),
        ("forward", "load and losses"): lambda: ops.routing_losses.kernel(logits, experts, *losses),
        ("backward", "top-k"): lambda: ops.route_top_k_backward.kernel(logits, experts, d_scores, *score),
    }
    if of.losses:
        calls |= {
            ("backward", "load and losses"): lambda: ops.routing_losses_backward.kernel(
                logits, load, one, one, top_k, *losses
            ),
            ("backward", "sum of dlogits"): lambda: torch.add(d_logits, d_logits),
        }
    return calls
