"""The benchmark of fp8 without a GPU: its smoke run, its calls in bf16 by the twins, and its check on the machine."""

import pytest

from blazeproto.gemm import Sizes
from blazeproto.lab.oracle import EXACT, evaluate
from scripts.bench import fp8, timing
from tests.scripts.on_machine import run_on_machine

SIZES = Sizes(40, 144, 128, 3, 2)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "DEVICE", "cpu")
    monkeypatch.setattr(fp8, "rows_of", lambda dispatch: None)


def test_calls_in_bf16_are_the_products() -> None:
    """Each takes what those before it have made."""
    o = fp8.Operands(SIZES)
    calls = fp8.in_bf16(o)
    assert calls.keys() == fp8.PRODUCTS.keys() < o.calls().keys()
    for call in calls.values():
        call()
    exact = evaluate(EXACT, o.case)
    for name in ("y", "d_scores", "dx_rows", "d_down", "d_up"):
        got = o.plain[name].reshape(exact[name].shape).double()
        assert (got - exact[name]).norm() < 0.01 * exact[name].norm(), name


@pytest.mark.full
def test_the_check_says_that_the_kernels_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    modules = (fp8.up, fp8.linear, fp8.down_backward, fp8.weight_fp8, fp8.quantize)
    machine = run_on_machine(monkeypatch, fp8, *modules)
    row = fp8.check((SIZES, False), timing.Machine("cpu", 1))
    assert row["repeats"] and all(row["quantized_alike"]) and not any(r.races for r in machine.reports)
    assert all(row[name] < 2.0**-4 for name in ("H", "act", "dH", "A'"))  # e4m3's rounding
    assert all(row[name] < 2.0**-7 for name in ("Y", "dX", "dS", "dW_down", "dW_up"))
    for name in ("Y_rms", "dX_rms"):
        assert row[name]["got"] == pytest.approx(row[name]["promoted"], rel=0.01)
