"""`explain(layer, x)`: one forward and backward of a layer as a table of its steps.

print(explain(layer, x))                       # in IPython just: explain(layer, x)
explain(layer, x).rows[0].bytes_read
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd.backends import missing_for_kernels
from blazeproto.autograd.checks import check_dense, check_weights
from blazeproto.autograd.chunks import num_chunks
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.policy import SavePolicy
from blazeproto.autograd.ranks import refuse_ranks
from blazeproto.blocksparse.baselines import PlainMoE
from blazeproto.gemm import Sizes
from blazeproto.lab.steps import LayerCall, Step, Wanted, steps_of
from blazeproto.lab.tables import Drawn, Table, View, in_bytes, in_ms, in_operations
from blazeproto.layer import MoE
from blazeproto.router import Router
from blazeproto.router.choices import Hash
from blazeproto.runtime import checks

if TYPE_CHECKING:
    from rich.console import RenderableType


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
            steps: list[Step | Totals] = [step for step in self.rows if step.phase == phase]
            rows = [
                [step.name if isinstance(step, Step) else "sum", *self._numbers(step)]
                for step in [*steps, self.totals(phase)]
            ]
            tables.append(Table(columns, rows, left=[phase], last=1))
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

    def __rich__(self) -> RenderableType:
        return self.view().__rich__()

    def __repr__(self) -> str:
        return self.text()


@torch.no_grad()
def explain(layer: MoE, x: Tensor, token_ids: Tensor | None = None, *, measure: bool = True) -> Explanation:
    """What one forward and backward of ``layer`` on ``x`` does, step by step.

    layer: a `MoE`.  x: (..., d) floating point, as the layer takes it, on its device.
    token_ids: (...) integers, for hash routing alone.  measure: whether steps are timed where they can be.

    Each step has the arrays that it reads and writes, with their shapes; the bytes and operations; its floor on an H200
    (`blazeproto.cost`); what it keeps for backward. Backward makes the gradients of what requires one: of x, too, only if it
    does. The steps are those of the Hopper kernels, whatever the backend, and K, where it varies, is that of this x's routing:
    the router runs once, and then its load is waited for. On a Hopper GPU whose kernels
    the layer takes, each step is also timed: alone, ten times, by CUDA events, with an L2 cache that holds none of its
    inputs, unless ``measure`` is False; with precision="fp8" none is. That takes memory for all arrays of the layer at once.
    The layer is left as it was.

    TypeError or ValueError for another layer or x, and for weights and options that forward refuses; those of
    `blazeproto.blocksparse` are other layers; ValueError for one on "meta" where K varies. RuntimeError for a layer with a
    dispatcher.
    """
    if not isinstance(layer, MoE) or isinstance(layer, PlainMoE):  # which has other steps
        raise TypeError(f"layer: expected a MoE, got {type(layer).__name__}")
    refuse_ranks(layer.dispatcher, "explain")
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
    sizes = (layer.num_experts, layer.d_model, layer.d_expert)
    if (
        measure
        and not call.in_fp8
        and layer.backend != "torch"
        and len(tokens)
        and missing_for_kernels(x.device, dtype, *sizes) is None
    ):
        from blazeproto.lab.step_times import measured

        found = measured(layer, tokens.to(dtype).contiguous(), routing, call)
        steps = [replace(step, ms=found.get((step.phase, step.name))) for step in steps]
    return Explanation(
        f"MoE: T={call.sizes.T}, d={call.sizes.d}, n={call.sizes.n}, E={call.sizes.E}, K={_per_token(call)}, {layer.activation}, "
        f"save={call.save}, {'fp8 of ' if call.in_fp8 else ''}{str(dtype).removeprefix('torch.')}",
        tuple(steps),
        layer.saved_bytes(call.sizes.T, dtype, input_grad=x.requires_grad),
        _note(layer, call, dtype),
    )


def _per_token(call: LayerCall) -> str:
    if call.sizes.K and call.rows == call.sizes.rows:
        return str(call.sizes.K)
    return f"{call.rows / max(call.sizes.T, 1):.2f} in the mean"


def _note(layer: MoE, call: LayerCall, dtype: torch.dtype) -> str:
    notes = [f"Here the layer runs on {layer.runs_on(dtype)}."]
    if without := [name for name, wanted in call.wanted._asdict().items() if not wanted and _has(layer, name)]:
        notes.append(f"No gradient is made of {', '.join(without)}.")
    notes += ["Floors: the larger of operations and bytes at an H200's measured bf16 rate and bandwidth."]
    if dtype != torch.bfloat16:
        notes.append(f"x is {str(dtype).removeprefix('torch.')}: bytes are its own, but the rate is that of bf16.")
    if call.in_fp8:
        notes.append(
            "Products of fp8: at twice the rate of bf16. Short blocks that fill up an expert's rows are not counted."
        )
    if layer.quantized is not None:
        notes.append(f"Weights quantized before take {in_bytes(layer.quantized.nbytes)} beside the weights.")
    if call.num_chunks > 1:
        notes.append(
            f"The layer runs in {call.num_chunks} chunks of tokens; here its steps are those of the whole batch."
        )
    if call.shared and (call.wanted.x or call.wanted.shared_up or call.wanted.shared_down):
        notes.append("What the shared expert keeps for backward is not counted.")
    if call.router == "other":
        notes.append(
            f"What {type(layer.router).__name__}, no Router of this package, reads and keeps itself is not counted."
        )
    return " ".join(notes)


def _wanted(layer: MoE, x: Tensor) -> Wanted:
    shared = layer.shared_expert
    weights = [layer.up_proj_weight, layer.up_bias, layer.down_proj, layer.down_proj_bias]
    weights += [None, None] if shared is None else [getattr(shared, shared.up_name), shared.down_proj]
    up, up_bias, down, down_bias, *of_shared = [weight is not None and weight.requires_grad for weight in weights]
    of_router = any(parameter.requires_grad for parameter in layer.router.parameters())
    return Wanted(x.requires_grad, up, up_bias, down, down_bias, of_router, *of_shared)


def _has(layer: MoE, name: str) -> bool:
    """Whether a layer has what `Wanted` calls so."""
    return (layer.down_proj_bias is not None or "bias" not in name) and (
        layer.shared_expert is not None or "shared" not in name
    )


def _weights_in_fp8(layer: MoE, wanted: Wanted) -> str:
    both = layer.keep_transposed and layer.save != SavePolicy.RECOMPUTE and wanted.x
    return "before" if layer.quantized is not None else "both" if both else "each"


def _call_of(layer: MoE, tokens: Tensor, routing: Any, dtype: torch.dtype, wanted: Wanted) -> LayerCall:
    pairs, num_tokens = routing.experts.numel(), len(tokens)
    chunks = num_chunks(num_tokens, layer._chunk_tokens(num_tokens, dtype.itemsize))
    capacity = pairs if layer.row_capacity is None else min(layer.row_capacity, pairs)
    router, ours = layer.router, isinstance(layer.router, Router)
    weight = getattr(router, "weight", layer.down_proj)
    coefficients = (getattr(router, name, 0.0) for name in ("aux_loss", "z_loss"))
    top_k = None if routing.pair_tokens is not None else routing.experts.shape[1]
    by_top_k = ours and top_k is not None and not isinstance(router.choice, Hash)
    halves = activation_named(layer.activation).halves
    rows = pairs
    if not ours or top_k is None:  # the load says how many pairs run
        if routing.load.is_meta:
            raise ValueError("x: expected values, which say how many experts a token has, got a meta tensor")
        rows = int(routing.load.sum())
    return LayerCall(
        Sizes(num_tokens, layer.d_model, layer.d_expert, layer.num_experts, top_k or 0, halves),
        rows=min(rows, capacity),
        pairs=pairs,
        places=pairs if chunks > 1 else capacity,
        num_chunks=chunks,
        itemsize=dtype.itemsize,
        weight_itemsize=layer.down_proj.itemsize,
        router_itemsize=weight.itemsize,
        logit_itemsize=routing.scores.itemsize,
        save=layer.options.policy(trains_down=wanted.down_proj),
        fused=layer.combine != "gather",
        fused_backward=layer.combine == "fused_both",
        bias=layer.down_proj_bias is not None,
        shared=0 if layer.shared_expert is None else layer.shared_expert.down_proj.shape[1],
        router="top_k" if by_top_k else "choice" if ours else "other",
        losses=ours and any(coefficients),
        wanted=wanted,
        in_fp8="" if layer.precision == "bf16" else _weights_in_fp8(layer, wanted),
    )
