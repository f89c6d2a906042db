"""`Symmetric` on one CPU rank: what it refuses, and overflow of several layers. ep_ranks.py has it on four. And its
memory and kernels."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ep_ranks import D, Given, build, symmetric
from symmetric_ranks import run_rank
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blazeproto import moe_mlp
from blazeproto.autograd import backends
from blazeproto.autograd.ranks import EXCHANGES, PeersNamed
from blazeproto.distributed import Symmetric, check_overflow, exchanges, expert_parallel
from blazeproto.distributed.exchanges import PeerExchange
from blazeproto.distributed.peer_memory import (
    GROUPS,
    MAX_RANKS,
    PART,
    SENDING_CTAS,
    MemoryLayout,
    PeerMemory,
    add_up_kernel,
    kernel,
)
from blazeproto.distributed.symmetric import hosts_of
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.sending import SENDING_RATE, TILE_RATE, WORDS, Sending, that_sends
from blazeproto.gemm.tiles import TileConfig
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

    monkeypatch.setattr(backends, "_missing_on_device", lambda *_: None)
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
    assert check_overflow(layers) == 8 + 5 and check_overflow(layers) == 0


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


# --- On all GPUs, two or more: symmetric_ranks.py has the cases, in one start of processes -------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_symmetric(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    mp.start_processes(run_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="spawn")


# --- The exchange's kernels compiled, and the layout of the memory that ranks store to -----------------------------------


KERNELS = [
    *map(kernel, ("share", "send", "send_back")),
    *(
        add_up_kernel(d, top_k, scores)
        for d in (256, 768, 2048)
        for top_k in (0, 1, 2, 3, 8)
        for scores in (False, True)
    ),
]


@pytest.mark.parametrize("made", KERNELS, ids=repr)
def test_zero_spills(made: Kernel) -> None:
    assert made.complete and made.compile().spills == 0


def test_sections_lie_apart_and_are_aligned() -> None:
    layout = MemoryLayout(ranks=3, max_tokens=5, max_pairs=11, d_model=24)
    end = 0
    for begin, size in layout.sections.values():
        assert begin == -(-end // 256) * 256  # right behind the one before
        end = begin + size
    assert layout.size >= end and layout.sections["rows"][1] == 3 * 5 * 24 * 2
    assert layout.sections["sums"][1] == 2 * 5 * 24 * 2  # none from itself


def exchange() -> Any:
    """One without a GPU."""
    made = object.__new__(PeerExchange)
    made.layout = MemoryLayout(ranks=1, max_tokens=4, max_pairs=8, d_model=16)
    made.places, made.memory = 4, torch.zeros(made.layout.size, dtype=torch.uint8)
    return made


@pytest.mark.parametrize(("multiprocessors", "sends"), [(31, False), (32, True)])
def test_products_send_where_half_of_their_grid_does_not(
    multiprocessors: int, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, made in {
        "distributed._symmetric_memory.empty": torch.zeros(exchange().layout.size, dtype=torch.uint8),
        "distributed._symmetric_memory.rendezvous": SimpleNamespace(buffer_ptrs=[0]),
        "cuda.get_device_properties": SimpleNamespace(multi_processor_count=multiprocessors),
        "cuda.synchronize": None,
        "distributed.barrier": None,
    }.items():
        monkeypatch.setattr(f"torch.{name}", lambda *_, its=made, **__: its)
    given: Any = SimpleNamespace(rank=lambda: 0), exchange().layout, torch.device("cpu"), 1.0
    assert PeerExchange(*given).by_products == sends


def test_rows_are_sent_from_16_byte_aligned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel loads 16 bytes at a time; a contiguous tensor may begin anywhere."""
    sent = []

    def send(rows: int, *_: Any, num_tokens: int, stream: int) -> tuple[int, bytes]:
        return rows, ctypes.string_at(rows, num_tokens * 16 * 2)

    made, whole = exchange(), torch.randn(1 + 3 * 16).bfloat16()
    made.end = SimpleNamespace(send=send)
    monkeypatch.setattr(exchanges, "current_stream", lambda _: 0)
    monkeypatch.setattr(exchanges.driver, "launch", lambda *given: sent.append(given))
    t = whole[1:].view(3, 16)
    assert t.is_contiguous() and t.data_ptr() % 16
    made.send(t, torch.ones(3, dtype=torch.int32))
    ((address, came),) = sent
    assert address % 16 == 0 and came == t.clone().view(torch.uint8).numpy().tobytes()
    made.end = SimpleNamespace(sending=lambda rows, *lists, **sizes: Sending((rows, *lists), sizes["num_tokens"]))
    lists = torch.zeros(3, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    _, sending = made.sending(t, *lists, awaited=True)  # which keeps the copy
    assert sending.words[0] % 16 == 0 and sending.rows.data_ptr() == sending.words[0] and torch.equal(sending.rows, t)


def test_the_kernels_rows_are_refused_on_another_backend() -> None:
    """As where d_expert is no multiple of 8, and "auto" would take the torch backend: by name, before a row is sent."""
    EXCHANGES["here"] = made = exchange()
    x, up, down = torch.ones(4, 16), torch.ones(2, 40, 16), torch.ones(2, 16, 20)
    peers = PeersNamed(torch.ones(4, dtype=torch.int32), "here")
    ids = torch.zeros(4, 1, dtype=torch.int32)
    refuses(lambda: moe_mlp(x, up, down, torch.ones(4, 1), ids, num_experts=2, peers=peers), "backend")
    del made


def test_sections_have_room_for_what_the_kernels_store() -> None:
    ranks, tokens, pairs, d = 3, 2 * PART + 1, 11, 24
    words = {
        "flags": 2 * MAX_RANKS,
        "part_flags": ranks * 3,
        "counts": ranks * GROUPS,
        **dict.fromkeys(("experts", "scores", "pair_tokens"), ranks * pairs),
        "token_offsets": ranks * tokens + 1,
        "values": pairs,
        "rows": ranks * tokens * d // 2,
        "sums": (ranks - 1) * tokens * d // 2,
    }
    layout = MemoryLayout(ranks, tokens, pairs, d)
    assert {name: size for name, (_, size) in layout.sections.items()} == {name: 4 * n for name, n in words.items()}


def test_what_a_product_sends_is_reckoned() -> None:
    """With 2 experts a token on 2 ranks, 3 of 4 tokens go to the other rank. Senders miss the rounds of tiles that this takes."""
    end = PeerMemory(MemoryLayout(2, 4, 8, 16), rank=1, bases=10, progress=20, device=0, blocks=8, patience=0.5)
    sending = end.sending(1, 2, 3, num_tokens=4, awaited=True)
    assert sending.size == 3 * 16 * 2 and len(sending.words) + 1 == len(WORDS)
    seconds = 2 * 128 * 256 * 64 / TILE_RATE
    *_, senders, late = sending._replace(size=round(7 * seconds * SENDING_RATE)).beside(TileConfig(), 64)
    assert (senders, late) == (SENDING_CTAS, 7)
    pairs = TileConfig(cluster=2)
    assert that_sends(pairs).cluster == 2 and that_sends(pairs, bias=True).cluster == 1


def test_a_meeting_is_what_the_kernels_take() -> None:
    layout = MemoryLayout(3, 4, 8, 16)
    end = PeerMemory(layout, rank=1, bases=10, progress=20, device=0, blocks=8, patience=0.5)
    assert end.meeting == (10, 20, 3, 1, 500_000_000)
