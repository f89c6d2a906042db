"""blazeproto's own `dMoE`: MegaBlocks' formulation, experts as block-sparse products."""

from __future__ import annotations

import torch

from blazeproto.activations import activation_named
from blazeproto.blocksparse import topology_of
from blazeproto.blocksparse.dmoe import BlockExperts
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program


def build(shape: Sizes, inputs: LayerInputs, activation: str = "swiglu") -> Program:
    """The dispatch, the topologies and the padding are made in every forward."""
    up = inputs.gate_up_proj.detach().flatten(0, 1).contiguous().requires_grad_()
    down = inputs.down_proj.detach().mT.flatten(0, 1).contiguous().requires_grad_()
    halves = activation_named(activation).halves

    def metadata() -> tuple[object, ...]:
        dispatch = build_dispatch(inputs.experts, shape.E)
        return dispatch, *topology_of(dispatch, shape.n, halves)

    def forward() -> torch.Tensor:
        scores = inputs.scores.flatten()
        made: torch.Tensor = BlockExperts.apply(inputs.x, up, down, scores, metadata(), activation)
        return made

    leaves = (inputs.x, up, down, inputs.scores)
    return Program(forward, leaves, inputs.grad_output, (up, down), metadata=metadata)
