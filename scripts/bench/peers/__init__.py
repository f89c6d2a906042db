"""Programs that compute one MoE layer, on the same inputs: what they have in common, and how they are built.

`layers` has the experts alone: weights are put into the layout a peer wants beforehand, top-k is excluded, and the dispatch
metadata that a peer makes from the chosen expert ids is included. `modules` has whole layers. A peer that can't be imported, or
fails to build, is absent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from blazeproto.gemm import Sizes
from scripts.bench.common import free_memory, route
from scripts.bench.timing import relative_difference

T = TypeVar("T")


@dataclass(frozen=True)
class LayerInputs:
    """Every program's inputs. x, the weights and the scores are leaves that require gradients."""

    x: torch.Tensor  # (T, d) bf16
    gate_up_proj: torch.Tensor  # (E, h, d) bf16, gate rows then up rows, or the n of an expert without a gate
    down_proj: torch.Tensor  # (E, d, n) bf16
    scores: torch.Tensor  # (T, K) fp32, a softmax over the K chosen
    experts: torch.Tensor  # (T, K) int32, distinct in a row
    grad_output: torch.Tensor  # (T, d) bf16
    seed: int = 0


@dataclass(frozen=True)
class Program:
    """A layer's forward, and what its backward differentiates."""

    forward: Callable[[], Any]  # the output, or several
    leaves: tuple[torch.Tensor, ...]  # the input first
    grad_output: Any  # as the output
    weights: tuple[torch.Tensor, ...]  # not counted among the saved bytes
    computes_layer: bool = True  # False for a bound that leaves work out
    metadata: Callable[[], object] | None = None  # the dispatch alone
    layouts: tuple[
        Callable[[torch.Tensor], torch.Tensor], ...
    ] = ()  # of the weights' gradients, the last leaves: as ours

    def forward_backward(self) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """(output, gradients of the leaves)."""
        out = self.forward()
        return out, torch.autograd.grad(out, self.leaves, self.grad_output)

    def clear(self) -> None:
        """No leaf has a gradient."""

    def weight_gradients(self) -> dict[str, torch.Tensor]:
        """By place, laid out as ours; none without ``layouts``."""
        gradients = self.forward_backward()[1][-len(self.layouts) :] if self.layouts else ()
        pairs = zip(self.layouts, gradients, strict=True)
        return {f"weight_{place}": as_ours(gradient) for place, (as_ours, gradient) in enumerate(pairs)}


def layer_program(inputs: LayerInputs, forward: Callable[[], Any], **others: Any) -> Program:
    """A program that differentiates x, both weights and the scores as they are."""
    weights = (inputs.gate_up_proj, inputs.down_proj)
    return Program(forward, (inputs.x, *weights, inputs.scores), inputs.grad_output, weights, **others)


def make_inputs(shape: Sizes, routing: str = "uniform", seed: int = 0, device: str = "cuda") -> LayerInputs:
    """Random inputs at unit scale, weights at 1/sqrt(fan-in): never zeros, on which a matrix unit runs faster."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        out = torch.empty(size, dtype=torch.bfloat16, device=device)
        for part in out.split(max(1, (1 << 28) // max(1, out[0].numel()))):  # no second copy of a large tensor
            part.normal_(0.0, scale, generator=generator)
        return out

    scores = torch.randn(shape.T, shape.K, device=device, generator=generator).softmax(dim=1)
    made = LayerInputs(
        x=normal(shape.T, shape.d),
        gate_up_proj=normal(shape.E, shape.h, shape.d, scale=shape.d**-0.5),
        down_proj=normal(shape.E, shape.d, shape.n, scale=shape.n**-0.5),
        scores=scores,
        experts=route(shape, routing, device, generator),
        grad_output=normal(shape.T, shape.d),
        seed=seed,
    )
    for leaf in (made.x, made.gate_up_proj, made.down_proj, made.scores):
        leaf.requires_grad_()
    return made


def backend_of(inputs: LayerInputs) -> str:
    """The kernels on a GPU; torch operations in the short form on a CPU."""
    return "hopper" if inputs.x.is_cuda else "torch"


Build = Callable[[Sizes, LayerInputs], Any]  # makes a `Program`, or a `modules.ModuleProgram`


def run_once(programs: list[Any]) -> list[Any]:
    for program in programs:
        program.forward_backward()
        program.clear()
    return programs


def build_all(
    builds: Mapping[str, Build], shape: Sizes, inputs: Sequence[LayerInputs]
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """The programs that run, one for each set of inputs, each run once; why the others are absent. The first has to run."""

    def built(build: Build) -> list[Any]:
        return run_once([build(shape, one) for one in inputs])

    made: dict[str, list[Any]] = {}
    absent: dict[str, str] = {}
    for name, build in builds.items():
        if found := if_it_runs(name, partial(built, build), absent):
            made[name] = found
        elif not made:
            raise RuntimeError(absent[name])
        if name in absent:
            free_memory()  # it may have been out of it
    return made, absent


def output_differences(programs: Mapping[str, Sequence[Program]], exact: str) -> dict[str, float]:
    """The distance of each program's output from ``exact``'s, for programs that compute the layer."""
    expected = programs[exact][0].forward().detach()
    compared = {name: program for name, (program, *_) in programs.items() if program.computes_layer}
    return {name: relative_difference(program.forward().detach(), expected) for name, program in compared.items()}


def if_it_runs(name: str, build: Callable[[], T], absent: dict[str, str]) -> T | None:
    """The result of ``build``; prints how long it compiled and tuned. None if it raises: then ``absent`` says why."""
    begin = time.perf_counter()
    made = None
    try:
        made = build()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  whatever it raises, the others are measured
        absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
        print(f"  {name} is absent: {absent[name]}", flush=True)
    if (seconds := time.perf_counter() - begin) > 5:
        print(f"  {name}: {seconds:.0f} s to compile and tune", flush=True)
    return made
