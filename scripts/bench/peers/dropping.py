"""Experts with a capacity, dropped or padded to it, as one batched product (`blazeproto.blocksparse.DroppingMoE`)."""

from __future__ import annotations

from typing import Any

import torch

from blazeproto.blocksparse import DroppingMoE
from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program


def build(
    shape: Sizes, inputs: LayerInputs, activation: str = "swiglu", capacity_factor: float | None = 1.0
) -> Program:
    """capacity_factor: None: as much as the largest load needs."""
    sizes = (shape.d, shape.n, shape.E, shape.K)
    with torch.device("meta"):
        layer = DroppingMoE(*sizes, activation=activation, capacity_factor=capacity_factor)
    names: Any = {"num_experts": shape.E, "up_bias": None, "down_bias": None, "options": layer.options}
    names |= {"pair_tokens": None, "token_offsets": None}

    def forward() -> torch.Tensor:
        return layer._experts(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores, inputs.experts, **names)

    return layer_program(inputs, forward, computes_layer=capacity_factor is None)
