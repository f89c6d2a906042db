"""One way to make the inputs of ``moe_mlp`` for every test in this folder, and to run it with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto.activations import activation_named
from blazeproto.autograd import moe_mlp
from blazeproto.reference import moe_mlp as reference_mlp
from tests.threads import one_thread  # noqa: F401


@dataclass
class Case:
    """Inputs of one expert MLP. ``parameters`` are what gradients are taken of, None for biases that are not there."""

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

    @property
    def parameters(self) -> list[Tensor]:
        named = (self.x, self.gate_up_proj, self.down_proj, self.scores, self.up_bias, self.down_bias)
        return [t for t in named if t is not None]

    def forward(self, **options: Any) -> Tensor:
        return moe_mlp(
            self.x,
            self.gate_up_proj,
            self.down_proj,
            self.scores,
            self.topk_experts,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            **{**self.options, **self.varying, **options},
        )

    def run(self, **options: Any) -> list[Tensor]:
        """The output and the gradient of every parameter."""
        out = self.forward(**options)
        return [out.detach(), *torch.autograd.grad(out, self.parameters, self.d_out)]

    def reference(self) -> list[Tensor]:
        """The same by the oracle; gradients in float64 too, taken of float64 copies of the parameters."""
        x, gate_up_proj, down_proj, scores, up_bias, down_bias = (
            None if t is None else t.detach().double().requires_grad_()
            for t in (self.x, self.gate_up_proj, self.down_proj, self.scores, self.up_bias, self.down_bias)
        )
        out = reference_mlp(
            x,
            gate_up_proj,
            down_proj,
            scores,
            self.topk_experts,
            up_bias=up_bias,
            down_bias=down_bias,
            pair_tokens=self.varying.get("pair_tokens"),
            **self.options,
        )
        parameters = [t for t in (x, gate_up_proj, down_proj, scores, up_bias, down_bias) if t is not None]
        return [out.detach(), *torch.autograd.grad(out, parameters, self.d_out.double())]


def _distinct_experts(num_tokens: int, num_experts: int, top_k: int, idle: tuple[int, ...]) -> Tensor:
    """(T, K) distinct ids in each row, none of them in ``idle``. Where K > E, of K + E experts, E of them here."""
    known = num_experts if top_k <= num_experts else num_experts + top_k
    busy = torch.tensor([e for e in range(known) if e not in idle])
    ranks = torch.rand(num_tokens, len(busy)).argsort(dim=1)[:, :top_k]
    return busy[ranks]


def _make_case(
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
    return Case(
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


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """``make_case(num_tokens, d_model, d_expert, num_experts, top_k, activation=…, bias=…, …)`` -> Case."""
    return _make_case


def _bytes_saved_by(forward: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that a forward pass saves, beside the weights."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.fixture
def bytes_saved_by() -> Callable[..., int]:
    """``bytes_saved_by(forward, weights)`` -> bytes."""
    return _bytes_saved_by


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every torch.empty comes filled with NaN (indices: the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
