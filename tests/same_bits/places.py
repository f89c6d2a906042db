"""Where a layer runs and in which dtypes, a plain training step, and comparing bits.

The same layer gives the same bits in a plain step (build, forward, backward) and through copies, files, hooks, checkpoints,
wrappers, threads, streams and graphs.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blazeproto import MoE

TOKENS, D_MODEL, D_EXPERT, EXPERTS, TOP_K = 300, 256, 128, 8, 2
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
    """device and backend; and whether weights are float32, computed in bf16 under autocast, or bf16 themselves."""

    device: str
    backend: str
    float32_weights: bool

    def build(self, seed: int = 1, **options: Any) -> MoE:
        """All tests have layers of one configuration, so that kernels are compiled once."""
        torch.manual_seed(seed)
        dtype = torch.float32 if self.float32_weights else torch.bfloat16
        sizes = (D_MODEL, D_EXPERT, EXPERTS, TOP_K)
        layer = MoE(*sizes, **{"bias": True, "backend": self.backend, "dtype": dtype, **options})
        return layer.to(self.device)

    def batch(self, seed: int = 2, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
        """x, which requires a gradient, and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        x, d_out = (torch.randn(tokens, D_MODEL, generator=generator).bfloat16().to(self.device) for _ in range(2))
        return x.requires_grad_(), d_out

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.float32_weights:
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def forward(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the auxiliary loss."""
        with self.autocast():
            out, stats = layer(x)
        return out, stats.aux_loss


PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(Place("cpu", "torch", False), id="cpu"),
        pytest.param(Place("cpu", "torch", True), id="cpu-float32"),
        pytest.param(Place("cuda", "hopper", False), id="gpu", marks=pytest.mark.gpu),
        pytest.param(Place("cuda", "hopper", True), id="gpu-float32", marks=pytest.mark.gpu),
        pytest.param(Place("cuda", "ampere", False), id="gpu-ampere", marks=pytest.mark.gpu),
        pytest.param(Place("cuda", "ampere", True), id="gpu-ampere-float32", marks=pytest.mark.gpu),
    ],
)


def backward(out: Tensor, aux_loss: Tensor, d_out: Tensor, **options: Any) -> None:
    """The sum of the output's gradient and the auxiliary loss, in one pass."""
    torch.autograd.backward([out, aux_loss], [d_out, torch.ones_like(aux_loss)], **options)


def collect(out: Tensor, x: Tensor, module: nn.Module) -> Results:
    """The output and the gradients of x and of all parameters, clones of them."""
    named = {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    missing = [name for name, t in named.items() if t is None]
    assert not missing, f"no gradient of {missing}"
    return {name: t.detach().clone() for name, t in named.items() if t is not None}


def train(place: Place, layer: nn.Module, x: Tensor, d_out: Tensor) -> Results:
    """A plain training step: forward, backward."""
    x.grad = None
    layer.zero_grad()
    out, aux_loss = place.forward(layer, x)
    backward(out, aux_loss, d_out)
    return collect(out, x, layer)


def assert_same_bits(got: Results, expected: Results) -> None:
    assert list(got) == list(expected)
    for name, t in got.items():
        other = expected[name]
        assert t.dtype == other.dtype, f"{name}: {t.dtype}, expected {other.dtype}"
        assert torch.equal(t, other), f"{name}: {int((t != other).sum())} of {t.numel()} elements differ"


def plain(place: Place, seed: int = 2, **options: Any) -> Results:
    """What all else is compared with. Float32 weights have float32 gradients that were never rounded to bf16."""
    results = train(place, place.build(**options), *place.batch(seed))
    if place.float32_weights:
        for name in ("gate_up_proj", "down_proj"):
            values = results[name][results[name] != 0]
            assert values.dtype == torch.float32
            assert (values.bfloat16().float() == values).float().mean() < 0.1, f"{name} was rounded to bf16"
    return results


def in_two_threads(work: Callable[[int], None]) -> None:
    """``work(0)`` and ``work(1)``, which begin at the same time. Raises what they raise, once both have ended."""
    start = threading.Barrier(2)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(begin, range(2)))
