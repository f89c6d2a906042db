"""A launch instruction by instruction: what a lane, a barrier, a stage and a warpgroup's accumulators hold meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm, lab
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import TileConfig
from blazeproto.lab.layouts import StageLayout
from blazeproto.lab.machine import Machine, Stepper

T, D, N = 40, 128, 64
COUNT = """
extern "C" __global__ void count(float* out, int more) {
    __shared__ int kept[64];
    kept[threadIdx.x] = threadIdx.x + more;
    __syncthreads();
    out[threadIdx.x] = 0.5f * kept[63 - threadIdx.x];
}
"""


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def up_with(config: TileConfig) -> tuple[Stepper, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, up_proj = bf16(rng.standard_normal((T, D))), bf16(rng.standard_normal((1, 2 * N, D)))
    dispatch = build_dispatch(np.zeros((T, 1), np.int32), 1)
    return Machine(1).step(lambda: gemm.up_forward(x, up_proj, dispatch, config=config)), x, up_proj


@pytest.fixture
def up() -> tuple[Stepper, np.ndarray, np.ndarray]:
    return up_with(TileConfig())


def test_rows_past_an_experts_end_are_zeros_or_copies() -> None:
    """The copies of 40 rows end in the middle of a pass of 16."""
    for few_rows in (False, True):
        stepper, x, _ = up_with(TileConfig(few_rows=few_rows))
        stage = stepper.until("wgmma.mma_async").stage(lab.swizzle("up_forward", "a")).matrix
        last = np.zeros(64) if few_rows else wide(x[-1, :64])
        written = stage[T:] if few_rows else stage[T:64]
        assert (stage[:T] == wide(x[:, :64])).all() and (written == last).all()


def test_a_stage_and_the_accumulators_on_their_way(up: tuple[Stepper, np.ndarray, np.ndarray]) -> None:
    stepper, x, up_proj = up
    layout = lab.swizzle("up_forward", "a")
    empty = stepper.stage(layout)
    assert np.isnan(empty.matrix).all() and "0 of 16384 bytes are written" in repr(empty)
    stepper.until("wgmma.mma_async")
    full = stepper.stage(layout)
    assert (full.matrix[:T] == wide(x[:, :64])).all() and "k 8:" in repr(full).splitlines()[6]
    assert full.svg().startswith("<svg")
    weights = stepper.stage(lab.swizzle("up_forward", "b")).matrix
    assert (weights[:N] == wide(up_proj[0, :N, :64])).all()
    assert any(barrier.phase for barrier in stepper.barriers().values()) and "arrivals and 0 bytes missing" in repr(
        stepper.barriers()
    )
    assert "wgmma.mma_async" in repr(stepper) and "mainloop.cuh" in repr(stepper)
    for _ in range(2 * 128 // 16 * 2):
        made = stepper.accumulators(0) or stepper.accumulators(1)
        stepper.step(200)
    (sums,) = made.values()
    assert sums.shape == (64, 256)
    report = stepper.finish()
    assert not report.races and stepper.done and "at its end" in repr(stepper)
    h, _ = stepper.result
    expected = wide(x) @ wide(up_proj[0]).T
    assert np.abs(wide(h) - expected).max() <= np.abs(expected).max() * 2**-8
    products = [values for group in (0, 1) for values in stepper.accumulators(group).values()]
    assert any(np.allclose(values[:T, :N], expected[:, :N], atol=1e-3) for values in products)


def test_registers_of_a_lane() -> None:
    out = np.zeros(64, np.float32)
    stepper = lab.step(COUNT, 1, 64, [out, 7]).until("st.shared")
    (warp,) = [w for w in (0, 1) if "st.shared" in repr(stepper.registers(w)).split("next:")[0]]
    registers = stepper.registers(warp, lane=5)
    assert 32 * warp + 5 + 7 in [value.signed for value in registers.values() if value.written]
    assert "nobody wrote it" in repr(registers["%f1"]) and not registers["%f1"].written
    assert "lane 5" in repr(registers) and "kernel.cu:4" in repr(registers)
    data, written = stepper.shared(0, 256)
    assert written.view(np.uint32).astype(bool).sum() == 32
    assert (data.view(np.int32)[32 * warp : 32 * warp + 32] == 32 * warp + np.arange(32) + 7).all()
    stepper.until("st.global")
    values = [value.number for value in stepper.registers(0, 0).values() if value.written]
    values += [value.number for value in stepper.registers(1, 31).values() if value.written]
    assert 35.0 in values or 3.5 in values
    assert stepper.finish().steps and (out == (70 - np.arange(64)) / 2).all()


def test_one_warp_alone_goes_as_far_as_its_barrier() -> None:
    stepper = lab.step(COUNT, 2, 64, [np.zeros(64, np.float32), 0])
    stepper.step(1000, warp=1)
    assert stepper.next(1).opcode.startswith(("bar", "barrier")) and "waits" in repr(stepper)
    assert stepper.next(0).number < stepper.next(1).number
    stepper.step(1000)
    assert stepper.done


def test_the_same_seed_gives_the_same_run_in_steps_or_at_once() -> None:
    one, two = np.zeros(64, np.float32), np.zeros(64, np.float32)
    stepper = lab.step(COUNT, 3, 64, [one, 1], seed=3)
    while not stepper.step().done:
        pass
    assert stepper.report.steps == lab.run(COUNT, 3, 64, [two, 1], seed=3).steps and (one == two).all()


def test_what_there_is_not() -> None:
    stepper = lab.step(COUNT, 1, 64, [np.zeros(64, np.float32), 0])
    with pytest.raises(ValueError, match="warp: expected 0 to 1, got 2"):
        stepper.registers(2)
    with pytest.raises(ValueError, match="lane: expected 0 to 31, got 32"):
        stepper.registers(0, 32)
    with pytest.raises(ValueError, match="cta: expected 0 to 0"):
        stepper.barriers(1)
    with pytest.raises(ValueError, match="expected bytes below 256"):
        stepper.stage(StageLayout("mine", "a", 64, False, 0))
    with pytest.raises(ValueError, match="count: expected at least 1"):
        stepper.step(0)
    with pytest.raises(RuntimeError, match="text: expected that of an instruction"):
        stepper.until("wgmma")
    with pytest.raises(ValueError, match="call: expected one launch, got none"):
        Machine().step(lambda: None)
    with pytest.raises(ValueError, match="data, written: expected 8192 bytes, got 2 and 2"):
        StageLayout("mine", "a", 64, False, 0).holding(np.zeros(2, np.uint8), np.ones(2, bool))
