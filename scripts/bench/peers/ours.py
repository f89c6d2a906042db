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
    from blazeproto.autograd.call import BackendStep, OuterSum

    x, d_out, scores = inputs.x.detach(), inputs.grad_output, inputs.scores.detach()
    up_proj, down_proj = inputs.gate_up_proj.detach(), inputs.down_proj.detach()
    rows = backend.rows_of(dispatch)
    up, down = BackendStep(rows, up_proj), BackendStep(rows, down_proj, scores=scores)
    h, act = backend.up_forward(up, x, None, None)
    out, dx = torch.empty_like(x), torch.empty_like(x)
    backend.down_forward(down, act, out, overwrite_act=True)
    del act
    dh, d_scores, a_scaled = backend.down_backward_act(down, (True, True, True), d_out, h, None, overwrite_h=True)
    assert dh is not None and a_scaled is not None
    d_down = backend.weight_gradient(rows, OuterSum(d_out, a_scaled, down_proj, None, gather=True, transposed=False))
    backend.up_backward_act(up, dh, dx)
    d_up = backend.weight_gradient(rows, OuterSum(x, dh, up_proj, None, gather=True, transposed=True))
    return out, dx, d_up, d_down, d_scores
