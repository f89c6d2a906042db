"""Bits: what the machine makes of twenty calls whose sums are exact is what an H200 made of them (exact_cases.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.lab.target import Machine
from blazeproto.runtime.target import launches_on
from tests.lab.machine.exact_cases import CASES, NUMPY, hash_of
from tests.lab.machine.trials import of_reports

HASHES = json.loads((Path(__file__).parent / "exact_cases.json").read_text())


# The full set alone has what differs from another in its numbers.
AGAIN = ("dense, elsewhere", "tiled", "tiled, one token", "tiled, 128 experts", "reglu", "relu again")
AGAIN += ("down backward again", "dW_down", "logits, two parts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in AGAIN else name for name in CASES]
)
def test_the_bits_are_those_of_a_gpu(name: str) -> None:
    machine = Machine(seed=list(CASES).index(name))
    with launches_on(machine):
        made = CASES[name](NUMPY)
    assert not of_reports(machine.reports)
    assert hash_of(made) == HASHES[name]


def test_one_wrong_bit_is_another_hash() -> None:
    with launches_on(Machine()):
        made = CASES["combine"](NUMPY)
    made["out"][7, 5] ^= 1
    assert hash_of(made) != HASHES["combine"]


def test_every_case_has_a_hash() -> None:
    assert CASES.keys() == HASHES.keys()
