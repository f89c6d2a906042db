"""The kernels of fp8 on the machine, whose tensor cores keep 14 bits of a sum of e4m3 products. Quantizing gives the twins' bits;
products are beside float64 of the same quantized operands, within what sums of 128 products may be off. Here are those whose
columns come in slices, or in place of an operand; tests/lab/test_workbench_machine.py has each product as a layer calls it.
"""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm
from blazeproto.activations import activate, activate_backward
from blazeproto.dispatch import reference
from blazeproto.dispatch.structures import Addresses, Dispatch, addresses
from blazeproto.gemm import down_backward, linear, product, quantize, rows, up
from blazeproto.gemm.arguments import LowRankTerm
from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks, from_e4m3, to_e4m3
from blazeproto.gemm.product import Build
from blazeproto.lab.target import Machine
from blazeproto.runtime import driver
from blazeproto.runtime.arrays import view
from blazeproto.runtime.rounding import E4M3, bfloat16_bits, from_bfloat16_bits
from blazeproto.runtime.target import device_of, launches_on

SOURCES = Path(gemm.__file__).parent / "cuda"
LOST = 33 * 2.0**-13  # of what a sum of 128 has, by one of its four wgmma: 33 addends, each cut off below 2^-13
SWIGLU = {"activation": "swiglu"}
ARRAYS = (Quantized, LowRankTerm, np.ndarray)


def on(value: Any) -> Any:
    """As launches take it."""
    return view(value) if isinstance(value, np.ndarray) else type(value)(*map(view, value))


