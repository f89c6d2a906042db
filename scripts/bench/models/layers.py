"""Rows of whole layers: the models by name, choices of experts, skewed routings, padding, few tokens."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.lab.times import Call
from scripts.bench import peers
from scripts.bench.common import route
from scripts.bench.markdown import OURS
from scripts.bench.models import apart
from scripts.bench.models.megablocks import train_step, trained_by
from scripts.bench.models.programs import BUILDS, calls_of, figures
from scripts.bench.paper.layers import Case
from scripts.bench.peers.layers import ours
from scripts.bench.peers.modules import AUX_LOSS, ModuleProgram, agreement, moe, program_of
from scripts.bench.timing import Machine, Row
from scripts.lm.model import Batches, load_data
from scripts.lm.settings import GPTConfig

ROOM = 0.9  # of the GPU's memory


@dataclass(frozen=True)
class ManyTokens(Case):
    """A row whose kernels run on several numbers of rows, so that none of them says which tiles they should have."""

    @property
    def key(self) -> Row:
        key = super().key
        cfg = dict(key["cfg"])
        return key | {"tokens": cfg.pop("T"), "cfg": cfg}


SETS = 4  # batches of few tokens
ZIPF = 1.2  # as in `common.route`

# ------------------------------------------------------------------------------------------------------ models by name


def fits(shape: Sizes, sets: int) -> bool:
    """Whether ``sets`` sets of a layer's weights, and what the peers' forward and backward need, go into this GPU's memory."""
    weights = 2 * shape.E * shape.d * (shape.h + shape.n)
    activations = 2 * shape.rows * (6 * shape.d + 4 * shape.h)
    return sets * weights + activations < ROOM * torch.cuda.mem_get_info()[1]


def models(case: Case, machine: Machine) -> Row:
    """A model's layer: ours, SonicMoE's and transformers' grouped_mm. If they don't fit beside each other, each has its own
    processes.
    """
    shape, names = case.shape, [OURS, *machine.peers]
    # The weights, SonicMoE's copy of them, and one program's gradients.
    together = not machine.on_gpu or fits(shape, sets=3 if "sonic" in names else 2)
    return beside(shape, names, machine) if together else apart.measure_apart(names, shape, machine)


def beside(shape: Sizes, names: Sequence[str], machine: Machine) -> Row:
    """Programs in this process, in turn; the first has to run, and one that computes something else is absent."""
    inputs = peers.make_inputs(shape, device=machine.device)
    built, absent = peers.build_all({name: BUILDS[name] for name in names}, shape, [inputs])
    made: dict[str, ModuleProgram] = {name: program for name, (program,) in built.items()}
    del inputs, built
    # Both programs' gradients twice over, beside the weights: too much of the largest layers. With K = 1 a score is 1, whose
    # gradient is 0: rounding alone decides what comes to the router's weight beside the auxiliary loss's.
    whole = shape.K > 1 and (not machine.on_gpu or fits(shape, 6))
    difference = {}
    for name in [*made][1:]:
        try:
            difference[name] = agreement(made[names[0]], made[name], weights=whole)
        except RuntimeError as error:  # also out of memory; the others are measured
            absent[name] = str(error)[:300]
            print(f"  {name} is left out: {absent[name]}", flush=True)
            made.pop(name).clear()
        for program in made.values():
            program.clear()
    calls = {name: calls_of(program) for name, program in made.items()}
    return {"programs": figures(calls, machine), "difference": difference, "absent": absent}


def liger(case: Case, machine: Machine) -> Row:
    """Liger's Triton kernels in transformers' block, ours beside, by process."""
    return apart.measure_apart((OURS, "liger"), case.shape, machine, alone=False)


def quack(case: Case, machine: Machine) -> Row:
    """QuACK's newest gated products, ours beside, by process."""
    return apart.measure_apart(("our_products", "quack"), case.shape, machine, alone=False)


# ---------------------------------------------------------------------------------------------------- choices, padding

CHOICES = ("top_k", "token_rounding", "capacity", "expert_choice", "hash")


def ran(programs: dict[str, ModuleProgram], machine: Machine) -> dict[str, Row]:
    peers.run_once([*programs.values()])
    return figures({name: calls_of(program) for name, program in programs.items()}, machine)


def choices(case: Case, machine: Machine) -> Row:
    """Layers by choice of experts: time, peak, and the pairs that are computed, beside top-k's."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    given: dict[str, dict[str, Tensor]] = {name: {} for name in CHOICES} | {
        "hash": {"token_ids": torch.randint(50000, (shape.T,), device=machine.device)}
    }
    made = {}
    for name in CHOICES:
        loss: dict[str, Any] = {} if name in ("hash", "expert_choice") else {"aux_loss": AUX_LOSS}
        made[name] = program_of(moe(shape, inputs, name, **loss), inputs.x, inputs.grad_output, **given[name])
    found, row_counts = ran(made, machine), set()
    for name, program in made.items():
        with torch.no_grad():
            routing = cast(Any, program.module).router(inputs.x, **given[name])
        found[name]["pairs"] = int(routing.load.sum())
        row_counts.add(routing.experts.numel())
    return {"programs": found, "row_counts": sorted(row_counts)}


def padding(case: Case, machine: Machine) -> Row:
    """All tokens, half of them masked at random, and half as many tokens."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    layer = moe(shape, inputs, "top_k", aux_loss=AUX_LOSS)
    mask = torch.rand(shape.T, device=machine.device).argsort() < shape.T // 2
    half = inputs.x.detach()[mask].requires_grad_()
    made = {
        "all": program_of(layer, inputs.x, inputs.grad_output),
        "masked": program_of(layer, inputs.x, inputs.grad_output, mask=mask),
        "half": program_of(layer, half, inputs.grad_output[mask]),
    }
    return {"programs": ran(made, machine), "row_counts": [len(half) * shape.K]}


