"""The ladder's kernels are right on the machine and on a GPU, their faults and wrong solutions are found."""

from pathlib import Path

import pytest
import rung as ladder
from blanks import BLANKS, fill
from faults import FAULTS, faulty
from rungs import RUNGS, Grouped
from wrong_blanks import WRONG

SOLUTIONS = ladder.FOLDER / "solutions"
SLOW = {"tma"}  # seconds
FILES = sorted(ladder.FOLDER.glob("*.cu"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in RUNGS]
)
def test_a_rung_is_right_on_the_machine(name: str) -> None:
    verdict = RUNGS[name].check(device="cpu")
    assert verdict and verdict.on_machine, repr(verdict)


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_a_rung_is_right_with_other_schedules_and_compiles_without_spills(name: str) -> None:
    verdict = RUNGS[name].check(runs=3, device="cpu")
    assert verdict, repr(verdict)
    assert RUNGS[name].kernel.spills == 0


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_ring_is_right_with_fewer_steps_than_stages(steps: int) -> None:
    verdict = RUNGS["ring"].check(128, 128, 64 * steps, device="cpu")
    assert verdict, repr(verdict)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tma", "specialised"])
@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_rings_are_right_with_any_number_of_steps(name: str, steps: int) -> None:
    verdict = RUNGS[name].check(256, 256, 64 * steps, device="cpu")
    assert verdict, repr(verdict)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        (200, 320, 136, 3, 2),  # a second column block of 8 units
        (40, 64, 128, 8, 1),  # few rows each, one stage a tile
        (3, 128, 64, 9, 2),  # experts without a row
        (300, 192, 132, 2, 2),  # every expert has every token
    ],
)
def test_grouped_rows_are_right_whatever_an_expert_has(sizes: tuple[int, ...]) -> None:
    verdict = RUNGS["grouped"].check(*sizes, runs=2, device="cpu")
    assert verdict, repr(verdict)


def test_rows_of_a_rung_are_an_experts() -> None:
    pairs, offsets = Grouped.routed(200, 3, 2)
    assert sorted(pairs.tolist()) == [*range(400)] and offsets.tolist()[::3] == [0, 400]
    rung = RUNGS["grouped"]
    places = rung.places(rung.operands(rung.sizes, "cpu"), "act")
    assert places.expert.tolist() == sorted(places.expert.tolist()) and int(places.inside.max()) < max(offsets.diff())
    assert rung.work(rung.timed)[0] == 12 * RUNGS["specialised"].work((4096, 4096, 4096))[0]
    assert int(sum(-(-offsets.diff() // 128))) <= rung.tiles((200, 320, 72, 3, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", ["tma", "specialised", "grouped"])
def test_consumers_start_with_the_registers_that_setmaxnreg_shares_out(name: str) -> None:
    kernel = RUNGS[name].kernel
    assert kernel.spills == 0 and "serialized" not in kernel.log
    assert kernel.registers == 168 or name == "tma"


def test_files_are_short() -> None:
    assert {path.name for path in FILES} == {rung.file for rung in RUNGS.values()}
    assert not [path.name for path in FILES if len(path.read_text().splitlines()) > 120]


def test_each_file_has_a_fault_and_an_exercise_with_wrong_solutions() -> None:
    files = {path.name for path in FILES}
    assert {RUNGS[name].file for name in FAULTS} == {RUNGS[blank.rung].file for blank in BLANKS.values()} == files
    assert {path.stem for path in SOLUTIONS.iterdir()} == BLANKS.keys() == WRONG.keys()
    assert all(len(those) >= 3 for those in WRONG.values())


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    verdict = faulty(name).check()
    assert not verdict and verdict.on_machine
    assert verdict.maps or verdict.races or verdict.errors


@pytest.mark.full
def test_faults_are_reported_where_they_are() -> None:
    for name, line in (("tiles", "st.shared"), ("ring", "cp.async.cg"), ("specialised", "wgmma"), ("grouped", "wgmma")):
        assert any(line in race for race in faulty(name).check().races), name
    (error,) = faulty("tma").check().errors
    assert "-32768 bytes missing" in error


@pytest.mark.full
@pytest.mark.parametrize("name", BLANKS)
def test_solutions_are_right(name: str) -> None:
    verdict = fill(name, (SOLUTIONS / f"{name}.cu").read_text())
    assert verdict, repr(verdict)


@pytest.mark.full
@pytest.mark.parametrize(("name", "what"), [(name, what) for name, those in WRONG.items() for what in those])
def test_wrong_solutions_are_found(name: str, what: str) -> None:
    assert not fill(name, WRONG[name][what])


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_right_on_a_gpu(name: str) -> None:
    verdict = RUNGS[name].check(device="cuda")
    assert verdict and not verdict.on_machine, repr(verdict)


# --- rung.py ---------------------------------------------------------------------------------------------------------------


def test_an_edited_rung_is_compiled_from_its_own_source() -> None:
    rung, line = RUNGS["threads"], "    float sum = 0.0f;\n"
    verdict = rung.edited({line: "    float sum = 1.0f;\n"}).check()
    assert not verdict and verdict.maps["c"][0].sign in "x#"
    assert Path(rung.file).name == "1-threads.cu" and line in rung.source


@pytest.mark.parametrize("text", ["no such text", "float"])
def test_an_edit_replaces_a_text_that_stands_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"replacements: expected a text that 1-threads\.cu has once"):
        RUNGS["threads"].edited({text: ""})


def test_an_error_of_the_machine_is_in_the_verdict() -> None:
    verdict = RUNGS["threads"].edited({"k < p.k; ++k": "k <= p.k; ++k"}).check()
    assert not verdict and "out of bounds" in verdict.errors[0] and "1-threads.cu:" in verdict.errors[0]


def test_times_without_a_gpu_are_stored_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladder.Rung, "on_gpu", False)
    monkeypatch.setattr(ladder, "RESULTS", tmp_path / "ladder.json")
    ring = RUNGS["ring"]
    assert repr(ring.time()) == "ring: not measured yet"
    (tmp_path / "ladder.json").write_text(
        '{"rows": [{"entry": "ring", "ms": 0.5, "tflops": 274.9, "of": {"gpu": "G", "measured": "today"}}]}'
    )
    assert repr(ring.time()) == "ring: 0.500 ms, 274.9 TFLOP/s (G; today)"
    assert ring.edited({"STAGES = 3": "STAGES = 4"}).time().ms is None


def test_the_floor_is_of_the_operations() -> None:
    assert RUNGS["ring"].floor() == pytest.approx(2e3 * 4096**3 / 785e12)


def test_a_picture_has_a_line_for_each_warp() -> None:
    picture = RUNGS["tiles"].picture(64, 64, 32)
    assert [*picture.warps] == [*range(8)] and {"mma", "copy", "hand-over", "store"} <= {s.what for s in picture.spans}
    assert "multiplies" in repr(picture) and "<svg" in picture.svg()
