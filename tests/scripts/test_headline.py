"""The headline's rule: medians of at least two runs, ratios within 2 % of 1 even, rows of one GPU and one set of kernels."""

import json
import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from scripts.bench import headline, headline_tables, identity, plot_results, running
from scripts.bench.headline_tables import together
from scripts.bench.markdown import NOT_MEASURED
from scripts.bench.timing import Machine

Row = dict[str, Any]
CLAIM, README, TABLE = headline_tables.CLAIM, headline_tables.TABLES["readme"], headline_tables.TABLES["headline"]
MODEL, OTHER, THIRD, FOURTH = "Qwen3-30B-A3B", "DeepSeek-V3", "Mixtral 8x7B", "gpt-oss-120b"


@pytest.fixture(autouse=True)
def of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of hand-made rows are no one's."""
    monkeypatch.setattr("scripts.bench.markdown.earlier", lambda row: "")


def run(label: str, ours: float, measured: str = "2026-11-27 20:00 UTC", of: Row | None = None, **peers: float) -> Row:
    """A run: milliseconds of ours and of peers, forward and backward."""
    times = {"blazeproto": ours} | peers
    programs = {
        name: {"fwdbwd_ms": ms, "fwd_ms": ms / 3, "peak_MiB": 100 * ms, "fwdbwd_rounds_ms": [ms]}
        for name, ms in times.items()
    }
    about: Row = {
        "gpu": "NVIDIA H200, 580",
        "kernels": {"up": "a"},
        "protocol": "b",
        "version": 1,
        "versions": "torch 2.11.0",
    }
    cfg = {"T": 16384, "d": 2048, "n": 768, "E": 128, "K": 8}
    about |= {"measured": measured} | (of or {})
    return {"cfg": cfg, "activation": "swiglu", "label": label, "programs": programs, "of": about}


def record(**ratios: tuple[str, float, int]) -> Row:
    """A row each: its model, SonicMoE's time over ours, and the number of runs."""
    rows = [together([run(label, 10.0, sonic=10.0 * ratio)] * runs) for label, ratio, runs in ratios.values()]
    return {"rows": rows}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (0.5, "behind"),
        (0.97, "behind"),
        (0.985, "even"),
        (1.0, "even"),
        (1.015, "even"),
        (1.03, "ahead"),
        (2.0, "ahead"),
    ],
)
def test_within_two_percent_is_even(ratio: float, verdict: str) -> None:
    assert headline_tables.verdict(ratio) == verdict
    (said,) = re.findall(r"It is (.*?):", CLAIM(record(one=(MODEL, ratio, 3), two=(OTHER, 3.0, 3))))
    parts = {
        "ahead": "faster than SonicMoE's module on 2 of 2 models",
        "even": f"faster than SonicMoE's module on 1 of 2 models, even, within 2 %, on {MODEL}",
        "behind": f"faster than SonicMoE's module on 1 of 2 models, slower on {MODEL}",
    }
    assert said == parts[verdict]


def test_one_model_is_named_with_the_range_of_its_runs() -> None:
    runs = [run(MODEL, 10.0, sonic=theirs) for theirs in (9.6, 9.0, 9.5)]
    claim = CLAIM({"rows": [together(runs), *record(two=(OTHER, 3.0, 1))["rows"]]})
    assert (
        f"It is slower than SonicMoE's module on {MODEL}: 0.95 times as fast (0.90 to 0.96), the median and range of 3 runs."
        in claim
    )
    assert "geometric" not in claim and OTHER not in claim
    even = CLAIM({"rows": [together([run(MODEL, 10.0, sonic=10.0)] * 3)]})
    assert f"It is even, within 2 %, with SonicMoE's module on {MODEL}: 1.00 times" in even


