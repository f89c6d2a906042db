"""Timelines and counters of the kernels as they run on the GPU."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from blazeproto import gemm
from blazeproto.gemm import product as products
from blazeproto.lab import Workbench
from blazeproto.lab.counters import CountersRefused
from blazeproto.lab.timeline import Timeline, compiled_in, record
from tests.refusals import refuses

pytestmark = pytest.mark.gpu

SHAPE_SIZES = (4096, 512, 512, 16, 4)
OF_TILES = [name for name, entry in gemm.PRODUCTS.items() if entry.kernel]
HAVE_EPILOGUE_WARPS = {"up_forward", "down_forward", "up_backward_act"}


def call_of(product: str, config: gemm.TileConfig | None = None) -> Callable[[], list[torch.Tensor]]:
    """A product called with a bench's inputs, which returns what it made."""
    bench = Workbench(product, *SHAPE_SIZES, config=config)
    return lambda: [value.clone() for value in bench.run().values()]


def check_spans(timeline: Timeline) -> None:
    """Ordered, not negative, nested; and consumers have no stage before the producer has begun to fill one."""
    assert timeline.complete and timeline.cycles > 1000
    for warp in timeline.warps:
        own = [span for span in timeline.spans if span.warp == warp]
        assert own[0].depth == 0 and [span.begin for span in own] == sorted(span.begin for span in own)
        assert all(0 <= span.begin <= span.end <= own[0].end for span in own)
        pieces = timeline.innermost(warp)
        assert all(before[2] <= after[1] for before, after in pairwise(pieces))
        tiles = [clock for of, _, clock in timeline.tile_begins if of == warp]
        assert tiles == sorted(tiles) and 1 <= len(tiles) <= timeline.tiles
    for shares in timeline.summary().values():
        assert sum(shares.values()) == pytest.approx(1)
    begun = min(span.begin for span in timeline.spans if span.what in ("TMA", "copy"))
    filled = min(span.end for span in timeline.spans if span.what == "wait full")
    assert begun < filled


@pytest.mark.parametrize("product", OF_TILES)
def test_a_timeline_of_every_product_and_the_same_bits(product: str) -> None:
    call = call_of(product)
    plain = call()
    with compiled_in():
        timed = call()
    fixed_order = gemm.PRODUCTS[product].fixed_order
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True)) or not fixed_order

    timeline = record(call)
    check_spans(timeline)
    roles = set(timeline.warps.values())
    assert roles == {"producer", "consumer 0", "consumer 1"} | (
        {"epilogue"} if product in HAVE_EPILOGUE_WARPS else set()
    )
    found = {(span.role.split()[0], span.what) for span in timeline.spans}
    assert {("producer", "wait empty"), ("producer", "TMA"), ("consumer", "mma"), ("consumer", "wait full")} <= found
    if product in HAVE_EPILOGUE_WARPS:
        assert {("epilogue", "wait full"), ("epilogue", "store"), ("consumer", "hand-over")} <= found
    assert products.DEBUG == ()
    assert all(torch.equal(a, b) for a, b in zip(plain, call(), strict=True)) or not fixed_order


@pytest.mark.parametrize("product", ["up_forward", "up_backward_weight"])
def test_consumers_multiply_most_of_the_time(product: str) -> None:
    timeline = record(call_of(product), tiles=3)
    for consumer in ("consumer 0", "consumer 1"):
        shares = timeline.summary()[consumer]
        assert sum(share for what, share in shares.items() if "mma" in what) > 0.3, shares
    assert len(repr(timeline).splitlines()) > 12 and timeline.svg().startswith("<svg")


def test_another_cta_and_fewer_tiles() -> None:
    call = call_of("up_forward")
    check_spans(record(call, tiles=1, cta=5))
    with pytest.raises(RuntimeError, match="CTA 100000 recorded nothing"):
        record(call, cta=100_000)
    with pytest.raises(RuntimeError, match="recorded nothing"):
        record(call_of("combine"))
    refuses(lambda: record(lambda: (call(), call_of("up_backward_weight")())), "launch")


def test_with_tickets() -> None:
    """Strips that are skipped, and tiles that are found one at a time."""
    call = call_of("up_forward", gemm.TileConfig(tickets=True))
    plain = call()
    check_spans(record(call))
    assert all(torch.equal(a, b) for a, b in zip(plain, call(), strict=True))


def test_the_workbench_s_timeline() -> None:
    bench = Workbench("up_backward_weight", *SHAPE_SIZES)
    check_spans(bench.timeline(tiles=2))
    refuses(Workbench("combine", *SHAPE_SIZES).timeline, "timeline")


def test_counters_are_plausible() -> None:
    try:
        found = Workbench("up_forward", *SHAPE_SIZES).counters()
    except (CountersRefused, FileNotFoundError) as why:
        pytest.skip(str(why))
    assert found.kernel == "up_forward" and 0.01 < found.milliseconds < 1
    assert 0.05 < found.tensor_pipe <= 1 and 0.1 < found.l2_hit_rate <= 1 and 0 < found.dram_busy <= 1
    least = 2 * (16384 * 1024 + 16384 * 512)  # what is written, though part of it may stay in L2
    assert found.l2_bytes > least and found.dram_read + found.dram_written < 10 * found.l2_bytes
    assert len(found.stalls) == 5 and all(cycles >= 0 for cycles in found.stalls.values())
    assert "tensor pipe" in repr(found)
