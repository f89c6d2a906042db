"""The tables of README and docs/ come from the results files, and only from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import module, module_tables, plot_results, result_tables

FIXTURE = Path(__file__).parent / "layer.json"
README = """# A package

Before.

<!-- results:layer -->
stale
<!-- /results:layer -->

<!-- results:memory --><!-- /results:memory -->

<!-- results:products -->
kept: there are no such results
<!-- /results:products -->

After.
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "layer.json").write_text(FIXTURE.read_text())
    return tmp_path


def test_tables_are_filled_and_the_rest_is_left_alone(results: Path) -> None:
    filled = result_tables.fill(README, results)
    assert filled.startswith("# A package\n\nBefore.\n")
    assert filled.endswith("\nAfter.\n")
    assert "stale" not in filled
    assert "kept: there are no such results" in filled
    # ours 0.5, SonicMoE 0.8 forward; 1.5 and 2.0 together
    assert "| 8192, 256, 256, 128, 4 | **0.50** | 0.80 |" in filled
    assert "| 1.60 | 1.33 |" in filled
    assert "SonicMoE 1.60× forward, 1.20× backward (1 shapes)" in filled
    assert "| 8192, 256, 256, 128, 4 | 36 | 36 | 97 | 80 | 104 | 132 |" in filled


def test_filling_twice_changes_nothing(results: Path) -> None:
    page = f"{README}The experts are <!-- results:layer_claim --><!-- /results:layer_claim -->.\n"
    once = result_tables.fill(page, results)
    assert result_tables.fill(once, results) == once


def test_a_sentence_is_filled_within_its_paragraph(results: Path) -> None:
    page = "The experts are <!-- results:layer_claim -->stale<!-- /results:layer_claim -->, measured."
    filled = result_tables.fill(page, results)
    # one shape: 2.0 over 1.5 ms, and 80 of 104 MiB
    assert filled.startswith("The experts are <!-- results:layer_claim -->faster than SonicMoE's on 1 of 1 shapes")
    assert "1.33 times in the geometric mean (1.33 to 1.33), at 0.77 of its peak memory (0.77 to 0.77)<!--" in filled
    assert filled.endswith("-->, measured.")


def test_the_claim_counts_the_shapes_that_are_behind() -> None:
    record = json.loads(FIXTURE.read_text())
    behind = json.loads(json.dumps(record["rows"][0]))
    behind["peers"]["sonic"]["gpu_fwdbwd_ms"] = 1.0  # ours: 1.5
    record["rows"].append(behind)
    assert result_tables.layer_claim(record).startswith("faster than SonicMoE's on 1 of 2 shapes")


ORIGIN = {"gpu": "a GPU", "measured": "a day", "sources_sha256": "0" * 64}


def module_row(*shape: int) -> dict[str, Any]:
    """Ours 1.5 ms, SonicMoE 1.8, floor 1.2; 80 of 100 MiB."""
    times = {"ours_fwd_ms": 0.5, "ours_fwdbwd_ms": 1.5, "sonic_fwd_ms": 0.6, "sonic_fwdbwd_ms": 1.8}
    times |= {"router_fwd_ms": 0.05, "router_fwdbwd_ms": 0.15, "floor_fwd_ms": 0.4, "floor_fwdbwd_ms": 1.2}
    bytes_ = {"ours_peak_fwdbwd_MiB": 80.0, "sonic_peak_fwdbwd_MiB": 100.0, "router_saved_bytes": 3 << 20}
    return {"cfg": dict(zip("TdnEK", shape, strict=True))} | times | bytes_


def test_the_table_of_readme_has_its_six_shapes_alone() -> None:
    record = {"rows": [module_row(8192, 256, 256, 128, 4)], **ORIGIN}
    assert "Not measured" in module_tables.readme_table(record)  # 8192 tokens are not among them
    assert len(module_tables.README_SHAPES) == 6
    record["rows"] += [module_row(*shape) for shape in module_tables.README_SHAPES]
    table = module_tables.readme_table(record)
    assert table.count("**1.50** | 1.80 | 1.20 | 0.80 | 0.80 |") == 6
    assert "8192, 256" not in table


def test_the_benchmark_measures_the_shapes_of_readme() -> None:
    measured = {shape[:5] for shape in module.MODULE_SHAPES}
    assert set(module_tables.README_SHAPES) <= measured


def test_the_headline_is_the_module_s() -> None:
    record = {"rows": [module_row(8192, 256, 256, 128, 4), module_row(4096, 256, 256, 128, 4)]}
    record["rows"][1]["sonic_fwdbwd_ms"] = 1.2  # ours: 1.5
    said = module_tables.module_claim(record)
    assert "faster than SonicMoE's module on 1 of 2 shapes, 0.98 times in the geometric mean (0.80 to 1.20)" in said
    assert "at 0.80 of its peak memory" in said
    without = {name: value for name, value in record["rows"][0].items() if not name.startswith("sonic")}
    assert module_tables.module_claim({"rows": [without]}) == result_tables.NOT_MEASURED


