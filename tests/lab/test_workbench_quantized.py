"""`Workbench` with precision="fp8": check and timeline on the machine, an edited source, cost; time on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import cost, gemm
from blazeproto.gemm.tiles import E4M3
from blazeproto.lab import Workbench, oracle
from blazeproto.lab.accuracy import reference
from blazeproto.lab.oracle import EXACT, YARDSTICK, evaluate, make_case

SIZES: dict[str, Any] = {"T": 60, "d": 144, "n": 128, "E": 3, "K": 2, "precision": "fp8"}
QUANTIZED = [name for name, entry in gemm.PRODUCTS.items() if E4M3 in entry.elements]


@pytest.mark.parametrize("product", QUANTIZED)
def test_a_product_is_right_on_the_machine(product: str) -> None:
    bench = Workbench(product, **SIZES, device="cpu")
    assert bench.kernel.element is E4M3 and ", fp8;" in repr(bench)
    verdict = bench.check()
    assert verdict, verdict


WRONG = [
    ("up_fp8.cu", "up_forward", "return nonlinearity(gate).value *", "return -nonlinearity(gate).value *"),
    ("up_fp8.cu", "up_forward", "return nonlinearity(gate).value *", "return 1.08f * nonlinearity(gate).value *"),
    ("fp8.cuh", "down_forward", "to = fmaf(acc[i], scale, to);", "to = fmaf(acc[i], i == 5 ? 0.0f : scale, to);"),
]


@pytest.mark.parametrize(("file", "product", "old", "new"), WRONG)
def test_an_edit_that_is_wrong_is_seen(file: str, product: str, old: str, new: str, tmp_path: Path) -> None:
    bench = Workbench(product, **SIZES, device="cpu")
    place = bench.edit(tmp_path / "cuda") / file
    assert place.read_text().count(old) == 1
    place.write_text(place.read_text().replace(old, new))
    assert not bench.check() and new in bench.diff()


def test_a_timeline_is_in_steps() -> None:
    assert "MMA" in repr(Workbench("up_forward", **SIZES, device="cpu").timeline(tiles=1)).upper()


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="precision: expected 'bf16' for combine, got 'fp8'"):
        Workbench("combine", **SIZES)
    with pytest.raises(ValueError, match="n: expected a multiple of 128, got 64"):
        Workbench("up_forward", **SIZES | {"n": 64})
    with pytest.raises(ValueError, match="d: expected a multiple of 16, got 136"):
        Workbench("up_forward", **SIZES | {"d": 136})
    with pytest.raises(RuntimeError, match="time: expected a GPU"):
        Workbench("up_forward", **SIZES, device="cpu").time()


def test_the_oracle_quantizes_what_products_make() -> None:
    """The yardstick's numbers are e4m3's; each lies within the bounds of the product that makes it."""
    case = make_case(gemm.Sizes(40, 144, 128, 3, 2), quantized=True, device="cpu")
    made, exact = evaluate(YARDSTICK, case), evaluate(EXACT, case)
    assert (made["h"] - exact["h"]).norm() < 0.04 * exact["h"].norm()
    assert len(made["h"][0].float().div(made["h"].float().abs().amax()).unique()) < 256
    for name in QUANTIZED:
        for output, (right, bound) in reference(name, case, made).items():
            assert ((made[output].double().view(right.shape) - right).abs() <= bound).all(), output


def test_the_cost_of_quantized_operands() -> None:
    sizes = gemm.Sizes(4096, 512, 256, 16, 4)
    for name in QUANTIZED:
        fp8, bf16 = (cost.product_floor_ms(name, sizes, precision=precision) for precision in ("fp8", "bf16"))
        assert bf16 / 2 <= fp8 < bf16 and cost.predicted_product_ms(name, sizes, precision="fp8") > fp8
    up = gemm.PRODUCTS["up_forward"]
    T, d, n, E, K, _ = sizes
    rows = T * K
    scales = T + E * (2 * n // 128) * (d // 128) + rows * (3 * n // 128)
    assert up.least_bytes(sizes, E4M3) == T * d + E * 2 * n * d + 3 * rows * n + 4 * scales
    with pytest.raises(ValueError, match="precision: expected 'bf16' for combine"):
        cost.product_floor_ms("combine", sizes, precision="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("product", QUANTIZED)
def test_a_product_is_right_and_timed_on_a_gpu(product: str) -> None:
    bench = Workbench(product, T=512, d=256, n=256, E=8, K=2, precision="fp8")
    verdict = bench.check(4)
    assert verdict, verdict
    assert bench.time(3).ms > 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layers_products_are_right(device: str) -> None:
    """By the twins on a CPU. A weight is turned for some of them."""
    case = make_case(gemm.Sizes(300, 256, 256, 8, 2), quantized=True, device=device)
    given = evaluate(YARDSTICK, case)
    made = oracle.run_kernels(case, given)
    for name in QUANTIZED:
        for output, (right, bound) in reference(name, case, given).items():
            got = made[output][: len(right)].double().view(right.shape)
            assert ((got - right).abs() <= bound).all(), output
