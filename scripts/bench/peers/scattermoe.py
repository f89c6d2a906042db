"""ScatterMoE (github.com/shawntan/scattermoe): grouped products in Triton that gather and scatter by themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program


def build(shape: Sizes, inputs: LayerInputs) -> Program:
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def metadata() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(expert of each row, pair of each row, end of each expert's rows)."""
        by_expert, pairs, ends = flatten_sort_count(inputs.experts.long(), num_experts=shape.E)
        return by_expert, pairs, ends

    def forward() -> torch.Tensor:
        routing = metadata()
        h = parallel_linear(inputs.x, inputs.gate_up_proj.permute(0, 2, 1), shape.K, *routing, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        gates = inputs.scores.to(h.dtype)
        out: torch.Tensor = parallel_linear(
            F.silu(gate) * up, inputs.down_proj.permute(0, 2, 1), 1, *routing, grouped_in=True, gates=gates
        )
        return out

    return layer_program(inputs, forward, metadata=metadata)
