"""Rows of kernels alone: MoEBlaze Table 3 and §7.3's gather; SonicMoE Figures 2a, 3 and 7, and two ways to dS (appendix D.1)."""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from blazeproto import cost
from blazeproto.autograd import private
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import PRODUCTS, Sizes, grouped_mm
from scripts.bench import peers, rounding
from scripts.bench.common import MIB, route
from scripts.bench.dispatch import by_torch_sort, check, run_all
from scripts.bench.markdown import OURS
from scripts.bench.paper.layers import Case, build_all
from scripts.bench.peers import Build, Program
from scripts.bench.peers.layers import builds_of, ours
from scripts.bench.timing import Machine, Row

Call = Callable[[], object]

# ------------------------------------------------------------------------------------------------------------- dispatch

METHODS = ("tiled", "dense", "sort")
DISPATCH_SETS = 3  # of ids, so that none stays in the L2 cache


def dispatches(case: Case, machine: Machine) -> Row:
    """MoEBlaze Table 3: our builders, CuPy's sort among them, and torch.sort; every list that a layer needs."""
    shape = case.shape
    generator = torch.Generator(machine.device).manual_seed(0)
    sets = [route(shape, "uniform", machine.device, generator) for _ in range(DISPATCH_SETS)]
    calls: dict[str, Call] = {
        name: partial(run_all, [partial(build_dispatch, ids, shape.E, method=name) for ids in sets])  # type: ignore[arg-type]
        for name in METHODS
    }
    calls["torch_sort"] = partial(run_all, [partial(by_torch_sort, ids, shape.E) for ids in sets])
    check(sets[0], shape.E, METHODS)
    found = machine.times(calls, graphs=False).ms  # CuPy's sort can't be captured
    return {f"{name}_ms": round(ms / len(sets), 5) for name, ms in found.items()}


# --------------------------------------------------------------------------------------------------------------- gather


def gather(case: Case, machine: Machine) -> Row:
    """MoEBlaze §7.3: the up projection with nothing after it but a store, its rows fetched by index and lying in order; torch's
    grouped product on rows in order, and with the copy that puts them there."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    x, weights = inputs.x.detach(), inputs.gate_up_proj.detach()
    dispatch = build_dispatch(inputs.experts, shape.E)
    tokens, ends = dispatch.expert_token_indices, dispatch.expert_token_offsets[1:].clone()
    ordered = x[tokens]
    out = torch.empty(shape.rows, shape.h, dtype=x.dtype, device=x.device)
    calls: dict[str, Call] = {
        "gathered": partial(grouped_mm, x, weights, dispatch, gather=True, out=out),
        "contiguous": partial(grouped_mm, ordered, weights, dispatch, out=out),
        "torch": lambda: F.grouped_mm(ordered, weights.mT, offs=ends),
        "copied_torch": lambda: F.grouped_mm(x[tokens], weights.mT, offs=ends),
    }
    row: Row = {f"{name}_ms": round(ms, 4) for name, ms in machine.times(calls, tuple(calls)).ms.items()}
    return row | {"gather_overhead": round(row["gathered_ms"] / row["contiguous_ms"] - 1, 4)}


# -------------------------------------------------------------------------------------------------- kernels of a program

MATRICES = re.compile(
    "gemm|nvjet|matmul|_sdd|_dsd|_dds|scatter2scatter|xty|bmm|::mm|::_?grouped_mm|addmm", re.IGNORECASE
)
"""In the names of kernels that multiply matrices, of torch, SonicMoE (CUTLASS), ScatterMoE, MegaBlocks and stk."""
CALLS = 5  # that a profile is the mean of


def kernels_of(program: Program, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """{"forward", "backward": {kernel: {"ms", "launches"}}}, means of a call; backward is forward and backward less forward."""
    forward, both = (profiled(call, device) for call in (program.forward, program.forward_backward))
    backward = {
        name: {key: each[key] - forward.get(name, {}).get(key, 0.0) for key in each} for name, each in both.items()
    }
    launched = {name: each for name, each in backward.items() if each["launches"] > 0.5}
    return {"forward": forward, "backward": launched}


def profiled(call: Call, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds and launches of a call, by kernel; on a CPU by operator, without those that it calls."""
    for _ in range(3):
        call()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    untold = mock.patch.object(private, "_profiler_enabled", bool)  # as in `timing.kernel_times`
    with untold, profile(activities=[activity]) as recorded:
        for _ in range(CALLS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "launches": 0.0})
    for event in recorded.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == (device == "cuda"):
            us = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
            found[event.name]["ms"] += us / 1e3 / CALLS
            found[event.name]["launches"] += 1 / CALLS
    return dict(found)


