"""blazeproto's own expert MLP on the Hopper backend."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from bench_common import LayerShape

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

    without_dispatch = None
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

    return Program(
        name="blazeproto",
        forward=forward,
        leaves=(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores),
        grad_output=inputs.grad_output,
        weights=(inputs.gate_up_proj, inputs.down_proj),
        metadata=metadata,
        without_dispatch=without_dispatch,
    )
