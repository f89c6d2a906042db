"""`scripts.bench.distributed` in its short form on one CPU rank; several ranks run it in tests/lm/test_ranks.py."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.bench import distributed, plot_results, running
from scripts.bench.identity import earlier
from scripts.bench.result_tables import fill

Bench = Callable[..., None]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Options -> the short form of a tiny model."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {j} is {i * j}.\n" for i in range(30) for j in range(30)))
    small = dataclasses.replace(
        distributed.SMALL, layers=1, d_model=16, context=16, d_expert=8, steps=3, data=str(text)
    )
    monkeypatch.setattr(distributed, "SMALL", small)
    return lambda *options: running.run(distributed.BENCH, ["--cpu", "--out", str(tmp_path), *options])


def test_each_mode_has_a_row_of_each_kind(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "distributed.json"
    bench("--parts", "weak_scaling", "--modes", "fsdp")
    bench("--parts", "losses", "--modes", "ep")
    record = json.loads(out.read_text())
    [scaling], [loss] = record["weak_scaling"], record["losses"]
    assert (scaling["mode"], loss["mode"], loss["gpus"], loss["steps"]) == ("fsdp", "ep", 1, 3)
    assert scaling["efficiency"] == pytest.approx(
        scaling["tokens_per_s_per_gpu"] / scaling["tokens_per_s_alone"], rel=0.01
    )
    assert loss["largest_difference"] < 1e-4 and not earlier(loss)
    record["weak_scaling"].append(scaling | {"gpus": 2, "efficiency": 0.95})
    out.write_text(json.dumps(record))
    marked = "\n\n".join(f"<!-- results:{name} --><!-- /results:{name} -->" for name in ("weak_scaling", "rank_losses"))
    filled = fill(marked, tmp_path)
    assert "| fsdp | 2 |" in filled and "| 0.950 |" in filled and "| ep | 1 | 3 | 0.0" in filled
    picture = plot_results.PICTURES["weak_scaling.png"]
    picture.save(record, tmp_path / "picture.png")
    assert plot_results.caption_in(tmp_path / "picture.png") == picture.caption(record)
    picture.save({"ep": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_what_does_not_fit_is_refused_before_anything_runs(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench("--modes", "hsdp")
    assert "error: group_size: expected a divisor of the 1 ranks, got 2; nothing was run" in capfd.readouterr().err
    assert not (tmp_path / "distributed.json").exists()
