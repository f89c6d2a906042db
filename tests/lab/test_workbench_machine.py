"""The benches where there is no Hopper GPU: kernels run on the machine, as they are and edited."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from planted_bugs import BUGS, plant
from rich.console import Console

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm
from blazeproto.gemm.compile import CUDA_SOURCES
from blazeproto.gemm.tiles import E4M3
from blazeproto.lab import BlockWorkbench, Workbench, target
from blazeproto.lab.target import Machine
from tests.refusals import refuses

SMALL = {"T": 150, "d": 72, "n": 72, "E": 3, "K": 2, "device": "cpu"}
FP8 = {"T": 60, "d": 144, "n": 128, "E": 3, "K": 2, "precision": "fp8", "device": "cpu"}
BLOCKS = {"k": 136, "m": 72, "device": "cpu"}  # the second is less than a tile
QUANTIZED = [name for name, entry in gemm.PRODUCTS.items() if E4M3 in entry.elements]
BENCHES: dict[str, Callable[[], Workbench]] = {
    "up_forward": partial(Workbench, "up_forward", **SMALL),
    **{f"{name}, fp8": partial(Workbench, name, **FP8) for name in QUANTIZED},
    "up_forward, fp8_rollout": partial(Workbench, "up_forward", **FP8 | {"precision": "fp8_rollout", "d": 256}),
    **{name: partial(BlockWorkbench, name, **BLOCKS) for name in ("SDD", "DS^TD", "DDS")},
}


@pytest.mark.parametrize("runs", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", BENCHES)
def test_the_sources_are_right_and_have_no_race(name: str, runs: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the schedule: each run has one of its own."""
    bench = BENCHES[name]()
    assert bench.kernel.element is (E4M3 if "fp8" in name else gemm.tiles.BF16)
    verdict = bench.check(runs)
    assert verdict and verdict.on_machine and verdict.runs == runs and not (verdict.races or verdict.errors), verdict
    assert f"{bench.product} on the machine: about" in capsys.readouterr().err


WRONG = [
    ("up_fp8.cu", "up_forward", "return nonlinearity(gate).value *", "return 1.08f * nonlinearity(gate).value *"),
    ("fp8.cuh", "down_forward", "to = fmaf(acc[i], scale, to);", "to = fmaf(acc[i], i == 5 ? 0.0f : scale, to);"),
]


@pytest.mark.parametrize(("file", "product", "old", "new"), WRONG)
def test_an_edit_of_an_fp8_kernel_that_is_wrong_is_seen(
    file: str, product: str, old: str, new: str, tmp_path: Path
) -> None:
    bench = Workbench(product, **FP8)
    plant(bench.edit(tmp_path / "cuda"), [(file, old, new)])
    assert not bench.check() and new in bench.diff()


def test_a_planted_bug_is_shown_with_its_map(tmp_path: Path) -> None:
    bench = Workbench("up_forward", **SMALL)
    (bug,) = (bug for bug in BUGS if bug.name == "neighbouring rows exchanged")
    plant(bench.edit(tmp_path / "sources"), bug.edits)
    verdict = bench.check()
    assert not verdict and verdict.experts == [0, 1, 2] and {tile.output for tile in verdict.tiles} == {"h", "act"}
    assert "on the machine" in repr(verdict) and "expert x row tile x column tile" in repr(verdict)


def test_a_deadlock_is_an_error_of_its_seed_and_the_next_check_begins_anew(tmp_path: Path) -> None:
    bench = Workbench("up_forward", **SMALL)
    folder = bench.edit(tmp_path / "sources")
    plant(folder, [("varlen_m.cuh", "                cp_async_mbarrier_arrive(ring.full_barrier());\n", "")])
    verdict = bench.check(2)
    assert not verdict and not verdict.maps and len(verdict.errors) == 2
    assert verdict.errors[1].startswith("seed 1: ") and "nobody can go on" in repr(verdict)
    (folder / "varlen_m.cuh").write_text((CUDA_SOURCES / "varlen_m.cuh").read_text())
    assert bench.check()


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
    assert Workbench("combine", **SMALL).check(2) and "combine, seed 1: CTAs" in drawn.getvalue()


def test_jupyter_has_a_percentage_of_a_slow_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "Console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(target, "SLOW", 0)
    assert Workbench("combine", **SMALL).check() and "\rcombine, seed 0: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(("product", "steps"), [("up_forward", 143_067), ("down_forward", 36_004), ("combine", 22_592)])
def test_the_estimate_is_that_of_the_steps_within_a_factor_of_two_and_a_half(product: str, steps: int) -> None:
    bench = Workbench(product, T=256, d=256, n=256, E=4, K=2, device="cpu")
    assert 0.4 < bench._attended(1).steps / steps < 2.5


def test_a_smaller_size_is_offered_where_a_run_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    for tokens, offered in ((100, False), (4096, True)):
        Workbench("up_forward", T=tokens, d=256, n=256, E=4)._attended(1)
        assert ("T=100, d=256, n=256, E=4 take" in capsys.readouterr().err) == offered


@pytest.mark.parametrize(
    ("bench", "load", "store"),
    [
        (partial(Workbench, "up_forward", **SMALL), "copy", "store"),
        (partial(Workbench, "up_forward", **FP8), "copy", "hand-over"),
        (partial(Workbench, "up_backward_weight", **SMALL), "copy", "hand-over"),
        (partial(BlockWorkbench, "DSD", **BLOCKS), "TMA", "store"),
    ],
    ids=["bf16", "fp8", "weight gradient", "blocks"],
)
def test_a_timeline_in_steps(bench: Callable[[], Workbench], load: str, store: str) -> None:
    """In the order in which data goes, whatever the schedule."""
    picture = bench().timeline(tiles=2)
    assert picture.unit == "steps" and {"producer", "consumer 0", "consumer 1"} <= set(picture.warps.values())
    first = {what: min(s.end for s in picture.spans if s.what == what) for what in (load, "mma", store)}
    assert first[load] < first["mma"] < first[store]
    for warp in picture.warps:  # all that it does lies in its role
        role, *others = (span for span in picture.spans if span.warp == warp)
        assert all(role.begin <= span.begin and span.end <= role.end for span in others)


def test_bad_input() -> None:
    refuses(lambda: Workbench("combine", **SMALL).check(0), "runs")
    refuses(lambda: Workbench("combine", **FP8), "precision")
    refuses(lambda: Workbench("up_forward", **FP8 | {"n": 64}), "n")
    refuses(lambda: Workbench("up_forward", **FP8 | {"d": 136}), "d")
    with pytest.raises(RuntimeError, match="time: expected a GPU"):
        Workbench("up_forward", **FP8).time()
    with pytest.raises(RuntimeError, match="CTA 99 recorded nothing"):
        Workbench("up_forward", **SMALL).timeline(cta=99)
