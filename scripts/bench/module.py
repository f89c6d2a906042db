"""Module against module: `MoE(router="topk_softmax")` of ours and SonicMoE's own `MoE`, as their users call them.

    python -m scripts.bench.module                             # 30 shapes -> results/h200/module.json
    python -m scripts.bench.module --quick                     # four shapes
    python -m scripts.bench.module --configs 1-12,25           # 1-23 as scripts.bench.layer, 24-27: EXTRA_SHAPES
    python -m scripts.bench.module --resume --time-budget 480  # goes on where the last run of the same sources stopped
    python -m scripts.bench.module --caches FOLDER             # keeps what SonicMoE compiles and tunes; needs minutes without

Both modules in bf16, router weights too, training mode, auxiliary loss 0.01, no z-loss; x requires a gradient, and no leaf has
one before a backward. Same weights, same random tokens. All programs run in one process, in turn (A B A B), five rounds, after
SonicMoE has tuned itself. Times are the durations of the kernels, by the profiler; the GPU is held until the host has queued a
call. SonicMoE's products begin before the kernel in front of them ends (programmatic dependent launch): an overlap is counted
once, and `*_sum_ms` are the plain sums. `*_gpu_ms`: the same step with the gaps between its kernels, as a CUDA graph, or from
its first kernel to its last where one of the two modules can't be captured.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import (
    EXTRA_SHAPES,
    MIB,
    MODULE_SHAPES,
    RESULTS,
    SHAPES,
    begun,
    bench_parser,
    cfg_of,
    in_turn,
    read_json,
    rows_of,
    settled,
    stamped,
    with_row,
    write_json,
)  # fmt: skip
from scripts.bench.identity import earlier
from scripts.bench.layer import FLOOR, input_sets
from scripts.bench.module_tables import module_table, verdicts
from scripts.bench.peers import modules
from scripts.bench.timing import (
    KernelTime,
    Rotation,
    gpu_ms,
    kernel_times,
    peak_bytes,
    relative_difference,
    saved_bytes,
    tensors_in,
)
from scripts.command import need_hopper, refuse

Row = dict[str, Any]
Programs = dict[str, list[modules.ModuleProgram]]

QUICK_SHAPES = (SHAPES[0], SHAPES[8], SHAPES[20], EXTRA_SHAPES[0])

ROUNDS = 5
ROUND_MS = 20.0  # a program's part of a round holds enough calls to last about this long
MOST_CALLS = 12
LARGEST_DIFFERENCE = 0.05  # of a row of the two modules' outputs, or gradients of x, in the median over the tokens
LARGEST_OF_WEIGHTS = 0.3  # of a weight's gradient, over its norm: some tokens go to other experts


# ------------------------------------------------------------------------------------------------------- measurement


def build_programs(shape: Sizes, names: list[str], sets: int, device: str = "cuda") -> tuple[Programs, dict[str, str]]:
    """Programs by name ("ours", its "router", "sonic"), one for each set of inputs, each run once; why SonicMoE is absent."""
    inputs = [peers.make_inputs(shape, seed=seed, device=device) for seed in range(sets)]
    given = [(one, modules.router_weight(shape, one, seed)) for seed, one in enumerate(inputs)]
    programs: Programs = {"ours": run_once([modules.ours(shape, *each) for each in given])}
    absent: dict[str, str] = {}
    if "router" in names:
        layers = zip(programs["ours"], inputs, strict=True)
        programs["router"] = run_once([modules.router_of(ours, torch.randn_like(one.scores)) for ours, one in layers])
    if "sonic" in names:
        sonic = peers.if_it_runs("sonic", lambda: run_once([modules.sonic(shape, *each) for each in given]), absent)
        programs |= {"sonic": sonic} if sonic else {}
    return programs, absent


def run_once(programs: list[modules.ModuleProgram]) -> list[modules.ModuleProgram]:
    for program in programs:
        program.forward_backward()
        program.clear()
    return programs


def row_differences(a: Tensor, b: Tensor) -> Tensor:
    """(T,) norm of each row's difference over that of b's row, in fp32, a slice at a time."""
    step = max(1, (1 << 27) // max(1, b.shape[1]))
    pairs = zip(a.split(step), b.split(step), strict=True)
    return torch.cat([(x.float() - y.float()).norm(dim=1) / y.float().norm(dim=1).clamp_min(1e-30) for x, y in pairs])


def agreement(a: Any, b: Any) -> dict[str, float]:
    """By how much two programs' outputs and gradients of x differ, in the median over the tokens, and by how much the gradient of
    each weight; and the share of tokens that went to other experts: SonicMoE's logits are rounded to bf16.

    RuntimeError where they say that the layers are not the same.
    """
    ours, theirs = (tensors_in(program.forward_backward())[:2] for program in (a, b))
    out, x_grad = (row_differences(x, y) for x, y in zip(ours, theirs, strict=True))
    found = {"median_out": float(out.median()), "median_x_grad": float(x_grad.median())}
    wrong = [name for name, value in found.items() if not value < LARGEST_DIFFERENCE]
    ours, theirs = (program.weight_gradients() for program in (a, b))
    for name in ours.keys() & theirs.keys():
        found[name] = relative_difference(ours[name], theirs[name])
        wrong += [name] * (not found[name] < LARGEST_OF_WEIGHTS)
    if wrong:
        raise RuntimeError(f"the programs compute different layers: {', '.join(wrong)} of {found}")
    found["other_experts"] = float((out > 0.1).float().mean())
    return {name: round(value, 6) for name, value in found.items()}


def times_of(calls: dict[str, Rotation], rounds: int) -> dict[str, KernelTime]:
    once = kernel_times(calls, 1)
    burst = {}
    for name, call in calls.items():
        wanted = min(MOST_CALLS, math.ceil(ROUND_MS / max(once[name].busy, 1e-3)))
        burst[name] = len(call) * math.ceil(wanted / len(call))  # each set of inputs as often
    return kernel_times(calls, rounds, burst=burst, queued=True)


def part_times(programs: Mapping[str, Sequence[Any]], rounds: int) -> Row:
    """Kernel time of a forward, and of a forward + backward, of programs by name, each on its sets of inputs in turn."""
    row: Row = {}
    for part, step in (("fwd", "forward"), ("fwdbwd", "forward_backward")):
        calls = {name: Rotation([getattr(program, step) for program in each]) for name, each in programs.items()}
        for name, kernels in times_of(calls, rounds).items():
            row |= {f"{name}_{part}_ms": round(kernels.busy, 4), f"{name}_{part}_sum_ms": round(kernels.total, 4)}
            row[f"{name}_{part}_rounds_ms"] = [round(ms, 4) for ms in kernels.rounds]
    return row


def gap_times(programs: Mapping[str, Sequence[Any]], rounds: int) -> Row:
    """The same with the gaps between kernels, and how it was timed."""
    row: Row = {}
    for part, step in (("fwd", "forward"), ("fwdbwd", "forward_backward")):
        calls = {name: Rotation([getattr(program, step) for program in each]) for name, each in programs.items()}
        found = gpu_ms(calls, list(calls), rounds, gaps=True)
        row |= {f"{name}_{part}_gpu_ms": round(ms, 4) for name, ms in found.ms.items()}
        row[f"gpu_{part}_method"] = found.method["ours"]
        row |= {f"not_captured_{part}": found.refused} if found.refused else {}
    return row


def router_saves(shape: Sizes) -> int:
    """Bytes that a router may keep for backward: x, (T, E) in fp32, scores and ids (T, K), and a few vectors of E."""
    return shape.T * (2 * shape.d + 4 * shape.E + 8 * shape.K) + 64 * shape.E + 4096


def peak_of(program: modules.ModuleProgram) -> int:
    program.clear()
    peak = peak_bytes(program.forward_backward)
    program.clear()
    return peak


def measure(shape: Sizes, names: list[str], rounds: int) -> Row:
    """One row of the results. All runs on one stream that is not the default one, so that it can be captured (`capture`)."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return row_of(shape, names, rounds)


