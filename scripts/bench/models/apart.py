"""Programs in processes of their own, in turn (A B A B by process): layers that don't fit beside each other, and peers that want
other libraries than those that are installed.

    BENCH_PEERS=FOLDER python -m scripts.bench.models quack     # FOLDER: what `pip install --target` made, for OTHERS alone

A process makes its program on inputs from one seed, times it, and leaves part of what it computed, by which the parent compares.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.lab.times import Call
from scripts.bench import peers
from scripts.bench.common import REPOSITORY, cfg_of, installed_versions
from scripts.bench.identity import launched
from scripts.bench.models.programs import BUILDS, calls_of, figures, step
from scripts.bench.peers import Build, LayerInputs
from scripts.bench.peers.layers import gate_then_up, interleave_gate_up
from scripts.bench.peers.modules import AUX_LOSS, LARGEST_DIFFERENCE, ModuleProgram, row_differences
from scripts.bench.timing import Machine, Row

PASSES = 2  # of each program
SECONDS = 420  # that a process may take: Liger's first one compiles 240 Triton kernels, one after the other
ROWS = 256  # of each result that are compared
LIBRARIES = "BENCH_PEERS"  # in the environment: a folder of packages for OTHERS alone
OTHERS = ("liger", "quack")  # SonicMoE has the QuACK that it has in the other rows
# What one process has tuned, the next one need not. Blocks of more than 4 GiB, as large layers' weights have, are not split: a
# small tensor in one that lies free would leave the gradients no room.
SETTINGS = {"TRITON_CACHE_AUTOTUNING": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:4096"}


CHILD = "import json, sys; from scripts.bench.models import apart; apart.child(json.loads(sys.argv[1]), sys.argv[2])"
Made = tuple[dict[str, Call], dict[str, Tensor]]
"""A program: the calls that are timed, by part, and its results, laid out as ours."""


def layer(name: str, shape: Sizes, device: str) -> Made:
    inputs = peers.make_inputs(shape, device=device)
    build = BUILDS[name]
    if name == "sonic":  # copies them in an order of its own; its layer is then all of their size that lies on the GPU
        host = {each: getattr(inputs, each).detach().cpu() for each in ("gate_up_proj", "down_proj")}
        inputs, build = replace(inputs, **host), partial(in_bf16, build)
    program = build(shape, inputs)
    del inputs
    return calls_of(program), dict(zip(("out", "x_grad"), step(program), strict=True))


def in_bf16(build: Build, shape: Sizes, inputs: LayerInputs) -> ModuleProgram:
    """A program whose layer takes its dtype from torch: made in fp32 first, as elsewhere, a large one would not fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        program: ModuleProgram = build(shape, inputs)
    finally:
        torch.set_default_dtype(before)
    return replace(program, grad_loss=torch.tensor(AUX_LOSS, device=inputs.x.device))


# ----------------------------------------------------------------------------------------- the two products with a gate


def our_products(shape: Sizes, device: str) -> Made:
    """The up projection and dH's product, as the layer runs them."""
    inputs = peers.make_inputs(shape, device=device)
    dispatch = build_dispatch(inputs.experts, shape.E)
    x, up, down, scores = (each.detach() for each in (inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores))
    d_out = inputs.grad_output
    if device == "cpu":  # where the products are their formulas, which take no bf16
        x, up, down, d_out = (each.float() for each in (x, up, down, d_out))
    h, act = gemm.up_forward(x, up, dispatch)
    backward = partial(gemm.down_backward_act, d_out, down, h, scores, dispatch)
    return {"up": partial(gemm.up_forward, x, up, dispatch), "dh": backward}, {"act": act, "dh": backward()[0]}


def quack_products(shape: Sizes, device: str) -> Made:
    """QuACK's gated products with gathered rows; gate and up rows in turn, as its kernels read them."""
    from quack.gemm_interface import gemm_dgated, gemm_gated

    inputs = peers.make_inputs(shape, device=device)
    dispatch = build_dispatch(inputs.experts, shape.E)
    tokens, offsets = dispatch.expert_token_indices, dispatch.expert_token_offsets
    x, down = inputs.x.detach(), inputs.down_proj.detach()
    up = interleave_gate_up(inputs.gate_up_proj).mT  # (E, d, 2n)
    by_row = inputs.scores.detach().flatten()[dispatch.expert_pair_indices.long()]
    rows: dict[str, Any] = {"activation": "swiglu", "cu_seqlens_m": offsets, "A_idx": tokens}
    h, act = gemm_gated(x, up, **rows)

    backward = partial(gemm_dgated, inputs.grad_output, down, h, colvec_scale=by_row, colvec_reduce=True, **rows)
    dh = gate_then_up(backward()[0].t()[None])[0].t()
    return {"up": partial(gemm_gated, x, up, **rows), "dh": backward}, {"act": act, "dh": dh}


