"""SonicMoE (PyPI sonic-moe 0.1.2.post1, Python >= 3.12), tuned in full by its own autotuner.

Its layer with fixed K takes router weights and chooses experts itself; the two autograd functions below its router
are called directly, so that top-k stays outside, with the metadata kernel it uses between the two. Tuning happens at
the first call for a shape and is kept on disk under QUACK_CACHE_DIR.
"""

from __future__ import annotations

import torch

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program


def interleave_gate_up(gate_up_proj: torch.Tensor) -> torch.Tensor:
    """(E, 2n, d), gate rows then up rows -> rows gate_0, up_0, gate_1, up_1, ..., as SonicMoE's kernels read them."""
    num_experts, rows, width = gate_up_proj.shape
    return (
        gate_up_proj.detach().view(num_experts, 2, rows // 2, width).transpose(1, 2).reshape(num_experts, rows, width)
    )


def gate_then_up(interleaved: torch.Tensor) -> torch.Tensor:
    """The way back of `interleave_gate_up`, of a gradient that may lie in any order."""
    num_experts, rows, width = interleaved.shape
    return interleaved.reshape(num_experts, rows // 2, 2, width).transpose(1, 2).reshape(num_experts, rows, width)


def build(shape: Sizes, inputs: LayerInputs) -> Program:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import (
        TC_topk_router_metadata_triton,
        _DownProjection,
        _UpProjection,
    )

    rows = shape.rows
    gate_up = interleave_gate_up(inputs.gate_up_proj).requires_grad_()
    down = inputs.down_proj

    def metadata() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        def indices(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int32, device=inputs.x.device)

        frequency, offsets = indices(shape.E), indices(shape.E + 1)
        gather, scatter, reverse_scatter = indices(rows), indices(rows), indices(rows)
        TC_topk_router_metadata_triton(inputs.experts, shape.E, frequency, offsets, gather, scatter, reverse_scatter)
        return offsets, gather, scatter, reverse_scatter

    def forward() -> torch.Tensor:
        offsets, gather, scatter, reverse_scatter = metadata()
        # (2n, d, E) and (d, n, E), views; made here, since a view's node keeps the stream it was made on
        up_weight, down_weight = gate_up.permute(1, 2, 0), down.permute(1, 2, 0)
        routing = (gather, scatter, reverse_scatter, None, False)  # no token offsets: K is fixed
        swiglu = ActivationType.SWIGLU
        act, h = _UpProjection.apply(
            inputs.x, up_weight, None, offsets, rows, shape.K, *routing, swiglu, False, False
        )  # fmt: skip
        out: torch.Tensor = _DownProjection.apply(
            act, h, down_weight, None, inputs.scores, offsets, shape.T, shape.K, *routing, swiglu
        )
        return out

    return Program(
        forward=forward,
        leaves=(inputs.x, gate_up, down, inputs.scores),
        grad_output=inputs.grad_output,
        weights=(gate_up, down),
        metadata=metadata,
    )
