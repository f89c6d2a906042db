"""The exchange's kernels compiled, and the layout of the memory that ranks store to."""

from __future__ import annotations

import pytest

from blazeproto.distributed.peer_memory import MAX_RANKS, PART, MemoryLayout, PeerMemory, add_up_kernel, kernel
from blazeproto.gemm.compile import Kernel

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
    assert end <= layout.size


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
