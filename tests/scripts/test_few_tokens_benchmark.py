"""`scripts.bench.few_tokens` on a CPU: what a row says, and the table that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import few_tokens
from scripts.bench.common import stamped
from scripts.bench.identity import earlier
from scripts.bench.result_tables import few_tokens_table
from scripts.bench.timing import GpuTimes

LAYER = Sizes(0, 256, 128, 8, 2)


def test_a_row_has_the_time_of_one_layer_and_the_bytes_of_the_experts_that_were_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def gpu_ms(calls: Mapping[str, Callable[[], object]], must_agree: Sequence[str], rounds: int) -> GpuTimes:
        ran.extend(out.shape for out in calls["forward"]())  # type: ignore[attr-defined]
        return GpuTimes({"forward": 0.3}, {"forward": "graph"}, {})

    monkeypatch.setattr(few_tokens, "gpu_ms", gpu_ms)
    layers = few_tokens.layers(LAYER, "cpu", 3)
    assert not any(layers[0].down_proj.equal(layer.down_proj) for layer in layers[1:])
    row = stamped(few_tokens.measure, LAYER._replace(T=1), layers, 7)
    assert ran == [(1, 256)] * 3 and row["cfg"] == {"T": 1, "d": 256, "n": 128, "E": 8, "K": 2}
    assert row["experts"] == 2, "one token draws K"
    weights = 2 * (2 * 3 * 256 * 128 + 8 * 256)
    assert row["floor_us"] == round(1e6 * weights / cost.PEAK_BYTES, 2) > 0
    assert row["forward_us"] == 100.0, "of one of the three"
    row |= {"floor_us": 50.0, "over_floor": 2.0}
    assert "| 1 | 2 | 50.0 | 100.0 | 2.00 |" in few_tokens_table({"rows": [row]})
    many = stamped(few_tokens.measure, LAYER._replace(T=200), layers, 7)
    assert many["experts"] == 8 and not earlier(many)
