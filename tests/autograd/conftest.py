"""What the tests of this folder share: a case of ``moe_mlp``, the bytes that a forward saves, memory that is poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

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
