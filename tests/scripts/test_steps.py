"""`scripts.bench.paper` waterfall, policies and activations: their short forms on a CPU, their tables, sentences and plots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from blazeproto import cost
from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import read_json
from scripts.bench.markdown import NOT_MEASURED
from scripts.bench.paper import __main__ as paper
from scripts.bench.paper import layers, steps_tables
from scripts.bench.peers import layers as programs
from scripts.bench.plot_results import DOCS
from scripts.bench.result_tables import fill
from scripts.bench.timing import relative_difference, saved_bytes

NAMES = ("waterfall", "policies", "activations")
SHAPE = Sizes(96, 64, 128, 4, 2)


@pytest.fixture
def measured(short_form: Callable[[str], Path]) -> Path:
    return short_form("paper.__main__") / "paper"


def record_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / f"{name}.json")
    return found


def test_the_page_s_tables_and_sentences_are_made_of_the_files(measured: Path) -> None:
    for page in ("results.md", "review.md"):
        text = (DOCS / page).read_text()
        filled = fill(text, measured.parent)
        assert filled != text and fill(filled, measured.parent) == filled
        assert "scripts.bench.paper" not in filled
    for name in NAMES:
        claim = steps_tables.SENTENCES[f"{name}_claim"]
        assert claim(record_of(measured, name)) != NOT_MEASURED == claim({"rows": []})


def test_every_step_and_every_activation_is_there(measured: Path) -> None:
    (row,) = record_of(measured, "waterfall")["rows"]
    assert [*row["programs"]] == [*steps_tables.STEPS] and [*row["absent"]] == ["mb_sparse"]
    lines = steps_tables.steps_of({"rows": [row]})
    less = {line["program"]: line.get("less_saved_MiB") for line in lines}
    saved = {name: each["saved_MiB"] for name, each in row["programs"].items()}
    assert less["plain"] is None and less["recompute"] == saved["minimal"] - saved["recompute"] > 0
    found = [line["program"] for line in steps_tables.activations_of(record_of(measured, "activations"))]
    assert sorted(found) == sorted(ACTIVATIONS)


def test_plots_are_drawn(measured: Path, tmp_path: Path) -> None:
    for name in ("waterfall", "policies"):
        figure = Figure()
        getattr(steps_tables, f"plot_{name}")(figure, record_of(measured, name))
        figure.savefig(tmp_path / f"{name}.png")
        assert figure.axes[0].patches or len(figure.axes[0].lines) == 4


def test_each_step_computes_the_layer_and_keeps_what_it_says() -> None:
    inputs = peers.make_inputs(SHAPE, device="cpu")
    expected = programs.ours(SHAPE, inputs).forward()
    kept = {}
    for name, build in (("blocks", programs.dmoe), ("copies", layers.on_copies)):
        program = build(SHAPE, inputs)
        assert relative_difference(program.forward().detach(), expected) < 0.02
        gradient, _, _, of_scores = program.forward_backward()[1]
        ours, _, _, scores = programs.ours(SHAPE, inputs).forward_backward()[1]
        assert relative_difference(gradient, ours) < 0.02 and relative_difference(of_scores, scores) < 0.02
        kept[name] = saved_bytes(program.forward, program.weights)
    by_index = saved_bytes(programs.ours(SHAPE, inputs, save="paper").forward, (inputs.gate_up_proj, inputs.down_proj))
    copied = cost.routed_buffer_bytes(SHAPE.T, SHAPE.d, SHAPE.K) - 2 * SHAPE.T * SHAPE.d
    assert 0 <= kept["copies"] - by_index - copied < 64 * SHAPE.rows, (
        "the copies, in place of the tokens, and index lists"
    )
    assert kept["blocks"] > kept["copies"]


def test_policies_are_predicted_of_the_experts_steps() -> None:
    row = {"cfg": {"T": 32768, "d": 2048, "n": 768, "E": 128, "K": 8}, "of": {"gpu": "NVIDIA H100 80GB HBM3"}}
    sizes = Sizes(**row["cfg"])
    of_h200, elsewhere = (
        steps_tables.predicted_ms("minimal", row | {"of": {"gpu": gpu}}) for gpu in ("NVIDIA H200", "none")
    )
    assert steps_tables.predicted_ms("minimal", row) > of_h200 == elsewhere
    again = cost.predicted_product_ms("up_forward", sizes, "H100")
    more = steps_tables.predicted_ms("recompute", row) - steps_tables.predicted_ms("minimal", row)
    assert more == pytest.approx(again) and steps_tables.predicted_longer("paper", row) == 1.0
    whole = sum(cost.predicted_layer_ms(sizes, gpu="H100"))
    assert 0.8 * whole < steps_tables.predicted_ms("minimal", row) < whole


def test_cases_go_over_tokens_and_widths() -> None:
    cases = paper.ITEMS["policies"].cases
    for letter in "Tn":
        sizes = [getattr(case.shape, letter) for case in cases if case.label == letter]
        assert sizes == sorted(set(sizes)) and len(sizes) >= 5
    assert {case.activation for case in paper.ITEMS["activations"].cases} == {"silu", "swiglu"}
    assert all(case.shape.n % 128 == 0 for case in paper.ITEMS["waterfall"].cases), "the side of a block"
