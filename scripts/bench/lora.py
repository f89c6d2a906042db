"""LoRA on experts: `moe_mlp` with factors and frozen weights against full fine-tuning, and peft on transformers' grouped_mm.

    python -m scripts.bench.lora             # -> results/h200/lora.json
    python -m scripts.bench.lora --quick     # a quarter of the tokens, three rounds -> lora-quick.json

The experts alone, router excluded, all in bf16; low-rank factors on gate_up and down. x and scores require gradients everywhere,
and besides them the factors, or in full fine-tuning the weights. peft's wrappers put W + BA in the weights' place; "wrapped" is
the same wrappers with `blazeproto.integrations.peft`. Without peft and transformers these two are absent. Same inputs, same
factors. All programs run in one process, in turn (A B A B), five rounds. Times are the durations of the kernels, by the profiler,
the GPU being held until the host has queued a call.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.autograd import LowRank, moe_mlp
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import MIB, RESULTS, begun, bench_parser, cfg_of, in_turn, settled, stamped, write_json
from scripts.bench.module import ROUNDS, agreement, part_times, verdict
from scripts.bench.tables import TABLES
from scripts.bench.timing import peak_bytes
from scripts.command import need_hopper, positive

Row = dict[str, Any]

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
    return LowRank(*(factor.to(weight.dtype).requires_grad_() for factor in (a, b)))


def full(shape: Sizes, inputs: peers.LayerInputs, backend: str) -> peers.Program:
    """Full fine-tuning."""
    weights = (inputs.gate_up_proj, inputs.down_proj)

    def forward() -> Tensor:
        return moe_mlp(inputs.x, *weights, inputs.scores, inputs.experts, num_experts=shape.E, backend=backend)

    return peers.Program(forward, (inputs.x, inputs.scores, *weights), inputs.grad_output, weights)


def ours(shape: Sizes, inputs: peers.LayerInputs, up: LowRank, down: LowRank, backend: str) -> peers.Program:
    """The weights frozen, the factors trained."""
    weights = (inputs.gate_up_proj.detach(), inputs.down_proj.detach())
    options: dict[str, Any] = {"num_experts": shape.E, "backend": backend, "up_factors": up, "down_factors": down}

    def forward() -> Tensor:
        return moe_mlp(inputs.x, *weights, inputs.scores, inputs.experts, **options)

    leaves = (inputs.x, inputs.scores, *up, *down)
    return peers.Program(forward, leaves, inputs.grad_output, weights, layouts=(Tensor.detach,) * 4)


def by_peft(shape: Sizes, inputs: peers.LayerInputs, up: LowRank, down: LowRank, implementation: str) -> peers.Program:
    """peft's wrappers around transformers' experts, with these factors."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"num_experts": shape.E, "hidden_size": shape.d, "moe_intermediate_size": shape.n, "hidden_act": "silu"}
    with torch.device("meta"):
        experts = Qwen3MoeExperts(SimpleNamespace(**sizes, _experts_implementation=implementation))
    for name, weight in (("gate_up_proj", inputs.gate_up_proj), ("down_proj", inputs.down_proj)):
        setattr(experts, name, nn.Parameter(weight.detach(), requires_grad=False))
    model = nn.Module()
    model.experts = experts
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    rank = up.a.shape[1]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=targets), model)
    wrapper: Any = model.experts
    leaves = []
    for layer, factors in ((wrapper.base_layer, up), (wrapper, down)):
        flat = (factors.a.flatten(0, 1), factors.b.permute(1, 2, 0).flatten(1))
        for owner, values in zip((layer.lora_A, layer.lora_B), flat, strict=True):
            owner["default"].weight.data = values.detach().contiguous()
            leaves.append(owner["default"].weight)
    index = inputs.experts.long()
    scores = inputs.scores.detach().to(inputs.x.dtype).requires_grad_()  # as its routers give them

    def forward() -> Tensor:
        made: Tensor = wrapper(inputs.x, index, scores)
        return made

    layouts = tuple(
        as_ours
        for factors in (up, down)
        for as_ours in (
            lambda a, like=factors.a: a.view_as(like),
            lambda b, like=factors.b: b.view(like.shape[1], -1, len(like)).permute(2, 0, 1),
        )
    )
    weights = (experts.gate_up_proj, experts.down_proj)
    return peers.Program(forward, (inputs.x, scores, *leaves), inputs.grad_output, weights, layouts=layouts)


