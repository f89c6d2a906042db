"""`python -m scripts.bench.products --tune`, with a clock and a product that need no GPU."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from blazeproto import gemm
from blazeproto.gemm import tiles
from scripts.bench import products, running, tuning
from scripts.bench.common import RESULTS, cfg_of, read_json
from scripts.bench.timing import GpuTimes, Machine
from scripts.lm.ranks import Ranks

TUNED = [name for name in products.DEFAULT_PRODUCTS if gemm.PRODUCTS[name].tiles]


@pytest.mark.parametrize("name", TUNED)
def test_each_candidate_has_a_description_of_its_own(name: str) -> None:
    configs = gemm.candidates(name)
    assert len({tuning.describe(config) for config in configs}) == len(configs) > 0


def test_a_description_tells_all_fields_apart() -> None:
    config = gemm.TileConfig(tile_n=256, stages=4, deferred=True, cluster=2, tickets=True, few_rows=True)
    assert tuning.describe(config) == "n256 s4 c2 deferred tickets few_rows"


def test_tune_times_every_candidate_and_notes_the_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "down_backward_weight"
    configs = gemm.candidates(name)
    launched: list[gemm.TileConfig | None] = []

    def versions(tuned: str, arrays: Any, config: gemm.TileConfig | None) -> dict[str, products.Call]:
        assert tuned == name
        if config == configs[1]:
            raise RuntimeError("too much shared memory")
        return {"layer": lambda: launched.append(config)}

    def times(machine: Machine, calls: Mapping[str, products.Call], together: Sequence[str]) -> GpuTimes:
        return GpuTimes({label: 9.0 - place for place, label in enumerate(calls)}, {}, {})

    monkeypatch.setattr(products, "versions", versions)
    monkeypatch.setattr(products, "arrays_of", lambda shape, device: None)
    monkeypatch.setattr(Machine, "times", times)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(running, "need_kernels", lambda: None)
    monkeypatch.setattr(running, "joined", lambda device, timeout: nullcontext(Ranks(torch.device("cpu"))))
    running.run(products.BENCH, ["--tune", "--products", f"{name},combine", "--configs", "1", "--out", str(tmp_path)])

    assert launched == [config for config in configs if config != configs[1]]
    (row,) = json.loads((tmp_path / "tune.json").read_text())["rows"]
    assert row["product"] == name and row["cfg"] == cfg_of(products.TUNED_SHAPES[0])
    assert list(row["ms"]) == [tuning.describe(config) for config in reversed(launched) if config is not None]
    assert row["failed"] == {tuning.describe(configs[1]): "RuntimeError: too much shared memory"}


def test_the_table_is_what_the_results_say() -> None:
    assert tuning.TABLE.read_text() == tuning.table(read_json(RESULTS / "tune.json"))


def test_the_earliest_candidate_that_none_beats_by_a_hundredth() -> None:
    plain, second, third, *_ = map(tuning.describe, gemm.candidates("up_forward"))
    for times, expected in (((1.0, 0.991, 0.995), plain), ((1.0, 0.989, 0.985), second), ((1.0, 0.99, 0.97), third)):
        ms = dict(reversed([*zip((plain, second, third), times, strict=True)]))
        assert tuning.describe(tuning.best("up_forward", ms)) == expected


def test_the_table_is_written_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--check writes nothing, and its exit status tells whether the table is the results'."""
    table, results = tmp_path / "tuned.py", str(RESULTS / "tune.json")
    table.write_text("another table")
    monkeypatch.setattr(tuning, "TABLE", table)

    def status(*words: str) -> object:
        monkeypatch.setattr("sys.argv", ["tuning", "--results", results, *words])
        with pytest.raises(SystemExit) as exit:
            tuning.main()
        return exit.value.code

    assert "is not what" in str(status("--check")) and table.read_text() == "another table"
    monkeypatch.setattr("sys.argv", ["tuning", "--results", results])
    tuning.main()
    assert table.read_text() == (Path(tiles.__file__).parent / "tuned.py").read_text() and status("--check") == 0
