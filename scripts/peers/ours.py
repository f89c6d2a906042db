"""blazeproto's own expert MLP on the Hopper backend."""

from __future__ import annotations

from typing import Any

import torch
from bench_common import LayerShape

from peers import LayerInputs, Program


def build(shape: LayerShape, inputs: LayerInputs, **options: Any) -> Program:
    """`options` go to moe_mlp (save, combine, workspace_bytes)."""
    from blazeproto.autograd import moe_mlp
    from blazeproto.dispatch import build_dispatch

    def forward(**extra: Any) -> torch.Tensor:
        return moe_mlp(
            inputs.x,
            inputs.gate_up_proj,
            inputs.down_proj,
            inputs.scores,
            inputs.experts,
            num_experts=shape.E,
            backend="hopper",
            **options,
            **extra,
        )

    def metadata() -> object:
        return build_dispatch(inputs.experts, shape.E)

    without_dispatch = None
    if not options.get("workspace_bytes"):
        made = metadata()
        without_dispatch = lambda: forward(dispatch=made)

    return Program(
        name="blazeproto",
        forward=forward,
        leaves=(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores),
        grad_output=inputs.grad_output,
        weights=(inputs.gate_up_proj, inputs.down_proj),
        metadata=metadata,
        without_dispatch=without_dispatch,
    )