def row_of(shape: Sizes, names: list[str], rounds: int) -> Row:
    programs, absent = build_programs(shape, names, input_sets(shape))
    differences = agreement(programs["ours"][0], programs["sonic"][0]) if "sonic" in programs else {}
    peaks = {name: peak_of(programs[name][0]) for name in ("ours", "sonic") if name in programs}
    router = programs["router"][0]
    saved = saved_bytes(router.forward, router.module.parameters())
    floors = cost.layer_floor_ms(shape), cost.router_floor_ms(shape)
    forward, backward = (sum(parts) for parts in zip(*floors, strict=True))
    row: Row = {"cfg": cfg_of(shape), "rounds": rounds}
    row |= part_times(programs, rounds)
    row |= gap_times({name: each for name, each in programs.items() if name != "router"}, rounds)
    row |= {"floor_fwd_ms": round(forward, 4), "floor_fwdbwd_ms": round(forward + backward, 4)}
    row |= {f"{name}_peak_fwdbwd_MiB": round(peak / MIB, 1) for name, peak in peaks.items()}
    row |= {"router_saved_bytes": saved, "router_may_save_bytes": router_saves(shape)}
    return row | {"difference": differences} | ({"absent": absent} if absent else {})


# ---------------------------------------------------------------------------------------------------------- table


