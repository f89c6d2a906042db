"""scripts/lm/compare_runs.py: the short form on a CPU, runs that are stopped, and what the tables and sentences say of rows."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from scripts import train_lm
from scripts.bench import markdown, running
from scripts.bench import training_tables as tables
from scripts.bench.common import read_json
from scripts.bench.identity import earlier
from scripts.bench.markdown import NOT_MEASURED
from scripts.bench.plot_results import DOCS
from scripts.bench.result_tables import fill
from scripts.lm import compare_runs, run_folder, training_items
from scripts.lm.dense import Dense
from scripts.lm.model import GPT
from scripts.lm.ranks import Ranks
from scripts.lm.settings import PRESETS, Config
from scripts.lm.training_items import BASE, ITEMS, RUNS, SHORT, config_of
from tests.lm.conftest import AtStep, interrupt, keeping_handlers


@pytest.fixture(scope="module", autouse=True)
def short_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, keeping_handlers():
        patch.setattr(train_lm, "SAMPLE_BYTES", 2)
        patch.setattr(run_folder, "plot", lambda *_: None)  # which takes longer than such a run
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of every short run of the first seed; of two, of both seeds."""
    folder = tmp_path_factory.mktemp("made")
    words = ["--cpu", "--out", str(folder), "--folder", str(folder / "runs")]
    compare_runs.main(["all", "--seeds", "0", *words])
    compare_runs.main(["accuracy", "--runs", "ours,dense", *words])
    assert not [*(folder / "runs").iterdir()], "what has ended goes"
    return folder / "training.json"


def test_every_run_is_made_once_and_says_what_it_is_of(made: Path) -> None:
    record = read_json(made)
    keys = [(row["run"], row["length"], row["seed"]) for row in record["rows"]]
    wanted = {(run, item.length, 0) for item in ITEMS.values() for run in item.runs}
    assert len(keys) == len(set(keys)) and set(keys) == wanted | {("ours", "whole", 1), ("dense", "whole", 1)}
    for row in record["rows"]:
        assert len(row["losses"]) == row["settings"]["steps"] and all(map(math.isfinite, row["losses"]))
        assert row["validation"][-1][0] == row["settings"]["steps"] and row["ms_a_step"] > 0 and not earlier(row)
        assert {"gpu", "measured", "versions", "kernels"} <= row["of"].keys()
    assert {"gpu", "versions", "sources_sha256", "protocol"} <= record.keys()


def test_all_programs_begin_alike(made: Path) -> None:
    """One seed, one batch: the first losses are of the same weights, but for the dense model's."""
    for row in read_json(made)["rows"]:
        assert row["losses"][0] == pytest.approx(math.log(256), abs=1e-5)
    states = {}
    for name in ("ours", "block_sparse"):
        torch.manual_seed(3)
        states[name] = GPT(config_of("accuracy", name, 3, short=True)).state_dict()
    for name, value in states["ours"].items():
        other = states["block_sparse"][name]
        same = value.mT.flatten(0, 1) if name.endswith("moe.down_proj") else value.reshape(other.shape)
        assert torch.equal(same, other), name


def test_float64_is_nearest_to_fp32(made: Path) -> None:
    found = tables.groups(read_json(made), "float64")
    errors = {run: max(tables.from_float64(group[0], found["float64"][0])) for run, group in found.items()}
    assert errors["float64"] == 0 < errors["torch_fp32"] < errors["torch_bf16"]
    assert errors["block_sparse"] < 1e-4, "from the same weights"


def test_the_tables_of_the_page_are_made_of_the_file(made: Path, tmp_path: Path) -> None:
    filled = fill((DOCS / "results.md").read_text(), made.parent)
    assert (
        "compare_runs accuracy` does" not in filled
        and "| rounded up (UP) | " in filled
        and "| 16.22 | 15.92 |" in filled
    )
    record = read_json(made)
    for _, claim in tables.TRAINING_CLAIMS.values():
        assert claim(record) != NOT_MEASURED == claim({"rows": []})
    figure = Figure()
    tables.plot_runs(figure, record)
    figure.savefig(tmp_path / "training.png")
    assert len(figure.axes[0].lines) == len(figure.axes[1].lines) == len(ITEMS["accuracy"].runs)


def made_up(run: str, seed: int, losses: list[float], ms: float | None, **fields: Any) -> dict[str, Any]:
    """A row as a run leaves it; its validation loss is the last one."""
    of = {"kernels": [], "gpu": "a GPU", "measured": "then", "versions": ""}
    row = {
        "run": run,
        "cfg": {"T": 64, "d": 8, "n": 8, "E": 4, "K": 2},
        "length": "whole",
        "seed": seed,
        "losses": losses,
        "ms_a_step": ms,
        "validation": [[1, losses[-1]]],
    }
    return row | {"saved_MiB": 7.0, "balance": 1.0, "of": of} | fields