PRODUCTS = {"our_products": our_products, "quack": quack_products}


# ---------------------------------------------------------------------------------------------------------- a process


def child(spec: Row, folder: str) -> None:
    """Measure a program and write its row, or the reason why it is absent, with the kernels that it launched, and part of its
    results."""
    name, shape = spec["program"], Sizes(**spec["cfg"])
    machine = Machine(spec["device"], spec["rounds"])
    row: Row = {"versions": installed_versions()}
    with launched() as kernels:
        try:
            calls, results = PRODUCTS.get(name, partial(layer, name))(shape, machine.device)
            kept = {key: each[:: max(1, len(each) // ROWS)].cpu() for key, each in results.items()}
            torch.save(kept, Path(folder, "results.pt"))
            row |= figures({name: calls}, machine)[name]
        except Exception as error:  # noqa: BLE001  whatever a peer raises, the others are measured
            row["absent"] = f"{type(error).__name__}: {str(error)[:200]}"
    Path(folder, "row.json").write_text(json.dumps(row | {"launched": kernels}))


def environment(program: str) -> dict[str, str]:
    """SETTINGS, but for what is set; for OTHERS with the libraries of LIBRARIES in front."""
    libraries = os.environ.get(LIBRARIES, "") if program in OTHERS else ""
    path = [libraries, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**SETTINGS, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def in_process(spec: Row) -> tuple[Row, dict[str, Tensor]]:
    """The row of a process and what it left. On a CPU, where only the form is tried, this process does it."""
    with TemporaryDirectory() as folder:
        if spec["device"] == "cpu":
            child(spec, folder)
        else:
            command, settings = [sys.executable, "-c", CHILD, json.dumps(spec), folder], environment(spec["program"])
            try:
                subprocess.run(command, cwd=REPOSITORY, env=settings, timeout=SECONDS, check=True)
            except subprocess.SubprocessError as error:
                return {"absent": f"{type(error).__name__} in its process", "launched": {}}, {}
        row: Row = json.loads(Path(folder, "row.json").read_text())
        return row, {} if "absent" in row else torch.load(Path(folder, "results.pt"))


def measure_apart(
    names: Sequence[str], shape: Sizes, machine: Machine, *, alone: bool = True, passes: int = PASSES
) -> Row:
    """programs: the figures of each, medians of all its processes' rounds; why others are absent; the kernels launched.

    The first is what the others are compared with. alone: whether it is measured where none of them runs.  passes: processes of
    each program.
    RuntimeError where the first did not run. One that computes something else is absent.
    """
    first, *others = names
    rows: dict[str, list[Row]] = {name: [] for name in names}
    absent: dict[str, str] = {}
    kernels: Row = {}
    results: dict[str, dict[str, Tensor]] = {}
    for name in [*others, first] * (passes if machine.on_gpu else 1):
        if name in absent or (name == first and not alone and absent.keys() >= {*others}):
            continue
        spec = {"program": name, "cfg": cfg_of(shape), "device": machine.device, "rounds": machine.rounds}
        row, results[name] = in_process(spec)
        kernels |= row["launched"]
        rows[name].append(row)
        if "absent" in row:
            absent[name] = row["absent"]
            print(f"  {name} is absent: {absent[name]}", flush=True)
    if first in absent:
        raise RuntimeError(absent[first])
    ran = {name: each for name, each in rows.items() if each and name not in absent}
    difference = {name: differences(results[name], results[first]) for name in ran if name != first}
    for name, found in difference.items():
        if not all(value < LARGEST_DIFFERENCE for value in found.values()):
            absent[name] = f"computes something else: {found}"
    return {
        "programs": {name: together(each) for name, each in ran.items() if name not in absent},
        "difference": {name: found for name, found in difference.items() if name not in absent},
        "versions": {name: each[-1]["versions"] for name, each in ran.items()},
        "absent": absent,
        "launched": kernels,
    }


def together(rows: Sequence[Row]) -> Row:
    """The rows of one program's processes as one."""
    made: Row = {"peak_MiB": max(row["peak_MiB"] for row in rows)}
    for key in [key for key in rows[0] if key.endswith("_rounds_ms")]:
        made[key] = [ms for row in rows for ms in row[key]]
        made[key.replace("_rounds_ms", "_ms")] = round(statistics.median(made[key]), 4)
    return made


def differences(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """The median over a result's rows of a row's relative difference, by result."""
    return {key: round(float(row_differences(theirs[key], ours[key]).median()), 6) for key in ours}
