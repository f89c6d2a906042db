"""The workbench where there is no Hopper GPU: kernels run on the machine, as they are and edited."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from planted_bugs import BUGS, plant
from rich.console import Console

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.lab import Workbench, target, workbench
from blazeproto.lab.target import Machine

NAMED = {bug.name: bug for bug in BUGS}
SMALL = {"T": 150, "d": 72, "n": 72, "E": 3, "K": 2}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "_runs_kernels", lambda: False)


def test_the_up_projection_is_right_and_has_no_race(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Workbench("up_forward", T=256, d=256, n=256, E=4, K=2)
    _ = bench.kernel  # compiling is no part of it
    began = time.process_time()
    verdict = bench.check()
    assert time.process_time() - began < 20  # 8 to 13 alone on one core, by machine
    assert verdict and verdict.on_machine and verdict.runs == 1 and not (verdict.races or verdict.errors)
    assert repr(verdict).startswith("up_forward: right, in 1 run on poisoned outputs, on the machine, seed 0")
    assert "up_forward on the machine: about" in capsys.readouterr().err


def edited(tmp_path: Path, *edits: tuple[str, str, str], product: str = "up_forward") -> Workbench:
    bench = Workbench(product, **SMALL)
    folder = bench.edit(tmp_path / "sources")
    for file, old, new in edits:
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file}: {old!r} stands {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new))
    return bench


def test_a_planted_bug_is_shown_with_its_map(tmp_path: Path) -> None:
    bench = edited(tmp_path)
    assert bench.check(), "the sources as they were"
    plant(bench.edited.folder, NAMED["neighbouring rows exchanged"])
    verdict = bench.check()
    assert not verdict and verdict.experts == [0, 1, 2] and {tile.output for tile in verdict.tiles} == {"h", "act"}
    text = repr(verdict)
    assert "WRONG (1 run on poisoned outputs, on the machine" in text and "expert x row tile x column tile" in text


def test_a_planted_race_is_reported_with_its_lines(tmp_path: Path) -> None:
    bench = edited(tmp_path, *NAMED["a stage is said to be full before the rows are copied: a race"].edits)
    verdict = bench.check(2)
    assert not verdict and verdict.races, verdict
    assert any("cp.async" in race and "wgmma" in race for race in verdict.races), verdict.races
    assert f"{len(verdict.races)} race" in verdict.summary and verdict.races[0].splitlines()[1] in repr(verdict)


def test_a_deadlock_is_an_error_of_its_seed_and_the_next_check_begins_anew(tmp_path: Path) -> None:
    arrive = "                cp_async_mbarrier_arrive(ring.full_barrier());\n"
    bench = edited(tmp_path, ("varlen_m.cuh", arrive, ""))
    verdict = bench.check(2)
    assert not verdict and not verdict.maps and len(verdict.errors) == 2
    assert (
        verdict.errors[1].startswith("seed 1: ")
        and "nobody can go on" in repr(verdict)
        and "2 machine errors" in repr(verdict)
    )
    path = bench.edited.folder / "varlen_m.cuh"
    path.write_text((Path(workbench.product.__file__).parent / "cuda" / path.name).read_text())
    assert bench.check()


def test_outputs_of_one_run() -> None:
    made = Workbench("combine", **SMALL).run()
    assert {name: tuple(value.shape) for name, value in made.items()} == {"out": (150, 72)}


def test_ctrl_c_ends_a_check_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, run = Workbench("combine", **SMALL), target.launch

    def interrupted(machine: Machine, *rest: object, **arguments: object) -> None:
        def progress(done: int, count: int) -> None:
            raise KeyboardInterrupt

        machine.progress = progress
        run(machine, *rest, **arguments)

    monkeypatch.setattr(target, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"combine, seed 0: stopped at \d+ %"):
        bench.check()
    monkeypatch.setattr(target, "launch", run)
    assert bench.check()


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(target, "Console", lambda stderr: Console(file=drawn, force_terminal=True, width=100))
    assert Workbench("combine", **SMALL).check(2)
    assert "combine, seed 1: CTAs" in drawn.getvalue() and "2 runs; Ctrl-C ends it" in drawn.getvalue()


def test_jupyter_has_a_percentage_of_a_slow_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "Console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(target, "SLOW", 0)
    assert Workbench("combine", **SMALL).check()
    assert "\rcombine, seed 0: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(("product", "steps"), [("up_forward", 143_067), ("down_forward", 36_004), ("combine", 22_592)])
def test_the_estimate_is_that_of_the_steps_within_a_factor_of_two(product: str, steps: int) -> None:
    bench = Workbench(product, T=256, d=256, n=256, E=4, K=2)
    assert 0.5 < bench._attended(1).steps / steps < 2


def test_a_smaller_size_is_offered_where_a_run_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    for tokens, offered in ((100, False), (4096, True)):
        Workbench("up_forward", T=tokens, d=256, n=256, E=4)._attended(1)
        assert ("T=100, d=256, n=256, E=4 take" in capsys.readouterr().err) == offered


def test_a_timeline_in_steps() -> None:
    bench = Workbench("up_forward", **SMALL)
    picture = bench.timeline(tiles=2)
    assert picture.unit == "steps" and picture.kernel == "up_forward" and "steps; |" in repr(picture)
    assert {"producer", "consumer 0", "consumer 1"} <= set(picture.warps.values())
    first = {what: min(s.end for s in picture.spans if s.what == what) for what in ("copy", "mma", "store")}
    assert first["copy"] < first["mma"] < first["store"]  # the order in which data goes, whatever the schedule
    with pytest.raises(RuntimeError, match="CTA 99 recorded nothing"):
        bench.timeline(cta=99)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="runs: expected at least 1, got 0"):
        Workbench("combine", **SMALL).check(0)