def test_the_claim_counts_each_model_once() -> None:
    made = record(a=(MODEL, 1.21, 3), b=(OTHER, 0.97, 4), c=(THIRD, 1.0, 3), d=(FOURTH, 1.5, 1))
    claim = CLAIM(made)
    assert f"on 1 of 3 models, even, within 2 %, on {THIRD}, slower on {OTHER}" in claim
    mean = (1.21 * 0.97 * 1.0) ** (1 / 3)
    assert f": {mean:.2f} times as fast in the geometric mean (medians of models: 0.97 to 1.21)" in claim
    assert "SonicMoE's module" in claim and "on one NVIDIA H200." in claim and FOURTH not in claim


def test_a_single_run_counts_for_nothing() -> None:
    made = record(a=(MODEL, 1.21, 1))
    assert CLAIM(made).startswith("No model has 2 runs yet") and CLAIM({"rows": []}) == NOT_MEASURED
    assert headline_tables.times_ours(made["rows"][0], "sonic") is None
    assert TABLE(made).splitlines()[2].split(" | ")[1:] == ["10.00", *["–"] * 5, "1 |"]
    beside = TABLE(record(a=(MODEL, 1.21, 1), b=(OTHER, 1.1, 3)))
    assert f"medians of 3 runs. Fewer runs than the rule's 2, so no ratio: {MODEL} (1). " in beside
    with_one_more = together([run(MODEL, 10.0, sonic=12.0), run(MODEL, 10.0)])
    assert headline_tables.times_ours(with_one_more, "sonic") is None, "a run without the peer is none of it"


def test_a_row_is_the_median_of_its_runs() -> None:
    """Each program's times and the ratios of the runs have medians of their own; neither is the best."""
    runs = [
        run(MODEL, ours, sonic=theirs)
        for ours, theirs in ((10.0, 13.0), (8.0, 8.0), (11.0, 12.1), (20.0, 19.0), (9.0, 10.8))
    ]
    row = together(runs)
    assert row["programs"]["blazeproto"]["fwdbwd_ms"] == 10.0 and row["programs"]["sonic"]["fwdbwd_ms"] == 12.1
    assert row["programs"]["blazeproto"]["peak_MiB"] == 1000.0 and "fwdbwd_rounds_ms" not in row["programs"]["sonic"]
    assert row["runs"] == runs and row["of"] == runs[-1]["of"]
    assert headline_tables.times_ours(row, "sonic") == pytest.approx(1.1)
    table = TABLE({"rows": [row]})
    assert "1.10 (0.95 to 1.30)" in table and "| 0.83 | 5 |" in table and "medians of 5 runs" in table


def test_readme_s_ratios_are_those_of_the_results_page() -> None:
    """The median of the runs' ratios, not a ratio of medians; ranges where they are wider than 2 %."""
    wide = together([run(MODEL, ours, sonic=theirs) for ours, theirs in ((10.0, 13.0), (8.0, 8.0), (11.0, 12.1))])
    narrow = together([run(OTHER, 10.0, sonic=theirs) for theirs in (11.0, 11.1, 11.2)])
    short, long = (make({"rows": [wide, narrow]}) for make in (README, TABLE))
    assert "| 1.10 (1.00 to 1.30) |" in short and "| 1.10 (1.00 to 1.30) |" in long
    assert "| 1.11 |" in short and "| 1.11 (1.10 to 1.12) |" in long
    assert "In brackets: ranges of runs wider than 2 %." in short


def test_captions_span_all_runs() -> None:
    """Not the last one alone, in tables and below the picture."""
    times = [f"2026-11-27 {hour}:04 UTC" for hour in (22, 23)]
    made = {"rows": [together([run(MODEL, 10.0, measured, sonic=11.0) for measured in (*times, times[1])])]}
    when = "2026-11-27 22:04 to 2026-11-27 23:04 UTC"
    assert all(when in said for said in (README(made), TABLE(made)))
    assert when in plot_results.PICTURES["speed.png"].caption(made)


