"""The frame of the benchmarks: which cases run, what becomes of rows, and every short form on a CPU."""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts.bench import common, identity, running
from scripts.bench.identity import earlier
from scripts.bench.running import Bench, Item
from scripts.bench.timing import Machine
from scripts.checks import gpu_check
from tests.scripts.conftest import NAMES, bench_of

pytestmark = pytest.mark.costly_fixture

Row = dict[str, Any]
MEASURED: list[str] = []
STOP_AT = [""]


def letters(case: str, machine: Machine) -> Row:
    MEASURED.append(case)
    if case == STOP_AT[0]:
        raise KeyboardInterrupt
    if case == "b":
        raise torch.OutOfMemoryError("no memory")
    return {"ms": float(machine.rounds)}


def twice(case: str, machine: Machine) -> list[Row]:
    return [{"place": place, "peers": machine.peers} for place in (0, 1)]


def of_letter(case: str) -> Row:
    return {"letter": case}


TOY = Bench(
    "toy",
    "A toy.\n\nIt measures letters.",
    {
        "letters": Item(letters, "ACDE", "abcd", "A", of_letter),
        "pairs": Item(twice, "AB", "ab", (), of_letter, part="nested/pairs", seconds=10, peers=("sonic",)),
        "one": Item(letters, "A", "a", (), lambda case: {}, file="other", part="one", single=True),
    },
    head={"tile": 128},
    bounds=lambda record: [("a bound", True), ("another", False)],
)


def run(tmp_path: Path, *words: str, stop_at: str = "", bench: Bench = TOY) -> tuple[str, Row]:
    """The letters that were measured, and the file."""
    MEASURED.clear()
    STOP_AT[0] = stop_at
    try:
        running.run(bench, [*words, "--cpu", "--out", str(tmp_path)])
    except SystemExit as end:
        MEASURED.append(str(end.code))
    file = tmp_path / "toy.json"
    return "".join(MEASURED), json.loads(file.read_text()) if file.exists() else {}


def test_a_run_that_is_stopped_goes_on(tmp_path: Path) -> None:
    ran, record = run(tmp_path, "--parts", "letters", stop_at="c")
    assert ran == "abc130" and [row["letter"] for row in record["rows"]] == ["a"]
    ran, record = run(tmp_path, "--parts", "letters", "--resume")
    assert ran == "bcd1", "a's row is there; b's is tried again, and fails"
    assert [row["letter"] for row in record["rows"]] == ["a", "c", "d"]
    assert record["failed"] == {"letters: b": "OutOfMemoryError: no memory"}
    assert run(tmp_path, "--parts", "letters", "--resume")[0] == "b1"
    assert run(tmp_path, "--parts", "letters")[0] == "abcd1", "all again"
    record["rows"][0]["of"]["version"] = 0
    (tmp_path / "toy.json").write_text(json.dumps(record))
    assert run(tmp_path, "--parts", "letters", "--resume")[0] == "ab1", "a's row is of another benchmark"


