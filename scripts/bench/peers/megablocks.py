"""MegaBlocks (github.com/databricks/megablocks) with block-sparse products; needs its compiled operators and stk."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program


def build(shape: Sizes, inputs: LayerInputs, activation: str = "swiglu") -> Program:
    """activation: swiglu or gelu."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    arguments = Arguments(
        hidden_size=shape.d,
        ffn_hidden_size=shape.n,
        moe_num_experts=shape.E,
        moe_top_k=shape.K,
        mlp_type="glu" if activation == "swiglu" else "mlp",
        mlp_impl="sparse",
        activation_fn={"swiglu": F.silu, "gelu": F.gelu}[activation],
        bias=False,
        fp16=False,
        bf16=True,
        device=inputs.x.device,
    )
    layer = ParallelDroplessMLP(arguments)
    names = ("w1", "v1") if activation == "swiglu" else ("w1",)  # (E * n, d), one matrix for each role
    matrices = dict(zip(names, inputs.gate_up_proj.detach().chunk(len(names), dim=1), strict=True))
    matrices["w2"] = inputs.down_proj.detach().mT
    weights = tuple(getattr(layer.mlp, name) for name in matrices)
    with torch.no_grad():
        for weight, matrix in zip(weights, matrices.values(), strict=True):
            weight.copy_(matrix.reshape(-1, shape.d))

    def forward() -> torch.Tensor:
        out: torch.Tensor = layer.sparse_forward_once(inputs.x, inputs.scores.to(inputs.x.dtype), inputs.experts)[0]
        return out.view(shape.T, shape.d)

    return Program(
        forward=forward,
        leaves=(inputs.x, *weights, inputs.scores),
        grad_output=inputs.grad_output,
        weights=weights,
    )