def test_seeds_stand_apart_in_the_tables() -> None:
    """Seeds are sorted; a difference is of equal seeds; a time is a seed's own, and none of one that was not timed."""
    flat = [2.0] * 500
    rows = [
        made_up("ours", 1, [4.0] * 10 + flat, 10.0, saved_MiB=9.0),
        made_up("ours", 0, [4.0] * 20 + [1.5] * 490, None),
        made_up("torch_fp32", 0, [1.0] * 510, 30.0),
        made_up("torch_fp32", 1, [2.5] * 510, 30.0),
        made_up("dense", 1, [2.1] * 510, 20.0),
    ]
    found = tables.groups({"rows": rows}, "accuracy")
    columns = markdown.columns(tables.TABLES["accuracy"].entries)  # type: ignore[arg-type]
    cells = {run: [cell(tables.line_of(run, found)) for _, cell in columns] for run in found}
    ours, dense = cells["ours"], cells["dense"]
    # Means of 1.5 - 1.0 and 2.0 - 2.5; the largest difference is of the first seed's first losses: 4 over 1.
    assert ours[1:4] == ["1.5000, 2.0000", "1.5000, 2.0000", "0.0000"] and float(ours[4]) == pytest.approx(300, abs=1)
    assert ours[5:7] == ["10.0", "7, 9"] and dense[3:6] == ["-0.4000", "16.00", "20.0"] and dense[6] == "7"
    missing, seconds = ours[7].split(", ")
    assert missing == "–" and 0.1 < float(seconds) < 5.1 and cells["torch_fp32"][7] == "–, –"
    claim = tables.training_claim({"rows": rows})
    assert "50.00 % (ours, bf16)" in claim and "two seeds of one program by up to 150.00 %" in claim


def test_a_run_has_one_colour_in_both_pictures() -> None:
    rows = [made_up("ours", 0, [2.0] * 60, None), made_up("torch_bf16", 0, [3.0] * 60, 10.0)]
    figure = Figure()
    tables.plot_runs(figure, {"rows": rows})
    steps, seconds = figure.axes
    colours = {line.get_label(): line.get_color() for line in steps.lines}
    assert [line.get_color() for line in seconds.lines] == [colours[RUNS["torch_bf16"].label]]
    untimed = Figure()
    tables.plot_runs(untimed, {"rows": [row | {"ms_a_step": None} for row in rows]})
    assert len(untimed.axes) == 1 and len(untimed.axes[0].lines) == 2


def test_gradients_of_every_expert_are_near_float64s(made: Path) -> None:
    record, found = read_json(made), dict[str, list[float]]()
    for row in record["gradients"]:
        found.setdefault(row["precision"], []).append(row["least"])
        assert row["experts"] == SHORT.num_experts and row["least"] <= row["mean"]
    assert 0.99 < min(found["fp8"]) < 0.9995 < min(found["bf16"])
    assert tables.GRADIENTS({}) == NOT_MEASURED != tables.GRADIENTS(record)


def test_how_far_two_precisions_are_apart() -> None:
    rows = [
        made_up(run, seed, [9.0] * 900 + [loss] * 100, None, length="1000 steps")
        for run, seed, loss in (("ours", 0, 2.0), ("ours", 1, 2.5), ("fp8", 0, 2.25), ("fp8", 1, 2.5))
    ]
    said = tables.fp8_training_claim({"rows": rows})
    assert (
        "0.1250 nats a byte above bf16's, whose two seeds are 0.5000 apart, on one a GPU at (T, d, n, E, K) = (64, 8,"
        in said
    )


def test_a_run_that_is_there_is_not_made_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_json(made)["rows"]
    compare_runs.main(["all", "--seeds", "0", "--cpu", "--out", str(made.parent), "--folder", str(made.parent)])
    assert "nothing to add" in capsys.readouterr().out and read_json(made)["rows"] == before


@pytest.mark.parametrize("by", ["ctrl-c", "budget"])
def test_a_run_that_is_stopped_goes_on(by: str, tmp_path: Path, at_step: AtStep, made: Path) -> None:
    words = ["capacity", "--runs", "ours,dropping_1.0", "--seeds", "0", "--cpu", "--out", str(tmp_path)]
    words += ["--folder", str(tmp_path / "runs")]
    if by == "ctrl-c":
        at_step(3, interrupt)
        with pytest.raises(SystemExit, match="130"):
            compare_runs.main(words)
    else:
        at_step(3, lambda: compare_runs.time.sleep(1.5))
        compare_runs.main([*words, "--time-budget", "1"])
    (stopped,) = (tmp_path / "runs").iterdir()
    assert stopped.name == "ours-6-seed0" and (stopped / "checkpoint.pt").exists()
    compare_runs.main(words)
    rows = {row["run"]: row["losses"] for row in read_json(tmp_path / "training.json")["rows"]}
    whole = {
        row["run"]: row["losses"] for row in read_json(made)["rows"] if (row["length"], row["seed"]) == ("whole", 0)
    }
    assert rows == {run: whole[run] for run in ("ours", "dropping_1.0")}, "to the bit"


