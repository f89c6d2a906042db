"""Topologies and paddings of dispatches: the twin against loops over experts, the kernel against the twin to the bit."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from routings import make_routing

from blazeproto.blocksparse import Padding, Topology, topology_of
from blazeproto.dispatch import Dispatch, build_dispatch
from blazeproto.gemm.blocks import BLOCK
from tests.refusals import refuses

from .room import DISPATCHES, dispatch_of, on_machine, same_record, some

UNEQUAL = (128, 384, 256, 128)


def widths_of(dispatch: Dispatch, kind: str) -> Any:
    return UNEQUAL[: dispatch.num_experts] if kind == "unequal" else 256


def check_padding(padding: Padding, dispatch: Dispatch, num_rows: int) -> None:
    """Expert by expert, row by row."""
    offsets, row = dispatch.expert_token_offsets, 0
    pairs, rows = np.full(num_rows, -1), np.full(dispatch.num_pairs, -1)
    for e in range(dispatch.num_experts):
        assert padding.expert_row_offsets[e] == row
        mine = dispatch.expert_pair_indices[offsets[e] : offsets[e + 1]]
        for place, pair in enumerate(mine):
            pairs[row + place], rows[pair] = pair, row + place
        row += (len(mine) + BLOCK - 1) // BLOCK * BLOCK
    assert padding.expert_row_offsets[-1] == row <= num_rows
    np.testing.assert_array_equal(padding.row_pairs, pairs)
    np.testing.assert_array_equal(padding.pair_rows, rows)


def check_topology(topology: Topology, dispatch: Dispatch, widths: list[int]) -> None:
    """Its blocks are each expert's rows times its columns, once each, row by row; the transposed order is column by column."""
    rows, columns = (np.append(0, np.cumsum(sizes)) for sizes in (rows_of(dispatch), np.array(widths) // BLOCK))
    wanted = [
        (row, column)
        for e in range(dispatch.num_experts)
        for row in range(rows[e], rows[e + 1])
        for column in range(columns[e], columns[e + 1])
    ]
    count = len(wanted)
    assert topology.row_offsets[-1] == topology.column_offsets[-1] == count <= len(topology.row_indices)
    assert list(zip(topology.row_indices[:count], topology.column_indices[:count], strict=True)) == wanted
    by_column = sorted(range(count), key=lambda block: wanted[block][::-1])
    assert topology.block_offsets_t[:count].tolist() == by_column
    for offsets, lines in ((topology.row_offsets, 0), (topology.column_offsets, 1)):
        assert offsets.tolist() == [sum(place[lines] < line for place in wanted) for line in range(len(offsets))]
    (num_tiles,) = topology.tile_count
    covered = []
    for block, row, column, following in topology.tiles[:num_tiles].tolist():
        covered += [block] if following < 0 else [block, block + 1]
        assert wanted[block] == (row, column) and (following < 0 or wanted[block + 1] == (row, following))
    assert covered == list(range(count))
    for behind in (topology.row_indices, topology.column_indices, topology.block_offsets_t):
        assert (behind[count:] == -1).all()
    assert (topology.tiles[num_tiles:] == -1).all()


def rows_of(dispatch: Dispatch) -> list[int]:
    return [(rows + BLOCK - 1) // BLOCK for rows in np.diff(dispatch.expert_token_offsets).tolist()]


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("kind", ["equal", "unequal"])
@pytest.mark.parametrize("name", DISPATCHES)
def test_twin(name: str, kind: str, halves: int) -> None:
    dispatch = dispatch_of(name)
    widths = widths_of(dispatch, kind)
    up, down, padding = topology_of(dispatch, widths, halves)
    of_experts = list(widths) if kind == "unequal" else [widths] * dispatch.num_experts
    assert down.shape[1] == sum(of_experts) and up.shape == (down.shape[0], halves * down.shape[1])
    assert (up is down) == (halves == 1)
    check_topology(down, dispatch, of_experts)
    check_topology(up, dispatch, [halves * width for width in of_experts])
    check_padding(padding, dispatch, down.shape[0])


@pytest.mark.parametrize(("kind", "halves"), [("equal", 1), ("unequal", 2)])
@pytest.mark.parametrize(
    "name", some(DISPATCHES, "uniform", "busy", "one expert", "empty experts", "nobody", "sentinels")
)
def test_kernel(name: str, kind: str, halves: int) -> None:
    dispatch = dispatch_of(name)
    widths = widths_of(dispatch, kind)
    with on_machine():
        made = topology_of(dispatch, widths, halves)
    for record, right in zip(made, topology_of(dispatch, widths, halves), strict=True):
        same_record(record, right)


@pytest.mark.full
def test_many_experts() -> None:
    dispatch = build_dispatch(make_routing("zipf", 12, 512, 2), 512)
    with on_machine():
        made = topology_of(dispatch, 128)
    same_record(made[1], topology_of(dispatch, 128)[1])
    same_record(made[2], topology_of(dispatch, 128)[2])


def test_rows_that_every_routing_fits() -> None:
    """M is reached by the worst routing: one pair more than whole blocks of each expert."""
    ids = np.repeat(np.arange(3, dtype=np.int32), [129, 1, 1])[:, None]
    up, _, padding = topology_of(build_dispatch(ids, 3), 128)
    assert up.shape[0] == padding.expert_row_offsets[-1] == 4 * BLOCK


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("widths", {"widths": 0}),
        ("widths", {"widths": 130}),
        ("widths", {"widths": (128,) * 3}),
        ("widths[2]", {"widths": (128, 128, 64, 128)}),
        ("halves", {"halves": 3}),
        ("dispatch.expert_token_offsets", {"dispatch": replace(dispatch_of("uniform"), num_experts=5)}),
    ],
)
@pytest.mark.parametrize("kernels", [False, True])
def test_what_is_refused(argument: str, given: dict[str, Any], kernels: bool) -> None:
    call: dict[str, Any] = {"dispatch": dispatch_of("uniform"), "widths": 128} | given
    with on_machine() if kernels else nullcontext():
        refuses(lambda: topology_of(**call), argument)


def test_more_experts_than_the_kernel_takes() -> None:
    dispatch = build_dispatch(make_routing("random", 5, 513, 2), 513)
    with on_machine():
        refuses(lambda: topology_of(dispatch, 128), "dispatch.num_experts")


@pytest.mark.parametrize(("rows", "num_experts", "blocks"), [(0, 4, 0), (1, 4, 1), (5, 4, 4), (128, 1, 2), (300, 4, 6)])
def test_no_more_rows_than_the_worst_routing_takes(rows: int, num_experts: int, blocks: int) -> None:
    up, down, padding = topology_of(build_dispatch(np.zeros((rows, 1), np.int32), num_experts), 128, 2)
    assert (
        up.shape == (blocks * BLOCK, 2 * num_experts * BLOCK) and down.shape[0] == len(padding.row_pairs) == up.shape[0]
    )
    assert len(up.row_indices) == 2 * len(down.row_indices) == 2 * blocks
