"""The programs of the figures: ours with its options, MegaBlocks without a gate too, and a layer as plain torch operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from blazeproto.activations import activation_named
from blazeproto.autograd import moe_mlp
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.peers import LayerInputs, Program, layer_program

Build = Callable[[Sizes, LayerInputs], Program]


def backend_of(inputs: LayerInputs) -> str:
    """The kernels on a GPU; torch operations in the short form on a CPU."""
    return "hopper" if inputs.x.is_cuda else "torch"


def ours(shape: Sizes, inputs: LayerInputs, *, method: Any = "tiled", **options: Any) -> Program:
    """method: how the dispatch is built, in every forward.  options: of moe_mlp (activation, save, combine)."""
    call: Any = partial(moe_mlp, num_experts=shape.E, backend=backend_of(inputs), **options)

    def forward() -> torch.Tensor:
        given: dict[str, Any] = {"topk_experts": inputs.experts}
        if method != "tiled":  # which the layer's own operator is
            given = {"dispatch": build_dispatch(inputs.experts, shape.E, method=method)}
        out: torch.Tensor = call(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores, **given)
        return out

    return layer_program(inputs, forward)


def megablocks(shape: Sizes, inputs: LayerInputs, activation: str = "swiglu") -> Program:
    """MegaBlocks' layer; without a gate SiLU stands where its program has GELU, and all else is the same.

    The program in scripts/bench/peers is left as it is: a change there would mark every figure that was measured beside a peer.
    """
    from scripts.bench.peers import megablocks as peer

    plain = mock.patch.object(F, "gelu", F.silu) if activation == "silu" else nullcontext()
    with plain:  # the function is looked up when the layer is built
        return peer.build(shape, inputs, "swiglu" if activation_named(activation).gated else "gelu")


def plain(shape: Sizes, inputs: LayerInputs) -> Program:
    """SwiGLU experts as plain torch operations, an expert after the other, on tokens gathered in the order of a sort.

    autograd keeps what MoEBlaze §5.2 says of conventional kernels: a, b, sigmoid(a), SiLU(a) and their product; the routed
    tokens and the experts' outputs too.
    """

    def forward() -> torch.Tensor:
        by_expert, pairs = torch.sort(inputs.experts.flatten(), stable=True)
        loads = torch.bincount(by_expert, minlength=shape.E).tolist()
        tokens = pairs // shape.K
        outputs = []
        routed = inputs.x[tokens].split(loads)
        for x, gate_up, down in zip(routed, inputs.gate_up_proj.unbind(), inputs.down_proj.unbind(), strict=True):
            gate, up = gate_up.chunk(2)
            a, b = x @ gate.t(), x @ up.t()
            silu = a * torch.sigmoid(a)
            outputs.append((silu * b) @ down.t())
        rows = torch.empty_like(pairs)
        rows[pairs] = torch.arange(len(pairs), device=pairs.device)
        per_token = torch.cat(outputs)[rows].view(shape.T, shape.K, shape.d)
        return torch.bmm(inputs.scores.to(per_token.dtype)[:, None], per_token)[:, 0]

    return layer_program(inputs, forward)


def of_peers(names: Mapping[str, object] | tuple[str, ...]) -> dict[str, Build]:
    """What builds each of these programs of scripts/bench/peers, which are SwiGLU layers."""

    def build(name: str, shape: Sizes, inputs: LayerInputs) -> Program:
        (program,) = peers.build(name, shape, [inputs])
        return program

    return {name: partial(build, name) for name in names}
