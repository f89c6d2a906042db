"""Floors and bytes: the products' own formulas give the figures by which every result of this repository was judged."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.lab.calls import CALLS
from blazeproto.lab.oracle import YARDSTICK, evaluate, make_case
from scripts.bench.common import SHAPES
from tests.python import python
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[1]


def floors_by_hand(s: Sizes) -> tuple[float, float]:
    """The layer's eight kernels: operations, then the bytes of arrays that are read and written."""
    x, h, act, y = 2 * s.T * s.d, 2 * s.rows * 2 * s.n, 2 * s.rows * s.n, 2 * s.rows * s.d
    up, down = 2 * s.E * 2 * s.n * s.d, 2 * s.E * s.n * s.d
    of_up, of_down = 4.0 * s.rows * s.n * s.d, 2.0 * s.rows * s.n * s.d
    forward = [(of_up, x + up + h + act), (of_down, act + down + y), (0.0, y + 4 * s.rows + x)]
    backward = [
        (of_down, x + down + h + h + act + 8 * s.rows),
        (of_down, act + x + down),
        (of_up, h + up + y),
        (of_up, h + x + up),
        (0.0, y + x),
    ]
    of_forward, of_backward = (
        sum(1e3 * max(operations / 785e12, least / 4.24e12) for operations, least in kernels)
        for kernels in (forward, backward)
    )
    return of_forward, of_backward


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape)
def test_layer_floors_are_the_eight_kernels(shape: Sizes) -> None:
    assert cost.layer_floor_ms(shape) == pytest.approx(floors_by_hand(shape), rel=1e-9, abs=0)


def rows_of(name: str) -> list[dict]:
    return json.loads((ROOT / "results" / "h200" / f"{name}.json").read_text())["rows"]


FLOORS: dict[str, list[Callable[[Sizes], tuple[float, float]]]] = {
    "layer": [cost.layer_floor_ms],
    "module": [cost.layer_floor_ms, cost.router_floor_ms],
    "router": [cost.router_floor_ms],
}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_are_those_of_the_committed_results(name: str) -> None:
    rows = rows_of(name)
    assert name != "layer" or len(rows) == len(SHAPES) == 23
    for row in rows:
        sizes = Sizes(**{"n": 8, **row["cfg"]})
        forward, backward = map(sum, zip(*(floor(sizes) for floor in FLOORS[name]), strict=True))
        floors = {"floor_fwd_ms": forward, "floor_bwd_ms": backward, "floor_fwdbwd_ms": forward + backward}
        found = {key: round(floor, 4) for key, floor in floors.items() if key in row}
        assert len(found) >= 2 and found == {key: row[key] for key in found}


def test_the_router_s_floor_is_its_bytes_or_one_pass_of_each_product() -> None:
    forward, backward = cost.router_floor_ms(Sizes(32768, 2048, 8, 128, 8))
    assert 0.032 < forward < 0.04 and backward == pytest.approx(2 * forward, rel=0.1)  # x alone is read in 0.032
    forward, _ = cost.router_floor_ms(Sizes(16384, 4096, 8, 512, 8))
    assert forward == pytest.approx(0.0875, rel=0.01)  # one pass of the product


def test_product_floors_are_those_of_the_committed_results() -> None:
    rows = rows_of("products")
    assert {row["product"] for row in rows} == {*cost.FORWARD, *cost.BACKWARD, "combine"}
    for row in rows:
        assert round(cost.product_floor_ms(row["product"], Sizes(**row["cfg"])), 4) == row["floor_ms"]


@pytest.mark.parametrize("halves", [1, 2])
def test_operations_of_a_layer(halves: int) -> None:
    s = Sizes(T=100, d=16, n=8, E=4, K=2, halves=halves)
    product = 2.0 * s.rows * s.n * s.d
    assert cost.layer_operations(s) == ((halves + 1) * product, 2 * (halves + 1) * product)


