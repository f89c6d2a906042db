"""Floors and bytes: the products' own formulas give the figures by which every result of this repository was judged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes
from scripts.bench.common import SHAPES

ROOT = Path(__file__).resolve().parents[1]


def floors_by_hand(s: Sizes) -> tuple[float, float]:
    """The layer's eight kernels: operations, then the bytes of arrays that are read and written."""
    x, h, act, y = 2 * s.T * s.d, 2 * s.rows * 2 * s.n, 2 * s.rows * s.n, 2 * s.rows * s.d
    up, down = 2 * s.E * 2 * s.n * s.d, 2 * s.E * s.n * s.d
    of_up, of_down = 4.0 * s.rows * s.n * s.d, 2.0 * s.rows * s.n * s.d
    forward = [(of_up, x + up + h + act), (of_down, act + down + y), (0.0, y + 4 * s.rows + x)]
    backward = [
        (of_down, x + down + h + h + act),
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


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        (Sizes(40960, 768, 256, 128, 8), 0.6323, 1.1788),
        (Sizes(65536, 1024, 4096, 16, 4), 8.5624, 16.9661),
        (Sizes(8192, 256, 256, 128, 4), 0.0376, 0.0752),
    ],
)
def test_layer_floors_are_those_of_the_published_table(sizes: Sizes, forward: float, backward: float) -> None:
    assert cost.layer_floor_ms(sizes) == pytest.approx((forward, backward), abs=5.1e-5)


def test_layer_floors_are_those_of_the_committed_results() -> None:
    rows = json.loads((ROOT / "results" / "h200" / "layer.json").read_text())["rows"]
    assert len(rows) == len(SHAPES) == 23
    for row in rows:
        forward, backward = cost.layer_floor_ms(Sizes(**row["cfg"]))
        assert (round(forward, 4), round(backward, 4)) == (row["floor_fwd_ms"], row["floor_bwd_ms"])


def test_product_floors_are_those_of_the_committed_results() -> None:
    rows = json.loads((ROOT / "results" / "h200" / "products.json").read_text())["rows"]
    assert {row["product"] for row in rows} == {*cost.FORWARD, *cost.BACKWARD, "combine"}
    for row in rows:
        assert round(cost.product_floor_ms(row["product"], Sizes(**row["cfg"])), 4) == row["floor_ms"]


@pytest.mark.parametrize("halves", [1, 2])
def test_operations_of_a_layer(halves: int) -> None:
    s = Sizes(T=100, d=16, n=8, E=4, K=2, halves=halves)
    product = 2.0 * s.rows * s.n * s.d
    assert cost.layer_operations(s) == ((halves + 1) * product, 2 * (halves + 1) * product)


def test_a_floor_is_the_longer_of_the_two() -> None:
    assert cost.floor_ms(785e9, 1.0) == pytest.approx(1.0)
    assert cost.floor_ms(1.0, 4.24e9) == pytest.approx(1.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_has_a_floor(name: str) -> None:
    small = Sizes(T=100, d=16, n=8, E=4, K=2)
    assert 0 < cost.product_floor_ms(name, small) < cost.product_floor_ms(name, small._replace(T=200))


def test_an_unknown_product_is_named() -> None:
    with pytest.raises(ValueError, match=r"product: expected one of .*, got 'up_forwrd'; did you mean 'up_forward'"):
        cost.product_floor_ms("up_forwrd", Sizes(T=100, d=16, n=8, E=4, K=2))


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


def test_floors_need_no_torch() -> None:
    code = (
        "import sys; from blazeproto import cost; from blazeproto.gemm import Sizes; "
        "cost.layer_floor_ms(Sizes(8, 8, 8, 2, 1)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_only_the_lab_imports_cost() -> None:
    importing = re.compile(r"^\s*(from blazeproto import .*\bcost\b|(from|import) blazeproto\.cost\b)", re.MULTILINE)
    users = {
        path.relative_to(ROOT / "blazeproto").parts[0]
        for path in (ROOT / "blazeproto").rglob("*.py")
        if path.name != "cost.py" and importing.search(path.read_text())
    }
    assert users <= {"lab"}