class Layer:
    """Random quantized operands, and a machine that has no race."""

    def __init__(self, T: int, d: int, n: int, E: int, K: int, *, seed: int = 0, plain: bool = False) -> None:
        """plain: scales of 1, positive values."""
        self.rng, self.plain = np.random.default_rng(seed), plain
        self.machine, self.T, self.d, self.n, self.E, self.rows = Machine(seed=seed), T, d, n, E, T * K
        ids = np.stack([self.rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
        self.dispatch = reference.build_dispatch(ids, E)
        self.ends, self.pair = self.dispatch.expert_token_offsets, self.dispatch.expert_pair_indices
        self.token, self.scores = self.pair // K, self.rng.random(T * K, dtype=np.float32)

    def at(self) -> Addresses:
        parts = {f.name: getattr(self.dispatch, f.name) for f in fields(Dispatch)}
        arrays = {name: view(np.ascontiguousarray(a)) for name, a in parts.items() if isinstance(a, np.ndarray)}
        return addresses(Dispatch(**parts | arrays), device_of(self.machine), 0)

    def e4m3(self, *shape: int, scales: tuple[int, ...]) -> Quantized:
        values = self.rng.integers(0x28, 0x48, shape).astype(np.uint8)  # 0.25 to 3.75
        if self.plain:
            return Quantized(values, np.ones(scales, np.float32))
        values |= self.rng.integers(0, 2, shape).astype(np.uint8) << 7
        return Quantized(values, np.exp2(self.rng.integers(-3, 4, scales)).astype(np.float32))

    def tokens(self, width: int) -> Quantized:
        return self.e4m3(self.T, width, scales=(self.T,))

    def of_rows(self, width: int) -> Quantized:
        return self.e4m3(self.rows, width, scales=(blocks(width), self.rows))

    def weights(self, m: int, k: int) -> Quantized:
        return self.e4m3(self.E, m, k, scales=(self.E, blocks(m), blocks(k)))

    def room(self, width: int) -> Quantized:
        """For rows, of what nobody has written."""
        return Quantized(
            np.full((self.rows, width), 0x7F, np.uint8), np.full((blocks(width), self.rows), np.nan, np.float32)
        )

    def run(self, launch: Any, *arguments: Any, **keywords: Any) -> None:
        """With the addresses of the dispatch where an argument is None."""
        with launches_on(self.machine):
            at = self.at()
            given = [at if a is None else on(a) if isinstance(a, ARRAYS) else a for a in arguments]
            launch(*given, **{k: on(v) if isinstance(v, ARRAYS) else v for k, v in keywords.items()})
        assert not any(report.races for report in self.machine.reports)

    def bf16(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Bits, and the numbers: so large that biases and factors' products are seen beside the others."""
        bits = bfloat16_bits(self.rng.standard_normal(shape, np.float32) * 16)
        return bits, from_bfloat16_bits(bits)

    def beside(self, width: int, rank: int, *, bias: bool = True) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """A bias and low-rank factors of outputs of this width; what they add, and the bound of its sums."""
        given, (rows, a), (factor, f) = dict[str, Any](), self.bf16(self.rows, rank), self.bf16(self.E, width, rank)
        added, most = self.product(a, f)
        if rank:
            given["low"] = LowRankTerm(rows, factor)
        if bias:
            given["bias"], b = self.bf16(self.E, width)
            added += np.repeat(b, np.diff(self.ends), 0)
        return given, added, most * 2.0**-10

    def product(self, rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """rows (R, k) times their experts' weights (E, m, k) in float64, and what the tensor cores' sums of 128 may be off."""
        of = np.repeat(np.arange(self.E), np.diff(self.ends))
        rows, weights = rows.astype(np.float64), weights.astype(np.float64)
        exact = np.stack([rows[r] @ weights[of[r]].T for r in range(self.rows)])
        most = np.stack([np.abs(rows[r]) @ np.abs(weights[of[r]]).T for r in range(self.rows)])
        return exact, 4 * LOST * most


def near(got: np.ndarray, exact: np.ndarray, most: np.ndarray, step: float = 2.0**-8) -> bool:
    """step: what is lost by rounding, relative."""
    return bool((np.abs(got - exact) <= most + step * np.abs(exact)).all())


# --- Quantizing -------------------------------------------------------------------------------------------------------------


def hostile(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bf16's bits: rows of many magnitudes, of zeros, subnormals, the largest number, an Inf, a NaN."""
    made = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (*shape[:-1], 1)))
    bits = bfloat16_bits(made.astype(np.float32))
    flat = bits.reshape(-1, shape[-1])
    flat[0], flat[1] = 0, rng.integers(0, 0x80, shape[-1])
    flat[2, ::3], flat[3, 5], flat[4, 9] = 0x7F7F, 0xFF80, 0x7FC0
    return bits


def same(made: Quantized, twin: Quantized) -> None:
    np.testing.assert_array_equal(made.values & 0x7F, twin.values & 0x7F)
    number = (twin.values & 0x7F) != 0x7F  # a NaN's sign is anything
    np.testing.assert_array_equal(made.values[number], twin.values[number])
    np.testing.assert_array_equal(made.scales, twin.scales)


def test_quantizing_gives_the_twins_bits() -> None:
    layer = Layer(40, 144, 128, 3, 2)
    x = hostile(layer.rng, 40, 144)
    made = Quantized(np.empty((40, 144), np.uint8), np.empty(40, np.float32))
    layer.run(quantize.launch_rows, x, None, made)
    same(made, to_e4m3(np, from_bfloat16_bits(x), "token"))
    weights = hostile(layer.rng, 2, 272, 144)
    made = Quantized(np.empty((2, 272, 144), np.uint8), np.empty((2, 3, 2), np.float32))
    turned = Quantized(np.empty((2, 144, 272), np.uint8), np.empty((2, 2, 3), np.float32))
    layer.run(quantize.launch_weights, weights, None, made, turned)
    twin = to_e4m3(np, from_bfloat16_bits(weights), "128x128")
    same(made, twin)
    same(turned, Quantized(twin.values.swapaxes(1, 2), twin.scales.swapaxes(1, 2)))
    for alone, out in ((made, ("out", "transposed")), (turned, ("transposed", "out"))):
        expected = [part.copy() for part in alone]
        for part in alone:
            part.fill(0)
        layer.run(quantize.launch_weights, weights, None, **{out[0]: alone, out[1]: None})
        for part, before in zip(alone, expected, strict=True):
            np.testing.assert_array_equal(part, before)


@pytest.mark.parametrize("gather", [False, True])
def test_turned_rows_are_the_rows(gather: bool) -> None:
    """But for what is below the steps of a scale that 128 rows share; and in bf16 they are what they are."""
    layer = Layer(80, 144, 256, 2, 2)
    rows, width = (layer.tokens(144), 144) if gather else (layer.of_rows(256), 256)
    room = quantize.most_blocks(layer.rows, layer.E)
    before = np.empty(layer.E + 1, np.int32)
    layer.run(quantize.launch_block_offsets, None, before)
    made = np.full((width, room * BLOCK), 0x7F, np.uint8)
    turned = Quantized(made, np.full((blocks(width), room), np.nan, np.float32))
    for columns in (range(128), range(128, width)):
        part = slice(columns.start, columns.stop), slice(columns.start // BLOCK, blocks(columns.stop))
        of = Quantized(made[part[0]], turned.scales[part[1]])
        layer.run(quantize.launch_transpose, rows, None, before, columns, of, gather=gather)
    wide = from_e4m3(np, rows, "token")[layer.token] if gather else from_e4m3(np, rows, "1x128")
    if not gather:
        plain = np.full(wide.shape, 0x7FC1, np.uint16)
        layer.run(quantize.launch_dequantize, rows, None, plain)
        np.testing.assert_array_equal(from_bfloat16_bits(plain), wide)
    used = before[-1] * BLOCK
    scales = np.repeat(np.repeat(turned.scales, BLOCK, 0)[:width], BLOCK, 1)[:, :used]
    back = E4M3[turned.values[:, :used]] * scales
    expected = np.zeros((width, used), np.float32)
    for expert, (begin, end) in enumerate(zip(layer.ends[:-1], layer.ends[1:], strict=True)):
        expected[:, before[expert] * BLOCK :][:, : end - begin] = wide[begin:end].T
    assert (np.abs(back - expected) <= scales * 2.0**-10).all() and np.array_equal(back == 0, expected == 0)


@pytest.mark.parametrize("experts", [1, 32, 70])
def test_every_experts_blocks_are_counted_and_have_room(experts: int) -> None:
    """One, a warp's and more than two warps' experts, some without rows."""
    layer = Layer(1, 128, 128, 1, 1)
    counts = layer.rng.choice([0, 1, 127, 128, 129, 300], experts).astype(np.int32)
    layer.E, layer.rows, layer.ends = experts, int(counts.sum()), np.append(0, counts.cumsum()).astype(np.int32)
    layer.dispatch = replace(layer.dispatch, expert_token_offsets=layer.ends, num_experts=experts)
    before = np.full(experts + 1, -1, np.int32)
    layer.run(quantize.launch_block_offsets, None, before)
    np.testing.assert_array_equal(before, np.append(0, (-(-counts // BLOCK)).cumsum()))
    assert before[-1] <= quantize.most_blocks(layer.rows, experts)


@pytest.mark.parametrize("last", [1, 129])
def test_the_most_blocks_are_reached(last: int) -> None:
    """By experts of one row each, but for the last."""
    assert quantize.most_blocks(4 + last, 5) == 4 + blocks(last) and quantize.most_blocks(last, 99) <= last


def test_nothing_is_launched_for_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of no blocks is an error of the driver."""
    layer, none = Layer(1, 128, 128, 3, 2), Quantized(np.empty((0, 128), np.uint8), np.empty(0, np.float32))
    layer.rows, empty = 0, {"expert_pair_indices": np.empty(0, np.int32), "expert_token_offsets": np.zeros(4, np.int32)}
    layer.dispatch = replace(layer.dispatch, **empty)
    monkeypatch.setattr(driver, "launch", lambda *_: pytest.fail("launched"))
    layer.run(quantize.launch_rows, np.empty((0, 128), np.uint16), None, none)
    for gather, scales in ((True, (0,)), (False, (1, 0))):
        rows, out = none._replace(scales=np.empty(scales, np.float32)), layer.e4m3(128, 0, scales=(1, 0))
        layer.run(quantize.launch_transpose, rows, None, np.zeros(4, np.int32), range(128), out, gather=gather)
    h, act, y = layer.room(256), layer.room(128), np.empty((0, 128), np.uint16)
    layer.run(up.launch, layer.tokens(128), layer.weights(256, 128), None, h=h, act=act, **SWIGLU)
    layer.run(linear.launch, act, layer.weights(128, 128), None, columns=range(128), out=y)


def test_a_row_without_a_scale_makes_its_block_of_the_transpose_nan() -> None:
    layer = Layer(130, 128, 128, 1, 1)
    rows, before = layer.of_rows(128), np.array([0, 2], np.int32)
    rows.scales[0, 3] = np.nan
    room = quantize.most_blocks(layer.rows, 1)
    made = Quantized(np.zeros((128, room * BLOCK), np.uint8), np.zeros((1, room), np.float32))
    layer.run(quantize.launch_transpose, rows, None, before, range(128), made, gather=False)
    nan = (made.values & 0x7F) == 0x7F
    assert nan[:, :BLOCK].all() and not nan[:, BLOCK:].any()
    np.testing.assert_array_equal(np.isnan(made.scales), [[True, False]])


# --- Products --------------------------------------------------------------------------------------------------------------


def y_of(layer: Layer, *slices: range, rank: int = 0, bias: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The down projection: what the kernel makes, float64, and the bound. slices: of columns, a launch each."""
    act, down, made = layer.of_rows(layer.n), layer.weights(layer.d, layer.n), list[np.ndarray]()
    beside, added, besides = layer.beside(layer.d, rank, bias=bias)
    for columns in slices or (range(layer.d),):
        y = np.full((layer.rows, len(columns)), 0x7FC1, np.uint16)
        layer.run(linear.launch, act, down, None, columns=columns, out=y, **beside)
        made.append(from_bfloat16_bits(y))
    exact, most = layer.product(from_e4m3(np, act, "1x128"), from_e4m3(np, down, "128x128"))
    return np.concatenate(made, 1), exact + added, most + besides


RANKS = pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.full) for rank in (24, 80))])


@RANKS
def test_the_down_projection_is_right_in_slices_of_columns(rank: int) -> None:
    """As is dX of tokens, which is made by the same kernel."""
    assert near(*y_of(Layer(40, 144, 256, 2, 1), range(128), range(128, 144), rank=rank, bias=rank > 0))


def h_of(rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """The up projection: H, float64, the bound, and a quantized row's step."""
    layer = Layer(20, 144, 128, 2, 1)
    x, up_proj, h, act = layer.tokens(144), layer.weights(256, 144), layer.room(256), layer.room(128)
    beside, added, besides = layer.beside(256, rank)
    layer.run(up.launch, x, up_proj, None, h=h, act=act, **beside, **SWIGLU)
    exact, most = layer.product(from_e4m3(np, x, "token")[layer.token], from_e4m3(np, up_proj, "128x128"))
    exact += added
    made = activate(exact, "swiglu")
    assert np.linalg.norm(from_e4m3(np, act, "1x128") - made) < 0.05 * np.linalg.norm(made)
    return from_e4m3(np, h, "1x128"), exact, most + besides + scales_of(h) * 2.0**-9, 2.0**-4 + 2.0**-8


@pytest.mark.parametrize("rank", [24, *(pytest.param(rank, marks=pytest.mark.full) for rank in (0, 80))])
def test_the_up_projection_is_right_with_a_bias_and_factors(rank: int) -> None:
    assert near(*h_of(rank))


FAULTS = {  # a file, its text, another one, and the rank with which it is a fault
    "the bias has the token's scale": (
        "up_fp8.cu",
        "pack_biased(by * of.x, by * of.y, low)",
        "pack_bf16(by * (of.x + bf16_low(low)), by * (of.y + bf16_high(low)))",
        0,
    ),
    "factors' products have the token's scale": (
        "up_fp8.cu",
        "if (!BLOCK_SCALES) apply_scales(acc, token_scale);",
        "",
        24,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_bias_or_of_factors_is_found(fault: str, tmp_path: Path) -> None:
    sources, (file, old, new, rank) = tmp_path / "cuda", FAULTS[fault]
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    with pytest.raises(AssertionError), product.alone({"up_forward": Build(sources=sources)}):
        assert near(*h_of(rank))


@pytest.mark.full
def test_factors_whose_rows_are_in_their_own_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that does not load the even rows of 16 first, as the weights' does (fp8.cuh: PAIRED_ROWS)."""
    boxes, paired = [], rows._paired_box

    def in_order(shape: Any, tile_columns: int, halves: int, element: Any) -> Any:
        boxes.append(box := paired(shape, tile_columns, halves, element))
        row = 2 * shape[2]
        return box if len(boxes) == 1 else box._replace(strides=(row, 8 * row, *box.strides[2:]))

    monkeypatch.setattr(rows, "_paired_box", in_order)
    up._plan.cache_clear()
    with pytest.raises(AssertionError):
        assert near(*h_of(24))
    up._plan.cache_clear()
    assert len(boxes) == 2


NEVER = (
    (
        "if (slice + k == 0) wgmma_e4m3_first(acc, at_a, at_b);\n                else wgmma_e4m3(acc, at_a, at_b, k > 0);",
        "wgmma_e4m3(reinterpret_cast<float(&)[SLICE / 2]>(sum[slice * SLICE / 2]), at_a, at_b, 1);",
    ),
    ("pin_registers(acc);", "pin_registers(sum);"),
    ("to = fmaf(acc[i], scale, to);", "to *= scale;"),
)
"""Sums that stay in the tensor core; right of scales of 1, but for their bits."""


@pytest.mark.full
@pytest.mark.parametrize("promoted", [True, False])
def test_sums_that_stay_in_the_tensor_core_are_seen(promoted: bool, tmp_path: Path) -> None:
    layer, sources = Layer(16, 128, 2048, 1, 1, plain=True), tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    text = (sources / "fp8.cuh").read_text()
    for old, new in () if promoted else NEVER:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (sources / "fp8.cuh").write_text(text)
    with product.alone({"down_forward": Build(sources=sources)}):
        assert near(*y_of(layer)) == promoted


def scales_of(rows: Quantized) -> np.ndarray:
    return np.repeat(rows.scales.T, BLOCK, 1)


@RANKS
@pytest.mark.parametrize("n", [256, pytest.param(384, marks=pytest.mark.full)])  # a tile of columns; one and a half
def test_the_down_projections_backward_is_right_in_place_of_h(n: int, rank: int) -> None:
    """By one CTA: a tile loads rows of H past its expert's end, which it does not use, and another CTA may store dH there."""
    layer = Layer(80, 144, n, 2, 2)
    layer.machine = Machine(1)
    d_out, down, h, a_scaled = layer.tokens(144), layer.weights(n, 144), layer.of_rows(2 * n), layer.room(n)
    before, d_scores = from_e4m3(np, h, "1x128").astype(np.float64), np.full(layer.rows, np.nan, np.float32)
    sums = np.empty((down_backward.score_partials(n), layer.rows), np.float32)
    made = {"dh": h, "a_scaled": a_scaled, "d_scores": d_scores, "workspace": sums}
    beside, added, besides = layer.beside(n, rank, bias=False)
    layer.run(down_backward.launch, d_out, down, h, layer.scores, None, **made, **beside, **SWIGLU)
    d_act, _ = layer.product(from_e4m3(np, d_out, "token")[layer.token], from_e4m3(np, down, "128x128"))
    d_act += added
    act, scores = activate(before, "swiglu"), layer.scores[layer.pair][:, None]
    for got, exact in ((h, activate_backward(before, scores * d_act, "swiglu")), (a_scaled, scores * act)):
        assert near(from_e4m3(np, got, "1x128"), exact, scales_of(got) * 2.0**-3, 2.0**-4 + 2.0**-8)
    most = np.abs(d_act * act).sum(1) * 4 * LOST + (besides * np.abs(act)).sum(1)
    assert (np.abs(d_scores[layer.pair] - (d_act * act).sum(1)) <= most).all()
