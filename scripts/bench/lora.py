"""LoRA on experts: `moe_mlp` with factors and frozen weights against full fine-tuning, and peft on transformers' grouped_mm.

    python -m scripts.bench.lora             # -> results/h200/lora.json on an H200
    python -m scripts.bench.lora --quick     # a quarter of the tokens, fewer rounds -> lora-quick.json

The experts alone, router excluded, all in bf16; low-rank factors on gate_up and down. x and scores require gradients everywhere,
and besides them the factors, or in full fine-tuning the weights. peft's wrappers put W + BA in the weights' place; "wrapped" is
the same wrappers with `blazeproto.integrations.peft`. Without peft and transformers these two are absent. Same inputs, same
factors. All programs run in one process, in turn (A B A B), five rounds. Times are the durations of the kernels, by the profiler,
the GPU being held until the host has queued a call.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.autograd import LowRank
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import MIB
from scripts.bench.layer import SMALL
from scripts.bench.peers import LayerInputs, Program
from scripts.bench.peers import layers as experts
from scripts.bench.peers.modules import agreement
from scripts.bench.running import Bench, Item, of_shape, run
from scripts.bench.timing import Machine, Row, part_times

SHAPE, QUICK_SHAPE = Sizes(32768, 2048, 768, 128, 8), Sizes(8192, 2048, 768, 128, 8)
RANK = 16
MOST_OF_FULL = 0.88  # of full fine-tuning's forward + backward; the bytes allow 0.80
LEAST_OVER_PEFT = 2.0


# ---------------------------------------------------------------------------------------------------------- programs


def factors_of(weight: Tensor, rank: int) -> LowRank:
    """Random factors of a weight (E, out, in), whose product is about half as large as the weight."""
    num_experts, width_out, width_in = weight.shape
    a = torch.randn(num_experts, rank, width_in, device=weight.device) * width_in**-0.5
    b = torch.randn(num_experts, width_out, rank, device=weight.device) * 0.5 * rank**-0.5
    return LowRank(a.to(weight.dtype).requires_grad_(), b.to(weight.dtype).requires_grad_())


def ours(shape: Sizes, inputs: LayerInputs, up: LowRank, down: LowRank) -> Program:
    """The weights frozen, the factors trained."""
    frozen = replace(inputs, gate_up_proj=inputs.gate_up_proj.detach(), down_proj=inputs.down_proj.detach())
    made = experts.ours(shape, frozen, up_factors=up, down_factors=down)
    return replace(made, leaves=(inputs.x, inputs.scores, *up, *down), layouts=(Tensor.detach,) * 4)


def by_peft(implementation: str, shape: Sizes, inputs: LayerInputs, up: LowRank, down: LowRank) -> Program:
    """peft's wrappers around transformers' experts, with these factors."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from blazeproto.integrations.peft import register

    register()
    sizes = {"num_experts": shape.E, "hidden_size": shape.d, "moe_intermediate_size": shape.n, "hidden_act": "silu"}
    with torch.device("meta"):
        experts = Qwen3MoeExperts(SimpleNamespace(**sizes, _experts_implementation=implementation))
    names, rank = ("gate_up_proj", "down_proj"), up.a.shape[1]
    for name in names:
        setattr(experts, name, nn.Parameter(getattr(inputs, name).detach(), requires_grad=False))
    model: Any = nn.ModuleDict({"experts": experts})
    targets = [f"experts.{name}" for name in names]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=targets), model)
    wrapper: Any = model["experts"]
    leaves = []
    for layer, factors in ((wrapper.base_layer, up), (wrapper, down)):
        flat = (factors.a.flatten(0, 1), factors.b.permute(1, 2, 0).flatten(1))
        for owner, values in zip((layer.lora_A, layer.lora_B), flat, strict=True):
            owner["default"].weight.data = values.detach().contiguous()
            leaves.append(owner["default"].weight)
    scores = inputs.scores.detach().to(inputs.x.dtype).requires_grad_()  # as its routers give them
    forward = partial(wrapper, inputs.x, inputs.experts.long(), scores)
    layouts = tuple(
        as_ours
        for factors in (up, down)
        for as_ours in (
            lambda a, like=factors.a: a.view_as(like),
            lambda b, like=factors.b: b.view(like.shape[1], -1, len(like)).permute(2, 0, 1),
        )
    )
    weights = (experts.gate_up_proj, experts.down_proj)
    return Program(forward, (inputs.x, scores, *leaves), inputs.grad_output, weights, layouts=layouts)


def build_programs(shape: Sizes, device: str, rank: int = RANK) -> tuple[dict[str, list[Program]], dict[str, str]]:
    """Programs by name ("lora", "full", "peft", "wrapped"), each run once; and why some are absent."""
    torch.manual_seed(0)
    inputs = peers.make_inputs(shape, device=device)
    up, down = (factors_of(weight, rank) for weight in (inputs.gate_up_proj, inputs.down_proj))
    builds: dict[str, peers.Build] = {"lora": partial(ours, up=up, down=down), "full": experts.ours}
    for name, implementation in (("peft", "grouped_mm"), ("wrapped", "blazeproto")):
        builds[name] = partial(by_peft, implementation, up=up, down=down)
    return peers.build_all(builds, shape, [inputs])


def measure(shape: Sizes, machine: Machine) -> Row:
    programs, absent = build_programs(shape, machine.device)
    peft = [name for name in ("peft", "wrapped") if name in programs]
    row: Row = {"difference": {name: agreement(programs["lora"][0], programs[name][0]) for name in peft}}
    for name, (program,) in programs.items():
        row[f"{name}_peak_fwdbwd_MiB"] = round(machine.peak_bytes(program.forward_backward) / MIB, 1)
    row |= part_times(programs, machine)
    return row | ({"absent": absent} if absent else {})


def bounds(record: Row) -> Iterator[tuple[str, bool]]:
    for row in record["rows"]:
        of_full = row["lora_fwdbwd_ms"] / row["full_fwdbwd_ms"]
        yield f"of full fine-tuning: {of_full:.3f}, at most {MOST_OF_FULL}", of_full <= MOST_OF_FULL
        if "peft_fwdbwd_ms" in row:
            over = row["peft_fwdbwd_ms"] / row["lora_fwdbwd_ms"]
            yield f"over peft on grouped_mm: {over:.2f} x, at least {LEAST_OVER_PEFT}", over >= LEAST_OVER_PEFT


BENCH = Bench(
    "lora",
    __doc__,
    {"rows": Item(measure, [SHAPE], [SMALL], [QUICK_SHAPE], lambda shape: of_shape(shape) | {"rank": RANK}, rounds=5)},
    bounds=bounds,
)

if __name__ == "__main__":
    run(BENCH)