def test_a_caption_says_whose_programs_do_not_take_turns() -> None:
    apart = together([run(MODEL, 10.0, sonic=11.0) | {"versions": {}}] * 3)
    made = TABLE({"rows": [apart, *record(b=(OTHER, 1.1, 3))["rows"]]})
    assert f" {MODEL}: each program has a process of its own in a run, so that programs do not take turns." in made


def test_how_far_single_runs_are_from_the_headline() -> None:
    headline_record = record(a=(MODEL, 1.0, 3), b=(FOURTH, 1.5, 1))
    single = run(OTHER, 10.0, of={"kernels": []}, sonic=10.9)  # of the same sizes
    of_earlier_kernels = run(MODEL, 10.0, sonic=12.0)
    ratio = headline_tables.SENTENCES["models_single_runs"]
    assert ratio({"rows": [single, of_earlier_kernels]}, headline_record) == (
        "Single runs of 2026-11-27 on one NVIDIA H200, not the headline's: SonicMoE's time over ours, forward + backward, is "
        f"up to 0.09 away from the headline's on the 1 models that both have ({MODEL}, T = 16384: "
        "1.09 in the single run, 1.00 in the headline)."
    )
    assert ratio({"rows": []}, headline_record) == NOT_MEASURED


def test_a_plot_s_legend_is_whole_and_its_colours_differ() -> None:
    peers, figure = dict.fromkeys(headline_tables.PEERS, 12.0), Figure(layout="constrained")
    plot_results.plot_models(figure, {"rows": [together([run(MODEL, 10.0, **peers)] * 3)]})
    figure.draw_without_rendering()
    (legend,) = figure.legends
    inside = legend.get_window_extent()
    assert inside.x0 >= 0 and inside.x1 <= figure.bbox.width and len(legend.get_texts()) == 4
    assert len({*plot_results.COLORS.values()}) == len(plot_results.COLORS)
    assert not plot_results.with_runs(record(a=(MODEL, 1.1, 1)))


def test_a_run_is_a_process_that_measures_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(command: list[str], env: dict[str, str], **_: Any) -> None:
        options = running.options_of(headline.BENCH, command[3:])
        assert [job.case for job in options.jobs] == [headline.Run(0, MODEL)] and options.rounds == 7
        tuned_anew.append(headline.TUNE_ANEW.items() <= env.items())
        made = together([run(MODEL, 10.0, sonic=11.0)])
        (options.out / "headline.json").write_text(json.dumps({"rows": [made], "kernels": {"up": {}}}))

    tuned_anew: list[bool] = []
    monkeypatch.setattr(headline.subprocess, "run", measured)
    rows = [headline.run_of(headline.Run(number, MODEL), Machine("cuda", 7)) for number in (0, 1)]
    assert [row["tuned_anew"] for row in rows] == tuned_anew == [True, False]
    assert all(row["launched"] == {"up": {}} and row["programs"].keys() == {"blazeproto", "sonic"} for row in rows)


@pytest.mark.parametrize("key", ["gpu", "kernels", "protocol"])
def test_runs_of_others_do_not_go_together(key: str) -> None:
    runs = [run(MODEL, 10.0, sonic=11.0), run(MODEL, 10.0, sonic=11.0, of={key: "another"})]
    with pytest.raises(ValueError, match=f"runs: expected one GPU, .* of {MODEL}, got others"):
        together(runs)


def test_runs_of_kernels_with_the_same_machine_code_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = {"kernels": {"earlier": "todays"}, "descriptions": {}, "benchmarks": {}}
    monkeypatch.setattr(identity, "equal", lambda: equal)
    runs = [run(MODEL, 10.0, of={"kernels": [name]}) for name in ("earlier", "todays", "another")]
    assert together(runs[:2])["programs"]["blazeproto"]["fwdbwd_ms"] == 10.0
    with pytest.raises(ValueError, match="one set of kernels"):
        together(runs[1:])