def test_a_floor_is_the_longer_of_the_two() -> None:
    assert cost.floor_ms(785e9, 1.0) == pytest.approx(1.0) and cost.floor_ms(1.0, 4.24e9) == pytest.approx(1.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_least_bytes_are_those_of_a_call_s_arrays(name: str) -> None:
    """Every array that the call is given and every one that it fills, and the lists of a pair each that it states beside them."""
    sizes, call, product = Sizes(T=40, d=16, n=8, E=4, K=2), CALLS[name], PRODUCTS[name]
    case = make_case(sizes, biases=bool(call.needs), device="cpu")
    given = evaluate(YARDSTICK, case)
    made = {each: torch.empty(out.shape, dtype=out.dtype) for each, out in call.outputs(case, given).items()}
    arrays = {each: value for each, value in call.arguments(case, given, made).items() if isinstance(value, Tensor)}
    if not call.needs:
        assert not any("bias" in each for each in arrays)
    assert product.least_bytes(sizes) == sum(array.nbytes for array in arrays.values()) + 4 * sizes.rows * len(
        product.spec.by_pair
    )


def test_saved_bytes_are_the_design_s_table() -> None:
    s = Sizes(T=96, d=64, n=40, E=5, K=3)
    a_token = {
        "minimal": 2 * s.d + 4 * s.n * s.K + 12 * s.K,
        "paper": 2 * s.d + 6 * s.n * s.K + 12 * s.K,
        "recompute": 2 * s.d + 12 * s.K,
    }
    for policy, expected in a_token.items():
        assert cost.saved_bytes(s, policy) == s.T * expected + 4 * (s.E + 1)
    assert cost.saved_bytes(s._replace(halves=1)) == s.T * (2 * s.d + 2 * s.n * s.K + 12 * s.K) + 4 * (s.E + 1)


def test_bytes_of_routing() -> None:
    assert cost.dispatch_bytes(1000) == 12_000
    assert cost.topk_bytes(10, 128, 8, itemsize=4) == 10 * (4 * 128 + 8 * 8)
    assert cost.topk_backward_bytes(10, 128, 8, itemsize=2) == 10 * (2 * 2 * 128 + 8 * 8)


# --- Other GPUs, predictions -------------------------------------------------------------------------------------------------


def test_rates_of_named_gpus() -> None:
    """Figures of data sheets with sparsity are twice the dense ones. Operations of an H100 are measured."""
    assert cost.gpu_named("H200")[:2] == (cost.PEAK_OPERATIONS, cost.PEAK_BYTES)
    assert cost.gpu_named("H100")[:2] == (785e12, 3.35e12)
    sheets = {name: cost.gpu_named(name) for name in ("H100, data sheet", "H200, data sheet", "B200")}
    for name, (with_sparsity, least_bytes) in {
        "H100, data sheet": (1979, 3.35),
        "H200, data sheet": (1979, 4.8),
        "B200": (4500, 8.0),
    }.items():
        assert sheets[name][:2] == (pytest.approx(with_sparsity * 1e12 / 2, rel=1e-3), least_bytes * 1e12)
    assert cost.floor_ms(0.0, 3.35e9, "H100") == pytest.approx(1.0)
    assert cost.floor_ms(2.25e12, 0.0, "B200") == pytest.approx(1.0)
    measured, sheet = cost.gpu_named("H200"), sheets["H200, data sheet"]
    assert (round(measured.operations / sheet.operations, 2), round(measured.bytes / sheet.bytes, 2)) == (0.79, 0.88)


def test_a_prediction_adds_a_part_of_the_shorter() -> None:
    operations, least_bytes = 785e9, 2 * 4.24e9
    assert cost.predicted_ms(operations, least_bytes) == pytest.approx(2.0 + cost.EXPOSED * 1.0)
    assert cost.predicted_ms(785e9, 0.0) == cost.floor_ms(785e9, 0.0)


def test_tiles_are_filled_up() -> None:
    """Half a tile an expert: 64 rows of products by rows, 32 of a weight gradient's reduction, none of a copy."""
    s = Sizes(T=4096, d=4096, n=4096, E=16, K=2)
    for name, more in (("up_forward", 64), ("down_backward_weight", 32)):
        product, rows = PRODUCTS[name], s.rows + more * s.E
        operations, least_bytes = product.operations(s) * rows / s.rows, product.least_bytes(s)
        assert cost.predicted_product_ms(name, s) == pytest.approx(cost.predicted_ms(operations, least_bytes))
    assert cost.predicted_product_ms("combine", s) == pytest.approx(cost.product_floor_ms("combine", s))
    assert cost.predicted_layer_ms(s._replace(T=0)) > (0.0, 0.0)  # weights are read, or zeros written


def product_errors() -> list[float]:
    """Logarithms of predicted over measured time, of every committed product."""
    return [
        math.log(cost.predicted_product_ms(row["product"], Sizes(**row["cfg"])) / row["layer_ms"])
        for row in rows_of("products")
    ]


def test_the_part_that_is_not_hidden_fits_the_products_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(part: float) -> float:
        monkeypatch.setattr(cost, "EXPOSED", part)
        return sum(value**2 for value in product_errors())

    chosen = cost.EXPOSED
    assert min((tenth / 10 for tenth in range(11)), key=error) == chosen


def test_predicted_products_against_measured_ones() -> None:
    errors = product_errors()
    assert len(errors) == 42 and max(map(abs, errors)) < math.log(1.4)
    assert sum(abs(error) < math.log(1.1) for error in errors) >= 29


def test_predicted_layers_against_measured_ones() -> None:
    """Within 10 %, but for Mixtral's at T = 32768, where the clock falls, and the tiny layer of d = n = 256."""
    ratios = {
        sizes: sum(cost.predicted_layer_ms(sizes)) / row["ours_fwdbwd_ms"]
        for sizes, row in ((Sizes(**row["cfg"]), row) for row in rows_of("module"))
    }
    tiny = {sizes: ratio for sizes, ratio in ratios.items() if sizes.d == sizes.n == 256}
    assert len(ratios) == 30 and len(tiny) == 5 and all(0.5 < ratio < 0.9 for ratio in tiny.values())
    others = [ratio for sizes, ratio in ratios.items() if sizes not in tiny]
    assert all(0.88 < ratio < 1.1 for ratio in others) and sum(ratio > 0.9 for ratio in others) >= len(others) - 1


# --- Steps, and the papers' figures ------------------------------------------------------------------------------------------


def test_recompute_runs_the_up_projection_again() -> None:
    s = Sizes(T=96, d=64, n=40, E=5, K=3)
    minimal, paper, recompute = (cost.layer_work(s, save) for save in ("minimal", "paper", "recompute"))
    assert minimal == paper
    (again,) = [work for work in recompute if work not in minimal]
    up = PRODUCTS["up_forward"]
    assert again == ("backward", "up_forward again", up.operations(s), up.least_bytes(s))
    assert cost.predicted_layer_ms(s, "recompute")[1] == pytest.approx(
        cost.predicted_layer_ms(s)[1] + cost.predicted_product_ms("up_forward", s)
    )


def test_intensity_is_sonicmoe_s_equation_4() -> None:
    """Both of its forms, and a count of one expert's arrays, H's write left out."""
    s = Sizes(T=24576, d=1536, n=256, E=128, K=8)
    T_e, G, rho = s.T * s.K / s.E, s.d / s.n, s.K / s.E
    assert cost.arithmetic_intensity(s) == pytest.approx(3 / ((2 + 2 * G) / s.d + 3 / (s.T * rho)))
    one = Sizes(T=int(T_e), d=s.d, n=s.n, E=1, K=1)
    products = [PRODUCTS[name] for name in cost.FORWARD]
    moved = sum(product.least_bytes(one) for product in products) - 2 * one.rows * 2 * one.n
    assert cost.arithmetic_intensity(s) == pytest.approx(sum(p.operations(one) for p in products) / moved)


def test_moeblaze_s_two_buffers() -> None:
    """§2.1 prints 94 GB for the first, §2.2 98 GB for the second. By its own L, d, k and h both are 98 GB, as h = d k."""
    L = 2_000_000
    assert cost.routed_buffer_bytes(L, d_model=6144, top_k=4) == cost.intermediate_bytes(L, d_hidden=24576)
    assert round(cost.routed_buffer_bytes(L, d_model=6144, top_k=4) / 1e9) == 98


QWEN3 = Sizes(T=4096, d=2048, n=768, E=128, K=8)  # h = 2048, f = 0.375, b s = 4096
LAYERS = 48


def test_the_article_s_memory() -> None:
    assert round(cost.weight_bytes(QWEN3, LAYERS) / 1e9) == 116
    assert round(cost.weight_bytes(QWEN3, LAYERS, bytes_a_parameter=16) / 1e9) == 464
    assert round(cost.activation_bytes(QWEN3, LAYERS) / 1e9) == 8
    ours = cost.saved_bytes(QWEN3)  # act is made again from H, and index lists are kept
    assert ours == cost.activation_bytes(QWEN3) - 2 * QWEN3.rows * QWEN3.n + 12 * QWEN3.rows + 4 * (QWEN3.E + 1)


def test_the_article_s_expert_parallelism() -> None:
    computed, sent = cost.expert_parallel_ms(QWEN3)
    assert (round(computed, 2), round(sent, 2), round(sent / (computed + sent), 2)) == (0.23, 0.77, 0.77)
    assert computed == pytest.approx(1e3 * 18 * 4096 * 2048 * (0.375 * 2048) * 8 / (8 * 500e12))


def test_the_fair_remark() -> None:
    """The forward and backward of eight GPUs beside the four exchanges of eight GPUs."""
    computed, sent = cost.expert_parallel_ms(QWEN3, exchanges=4, senders=8)
    assert (computed, sent) == (cost.expert_parallel_ms(QWEN3)[0], cost.expert_parallel_ms(QWEN3)[1] / 4)
    assert round(sent / (computed + sent), 2) == 0.45


def test_rows_of_an_expert_with_batch_tiling() -> None:
    assert cost.rows_per_expert(QWEN3) == 4096 * 8 / 128
    assert cost.rows_per_expert(QWEN3._replace(K=128)) == QWEN3.T  # the least sparsity: all of the batch
    assert cost.rows_per_expert(QWEN3._replace(K=1), tiles=128) == QWEN3.T  # G = E / k gives it back


def test_attention_s_memory_is_quadratic_in_the_sequence() -> None:
    once, twice = (cost.attention_bytes(8, s, d_model=2048, heads=32) for s in (4096, 8192))
    assert once == 8 * (11 * 4096 * 2048 + 5 * 32 * 4096**2) and twice - 2 * once == 8 * 2 * 5 * 32 * 4096**2
    assert cost.attention_bytes(8, 4096, 2048, 32, tiles=4) == once / 4 == cost.attention_bytes(2, 4096, 2048, 32)


# --- What can't be -----------------------------------------------------------------------------------------------------------

GOOD = Sizes(T=96, d=64, n=40, E=5, K=3)
OF_SIZES: dict[str, Callable[[Sizes], Any]] = {
    "product_floor_ms": lambda s: cost.product_floor_ms("up_forward", s),
    "layer_operations": cost.layer_operations,
    "layer_floor_ms": cost.layer_floor_ms,
    "router_floor_ms": cost.router_floor_ms,
    "layer_work": cost.layer_work,
    "saved_bytes": cost.saved_bytes,
    "predicted_work_ms": lambda s: cost.predicted_work_ms(cost.Work("forward", "top-k", 1.0, 1.0), s),
    "predicted_product_ms": lambda s: cost.predicted_product_ms("up_forward", s),
    "predicted_layer_ms": cost.predicted_layer_ms,
    "arithmetic_intensity": cost.arithmetic_intensity,
    "weight_bytes": cost.weight_bytes,
    "activation_bytes": cost.activation_bytes,
    "expert_parallel_ms": cost.expert_parallel_ms,
    "rows_per_expert": cost.rows_per_expert,
}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"T": math.nan}, TypeError),
        ({"T": 10.5}, TypeError),
        ({"d": 0}, ValueError),
        ({"n": 0}, ValueError),
        ({"E": 0}, ValueError),
        ({"K": -1}, ValueError),
        ({"K": math.nan}, ValueError),
        ({"K": 6}, ValueError),
        ({"halves": 3}, ValueError),
        ({"halves": 0}, ValueError),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OF_SIZES)