def build_programs(
    shape: Sizes, rank: int, device: str = "cuda", backend: str = "hopper"
) -> tuple[dict[str, peers.Program], dict[str, str]]:
    """Programs by name ("lora", "full", "peft", "wrapped"), each run once; and why some are absent."""
    torch.manual_seed(0)
    inputs = peers.make_inputs(shape, device=device)
    up, down = (factors_of(weight, rank) for weight in (inputs.gate_up_proj, inputs.down_proj))
    programs = {"lora": ours(shape, inputs, up, down, backend), "full": full(shape, inputs, backend)}
    absent: dict[str, str] = {}
    try:
        from blazeproto.integrations.peft import register

        register()
        programs["peft"] = by_peft(shape, inputs, up, down, "grouped_mm")
        programs["wrapped"] = by_peft(shape, inputs, up, down, "blazeproto")
    except ImportError as error:
        absent = dict.fromkeys(("peft", "wrapped"), str(error))
        print(f"  peft is absent: {error}", flush=True)
    for program in programs.values():
        program.forward_backward()
    return programs, absent


# ------------------------------------------------------------------------------------------------------- measurement


def measure(shape: Sizes, rank: int, rounds: int) -> Row:
    """One row of the results."""
    programs, absent = build_programs(shape, rank)
    row: Row = {"cfg": cfg_of(shape), "rank": rank}
    row["difference"] = {
        name: agreement(programs["lora"], programs[name]) for name in ("peft", "wrapped") if name in programs
    }
    for name, program in programs.items():
        row[f"{name}_peak_fwdbwd_MiB"] = round(peak_bytes(program.forward_backward) / MIB, 1)
    row |= part_times({name: [program] for name, program in programs.items()}, rounds)
    return row | ({"absent": absent} if absent else {})


# -------------------------------------------------------------------------------------------------- bounds and table


def print_table(record: Row) -> None:
    """That of the documentation, and what holds of the bounds."""
    print(TABLES["lora"](record))
    (row,) = record["rows"]
    ours, theirs = row["lora_fwdbwd_ms"], row.get("peft_fwdbwd_ms")
    of_full = ours / row["full_fwdbwd_ms"]
    print(verdict(f"of full fine-tuning: {of_full:.3f}, at most {MOST_OF_FULL}", of_full <= MOST_OF_FULL))
    if theirs is None:
        print("absent peft on grouped_mm, so nothing is said of it")
    else:
        what = f"over peft on grouped_mm: {theirs / ours:.2f} x, at least {LEAST_OVER_PEFT}"
        print(verdict(what, theirs / ours >= LEAST_OVER_PEFT))


# -------------------------------------------------------------------------------------------------------------- main


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("lora", __doc__, quick="a quarter of the tokens, three rounds -> lora-quick.json")
    parser.add_argument("--rank", type=positive, default=RANK, help=f"default {RANK}; another one -> lora-part.json")
    options = settled(parser.parse_args(words), "lora", rounds=ROUNDS, quick_rounds=3)
    options.out = options.out or RESULTS / f"lora{'' if options.rank == RANK else '-part'}.json"
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    record = begun("lora", __doc__)
    for shape in in_turn([QUICK_SHAPE if options.quick else SHAPE]):
        record["rows"].append(stamped(measure, shape, options.rank, options.rounds))
    write_json(options.out, record)
    print_table(record)
    print("wrote", options.out)


if __name__ == "__main__":
    main()
