"""`Symmetric` on one CPU rank: what it refuses, and overflow of several layers. ep_ranks.py has it on four."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import D, Given, build, symmetric
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blazeproto.autograd import backends
from blazeproto.distributed import Symmetric, check_overflow, expert_parallel
from blazeproto.distributed.exchanges import PeerExchange
from blazeproto.distributed.peer_memory import MemoryLayout
from blazeproto.distributed.symmetric import hosts_of
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"d_model": 12}, ValueError),
        ({"max_tokens": 0}, ValueError),
        ({"max_pairs": 1.5}, TypeError),
        ({"overflow": "ignore"}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"device": "tpu"}, ValueError),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, ValueError),
        ({"device": "meta"}, ValueError),
    ],
)
def test_an_argument_that_does_not_fit(group: dist.ProcessGroup, given: dict[str, Any], error: type[Exception]) -> None:
    refuses(lambda: symmetric(group, **given), *given, error)


def test_its_ranks(group: dist.ProcessGroup) -> None:
    sizes = {"d_model": D, "max_tokens": 32, "max_pairs": 256}

    class Ranks(dist.ProcessGroup):
        def __init__(self, number: int) -> None:
            super().__init__(0, number)

    refuses(lambda: Symmetric(Ranks(33), 33, **sizes), "group")
    refuses(lambda: Symmetric(Ranks(32), 33, **sizes), "num_experts")


def test_ranks_of_several_hosts(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on a GPU, before its memory is asked for; the twin takes them."""
    assert len(hosts_of(group)) == 1
    if (boot := Path("/proc/sys/kernel/random/boot_id")).exists():
        assert boot.read_text().strip() in next(iter(hosts_of(group)))  # names repeat
    monkeypatch.setattr(
        dist, "all_gather_object", lambda hosts, own, group: hosts.__setitem__(slice(None), [own, "other"])
    )
    symmetric(group)
    monkeypatch.setattr("blazeproto.distributed.symmetric.check_device", lambda device: None)
    refuses(lambda: symmetric(group, device="cuda"), "group")


@pytest.mark.parametrize("experts", [512, 513])
def test_experts_of_a_rank_are_bounded_and_not_those_of_all(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, experts: int
) -> None:
    """As on a GPU: a rank's products take 512. What fits reaches the exchange."""

    class Sent(Exception):
        pass

    def share(*_: Any) -> None:
        raise Sent

    monkeypatch.setattr(backends, "_missing_on_device", lambda index: None)
    dispatcher: Any = Symmetric(group, experts, d_model=D, max_tokens=32, max_pairs=256)
    dispatcher.ranks, dispatcher.num_experts, dispatcher.device = 4, 4 * experts, torch.device("cuda", 0)
    dispatcher._exchange = SimpleNamespace(share=share)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, D, dtype=torch.bfloat16, device=dispatcher.device)
        call = (x, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32), None, None)
        with (
            pytest.raises(Sent)
            if experts <= 512
            else pytest.raises(ValueError, match="at most 512 experts; there are 513")
        ):
            dispatcher.dispatch(*call)


@pytest.mark.parametrize(
    ("option", "value"), [("workspace_bytes", 1 << 20), ("combine", "fused"), ("combine", "fused_both")]
)
def test_options_are_refused_then_and_later(group: dist.ProcessGroup, option: str, value: Any) -> None:
    dispatcher = symmetric(group)
    refuses(lambda: expert_parallel(build(**{option: value}), group, dispatcher=dispatcher), option)
    layer = expert_parallel(build(), group, dispatcher=dispatcher)
    setattr(layer, option, value)
    refuses(lambda: layer(torch.zeros(4, D, dtype=torch.float64)), option)


def test_tokens_that_do_not_fit(group: dist.ProcessGroup) -> None:
    dispatcher = symmetric(group, max_tokens=8, max_pairs=24)

    def dispatch(tokens: int, top_k: int, d: int = D, device: str = "cpu") -> None:
        x, scores = torch.zeros(tokens, d, device=device), torch.zeros(tokens, top_k, device=device)
        dispatcher.dispatch(x, scores, torch.zeros(tokens, top_k, dtype=torch.int32, device=device), None, None)

    dispatch(8, 3)
    refuses(lambda: dispatch(9, 2), "x")
    refuses(lambda: dispatch(8, 2, d=24), "x")
    refuses(lambda: dispatch(1, 4), "topk_experts")
    refuses(lambda: dispatch(8, 2, device="meta"), "x")
    pairs, offsets = torch.zeros(25), torch.arange(0, 26, 5, dtype=torch.int32)
    varying = torch.zeros(5, D), pairs, pairs.int(), pairs.int(), offsets
    refuses(lambda: dispatcher.dispatch(*varying), "topk_experts")


def test_overflow_of_two_layers(group: dist.ProcessGroup) -> None:
    """They share a dispatcher, whose count is of both, and of all calls since it was last asked."""
    dispatcher = symmetric(group, overflow="drop")
    layers = nn.ModuleList(
        expert_parallel(build(router=Given(2, torch.float64), top_k=2, row_capacity=rows), group, dispatcher=dispatcher)
        for rows in (12, 15, 99)
    )
    x = torch.randn(10, D, dtype=torch.float64)
    for layer in layers:
        layer.router.ids = torch.tensor([0, 1]).expand(10, 2)
        layer(x)
    assert check_overflow(layers) == 8 + 5
    assert check_overflow(layers) == 0


def test_where_the_other_gpus_have_their_memory(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer may begin before the memory that is handed out: by as much on every GPU."""
    import torch.distributed._symmetric_memory as symmetric_memory

    def rendezvous(memory: torch.Tensor, _: dist.ProcessGroup) -> SimpleNamespace:
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr() - 512, 4096])

    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    exchange = PeerExchange(group, MemoryLayout(2, 32, 64, D), torch.device("cpu"), 1.0)
    assert exchange._bases.tolist() == [exchange.memory.data_ptr(), 4096 + 512]
