"""blazeproto's own expert MLP on the Hopper backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from blazeproto.dispatch import Dispatch, build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program


def build(shape: Sizes, inputs: LayerInputs, **options: Any) -> Program:
    """`options` go to moe_mlp (activation, save, combine, workspace_bytes)."""
    from blazeproto.autograd import moe_mlp
    from blazeproto.autograd.chunks import WHOLE

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
        made: tuple[torch.Tensor, ...] = torch.ops.blazeproto.dispatch.default(inputs.experts, shape.E, WHOLE, "hopper")
        return made

    without_dispatch = kernels = None
    if not options.get("workspace_bytes"):
        dispatch = build_dispatch(inputs.experts, shape.E)
        without_dispatch = partial(forward, dispatch=dispatch)
        kernels = None if options else partial(launch_kernels, inputs, dispatch)

    return layer_program(inputs, forward, metadata=metadata, without_dispatch=without_dispatch, kernels=kernels)


def launch_kernels(inputs: LayerInputs, dispatch: Dispatch) -> tuple[object, ...]:
    """The kernels of a forward and a backward, launched as the operators of `moe_mlp` do, their outputs allocated."""
    from blazeproto.autograd import hopper_backend as backend

    x, d_out, scores = inputs.x.detach(), inputs.grad_output, inputs.scores.detach()
    up_proj, down_proj = inputs.gate_up_proj.detach(), inputs.down_proj.detach()
    rows, no_bias = backend.rows_of(dispatch), None
    h, act = backend.up_forward(x, up_proj, no_bias, rows, "swiglu")
    out = torch.empty_like(x)
    backend.down_forward(act, down_proj, no_bias, scores, rows, out, "gather", overwrite_act=True)
    del act
    state = (h, None, scores, down_proj, no_bias, rows, "swiglu")
    dh, d_scores, a_scaled = backend.down_backward_act((True, True, True), d_out, *state, overwrite_h=True)
    assert dh is not None and a_scaled is not None
    d_down = backend.weight_gradient(d_out, a_scaled, down_proj, rows, gather=True, transposed=False)
    dx = backend.up_backward_act(dh, x, up_proj, rows)
    d_up = backend.weight_gradient(x, dh, up_proj, rows, gather=True, transposed=True)
    return out, dx, d_up, d_down, d_scores
