"""Rows of programs that compute one layer: MoEBlaze Figures 3 to 6, Tables 2, 4 and 5; SonicMoE Figures 1, 5 and 6a; combine.

And of what a review asks of one layer: what each step from conventional code to ours saves, save policies, activations. Programs
compute the experts, dispatch included.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import SavePolicy, moe_mlp
from blazeproto.autograd.options import Options
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import PRODUCTS, Sizes
from scripts.bench import peers
from scripts.bench.common import MIB, cfg_of
from scripts.bench.layer import inputs_of
from scripts.bench.markdown import OURS
from scripts.bench.peers import Build, LayerInputs, Program, backend_of, layer_program
from scripts.bench.peers.layers import builds_of, dmoe, megablocks, ours, plain
from scripts.bench.timing import Machine, Row, rotations, saved_bytes, step_times

LARGEST_DIFFERENCE = 0.02  # of a program's output from ours, both bf16


@dataclass(frozen=True)
class Case:
    """The layer of a row. label: the paper's name of it, or a program's."""

    shape: Sizes
    activation: str = "swiglu"
    label: str = ""

    @property
    def key(self) -> Row:
        """The fields by which a row is found in its file."""
        cfg = cfg_of(self.shape) | {"halves": self.shape.halves}
        return {"cfg": cfg, "activation": self.activation, "label": self.label}

    def __str__(self) -> str:
        return " ".join(filter(None, (self.label, str(self.shape), self.activation)))


def build_all(
    case: Case, builds: Mapping[str, Build], machine: Machine
) -> tuple[dict[str, list[Program]], dict[str, str]]:
    """The programs that run and compute what the first one does; why the others are absent. The first has to run."""
    made, absent = peers.build_all(builds, case.shape, inputs_of(case.shape, machine))
    for name, difference in peers.output_differences(made, next(iter(made))).items():
        if not difference < LARGEST_DIFFERENCE:
            absent[name] = f"computes something else: its output differs by {difference:.3g}"
            del made[name]
    return made, absent


def layer_row(
    case: Case, builds: Mapping[str, Build], machine: Machine, together: tuple[str, ...] = (), *, graphs: bool = True
) -> Row:
    """Times, saved and peak bytes of programs on one layer, random data and uniform routing.

    together: programs that are timed alike, by graph replay or as sums of kernels; all of them by default.
    graphs: whether graphs are tried at all.
    """
    made, absent = build_all(case, builds, machine)
    both = rotations(made, "forward_backward")
    bytes_of = {
        name: {
            "saved_MiB": round(saved_bytes(each[0].forward, each[0].weights) / MIB, 2),
            "peak_MiB": round(machine.peak_bytes(both[name]) / MIB, 2),
        }
        for name, each in made.items()
    }
    timed, _ = step_times(made, machine, together or tuple(made), graphs=graphs)
    eager = machine.eager(both)
    programs = {name: timed[name] | {"eager_fwdbwd_ms": round(eager[name], 4)} | bytes_of[name] for name in made}
    return {"rounds": machine.rounds, "programs": programs} | ({"absent": absent} if absent else {})


# ------------------------------------------------------------------------------------------------------------- the rows


def against_megablocks(case: Case, machine: Machine) -> Row:
    """MoEBlaze Figures 3 to 6 and Table 2: ours, ours keeping what Algorithm 1 keeps, and MegaBlocks; and the operations a byte
    of the fused up projection, beside §5.2's 1.25 of an activation by itself."""
    act = case.activation
    builds: dict[str, Build] = {
        OURS: partial(ours, activation=act),
        "paper": partial(ours, activation=act, save="paper"),
    }
    if "mb_sparse" in machine.peers:
        builds["mb_sparse"] = partial(megablocks, activation=act)
    up = PRODUCTS["up_forward"]
    intensity = up.operations(case.shape) / up.least_bytes(case.shape)
    return layer_row(case, builds, machine) | {"up_operations_a_byte": round(intensity, 1)}


def against_all(case: Case, machine: Machine) -> Row:
    """SonicMoE Figures 1, 5 and 6a: ours and every peer that is wanted."""
    builds: dict[str, Build] = {OURS: ours} | builds_of(machine.peers)
    return layer_row(case, builds, machine, together=(OURS, "sonic", "bmm_ub"))


def ablation(case: Case, machine: Machine) -> Row:
    """MoEBlaze Tables 4 and 5, a program for each line."""
    builds: dict[str, Build] = {
        "torch, sort": plain,
        "kernels, sort": partial(ours, save="paper", method="sort"),
        "recomputing, sort": partial(ours, method="sort"),
        "recomputing, tiled": ours,
    }
    return layer_row(case, builds, machine, graphs=False)  # neither a host that waits nor CuPy's sort can be captured


COMBINES: tuple[str, ...] = next(each.metadata["check"].args[0] for each in fields(Options) if each.name == "combine")
"""The package's ways to sum a token's experts."""


def combines(case: Case, machine: Machine) -> Row:
    """Ours with every way to sum a token's experts (MoEBlaze §3: in the product; SonicMoE: gathered afterwards)."""
    return layer_row(case, {name: partial(ours, combine=name) for name in COMBINES}, machine)


# -------------------------------------------------------------------------------------------- what a review asks of a layer


def on_copies(shape: Sizes, inputs: LayerInputs) -> Program:
    """Ours on a copy of a token for each of its experts, which is written in forward and kept (MoEBlaze §2.1); act too."""
    call: Any = partial(moe_mlp, num_experts=shape.E, backend=backend_of(inputs), save="paper")
    experts = inputs.experts.reshape(-1, 1)

    def forward() -> torch.Tensor:
        copies, dispatch = inputs.x.repeat_interleave(shape.K, 0), build_dispatch(experts, shape.E, method="sort")
        scores = inputs.scores.reshape(-1, 1)
        weighed = call(copies, inputs.gate_up_proj, inputs.down_proj, scores, dispatch=dispatch)
        out: torch.Tensor = weighed.view(shape.T, shape.K, shape.d).sum(1)
        return out

    return layer_program(inputs, forward)


def waterfall(case: Case, machine: Machine) -> Row:
    """A program for each of `tables.STEPS`, and MegaBlocks' own layer if it is wanted.

    Sums of kernels, since a host that waits can't be captured.
    """
    builds: dict[str, Build] = {
        "plain": plain,
        "blocks": dmoe,
        "copies": on_copies,
        "sort": partial(ours, save="paper", method="sort"),
        "tiled": partial(ours, save="paper"),
        "minimal": ours,
        "fused": partial(ours, combine="fused_both"),
        "recompute": partial(ours, save="recompute"),
    }
    return layer_row(case, builds | builds_of(machine.peers), machine, graphs=False)


def policies(case: Case, machine: Machine) -> Row:
    """Ours with each save policy."""
    return layer_row(case, {each.value: partial(ours, save=each.value) for each in SavePolicy}, machine)


def activations(case: Case, machine: Machine) -> Row:
    """Ours with each activation that has a gate, or none, as the case's."""
    gated = activation_named(case.activation).gated
    names = [name for name in ACTIVATIONS if activation_named(name).gated == gated]
    return layer_row(case, {name: partial(with_activation, name) for name in names}, machine)


def with_activation(name: str, shape: Sizes, inputs: LayerInputs) -> Program:
    """Ours; not compared with the first one's output, as each activation computes another function."""
    return replace(ours(shape, inputs, activation=name), computes_layer=False)
