"""Rows of whole layers: the models by name, choices of experts, skewed routings, padding, few tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.autograd import moe_mlp
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.lab.times import Call
from scripts.bench import module, peers
from scripts.bench.common import route
from scripts.bench.markdown import OURS
from scripts.bench.models import apart, trained
from scripts.bench.models.programs import BUILDS, Row, calls_of, figures, step
from scripts.bench.module import LARGEST_DIFFERENCE, agreement, row_differences
from scripts.bench.paper.layers import Case
from scripts.bench.paper.machine import Machine
from scripts.bench.paper.programs import backend_of
from scripts.bench.peers import LayerInputs
from scripts.bench.peers.modules import AUX_LOSS, ModuleProgram, router_weight

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


def weight_bytes(shape: Sizes) -> int:
    return 2 * shape.E * shape.d * (shape.h + shape.n)


def fits(shape: Sizes, sets: int) -> bool:
    """Whether so many sets of a layer's weights, and what the peers' forward and backward need, go into this GPU's memory."""
    activations = 2 * shape.rows * (6 * shape.d + 4 * shape.h)
    return sets * weight_bytes(shape) + activations < ROOM * torch.cuda.mem_get_info()[1]


def models(case: Case, machine: Machine) -> Row:
    """A model's layer: ours, SonicMoE's and transformers' grouped_mm. Where they don't fit beside each other, each has its own
    processes.
    """
    shape, names = case.shape, [OURS, *machine.peers]
    # The weights, SonicMoE's copy of them, and one program's gradients.
    sets = 3 if "sonic" in names else 2
    if machine.device == "cpu" or fits(shape, sets):
        return case.key | beside(shape, names, machine)
    return case.key | apart.measure_apart(names, shape, machine)


def beside(shape: Sizes, names: list[str], machine: Machine) -> Row:
    """Programs in this process, in turn; the first has to run, and one that computes something else is absent."""
    inputs = peers.make_inputs(shape, device=machine.device)
    weight = router_weight(shape, inputs)
    absent: dict[str, str] = {}
    made: dict[str, ModuleProgram] = {}
    for name in names:
        if program := peers.if_it_runs(name, partial(warmed, name, shape, inputs, weight), absent):
            made[name] = program
    if names[0] in absent:
        raise RuntimeError(absent[names[0]])
    del inputs
    # Both programs' gradients twice over, beside the weights: too much of the largest layers. With K = 1 a score is 1, whose
    # gradient is 0: rounding alone decides what comes to the router's weight beside the auxiliary loss's.
    whole = shape.K > 1 and (machine.device == "cpu" or fits(shape, 6))
    compare = agreement if whole else same_outputs
    difference = {}
    for name in [*made][1:]:
        try:
            difference[name] = compare(made[names[0]], made[name])
        except RuntimeError as error:  # also out of memory; the others are measured
            absent[name] = str(error)[:300]
            print(f"  {name} is left out: {absent[name]}", flush=True)
            made.pop(name).clear()
        for program in made.values():
            program.clear()
    return {
        "programs": figures({name: calls_of(program) for name, program in made.items()}, machine),
        "difference": difference,
        "absent": absent,
    }


def warmed(name: str, shape: Sizes, inputs: LayerInputs, weight: Tensor) -> ModuleProgram:
    (program,) = module.run_once([BUILDS[name](shape, inputs, weight)])
    return program


def same_outputs(a: ModuleProgram, b: ModuleProgram) -> dict[str, float]:
    """`agreement` without the weights' gradients. RuntimeError where outputs or gradients of x differ."""
    pairs = zip(("median_out", "median_x_grad"), step(a), step(b), strict=True)
    found = {name: round(float(row_differences(theirs, ours).median()), 6) for name, ours, theirs in pairs}
    if not all(value < LARGEST_DIFFERENCE for value in found.values()):
        raise RuntimeError(f"the programs compute different layers: {found}")
    return found


def liger(case: Case, machine: Machine) -> Row:
    """Liger's Triton kernels in transformers' block, ours beside, by process."""
    return case.key | apart.measure_apart((OURS, "liger"), case.shape, machine, alone=False)


def quack(case: Case, machine: Machine) -> Row:
    """QuACK's newest gated products, ours beside, by process."""
    return case.key | apart.measure_apart(("our_products", "quack"), case.shape, machine, alone=False)


# ---------------------------------------------------------------------------------------------------- choices, padding

CHOICES = ("top_k", "token_rounding", "capacity", "expert_choice", "hash")


def layer_on(shape: Sizes, inputs: LayerInputs, router: str) -> MoE:
    """With the weights of ``inputs``."""
    options: dict[str, Any] = {} if router in ("hash", "expert_choice") else {"aux_loss": AUX_LOSS}
    options |= {"device": inputs.x.device, "dtype": torch.bfloat16, "backend": backend_of(inputs)}
    layer = MoE(shape.d, shape.n, shape.E, shape.K, router=router, **options)
    layer.gate_up_proj = nn.Parameter(inputs.gate_up_proj.detach())
    layer.down_proj = nn.Parameter(inputs.down_proj.detach())
    cast(Any, layer.router).weight = nn.Parameter(router_weight(shape, inputs))
    return layer


def layer_program(layer: MoE, x: Tensor, d_out: Tensor, **given: Tensor) -> ModuleProgram:
    """given: of `MoE.forward`: token_ids, mask."""

    def call() -> tuple[Tensor, Tensor]:
        out, stats = layer(x, **given)
        loss = torch.as_tensor(stats.aux_loss, device=x.device)
        return out, loss if loss.requires_grad else loss.requires_grad_()  # a router without one has a plain 0

    return ModuleProgram(layer, x, call, d_out, torch.ones((), device=x.device))


