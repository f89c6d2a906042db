"""The tables of README and docs/ come from the results files, and only from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import cost_tables, markdown, module, module_tables, plot_results, result_tables
from scripts.bench.tables import TABLES

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
    assert "| 8192, 256, 256, 128, 4 | 0.50 | 0.80 |" in filled
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
    # one size of the tiny layer: 2.0 over 1.5 ms, and 80 of 104 MiB
    said = "faster by more than 2 % than SonicMoE's on 1 of 1 sizes of one tiny layer, "
    assert filled.startswith(f"The experts are <!-- results:layer_claim -->{said}")
    assert "1.33 times in the geometric mean (1.33 to 1.33), at 0.77 of its peak memory (0.77 to 0.77)<!--" in filled
    assert filled.endswith("-->, measured.")


def test_the_claim_counts_the_shapes_that_are_behind() -> None:
    record = json.loads(FIXTURE.read_text())
    behind = json.loads(json.dumps(record["rows"][0]))
    behind["peers"]["sonic"]["gpu_fwdbwd_ms"] = 1.0  # ours: 1.5
    record["rows"].append(behind)
    assert result_tables.layer_claim(record).startswith("faster by more than 2 % than SonicMoE's on 1 of 2 sizes")


VERSIONS = "torch 2.11.0, triton 3.6.0, sonic-moe 0.1.2, quack-kernels 0.3.11"
OF = {"of": {"gpu": "a GPU", "measured": "a day", "versions": VERSIONS, "kernels": []}}  # no kernels: none are earlier
EARLIER = {"of": {"gpu": "a GPU", "measured": "the day before", "versions": VERSIONS}}


def module_row(*shape: int) -> dict[str, Any]:
    """Ours 1.5 ms, SonicMoE 1.8, floor 1.2; 80 of 100 MiB."""
    times = {"ours_fwd_ms": 0.5, "ours_fwdbwd_ms": 1.5, "sonic_fwd_ms": 0.6, "sonic_fwdbwd_ms": 1.8}
    times |= {"router_fwd_ms": 0.05, "router_fwdbwd_ms": 0.15, "floor_fwd_ms": 0.4, "floor_fwdbwd_ms": 1.2}
    bytes_ = {"ours_peak_fwdbwd_MiB": 80.0, "sonic_peak_fwdbwd_MiB": 100.0, "router_saved_bytes": 3 << 20}
    return {"cfg": dict(zip("TdnEK", shape, strict=True)), "router_may_save_bytes": 3 << 20} | times | bytes_ | OF


def product_row(name: str, ms: float) -> dict[str, Any]:
    return {"product": name, "cfg": {"T": 1024, "d": 512, "n": 512, "E": 4, "K": 2}, "layer_ms": ms} | OF


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    row = module_row(32768, 4096, 1024, 64, 4)
    predicted = sum(cost.predicted_layer_ms(Sizes(32768, 4096, 1024, 64, 4)))
    row["ours_fwdbwd_ms"] = predicted / 1.05
    far = module_row(16384, 1024, 4096, 16, 4) | {"ours_fwdbwd_ms": 1.0}
    tiny = module_row(8192, 256, 256, 128, 4) | {"ours_fwdbwd_ms": 1.0}
    products = {"rows": [product_row("combine", cost.predicted_product_ms("combine", Sizes(1024, 512, 512, 4, 2)))]}
    record = {"rows": [row, far, tiny]}
    table = cost_tables.predicted_table(record)
    assert f"| {predicted:.2f} | {predicted / 1.05:.2f} | 1.05 |" in table and "by data sheet: B200" in table
    said = cost_tables.predicted_claim(record, products)
    forward = [cost.predicted_layer_ms(Sizes(**each["cfg"]))[0] / each["ours_fwd_ms"] for each in (row, far)]
    assert said.startswith("1 of 2 layers, forward + backward, are predicted within 10 % (1.05 to 7.")
    assert f"2 layers, forward alone, are predicted within 10 % ({min(forward):.2f} to " in said
    assert "0 of 1 sizes of one tiny layer, forward + backward, are" in said
    assert said.endswith(
        "1 of 1 products are predicted within 10 % (1.00 to 1.00 of the time measured, geometric mean 1.00)."
    )
    plot_results.PREDICTED_LAYERS(record, tmp_path / "layers.png")
    plot_results.PREDICTED_PRODUCTS(products, tmp_path / "products.png")
    assert plot_results.caption_in(tmp_path / "products.png") == plot_results.caption(products)


def test_the_headline_is_the_module_s() -> None:
    record = {"rows": [module_row(8192, 2048, 8192, 8, 4), module_row(4096, 256, 256, 128, 4)]}
    record["rows"][1]["sonic_fwdbwd_ms"] = 1.2  # ours: 1.5
    said = module_tables.module_claim(record)
    assert (
        "One run of each shape (SonicMoE 0.1.2, QuACK 0.3.11, torch 2.11.0; a GPU)" in said
        and "faster on 1, even within 2 % on 0, slower on 1 of 2 shapes, 0.98 in the geometric mean" in said
    )
    assert (
        "in the geometric mean (0.80 to 1.20). Over all 2 rows, peak memory is 0.80 of SonicMoE's (0.80 to 0.80)"
        in said
        and "28 of the benchmark's 30 shapes have not" in said
    )
    assert "tiny layer" not in said and "earlier" not in said
    record["rows"].append(module_row(32768, 256, 256, 128, 4) | {"sonic_fwdbwd_ms": 3.0})
    apart = module_tables.module_claim(record)
    assert "slower on 1 of 2 shapes, 0.98 in" in apart and "slower on 0 of 1 sizes of one tiny layer, 2.00 in" in apart
    record["rows"][1]["sonic_fwdbwd_ms"] = 1.5 * 1.015
    assert "faster on 1, even within 2 % on 1, slower on 0 of 2 shapes" in module_tables.module_claim(record)
    without = {name: value for name, value in record["rows"][0].items() if not name.startswith("sonic")}
    assert module_tables.module_claim({"rows": [without]}) == result_tables.NOT_MEASURED
    assert module_tables.module_details({"rows": [without]}) == result_tables.NOT_MEASURED


def test_which_bounds_hold_and_how_far_rounds_are_apart_is_computed() -> None:
    rows = [module_row(*shape[:5]) for shape in module.MODULE_SHAPES]
    rows[4]["sonic_fwdbwd_ms"] = 1.5  # as long as ours
    said = module_tables.module_details({"rows": rows})
    assert "Fails: SonicMoE's time over ours" in said and "29 of 30 shapes; not: T24576-d1536-n512-E64-K4" in said
    assert "Holds: our peak not above SonicMoE's: 30 of 30 shapes." in said
    assert "what single rounds took was not recorded" in said and "have not been timed" in said
    for row in rows:
        row |= {"ours_fwdbwd_rounds_ms": [1.0, 1.0], "sonic_fwdbwd_rounds_ms": [1.2, 1.212]}
        row |= {"ours_fwdbwd_gpu_ms": 2.0, "sonic_fwdbwd_gpu_ms": 2.5, "gpu_fwdbwd_method": "events"}
    rows[0] |= {"sonic_fwdbwd_rounds_ms": [1.0, 1.1], "gpu_fwdbwd_method": "graph"}
    said = module_tables.module_details({"rows": rows})
    assert "a shape's ratio moves by 1.0 % in the median of 30 shapes, 10.0 % at most." in said
    assert "time over ours is 1.25 in the geometric mean (1.25 to 1.25): 1 of 30 shapes by graph replay" in said
    assert "fwd + bwd with gaps: ours | SonicMoE |" in module_tables.module_table({"rows": rows})


def test_the_logits_accuracy_is_the_measured_one() -> None:
    rows = [{"accuracy": {"plain": {"logits": error}}} | OF for error in (2.4e-6, 2.5e-6)]
    said = module_tables.router_accuracy({"rows": rows})
    assert said == "Our logits differ from float64's by 2.4e-06 to 2.5e-06 of their norm."
    rows[0] |= {"torch_fp32_logits": 1e-7} | EARLIER
    assert module_tables.router_accuracy({"rows": rows}).endswith(
        "of their norm, torch's in fp32 by 1.0e-07 to 1.0e-07 (1 of 2 of earlier kernels)."
    )
    assert module_tables.router_accuracy({"rows": []}) == result_tables.NOT_MEASURED


def test_without_its_results_the_headline_stays(results: Path) -> None:
    page = "<!-- results:module_claim -->As it was.<!-- /results:module_claim -->"
    assert result_tables.fill(page, results) == page
    (results / "module.json").write_text(json.dumps({"rows": [module_row(8192, 256, 256, 128, 4)]}))
    assert "One run of each shape" in result_tables.fill(page, results)


def test_the_tables_of_modules_and_router() -> None:
    row = module_row(8192, 256, 256, 128, 4)
    table = module_tables.module_table({"rows": [row]})
    assert "| 0.50 | 0.60 | 0.40 | 1.50 | 1.80 | 1.20 | 1.20 | 1.20 | 0.05 | 0.15 | 80 | 100 | 3 |" in table
    without = {name: value for name, value in row.items() if not name.startswith("sonic")}
    table = module_tables.module_table({"rows": [without | EARLIER, row]})
    assert "| 8192, 256, 256, 128, 4 † | 0.50 | – | 0.40 |" in table and "| – | – | 0.05 |" in table
    found = {"logits": 1.234e-6, "dX": 2e-3, "dW": 1e-5, "other_tokens": 2, "tokens": 1000}
    router = {"cfg": {"T": 1000, "d": 256, "E": 128, "K": 4}, "weight": "fp32", "fwd_ms": 0.1, "fwdbwd_ms": 0.3}
    router |= {"floor_fwd_ms": 0.04, "floor_fwdbwd_ms": 0.12, "accuracy": {"plain": found, "autocast": found}} | OF
    table = TABLES["router"]({"rows": [router]})
    assert "| fp32 | 0.100 | 0.040 | 0.300 | 0.120 | 1.2e-06 | – | 2.0e-03 | 1.0e-05 | 4 of 2000 |" in table
    table = TABLES["router"]({"rows": [router | {"torch_fp32_logits": 3e-7}]})
    assert "| 1.2e-06 | 3.0e-07 | 2.0e-03 |" in table


def test_a_row_of_earlier_kernels_is_marked_where_it_stands(results: Path) -> None:
    path = results / "layer.json"
    record = json.loads(path.read_text())
    page = f"{README}<!-- results:layer_claim --><!-- /results:layer_claim -->"
    filled = result_tables.fill(page, results)
    assert "earlier" not in filled and "†" not in filled
    record["rows"].append(record["rows"][0] | EARLIER)
    path.write_text(json.dumps(record))
    filled = result_tables.fill(page, results)
    assert "| 8192, 256, 256, 128, 4 † | 0.50 | 0.80 |" in filled and "| 8192, 256, 256, 128, 4 | 0.50" in filled
    assert filled.count(" †: of earlier kernels.") == 2  # under the table of memory too
    assert "(1 of 2 of earlier kernels)<!--" in filled
    path.write_text(json.dumps(record | {"rows": record["rows"][1:]}))  # all of them: said once
    filled = result_tables.fill(page, results)
    assert "†" not in filled and filled.count("the day before. **Of earlier kernels.**") == 2
    assert "(of earlier kernels)<!--" in filled


def test_a_row_of_an_earlier_benchmark_has_a_mark_of_its_own() -> None:
    row = module_row(8192, 256, 256, 128, 4)
    other = {"of": OF["of"] | {"protocol": "scripts.bench.module.measure", "version": 0}}
    table = module_tables.module_table({"rows": [row, row | other, row | EARLIER]})
    assert [line.count("†") + 2 * line.count("‡") for line in table.splitlines()[2:5]] == [0, 2, 1]
    assert table.endswith("†: of earlier kernels. ‡: by an earlier form of the benchmark.")
    assert markdown.caveat([row, row | other]) == "1 of 2 by an earlier form of the benchmark"


def test_where_and_when_rows_were_measured() -> None:
    later = {"of": OF["of"] | {"measured": "the next day"}}
    assert markdown.origin([OF, later], "torch") == "a GPU; torch 2.11.0; a day to the next day."
    assert markdown.origin([]) == ""


def test_an_extra_has_its_own_origin(results: Path) -> None:
    record = json.loads((results / "layer.json").read_text())
    shape = {"cfg": record["rows"][0]["cfg"]} | EARLIER
    programs = {"sonic": {"workspace_bytes": None, "gpu_fwdbwd_ms": 2.0, "peak_fwdbwd_MiB": 3.0}}
    assert "the day before. **Of earlier" in TABLES["workspace"]({"workspace": [shape | {"programs": programs}]})
    assert "the day before. **Of earlier" in TABLES["skew"]({"skew": [shape]})
    assert TABLES["skew"](record) == result_tables.NOT_MEASURED


def test_an_unknown_table_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="results marker: expected one of"):
        result_tables.fill("<!-- results:nothing --><!-- /results:nothing -->", results)


def test_plots_are_drawn(results: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    record = json.loads(FIXTURE.read_text())
    for draw in (plot_results.plot_experts, plot_results.plot_memory):
        path = results / f"{draw.__name__}.png"
        draw(record, path)
        assert path.stat().st_size > 5000
    series = [{"T": T, "E": 128, "K": 8, "tiled_ms": T / 1e6, "floor_ms": T / 4e6} | OF for T in (8192, 65536)]
    assert plot_results.plot_dispatch({"rows": [], "series": {"T": series}}, results / "dispatch.png")
    assert not plot_results.plot_dispatch({"rows": []}, results / "none.png")


def test_the_tables_of_products_and_dispatch() -> None:
    product = {
        "product": "combine",
        "cfg": {"T": 8, "d": 8, "n": 8, "E": 2, "K": 1},
        "floor_ms": 0.1,
        "layer_ms": 0.104,
    } | OF
    table = TABLES["products"]({"rows": [product | {"layer_to_floor": 1.04}]})
    assert "| combine | 8, 8, 8, 2, 1 | – | – | – | 0.104 | 0.100 | – | – | 1.04 |" in table
    row = {
        "name": "Qwen3",
        "T": 1048576,
        "E": 128,
        "K": 8,
        "tiled_ms": 0.06,
        "torch_sort_ms": 0.96,
        "floor_ms": 0.02,
    } | OF
    table = TABLES["dispatch"]({"rows": [row]})
    assert "| Qwen3 | 1048576 | 128 | 8 | 0.060 | 0.960 | 0.020 | 3.00 |" in table
    small = {"T": 8192, "E": 128, "K": 8, "gpu_us": 5.43, "host_us": 30.2, "host_us_allocating": 38.15} | OF
    table = TABLES["small_dispatch"]({"small": [small]})
    assert "| 8192 | 128 | 8 | 5.4 | 30.2 | 38.1 |" in table
    table = TABLES["dispatch"]({"rows": [row | {"paper_sort_ms": 5.1, "paper_hash_ms": 2.1}]})
    assert "| MoEBlaze sorting (H100) | MoEBlaze hash (H100) |" in table
    assert "the columns marked H100 are the paper's own times" in table
    topk = {"T": 1048576, "E": 128, "K": 8, "fused_ms": 0.2, "torch_ms": 6.0, "floor_ms": 0.13}
    table = TABLES["topk"]({"rows": [topk | {"score": "sigmoid", "dtype": "float32"} | OF]})
    assert "| sigmoid | float32 | 1048576 | 128 | 8 | 0.200 | 6.000 | 0.130 | 1.54 | 30.0 |" in table


def test_the_table_of_rounding() -> None:
    plain = {"rows": 1000, "padded_rows": 1100, "fwd_tflops": 400.0, "bwd_tflops": 300.0}
    rounded = {"rows": 1024, "padded_rows": 1024, "fwd_tflops": 440.0, "bwd_tflops": 315.0}
    cfg = {"T": 8, "d": 8, "n": 8, "E": 2, "K": 1}
    row = {"cfg": cfg, "top_k": plain, "rounded": rounded, "fwd_gain": 1.1, "bwd_gain": 1.05, "fwdbwd_gain": 1.066} | OF
    table = TABLES["rounding"]({"rows": [row]})
    assert "| 8, 8, 8, 2, 1 | 10.0 | 400 | 440 | 300 | 315 | 1.100 | 1.050 | 1.066 |" in table
    assert TABLES["rounding_layers"]({"rows": [row]}) == result_tables.NOT_MEASURED
    times = {"top_k": (1, 3), "rounded": (0.9, 2.8), "down": (0.8, 2.6), "up": (1.1, 3.3)}
    layers = {name: {"gpu_fwd_ms": forward, "gpu_fwdbwd_ms": both} for name, (forward, both) in times.items()}
    gains = {"fwd_gain": 1.1, "bwd_gain": 1.05, "fwdbwd_gain": 1.066}
    table = TABLES["rounding_layers"]({"rows": [row | {"layers": layers | gains}]})
    assert "| 1.00 | 0.90 | 0.80 | 1.10 | 3.00 | 2.80 | 2.60 | 3.30 | 1.100 | 1.050 | 1.066 |" in table


def test_sentences_of_products_and_dispatch() -> None:
    speeds = {"up_forward": 0.97, "down_backward_weight": 0.95, "up_backward_act": None}
    rows = [{"product": name, "gathered_to_plain_speed": speed} | OF for name, speed in speeds.items()]
    said = result_tables.gather_cost({"rows": rows})
    assert "at least 0.970 of the speed of contiguous rows in the products by rows" in said
    assert said.endswith("at least 0.950 in the weight gradients")
    series = [{"T": 1048576, "E": E, "K": 8, "tiled_ms": ms} | OF for E, ms in ((512, 0.075), (8, 0.05))]
    said = result_tables.experts_growth({"series": {"E": series}})
    assert said == "A dispatch for 512 experts takes 1.50 times one for 8 (T = 1048576, K = 8)"
    series[0] |= EARLIER
    assert result_tables.experts_growth({"series": {"E": series}}).endswith("K = 8; 1 of 2 of earlier kernels)")


def test_where_the_experts_take_longer_than_the_whole_layer() -> None:
    layer = json.loads(FIXTURE.read_text())  # ours 1.5, SonicMoE 2.0
    said = result_tables.experts_longer(
        layer, {"rows": [module_row(8192, 256, 256, 128, 4), module_row(1, 2, 3, 4, 1)]}
    )
    assert said.endswith(
        "above: SonicMoE's on 1 of 1 shapes, up to 1.11 times as long, ours on 0 of 1 shapes, up to 1.00 times as long; "
        "the shortest of these layers takes 1.80 ms."
    )
    assert result_tables.experts_longer(layer, {"rows": []}) == result_tables.NOT_MEASURED


def test_how_far_two_runs_are_apart() -> None:
    record = {"losses": {"hopper": [1.0] * 500}, "largest_difference": 0.00717}
    said = result_tables.curves(record | OF)
    assert said == "the smoothed losses of 500 steps differ by at most 0.72 %"
    assert result_tables.curves(record).endswith("(of earlier kernels)")


def test_how_many_batches_differ() -> None:
    record = {"seeds": [0, 499], "cases": 500, "batches": {"eager": 900, "graph": 100}, "differing": []} | OF
    said = "0 of 1000 batches differ in 500 cases, seeds 0 to 499; a GPU; torch 2.11.0; a day."
    assert result_tables.batch(record) == said
    assert result_tables.batch(record | EARLIER).endswith("**Of earlier kernels.**")


def test_sentences_without_their_results_say_so() -> None:
    for name, (files, make) in result_tables.SENTENCES.items():
        assert make(*[{"rows": []} for _ in files.split()]) == result_tables.NOT_MEASURED, name


def test_the_pages_are_what_the_committed_results_say() -> None:
    pages = plot_results.marked_pages(plot_results.REPOSITORY / "README.md", plot_results.DOCS)
    assert {"README.md", "results.md"} <= {page.name for page in pages}
    for page in pages:
        text = page.read_text()
        assert result_tables.fill(text, plot_results.RESULTS) == text, "run python -m scripts.bench.plot_results"
    assert not plot_results.stale_pictures(plot_results.RESULTS, plot_results.DOCS), (
        "run python -m scripts.bench.plot_results"
    )


def test_a_picture_of_kernels_that_are_earlier_by_now_is_stale(tmp_path: Path) -> None:
    programs = {"blazeproto": {"fwd_ms": 0.5, "deviation_ms": 0.1}}
    record = {"rows": [{"cfg": {"E": experts}, "programs": programs} | OF for experts in (2, 4)]}
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "figure_10.json"
    path.write_text(json.dumps(record))
    picture = tmp_path / "models_figure_10.png"
    plot_results.plot_figure_10(record, picture)
    assert plot_results.caption_in(picture) == "a GPU; torch 2.11.0, SonicMoE 0.1.2, QuACK 0.3.11; a day."
    assert not plot_results.stale_pictures(tmp_path, tmp_path)
    record["rows"][0] |= EARLIER
    path.write_text(json.dumps(record))
    assert plot_results.stale_pictures(tmp_path, tmp_path) == [picture]


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
