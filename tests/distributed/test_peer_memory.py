"""The exchange's kernels compiled, and the layout of the memory that ranks store to."""

from __future__ import annotations

import pytest

from blazeproto.distributed.peer_memory import MemoryLayout, add_up_kernel, kernel
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
