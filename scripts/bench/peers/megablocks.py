"""MegaBlocks (github.com/databricks/megablocks) with block-sparse products; needs its compiled operators and stk."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program


def build(shape: Sizes, inputs: LayerInputs) -> Program:
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    arguments = Arguments(
        hidden_size=shape.d,
        ffn_hidden_size=shape.n,
        moe_num_experts=shape.E,
        moe_top_k=shape.K,
        mlp_type="glu",
        mlp_impl="sparse",
        activation_fn=F.silu,
        bias=False,
        fp16=False,
        bf16=True,
        device=inputs.x.device,
    )
    layer = ParallelDroplessMLP(arguments)
    gate, up = inputs.gate_up_proj.detach().chunk(2, dim=1)  # its weights are (E * n, d), one matrix for each role
    with torch.no_grad():
        layer.mlp.w1.copy_(gate.reshape(-1, shape.d))
        layer.mlp.v1.copy_(up.reshape(-1, shape.d))
        layer.mlp.w2.copy_(inputs.down_proj.detach().transpose(1, 2).reshape(-1, shape.d))
    weights = (layer.mlp.w1, layer.mlp.v1, layer.mlp.w2)

    def forward() -> torch.Tensor:
        out: torch.Tensor = layer.sparse_forward_once(inputs.x, inputs.scores.to(inputs.x.dtype), inputs.experts)[0]
        return out.view(shape.T, shape.d)

    return Program(
        forward=forward,
        leaves=(inputs.x, *weights, inputs.scores),
        grad_output=inputs.grad_output,
        weights=weights,
    )
