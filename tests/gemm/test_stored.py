"""The ring of decoded weights (gemm/stored.py) has room wherever a kernel could otherwise wait for ever."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from blazeproto.gemm import stored
from blazeproto.gemm.linear import may_lie_over
from blazeproto.gemm.tiles import BF16
from blazeproto.runtime.arch import AMPERE, HOPPER


@pytest.mark.parametrize("seed", range(40))
def test_a_ring_has_room_for_a_part_more_than_an_expert_has(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        out, inner, halves, width = (
            32 * draw.randint(1, 2 ** draw.randint(1, 10)),
            32 * draw.randint(1, 2 ** draw.randint(1, 10)),
            draw.choice((1, 2)),
            draw.choice((128, 192, 256)),
        )
        size = stored.ring_for((4, out * halves, inner), rows(HOPPER, 10**6))
        for columns, reduction, gates in ((out, inner, halves), (inner, out * halves, 1)):
            tile = width // gates
            part = tile << stored.part_shift(columns, tile, gates * reduction * BF16.bytes)
            parts = -(-columns // part)
            assert parts <= stored.MOST_PARTS and size // (gates * part * reduction * BF16.bytes) > parts


def rows(arch: Any, count: int) -> Any:
    return SimpleNamespace(arch=arch, num_rows=count)


def test_few_rows_and_ampere_have_no_ring() -> None:
    shape = (4, 64, 32)
    assert stored.few_rows(shape, rows(HOPPER, 255)) and not stored.few_rows(shape, rows(HOPPER, 256))
    assert stored.ring_for(shape, rows(HOPPER, 255)) == stored.ring_for(shape, rows(AMPERE, 256)) == 0
    assert stored.ring_for(shape, rows(HOPPER, 0), always=True) == stored.ring_for(shape, rows(HOPPER, 256)) > 0


def test_y_lies_over_act_only_in_tiles_of_whole_rows() -> None:
    few = stored.Storage("mxfp4", 1, 32, 1, few=True)
    for arch in (HOPPER, AMPERE):
        for width, over in ((64, True), (128, False), (256, False)):
            assert may_lie_over(None, False, (width, width), width, arch, few) is over
            assert may_lie_over(None, False, (width, width), width, arch, few._replace(few=False))


def test_more_rows_need_fewer_decoders() -> None:
    counts = [stored.decoders("mxfp4", each, 132) for each in (0, 64, 512, 2048, 10**6)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 66 and counts[-1] == 1
