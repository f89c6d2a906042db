"""The peaks that `scripts.bench.rank_memory` computes are those that were measured: up to 0.1 MiB less, and up to 1 MiB more,
since torch's allocator may give a block that is larger by that."""

import pytest

from blazeproto.gemm import Sizes
from scripts.bench import identity
from scripts.bench.common import RESULTS, read_json
from scripts.bench.expert_parallel import LAYERS
from scripts.bench.rank_memory import CAPACITY, peak_bytes

FILES = [file for gpu in ("h100", "h200") if (file := RESULTS.parent / gpu / "distributed.json").exists()]
ROWS = [
    row
    for file in FILES
    for row in read_json(file)["ep"]
    if row["dispatcher"] in ("symmetric", "capacity") and not identity.earlier(row)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['dispatcher']}-{Sizes(**row['cfg'])}-{row['gpus']}")
def test_computed_peaks_are_those_measured(row: dict) -> None:
    sizes = Sizes(**row["cfg"])
    bound = int(CAPACITY * sizes.rows) if row["dispatcher"] == "capacity" else None
    assert -0.1 <= row["peak_MiB"] - peak_bytes(sizes, row["gpus"], bound) / 2**20 <= 1
    if "alone_MiB" in row:
        assert peak_bytes(sizes, 1) / 2**20 == pytest.approx(row["alone_MiB"], abs=0.1)


def test_peaks_over_one_gpus() -> None:
    few, many = (LAYERS["qwen3"]._replace(T=tokens) for tokens in (8192, 65536))
    assert peak_bytes(few, 2) <= 1.3 * peak_bytes(few, 1) and peak_bytes(many, 2) <= 1.9 * peak_bytes(many, 1)
    assert peak_bytes(many, 2, int(CAPACITY * many.rows)) <= 1.3 * peak_bytes(many, 1)