def ran(programs: dict[str, ModuleProgram], machine: Machine) -> dict[str, Row]:
    module.run_once([*programs.values()])
    return figures({name: calls_of(program) for name, program in programs.items()}, machine)


def choices(case: Case, machine: Machine) -> Row:
    """Layers by choice of experts: time, peak, and the pairs that are computed, beside top-k's."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    ids = torch.randint(50000, (shape.T,), device=machine.device)
    made = {}
    for name in CHOICES:
        given = {"token_ids": ids} if name == "hash" else {}
        made[name] = layer_program(layer_on(shape, inputs, name), inputs.x, inputs.grad_output, **given)
    found, row_counts = ran(made, machine), set()
    for name, program in made.items():
        given = {"token_ids": ids} if name == "hash" else {}
        with torch.no_grad():
            routing = cast(Any, program.module).router(inputs.x, **given)
        found[name]["pairs"] = int(routing.load.sum())
        row_counts.add(routing.experts.numel())
    return case.key | {"programs": found, "row_counts": sorted(row_counts)}


def padding(case: Case, machine: Machine) -> Row:
    """All tokens, half of them masked at random, and half as many tokens."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    layer = layer_on(shape, inputs, "top_k")
    mask = torch.rand(shape.T, device=machine.device).argsort() < shape.T // 2
    half = inputs.x.detach()[mask].requires_grad_()
    made = {
        "all": layer_program(layer, inputs.x, inputs.grad_output),
        "masked": layer_program(layer, inputs.x, inputs.grad_output, mask=mask),
        "half": layer_program(layer, half, inputs.grad_output[mask]),
    }
    return case.key | {"programs": ran(made, machine), "row_counts": [len(half) * shape.K]}


# --------------------------------------------------------------------------------------------------------------- skew


def everybody_s(shape: Sizes, device: str) -> Tensor:
    """(T, K) ids: expert 0 has every token, the other choices are uniform."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.zeros(shape.T, shape.K, dtype=torch.int32, device=device)
    if shape.K > 1:
        ids[:, 1:] = 1 + route(shape._replace(E=shape.E - 1, K=shape.K - 1), "uniform", device, generator)
    return ids


def skew(case: Case, machine: Machine) -> Row:
    """Dispatch and experts under routings of the same number of rows: uniform; by Zipf's law, with the largest exponent of a
    trained model's routers and with 1.2; one expert has every token; and all tokens have the same K."""
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    found = trained.exponents(machine.device)
    drawn = {"uniform": 0.0, "trained": max(found), "zipf": ZIPF}
    routings = {kind: trained.zipf(shape, exponent, machine.device) for kind, exponent in drawn.items()}
    routings["everybody_s"] = everybody_s(shape, machine.device)
    routings["same"] = torch.arange(shape.K, dtype=torch.int32, device=machine.device).repeat(shape.T, 1)
    leaves = (inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores)

    def experts(ids: Tensor) -> Tensor:
        return moe_mlp(*leaves, ids, num_experts=shape.E, backend=backend_of(inputs))

    programs: dict[str, dict[str, Call]] = {}
    for kind, ids in routings.items():
        programs[kind] = {
            "dispatch": partial(build_dispatch, ids, shape.E),
            "fwd": partial(experts, ids),
            "fwdbwd": lambda ids=ids: torch.autograd.grad(experts(ids), leaves, inputs.grad_output),  # type: ignore[misc]
        }
        programs[kind]["fwdbwd"]()
    return case.key | {"trained_exponents": found, "programs": figures(programs, machine)}


# --------------------------------------------------------------------------------------------------------- few tokens


def decode(case: Case, machine: Machine) -> Row:
    """A model's layer for few tokens, forward under no_grad: ours and transformers' grouped_mm.

    SETS batches go through the layer one after the other in what is timed, so that other experts are read each time.
    """
    shape, inputs = case.shape, peers.make_inputs(case.shape, device=machine.device)
    weight, absent = router_weight(shape, inputs), dict[str, str]()
    batches = [inputs] + [replace(inputs, x=torch.randn_like(inputs.x).requires_grad_()) for _ in range(SETS - 1)]
    programs: dict[str, list[ModuleProgram]] = {}
    for name in (OURS, "grouped_mm"):
        if made := peers.if_it_runs(name, partial(on_each, name, shape, batches, weight), absent):
            programs[name] = made
    if OURS in absent:
        raise RuntimeError(absent[OURS])
    router = cast(Any, programs[OURS][0].module).router
    with torch.no_grad():
        drawn = sum(router(batch.x).experts.unique().numel() for batch in batches) / SETS
        found = figures({name: {"sets": partial(forwards, made)} for name, made in programs.items()}, machine)
    for each in found.values():
        each["fwd_us"] = round(1e3 * each["sets_ms"] / SETS, 2)
    return case.key | {"programs": found, "chosen_experts": drawn, "absent": absent}


def on_each(name: str, shape: Sizes, batches: list[LayerInputs], weight: Tensor) -> list[ModuleProgram]:
    """A program for each batch, all on the same weights, without an auxiliary loss: who decodes has none."""
    made = [warmed(name, shape, batch, weight) for batch in batches]
    for program in made:
        if isinstance(program.module.eval(), MoE):
            cast(Any, program.module).router.aux_loss = 0.0
    return made


def forwards(programs: list[ModuleProgram]) -> None:
    for program in programs:
        program.forward()