def test_sizes_that_cannot_be_are_refused(name: str, wrong: dict[str, Any], error: type[Exception]) -> None:
    refuses(lambda: OF_SIZES[name](GOOD._replace(**wrong)), *wrong, error)


@pytest.mark.parametrize("name", [name for name in OF_SIZES if name != "arithmetic_intensity"])
def test_layers_without_tokens_and_means_of_experts_are_none_of_them(name: str) -> None:
    for sizes in (GOOD._replace(T=0), GOOD._replace(K=0), GOOD._replace(K=2.5)):
        OF_SIZES[name](sizes)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: cost.layer_floor_ms(GOOD, gpu="A100"), "gpu"),
        (lambda: cost.floor_ms(math.nan, 1), "operations"),
        (lambda: cost.floor_ms(1, math.nan), "least_bytes"),
        (lambda: cost.saved_bytes(GOOD, "x"), "policy"),
        (lambda: cost.layer_work(GOOD, "papers"), "save"),
        (lambda: cost.topk_bytes(1, 8, 9, 4), "top_k"),
        (lambda: cost.topk_backward_bytes(1, 8, 8, 0), "itemsize"),
        (lambda: cost.arithmetic_intensity(GOOD._replace(T=0)), "T K"),
        (lambda: cost.arithmetic_intensity(GOOD._replace(K=0)), "T K"),
        (lambda: cost.weight_bytes(GOOD, 1, 0), "bytes_a_parameter"),
        (lambda: cost.expert_parallel_ms(GOOD, operations=0), "operations"),
        (lambda: cost.expert_parallel_ms(GOOD, senders=0), "senders"),
        (lambda: cost.attention_bytes(8, 4096, 2048, 32, tiles=3), "tiles"),
    ],
)
def test_counts_that_cannot_be_are_refused(call: Callable[[], Any], argument: str) -> None:
    """tests/test_wrong_arguments.py has what is of a wrong type, or negative."""
    refuses(call, argument)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 80GB HBM3, driver 580.159.04", "H100"),
        ("NVIDIA H200, driver 580.159.04", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL, driver 580.159.04", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 MIG 3g.71gb, driver 580.159.04", None),
        ("2 CPU cores, Python 3.11", None),
    ],
)
def test_cards_of_other_rates_have_no_name(device: str, name: str | None) -> None:
    assert cost.known_gpu(device) == name


def test_floors_need_no_torch() -> None:
    code = (
        "import sys; from blazeproto import cost; from blazeproto.gemm import Sizes; "
        "cost.layer_floor_ms(Sizes(8, 8, 8, 2, 1)); sys.exit('torch' in sys.modules)"
    )
    python("-c", code, cwd=ROOT)
