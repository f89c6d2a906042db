"""The program's cases and its judgement; layers run on a GPU (tests/properties/test_batch_gpu.py)."""

import json
from pathlib import Path

import pytest
import torch

from blazeproto.gemm import logits
from scripts.checks import batch_invariance
from scripts.checks.batch_invariance import EXPERTS, WAYS, WIDTHS, Case, batches, differing

CASES = [Case.drawn(seed) for seed in range(500)]


def test_500_cases_draw_every_width_and_number_of_experts() -> None:
    assert {(case.d, case.E) for case in CASES} == {(d, E) for d in WIDTHS for E in EXPERTS}
    assert {case.T % 2 for case in CASES} == {0, 1} and any(case.T == 1 for case in CASES)
    assert {case.elsewhere for case in CASES} == {case.f32_router for case in CASES} == {True, False}


@pytest.mark.parametrize("case", CASES[:20], ids=lambda case: str(case.seed))
def test_batches_have_every_token_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    parts = [(places.tolist(), way) for places, way in batches(case, list(WAYS))]
    assert sorted(place for places, _ in parts for place in places) == list(range(case.T))
    assert all(places for places, _ in parts) and {way for _, way in parts} <= {*WAYS}


def test_one_bit_of_one_token_differs() -> None:
    whole = {"out": torch.randn(6, 4), "ids": torch.arange(12).view(6, 2)}
    places = torch.tensor([4, 0, 2])
    part = {name: value[places].clone() for name, value in whole.items()}
    assert differing(whole, part, places) == {"out": 0, "ids": 0}
    part["out"][1, 3] = part["out"][1, 3].nextafter(torch.tensor(9.0))
    part["ids"][2] = 7
    assert differing(whole, part, places) == {"out": 1, "ids": 1}
    part["out"][0] = torch.nan
    assert differing(whole, part, places)["out"] == 2


def test_a_program_that_runs_fewer_cases_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(batch_invariance, "need_kernels", asked.append)
    monkeypatch.setattr(batch_invariance, "run_case", lambda case, chosen, ways, backend: asked.append(backend) or [])
    for words, code in ((["--cases", "3"], 0), (["--cases", "3", "--seconds", "-1"], 1)):
        monkeypatch.setattr("sys.argv", ["batch_invariance", *words])
        assert batch_invariance.main() == code
    monkeypatch.setattr(
        "sys.argv", ["batch_invariance", "--cases", "2", "--backend", "ampere", "--out", str(tmp_path / "a.json")]
    )
    assert batch_invariance.main() == 0 and asked == ["hopper"] * 5 + ["ampere"] * 3
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["of"]["kernels"] == [] and record["seeds"] == [0, 1] and record["differing"] == []


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "width"),
    [
        (32768, 128, 2, 256),
        (16384, 512, 2, 256),
        (32768, 64, 2, 128),
        (32768, 8, 2, 64),
        (1, 512, 2, 64),
        (9000, 128, 1, 64),
    ],
)
def test_tiles_of_logits_are_as_wide_as_fills_the_gpu(rows: int, columns: int, parts: int, width: int) -> None:
    assert logits.width_for(rows, columns, parts, multiprocessors=132) == width