# --------------------------------------------------------------------------------------------------------------- skew


STEPS = {"cuda": 200, "cpu": 2}
COUNTED = 20  # of the last steps, whose loads are added up
MODEL = {  # by plain torch: a row of skew has the kernels that it times, and no others
    "cuda": GPTConfig(
        layers=4, d_model=256, heads=4, context=256, d_expert=128, num_experts=64, top_k=4, backend="torch"
    ),
    "cpu": GPTConfig(layers=2, d_model=32, heads=2, context=16, d_expert=32, num_experts=8, top_k=2),
}
BATCH = {"cuda": 64, "cpu": 4}


@cache
def exponents(device: str) -> tuple[float, ...]:
    """Each layer's, after STEPS steps on Python's own library (AdamW, bf16 autocast), with an auxiliary loss of 0.01."""
    config = MODEL[device]
    model, optimizer = trained_by(config, device, lr=1e-3)
    batches = Batches(load_data("", config.context)[0].to(device), config.context, BATCH[device])
    loads = [train_step(model, optimizer, *batches[step]).loads for step in range(STEPS[device])]
    return tuple(exponent_of(load) for load in torch.stack(loads[-COUNTED:]).sum(0).tolist())


def exponent_of(load: Sequence[float]) -> float:
    """s of the r-th expert's load ~ r^-s: the least squares in logarithms, over the experts that have tokens."""
    popular = sorted((math.log(each) for each in load if each > 0), reverse=True)
    if len(popular) < 2:
        return 0.0
    ranks = [math.log(rank) for rank in range(1, len(popular) + 1)]
    return round(-statistics.linear_regression(ranks, popular).slope, 4)


def zipf(shape: Sizes, exponent: float, device: str) -> Tensor:
    return route(shape, "zipf", device, torch.Generator(device).manual_seed(0), exponent)


def everybody_s(shape: Sizes, device: str) -> Tensor:
    """(T, K) ids: expert 0 has every token, the other choices are uniform."""
    generator = torch.Generator(device).manual_seed(0)
    others = 1 + route(shape._replace(E=shape.E - 1, K=shape.K - 1), "uniform", device, generator)
    return torch.cat([others.new_zeros(shape.T, 1), others], dim=1)


def skew(case: Case, machine: Machine) -> Row:
    """Dispatch and experts under routings of the same number of rows: uniform; by Zipf's law, with the largest exponent of a
    trained model's routers and with 1.2; one expert has every token; and all tokens have the same K."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    found = exponents(machine.device)
    drawn = {"uniform": 0.0, "trained": max(found), "zipf": ZIPF}
    routings = {kind: zipf(shape, exponent, machine.device) for kind, exponent in drawn.items()}
    routings["everybody_s"] = everybody_s(shape, machine.device)
    routings["same"] = torch.arange(shape.K, dtype=torch.int32, device=machine.device).repeat(shape.T, 1)
    programs: dict[str, dict[str, Call]] = {}
    for kind, ids in routings.items():
        program = ours(shape, replace(inputs, experts=ids))
        program.forward_backward()
        dispatch = partial(build_dispatch, ids, shape.E)
        programs[kind] = {"dispatch": dispatch, "fwd": program.forward, "fwdbwd": program.forward_backward}
    return {"trained_exponents": found, "programs": figures(programs, machine)}


# --------------------------------------------------------------------------------------------------------- few tokens


def decode(case: Case, machine: Machine) -> Row:
    """A model's layer for few tokens, forward under no_grad: ours and transformers' grouped_mm.

    SETS batches go through the layer one after the other in what is timed, so that other experts are read each time.
    """
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    batches = [inputs] + [replace(inputs, x=torch.randn_like(inputs.x).requires_grad_()) for _ in range(SETS - 1)]
    programs, absent = peers.build_all({name: BUILDS[name] for name in (OURS, "grouped_mm")}, shape, batches)
    for made in programs.values():
        without_loss(made)
    router = cast(Any, programs[OURS][0].module).router
    with torch.no_grad():
        drawn = sum(router(batch.x).experts.unique().numel() for batch in batches) / SETS
        found = figures({name: {"sets": partial(forwards, made)} for name, made in programs.items()}, machine)
    for each in found.values():
        each["fwd_us"] = round(1e3 * each["sets_ms"] / SETS, 2)
    return {"programs": found, "chosen_experts": drawn, "absent": absent}


def without_loss(programs: Sequence[ModuleProgram]) -> None:
    """In eval mode, without an auxiliary loss: who decodes has none."""
    for program in programs:
        if isinstance(program.module.eval(), MoE):
            cast(Any, program.module).router.aux_loss = 0.0


def forwards(programs: Sequence[ModuleProgram]) -> None:
    for program in programs:
        program.forward()