def test_a_run_that_fails_is_said_and_the_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = train_lm.main
    monkeypatch.setattr(train_lm, "main", lambda words: 1 if "--formulation=dense" in words else main(words))
    words = ["--runs", "dense,torch_fp32", "--seeds", "0", "--cpu", "--out", str(tmp_path), "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match="1"):
        compare_runs.main(["accuracy", *words])
    record = read_json(tmp_path / "training.json")
    assert [row["run"] for row in record["rows"]] == ["torch_fp32"] and [*record["failed"]] == [
        "accuracy: dense-6-seed0"
    ]


def test_a_row_of_other_settings_is_not_taken() -> None:
    key = compare_runs.Training("accuracy", "ours", 0).key
    row: dict[str, Any] = json.loads(json.dumps(key | {"of": {"kernels": []}}))
    others = [row | {"settings": row["settings"] | {"lr": 1.0}}, row | {"of": {}}]  # of earlier kernels
    item = compare_runs.BENCH.items["accuracy"]
    assert [bool(running.todays({"rows": [each]}, item, key)) for each in (row, *others)] == [True, False, False]


def test_gradients_are_asked_for_by_name_or_option() -> None:
    for words in (["gradients"], ["fp8", "--runs", "ours", "--gradients"], ["all", "--gradients"]):
        options = running.options_of(compare_runs.BENCH, [*words, "--cpu"])
        compare_runs.prepare(options, Ranks(torch.device("cpu")))
        assert [job.name for job in options.jobs].count("gradients") == 1


def test_runs_are_the_presets_but_for_what_they_say() -> None:
    ours = config_of("accuracy", "ours", 1, short=False)
    assert (ours.steps, ours.batch, ours.lr, ours.seed) == (500, 64, PRESETS["hopper"].lr, 1)
    rows_of_an_expert = BASE.batch * BASE.context * BASE.top_k / BASE.num_experts
    rounded = config_of("routers", "rounded", 0, short=False)
    assert rows_of_an_expert / rounded.rounding_tile == 4, "SonicMoE's Tables 1 and 6"
    model = GPT(Config(layers=1, d_model=32, heads=2, d_expert=16, router="token_rounding", rounding_tile=16))
    assert model.blocks[0].moe.router.choice.tile == 16
    first = config_of("float64", "float64", 0, short=False)
    assert (first.steps, first.batch, first.float64, first.bf16, first.lr) == (20, 8, True, False, ours.lr)
    parser = train_lm.options()
    for item, run in ((name, run) for name, each in ITEMS.items() for run in each.runs):
        config = config_of(item, run, 1, short=False)
        given = train_lm.given_settings(parser.parse_args(compare_runs.options_of(config)))
        assert dataclasses.replace(PRESETS["hopper"], **given) == config and run in RUNS


def test_time_to_the_same_loss() -> None:
    slow = {"losses": [5.0 - 0.01 * step for step in range(300)], "ms_a_step": 10.0}
    fast = {"losses": [5.0 - 0.02 * step for step in range(300)], "ms_a_step": 30.0}
    assert tables.seconds_to_loss(slow, slow) == pytest.approx(3.0)
    seconds = tables.seconds_to_loss(fast, slow)
    assert seconds is not None and 0.4 * 9 < seconds < 0.6 * 9 and tables.seconds_to_loss(slow, fast) is None


def test_dense_multiplies_as_much_as_a_token_s_experts() -> None:
    config = Config(layers=1, d_model=32, heads=2, d_expert=24, num_experts=4, top_k=3, formulation="dense")
    dense = GPT(config).blocks[0].moe
    assert isinstance(dense, Dense) and sum(p.numel() for p in dense.parameters()) == 3 * 3 * 24 * 32
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    out, stats = dense.double()(x)
    gate, up = (x @ dense.up.weight.T).chunk(2, dim=-1)
    assert torch.allclose(out, (gate * gate.sigmoid() * up) @ dense.down_proj.T)
    assert stats.load.tolist() == [10] and stats.aux_loss == 0.0


@pytest.mark.gpu
def test_runs_on_a_gpu_name_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model with the kernels, in all programs; the settings are those of the long runs but for their sizes."""
    monkeypatch.setattr(training_items, "BASE", training_items.SHORT)
    words = ["float64", "accuracy", "--seeds", "0", "--out", str(tmp_path), "--folder", str(tmp_path)]
    with keeping_handlers():
        compare_runs.main(words)
    record = read_json(tmp_path / "training.json")
    assert "failed" not in record
    found = {(row["run"], row["length"]): row for row in record["rows"]}
    assert found["ours", "whole"]["of"]["kernels"] and found["block_sparse", "whole"]["of"]["kernels"]
    exact = found["float64", "first steps"]
    for run in ("ours", "torch_bf16", "block_sparse"):
        assert max(tables.from_float64(found[run, "first steps"], exact)) < 0.01
    assert not any(map(earlier, record["rows"]))
