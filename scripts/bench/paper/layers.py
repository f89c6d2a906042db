"""Rows of programs that compute one layer: MoEBlaze Figures 3 to 6, Tables 2, 4 and 5; SonicMoE Figures 1, 5 and 6a; combine."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from blazeproto.autograd.options import Options
from blazeproto.gemm import PRODUCTS, Sizes
from scripts.bench import peers
from scripts.bench.common import MIB, cfg_of
from scripts.bench.layer import input_sets
from scripts.bench.markdown import OURS
from scripts.bench.paper import programs
from scripts.bench.paper.machine import Machine
from scripts.bench.paper.programs import Build
from scripts.bench.peers import LayerInputs, Program
from scripts.bench.timing import Rotation, relative_difference, saved_bytes

Row = dict[str, Any]
LARGEST_DIFFERENCE = 0.02  # of a program's output from ours, both bf16


@dataclass(frozen=True)
class Case:
    """What a row is of. label: the paper's name of it, or a program's."""

    shape: Sizes
    activation: str = "swiglu"
    label: str = ""

    @property
    def key(self) -> Row:
        """What tells a row from the others of its file."""
        cfg = cfg_of(self.shape) | {"halves": self.shape.halves}
        return {"cfg": cfg, "activation": self.activation, "label": self.label}

    def __str__(self) -> str:
        return " ".join(filter(None, (self.label, str(self.shape), self.activation)))


def built(build: Build, shape: Sizes, inputs: list[LayerInputs]) -> list[Program]:
    """A program for each set of inputs, each run once."""
    made = [build(shape, one) for one in inputs]
    for program in made:
        program.forward_backward()
    return made


def build_all(
    case: Case, builds: Mapping[str, Build], machine: Machine
) -> tuple[dict[str, list[Program]], dict[str, str]]:
    """The programs that run and compute what the first one does; why the others are absent. The first has to run."""
    sets = input_sets(case.shape) if machine.device == "cuda" else 1
    inputs = [peers.make_inputs(case.shape, seed=seed, device=machine.device) for seed in range(sets)]
    made: dict[str, list[Program]] = {}
    absent: dict[str, str] = {}
    for name, build in builds.items():
        if found := peers.if_it_runs(name, partial(built, build, case.shape, inputs), absent):
            made[name] = found
        elif not made:
            raise RuntimeError(absent[name])
        if name in absent and machine.device == "cuda":  # it may have been out of memory
            gc.collect()
            torch.cuda.empty_cache()
    first, *others = made
    expected = made[first][0].forward().detach()
    for name in others:
        difference = (
            relative_difference(made[name][0].forward().detach(), expected) if made[name][0].computes_layer else 0.0
        )
        if not difference < LARGEST_DIFFERENCE:
            absent[name] = f"computes something else: its output differs by {difference:.3g}"
            del made[name]
    return made, absent


def layer_row(
    case: Case,
    builds: Mapping[str, Build],
    machine: Machine,
    together: tuple[str, ...] = (),
    *,
    graphs: bool = True,
) -> Row:
    """Times, saved and peak bytes of programs on one layer, random data and uniform routing.

    together: programs that are timed alike, by graph replay or as sums of kernels; all of them by default.
    graphs: whether graphs are tried at all.
    """
    made, absent = build_all(case, builds, machine)
    forward = {name: Rotation([program.forward for program in each]) for name, each in made.items()}
    both = {name: Rotation([program.forward_backward for program in each]) for name, each in made.items()}
    bytes_of = {
        name: (saved_bytes(each[0].forward, each[0].weights), machine.peak_bytes(both[name]))
        for name, each in made.items()
    }
    parts = (forward, both)
    timed = [machine.times(calls, together or tuple(made)) if graphs else machine.kernels(calls) for calls in parts]
    eager = machine.eager(both)
    row: Row = {"rounds": machine.rounds}
    row["programs"] = {
        name: {
            "fwd_ms": round(timed[0].ms[name], 4),
            "fwdbwd_ms": round(timed[1].ms[name], 4),
            "eager_fwdbwd_ms": round(eager[name], 4),
            "method": f"{timed[0].method[name]}/{timed[1].method[name]}",
            "saved_MiB": round(saved / MIB, 2),
            "peak_MiB": round(peak / MIB, 2),
        }
        for name, (saved, peak) in bytes_of.items()
    }
    return case.key | row | ({"absent": absent} if absent else {})


# ------------------------------------------------------------------------------------------------------------- the rows


def against_megablocks(case: Case, machine: Machine) -> Row:
    """MoEBlaze Figures 3 to 6 and Table 2: ours, ours keeping what Algorithm 1 keeps, and MegaBlocks; and the operations a byte
    of the fused up projection, beside §5.2's 1.25 of an activation by itself."""
    act = case.activation
    builds = {
        OURS: partial(programs.ours, activation=act),
        "paper": partial(programs.ours, activation=act, save="paper"),
    }
    if "mb_sparse" in machine.peers:
        builds["mb_sparse"] = partial(programs.megablocks, activation=act)
    up = PRODUCTS["up_forward"]
    intensity = up.operations(case.shape) / up.least_bytes(case.shape)
    return layer_row(case, builds, machine) | {"up_operations_a_byte": round(intensity, 1)}


def against_all(case: Case, machine: Machine) -> Row:
    """SonicMoE Figures 1, 5 and 6a: ours and every peer that is wanted."""
    builds = {OURS: programs.ours} | programs.of_peers(machine.peers)
    return layer_row(case, builds, machine, together=(OURS, "sonic", "bmm_ub"))


def ablation(case: Case, machine: Machine) -> Row:
    """MoEBlaze Tables 4 and 5, a program for each line."""
    builds: dict[str, Build] = {
        "torch, sort": programs.plain,
        "kernels, sort": partial(programs.ours, save="paper", method="sort"),
        "recomputing, sort": partial(programs.ours, method="sort"),
        "recomputing, tiled": programs.ours,
    }
    return layer_row(case, builds, machine, graphs=False)  # neither a host that waits nor CuPy's sort can be captured


COMBINES: tuple[str, ...] = next(each.metadata["check"].args[0] for each in fields(Options) if each.name == "combine")
"""The package's ways to sum a token's experts."""


def combines(case: Case, machine: Machine) -> Row:
    """Ours with every way to sum a token's experts (MoEBlaze §3: in the product; SonicMoE: gathered afterwards)."""
    return layer_row(case, {name: partial(programs.ours, combine=name) for name in COMBINES}, machine)
