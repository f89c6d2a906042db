"""What `scripts.lm.sharding` does to gradients, on one rank that is told of more."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.lm import sharding
from scripts.lm.model import GPT
from scripts.lm.ranks import Ranks
from scripts.lm.settings import PRESETS
from scripts.lm.sharding import Sharding


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(ranks: Ranks, **changes: Any) -> tuple[GPT, Sharding]:
    config = replace(PRESETS["cpu"], d_model=16, heads=2, d_expert=8, num_experts=2, **changes)
    return (model := GPT(config)), Sharding(model, config, ranks)


@pytest.mark.usefixtures("alone")
def test_gradients_of_whole_experts_become_those_of_the_mean_of_the_losses() -> None:
    """An expert's gradient is that of the ranks' sum, so it is divided; the others are a rank's own, so their mean is taken."""
    model, sharding = sharded(Ranks(torch.device("cpu")), layers=1, parallel="ep")
    ranks: Any = SimpleNamespace(size=4, mean=lambda t: t / 8)
    sharding.ranks = ranks
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sharding.reduce()
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        assert (local == (1 / 4 if name.endswith(("gate_up_proj", "down_proj")) else 1 / 8)).all(), name


@pytest.mark.parametrize(
    ("hosts", "precision", "expected"),
    [(1, "bf16", "symmetric"), (2, "bf16", "all_to_all"), (1, "fp8", "symmetric")],
)
def test_bf16_goes_over_nvlink_within_a_host(
    monkeypatch: pytest.MonkeyPatch, hosts: int, precision: str, expected: str
) -> None:
    """ "auto" on Hopper GPUs; the kernels wait as long as the other collectives."""
    made: dict[str, Any] = {"timeout": 7.0}
    monkeypatch.setattr(sharding, "missing_for_kernels", lambda device, dtype, experts, *widths: made.update(E=experts))
    monkeypatch.setattr(sharding, "hosts_of", lambda group: {*range(hosts)})
    monkeypatch.setattr(sharding, "Symmetric", lambda *given, **options: made.update(options) or "symmetric")
    monkeypatch.setattr(sharding, "AllToAll", lambda *given: "all_to_all")
    config = replace(PRESETS["cpu"], layers=1, d_model=16, heads=2, d_expert=128, num_experts=8, parallel="ep")
    config = replace(config, bf16=True, precision=precision)
    group, ranks = SimpleNamespace(size=lambda: 4), Ranks(torch.device("cpu"), size=4, timeout=7.0)
    assert sharding.dispatcher_of(GPT(config), config, group, ranks) == expected  # type: ignore[arg-type]
    assert made.get("E", 2) == 2 and made["timeout"] == 7.0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_kept_where_asked_for(monkeypatch: pytest.MonkeyPatch, reshard: bool) -> None:
    """The weights of every block and of the rest; else FSDP2 decides, which frees blocks' after their forward."""
    given: list[Any] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **how: given.append(how.get("reshard_after_forward")))
    sharded(Ranks(torch.device("cpu")), layers=2, parallel="fsdp", reshard=reshard)
    assert given == [None if reshard else False] * 3
