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
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.autograd import LowRank, moe_mlp
from scripts.bench import peers
from scripts.bench.common import MIB, RESULTS, LayerShape, format_table, number, provenance, write_json
from scripts.bench.module import ROUNDS, row_differences, times_of, verdict
from scripts.bench.timing import Rotation, peak_bytes
from scripts.command import argument_parser, need_hopper, positive

Row = dict[str, Any]

SHAPE, QUICK_SHAPE = LayerShape(32768, 2048, 768, 128, 8), LayerShape(8192, 2048, 768, 128, 8)
RANK = 16
MOST_OF_FULL = 0.88  # of full fine-tuning's forward + backward; the bytes allow 0.80
LEAST_OVER_PEFT = 2.0
LARGEST_DIFFERENCE = 0.05  # of a row of two programs' outputs, or gradients of x, in the median over the tokens


# ---------------------------------------------------------------------------------------------------------- programs


def factors_of(weight: Tensor, rank: int) -> LowRank:
    """Random factors of a weight (E, out, in), whose product is about half as large as the weight."""
    num_experts, width_out, width_in = weight.shape
    a = torch.randn(num_experts, rank, width_in, device=weight.device) * width_in**-0.5
    b = torch.randn(num_experts, width_out, rank, device=weight.device) * 0.5 * rank**-0.5
    return LowRank(*(factor.to(weight.dtype).requires_grad_() for factor in (a, b)))


def full(shape: LayerShape, inputs: peers.LayerInputs, backend: str) -> peers.Program:
    """Full fine-tuning."""
    weights = (inputs.gate_up_proj, inputs.down_proj)

    def forward() -> Tensor:
        return moe_mlp(inputs.x, *weights, inputs.scores, inputs.experts, num_experts=shape.E, backend=backend)

    return peers.Program("full", forward, (inputs.x, inputs.scores, *weights), inputs.grad_output, weights)


def ours(shape: LayerShape, inputs: peers.LayerInputs, up: LowRank, down: LowRank, backend: str) -> peers.Program:
    """The weights frozen, the factors trained."""
    weights = (inputs.gate_up_proj.detach(), inputs.down_proj.detach())
    options: dict[str, Any] = {"num_experts": shape.E, "backend": backend, "up_factors": up, "down_factors": down}

    def forward() -> Tensor:
        return moe_mlp(inputs.x, *weights, inputs.scores, inputs.experts, **options)

    return peers.Program("lora", forward, (inputs.x, inputs.scores, *up, *down), inputs.grad_output, weights)


def by_peft(
    shape: LayerShape, inputs: peers.LayerInputs, up: LowRank, down: LowRank, implementation: str
) -> peers.Program:
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

    return peers.Program(
        implementation,
        forward,
        (inputs.x, scores, *leaves),
        inputs.grad_output,
        (experts.gate_up_proj, experts.down_proj),
    )


def build_programs(
    shape: LayerShape, rank: int, device: str = "cuda", backend: str = "hopper"
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


def agreement(a: peers.Program, b: peers.Program) -> dict[str, float]:
    """Median over the tokens by how much two programs' outputs and gradients of x differ. RuntimeError where it says that the
    layers are not the same."""
    (out, (dx, *_)), (other, (other_dx, *_)) = a.forward_backward(), b.forward_backward()
    found = {
        "median_out": float(row_differences(out.detach(), other.detach()).median()),
        "median_x_grad": float(row_differences(dx, other_dx).median()),
    }
    if not max(found.values()) < LARGEST_DIFFERENCE:
        raise RuntimeError(f"the programs compute different layers: {found}")
    return {name: round(value, 6) for name, value in found.items()}


def measure(shape: LayerShape, rank: int, rounds: int) -> Row:
    """One row of the results."""
    programs, absent = build_programs(shape, rank)
    row: Row = {"cfg": shape.dict(), "rank": rank}
    row["difference"] = {
        name: agreement(programs["lora"], programs[name]) for name in ("peft", "wrapped") if name in programs
    }
    for name, program in programs.items():
        row[f"{name}_peak_fwdbwd_MiB"] = round(peak_bytes(program.forward_backward) / MIB, 1)
    for part in ("fwd", "fwdbwd"):
        calls = {
            name: Rotation([program.forward if part == "fwd" else program.forward_backward])
            for name, program in programs.items()
        }
        for name, kernels in times_of(calls, rounds).items():
            row |= {f"{name}_{part}_ms": round(kernels.busy, 4), f"{name}_{part}_sum_ms": round(kernels.total, 4)}
    return row | ({"absent": absent} if absent else {})


# -------------------------------------------------------------------------------------------------- bounds and table


def of_full(row: Row) -> float:
    """Our time over that of full fine-tuning, forward + backward."""
    return float(row["lora_fwdbwd_ms"] / row["full_fwdbwd_ms"])


def over_peft(row: Row) -> float | None:
    """peft's time over ours; None where it was not measured."""
    theirs = row.get("peft_fwdbwd_ms")
    return None if theirs is None else float(theirs / row["lora_fwdbwd_ms"])


def print_table(row: Row) -> None:
    lines = []
    for name in ("lora", "wrapped", "full", "peft"):
        if f"{name}_fwdbwd_ms" in row:
            times = [number(row[f"{name}_{part}_ms"]) for part in ("fwd", "fwdbwd")]
            share = number(row["lora_fwdbwd_ms"] / row[f"{name}_fwdbwd_ms"], 2)
            lines.append([name, *times, share, number(row[f"{name}_peak_fwdbwd_MiB"], 0)])
    print(format_table(["", "f", "fb", "lora / it", "peak"], lines))
    print("kernel time, ms; f, fb: forward, forward + backward; peak: MiB over fb")
    print(verdict(f"of full fine-tuning: {of_full(row):.3f}, at most {MOST_OF_FULL}", of_full(row) <= MOST_OF_FULL))
    faster = over_peft(row)
    if faster is None:
        print("absent peft on grouped_mm, so nothing is said of it")
    else:
        print(
            verdict(f"over peft on grouped_mm: {faster:.2f} x, at least {LEAST_OVER_PEFT}", faster >= LEAST_OVER_PEFT)
        )


# -------------------------------------------------------------------------------------------------------------- main


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.bench.lora", __doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, three rounds -> lora-quick.json")
    parser.add_argument("--rank", type=positive, default=RANK, help=f"default {RANK}; another one -> lora-part.json")
    parser.add_argument("--rounds", type=positive, default=None, help=f"default {ROUNDS}")
    parser.add_argument("--out", type=Path, default=None, help="results file (default results/h200/lora.json)")
    options = parser.parse_args(words)
    options.rounds = options.rounds or (3 if options.quick else ROUNDS)
    kind = "-quick" if options.quick else "" if options.rank == RANK else "-part"
    options.out = options.out or RESULTS / f"lora{kind}.json"
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    begin = time.monotonic()
    protocol = " ".join((__doc__ or "").split("\n\n")[-1].split())
    record = provenance() | {"benchmark": "lora", "protocol": protocol}
    print(record["gpu"], "|", ", ".join(record["versions"]), "|", record["sources_sha256"][:12], flush=True)
    row = measure(QUICK_SHAPE if options.quick else SHAPE, options.rank, options.rounds)
    write_json(options.out, record | {"rows": [row]})
    print_table(row)
    print(f"{time.monotonic() - begin:.0f} s; wrote {options.out}")


if __name__ == "__main__":
    main()
