"""The products of quantized operands: their twins, of NumPy and torch, beside those in bf16; what they refuse."""

from typing import Any

import numpy as np
import pytest
import torch

from blazeproto import dispatch, gemm
from blazeproto.gemm.e4m3 import Quantized, from_e4m3, in_e4m3, to_e4m3
from blazeproto.gemm.recipe import FP8
from blazeproto.gemm.registry import kernels_by_use
from blazeproto.gemm.tiles import BF16, E4M3
from tests.refusals import refuses

T, D, N, E, K = 40, 144, 128, 3, 2
QUANTIZED = (
    "up_forward",
    "down_forward",
    "down_backward_act",
    "up_backward_act",
    "down_backward_weight",
    "up_backward_weight",
)


def arrays() -> dict[str, Any]:
    """One layer's, in float32."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    shapes = {"x": (T, D), "up_proj": (E, 2 * N, D), "down_proj": (E, D, N), "d_out": (T, D), "h": (T * K, 2 * N)}
    shapes |= {"act": (T * K, N), "dh": (T * K, 2 * N), "a_scaled": (T * K, N)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"scores": rng.random(T * K, np.float32), "dispatch": dispatch.build_dispatch(ids, E)}


def taken(name: str, made: dict[str, Any], quantized: bool) -> dict[str, Any]:
    """The arguments of a product; without ``quantized`` the numbers that are then what e4m3 holds."""
    arguments = {"dispatch": made["dispatch"]}
    for array in gemm.PRODUCTS[name].spec.inputs:
        operand = FP8.operand(array.name)
        if array.name not in made or operand is None:
            arguments |= {array.name: made[array.name]} if array.name in made else {}
        elif quantized:
            value = made[array.name].swapaxes(1, 2) if array.quantized else made[array.name]
            arguments[array.name] = to_e4m3(np, np.ascontiguousarray(value), operand.scale)
        else:
            arguments[array.name] = np.ascontiguousarray(in_e4m3(np, made[array.name], operand.scale))
    return arguments


def numbers(name: str, result: Any) -> list[np.ndarray]:
    outputs = gemm.PRODUCTS[name].spec.outputs
    results = result if type(result) is tuple else (result,)
    pairs = zip(outputs, results, strict=True)
    return [from_e4m3(np, made, array.scale) if isinstance(made, Quantized) else made for array, made in pairs]


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_product_is_that_of_the_numbers_that_its_operands_are(name: str) -> None:
    """What it rounds besides: rows that it makes, and the operands of weight gradients again."""
    made, function = arrays(), gemm.PRODUCTS[name].run
    got, exact = (numbers(name, function(**taken(name, made, quantized))) for quantized in (True, False))
    for array, mine, right in zip(gemm.PRODUCTS[name].spec.outputs, got, exact, strict=True):
        most = 0.04 if array.scale else 0.01 if name.endswith("_weight") else 1e-6
        assert mine.shape == right.shape and np.linalg.norm(mine - right) <= most * np.linalg.norm(right), array.name


def test_torch_gets_e4m3_of_torch() -> None:
    made = taken("up_forward", arrays(), True)

    def tensors(value: Quantized) -> Quantized:
        return Quantized(torch.from_numpy(value.values).view(torch.float8_e4m3fn), torch.from_numpy(value.scales))

    h, act = gemm.up_forward(tensors(made["x"]), tensors(made["up_proj"]), made["dispatch"])
    same = gemm.up_forward(made["x"], made["up_proj"], made["dispatch"])
    for got, right in zip((h, act), same, strict=True):
        assert got.values.dtype == torch.float8_e4m3fn and got.scales.dtype == torch.float32
        assert np.array_equal(got.values.view(torch.uint8).numpy(), right.values)
    y = gemm.down_forward(act, tensors(taken("down_forward", arrays(), True)["down_proj"]), made["dispatch"])
    assert y.dtype == torch.bfloat16


VALUES, SCALES = np.zeros((T, D), np.uint8), np.ones(T, np.float32)


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("up_proj", {"up_proj": arrays()["up_proj"]}, TypeError),
        ("bias", {"bias": np.zeros((E, N), np.float32)}, ValueError),
        ("transposed", {"transposed": True}, ValueError),
        ("activation", {"activation": "silu"}, ValueError),
        ("h", {"h": np.zeros((T * K, 2 * N), np.float32)}, TypeError),
        ("up_proj", {"up_proj": Quantized(np.zeros((E, 256, 136), np.uint8), np.ones((E, 2, 2)))}, ValueError),
        ("x's scales", {"x": Quantized(VALUES, SCALES[1:])}, ValueError),
        ("x", {"x": Quantized(VALUES.astype(np.float32), SCALES)}, TypeError),
    ],
)
def test_what_quantized_operands_refuse(argument: str, change: dict[str, Any], error: type[Exception]) -> None:
    refuses(lambda: gemm.up_forward(**taken("up_forward", arrays(), True) | change), argument, error)


def test_columns_are_whole_blocks() -> None:
    refuses(lambda: gemm.down_forward(**taken("down_forward", arrays(), True), columns=range(64)), "columns")
    y = gemm.down_forward(**taken("down_forward", arrays(), True))
    some = gemm.down_forward(**taken("down_forward", arrays(), True), columns=range(128, 144))
    assert np.array_equal(some, y[:, 128:])


def test_the_registry_has_both_types_of_operands() -> None:
    assert {name for name, entry in gemm.PRODUCTS.items() if E4M3 in entry.elements} == {*QUANTIZED}
    uses = kernels_by_use()
    for name in QUANTIZED:
        kernel = gemm.kernel_for(name, precision="fp8")
        assert kernel.element is E4M3 and kernel in uses and kernel is not gemm.kernel_for(name)
        assert gemm.kernel_for(name).element is BF16 and gemm.candidates(name, "fp8")
    refuses(lambda: gemm.kernel_for("down_forward_fused", precision="fp8"), "precision")
    refuses(lambda: gemm.kernel_for("up_forward", precision="fp8", transposed=True), "up_forward", TypeError)