def test_without_its_results_the_headline_stays(results: Path) -> None:
    page = "<!-- results:module_claim -->As it was.<!-- /results:module_claim -->"
    assert result_tables.fill(page, results) == page
    (results / "module.json").write_text(json.dumps({"rows": [module_row(8192, 256, 256, 128, 4)], **ORIGIN}))
    assert "A whole layer" in result_tables.fill(page, results)


def test_the_tables_of_modules_and_router() -> None:
    row = module_row(8192, 256, 256, 128, 4)
    table = module_tables.module_table({"rows": [row], **ORIGIN})
    assert "| **0.50** | 0.60 | 0.40 | **1.50** | 1.80 | 1.20 | 1.20 | 1.20 | 0.05 | 0.15 | 80 | 100 | 3 |" in table
    without = {name: value for name, value in row.items() if not name.startswith("sonic")}
    table = module_tables.module_table({"rows": [without | {"other_sources": ORIGIN}], **ORIGIN})
    assert "| 8192, 256, 256, 128, 4 † | **0.50** | – | 0.40 |" in table and "| – | – | 0.05 |" in table
    found = {"logits": 1.234e-6, "dX": 2e-3, "dW": 1e-5, "other_tokens": 2, "tokens": 1000}
    router = {"cfg": {"T": 1000, "d": 256, "E": 128, "K": 4}, "weight": "fp32", "fwd_ms": 0.1, "fwdbwd_ms": 0.3}
    router |= {"floor_fwd_ms": 0.04, "floor_fwdbwd_ms": 0.12, "accuracy": {"plain": found, "autocast": found}}
    table = module_tables.router_table({"rows": [router], **ORIGIN})
    assert "| fp32 | 0.100 | 0.040 | 0.300 | 0.120 | 1.2e-06 | 2.0e-03 | 1.0e-05 | 4 of 2000 |" in table


def test_a_row_of_other_sources_is_marked(results: Path) -> None:
    path = results / "layer.json"
    record = json.loads(path.read_text())
    record["rows"][0]["other_sources"] = {"measured": "the day before", "sources_sha256": "0123456789abcdef"}
    path.write_text(json.dumps(record))
    filled = result_tables.fill(README, results)
    assert "| 8192, 256, 256, 128, 4 † | **0.50** | 0.80 |" in filled
    assert " †: the day before, sources `0123456789ab`." in filled
    assert "| 8192, 256, 256, 128, 4 † | 36 |" in filled  # in the table of memory too


def test_an_extra_of_other_sources_says_so(results: Path) -> None:
    record = json.loads((results / "layer.json").read_text())
    assert "Measured" not in result_tables.skew_table(record)
    record["extras_of_other_sources"] = {"skew": {"measured": "the day before", "sources_sha256": "0123456789abcdef"}}
    assert result_tables.skew_table(record).endswith("\n\nMeasured the day before, sources `0123456789ab`.")
    assert "the day before" not in result_tables.workspace_table(record)


def test_an_unknown_table_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="results marker: expected one of"):
        result_tables.fill("<!-- results:nothing --><!-- /results:nothing -->", results)


