"""Kept weights on the machine (cuda/quantize.cu: `refresh_weights`): made as the twin makes them, and anew where they changed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import quantize
from blazeproto.gemm.compile import CUDA_SOURCES
from blazeproto.gemm.e4m3 import Quantized, scales_shape, to_e4m3
from blazeproto.gemm.product import edited
from blazeproto.gemm.quantize import OnStream
from blazeproto.lab.target import Machine
from blazeproto.runtime.target import device_of, launches_on
from ptxsim import MachineError
from tests.lab.planted_bugs import plant

SHAPE = (2, 48, 1072)  # nine blocks in a row: more than a CTA has warps


class Kept:
    """A weight on the machine, and what is kept of it."""

    def __init__(self, f32: bool) -> None:
        E, m, k = SHAPE
        self.f32, self.machine = f32, Machine(multiprocessors=1)
        numbers = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
        self.weight = numbers if f32 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        shapes = {"out": SHAPE, "turned": (E, k, m)}
        self.values = {name: np.full(shape, 0x7F, np.uint8) for name, shape in shapes.items()}
        self.scales = {
            name: np.full(scales_shape("128x128", shape), np.nan, np.float32) for name, shape in shapes.items()
        }
        self.hashes, self.calls = np.zeros(self.scales["out"].size + 1, np.int32), 0

    def refresh(self) -> None:
        def on(array: np.ndarray) -> Any:
            address = self.machine.address(array, "")
            return type("Tensor", (), {"shape": array.shape, "data_ptr": lambda _: address})()

        out, turned = (Quantized(on(self.values[name]), on(self.scales[name])) for name in self.values)
        with launches_on(self.machine):
            at = OnStream(device_of(self.machine), 0)
            quantize.launch_refresh(on(self.weight), at, out, turned, on(self.hashes), self.calls, f32=self.f32)
        self.calls += 1  # the first is 0
        assert not self.machine.reports[-1].races

    def stale(self) -> np.ndarray:
        """Whether each block's values or scales, in one of the orders, are not its weight's."""
        bits = self.weight.view(np.uint32) if self.f32 else self.weight.astype(np.uint32) << 16
        if self.f32:  # to the nearest bf16, of two the even one
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        right = to_e4m3(np, bits.view(np.float32), "128x128")
        wrong = (self.values["out"] != right.values) | (self.values["turned"].swapaxes(1, 2) != right.values)
        blocks = self.scales["out"] != right.scales
        blocks |= self.scales["turned"].swapaxes(1, 2) != right.scales
        for block in np.ndindex(blocks.shape):
            e, row, column = block[0], 128 * block[1], 128 * block[2]
            blocks[block] |= wrong[e, row : row + 128, column : column + 128].any()
        return blocks


@pytest.mark.parametrize("f32", [False, pytest.param(True, marks=pytest.mark.full)])
def test_blocks_are_made_anew_where_they_have_changed(f32: bool) -> None:
    kept = Kept(f32)
    kept.refresh()
    assert not kept.stale().any()
    kept.values["out"][0, 0, 0] ^= 1  # nobody looks at it: nothing is written where nothing has changed
    kept.refresh()
    assert kept.stale().sum() == 1
    for changed in (
        np.s_[0, 5, :],
        np.s_[0, 46, :],
        np.s_[1, :, 300],
        np.s_[1, :, 1024:],
    ):  # two rows, a column, the last block, which is small
        kept.weight[changed] = 0
        kept.refresh()
        assert not kept.stale().any()


FAULTS = {
    "never": ("known == now) return;", "known == now || known) return;"),
    "one row in four": ("return int((block_m + block_k) % 4);", "return 0;"),
    "one chunk in eight": ("return int((group + block_k) % LANES) * PER_CHUNK;", "return 0;"),
    "another hash where it is made": ("chunk == hashed_chunk(group, block_k);", "chunk == hashed_chunk(group, 0);"),
    "a call too late": ("* weight.blocks_k]) != call", "* weight.blocks_k]) < call - 1"),
    "all but the last": ("if (block_k >= weight.blocks_k)", "if (block_k + 1 >= weight.blocks_k)"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    shutil.copytree(CUDA_SOURCES, folder)
    plant(folder, [("quantize.cu", *FAULTS[fault])])
    with edited("quantize", folder), pytest.raises((AssertionError, MachineError)):
        test_blocks_are_made_anew_where_they_have_changed(False)
