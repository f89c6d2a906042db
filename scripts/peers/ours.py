"""blazeproto's own expert MLP on the Hopper backend."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from bench_common import LayerShape

from blazeproto.autograd.policy import Rows
from peers import LayerInputs, Program


def build(shape: LayerShape, inputs: LayerInputs, **options: Any) -> Program:
    """`options` go to moe_mlp (save, combine, workspace_bytes)."""
    from blazeproto.autograd import moe_mlp

    def forward(**extra: Any) -> torch.Tensor:
        return moe_mlp(
            inputs.x,
            inputs.gate_up_proj,
            inputs.down_proj,
            inputs.scores,
            None if "dispatch" in extra else inputs.experts,
            num_experts=shape.E,
            backend="hopper",
            **options,
            **extra,
        )

    def metadata() -> tuple[torch.Tensor, ...]:
        made: tuple[torch.Tensor, ...] = torch.ops.blazeproto.dispatch.default(inputs.experts, shape.E, "hopper")
        return made

    without_dispatch = kernels = None
    if not options.get("workspace_bytes"):
        pair_indices, offsets, row_of_pair = metadata()
        dispatch = SimpleNamespace(
            expert_pair_indices=pair_indices,
            expert_token_offsets=offsets,
            token_index_map=row_of_pair,
            top_k=shape.K,
            pair_tokens=None,
            token_offsets=None,
        )
        without_dispatch = partial(forward, dispatch=dispatch)
        kernels = (
            None if options else partial(launch_kernels, inputs, Rows(pair_indices, offsets, row_of_pair, shape.K))
        )

    return Program(
        name="blazeproto",
        forward=forward,
        leaves=(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores),
        grad_output=inputs.grad_output,
        weights=(inputs.gate_up_proj, inputs.down_proj),
        metadata=metadata,
        without_dispatch=without_dispatch,
        kernels=kernels,
    )


def launch_kernels(inputs: LayerInputs, rows: Rows) -> tuple[object, ...]:
    """The kernels of a forward and a backward, launched as the operators of `moe_mlp` do, their outputs allocated."""
    from blazeproto.autograd import hopper_products as products

    x, d_out, scores = inputs.x.detach(), inputs.grad_output, inputs.scores.detach()
    up_proj, down_proj = inputs.gate_up_proj.detach(), inputs.down_proj.detach()
    where = products.rows_for(rows)
    h, act = products.up_forward(x, up_proj, None, where, "swiglu")
    out = products.down_forward(act, down_proj, None, scores, where, x.shape[0], "gather", overwrite_act=True)
    del act
    needs, dtype = (True, True, True, False), x.dtype  # of (h, scores, down_proj, down_bias)
    of_down = (d_out, down_proj, None, h, None, scores, where, "swiglu", needs, dtype)
    dh, d_scores, d_down, _ = products.down_backward(*of_down, overwrite_h=True)
    dx, d_up, _ = products.up_backward(dh, x, up_proj, where, (True, True, False), dtype)
    return out, dx, d_up, d_down, d_scores
