"""Whole layers by program: ours, SonicMoE's, transformers' block with `grouped_mm` and with Liger's kernels; how they are timed.

All are `ModuleProgram`s of the same weights and tokens in bf16, router and auxiliary loss included. transformers' block is
Qwen3-MoE's, whose router computes what ours does: a softmax over the chosen logits.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from blazeproto.gemm import Sizes
from blazeproto.lab.times import Call
from scripts.bench.common import MIB
from scripts.bench.markdown import OURS
from scripts.bench.peers import Build, LayerInputs, layers, modules
from scripts.bench.peers.modules import AUX_LOSS, ModuleProgram, router_weight
from scripts.bench.timing import Machine, Row

Experts = Callable[[Any, Tensor, Tensor, Tensor], Any]  # of the block's experts, x, ids (T, K) and scores (T, K)


def block(experts_of: Experts, shape: Sizes, inputs: LayerInputs) -> ModuleProgram:
    """transformers' Qwen3-MoE block on the weights of ``inputs``, with the auxiliary loss of its models.

    That loss counts a token K times, so that its coefficient is divided by K. Eval mode has no such loss.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    sizes = {"hidden_size": shape.d, "moe_intermediate_size": shape.n, "num_experts": shape.E}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=shape.K, norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = qwen3.Qwen3MoeSparseMoeBlock(config)
    layer.experts.gate_up_proj = nn.Parameter(inputs.gate_up_proj.detach())
    layer.experts.down_proj = nn.Parameter(inputs.down_proj.detach())
    layer.gate.weight = nn.Parameter(router_weight(shape, inputs))

    def call() -> tuple[Tensor, Tensor]:
        logits, scores, experts = layer.gate(inputs.x)
        loss = qwen3.load_balancing_loss_func((logits,), shape.E, shape.K) if layer.training else torch.zeros(())
        return experts_of(layer.experts, inputs.x, experts, scores), loss

    def weights() -> dict[str, Tensor]:
        named = {"router": layer.gate.weight, "up": layer.experts.gate_up_proj, "down": layer.experts.down_proj}
        return {name: cast(Tensor, each.grad) for name, each in named.items()}

    coefficient = torch.tensor(AUX_LOSS / shape.K, device=inputs.x.device)
    return ModuleProgram(layer, inputs.x, call, inputs.grad_output, coefficient, weights)


def _grouped_mm(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Any:
    return experts(x, ids, scores)


def _liger(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Any:
    """As liger_kernel's LigerExperts calls it."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, experts.gate_up_proj, experts.down_proj, ids.to(torch.int32), scores)


def _torch_grouped(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Any:
    """By torch's grouped_mm alone, as `peers.layers.torch_grouped` has it."""
    up, down, ids = experts.gate_up_proj, experts.down_proj, ids.to(torch.int32)
    shape = Sizes(len(x), x.shape[1], down.shape[2], len(down), ids.shape[1])
    return layers.torch_grouped(shape, LayerInputs(x, up, down, scores, ids, x)).forward()


BUILDS: dict[str, Build] = {
    OURS: modules.ours,
    "sonic": modules.sonic,
    "grouped_mm": partial(block, _grouped_mm),
    "torch_grouped": partial(block, _torch_grouped),
    "liger": partial(block, _liger),
}


# --------------------------------------------------------------------------------------------------------- measurement


def step(program: ModuleProgram) -> tuple[Tensor, Tensor]:
    """Forward and backward; the gradients are given back at once, so that no program's lie there while another runs."""
    made = program.forward_backward()
    program.clear()
    return made


def calls_of(program: ModuleProgram) -> dict[str, Call]:
    return {"fwd": program.forward, "fwdbwd": partial(step, program)}


def figures(programs: Mapping[str, Mapping[str, Call]], machine: Machine) -> dict[str, Row]:
    """Kernel figures of every part of every program, and its last part's peak. All have the same parts, and run in turn."""
    parts = [*next(iter(programs.values()))]
    found: dict[str, Row] = {name: {} for name in programs}
    for part in parts:
        for name, each in machine.kernel_figures({name: each[part] for name, each in programs.items()}, part).items():
            found[name] |= each
    for name, calls in programs.items():
        found[name]["peak_MiB"] = round(machine.peak_bytes(calls[parts[-1]]) / MIB, 1)
    return found
