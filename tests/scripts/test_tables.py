"""Figures that tables and sentences make of rows: recomputed from rows made by hand."""

import math
from typing import Any

import pytest

from scripts.bench import markdown, result_tables, training_tables
from scripts.bench.markdown import NOT_MEASURED
from scripts.bench.result_tables import TABLES as TABLES_OF_PAGES
from scripts.bench.tables import TABLES

SIZES = {"T": 64, "d": 64, "n": 32, "E": 8, "K": 2}
OF = {
    "gpu": "GPU",
    "measured": "2026-11-27 20:00 UTC",
    "kernels": {},
    "version": 1,
    "versions": "torch 2.13.0",
}


@pytest.fixture(autouse=True)
def of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of hand-made rows are no one's."""
    monkeypatch.setattr("scripts.bench.markdown.earlier", lambda row: "")


def test_a_peak_over_several_gpus_is_beside_that_of_one() -> None:
    row = {"cfg": SIZES, "gpus": 2, "dispatcher": "symmetric", "peak_MiB": 300.0, "alone_MiB": 400.0, "of": OF}
    other = row | {"cfg": SIZES | {"T": 128}, "alone_MiB": None}
    lines = TABLES["expert_parallel"]({"ep": [row, other]}).splitlines()
    assert lines[2].endswith("| 300 | 0.75 |") and lines[3].endswith("| 300 | – |")
    assert TABLES["expert_parallel"]({"ep": []}) == TABLES["expert_parallel"]({}) == NOT_MEASURED


def test_ours_and_peers_have_a_column_each() -> None:
    columns = markdown.columns(result_tables.of_programs(["blazeproto", "sonic"], "forward ms", "programs.{}.ms"))
    assert [head for head, _ in columns] == ["forward ms: ours", "SonicMoE"]
    row: dict[str, Any] = {"programs": {"blazeproto": {"ms": 1.5}}}
    assert [cell(row) for _, cell in columns] == ["1.50", "–"]


def test_shapes_without_a_peer_are_left_out_of_its_ratios() -> None:
    """One shape has SonicMoE's experts and no layer of theirs, one has the layer alone, one was not replayed."""
    layer = {"rows": [
        {"cfg": {"T": 1}, "peers": {"sonic": {"gpu_fwdbwd_ms": 2.0}, "blazeproto": {"gpu_fwdbwd_ms": 3.0}}, "of": OF},
        {"cfg": {"T": 2}, "peers": {"blazeproto": {"gpu_fwdbwd_ms": 1.0}}, "of": OF},
        {"cfg": {"T": 3}, "peers": {"blazeproto": {"gpu_fwdbwd_ms": 9.0}}, "of": OF},
    ]}  # fmt: skip
    module = {
        "rows": [
            {"cfg": {"T": 1}, "gpu_fwdbwd_method": "graph", "ours_fwdbwd_gpu_ms": 2.0},
            {"cfg": {"T": 2}, "gpu_fwdbwd_method": "graph", "ours_fwdbwd_gpu_ms": 2.0, "sonic_fwdbwd_gpu_ms": 1.0},
            {"cfg": {"T": 3}, "gpu_fwdbwd_method": "eager", "ours_fwdbwd_gpu_ms": 1.0},
        ]
    }
    experts_share = result_tables.OF_EXPERTS["experts_share"]
    said = experts_share(layer, module)
    assert "SonicMoE" not in said and "take 0.50 to 1.50 (ours, 2 shapes) of the time" in said
    assert experts_share({"rows": layer["rows"][1:]}, {"rows": []}) == NOT_MEASURED


def test_a_quotient_of_zero_is_a_number() -> None:
    assert markdown.look_up({"a": {"b": 0.0}, "c": 2}, "a.b / c") == 0.0
    for path in ("c / a.b", "a.d / c", "c / a.d", "c / e.b"):
        assert markdown.look_up({"a": {"b": 0.0}, "c": 2}, path) is None, path


def test_a_forward_that_was_measured_longer_than_both_has_a_dash_for_its_backward() -> None:
    """As one round on a busy CPU can make it."""
    times = {"blazeproto": (2.0, 1.0), "torch_grouped": (1.0, 4.0)}
    programs = {name: {"gpu_fwd_ms": forward, "gpu_fwdbwd_ms": both} for name, (forward, both) in times.items()}
    table = TABLES_OF_PAGES["layer"][1]({"rows": [{"cfg": SIZES, "peers": programs, "of": OF}]})
    assert "| 2.00 | 1.00 | – | – | 3.00 | – |" in table and "0.50 forward, – backward (1 shapes)" in table


def test_torch_s_backward_is_said_by_experts_a_token() -> None:
    def row(K: int, times: float) -> dict[str, Any]:
        figures = {"gpu_fwd_ms": 2.0, "gpu_fwdbwd_ms": 2.0 + 2.0 * times}
        return {"cfg": SIZES | {"K": K}, "peers": {"torch_grouped": figures}, "of": OF}

    rows = [row(2, 3.5), row(4, 2.25), row(8, 2.5), row(1, 1.5), {"cfg": SIZES, "peers": {}, "of": OF}]
    torch_backward = result_tables.OF_EXPERTS["torch_backward"]
    assert torch_backward({"rows": rows}) == (
        "2.25 to 3.50 times as long as its forward with 2 or 4 experts a token, and 1.50 to 2.50 times with other numbers"
    )
    assert torch_backward({"rows": rows[:2]}) == NOT_MEASURED


def test_losses_are_compared_relative_to_the_others() -> None:
    assert training_tables.from_float64({"losses": [4.04, 2.0]}, {"losses": [4.0, 2.5]}) == pytest.approx([0.01, 0.2])


def test_seeds_are_as_far_apart_as_their_last_losses() -> None:
    last = training_tables.SONICMOE_LAST
    rows = {seed: {"losses": [9.0 * seed] + [loss] * last} for seed, loss in ((1, 2.5), (2, 3.25), (3, 2.75))}
    apart = training_tables.seeds_apart(rows)
    assert apart is not None and math.isclose(apart, 0.75) and training_tables.seeds_apart({1: rows[1]}) is None
