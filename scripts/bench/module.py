"""Module against module: `MoE(router="topk_softmax")` of ours and SonicMoE's own `MoE`, as their users call them.

    python -m scripts.bench.module                             # 30 shapes -> results/h200/module.json on an H200
    python -m scripts.bench.module --quick                     # four shapes
    python -m scripts.bench.module --configs 1-12,25           # 1-23 as scripts.bench.layer, 24-30: EXTRA_SHAPES
    python -m scripts.bench.module --resume --time-budget 480  # goes on where the last run of the same sources stopped
    python -m scripts.bench.module --caches FOLDER             # keeps what SonicMoE compiles and tunes; needs minutes without

Both modules in bf16, router weights too, training mode, auxiliary loss 0.01, no z-loss; x requires a gradient, and no leaf has
one before a backward. Same weights, same random tokens. All programs run in one process, in turn (A B A B), five rounds, after
SonicMoE has tuned itself. Times are the durations of the kernels, by the profiler; the GPU is held until the host has queued a
call. SonicMoE's products begin before the kernel in front of them ends (programmatic dependent launch): an overlap is counted
once, and `*_sum_ms` are the plain sums. `*_gpu_ms`: the same step with the gaps between its kernels, as a CUDA graph, or from
its first kernel to its last where one of the two modules can't be captured.
"""

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import EXTRA_SHAPES, MIB, MODULE_SHAPES, SHAPES
from scripts.bench.identity import earlier
from scripts.bench.layer import FLOOR, SMALL, inputs_of
from scripts.bench.module_tables import verdicts
from scripts.bench.peers import LayerInputs, modules
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import PARTS, Machine, Row, part_times, rotations, saved_bytes
from scripts.command import refuse
from scripts.lm.ranks import Ranks

Programs = dict[str, list[modules.ModuleProgram]]


def build_programs(shape: Sizes, inputs: Sequence[LayerInputs]) -> tuple[Programs, dict[str, str]]:
    """Programs by name ("ours", its "router", "sonic"), one for each set of inputs, each run once; why SonicMoE is absent."""
    programs, absent = peers.build_all({"ours": modules.ours, "sonic": modules.sonic}, shape, inputs)
    ours = programs.pop("ours")
    routers = [modules.router_of(each, torch.randn_like(one.scores)) for each, one in zip(ours, inputs, strict=True)]
    return {"ours": ours, "router": peers.run_once(routers)} | programs, absent


def gap_times(programs: Mapping[str, Sequence[modules.ModuleProgram]], machine: Machine) -> Row:
    """`part_times` with the gaps between kernels, and how it was timed."""
    row: Row = {}
    for part, step in PARTS.items():
        found = machine.times(rotations(programs, step), tuple(programs), gaps=True)
        row |= {f"{name}_{part}_gpu_ms": round(ms, 4) for name, ms in found.ms.items()}
        row[f"gpu_{part}_method"] = found.method["ours"]
        row |= {f"not_captured_{part}": found.refused} if found.refused else {}
    return row


def router_saves(shape: Sizes) -> int:
    """Bytes that a router may keep for backward: x, (T, E) in fp32, scores and ids (T, K), and a few vectors of E."""
    return shape.T * (2 * shape.d + 4 * shape.E + 8 * shape.K) + 64 * shape.E + 4096


def peak_of(program: modules.ModuleProgram, machine: Machine) -> float:
    """MiB."""
    program.clear()
    peak = machine.peak_bytes(program.forward_backward)
    program.clear()
    return round(peak / MIB, 1)


def measure(shape: Sizes, machine: Machine) -> Row:
    """One row of the results. All runs on one stream that is not the default one, so that it can be captured (`capture`)."""
    with torch.cuda.stream(torch.cuda.Stream()) if machine.on_gpu else nullcontext():
        return row_of(shape, machine)


def row_of(shape: Sizes, machine: Machine) -> Row:
    programs, absent = build_programs(shape, inputs_of(shape, machine))
    differences = modules.agreement(programs["ours"][0], programs["sonic"][0]) if "sonic" in programs else {}
    modules_alone = {name: each for name, each in programs.items() if name != "router"}
    peaks = {f"{name}_peak_fwdbwd_MiB": peak_of(each[0], machine) for name, each in modules_alone.items()}
    router = programs["router"][0]
    saved = saved_bytes(router.forward, router.module.parameters())
    floors = cost.layer_floor_ms(shape), cost.router_floor_ms(shape)
    forward, backward = (sum(parts) for parts in zip(*floors, strict=True))
    row: Row = {"rounds": machine.rounds} | part_times(programs, machine) | gap_times(modules_alone, machine)
    row |= {"floor_fwd_ms": round(forward, 4), "floor_fwdbwd_ms": round(forward + backward, 4)}
    row |= peaks | {"router_saved_bytes": saved, "router_may_save_bytes": router_saves(shape)}
    return row | {"difference": differences} | ({"absent": absent} if absent else {})


def bounds(record: Row) -> list[tuple[str, bool]]:
    return verdicts([row for row in record["rows"] if not earlier(row)])


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    if not (options.quick or options.cpu) and importlib.util.find_spec("sonicmoe") is None:
        refuse("sonic-moe is not installed: --quick measures without it; nothing was run")


QUICK_SHAPES = (SHAPES[0], SHAPES[8], SHAPES[20], EXTRA_SHAPES[0])
BENCH = Bench(
    "module",
    __doc__,
    {"shapes": Item(measure, MODULE_SHAPES, (SMALL,), QUICK_SHAPES, rounds=5)},
    head={"floor": f"{FLOOR}; and over the router's three products"},
    bounds=bounds,
    prepare=prepare,
)

if __name__ == "__main__":
    run(BENCH)
