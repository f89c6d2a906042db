"""The kernels of precision="fp8_rollout" on the machine: quantizing gives the twins' bits, and products give the bits of
DeepGEMM's arithmetic, written down here: each 128 elements of the reduction by themselves in a tensor core, then
sum = fma(scale of the row * scale of the weight, what came out, sum), all in float32.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import linear, product, quantize, up
from blazeproto.gemm.e4m3 import BLOCK, LEAST, LEAST_OF_WEIGHTS, Quantized, blocks, to_e4m3
from blazeproto.gemm.product import Build
from blazeproto.runtime.rounding import E4M3, bfloat16_bits, from_bfloat16_bits, to_bfloat16
from ptxsim.matrices import multiply_in_14_bits
from ptxsim.warp import MachineError
from tests.lab.machine.test_fp8 import SOURCES, SWIGLU, Layer, hostile, same

FLOATS = "float32"


@pytest.mark.parametrize("kind", ["token 1x128", "128x128"])
def test_quantizing_gives_the_twins_bits(kind: str) -> None:
    layer = Layer(40, 256, 128, 3, 2)
    if kind == "token 1x128":
        x = hostile(layer.rng, 40, 256)
        x[5, :7] = 0x8000  # -0
        x[6] = layer.rng.integers(0, 0x2EDB, 256)  # below 1e-10
        made = Quantized(np.empty((40, 256), np.uint8), np.empty((40, 2), np.float32))
        layer.run(quantize.launch_rows, x, None, made)
        same(made, to_e4m3(np, from_bfloat16_bits(x), kind, FLOATS))
        assert made.scales[0, 0] == np.float32(LEAST) / np.float32(448)
        return
    weights = hostile(layer.rng, 1, 272, 144)
    weights[0, 128:256, :128] = 0
    made = Quantized(np.empty((1, 272, 144), np.uint8), np.empty((1, 3, 2), np.float32))
    turned = Quantized(np.empty((1, 144, 272), np.uint8), np.empty((1, 2, 3), np.float32))
    layer.run(quantize.launch_weights, weights, None, made, turned, scale_values=FLOATS)
    twin = to_e4m3(np, from_bfloat16_bits(weights), kind, FLOATS)
    same(made, twin)
    same(turned, Quantized(twin.values.swapaxes(1, 2), twin.scales.swapaxes(1, 2)))
    assert made.scales[0, 1, 0] == np.float32(LEAST_OF_WEIGHTS) / np.float32(448)


def floats(layer: Layer, *shape: int, scales: tuple[int, ...]) -> Quantized:
    """Scales that are no powers of two."""
    of = layer.e4m3(*shape, scales=scales)
    return of._replace(scales=(of.scales * layer.rng.uniform(0.5, 1.0, scales)).astype(np.float32))


def deep_gemm(layer: Layer, rows: np.ndarray, row_scales: np.ndarray, weights: Quantized) -> np.ndarray:
    """rows (R, k) e4m3's bits, row_scales (R, k / 128) -> (R, m) in bf16."""
    made = np.empty((layer.rows, weights.values.shape[1]), np.float32)
    for expert, ends in enumerate(zip(layer.ends[:-1], layer.ends[1:], strict=True)):
        of = slice(*ends)
        total = np.zeros((of.stop - of.start, made.shape[1]), np.float32)
        by_column = np.repeat(weights.scales[expert], BLOCK, 0)[: made.shape[1]]
        for block in range(rows.shape[1] // BLOCK):
            kept = np.zeros_like(total)
            for begin in range(block * BLOCK, (block + 1) * BLOCK, 32):
                some = slice(begin, begin + 32)
                kept = multiply_in_14_bits(E4M3[rows[of, some]], E4M3[weights.values[expert][:, some]], kept)
            scale = row_scales[of, block, None] * by_column[:, block]
            total = (kept.astype(np.float64) * scale + total).astype(np.float32)
        made[of] = total
    return to_bfloat16(made)


def vllm_act(h: np.ndarray) -> np.ndarray:
    """SiLU(gate) rounded to bf16, times up, rounded to bf16."""
    gate, linear_half = np.split(h, 2, 1)
    with np.errstate(over="ignore"):
        return to_bfloat16(to_bfloat16(gate / (1 + np.exp(-gate))) * linear_half)


class Up:
    """An up projection of tokens that are gathered, and what it should make."""

    def __init__(self, d: int = 256) -> None:
        self.layer = layer = Layer(20, d, 128, 3, 2)
        self.x = floats(layer, 20, d, scales=(20, blocks(d)))
        self.weights = floats(layer, 3, 256, d, scales=(3, 2, blocks(d)))
        self.weights.scales[...] /= 100  # so that SiLU is neither 0 nor its argument
        self.h = deep_gemm(layer, self.x.values[layer.token], self.x.scales[layer.token], self.weights)
        self.act = vllm_act(self.h)

    def run(self) -> tuple[Quantized, Quantized]:
        h, act = self.layer.room(256), self.layer.room(128)
        self.layer.run(up.launch, self.x, self.weights, None, h=h, act=act, **SWIGLU)
        return h, act


def test_up_has_the_bits_of_deepgemm_and_vllm() -> None:
    case = Up()
    h, act = case.run()
    same(h, to_e4m3(np, case.h, "1x128"))
    same(act, to_e4m3(np, case.act, "1x128", FLOATS))
    assert np.abs(case.h).max() > 4 > np.median(np.abs(case.h))


def test_down_has_the_bits_of_deepgemm() -> None:
    layer = Layer(40, 144, 256, 3, 1)
    act = floats(layer, layer.rows, 256, scales=(2, layer.rows))
    down, y = floats(layer, 3, 144, 256, scales=(3, 2, 2)), np.empty((layer.rows, 144), np.uint16)
    # The first row's second block cancels its first: what fma rounds is left.
    act.values[0, BLOCK:], act.scales[1, 0] = act.values[0, :BLOCK] ^ 0x80, act.scales[0, 0]
    down.values[0, :, BLOCK:], down.scales[0, :, 1] = down.values[0, :, :BLOCK], down.scales[0, :, 0]
    layer.run(linear.launch, act, down, None, columns=range(144), out=y)
    assert layer.ends[1] and 0 < np.abs(from_bfloat16_bits(y)[0]).max() < 1e-3
    np.testing.assert_array_equal(from_bfloat16_bits(y), deep_gemm(layer, act.values, act.scales.T, down))


FAULTS = {  # file -> what is there, and what is put in its place
    "tokens a row apart": ("fp8.cuh", "rows += GATHER ? 1 : p.rows;", "rows += p.rows;"),
    "the block before's scale": (
        "fp8.cuh",
        "of_row[1] = load_f32(p.a_scales + (rows + second_row));",
        "of_row[1] = of_row[0];",
    ),
    "the next block's scale": ("fp8.cuh", "rows = token * steps;", "rows = token * steps + 1;"),
    "a power of two for act": ("up_fp8.cu", "using OfAct = FloatScale;", "using OfAct = Scale;"),
    "SiLU not rounded": ("up_fp8.cu", "#if BLOCK_SCALES && ACTIVATION_IS_SILU", "#if 0"),
    "a product with the reciprocal": (
        "quantized.cuh",
        "return quotient(value, scale, inverse);",
        "return value * inverse;",
    ),
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.full) for name in FAULTS])
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    (file, old, new), sources = FAULTS[fault], tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    case = Up()
    with product.alone({"up_forward": Build(sources=sources)}):
        try:
            h, act = case.run()
        except MachineError:  # beyond an array
            return
    right = to_e4m3(np, case.h, "1x128"), to_e4m3(np, case.act, "1x128", FLOATS)
    assert not all(
        np.array_equal(a, b) for made, of in zip((h, act), right, strict=True) for a, b in zip(made, of, strict=True)
    )


def test_a_group_of_bf16_zeros_keeps_their_signs() -> None:
    layer = Layer(1, 128, 128, 1, 1)
    x = np.full((1, 128), 0x8000, np.uint16)
    x[0, ::2] = 0
    made = Quantized(np.empty((1, 128), np.uint8), np.empty((1, 1), np.float32))
    layer.run(quantize.launch_rows, x, None, made)
    np.testing.assert_array_equal(made.values, bfloat16_bits(from_bfloat16_bits(x)) >> 8)
