"""Block-sparse products against dense masked ones: the twins, and on the machine the kernels."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blazeproto import gemm
from blazeproto.blocksparse import Topology
from blazeproto.gemm import TWINS, TileConfig
from blazeproto.gemm.blocks import BLOCK
from blazeproto.gemm.dsd import tiles
from blazeproto.lab.accuracy import Pool
from blazeproto.lab.oracle import EXACT, YARDSTICK, evaluate_blocks, make_block_case, run_block_kernels
from blazeproto.lab.target import Machine
from blazeproto.runtime.rounding import from_bfloat16_bits
from blazeproto.runtime.target import launches_on
from tests.blocksparse.block_cases import MASKS, bits, cases
from tests.refusals import refuses

from .room import on_machine

NAMES = list(cases(Topology.of_blocks(MASKS["one"])))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_twins(name: str, mask: str) -> None:
    topology = Topology.of_blocks(MASKS[mask])
    function, arrays, options, right = cases(topology)[name]
    np.testing.assert_array_equal(function(*arrays, topology, **options), right)


def test_twins_round_to_bf16() -> None:
    topology = Topology.of_blocks(MASKS["random"])
    for function, arrays, options, _ in cases(topology).values():
        given = [from_bfloat16_bits(bits(array / 7)) for array in arrays]
        exact, made = (TWINS[function.__name__](*given, topology, round_to=r, **options) for r in (None, "bf16"))
        np.testing.assert_array_equal(made, from_bfloat16_bits(bits(exact)))
        assert (made != exact).any()


@pytest.mark.parametrize(
    "mask", ["random", *(pytest.param(name, marks=pytest.mark.full) for name in ("empty", "diagonal", "one"))]
)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_on_the_machine(name: str, mask: str) -> None:
    topology = Topology.of_blocks(MASKS[mask])
    function, arrays, options, right = cases(topology)[name]
    with on_machine():
        made = function(*map(bits, arrays), topology, **options)
    np.testing.assert_array_equal(from_bfloat16_bits(made), from_bfloat16_bits(bits(right)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_against_float64(device: str) -> None:
    """Topologies of no, some and all blocks; on a GPU the kernels, twice with the same bits."""
    pool = Pool()
    shapes = (((3, 2), 0.5), ((1, 3), 1.0), ((2, 2), 0.0), ((60, 42), 0.5))
    for seed, (shape, share) in enumerate(shapes[: 4 if device == "cuda" else 3]):
        case = make_block_case(np.random.default_rng(seed).random(shape) < share, 136, 200, device=device, seed=seed)
        made = run_block_kernels(case)
        again = run_block_kernels(case) if device == "cuda" else made
        assert all(torch.equal(made[name], again[name]) for name in made)
        pool.add_all(made, evaluate_blocks(YARDSTICK, case), evaluate_blocks(EXACT, case))
    assert not pool.failures()


def test_what_lies_behind_the_blocks_is_left() -> None:
    """Room for more blocks than there are, as a topology made on a device has."""
    topology = Topology.of_blocks(MASKS["random"])
    room = 3
    wider = Topology(
        topology.shape,
        *(np.pad(getattr(topology, name), (0, room), constant_values=-1) for name in ("row_indices", "column_indices")),
        topology.row_offsets,
        topology.column_offsets,
        np.pad(topology.block_offsets_t, (0, room), constant_values=-1),
        np.pad(topology.tiles, ((0, room), (0, 0)), constant_values=-1),
        topology.tile_count,
    )
    called = cases(topology)
    for name in ("SDD", "DSD", "DS^TD", "DD^TS"):
        function, arrays, options, right = called[name]
        behind = np.full((room, BLOCK, BLOCK), math.nan)
        given = [np.concatenate([a, behind]) if a.ndim == 3 else a for a in arrays]
        np.testing.assert_array_equal(function(*given, wider, **options)[: len(right)], right, name)
        with launches_on(Machine()):
            made = from_bfloat16_bits(function(*map(bits, given), wider, **options))
        np.testing.assert_array_equal(made[: len(right)], from_bfloat16_bits(bits(right)), name)


@pytest.mark.parametrize(
    ("columns", "lines", "width"),
    [
        (
            768,
            192,
            192,
        ),  # 576 tiles of 256 columns take five rounds of 132, 768 of 192 take six: 1280 columns a CTA, and 1152
        (768, 256, 256),  # six rounds of 256, or eight of 192: the same
        (512, 128, 256),
        (1024, 64, 256),
        (2880, 4096, 192),  # columns that no tile of 256 divides
        (192, 1, 192),
        (256, 132, 256),
    ],
)
def test_the_width_with_which_the_last_cta_is_done_first(columns: int, lines: int, width: int) -> None:
    assert tiles(columns, lines).tile_n == width


SHAPES = {
    "a line of more blocks than a warp looks up": ("DSD", np.ones((1, 34), bool), {}, {"m": 8}),
    "the same of a column": ("DS^TD", np.ones((34, 1), bool), {}, {"m": 8}),
    "whole steps alone": ("SDD", MASKS["one"], {}, {"k": 128}),
    "one slab of four": ("DSD", MASKS["random"].T, {"config": TileConfig(tile_n=256)}, {"m": 8}),
    "three slabs": ("DSD", MASKS["random"].T, {"config": TileConfig(tile_n=192)}, {"m": 192}),
    "of the last tile's columns one slab": ("DDS", MASKS["one"], {}, {"m": 264}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_tiles_on_the_machine(shape: str) -> None:
    """By one CTA, whose tiles share the ring and the slabs; no race."""
    name, mask, given, sizes = SHAPES[shape]
    topology = Topology.of_blocks(mask)
    function, arrays, options, right = cases(topology, **sizes)[name]
    with on_machine(1):
        made = function(*map(bits, arrays), topology, **options, **given)
    np.testing.assert_array_equal(from_bfloat16_bits(made), from_bfloat16_bits(bits(right)))


def test_sdd_of_no_blocks_launches_nothing() -> None:
    topology = Topology.of_blocks(MASKS["empty"])
    with on_machine() as machine:
        assert gemm.sdd(*map(bits, cases(topology)["SDD"][1]), topology).shape == (0, BLOCK, BLOCK)
    assert not machine.reports


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("a", {"a": np.zeros((512, 12))}),
        ("a", {"a": np.zeros((384, 136))}),
        ("a", {"a": np.zeros((512, 0)), "b": np.zeros((0, 768))}),
        ("config", {"config": TileConfig(tile_n=192)}),
        ("out", {"out": np.zeros((1, 128, 128))}),
        ("topology.shape", {"topology": replace(Topology.of_blocks(MASKS["diagonal"]), shape=(512, 770))}),
        ("topology.shape", {"topology": replace(Topology.of_blocks(MASKS["diagonal"]), shape=(510, 768))}),
    ],
)
def test_bad_input_is_refused(argument: str, given: dict[str, Any]) -> None:
    """By kernels; twins refuse more in tests/test_wrong_arguments.py."""
    topology = Topology.of_blocks(MASKS["diagonal"])
    _, (a, b), _, _ = cases(topology)["SDD"]
    call = {
        k: bits(v) if isinstance(v, np.ndarray) else v
        for k, v in {"a": a, "b": b, "topology": topology, **given}.items()
    }
    with launches_on(Machine()):
        refuses(lambda: gemm.sdd(**call), argument)


def test_the_format_of_figure_6() -> None:
    """The module's picture."""
    made = Topology.of_blocks(np.array([[1, 1, 0], [0, 1, 0], [1, 0, 1]], bool))
    expected = {
        "row_indices": [0, 0, 1, 2, 2],
        "column_indices": [0, 1, 1, 0, 2],
        "row_offsets": [0, 2, 3, 5],
        "column_offsets": [0, 2, 4, 5],
        "block_offsets_t": [0, 3, 1, 2, 4],
        "tiles": [[0, 0, 0, 1], [2, 1, 1, -1], [3, 2, 0, 2], [-1] * 4, [-1] * 4],
        "tile_count": [3],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(made, name), values, name)


# --- Hostile and empty input ---------------------------------------------------------------------------------------------


ONE = Topology.of_blocks(np.ones((1, 1), bool))


def test_a_dense_matrix_of_no_columns() -> None:
    assert gemm.dsd(np.zeros((1, BLOCK, BLOCK)), np.zeros((BLOCK, 0)), ONE).shape == (BLOCK, 0)
    assert gemm.dds(np.zeros((0, BLOCK)), np.zeros((1, BLOCK, BLOCK)), ONE).shape == (0, BLOCK)


def test_room_for_blocks_in_a_matrix_of_no_rows() -> None:
    """A tensor map of no rows can't be made."""
    nothing = Topology.of_blocks(np.zeros((0, 1), bool))
    indices: dict[str, Any] = {
        name: np.full(1, -1, np.int32) for name in ("row_indices", "column_indices", "block_offsets_t")
    }
    roomy = replace(nothing, tiles=np.full((1, 4), -1, np.int32), **indices)
    with on_machine() as machine:
        gemm.sdd(np.zeros((0, 8), np.uint16), np.zeros((8, BLOCK), np.uint16), roomy)
    assert not machine.reports