def print_verdicts(record: Row) -> None:
    """The table of the documentation, and what holds of the bounds."""
    rows = [row for row in record["rows"] if not earlier(row)]
    print(module_table(record | {"rows": rows}))
    for what, holds in verdicts(rows):
        print(verdict(what, holds))


def verdict(what: str, holds: bool) -> str:
    return f"{'holds' if holds else 'FAILS'}  {what}"


# -------------------------------------------------------------------------------------------------------------- main


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    quick = "four shapes, three rounds -> module-quick.json"
    parser = bench_parser("module", __doc__, quick=quick, configs=MODULE_SHAPES, resume=True)
    parser.add_argument("--only-ours", action="store_true", help="without SonicMoE -> module-quick.json")
    parser.add_argument("--caches", type=Path, help="folder for what SonicMoE compiles and tunes")
    options = settled(parser.parse_args(words), "module", rounds=ROUNDS, quick_rounds=3)
    options.configs = options.configs or list(QUICK_SHAPES if options.quick else MODULE_SHAPES)
    options.names = ["ours", "router", *([] if options.only_ours else ["sonic"])]
    options.out = options.out or RESULTS / f"module{'-quick' if options.only_ours else ''}.json"
    return options


def use_caches(folder: Path) -> None:
    """Before SonicMoE is imported: its QuACK products, their tuning, and its Triton kernels are kept under ``folder``."""
    os.environ |= {f"{owner}_CACHE_DIR": str(folder.resolve() / owner.lower()) for owner in ("QUACK", "TRITON")}


def wanted(shape: Sizes, rows: list[Row], names: list[str]) -> bool:
    """Whether a shape has no row of today's kernels with all programs of ``names``."""
    have = rows_of(shape, rows)
    return not any(all(f"{name}_fwdbwd_ms" in row or name in row.get("absent", {}) for name in names) for row in have)


def main() -> None:
    options = arguments()
    need_hopper()
    if options.caches is not None:
        use_caches(options.caches)
    if "sonic" in options.names and importlib.util.find_spec("sonicmoe") is None:
        if not options.quick:
            refuse("sonic-moe is not installed: --only-ours measures without it; nothing was run")
        options.names.remove("sonic")
    record = begun("module", __doc__, floor=f"{FLOOR}; and over the router's three products")
    if options.out.exists():
        record |= {"rows": read_json(options.out)["rows"]}
    left = [shape for shape in options.configs if not options.resume or wanted(shape, record["rows"], options.names)]
    for shape in in_turn(left, options.time_budget):
        row = stamped(measure, shape, options.names, options.rounds)
        record["rows"] = with_row(record["rows"], row)
        write_json(options.out, record)
        times = [f"{name} {row[f'{name}_fwdbwd_ms']:.3f}" for name in options.names if f"{name}_fwdbwd_ms" in row]
        print(f"{shape}: {', '.join(times)} ms; {row['difference']}", flush=True)
    print_verdicts(record)


if __name__ == "__main__":
    main()
