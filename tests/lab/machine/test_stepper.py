"""A product instruction by instruction: what a stage and a warpgroup's accumulators hold meanwhile."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm, lab
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import TileConfig
from blazeproto.lab.layouts import StageLayout
from blazeproto.lab.target import Machine
from ptxsim import Stepper
from tests.refusals import refuses

T, D, N = 40, 128, 64


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
    assert any(barrier.phase for barrier in stepper.barriers().values())
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


def test_what_there_is_not(up: tuple[Stepper, np.ndarray, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="expected bytes below"):
        up[0].stage(StageLayout("mine", "a", 64, False, 1 << 20))
    refuses(lambda: Machine().step(lambda: None), "call")
    layout = StageLayout("mine", "a", 64, False, 0)
    refuses(lambda: layout.holding(np.zeros(2, np.uint8), np.ones(2, bool)), "data, written")


def test_the_ring_of_stages_forward_and_back(up: tuple[Stepper, np.ndarray, np.ndarray]) -> None:
    stepper, _, _ = up
    assert not lab.ring(stepper).tables[0].rows  # before its barriers are made
    stepper.until("wgmma.mma_async")
    stepper.step(400)
    shown = lab.ring(stepper)
    assert shown.title == "up_forward: ring of 4 stages" and "B from 16384" in shown.text()
    rows = shown.tables[0].rows
    assert [row[0] for row in rows] == ["0", "1", "2", "3"] and rows[0][1] == "full" and rows[3][1] == "free"
    assert rows[0][3] == "1: 129 of 129, 0 B" and rows[3][2] == "0%"
    (group,) = [group for group in (1, 2) if f"{group}: A" in rows[0][5] or f"{group}: A" in rows[1][5]][:1]
    read = stepper.reads(group)
    assert read["A"].places.shape == (64, 16) and read["B"].places.shape[1] == 16
    assert (read["A"].first // 8192) % 2 == group - 1  # its strip of 64 rows
    stepper.step(3000)
    assert repr(lab.ring(stepper)) != repr(shown)
    assert repr(lab.ring(stepper.back(3000))) == repr(shown) and stepper.reads(group)["A"].first == read["A"].first
    with pytest.raises(TypeError, match="stepper: expected a launch of a product made of tiles, got int"):
        lab.ring(3)
    with pytest.raises(ValueError, match="cta: expected 0 to 0"):
        lab.ring(stepper, 1)
