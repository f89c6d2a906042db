"""Activations on blocks: twins against dense matrices of each row, kernels against twins, all of the table."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from routings import make_routing

from blazeproto import activations
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.blocksparse import Topology, topology_of
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm.block_activation import block_activate, block_activate_backward
from blazeproto.gemm.blocks import BLOCK
from blazeproto.runtime.rounding import bfloat16_bits, from_bfloat16_bits
from tests.refusals import refuses

from .room import on_machine, some

WIDTHS = (128, 256, 256)


def topologies(activation: str, num_tokens: int = 20) -> tuple[Topology, Topology]:
    """up and down of three experts, of unequal widths, whose capacity is not full."""
    dispatch = build_dispatch(make_routing("same", num_tokens, 3, 2), 3)
    up, down, _ = topology_of(dispatch, WIDTHS, activation_named(activation).halves)
    return up, down


def wide(values: np.ndarray, blocks: range) -> np.ndarray:
    """(128, columns): blocks side by side."""
    return np.concatenate([values[block] for block in blocks], axis=1)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_twins(name: str) -> None:
    """A row of H's blocks as one matrix, as an expert's layer has it."""
    (up, down), rng = topologies(name), np.random.default_rng(0)
    h, d_act = (rng.standard_normal((len(t.row_indices), BLOCK, BLOCK)) for t in (up, down))
    act, d_h = block_activate(h, down, activation=name), block_activate_backward(h, d_act, down, activation=name)
    for row in range(len(down.row_offsets) - 1):
        mine, of_h = (range(*t.row_offsets[row : row + 2].tolist()) for t in (down, up))
        if len(mine):
            its_h = wide(h, of_h)
            np.testing.assert_array_equal(wide(act, mine), activations.activate(its_h, name))
            right = activations.activate_backward(its_h, wide(d_act, mine), name)
            np.testing.assert_array_equal(wide(d_h, of_h), right)
    assert 0 < down.row_offsets[-1] < len(act)


@pytest.mark.parametrize(
    "name",
    some(
        ACTIVATIONS,
        "geglu",
        "geglu_tanh",
        "reglu",
        "limited_swiglu",
        "clamped_swiglu",
        "relu2",
        "gelu",
        "gelu_tanh",
        "silu",
    ),
)
def test_kernels(name: str) -> None:
    """Within bf16's rounding and tanh.approx's 2^-11; blocks that are not there stay as they were."""
    (up, down), rng = topologies(name), np.random.default_rng(1)
    drawn = [2 * rng.standard_normal((len(t.row_indices), BLOCK, BLOCK)).astype(np.float32) for t in (up, down)]
    h, d_act = map(bfloat16_bits, drawn)
    act, d_h = np.full_like(d_act, 7), np.full_like(h, 7)
    with on_machine() as machine:
        machine.races = False
        block_activate(h, down, activation=name, out=act)
        block_activate_backward(h, d_act, down, activation=name, out=d_h)
    its_h, its_d_act = from_bfloat16_bits(h), from_bfloat16_bits(d_act)
    right = block_activate(its_h, down, activation=name)
    rights = block_activate_backward(its_h, its_d_act, down, activation=name)
    for made, wanted, topology in ((act, right, down), (d_h, rights, up)):
        count = topology.row_offsets[-1]
        made_ones = from_bfloat16_bits(made[:count])
        np.testing.assert_allclose(made_ones, wanted[:count], rtol=2**-7, atol=2e-2)
        error = np.linalg.norm(made_ones - wanted[:count]) / np.linalg.norm(wanted[:count])
        assert error < 1.5e-3, error
        assert (made[count:] == 7).all()


def test_no_blocks_and_races() -> None:
    for num_tokens in (0, 3):
        up, down = topologies("swiglu", num_tokens)
        h = np.zeros((len(up.row_indices), BLOCK, BLOCK), np.uint16)
        with on_machine():
            act = block_activate(h, down)
            assert block_activate_backward(h, act, down).shape == h.shape


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    ("argument", "given"),
    [("h", {"activation": "relu"}), ("h", {"h": np.zeros((3, 128, 64), np.uint16)})],
)
def test_what_is_refused(argument: str, given: dict[str, Any], kernels: bool) -> None:
    """Beside wrong types, by the twins in tests/test_wrong_arguments.py."""
    up, down = topologies("swiglu")
    call = {"h": np.zeros((len(up.row_indices), BLOCK, BLOCK), np.uint16), "topology": down} | given
    with on_machine() if kernels else nullcontext():
        refuses(lambda: block_activate(**call if kernels else call | {"h": call["h"].astype(np.float32)}), argument)
