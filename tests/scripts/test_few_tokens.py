"""`python -m scripts.bench.few_tokens` on a small layer, with a clock that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import few_tokens
from scripts.bench.tables import TABLES
from scripts.bench.timing import GpuTimes

SIZES = Sizes(3, 64, 32, 8, 2)


def test_a_row_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.Tensor, ...]] = []

    def gpu_ms(
        calls: Mapping[str, Callable[[], tuple[torch.Tensor, ...]]], agree: Sequence[str], rounds: int
    ) -> GpuTimes:
        made.extend(call() for call in calls.values())
        return GpuTimes({"forward": 0.5}, {"forward": "graph"}, {})

    monkeypatch.setattr(few_tokens, "gpu_ms", gpu_ms)
    monkeypatch.setattr(cost, "floor_ms", lambda operations, least_bytes: least_bytes / 1e6)
    layers = few_tokens.layers(SIZES, "cpu")
    row = few_tokens.measure(SIZES, layers, 1)
    (outputs,) = made
    assert len(outputs) == len(layers) == few_tokens.SETS and not any(out.requires_grad for out in outputs)
    assert all(out.shape == (3, 64) and out.isfinite().all() for out in outputs) and not torch.equal(*outputs[:2])
    assert not torch.equal(layers[0].down_proj, layers[1].down_proj)
    assert 2 <= row["experts"] <= 6 and row["cfg"]["T"] == 3 and row["gpu_method"] == "graph"
    # Microseconds of one of the four layers; the floor is of its drawn experts' weights and the router's, 2 bytes a number.
    weights = 2 * (row["experts"] * 3 * 64 * 32 + 8 * 64)
    assert row["forward_us"] == 125 and row["floor_us"] == pytest.approx(weights / 1e3, abs=0.01)
    assert row["over_floor"] == pytest.approx(125 / (weights / 1e3), abs=1e-3)
    of = {"gpu": "a GPU", "measured": "a day", "versions": "torch 2.11.0"}
    said = TABLES["few_tokens"]({"rows": [row | {"of": of}]})
    assert "| 3 |" in said and "| 125.0 |" in said and f"| {row['over_floor']:.2f} |" in said
