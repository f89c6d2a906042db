"""The tables of README and docs/ come from the results files, and only from them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import markdown, module, plot_results, result_tables
from scripts.bench.markdown import NOT_MEASURED

FIXTURE = Path(__file__).parent / "layer.json"
README = """# A package

Before.

<!-- results:layer -->
stale
<!-- /results:layer -->

<!-- results:memory --><!-- /results:memory -->

The experts are <!-- results:layer_claim -->stale<!-- /results:layer_claim -->, measured.

<!-- results:products -->
kept: there are no such results
<!-- /results:products -->

After.
"""
VERSIONS = "torch 2.11.0, triton 3.6.0, sonic-moe 0.1.2, quack-kernels 0.3.11"
OF = {"of": {"gpu": "a GPU", "measured": "a day", "versions": VERSIONS, "kernels": []}}  # no kernels: none are earlier
EARLIER = {"of": {"gpu": "a GPU", "measured": "the day before", "versions": VERSIONS}}
SMALL = {"cfg": {"T": 8, "d": 8, "n": 8, "E": 2, "K": 1}} | OF
MODELS_TEK = {"T": 1048576, "E": 128, "K": 8} | OF


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "layer.json").write_text(FIXTURE.read_text())
    return tmp_path


def made(name: str, *records: Any) -> str:
    """A table or a sentence."""
    return (result_tables.TABLES | result_tables.SENTENCES)[name][1](*records)


def module_row(*shape: int) -> dict[str, Any]:
    """Ours 1.5 ms, SonicMoE 1.8, floor 1.2; 80 of 100 MiB."""
    times = {"ours_fwd_ms": 0.5, "ours_fwdbwd_ms": 1.5, "sonic_fwd_ms": 0.6, "sonic_fwdbwd_ms": 1.8}
    times |= {"router_fwd_ms": 0.05, "router_fwdbwd_ms": 0.15, "floor_fwd_ms": 0.4, "floor_fwdbwd_ms": 1.2}
    bytes_ = {"ours_peak_fwdbwd_MiB": 80.0, "sonic_peak_fwdbwd_MiB": 100.0, "router_saved_bytes": 3 << 20}
    return {"cfg": dict(zip("TdnEK", shape, strict=True)), "router_may_save_bytes": 3 << 20} | times | bytes_ | OF


MODULE = module_row(8192, 256, 256, 128, 4)
ALONE = {name: value for name, value in MODULE.items() if not name.startswith("sonic")}


def test_markers_are_filled_once_and_the_rest_is_left_alone(results: Path) -> None:
    filled = result_tables.fill(README, results)
    assert filled.startswith("# A package\n\nBefore.\n") and filled.endswith("\nAfter.\n")
    assert "stale" not in filled and "kept: there are no such results" in filled
    # ours 0.5, SonicMoE 0.8 forward; 1.5 and 2.0 together
    assert "| 8192, 256, 256, 128, 4 | 0.50 | 0.80 |" in filled and "| 1.60 | 1.33 |" in filled
    assert "SonicMoE 1.60 forward, 1.20 backward (1 shapes)" in filled
    assert "| 8192, 256, 256, 128, 4 | 36 | 36 | 97 | 80 | 104 | 132 |" in filled
    # one size of the tiny layer: 2.0 over 1.5 ms, and 80 of 104 MiB
    said = (
        "faster by more than 2 % than SonicMoE's on 1 of 1 sizes of one tiny layer, 1.33 times in the geometric mean "
    )
    said += "(1.33 to 1.33), at 0.77 of its peak memory (0.77 to 0.77)"
    assert f"The experts are <!-- results:layer_claim -->{said}<!-- /results:layer_claim -->, measured." in filled
    assert result_tables.fill(filled, results) == filled


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    row = module_row(32768, 4096, 1024, 64, 4)
    predicted = sum(cost.predicted_layer_ms(Sizes(32768, 4096, 1024, 64, 4)))
    row["ours_fwdbwd_ms"] = predicted / 1.05
    far = module_row(16384, 1024, 4096, 16, 4) | {"ours_fwdbwd_ms": 1.0}
    record = {"rows": [row, far, MODULE | {"ours_fwdbwd_ms": 1.0}]}
    product = cost.predicted_product_ms("combine", Sizes(**SMALL["cfg"]))
    products = {"rows": [SMALL | {"product": "combine", "layer_ms": product}]}
    table = made("predicted", record)
    assert f"| {predicted:.2f} | {predicted / 1.05:.2f} | 1.05 |" in table and "by data sheet: B200" in table
    said = made("predicted_claim", record, products)
    forward = [cost.predicted_layer_ms(Sizes(**each["cfg"]))[0] / each["ours_fwd_ms"] for each in (row, far)]
    assert said.startswith("1 of 2 layers, forward + backward, are predicted within 10 % (1.050 to 7.")
    assert f"2 layers, forward alone, are predicted within 10 % ({min(forward):.3f} to " in said
    assert "0 of 1 sizes of one tiny layer, forward + backward, are" in said
    end = "1 of 1 products are predicted within 10 % (1.000 to 1.000 of the time measured, geometric mean 1.00)."
    assert said.endswith(end)
    for name, each in (("predicted_layers.png", record), ("predicted_products.png", products)):
        plot_results.PICTURES[name].save(each, tmp_path / name)
        assert plot_results.caption_in(tmp_path / name) == plot_results.PICTURES[name].caption(each)


def test_the_headline_is_the_module_s() -> None:
    record = {"rows": [module_row(8192, 2048, 8192, 8, 4), module_row(4096, 256, 256, 128, 4)]}
    record["rows"][1]["sonic_fwdbwd_ms"] = 1.2  # ours: 1.5
    said = made("module_claim", record)
    assert "One run of each shape (SonicMoE 0.1.2, QuACK 0.3.11, torch 2.11.0; a GPU)" in said
    times = "0.98 times as fast in the geometric mean (0.80 to 1.20)."
    assert f"faster on 1, even within 2 % on 0, slower on 1 of 2 shapes, {times}" in said
    assert "Over all 2 rows, peak memory is 0.80 of SonicMoE's (0.80 to 0.80)" in said
    assert "28 of the benchmark's 30 shapes have not" in said and "tiny layer" not in said and "earlier" not in said
    record["rows"].append(module_row(32768, 256, 256, 128, 4) | {"sonic_fwdbwd_ms": 3.0})
    apart = made("module_claim", record)
    assert "1 of 2 shapes, 0.98 times as" in apart and "slower on 0 of 1 sizes of one tiny layer, 2.00 times" in apart
    record["rows"][1]["sonic_fwdbwd_ms"] = 1.5 * 1.015
    assert "faster on 1, even within 2 % on 1, slower on 0 of 2 shapes" in made("module_claim", record)
    assert made("module_claim", {"rows": [ALONE]}) == made("module_details", {"rows": [ALONE]}) == NOT_MEASURED
    assert made("module_claim", {"rows": [MODULE | EARLIER]}).endswith("been measured. **(Of earlier kernels.)**")


def test_which_bounds_hold_and_how_far_rounds_are_apart_is_computed() -> None:
    rows = [module_row(*shape[:5]) for shape in module.MODULE_SHAPES]
    rows[4]["sonic_fwdbwd_ms"] = 1.5  # as long as ours
    said = made("module_details", {"rows": rows})
    assert "Fails: SonicMoE's time over ours" in said and "29 of 30 shapes, not on T24576-d1536-n512-E64-K4" in said
    assert "Holds: our peak not above SonicMoE's: on 30 of 30 shapes." in said
    assert "what single rounds took was not recorded" in said and "have not been timed" in said
    for row in rows:
        row |= {"ours_fwdbwd_rounds_ms": [1.0, 1.0], "sonic_fwdbwd_rounds_ms": [1.2, 1.212]}
        row |= {"ours_fwdbwd_gpu_ms": 2.0, "sonic_fwdbwd_gpu_ms": 2.5, "gpu_fwdbwd_method": "events"}
    rows[0] |= {"sonic_fwdbwd_rounds_ms": [1.0, 1.1], "gpu_fwdbwd_method": "graph"}
    said = made("module_details", {"rows": rows})
    assert "a shape's ratio moves by 1.0 % in the median of 30 shapes, 10.0 % at most." in said
    assert "time over ours is 1.25 in the geometric mean (1.25 to 1.25): 1 of 30 shapes by graph replay" in said
    assert "fwd + bwd with gaps: ours | SonicMoE |" in made("module", {"rows": rows})


FOUND = {"logits": 1.234e-6, "dX": 2e-3, "dW": 1e-5, "other_tokens": 2, "tokens": 1000}
ROUTER = {"cfg": {"T": 1000, "d": 256, "E": 128, "K": 4}, "weight": "fp32", "fwd_ms": 0.1, "fwdbwd_ms": 0.3} | OF
ROUTER |= {"floor_fwd_ms": 0.04, "floor_fwdbwd_ms": 0.12, "accuracy": {"plain": FOUND, "autocast": FOUND}}
PRODUCT = SMALL | {"product": "combine", "floor_ms": 0.1, "layer_ms": 0.104, "layer_to_floor": 1.04}
DISPATCH = MODELS_TEK | {"name": "Qwen3", "tiled_ms": 0.06, "torch_sort_ms": 0.96, "floor_ms": 0.02}
HOST = {"gpu_us": 5.43, "host_us": 30.2, "host_us_allocating": 38.15}
TOP_K = {"score": "sigmoid", "dtype": "float32", "fused_ms": 0.2, "torch_ms": 6.0, "floor_ms": 0.13}
GAINS = {"fwd_gain": 1.1, "bwd_gain": 1.05, "fwdbwd_gain": 1.066}
LAYERS = {
    name: {"gpu_fwd_ms": forward, "gpu_fwdbwd_ms": both}
    for name, forward, both in (("top_k", 1, 3), ("rounded", 0.9, 2.8), ("down", 0.8, 2.6), ("up", 1.1, 3.3))
}
SPEEDS = {"up_forward": 0.97, "down_backward_weight": 0.95, "up_backward_act": None}
GATHERED = [
    {"product": name, "gathered_to_plain_speed": speed, "cfg": MODULE["cfg"]} | OF for name, speed in SPEEDS.items()
]
SERIES = [{"T": 1048576, "E": E, "K": 8, "tiled_ms": ms} | OF for E, ms in ((512, 0.075), (8, 0.05))]
GROWTH = "A dispatch for 512 experts takes 1.50 times one for 8 (T = 1048576, K = 8)"
LOGITS = [{"accuracy": {"plain": {"logits": error}}, "cfg": MODULE["cfg"]} | OF for error in (2.4e-6, 2.5e-6)]
WHERE, ERRORS = (
    "on one a GPU at (T, d, n, E, K) = (8192, 256, 256, 128, 4)",
    "Our logits differ from float64's by 2.4e-06 to 2.5e-06 of their norm",
)
CURVES = {"losses": {"hopper": [1.0] * 500}, "largest_difference": 0.00717}
BATCH = {"seeds": [0, 499], "cases": 500, "batches": {"eager": 900, "graph": 100}, "differing": []} | OF
LAYER = json.loads(FIXTURE.read_text())["rows"][0]
BEHIND = LAYER | {"peers": LAYER["peers"] | {"sonic": LAYER["peers"]["sonic"] | {"gpu_fwdbwd_ms": 1.0}}}  # ours: 1.5
SKEWED = {"cfg": MODULE["cfg"]} | EARLIER
PROGRAMS = {"sonic": {"workspace_bytes": None, "gpu_fwdbwd_ms": 2.0, "peak_fwdbwd_MiB": 3.0}}


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("module", [MODULE], "| 0.50 | 0.60 | 0.40 | 1.50 | 1.80 | 1.20 | 1.20 | 1.20 | 0.05 | 0.15 | 80 | 100 | 3 |"),
        (
            "module",
            [ALONE | EARLIER, MODULE],
            "| 8192, 256, 256, 128, 4 † | 0.50 | – | 0.40 | 1.50 | – | 1.20 | – | – | 0.05 |",
        ),
        ("router", [ROUTER], "| fp32 | 0.100 | 0.040 | 0.300 | 0.120 | 1.2e-06 | – | 2.0e-03 | 1.0e-05 | 4 of 2000 |"),
        ("router", [ROUTER | {"torch_fp32_logits": 3e-7}], "| 1.2e-06 | 3.0e-07 | 2.0e-03 |"),
        ("products", [PRODUCT], "| combine | 8, 8, 8, 2, 1 | – | – | – | 0.104 | 0.100 | – | – | 1.04 |"),
        ("dispatch", [DISPATCH], "| Qwen3 | 1048576 | 128 | 8 | 0.060 | 0.960 | 0.020 | 3.00 |"),
        ("dispatch", [DISPATCH | {"paper_sort_ms": 5.1}], "the columns marked H100 are the paper's own times"),
        ("small_dispatch", {"small": [MODELS_TEK | HOST]}, "| 1048576 | 128 | 8 | 5.4 | 30.2 | 38.1 |"),
        (
            "topk",
            [MODELS_TEK | TOP_K],
            "| sigmoid | float32 | 1048576 | 128 | 8 | 0.200 | 6.000 | 0.130 | 1.54 | 30.0 |",
        ),
        (
            "rounding",
            [SMALL | LAYERS | GAINS],
            "| 8, 8, 8, 2, 1 | 1.00 | 0.90 | 0.80 | 1.10 | 3.00 | 2.80 | 2.60 | 3.30 | 1.100 | 1.050 | 1.066 |",
        ),
        ("workspace", {"workspace": [SKEWED | {"programs": PROGRAMS}]}, "the day before. **Of earlier"),
        ("skew", {"skew": [SKEWED]}, "the day before. **Of earlier"),
        ("skew", [MODULE], NOT_MEASURED),
        ("layer_claim", [LAYER, BEHIND], "faster by more than 2 % than SonicMoE's on 1 of 2 sizes"),
        (
            "gather_cost",
            GATHERED,
            "at least 0.970 of the speed of contiguous rows in the products by rows, and at least 0.950 in the weight "
            f"gradients, {WHERE}",
        ),
        ("experts_growth", {"series": {"E": SERIES}}, GROWTH),
        (
            "experts_growth",
            {"series": {"E": [SERIES[0], SERIES[1] | EARLIER]}},
            f"{GROWTH} (1 of the 2 runs used earlier kernels)",
        ),
        ("router_accuracy", LOGITS, f"{ERRORS}, {WHERE}."),
        (
            "router_accuracy",
            [LOGITS[0] | {"torch_fp32_logits": 1e-7} | EARLIER, LOGITS[1]],
            f"{ERRORS}, torch's in fp32 by 1.0e-07 to 1.0e-07, {WHERE} (1 of the 2 runs used earlier kernels).",
        ),
        ("curves", CURVES | OF, "the smoothed losses of 500 steps on one a GPU differ by at most 0.72 %"),
        ("curves", CURVES | EARLIER, "(of earlier kernels)"),
        ("batch", BATCH, "0 of 1000 batches differ in 500 cases, seeds 0 to 499; a GPU; torch 2.11.0; a day."),
        ("batch", BATCH | EARLIER, "**Of earlier kernels.**"),
    ],
)
def test_tables_and_sentences_are_made_of_rows(name: str, record: Any, expected: str) -> None:
    assert expected in made(name, {"rows": record} if isinstance(record, list) else record)


def test_a_row_of_earlier_kernels_is_marked_where_it_stands(results: Path) -> None:
    path = results / "layer.json"
    record = json.loads(path.read_text())
    filled = result_tables.fill(README, results)
    assert "earlier" not in filled and "†" not in filled
    record["rows"].append(record["rows"][0] | EARLIER)
    path.write_text(json.dumps(record))
    filled = result_tables.fill(README, results)
    assert "| 8192, 256, 256, 128, 4 † | 0.50 | 0.80 |" in filled and "| 8192, 256, 256, 128, 4 | 0.50" in filled
    assert filled.count(" †: of earlier kernels.") == 2  # under the table of memory too
    assert "(1 of the 2 runs used earlier kernels)<!--" in filled
    path.write_text(json.dumps(record | {"rows": record["rows"][1:]}))  # all of them: said once
    filled = result_tables.fill(README, results)
    assert "†" not in filled and filled.count("the day before. **Of earlier kernels.**") == 2
    assert "(of earlier kernels)<!--" in filled


def test_a_row_of_an_earlier_benchmark_has_a_mark_of_its_own() -> None:
    other = {"of": OF["of"] | {"protocol": "scripts.bench.module.measure", "version": 0}}
    table = made("module", {"rows": [MODULE, MODULE | other, MODULE | EARLIER]})
    assert [line.count("†") + 2 * line.count("‡") for line in table.splitlines()[2:5]] == [0, 2, 1]
    assert table.endswith("†: of earlier kernels. ‡: of an earlier form of the benchmark.")
    assert markdown.caveat([MODULE, MODULE | other]) == "1 of the 2 runs used an earlier form of the benchmark"
    later = {"of": OF["of"] | {"measured": "the next day"}}
    assert markdown.origin([OF, later], "torch") == "a GPU; torch 2.11.0; a day to the next day."
    assert markdown.origin([]) == ""


def test_an_unknown_table_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="results marker: expected one of"):
        result_tables.fill("<!-- results:nothing --><!-- /results:nothing -->", results)


def test_plots_are_drawn(results: Path) -> None:
    series = [{"T": T, "E": 128, "K": 8, "tiled_ms": T / 1e6, "floor_ms": T / 4e6} | OF for T in (8192, 65536)]
    layer = json.loads(FIXTURE.read_text())
    records = {"experts.png": layer, "memory.png": layer, "dispatch.png": {"rows": [], "series": {"T": series}}}
    for name, record in records.items():
        plot_results.PICTURES[name].save(record, results / name)
        assert (results / name).stat().st_size > 5000
    plot_results.PICTURES["dispatch.png"].save({"rows": []}, results / "none.png")
    assert not (results / "none.png").exists()


def test_the_experts_share_of_the_whole_layer_is_of_replayed_times() -> None:
    replayed = {"ours_fwdbwd_gpu_ms": 2.0, "sonic_fwdbwd_gpu_ms": 2.5, "gpu_fwdbwd_method": "graph"}
    assert "0.75 to 0.75 (ours, 1 shapes) and 0.80 to 0.80 (SonicMoE's, 1 shapes)" in made(
        "experts_share", json.loads(FIXTURE.read_text()), {"rows": [MODULE | replayed]}
    )


@pytest.mark.parametrize("name", result_tables.SENTENCES)
def test_a_sentence_without_its_results_says_so(name: str) -> None:
    files, make = result_tables.SENTENCES[name]
    assert make(*[{"rows": []} for _ in files.split()]) == NOT_MEASURED


def test_the_pages_are_what_the_committed_results_say_and_have_every_table() -> None:
    pages = plot_results.marked_pages(plot_results.REPOSITORY / "README.md", plot_results.DOCS)
    assert {"README.md", "results.md"} <= {page.name for page in pages}
    texts = [page.read_text() for page in pages]
    for text in texts:
        assert result_tables.fill(text, plot_results.RESULTS) == text, "run python -m scripts.bench.plot_results"
    stale = plot_results.stale_pictures(plot_results.RESULTS, plot_results.DOCS)
    assert not stale, "run python -m scripts.bench.plot_results"
    for name in result_tables.TABLES | result_tables.SENTENCES:
        assert f"<!-- results:{name} -->" in "".join(texts)


def test_a_picture_of_kernels_that_are_earlier_by_now_is_stale(tmp_path: Path) -> None:
    programs = {"blazeproto": {"fwd_ms": 0.5, "deviation_ms": 0.1}}
    record = {"rows": [{"cfg": {"E": experts}, "programs": programs} | OF for experts in (2, 4)]}
    path, name = tmp_path / "models" / "figure_10.json", "models_figure_10.png"
    path.parent.mkdir()
    path.write_text(json.dumps(record))
    plot_results.PICTURES[name].save(record, tmp_path / name)
    caption = "a GPU; torch 2.11.0; a day."
    assert plot_results.caption_in(tmp_path / name) == caption
    assert not plot_results.stale_pictures(tmp_path, tmp_path)
    record["rows"][0] |= EARLIER
    path.write_text(json.dumps(record))
    assert plot_results.stale_pictures(tmp_path, tmp_path) == [tmp_path / name]


def test_check_names_a_stale_page_and_writes_nothing(results: Path) -> None:
    (results / "docs").mkdir()
    command = [sys.executable, "-m", "scripts.bench.plot_results", "--check", "--results", str(results)]
    command += ["--readme", str(results / "README.md"), "--docs", str(results / "docs")]
    pages = {README: (1, ""), result_tables.fill(README, results): (0, "all pages are up to date\n")}
    for page, expected in pages.items():
        (results / "README.md").write_text(page)
        ran = subprocess.run(command, cwd=plot_results.REPOSITORY, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == expected and ("README.md" in ran.stderr) is bool(ran.returncode)
        assert (results / "README.md").read_text() == page
