"""Whole layers by program: ours, SonicMoE's, transformers' block with `grouped_mm` and with Liger's kernels; how they are timed.

All are `ModuleProgram`s of the same weights and tokens in bf16, router and auxiliary loss included. transformers' block is
Qwen3-MoE's, whose router computes what ours does: a softmax over the chosen logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.gemm import Sizes
from blazeproto.lab.times import Call, Rotation
from scripts.bench import cpu, module
from scripts.bench.common import MIB
from scripts.bench.markdown import OURS
from scripts.bench.paper.machine import Machine
from scripts.bench.peers import LayerInputs, modules, torch_grouped
from scripts.bench.peers.modules import AUX_LOSS, ModuleProgram

Row = dict[str, Any]
Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # of the block's experts, x, ids (T, K) and scores (T, K)
PARTS = ("fwd", "fwdbwd")


def ours(shape: Sizes, inputs: LayerInputs, weight: Tensor) -> ModuleProgram:
    """On the weights of ``inputs`` themselves: a second copy of a large layer's would leave no room for a peer."""
    program = modules.ours(shape, inputs, weight)
    layer = cast(MoE, program.module)
    layer.gate_up_proj = nn.Parameter(inputs.gate_up_proj.detach())
    layer.down_proj = nn.Parameter(inputs.down_proj.detach())
    return program


def block(experts_of: Experts, shape: Sizes, inputs: LayerInputs, weight: Tensor) -> ModuleProgram:
    """transformers' Qwen3-MoE block on the weights of ``inputs``, with the auxiliary loss of its models.

    That loss counts a token K times, so that its coefficient is divided by K. In eval mode there is none.
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
    layer.gate.weight = nn.Parameter(weight.clone())
    x = inputs.x

    def call() -> tuple[Tensor, Tensor]:
        logits, scores, experts = layer.gate(x)
        loss = qwen3.load_balancing_loss_func((logits,), shape.E, shape.K) if layer.training else torch.zeros(())
        return experts_of(layer.experts, x, experts, scores), loss

    def weights() -> dict[str, Tensor]:
        named = {"router": layer.gate.weight, "up": layer.experts.gate_up_proj, "down": layer.experts.down_proj}
        return {name: cast(Tensor, each.grad) for name, each in named.items()}

    coefficient = torch.tensor(AUX_LOSS / shape.K, device=x.device)
    return ModuleProgram(layer, x, call, inputs.grad_output, coefficient, weights)


def _grouped_mm(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    made: Tensor = experts(x, ids, scores)
    return made


def _liger(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """As liger_kernel's LigerExperts calls it."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    made: Tensor = LigerFusedMoEFunction.apply(x, experts.gate_up_proj, experts.down_proj, ids.to(torch.int32), scores)
    return made


def _torch_grouped(experts: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """By torch's grouped_mm alone, as `scripts.bench.peers.torch_grouped` has it."""
    up, down, ids = experts.gate_up_proj, experts.down_proj, ids.to(torch.int32)
    shape = Sizes(len(x), x.shape[1], down.shape[2], len(down), ids.shape[1])
    made: Tensor = torch_grouped.build(shape, LayerInputs(x, up, down, scores, ids, x)).forward()
    return made


Build = Callable[[Sizes, LayerInputs, Tensor], ModuleProgram]
BUILDS: dict[str, Build] = {
    OURS: ours,
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
    """Milliseconds of every part of every program, and its last part's peak. All programs have the same parts, and run in turn.

    On a GPU an overlap of kernels is counted once; the GPU is held until the host has queued a call (`module.times_of`).
    """
    parts = [*next(iter(programs.values()))]
    found: dict[str, Row] = {name: {} for name in programs}
    for part in parts:
        calls = {name: each[part] for name, each in programs.items()}
        if machine.device == "cuda":
            times = module.times_of({name: Rotation([call]) for name, call in calls.items()}, machine.rounds)
            for name, time in times.items():
                found[name] |= {f"{part}_ms": round(time.busy, 4), f"{part}_sum_ms": round(time.total, 4)}
                found[name][f"{part}_rounds_ms"] = [round(ms, 4) for ms in time.rounds]
        else:
            for name, ms in cpu.measure(calls, machine.rounds).items():
                found[name] |= {f"{part}_ms": round(ms, 4), f"{part}_rounds_ms": [round(ms, 4)]}
    for name, each in programs.items():
        found[name]["peak_MiB"] = round(machine.peak_bytes(each[parts[-1]]) / MIB, 1)
    return found
