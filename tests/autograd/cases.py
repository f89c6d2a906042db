"""One way to make the inputs of ``moe_mlp``, and to run it with its gradients; how near to float64 results must be, and when two
are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd import LowRank, moe_mlp
from blazeproto.reference import moe_mlp as reference_mlp

WEIGHTS = ("gate_up_proj", "down_proj", "up_bias", "down_bias")
NAMES = ("x", "gate_up_proj", "down_proj", "scores", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b")


@dataclass
class Case:
    """Inputs of one expert MLP, None for biases and low-rank factors that are not there."""

    x: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    scores: Tensor
    topk_experts: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    options: dict[str, Any]  # num_experts, activation, row_capacity
    varying: dict[str, Tensor]  # pair_tokens, token_offsets where experts per token vary
    d_out: Tensor
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None

    @property
    def trained(self) -> dict[str, Tensor]:
        """What gradients are taken of, by its name."""
        return {name: t for name in NAMES if (t := getattr(self, name)) is not None and t.requires_grad}

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.trained.values())

    def forward(self, **options: Any) -> Tensor:
        given: dict[str, Any] = {name: getattr(self, name) for name in (*NAMES[:6], "topk_experts")}
        if self.up_a is not None:
            given["up_factors"] = LowRank(self.up_a, self.up_b)
        if self.down_a is not None:
            given["down_factors"] = LowRank(self.down_a, self.down_b)
        return moe_mlp(**{**given, **self.options, **self.varying, **options})

    def function(self, *parameters: Tensor, **options: Any) -> Tensor:
        """`forward` of other tensors in the places of its parameters."""
        return replace(self, **dict(zip(self.trained, parameters, strict=True))).forward(**options)

    def run(self, **options: Any) -> list[Tensor]:
        """The output and the gradient of every parameter."""
        return self.gradients(self.forward(**options))

    def gradients(self, out: Tensor, **options: Any) -> list[Tensor]:
        made = torch.autograd.grad(out, self.parameters, self.d_out, **options) if self.trained else ()
        return [out.detach(), *made]

    def load(self, other: Case) -> None:
        """Another case's numbers in this one's memory."""
        with torch.no_grad():
            for name in (*NAMES, "topk_experts", "d_out"):
                if (mine := getattr(self, name)) is not None:
                    mine.copy_(getattr(other, name))
            for name, mine in self.varying.items():
                mine.copy_(other.varying[name])

    def reference(self) -> list[Tensor]:
        """`run` by the oracle on W + b a, in float64, with gradients of float64 copies of the parameters."""
        given = {name: getattr(self, name) for name in NAMES}
        wide = {name: t if t is None else t.detach().double().requires_grad_() for name, t in given.items()}
        weights = [wide["gate_up_proj"], wide["down_proj"]]
        for place, side in enumerate(("up", "down")):
            if wide[f"{side}_a"] is not None:
                weights[place] = weights[place] + wide[f"{side}_b"] @ wide[f"{side}_a"]
        biases = {"up_bias": wide["up_bias"], "down_bias": wide["down_bias"]}
        rest = {**biases, "pair_tokens": self.varying.get("pair_tokens"), **self.options}
        out = reference_mlp(wide["x"], *weights, wide["scores"], self.topk_experts, **rest)
        wanted = [wide[name] for name in self.trained]
        made = torch.autograd.grad(out, wanted, self.d_out.double(), materialize_grads=True) if wanted else ()
        return [out.detach(), *made]


def _distinct_experts(num_tokens: int, num_experts: int, top_k: int, idle: tuple[int, ...]) -> Tensor:
    """(T, K) distinct ids in each row, none of them in ``idle``. Where K > E, of K + E experts, E of them here."""
    known = num_experts if top_k <= num_experts else num_experts + top_k
    busy = torch.tensor([e for e in range(known) if e not in idle])
    return busy[torch.rand(num_tokens, len(busy)).argsort(dim=1)[:, :top_k]]


def make_case(
    num_tokens: int = 37,
    d_model: int = 16,
    d_expert: int = 24,
    num_experts: int = 5,
    top_k: int = 3,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    sentinels: bool = False,
    varying: bool = False,
    unused: int = 4,  # places without a pair, with ``varying``
    idle: tuple[int, ...] = (),
    capacity: float | None = None,  # row_capacity as a share of the pairs that have an expert
    factors: str | None = None,  # which projections have low-rank factors: "up", "down" or "both"
    rank: int = 8,
    factor_dtype: torch.dtype | None = None,
    trained: Iterable[str] | None = None,  # which weights and biases are; None: all
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Case:
    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        return (torch.randn(*shape) * fan_in**-0.5).to(device, dtype).requires_grad_()

    up_width = d_expert * activation_named(activation).halves
    experts = _distinct_experts(num_tokens, num_experts, top_k, idle)
    if sentinels and num_tokens:
        experts[torch.rand(experts.shape) < 0.2] = num_experts + 3
        experts[0] = -1  # a token without any expert
    extra: dict[str, Tensor] = {}
    if varying:
        kept = torch.rand(experts.shape) < 0.6
        pair_tokens = kept.nonzero()[:, 0]
        offsets = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        experts = torch.nn.functional.pad(experts[kept], (0, unused), value=-1)
        pair_tokens = torch.nn.functional.pad(pair_tokens, (0, unused))
        extra = {"pair_tokens": pair_tokens.int().to(device), "token_offsets": offsets.int().to(device)}
    num_rows = int(((experts >= 0) & (experts < num_experts)).sum())
    row_capacity = None if capacity is None else round(capacity * num_rows)
    score_dtype = torch.promote_types(dtype, torch.float32)
    case = Case(
        x=normal(num_tokens, d_model),
        gate_up_proj=normal(num_experts, up_width, d_model, fan_in=d_model),
        down_proj=normal(num_experts, d_model, d_expert, fan_in=d_expert),
        scores=torch.rand(experts.shape).to(device, score_dtype).requires_grad_(),
        topk_experts=experts.to(device, torch.int32),
        up_bias=normal(num_experts, up_width) if bias else None,
        down_bias=normal(num_experts, d_model) if bias else None,
        options={"num_experts": num_experts, "activation": activation, "row_capacity": row_capacity},
        varying=extra,
        d_out=torch.randn(num_tokens, d_model).to(device, dtype),
    )
    for side, width_out, width_in in (("up", up_width, d_model), ("down", d_model, d_expert)):
        if factors in (side, "both"):
            for name, *shape in (("a", rank, width_in), ("b", width_out, rank)):
                made = torch.randn(num_experts, *shape) * shape[-1] ** -0.5
                setattr(case, f"{side}_{name}", made.to(device, factor_dtype or dtype).requires_grad_())
    for name, t in case.trained.items() if trained is not None else ():
        t.requires_grad_(name not in WEIGHTS or name in trained)
    return case


# --- Comparing -----------------------------------------------------------------------------------------------------------

SMALL_OUTPUT = 10_000  # elements


def assert_close(got: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    """By each output's norm."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"output {index} of shape {tuple(b.shape)} is off by {error:.2e}"


