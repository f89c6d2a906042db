"""What `scripts.lm.sharding` does to gradients, on one rank that is told of more."""

from __future__ import annotations

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


def test_gradients_of_whole_experts_become_those_of_the_mean_of_the_losses() -> None:
    """An expert's gradient is that of the ranks' sum, so it is divided; the others are a rank's own, so their mean is taken."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = replace(PRESETS["cpu"], layers=1, d_model=16, heads=2, d_expert=8, num_experts=2, parallel="ep")
        model = GPT(config)
        sharding = Sharding(model, config, Ranks(torch.device("cpu")))
        ranks: Any = SimpleNamespace(size=4, mean=lambda t: t / 8)
        sharding.ranks = ranks
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        sharding.reduce()
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            expected = 1 / 4 if name.endswith(("gate_up_proj", "down_proj")) else 1 / 8
            assert (local == expected).all(), name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("hosts", [1, 2])
def test_tokens_go_over_nvlink_within_a_host_alone(monkeypatch: pytest.MonkeyPatch, hosts: int) -> None:
    """ "auto" on Hopper GPUs; the kernels wait as long as the other collectives."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(sharding, "missing_for_kernels", lambda device, dtype, experts, *widths: made.update(E=experts))
    monkeypatch.setattr(sharding, "hosts_of", lambda group: {*range(hosts)})
    monkeypatch.setattr(sharding, "Symmetric", lambda *given, **options: made.update(options) or "symmetric")
    monkeypatch.setattr(sharding, "AllToAll", lambda *given: "all_to_all")
    config = replace(PRESETS["cpu"], layers=1, d_model=16, heads=2, d_expert=8, num_experts=8, parallel="ep", bf16=True)
    group, ranks = SimpleNamespace(size=lambda: 4), Ranks(torch.device("cpu"), size=4, timeout=7.0)
    chosen: Any = sharding.dispatcher_of(GPT(config), config, group, ranks)  # type: ignore[arg-type]
    assert chosen == ("symmetric" if hosts == 1 else "all_to_all") and made["E"] == 2
    if hosts == 1:
        assert made["timeout"] == 7.0


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_kept_where_asked_for(monkeypatch: pytest.MonkeyPatch, reshard: bool) -> None:
    """Those of every block and of the rest; else FSDP2 decides, which frees blocks' after their forward."""
    given: list[Any] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **how: given.append(how.get("reshard_after_forward")))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = replace(PRESETS["cpu"], layers=2, d_model=16, heads=2, d_expert=8, parallel="fsdp", reshard=reshard)
        Sharding(GPT(config), config, Ranks(torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    assert given == [None if reshard else False] * 3


def test_fp8_travels_by_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `Symmetric` refuses, on GPUs of one host too."""
    monkeypatch.setattr(sharding, "missing_for_kernels", lambda *_: None)
    monkeypatch.setattr(sharding, "hosts_of", lambda group: {0})
    monkeypatch.setattr(sharding, "AllToAll", lambda *given: "all_to_all")
    widths = {"layers": 1, "d_model": 16, "heads": 2, "d_expert": 128, "num_experts": 8}
    config = replace(PRESETS["cpu"], **widths, parallel="ep", bf16=True, precision="fp8")
    group, ranks = SimpleNamespace(size=lambda: 4), Ranks(torch.device("cpu"), size=4)
    assert sharding.dispatcher_of(GPT(config), config, group, ranks) == "all_to_all"  # type: ignore[arg-type]
