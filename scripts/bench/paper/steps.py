"""Rows of what a review asks of one layer: what each step from conventional code to ours saves, save policies, activations.

Programs here compute SwiGLU experts, dispatch included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import SavePolicy, moe_mlp
from blazeproto.blocksparse import dmoe
from blazeproto.blocksparse.topology import topology_of
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench.paper import programs
from scripts.bench.paper.layers import Case, Row, layer_row
from scripts.bench.paper.machine import Machine
from scripts.bench.paper.programs import Build
from scripts.bench.peers import LayerInputs, Program, layer_program


def blocks(shape: Sizes, inputs: LayerInputs) -> Program:
    """`blazeproto.blocksparse.dMoE` without its router: padded copies of tokens, and X, H, act and Y kept for backward."""
    up = inputs.gate_up_proj.detach().flatten(0, 1).requires_grad_()
    down = inputs.down_proj.detach().mT.flatten(0, 1).requires_grad_()
    compute: Any = dmoe.BlockExperts.apply if inputs.x.is_cuda else dmoe.by_formulas

    def forward() -> torch.Tensor:
        dispatch = build_dispatch(inputs.experts, shape.E)
        blocked = (dispatch, *topology_of(dispatch, (shape.n,) * shape.E, shape.halves))
        out: torch.Tensor = compute(inputs.x, up, down, inputs.scores.flatten(), blocked, "swiglu")
        return out

    return Program(forward, (inputs.x, up, down, inputs.scores), inputs.grad_output, (up, down))


def on_copies(shape: Sizes, inputs: LayerInputs) -> Program:
    """Ours on a copy of a token for each of its experts, which is written in forward and kept (MoEBlaze §2.1); act too."""
    call: Any = partial(moe_mlp, num_experts=shape.E, backend=programs.backend_of(inputs), save="paper")
    experts = inputs.experts.reshape(-1, 1)

    def forward() -> torch.Tensor:
        copies, dispatch = inputs.x.repeat_interleave(shape.K, 0), build_dispatch(experts, shape.E, method="sort")
        scores = inputs.scores.reshape(-1, 1)
        weighed = call(copies, inputs.gate_up_proj, inputs.down_proj, scores, dispatch=dispatch)
        out: torch.Tensor = weighed.view(shape.T, shape.K, shape.d).sum(1)
        return out

    return layer_program(inputs, forward)


def waterfall(case: Case, machine: Machine) -> Row:
    """A program for each of `steps_tables.STEPS`, and MegaBlocks' own layer if it is wanted.

    Sums of kernels, since a host that waits can't be captured.
    """
    builds: dict[str, Build] = {
        "plain": programs.plain,
        "blocks": blocks,
        "copies": on_copies,
        "sort": partial(programs.ours, save="paper", method="sort"),
        "tiled": partial(programs.ours, save="paper"),
        "minimal": programs.ours,
        "fused": partial(programs.ours, combine="fused_both"),
        "recompute": partial(programs.ours, save="recompute"),
    }
    if "mb_sparse" in machine.peers:
        builds["mb_sparse"] = programs.megablocks
    return layer_row(case, builds, machine, graphs=False)


def policies(case: Case, machine: Machine) -> Row:
    """Ours with each save policy."""
    return layer_row(case, {each.value: partial(programs.ours, save=each.value) for each in SavePolicy}, machine)


def activations(case: Case, machine: Machine) -> Row:
    """Ours with each activation that has a gate, or none, as the case's."""
    gated = activation_named(case.activation).gated
    names = [name for name in ACTIVATIONS if activation_named(name).gated == gated]
    return layer_row(case, {name: partial(with_activation, name) for name in names}, machine)


def with_activation(name: str, shape: Sizes, inputs: LayerInputs) -> Program:
    """Ours; not compared with the first one's output, as each activation computes another function."""
    return replace(programs.ours(shape, inputs, activation=name), computes_layer=False)