def assert_same_bits(results: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(a, b), f"output {index}: {(a != b).sum()} of {a.numel()} elements differ"


def assert_as_good_as(got: Iterable[Tensor], yardstick: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """The Hopper backend's outputs about as near to float64's as those of the yardstick, the torch backend in bf16: the norm of
    the error may be 1.1 times its, the worst row and the worst element 3 times. Outputs of few elements, where either error is a
    matter of luck, may be off by 1 %."""
    for index, (a, y, reference) in enumerate(zip(got, yardstick, expected, strict=True)):
        reference, what = reference.double(), f"output {index} of shape {tuple(reference.shape)}"
        error, allowed = a.double() - reference, y.double() - reference
        assert error.isfinite().all(), f"{what}: {(~error.isfinite()).sum()} elements are not finite"
        tiny = 1e-6 * reference.norm()
        if error.numel() < SMALL_OUTPUT:
            assert error.norm() <= torch.maximum(1.1 * allowed.norm(), 0.01 * reference.norm()), what
            continue
        assert error.norm() <= 1.1 * allowed.norm() + tiny, f"{what}: {error.norm():.3e}, torch {allowed.norm():.3e}"
        rows, allowed_rows = (t.reshape(-1, t.shape[-1]).norm(dim=1).max() for t in (error, allowed))
        assert rows <= 3 * allowed_rows + tiny, f"{what}: worst row {rows:.3e}, torch {allowed_rows:.3e}"
        worst, allowed_worst = error.abs().max(), allowed.abs().max()
        assert worst <= 3 * allowed_worst + tiny, f"{what}: worst element {worst:.3e}, torch {allowed_worst:.3e}"