def test_rows_stay_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of other cases, other parts and other files, whatever else a file has."""
    (tmp_path / "toy.json").write_text(json.dumps({"rows": [{"letter": "z"}], "more": 1}))
    _, record = run(tmp_path, "--configs", "3-4,6-7", "--rounds", "3")
    assert [row["letter"] for row in record["rows"]] == ["c", "d", "z"] and record["rows"][0]["ms"] == 3.0
    assert [(row["letter"], row["place"]) for row in record["nested"]["pairs"]] == [("b", 0), ("b", 1)]
    assert record["more"] == 1 and record["tile"] == 128 and record["protocol"] == "It measures letters."
    assert {"measured", "gpu", "versions", "kernels", "protocol"} <= record["rows"][0]["of"].keys()
    other = json.loads((tmp_path / "other.json").read_text())
    assert other["one"]["ms"] == 3.0 and other["one"]["of"]
    printed = capsys.readouterr().out
    assert "\nholds  a bound" in printed and "\nFAILS  another" in printed
    _, record = run(tmp_path, "--configs", "1,5")
    assert [row["letter"] for row in record["rows"]] == ["a", "c", "d", "z"], "in the order of the cases"
    assert [row["letter"] for row in record["nested"]["pairs"]] == ["a", "a", "b", "b"]


def test_a_row_stays_where_a_program_that_it_has_is_absent_now(tmp_path: Path) -> None:
    """Not where the row was measured without it: by --peers, or because it was absent then too."""
    absent = {"sonic": "ModuleNotFoundError: none"}
    have = {}, {"peers": ["sonic"]}, {"peers": [], "programs": {"sonic": {}}}
    for before, stays in *((each, True) for each in have), ({"peers": []}, False), ({"absent": absent}, False):
        (tmp_path / "toy.json").write_text(json.dumps({"rows": [{"letter": "A", "ms": 0} | before]}))
        bench = replace(TOY, items={"letters": Item(lambda case, machine: {"absent": absent}, "A", "A", (), of_letter)})
        ran, record = run(tmp_path, bench=bench)
        assert ("ms" in record["rows"][0], ran == "1", "sonic" in str(record.get("failed"))) == (stays, stays, stays)


def test_an_item_leaves_time_for_those_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(tmp_path, "--time-budget", "9")
    assert not record["rows"] and len(record["nested"]["pairs"]) == 4
    assert "skipped for time: letters: a, letters: b" in capsys.readouterr().out


class Numbered(NamedTuple):
    number: int
    letter: str


def test_runs_of_a_case_are_put_together(tmp_path: Path) -> None:
    """A run that is there is not measured again; one of another benchmark goes, with those beside it."""
    cases = [Numbered(number, letter) for number in range(2) for letter in "xy"]
    item = Item(
        numbered,
        (),
        cases,
        key=lambda case: {"letter": case.letter},
        together=lambda runs: {"letter": runs[0]["letter"], "of": runs[-1]["of"], "runs": runs},
    )
    bench = replace(TOY, items={"letters": item})
    _, record = run(tmp_path, "--configs", "1-3", bench=bench)
    assert [(row["letter"], len(row["runs"])) for row in record["rows"]] == [("x", 2), ("y", 1)]
    _, record = run(tmp_path, "--resume", bench=bench)
    assert [[each["number"] for each in row["runs"]] for row in record["rows"]] == [[0, 1], [0, 1]]
    record["rows"][0]["of"]["version"] = 0
    (tmp_path / "toy.json").write_text(json.dumps(record))
    _, record = run(tmp_path, "--configs", "1", "--resume", bench=bench)
    assert [len(row["runs"]) for row in record["rows"]] == [1, 2]


def numbered(case: Numbered, machine: Machine) -> Row:
    return {"number": case.number}


def test_rows_have_the_peers_that_were_wanted(tmp_path: Path) -> None:
    bench = replace(TOY, peers=("sonic", "scattermoe"), goes_on=True)
    _, record = run(tmp_path, "pairs", "--peers", "scattermoe", bench=bench)
    assert [row["peers"] for row in record["nested"]["pairs"]] == [[]] * 4
    before = (tmp_path / "toy.json").stat().st_mtime_ns
    run(tmp_path, "pairs", "--peers", "scattermoe", bench=bench)
    assert (tmp_path / "toy.json").stat().st_mtime_ns == before, "nothing to add"
    _, record = run(tmp_path, "pairs", bench=bench)
    assert [row["peers"] for row in record["nested"]["pairs"]] == [["sonic"]] * 4


def test_quick_is_short_and_a_gpu_has_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "need_kernels", lambda: None)
    monkeypatch.setattr(running, "joined", lambda device, timeout: real("cpu", timeout))
    monkeypatch.setattr(running, "RESULTS", tmp_path / "h200")
    monkeypatch.setattr(running, "gpu_name", lambda: "NVIDIA H100 80GB HBM3, driver 580")
    running.run(TOY, ["--quick"])
    (row,) = json.loads((tmp_path / "h100" / "toy-quick.json").read_text())["rows"]
    assert row["letter"] == "A" and row["ms"] == 6.0


real = running.joined


def test_kernels_of_other_processes_are_a_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: str, machine: Machine) -> Row:
        return {"launched": {"theirs": {"a": "description"}}}

    def stamped(measure: Callable[..., Row], *given: Any) -> Row:
        return measure(*given) | {"of": {"kernels": ["ours"]}}

    monkeypatch.setattr(running, "stamped", stamped)
    (row,) = running.measured(measure, {"letter": "a"}, "a", Machine("cpu", 1))
    assert row == {"letter": "a", "of": {"kernels": ["ours", "theirs"]}} and "theirs" in identity.KERNELS


@pytest.mark.parametrize("name", NAMES)
def test_every_short_form_measures_its_cases(name: str, short_form: Callable[[str], Path]) -> None:
    if name == "integrations":
        pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
    bench, folder = bench_of(name), short_form(name)
    for job in running.options_of(bench, [*(["all"] if bench.goes_on else []), "--cpu"]).jobs:
        record = common.read_json(folder / f"{job.item.file or bench.name}.json")
        assert "failed" not in record and record["protocol"]
        rows = [row for row in running.rows_at(record, job.item) if running.is_of(row, job.item.key(job.case))]
        assert rows and not any(map(earlier, rows)), "rows of today's benchmark"


@pytest.mark.parametrize("name", [*NAMES, "products"])
def test_each_committed_row_is_of_one_case(name: str) -> None:
    """So that it is replaced, or kept by --resume. Items that share a part have other keys."""
    bench = bench_of(name)
    parts: dict[tuple[str, str], list[tuple[Item, Row]]] = {}
    for item in bench.items.values():
        keys = [(item, item.key(case)) for case in item.cases]
        parts.setdefault((item.file or bench.name, item.part), []).extend(keys)
    for (file, _), keys in parts.items():
        for path in common.RESULTS.parent.glob(f"h?00/{file}.json"):
            for row in running.rows_at(common.read_json(path), keys[0][0]):
                assert sum(running.is_of(row, key) for _, key in keys) == 1, path


RECORDED = re.findall(r"-m (scripts\.bench\.[^`]*)`", (common.REPOSITORY / "results" / "README.md").read_text())
RECORDED += [
    command.partition("-m scripts.")[2].replace("bench.", "scripts.bench.", 1)
    for step in gpu_check.STEPS.values()
    for command in (step.command, step.full)
    if "-m scripts.bench." in command
]


@pytest.mark.parametrize("command", sorted({*RECORDED}))
def test_commands_that_are_recorded_parse(command: str) -> None:
    name, *words = command.replace("NAME", "all").replace("FOLDER", "caches").split()
    name = name.removeprefix("scripts.bench.")
    if (common.REPOSITORY / "scripts" / "bench" / name).is_dir():
        name += ".__main__"
    module = importlib.import_module(f"scripts.bench.{name}")
    if hasattr(module, "BENCH"):
        assert running.options_of(module.BENCH, words).jobs
    else:
        assert name in ("cpu", "tuning", "plot_results")
