"""The peaks that `scripts.bench.rank_memory` computes are those that were measured, within 0.1 MiB."""

import json

import pytest

from blazeproto.gemm import Sizes
from scripts.bench.common import RESULTS
from scripts.bench.expert_parallel import LAYERS
from scripts.bench.rank_memory import CAPACITY, peak_bytes

FILES = [file for gpu in ("h100", "h200") if (file := RESULTS.parent / gpu / "distributed.json").exists()]
ROWS = [
    row
    for file in FILES
    for row in json.loads(file.read_text())["ep"]
    if row["dispatcher"] in ("symmetric", "capacity")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['dispatcher']}-{Sizes(**row['cfg'])}-{row['gpus']}")
def test_computed_peaks_are_those_measured(row: dict) -> None:
    sizes = Sizes(**row["cfg"])
    bound = int(CAPACITY * sizes.rows) if row["dispatcher"] == "capacity" else None
    assert peak_bytes(sizes, row["gpus"], bound) / 2**20 == pytest.approx(row["peak_MiB"], abs=0.1)
    if "alone_MiB" in row:
        assert peak_bytes(sizes, 1) / 2**20 == pytest.approx(row["alone_MiB"], abs=0.1)


def test_peaks_over_one_gpus() -> None:
    few, many = (LAYERS["qwen3"]._replace(T=tokens) for tokens in (8192, 65536))
    assert peak_bytes(few, 2) <= 1.3 * peak_bytes(few, 1)
    assert peak_bytes(many, 2) <= 1.9 * peak_bytes(many, 1)
    assert peak_bytes(many, 2, int(CAPACITY * many.rows)) <= 1.3 * peak_bytes(many, 1)


@pytest.mark.parametrize("ranks", [4, 8])
def test_room_for_all_tokens_grows_with_the_ranks_and_a_capacity_does_not(ranks: int) -> None:
    """A rank that is added brings all its rows; with a capacity its tokens and lists alone."""
    sizes = LAYERS["mixtral"]._replace(T=65536)
    more = [
        peak_bytes(sizes, ranks, most) - peak_bytes(sizes, ranks // 2, most)
        for most in (None, int(CAPACITY * sizes.rows))
    ]
    added, weights = ranks // 2, 3 * 2 * sizes.n * sizes.d * sizes.E * (1 / ranks - 2 / ranks)
    of_rows = 6 * sizes.n * sizes.rows * added  # H and act
    assert more[0] > of_rows + weights
    assert more[1] < 2 * 2 * sizes.T * sizes.d * added + 40 * sizes.rows * added + weights / 2