def test_plots_are_drawn(results: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    record = json.loads(FIXTURE.read_text())
    modules = {"rows": [module_row(8192, 256, 256, 128, 4)], **ORIGIN}
    for draw in (plot_results.plot_experts, plot_results.plot_memory, plot_results.plot_modules):
        path = results / f"{draw.__name__}.png"
        draw(modules if draw is plot_results.plot_modules else record, path)
        assert path.stat().st_size > 5000
    series = [{"T": T, "E": 128, "K": 8, "tiled_ms": T / 1e6, "floor_ms": T / 4e6} for T in (8192, 65536)]
    assert plot_results.plot_dispatch({"rows": [], "series": {"T": series}}, results / "dispatch.png")
    assert not plot_results.plot_dispatch({"rows": []}, results / "none.png")


def test_the_tables_of_products_and_dispatch() -> None:
    product = {
        "product": "combine",
        "cfg": {"T": 8, "d": 8, "n": 8, "E": 2, "K": 1},
        "floor_ms": 0.1,
        "layer_ms": 0.104,
    }
    origin = {"gpu": "a GPU", "measured": "a day", "sources_sha256": "0" * 64}
    table = result_tables.products_table({"rows": [product | {"layer_to_floor": 1.04}], **origin})
    assert "| combine | 8, 8, 8, 2, 1 | – | – | – | 0.104 | 0.100 | – | – | 1.04 |" in table
    row = {"name": "Qwen3", "T": 1048576, "E": 128, "K": 8, "tiled_ms": 0.06, "torch_sort_ms": 0.96, "floor_ms": 0.02}
    table = result_tables.dispatch_table({"rows": [row], **origin})
    assert "| Qwen3 | 1048576 | 128 | 8 | 0.060 | 0.960 | 0.020 | 3.00 |" in table
    small = {"T": 8192, "E": 128, "K": 8, "gpu_us": 5.43, "host_us": 30.2, "host_us_allocating": 38.15}
    table = result_tables.small_dispatch_table({"small": [small], **origin})
    assert "| 8192 | 128 | 8 | 5.4 | 30.2 | 38.1 |" in table
    table = result_tables.dispatch_table({"rows": [row | {"paper_sort_ms": 5.1, "paper_hash_ms": 2.1}], **origin})
    assert "| MoEBlaze sorting (H100) | MoEBlaze hash (H100) |" in table
    assert "the columns marked H100 are the paper's own times" in table
    topk = {"T": 1048576, "E": 128, "K": 8, "fused_ms": 0.2, "torch_ms": 6.0, "floor_ms": 0.13}
    table = result_tables.topk_table(topk | {"score": "sigmoid", "dtype": "float32", **origin})
    assert "| sigmoid | float32 | 1048576 | 128 | 8 | 0.200 | 6.000 | 0.130 | 1.54 | 30.0 |" in table


def test_the_table_of_rounding() -> None:
    plain = {"rows": 1000, "padded_rows": 1100, "fwd_tflops": 400.0, "bwd_tflops": 300.0}
    rounded = {"rows": 1024, "padded_rows": 1024, "fwd_tflops": 440.0, "bwd_tflops": 315.0}
    cfg = {"T": 8, "d": 8, "n": 8, "E": 2, "K": 1}
    row = {"cfg": cfg, "top_k": plain, "rounded": rounded, "fwd_gain": 1.1, "bwd_gain": 1.05, "fwdbwd_gain": 1.066}
    origin = {"gpu": "a GPU", "measured": "a day", "sources_sha256": "0" * 64}
    table = result_tables.rounding_table({"rows": [row], **origin})
    assert "| 8, 8, 8, 2, 1 | 10.0 | 400 | 440 | 300 | 315 | 1.100 | 1.050 | 1.066 |" in table
    assert result_tables.rounding_layers_table({"rows": [row], **origin}) == result_tables.NOT_MEASURED
    times = {"top_k": (1, 3), "rounded": (0.9, 2.8), "down": (0.8, 2.6), "up": (1.1, 3.3)}
    layers = {name: {"gpu_fwd_ms": forward, "gpu_fwdbwd_ms": both} for name, (forward, both) in times.items()}
    gains = {"fwd_gain": 1.1, "bwd_gain": 1.05, "fwdbwd_gain": 1.066}
    table = result_tables.rounding_layers_table({"rows": [row | {"layers": layers | gains}], **origin})
    assert "| 1.00 | 0.90 | 0.80 | 1.10 | 3.00 | 2.80 | 2.60 | 3.30 | 1.100 | 1.050 | 1.066 |" in table


def test_sentences_of_products_and_dispatch() -> None:
    speeds = {"up_forward": 0.97, "down_backward_weight": 0.95, "up_backward_act": None}
    rows = [{"product": name, "gathered_to_plain_speed": speed} for name, speed in speeds.items()]
    said = result_tables.gather_cost({"rows": rows})
    assert "at least 0.970 of the speed of contiguous rows in the products by rows" in said
    assert said.endswith("at least 0.950 in the weight gradients")
    series = [{"T": 1048576, "E": E, "K": 8, "tiled_ms": ms} for E, ms in ((512, 0.075), (8, 0.05))]
    said = result_tables.experts_growth({"series": {"E": series}})
    assert said == "A dispatch for 512 experts takes 1.50 times one for 8 (T = 1048576, K = 8)"


def test_sentences_without_their_results_say_so() -> None:
    for name, (_, make) in result_tables.SENTENCES.items():
        assert make({"rows": []}) == result_tables.NOT_MEASURED, name


def test_the_pages_are_what_the_committed_results_say() -> None:
    pages = plot_results.marked_pages(plot_results.REPOSITORY / "README.md", plot_results.DOCS)
    assert {"README.md", "results.md"} <= {page.name for page in pages}
    for page in pages:
        text = page.read_text()
        assert result_tables.fill(text, plot_results.RESULTS) == text, "run python -m scripts.bench.plot_results"


def test_every_table_has_a_place() -> None:
    pages = plot_results.marked_pages(plot_results.REPOSITORY / "README.md", plot_results.DOCS)
    text = "".join(page.read_text() for page in pages)
    for name in result_tables.TABLES | result_tables.SENTENCES:
        assert f"<!-- results:{name} -->" in text


def test_check_names_a_stale_page_and_writes_nothing(results: Path) -> None:
    (results / "README.md").write_text(README)
    (results / "docs").mkdir()
    command = [sys.executable, "-m", "scripts.bench.plot_results", "--check", "--results", str(results)]
    command += ["--readme", str(results / "README.md"), "--docs", str(results / "docs")]
    ran = subprocess.run(command, cwd=plot_results.REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "README.md" in ran.stderr
    assert (results / "README.md").read_text() == README
    (results / "README.md").write_text(result_tables.fill(README, results))
    ran = subprocess.run(command, cwd=plot_results.REPOSITORY, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "all pages are up to date\n")
