"""What the tests of this folder share: a case of ``moe_mlp``, the bytes that a forward saves, calls that are watched."""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.autograd import cases
from tests.threads import one_thread  # noqa: F401


@pytest.fixture
def make_case() -> Callable[..., cases.Case]:
    """``make_case(num_tokens, d_model, d_expert, num_experts, top_k, activation=…, bias=…, …)`` -> Case."""
    return cases.make_case


@pytest.fixture
def gpu_case() -> Callable[..., cases.Case]:
    """`make_case` in bf16 on the GPU."""
    return partial(cases.make_case, dtype=torch.bfloat16, device="cuda")


def _bytes_saved_by(forward: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that a forward pass saves, beside the weights."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert forward().requires_grad
    kept, beside = ({s.data_ptr(): s for s in map(Tensor.untyped_storage, of)} for of in (saved, weights))
    return sum(storage.nbytes() for place, storage in kept.items() if place not in beside)


@pytest.fixture
def bytes_saved_by() -> Callable[..., int]:
    """``bytes_saved_by(forward, weights)`` -> bytes."""
    return _bytes_saved_by


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``watch(module, name, look)``: from now on ``look`` has the arguments of each call of a module's function, before it."""

    def watch(module: ModuleType, name: str, look: Callable[..., object]) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: (look(*args, **options), real(*args, **options))[1])

    return watch