def our_kernels(shape: Sizes) -> dict[tuple[str, str], tuple[float, float]]:
    """(operations, least bytes) of our kernels by phase and name; a name that stands for two products has the sum."""
    found: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for phase, names in (("forward", cost.FORWARD), ("backward", cost.BACKWARD)):
        for product in (PRODUCTS[name] for name in (*names, "combine")):
            entry = next(iter(product.kernels())).entry
            operations, least = found[phase, entry]
            found[phase, entry] = operations + product.operations(shape), least + product.least_bytes(shape)
    return dict(found)


def kernel_times(case: Case, machine: Machine) -> Row:
    """SonicMoE Figure 2a: milliseconds by kernel of ours and of each peer that is wanted, forward and backward; of ours the
    operations and least bytes beside."""
    builds: dict[str, Build] = {OURS: ours} | builds_of(machine.peers)
    made, absent = build_all(case, builds, machine)
    operations = dict(zip(("forward", "backward"), cost.layer_operations(case.shape), strict=True))
    known = our_kernels(case.shape)

    def line(name: str, phase: str, kernel: str, each: dict[str, float]) -> Row:
        work = known.get((phase, kernel)) if name == OURS else None
        found: Row = {"kernel": kernel[:120], "ms": round(each["ms"], 5), "launches": round(each["launches"], 2)}
        found |= dict(zip(("operations", "least_bytes"), work or (), strict=False))
        return found | {"multiplies": bool(found.get("operations")) or bool(MATRICES.search(kernel))}

    def summed(name: str, phase: str, kernels: dict[str, dict[str, float]]) -> Row:
        ordered = sorted(kernels.items(), key=lambda item: -item[1]["ms"])
        listed = [line(name, phase, kernel, each) for kernel, each in ordered]
        products = sum(each["ms"] for each in listed if each["multiplies"])
        others = sum(each["ms"] for each in listed) - products
        tflops = round(1e-9 * operations[phase] / products, 1) if products else None
        return {"kernels": listed, "products_ms": round(products, 4), "others_ms": round(others, 4), "tflops": tflops}

    programs = {
        name: {phase: summed(name, phase, found) for phase, found in kernels_of(program, machine.device).items()}
        for name, (program, *_) in made.items()
    }
    return {"programs": programs} | ({"absent": absent} if absent else {})


# ------------------------------------------------------------------------------------------------------- token rounding


def token_rounding(case: Case, machine: Machine) -> Row:
    """SonicMoE Figure 7, the experts alone: top-k, rounded to the nearest tile, always down and always up; Figure 3: the empty
    rows of top-k's tiles, over its rows."""
    shape, tile = case.shape, rounding.tile_on(machine)
    inputs = peers.make_inputs(shape, device=machine.device)
    routed = rounding.routings(rounding.whole_layers(shape, inputs, tile), inputs.x)
    made = {name: rounding.on_routing(shape, inputs, routing) for name, routing in routed.items()}
    found = rounding.figures(shape, made, routed, machine, prefix="")
    wasted = round(found["top_k"]["padded_rows"] / found["top_k"]["rows"] - 1, 4)
    gain = rounding.gains(found, prefix="")["fwdbwd_gain"]
    return rounding.row_counts(routed) | found | {"wasted": wasted, "fwdbwd_gain": gain}


# ------------------------------------------------------------------------------------------------- the scores' gradient


def scores_gradient(case: Case, machine: Machine) -> Row:
    """SonicMoE appendix D.1: ours, where the dH kernel sums <dA', act> in its epilogue, beside <dO, Y>, which has to keep Y.

    <dO, Y> is timed as one torch.bmm over Y's rows in the order of their tokens, without the gather that a layer would need: in
    its favour. `saved_MiB` is what the layer keeps for backward, `y_MiB` what Y adds.
    """
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    program = ours(shape, inputs)
    y = torch.randn(shape.T, shape.K, shape.d, device=machine.device).to(inputs.x.dtype)
    d_out = inputs.grad_output[:, :, None]
    calls: dict[str, Call] = {
        "fwd": program.forward,
        "fwdbwd": program.forward_backward,
        "dot": lambda: torch.bmm(y, d_out),
    }
    ms = machine.times(calls, tuple(calls)).ms
    row: Row = {f"{name}_ms": round(value, 4) for name, value in ms.items()}
    row["bwd_ms"] = round(ms["fwdbwd"] - ms["fwd"], 4)
    row |= {"saved_MiB": round(cost.saved_bytes(shape) / MIB, 2), "y_MiB": round(y.nbytes / MIB, 2)}
    return row
