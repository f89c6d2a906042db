"""The exchange's kernels compiled, and the layout of the memory that ranks store to."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blazeproto import moe_mlp
from blazeproto.autograd.ranks import EXCHANGES, PeersNamed
from blazeproto.distributed import exchanges
from blazeproto.distributed.exchanges import PeerExchange
from blazeproto.distributed.peer_memory import MAX_RANKS, PART, MemoryLayout, PeerMemory, add_up_kernel, kernel
from blazeproto.gemm.compile import Kernel
from tests.refusals import refuses

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
        **dict.fromkeys(("experts", "scores", "pair_tokens"), ranks * pairs),
        "token_offsets": ranks * tokens + 1,
        "values": pairs,
        "rows": ranks * tokens * d // 2,
        "sums": (ranks - 1) * tokens * d // 2,
    }
    layout = MemoryLayout(ranks, tokens, pairs, d)
    assert {name: size for name, (_, size) in layout.sections.items()} == {name: 4 * n for name, n in words.items()}


def test_a_meeting_is_what_the_kernels_take() -> None:
    layout = MemoryLayout(3, 4, 8, 16)
    end = PeerMemory(layout, rank=1, bases=10, progress=20, device=0, blocks=8, patience=0.5)
    assert end.meeting == (10, 20, 3, 1, 500_000_000)
